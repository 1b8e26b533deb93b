"""Pieces of HTML that the pages are made of. Every text is escaped here or where it is put in."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from foretell.bench.report.style import SERIES, STYLE


def render_page(title: str, document: dict[str, Any], parts: Sequence[str]) -> str:
    """A whole page: no script, nothing fetched. The empty ones of `parts` are left out."""
    models = escape(", ".join(document["settings"]["models"]))
    head_element = (
        '<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}: {models}</title><style>{STYLE}</style></head>"
    )
    page_parts = [
        "<!DOCTYPE html>",
        head_element,
        f"<body><main><h1>{title}</h1>",
        f'<p class="soft">{escape(_describe_machine(document))}</p>',
        *parts,
        "</main></body></html>",
    ]
    return "\n".join(part for part in page_parts if part) + "\n"


def _describe_machine(document: dict[str, Any]) -> str:
    """On what was measured, with what, and when."""
    machine = document["machine"]
    versions = document["versions"]
    memory = "memory not measured"
    if bandwidth := document["bandwidth"]:
        memory = f"{bandwidth['bytes_per_s'] / 1e9:.0f} GB/s read from memory"
    threads = format_count(machine["threads"], "thread")
    return (
        f"{machine['processor']} ({machine['cores']} cores), {threads}, {memory} · "
        f"foretell {document['version']}, torch {versions['torch']}, "
        f"transformers {versions['transformers']} · {document['date']}"
    )


def render_section(title: str, explanation: str, *contents: str) -> str:
    """A card with a heading and a line below it; `contents` is HTML."""
    heading = f"<h2>{escape(title)}</h2>"
    return (
        f'<section>{heading}<p class="soft">{escape(explanation)}</p>{"".join(contents)}</section>'
    )


def render_tiles(pairs: Sequence[tuple[str, str]]) -> str:
    """Large figures with a line below each."""
    tile_elements = ""
    for figure, caption in pairs:
        tile_elements += f'<div class="tile"><b>{escape(figure)}</b>'
        tile_elements += f'<span class="soft">{escape(caption)}</span></div>'
    return f'<div class="tiles">{tile_elements}</div>' if tile_elements else ""


def render_table(column_heads: Sequence[str], rows: Sequence[str]) -> str:
    """A table. `column_heads`: texts; `rows`: HTML of whole cells."""
    columns = "".join(f"<th>{escape(name)}</th>" for name in column_heads)
    table_body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f"<table><thead><tr>{columns}</tr></thead><tbody>{table_body}</tbody></table>"


def name_cell(name: str, colour: str) -> str:
    """The first cell of a contender's row."""
    return f'<td><span class="dot" style="background:{colour}"></span>{escape(name)}</td>'


def render_list(texts: Sequence[str], style_class: str = "") -> str:
    """A list; `style_class`: a class of the style sheet."""
    opening_tag = f'<li class="{style_class}">' if style_class else "<li>"
    return "<ul>" + "".join(f"{opening_tag}{escape(text)}</li>" for text in texts) + "</ul>"


def format_count(number: int, noun: str) -> str:
    """`1 round`, `2 rounds`."""
    return f"{number} {noun}{'s' * (number != 1)}"


def format_percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"


def assign_colours(names: Sequence[str]) -> dict[str, str]:
    """A colour for each name: those of the style sheet, then the same ones paler."""
    return {name: colour_at(colour_index) for colour_index, name in enumerate(names)}


def colour_at(colour_index: int) -> str:
    """Returns the colour of this index."""
    base_colour = f"var(--s{colour_index % SERIES})"
    if colour_index < SERIES:
        return base_colour
    percent_strength = max(30, 70 - 20 * (colour_index // SERIES))
    return f"color-mix(in srgb, {base_colour} {percent_strength}%, var(--card))"
