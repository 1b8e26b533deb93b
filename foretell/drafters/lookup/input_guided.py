"""Copies from a given source text, as in correction, editing and rewriting.

A pointer moves along the source. While the answer follows the source the draft is what stands
behind the pointer, at first the source's beginning. After a difference the pointer is set anew,
behind the longest of the answer's last n, ..., 1 tokens that stands in the source, and there where
it stands nearest to the place that was left; where none does, the newest token counts as a
replacement of one. With nearest=false the paper's rule holds: the last token, or else the last two,
and so on up to `n`, must stand in the source once, and where none of these does nothing is
proposed. A model that reads a source beside its text has that one by default, without the token
that ends it. Where there is none the prompt is the source, and the pointer is searched for.

Paper: Sun, Ge, Wei, Wang, Instantaneous Grammatical Error Correction with Shallow Aggressive
Decoding, arXiv:2106.04970; Ge et al., Lossless Acceleration for Seq2seq Generation with Aggressive
Decoding, arXiv:2205.10350
Guarantee: exact
Cost: target 1
Needs: nothing (a source of the request's, or one that is given, to do better than looking into the
prompt)
Trains: nothing
Differs:
- the source may be a field, where the paper's is the input of an encoder; by default it is that
- the n-grams of the answer may begin in the prompt
- a place at the source's end, with nothing behind it, does not count; the target's own row there
takes the place of the paper's sentinel
- how much of the rest is drafted a step is limited, by `k` and by the policy
- after a difference the nearest place is taken (`nearest`, on by default; the paper has no such
rule)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from foretell.core.context import Context
from foretell.core.drafter import Drafter
from foretell.core.text import TokenIds, check_ids
from foretell.core.tree import TokenTree
from foretell.core.tree_building import plant
from foretell.errors import BadConfig

AHEAD = 8  # tokens behind the place that was left in which a single token finds it again


class Pointer:
    """Where in `source` the text is: its next token is expected to be source[at]; -1 if that is not
    known.
    """

    def __init__(self, source: Sequence[int], n: int, at: int, known: int):
        """`n`: tokens of the longest n-gram; `known`: tokens of the text taken in."""
        self.source = source
        self.n = n
        self.at = at
        self.known = known
        self.run = 0  # tokens that spoke for the place so far
        self.last = at  # the place that was left when the text last differed
        # By length: n-gram -> the places behind it, ascending.
        self.places: list[dict[tuple[int, ...], list[int]]] = [{} for _ in range(n)]
        for size, places in enumerate(self.places, 1):
            for end in range(size, len(source)):
                places.setdefault(tuple(source[end - size : end]), []).append(end)

    def follow(self, tokens: Sequence[int], nearest: bool) -> None:
        """Takes in what `tokens`, the whole text, has more than last time."""
        for end in range(self.known + 1, len(tokens) + 1):
            if 0 <= self.at < len(self.source) and self.source[self.at] == tokens[end - 1]:
                self.at += 1
                self.run += 1
                continue
            if self.at >= 0:
                self.last = self.at
            tail = tuple(tokens[max(0, end - self.n) : end])
            self.at, self.run = self.nearest(tail) if nearest else self.only(tail)
        self.known = len(tokens)

    def only(self, tail: tuple[int, ...]) -> tuple[int, int]:
        """(place, n-gram's length) of the shortest n-gram at the end of `tail` that stands once, or
        (-1, 0).
        """
        for size in range(1, len(tail) + 1):
            places = self.places[size - 1].get(tail[-size:], [])
            if len(places) == 1:
                return places[0], size
            if not places:
                break  # no longer one stands there either
        return -1, 0

    def nearest(self, tail: tuple[int, ...]) -> tuple[int, int]:
        """(place, n-gram's length) of the longest n-gram at the end of `tail` that stands in the
        source, where it stands nearest to one token behind `last`.

        A single token counts only where it stands less than AHEAD tokens further. If it does not,
        it is taken for a replacement of one token, of length 0.
        """
        aim = self.last + 1
        for size in range(len(tail), 0, -1):
            places = self.places[size - 1].get(tail[-size:])
            if not places:
                continue
            at = bisect_left(places, aim)
            if size > 1 or self.last < 0:
                around = places[max(0, at - 1) : at + 1]
                return min(around, key=lambda place: abs(place - aim)), size
            if at < len(places) and places[at] < aim + AHEAD:
                return places[at], 1
        return (aim, 0) if 0 < aim < len(self.source) else (-1, 0)


@dataclass(frozen=True)
class InputGuided(Drafter):
    """`source` is token ids: in a spec `source=1 2 3`, or `source=@FILE` for a text."""

    # to copy from; empty: what the model reads as its source, else the prompt
    source: TokenIds = ()
    n: int = 3  # longest n-gram that finds the place again, in tokens
    k: int = 0  # tokens drafted at most; 0: the rest of the source
    # after a difference, go on at the nearest place; False: only where an n-gram stands once
    nearest: bool = True

    def __post_init__(self) -> None:
        for name, low, high in (("n", 1, 64), ("k", 0, 1024)):
            value = getattr(self, name)
            if not low <= value <= high:
                raise BadConfig.field(f"input-guided:{name}", value, f"between {low} and {high}")

    def start(self, ctx: Context) -> Pointer:
        source = self.source or self._read(ctx)
        check_ids("input-guided:source", source, ctx.models["target"].vocab)
        known = len(ctx.tokens)
        if source:
            return Pointer(source, self.n, 0, known)
        return Pointer(ctx.request.prompt, self.n, -1, known - 1)

    @staticmethod
    def _read(ctx: Context) -> tuple[int, ...]:
        """The request's source, if the target reads one, without the ends behind it."""
        if "source" not in ctx.models["target"].caps:
            return ()
        source = tuple(ctx.request.inputs["source"])
        while source and source[-1] in ctx.engine.eos:
            source = source[:-1]
        return source

    def propose(self, ctx: Context, state: Pointer, budget: int) -> TokenTree:
        tokens = ctx.tokens
        state.follow(tokens, self.nearest)
        size = min(self.k or budget, budget - 1, ctx.depth)
        ahead = state.source[state.at : state.at + size] if state.at >= 0 else ()
        # Laplace's rule: what held `run` times holds once more with chance (run + 1) / (run + 2),
        # and so on.
        run = state.run + 1
        values = [run / (run + depth) for depth in range(1, len(ahead) + 1)]
        match = max(1, state.run)
        return plant(tokens[-1], range(len(ahead)), ahead, values, "input-guided", match)
