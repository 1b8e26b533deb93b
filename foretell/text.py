"""Tokens to text, a few at a time: no half characters, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def stopped(
    decode: Callable[[Sequence[int]], str] | None, stops: Sequence[str], tokens: Sequence[int]
) -> bool:
    """Whether a stop string stands at the end of these tokens' text, or was completed by the newest
    of them.
    """
    if not stops or decode is None:
        return False
    # It can span tokens, each of at least one byte.
    tail = decode(tokens[-max(len(s.encode()) for s in stops) - 4 :])
    return any(s in tail for s in stops)


class Detokenizer:
    """Texts of `push` concatenate to the text of all tokens, cut before the first stop string.

    Only a window of tokens is decoded again, so that a long text costs linear time.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()):
        self.decode, self.stops = decode, tuple(stops)
        self.tokens: list[int] = []
        self.start = self.read = 0  # the window; up to `read` its text was taken
        self.held = ""  # text that may be the beginning of a stop string
        self.ended = False

    def push(self, tokens: Sequence[int], final: bool = False) -> str:
        """The text that became certain with these tokens; `final`: no more will come."""
        if self.ended:
            return ""
        self.tokens += tokens
        known = self.decode(self.tokens[self.start : self.read])
        text = self.decode(self.tokens[self.start :])
        if final or not text.endswith("\ufffd"):
            self.held += text[len(known) :]
            # Decoders may treat a first token differently, so the window keeps the last tokens that
            # had text.
            if len(text) > len(known):
                self.start = self.read
            self.read = len(self.tokens)
        cut = min((i for i in (self.held.find(s) for s in self.stops) if i >= 0), default=-1)
        if cut >= 0:
            self.ended = True
            return self.held[:cut]
        starts = [n for s in self.stops for n in range(1, len(s)) if self.held.endswith(s[:n])]
        keep = max(starts, default=0) if not final else 0
        out, self.held = self.held[: len(self.held) - keep], self.held[len(self.held) - keep :]
        return out
