"""Copies from a given source text, as in correction, editing and rewriting.

A pointer moves along the source. While the answer follows the source the draft is what stands
after the pointer, at first the source's beginning. After a difference the pointer is set anew,
after the longest of the answer's last n, ..., 1 tokens that stands in the source, and there where
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
- a place at the source's end, with nothing after it, does not count; the target's own row there
takes the place of the paper's sentinel
- how much of the rest is drafted a step is limited, by `k` and by the policy
- after a difference the nearest place is taken (`nearest`, on by default; the paper has no such
rule)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from foretell.core.context import Context
from foretell.core.drafter import Drafter
from foretell.core.settings import Range
from foretell.core.text import TokenIds, check_ids
from foretell.core.tree import TokenTree
from foretell.core.tree_building import plant_tree

AHEAD = 8  # tokens after the place that was left in which a single token finds it again


class Pointer:
    """The place in `source` where the text is: source[at] is its expected next token; -1: not
    known.
    """

    def __init__(self, source: Sequence[int], n: int, position: int, known_count: int):
        """`n`: tokens of the longest n-gram; `known_count`: tokens of the text taken in."""
        self.source = source
        self.n = n
        self.at = position
        self.known = known_count
        self.run = 0  # tokens that spoke for the place so far
        self.last = position  # the place that was left when the text last differed
        # By length: n-gram -> the places after it, ascending.
        self.places: list[dict[tuple[int, ...], list[int]]] = [{} for _ in range(n)]
        for size, gram_places in enumerate(self.places, 1):
            for end in range(size, len(source)):
                gram_places.setdefault(tuple(source[end - size : end]), []).append(end)

    def follow_text(self, tokens: Sequence[int], nearest: bool) -> None:
        """Takes in what `tokens`, the whole text, has more than last time."""
        for end in range(self.known + 1, len(tokens) + 1):
            if 0 <= self.at < len(self.source) and self.source[self.at] == tokens[end - 1]:
                self.at += 1
                self.run += 1
                continue
            if self.at >= 0:
                self.last = self.at
            tail = tuple(tokens[max(0, end - self.n) : end])
            self.at, self.run = self.find_nearest(tail) if nearest else self.find_unique(tail)
        self.known = len(tokens)

    def find_unique(self, tail: tuple[int, ...]) -> tuple[int, int]:
        """(place, n-gram's length) of the shortest n-gram at the end of `tail` that stands once, or
        (-1, 0).
        """
        for gram_length in range(1, len(tail) + 1):
            positions = self.places[gram_length - 1].get(tail[-gram_length:], [])
            if len(positions) == 1:
                return positions[0], gram_length
            if not positions:
                break  # no longer one stands there either
        return -1, 0

    def find_nearest(self, tail: tuple[int, ...]) -> tuple[int, int]:
        """(place, n-gram's length) of the longest n-gram at the end of `tail` that stands in the
        source, where it stands nearest to one token after `last`.

        A single token counts only where it stands less than AHEAD tokens further. If it does not,
        it is taken for a replacement of one token, of length 0.
        """
        expected_position = self.last + 1
        for gram_length in range(len(tail), 0, -1):
            positions = self.places[gram_length - 1].get(tail[-gram_length:])
            if not positions:
                continue
            insert_index = bisect_left(positions, expected_position)
            if gram_length > 1 or self.last < 0:
                neighbours = positions[max(0, insert_index - 1) : insert_index + 1]
                return min(
                    neighbours, key=lambda position: abs(position - expected_position)
                ), gram_length
            if (
                insert_index < len(positions)
                and positions[insert_index] < expected_position + AHEAD
            ):
                return positions[insert_index], 1
        return (expected_position, 0) if 0 < expected_position < len(self.source) else (-1, 0)


@dataclass(frozen=True)
class InputGuided(Drafter):
    """`source` is token ids: in a spec `source=1 2 3`, or `source=@FILE` for a text."""

    # to copy from; empty: what the model reads as its source, else the prompt
    source: TokenIds = ()
    n: Annotated[int, Range(1, 64)] = 3  # longest n-gram that finds the place again, in tokens
    k: Annotated[int, Range(0, 1024)] = 0  # tokens drafted at most; 0: the rest of the source
    # after a difference, go on at the nearest place; False: only where an n-gram stands once
    nearest: bool = True

    def start(self, ctx: Context) -> Pointer:
        source_ids = self.source or self._read_source(ctx)
        check_ids("input-guided:source", source_ids, ctx.models["target"].vocab)
        prompt_length = len(ctx.tokens)
        if source_ids:
            return Pointer(source_ids, self.n, 0, prompt_length)
        return Pointer(ctx.request.prompt, self.n, -1, prompt_length - 1)

    @staticmethod
    def _read_source(ctx: Context) -> tuple[int, ...]:
        """The request's source, if the target reads one, without the ends after it."""
        if "source" not in ctx.models["target"].caps:
            return ()
        source_ids = tuple(ctx.request.inputs["source"])
        while source_ids and source_ids[-1] in ctx.engine.eos:
            source_ids = source_ids[:-1]
        return source_ids

    def propose(self, ctx: Context, state: Pointer, budget: int) -> TokenTree:
        tokens = ctx.tokens
        state.follow_text(tokens, self.nearest)
        draft_length = min(self.k or budget, budget - 1, ctx.depth)
        drafted_tokens = state.source[state.at : state.at + draft_length] if state.at >= 0 else ()
        # Laplace's rule: what held `run` times holds once more with probability (run + 1) / (run +
        # 2), and so on.
        trial_count = state.run + 1
        values = [
            trial_count / (trial_count + depth) for depth in range(1, len(drafted_tokens) + 1)
        ]
        match_length = max(1, state.run)
        return plant_tree(
            tokens[-1],
            range(len(drafted_tokens)),
            drafted_tokens,
            values,
            "input-guided",
            match_length,
        )
