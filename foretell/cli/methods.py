"""`foretell methods`: lists the methods, or shows the card of one."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

import foretell
from foretell.cli._options import Json
from foretell.cli._output import emit_json, show, table

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
    from foretell.registry import BESIDE, names

    # Beside the methods, what goes with any of them and is no rule of verification.
    others = [card(one, kind) for kind in BESIDE if kind != "rule" for one in names(kind)]
    cards = [*foretell.methods(), *others]
    if name is not None:
        cards = [one for one in others if one.name == name] or [card(name)]
    if as_json:
        emit_json({"schema": "foretell.methods/1", "methods": [_document(c) for c in cards]})
    elif name is not None:
        _print_card(cards[0])
    else:
        rows = table("method", "kind", "guarantee", "what it does")
        for one in cards:
            rows.add_row(Text(one.name, "bold"), one.kind, one.guarantee, one.summary)
        show(rows)
    return 0


def _document(card: Card) -> dict[str, Any]:
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
