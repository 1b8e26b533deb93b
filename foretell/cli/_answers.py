"""How the commands show answers: coloured by who proposed each token, and their numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

if TYPE_CHECKING:
    from foretell.api import Piece
    from foretell.stats import Stats

COLOURS = ("green", "cyan", "magenta", "yellow", "blue", "red")  # of drafters, as they appear


def coloured(piece: Piece, styles: dict[str, str]) -> Text:
    """The text of a piece; a drafter that is new gets the next colour in `styles`."""
    text = Text()
    shown = 0
    for part, source in zip(piece.parts, piece.draft, strict=True):
        if source != "target" and source not in styles:
            styles[source] = COLOURS[len(styles) % len(COLOURS)]
        text.append(part, styles.get(source))
        shown += len(part)
    return text.append(piece.text[shown:])


def stats_line(stats: Stats, method: str) -> str:
    """The numbers of one answer."""
    return (
        f"{method}: {stats.tokens} tokens, {stats.tokens_per_s:.1f} tokens/s, "
        f"MAT {stats.mat:.2f}, {stats.steps} steps, "
        f"{stats.accepted} of {stats.drafted} drafted accepted, "
        f"first token after {1000 * stats.ttft_s:.0f} ms"
    )
