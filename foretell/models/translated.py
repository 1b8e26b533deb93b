"""A request's text in the tokens of another model, on a branch of its own.

The branch holds all but the last tokens of that text. How these are divided may change with what
follows, so they are asked about as the first nodes of every tree, which are no one's for good.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from foretell.core.tokenizer_bytes import continuation, whole_characters, words_of
from foretell.core.tree import TokenTree
from foretell.core.types import Commit, Message, Open

if TYPE_CHECKING:
    from foretell.core.context import Context

WINDOW = 10  # tokens that are divided anew with what follows them


class Translated:
    """One request's. `ours` are the target's words, `theirs` the other model's; `ids` the text in
    their tokens, and `pending` its last bytes, which these lack: a character that is not whole.

    Raises Unsupported where a tokenizer is not known.
    """

    def __init__(self, ctx: Context, name: str = "draft", window: int = WINDOW):
        self.name = name
        self.window = window
        self.model = ctx.models[name]
        self.ours = words_of(ctx.models["target"], ctx.request.name)
        self.theirs = words_of(self.model, ctx.request.name)
        self.end = ctx.engine.eos[0] if ctx.engine.eos else self.ours.end
        self.read = 0  # tokens of the request's text that were taken in
        self.ids = list(self.theirs.start)
        self.fixed = len(self.ids)  # of them, those that are not divided anew
        self.pending = b""
        self.branch = -1  # not opened yet
        self.held = 0  # of `ids`, those that are the branch's tokens

    # --- the text

    def update(self, tokens: Sequence[int]) -> None:
        """Takes in what the request's text has become."""
        data = self.pending
        for place in range(self.read, len(tokens)):
            token = tokens[place]
            piece = self.ours.piece(token)
            if piece is None:
                special = self._special(token, place)
                if special is None:
                    piece = self.ours.names.get(token, "").encode()
                else:
                    self._write(data)
                    data = b""
                    self.ids += special
                    self.fixed = len(self.ids)
                    continue
            data += piece
        self.read = len(tokens)
        end = whole_characters(data)
        self._write(data[:end])
        self.pending = data[end:]

    def _special(self, token: int, place: int) -> list[int] | None:
        """Their tokens for a special one of ours; None: they spell its name."""
        name = self.ours.names.get(token, "")
        if place == 0 and (token in self.ours.start or token == self.end):
            return []  # where a text begins, which they say in their own way
        if name in self.theirs.specials:
            return [self.theirs.specials[name]]
        if token == self.end and self.theirs.end is not None:
            return [self.theirs.end]
        return None

    def bytes_of(self, token: int, place: int) -> int:
        """How many bytes of the text this token of ours is, there."""
        piece = self.ours.piece(token)
        if piece is not None:
            return len(piece)
        named = self._special(token, place) is None
        return len(self.ours.names.get(token, "").encode()) if named else 0

    def _write(self, data: bytes) -> None:
        if not data:
            return
        start = max(self.fixed, self.held, len(self.ids) - self.window)
        tail = self.theirs.text(self.ids[start:])
        self.ids[start:] = self.theirs.encode(tail + data)

    # --- the branch

    def room(self, ctx: Context) -> int:
        """How many of their tokens may be drafted; 0: none."""
        if not self.ids or ctx.depth < 1:
            return 0
        return max(0, self.model.context - len(self.ids) - 1)

    def tree(self) -> Generator[Message, Any, tuple[TokenTree, int]]:
        """Brings the branch up to the text; returns the tree of its last tokens, and the last
        one's node. There must be a token, and room.
        """
        settled = len(self.ids) - self.window
        if self.branch < 0:
            self.held = max(1, settled)
            self.branch = yield Open(self.ids[: self.held], self.name)
        elif settled > self.held + self.window:
            fresh = self.ids[self.held : settled]
            yield Commit(fresh, torch.empty(0), self.branch)
            self.held = settled
        tree = TokenTree(self.ids[self.held - 1]).chain(self.ids[self.held :])
        return tree, len(tree) - 1

    # --- back into our tokens

    def proposal(self, tokens: Sequence[int], drafted: Sequence[int]) -> list[int]:
        """What these tokens of theirs, drafted behind `ids`, are in ours behind `tokens`.

        A character that is not whole yet is left out, and what follows a special token that we do
        not have.
        """
        data = b""
        ended: list[int] = []
        for token in drafted:
            piece = self.theirs.piece(token)
            if piece is None:
                name = self.theirs.names.get(token, "")
                if name in self.ours.specials:
                    ended = [self.ours.specials[name]]
                elif token == self.theirs.end and self.end is not None:
                    ended = [self.end]
                break
            data += piece
        if not data.startswith(self.pending):
            return []
        end = whole_characters(data)
        if end < len(data):
            ended = []
        fresh = data[len(self.pending) : end]
        if not fresh:
            return ended
        return continuation(self.ours, tokens, fresh, self.window) + ended
