"""Copies along the two lags at which the text repeats itself best, counting mismatches instead of stopping at them.

A lag is how far back a copy begins. One draft continues the longest exact match of the newest tokens. The other
continues the lag at which most of the last 4, 8, 16 and 32 tokens agree, so that after a renamed word or a typing
error the copy goes on with the next token, where exact lookup must find its place again. A token that was replaced by
the same other one in several places is replaced in the drafts too. How often a copy held, by the length of its exact
match and by its matches among the last 32, is learnt while decoding; from both drafts the likeliest tokens are taken.

Paper: Chan, Jin, Vassilevska Williams, Xu, Faster Algorithms for Text-to-Pattern Hamming Distances, arXiv:2310.13174 (the problem; the drafter is this project's)
Guarantee: exact
Cost: target 1
Needs: a model that takes trees
Trains: nothing
Differs: the paper bounds the time of finding all places with at most k mismatches of one pattern; here the distances to every place are kept up to date by one shift and one comparison a token, and the best place is taken
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from foretell.drafter import Drafter, Step
from foretell.engine import Context
from foretell.errors import BadConfig
from foretell.tree import TokenTree

TOP = 32  # newest tokens whose matches are counted
PRIOR = 4.0  # trials that the first estimate counts for
KEEP = 1 - 1 / 256  # what a trial leaves of the weight of earlier ones
WIDTH = 64  # bits of a word
ONE = np.uint64(1)
Words = npt.NDArray[np.uint64]
Counts = npt.NDArray[np.uint8]


class Lags:
    """How well a growing text agrees with itself at every lag: Hamming distances by one shift-or a token.

    For lag d bit j of a 64-bit word says whether the token j from the end equals the one d before it. A new token shifts
    all words by one bit, in one step over the reversed text, so that the text's newest tokens are compared with every
    earlier place at once: ones among the low w bits count the matches of the last w tokens, ones at the low end are the
    exact match's length, and the word itself shows where the mismatches are. 12 bytes a token.
    """

    def __init__(self, room: int = 256):
        self.length = 0
        self.back = np.zeros(room, np.int32)  # right-aligned and reversed: its last `length` entries are the text
        self.bits = np.zeros(room, np.uint64)  # bits[d - 1]: lag d

    def extend(self, tokens: Sequence[int]) -> int:
        """Takes in what `tokens`, the whole text, has more than last time; returns how many tokens that were."""
        new = len(tokens) - self.length
        while len(tokens) > len(self.back):
            self.back = np.concatenate((np.zeros_like(self.back), self.back))
            self.bits = np.concatenate((self.bits, np.zeros_like(self.bits)))
        if (far := len(tokens) - WIDTH) > self.length:  # what later tokens shift out of the words is left out
            self.back[len(self.back) - far : len(self.back) - self.length] = tokens[self.length : far][::-1]
            self.length = far
        for token in tokens[self.length :]:
            start = len(self.back) - self.length
            bits = self.words()
            np.left_shift(bits, ONE, out=bits)
            np.bitwise_or(bits, self.back[start:] == token, out=bits)
            self.back[start - 1] = token
            self.length += 1
        return new

    def words(self) -> Words:
        """(length,): entry d - 1 is the word of lag d. A view; the last entry, which nothing compares, is 0."""
        return self.bits[: self.length]

    def word(self, lag: int) -> int:
        return int(self.bits[lag - 1])

    def runs(self) -> Counts:
        """(length,): how many of the newest tokens in a row equal those `lag` before, 64 at most."""
        bits = self.words()
        return np.bitwise_count(bits & (~bits - ONE))

    def matches(self, window: int) -> Counts:
        """(length,): how many of the newest `window` (1 to 64) tokens equal those `lag` before."""
        return np.bitwise_count(self.words() & np.uint64((1 << window) - 1))


class Chances:
    """How often the next copied token was right: [trials, accepted] by the exact match's length and the matches.

    Lengths count by powers of two and matches by fours, so that a short text is enough to learn from.
    """

    def __init__(self) -> None:
        self.cells: dict[tuple[int, int], list[float]] = {}

    def of(self, run: int, matches: int) -> float:
        run, matches = min(run, TOP), min(matches, TOP)
        trials, accepted = self.cells.get((run.bit_length(), matches // 4), (0.0, 0.0))
        # Before any trial a run of 3 or 16 matches hold as often as not; either is enough.
        prior = 0.98 - 0.98 / (1 + (run / 3) ** 2) / (1 + (matches / 16) ** 4)
        return (PRIOR * prior + accepted) / (PRIOR + trials)

    def note(self, run: int, matches: int, accepted: bool) -> None:
        cell = self.cells.setdefault((min(run, TOP).bit_length(), min(matches, TOP) // 4), [0.0, 0.0])
        cell[0], cell[1] = KEEP * cell[0] + 1, KEEP * cell[1] + accepted


@dataclass
class Copy:
    """A draft along one lag: the exact match and the matches in TOP that speak for it, its tokens and last node."""

    lag: int
    run: int
    matches: int
    node: int = 0
    tokens: list[int] = field(default_factory=list)


class State:
    """What one request learns. `names[token]`: what is drafted instead of it."""

    def __init__(self) -> None:
        self.lags, self.chances, self.copies = Lags(), Chances(), list[Copy]()
        self.votes: dict[int, dict[int, int]] = {}
        self.names: dict[int, int] = {}

    def find(self, k: int) -> list[Copy]:
        """The lag of the longest run and that of the best score, the smallest of equals; both may be one."""
        lags, matches = self.lags, self.lags.matches(TOP)
        runs = lags.runs()
        found = [int(runs.argmax())]
        if not runs[found[0]]:
            found = []
        if k:
            score = 4 * lags.matches(4).astype(np.uint16) + 2 * lags.matches(8) + lags.matches(16) + matches
            best = int(score.argmax())
            if matches[best] >= TOP - k and best not in found:
                found.append(best)
        return [Copy(at + 1, int(runs[at]), int(matches[at])) for at in found]

    def vote(self, text: list[int], lag: int, new: int, least: int, kept: frozenset[int]) -> None:
        """Learns from the `new` newest tokens what was replaced: one token between two matches, or was kept there.

        `least` equal votes and more than half of all decide; tokens in `kept` are left alone.
        """
        word = self.lags.word(lag)
        for at in range(min(new, TOP) - 1, -1, -1):
            bits = word >> at
            if bits & 5 != 5 or (bits & 0xFFFFFFFF).bit_count() < TOP // 2:
                continue
            to, old = text[-2 - at], text[-2 - at - lag]
            if old in kept or to in kept:
                continue
            votes = self.votes.setdefault(old, {})
            votes[to] = votes.get(to, 0) + 1
            best = max(votes, key=lambda token: votes[token])
            self.names[old] = best if votes[best] >= least and 2 * votes[best] > sum(votes.values()) else old


@dataclass(frozen=True)
class Approx(Drafter):
    """`floor` is a chance."""

    k: int = 30  # mismatches allowed in the last 32 tokens; 0: exact matches only
    votes: int = 2  # times a replacement must be seen before it is drafted; 0: never
    floor: float = 0.05  # tokens less likely to be reached are not drafted

    needs = ("tree",)

    def __post_init__(self) -> None:
        for name, high in (("k", TOP - 1), ("votes", 1024), ("floor", 1)):
            if not 0 <= getattr(self, name) <= high:
                raise BadConfig.field(f"approx:{name}", getattr(self, name), f"between 0 and {high}")

    def start(self, ctx: Context) -> State:
        state = State()
        state.lags.extend(ctx.tokens)
        return state

    def propose(self, ctx: Context, state: State, budget: int) -> TokenTree:
        text, tree = ctx.tokens, TokenTree(ctx.tokens[-1])
        new = state.lags.extend(text)
        copies = state.copies = state.find(self.k)
        if copies and self.votes:
            state.vote(text, copies[-1].lag, new, self.votes, ctx.sampler.stops)
        heap = [(-state.chances.of(c.run, c.matches), i) for i, c in enumerate(copies)] if ctx.depth > 0 else []
        # As many matching tokens as give the same chance by Laplace's rule, (m + 1) / (m + 2).
        matches = [max(1, round((2 * p - 1) / (1 - p))) for p in (min(-value, 0.99) for value, _ in heap)]
        heapq.heapify(heap)
        while heap and len(tree) < budget:
            value, i = heapq.heappop(heap)
            if -value < self.floor:
                break
            copy = copies[i]
            depth = len(copy.tokens)
            place = len(text) - copy.lag + depth
            token = text[place] if place < len(text) else copy.tokens[place - len(text)]
            token = state.names.get(token, token)
            copy.node = tree.add(copy.node, token, None, -value, "approx", matches[i])
            copy.tokens.append(token)
            if (depth := depth + 1) < ctx.depth:
                heapq.heappush(heap, (value * state.chances.of(copy.run + depth, copy.matches + depth // 2), i))
        return tree

    def observe(self, ctx: Context, state: State, step: Step) -> None:
        tested = dict(step.outcome.tested)
        for copy in state.copies:
            node = 0
            for depth, token in enumerate(copy.tokens):
                node = step.tree.child(node, token)
                if node not in tested:
                    break  # cut, or behind a refusal
                state.chances.note(copy.run + depth, copy.matches + depth // 2, tested[node])
        state.copies = []
