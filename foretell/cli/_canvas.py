"""A canvas on a terminal while it is filled: after the final text what is there for now."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.live import Live
from rich.text import Text

from foretell.cli._answers import colour_piece, harmless_text

if TYPE_CHECKING:
    from rich.console import Console

    from foretell.api.outputs import Piece

MASK = "\u2592"  # a position that is not filled
FRESH, STANDING, OPEN = "bold", "", "dim"  # filled by the last step, by one before it, not filled


class Canvas:
    """A text, and after it what stands on the canvas for now."""

    def __init__(self, prompt: Text, decode: Callable[[Sequence[int]], str]):
        self.text = prompt
        self.decode = decode
        self.final = 0  # tokens that the text has
        self.cells: list[int | None] = []  # of all positions
        self.fresh: set[int] = set()  # filled by the last step

    def take(self, piece: Piece) -> None:
        self.text.append_text(colour_piece(piece, {}))
        self.final += len(piece.tokens)
        if piece.length is None:
            return
        lacking = piece.length - len(self.cells)
        self.cells = [*self.cells[: piece.length], *[None] * lacking]
        self.cells_changed(piece.placed)

    def cells_changed(self, placed_tokens: Sequence[tuple[int, int | None]]) -> None:
        for cell_number, token in placed_tokens:
            self.cells[cell_number] = token
        self.fresh = {cell_number for cell_number, token in placed_tokens if token is not None}

    def __rich__(self) -> Text:
        full_text = self.text.copy()
        for cell_number in range(self.final, len(self.cells)):
            token = self.cells[cell_number]
            if token is None:
                full_text.append(MASK, OPEN)
            else:
                cell_text = harmless_text(self.decode([token])).replace("\n", "\u21b5")
                full_text.append(cell_text, FRESH if cell_number in self.fresh else STANDING)
        return full_text


def show_canvas(
    prompt: Text, pieces: Iterator[Piece], decode: Callable[[Sequence[int]], str], console: Console
) -> Piece | None:
    """Shows an answer after its prompt while its canvas fills, and then as any other. Returns its
    last piece.
    """
    canvas = Canvas(prompt, decode)
    piece = None
    try:
        with Live(canvas, console=console, transient=True, auto_refresh=False) as live_canvas:
            for piece in pieces:
                canvas.take(piece)
                live_canvas.refresh()
    finally:
        console.print(canvas.text)
    return piece
