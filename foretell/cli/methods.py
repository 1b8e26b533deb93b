"""`foretell methods`: lists the methods, or shows the card of one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

import foretell
from foretell.cli._options import Json
from foretell.cli._output import emit_json, show
from foretell.registry import FOLDERS, TITLES

if TYPE_CHECKING:
    from foretell.cards import Card


def methods(
    name: Annotated[
        str | None, typer.Argument(help="Show only this method, with all that its card says.")
    ] = None,
    as_json: Json = False,
) -> int:
    """List the methods, or show the card of one."""
    from foretell.cards import card
    from foretell.registry import BESIDE, method_names

    # Beside the methods, what goes with any of them and is no rule of verification.
    companion_cards = [
        card(listed_card, kind)
        for kind in BESIDE
        if kind != "rule"
        for listed_card in method_names(kind)
    ]
    cards = [*foretell.methods(), *companion_cards]
    if name is not None:
        cards = [listed_card for listed_card in companion_cards if listed_card.name == name] or [
            card(name)
        ]
    if as_json:
        emit_json({"schema": "foretell.methods/1", "methods": [_card_document(c) for c in cards]})
    elif name is not None:
        _print_card(cards[0])
    else:
        _print_list(cards)
    return 0


def _print_list(cards: Sequence[Card]) -> None:
    """Prints one line a method, below the kind that it is of."""
    width = max(len(method.name) for method in cards)
    for kind in FOLDERS:
        members = [method for method in cards if method.kind == kind]
        if members:
            show(Text(f"\n{TITLES[kind]}", "bold"))
        for method in members:
            claim = method.guarantee.partition(":")[0]
            show(
                f"  {method.name:{width}}  {claim:7}  {method.summary}",
                soft_wrap=True,
                markup=False,
            )


def _card_document(card: Card) -> dict[str, Any]:
    document = {field.name: getattr(card, field.name) for field in dataclasses.fields(card)}
    return document | {"file": str(card.file)}


def _print_card(card: Card) -> None:
    show(Text(card.name, "bold"), f"({card.kind})", card.summary, soft_wrap=True, markup=False)
    if card.prose:
        show(f"\n{card.prose}\n", soft_wrap=True, markup=False)
    fields = [f"{name}={value}" for name, value in card.defaults.items()]
    labels = {
        "guarantee": card.guarantee,
        "paper": card.paper,
        "cost": card.cost,
        "needs": card.needs,
        "trains": card.trains,
        "differs": "\n  ".join(["", *card.differs]),
        "fields": ", ".join(fields) or "none",
        "file": str(card.file),
    }
    for label, text in labels.items():
        space = "" if text.startswith("\n") else " "
        show(Text(f"{label}:{space}", "bold"), text, sep="", soft_wrap=True, markup=False)
