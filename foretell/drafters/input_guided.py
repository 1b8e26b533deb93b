"""Copies from a given source text, as in correction, editing and rewriting.

A pointer moves along the source. While the answer follows the source the draft is what stands
behind the pointer, at first the source's beginning. After a difference the pointer is set anew:
behind the place where the answer's last token stands in the source, if that is the only one; else
where its last two stand, and so on up to `n`. Where none of these is the only one nothing is
proposed. Without a source the prompt is the source, and the pointer is searched for.

Paper: Sun, Ge, Wei, Wang, Instantaneous Grammatical Error Correction with Shallow Aggressive
Decoding, arXiv:2106.04970; Ge et al., Lossless Acceleration for Seq2seq Generation with Aggressive
Decoding, arXiv:2205.10350
Guarantee: exact
Cost: target 1
Needs: nothing (a source, to do better than looking into the prompt)
Trains: nothing
Differs:
- the source is a field, where the paper's is the input of an encoder - the n-grams of the answer
may begin in the prompt - a place at the source's end, with nothing behind it, does not count - how
much of the rest is drafted a step is limited (`k`, and by the policy) - `nearest` (off in the paper
and here)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from foretell.core.drafter import Drafter
from foretell.core.context import Context
from foretell.core.tree import TokenTree
from foretell.errors import BadConfig
from foretell.ops.trees import plant

AHEAD = 8  # tokens


class Pointer:
    """Where in `source` the text is: its next token is expected to be source[at]; -1 if that is not
    known.

    `run`: tokens that spoke for the place so far; `last`: the place that was left when the text
    last differed.
    """

    def __init__(self, source: Sequence[int], n: int, at: int, done: int):
        self.source, self.n, self.at, self.run, self.last, self.done = source, n, at, 0, at, done
        self.places: list[dict[tuple[int, ...], list[int]]] = [{} for _ in range(n)]
        for size, places in enumerate(self.places, 1):
            for end in range(size, len(source)):
                places.setdefault(tuple(source[end - size : end]), []).append(end)

    def follow(self, tokens: Sequence[int], nearest: bool) -> None:
        """Takes in what `tokens`, the whole text, has more than last time."""
        for end in range(self.done + 1, len(tokens) + 1):
            if 0 <= self.at < len(self.source) and self.source[self.at] == tokens[end - 1]:
                self.at, self.run = self.at + 1, self.run + 1
                continue
            self.last = self.at if self.at >= 0 else self.last
            tail = tuple(tokens[max(0, end - self.n) : end])
            self.at, self.run = self.nearest(tail) if nearest else self.only(tail)
        self.done = len(tokens)

    def only(self, tail: tuple[int, ...]) -> tuple[int, int]:
        """(place, n-gram's length) of the shortest n-gram at the end of `tail` that stands once, or
        (-1, 0).
        """
        for size in range(1, len(tail) + 1):
            places = self.places[size - 1].get(tail[-size:], ())
            if len(places) < 2:
                return (places[0], size) if places else (-1, 0)
        return -1, 0

    def nearest(self, tail: tuple[int, ...]) -> tuple[int, int]:
        """(place, length) of the longest n-gram, where it stands nearest to one token behind
        `last`.

        One token alone counts at most AHEAD tokens further; if it does not stand there either, it
        has replaced one.
        """
        aim = self.last + 1
        for size in range(len(tail), 0, -1):
            if places := self.places[size - 1].get(tail[-size:]):
                at = bisect_left(places, aim)
                place = min(places[max(0, at - 1) : at + 1], key=lambda place: abs(place - aim))
                if size > 1 or self.last < 0:
                    return place, size
                if at < len(places) and places[at] < aim + AHEAD:
                    return places[at], 1
        return (aim, 0) if 0 < aim < len(self.source) else (-1, 0)


@dataclass(frozen=True)
class InputGuided(Drafter):
    """`source` is token ids: in a spec `source=1 2 3`, or `source=@FILE` for a text."""

    source: tuple[int, ...] = ()  # to copy from; empty: the prompt
    n: int = 3  # longest n-gram that finds the place again, in tokens
    k: int = 0  # tokens drafted at most; 0: the rest of the source
    # where it stands several times, or nowhere, the place nearest behind the last; False: none
    nearest: bool = True

    def __post_init__(self) -> None:
        for name, low, high in (("n", 1, 64), ("k", 0, 1024)):
            if not low <= getattr(self, name) <= high:
                raise BadConfig.field(
                    f"input-guided:{name}", getattr(self, name), f"between {low} and {high}"
                )

    def start(self, ctx: Context) -> Pointer:
        vocab = ctx.models["target"].vocab
        if wrong := [token for token in self.source if not 0 <= token < vocab]:
            raise BadConfig.field(
                "input-guided:source", wrong[0], f"ids of the vocabulary, 0 to {vocab - 1}"
            )
        known = len(ctx.tokens)
        if self.source:
            return Pointer(self.source, self.n, 0, known)
        return Pointer(ctx.request.prompt, self.n, -1, known - 1)

    def propose(self, ctx: Context, state: Pointer, budget: int) -> TokenTree:
        tokens = ctx.tokens
        state.follow(tokens, self.nearest)
        size, run = max(0, min(self.k or budget, budget - 1, ctx.depth)), state.run + 1
        ahead = state.source[state.at : state.at + size] if state.at >= 0 else ()
        # Laplace's rule: what held `run` times holds once more with chance (run + 1) / (run + 2),
        # and so on.
        values = [run / (run + deep) for deep in range(1, len(ahead) + 1)]
        return plant(
            tokens[-1], range(len(ahead)), ahead, values, "input-guided", max(1, state.run)
        )
