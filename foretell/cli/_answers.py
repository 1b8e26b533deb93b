"""How the commands show answers: coloured by who proposed each token, and their numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

if TYPE_CHECKING:
    from foretell.api.outputs import Piece
    from foretell.core.stats import Stats

COLOURS = ("green", "cyan", "magenta", "yellow", "blue", "red")  # of drafters, as they appear


def colour_piece(piece: Piece, styles: dict[str, str]) -> Text:
    """The text of a piece; a drafter that is new gets the next colour in `styles`.

    Escape characters become visible ones: a model must not command the terminal.
    """
    text = Text()
    shown_length = 0
    for part, source in zip(piece.parts, piece.draft, strict=True):
        if source != "target" and source not in styles:
            styles[source] = COLOURS[len(styles) % len(COLOURS)]
        text.append(harmless_text(part), styles.get(source))
        shown_length += len(part)
    return text.append(harmless_text(piece.text[shown_length:]))


def harmless_text(text: str) -> str:
    """A text that commands no terminal."""
    return text.replace("\x1b", "\u241b").replace("\x9b", "\u241b")


def stats_line(stats: Stats, method: str, fills: bool = False) -> str:
    """The numbers of one answer; `fills`: on a canvas, which has forwards of many rows in place of
    drafts.
    """
    if fills:
        return (
            f"{method}: {stats.tokens} tokens, {stats.tokens / max(stats.total_s, 1e-9):.1f} "
            f"tokens/s, {stats.calls.get('target', 0)} forwards of "
            f"{stats.rows.get('target', 0):,} rows together"
        )
    return (
        f"{method}: {stats.tokens} tokens, {stats.tokens_per_s:.1f} tokens/s, "
        f"MAT {stats.mat:.2f}, {stats.steps} steps, "
        f"{stats.accepted} of {stats.drafted} drafted accepted, "
        f"first token after {1000 * stats.ttft_s:.0f} ms"
    )
