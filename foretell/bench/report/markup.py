"""Pieces of HTML that the pages are made of. Every text is escaped here or where it is put in."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from foretell.bench.report.style import SERIES, STYLE


def page(title: str, document: dict[str, Any], parts: Sequence[str]) -> str:
    """A whole page: no script, nothing fetched. The empty ones of `parts` are left out."""
    models = escape(", ".join(document["settings"]["models"]))
    head = (
        '<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}: {models}</title><style>{STYLE}</style></head>"
    )
    whole = [
        "<!DOCTYPE html>",
        head,
        f"<body><main><h1>{title}</h1>",
        f'<p class="soft">{escape(_machine(document))}</p>',
        *parts,
        "</main></body></html>",
    ]
    return "\n".join(part for part in whole if part) + "\n"


def _machine(document: dict[str, Any]) -> str:
    """On what was measured, with what, and when."""
    machine = document["machine"]
    versions = document["versions"]
    memory = "memory not measured"
    if bandwidth := document["bandwidth"]:
        memory = f"{bandwidth['bytes_per_s'] / 1e9:.0f} GB/s read from memory"
    threads = count(machine["threads"], "thread")
    return (
        f"{machine['processor']} ({machine['cores']} cores), {threads}, {memory} · "
        f"foretell {document['version']}, torch {versions['torch']}, "
        f"transformers {versions['transformers']} · {document['date']}"
    )


def section(title: str, why: str, *inside: str) -> str:
    """A card with a heading and a line below it; `inside` is HTML."""
    heading = f"<h2>{escape(title)}</h2>"
    return f'<section>{heading}<p class="soft">{escape(why)}</p>{"".join(inside)}</section>'


def tiles(pairs: Sequence[tuple[str, str]]) -> str:
    """Large figures with a line below each."""
    inside = ""
    for figure, line in pairs:
        inside += f'<div class="tile"><b>{escape(figure)}</b>'
        inside += f'<span class="soft">{escape(line)}</span></div>'
    return f'<div class="tiles">{inside}</div>' if inside else ""


def table(head: Sequence[str], rows: Sequence[str]) -> str:
    """A table. `head`: texts; `rows`: HTML of whole cells."""
    columns = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f"<table><thead><tr>{columns}</tr></thead><tbody>{body}</tbody></table>"


def name_cell(name: str, colour: str) -> str:
    """The first cell of a contender's row."""
    return f'<td><span class="dot" style="background:{colour}"></span>{escape(name)}</td>'


def items(texts: Sequence[str], kind: str = "") -> str:
    """A list; `kind`: a class of the style sheet."""
    opening = f'<li class="{kind}">' if kind else "<li>"
    return "<ul>" + "".join(f"{opening}{escape(text)}</li>" for text in texts) + "</ul>"


def count(number: int, what: str) -> str:
    """`1 round`, `2 rounds`."""
    return f"{number} {what}{'s' * (number != 1)}"


def percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"


def colours(names: Sequence[str]) -> dict[str, str]:
    """A colour for each name: those of the style sheet, then the same ones paler."""
    return {name: shade(i) for i, name in enumerate(names)}


def shade(i: int) -> str:
    """The i-th colour."""
    own = f"var(--s{i % SERIES})"
    if i < SERIES:
        return own
    strength = max(30, 70 - 20 * (i // SERIES))
    return f"color-mix(in srgb, {own} {strength}%, var(--card))"
