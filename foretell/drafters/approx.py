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
Differs: the paper bounds the time of finding all places with at most k mismatches of one pattern; here the matches of the newest 64 tokens are counted at every place at once, and the best place is taken
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heappop, heappush

from foretell.drafter import Drafter, Step
from foretell.engine import Context
from foretell.errors import BadConfig
from foretell.ops.lags import Lags
from foretell.tree import TokenTree

TOP = 32  # newest tokens whose matches are counted
PRIOR = 4.0  # trials that the first estimate counts for
KEEP = 1 - 1 / 256  # what a trial leaves of the weight of earlier ones


@lru_cache(None)
def prior(run: int, matches: int) -> float:
    """Before any trial a run of 3 or 16 matches hold as often as not; either is enough."""
    return 0.98 - 0.98 / (1 + (run / 3) ** 2) / (1 + (matches / 16) ** 4)


class Chances:
    """How often the next copied token was right: [trials, accepted] by the exact match's length and the matches.

    Lengths count by powers of two and matches by fours, so that a short text is enough to learn from.
    """

    def __init__(self) -> None:
        self.cells: dict[tuple[int, int], list[float]] = {}

    def of(self, run: int, matches: int) -> float:
        run, matches = min(run, TOP), min(matches, TOP)
        trials, accepted = self.cells.get((run.bit_length(), matches // 4), (0.0, 0.0))
        return (PRIOR * prior(run, matches) + accepted) / (PRIOR + trials)

    def note(self, run: int, matches: int, accepted: bool) -> None:
        cell = self.cells.setdefault((min(run, TOP).bit_length(), min(matches, TOP) // 4), [0.0, 0.0])
        cell[0], cell[1] = KEEP * cell[0] + 1, KEEP * cell[1] + accepted


class Copy:
    """A draft along one lag: the exact match and the matches in TOP that speak for it, its tokens and last node."""

    def __init__(self, lag: int, word: int):
        self.lag, self.word, self.node, self.tokens = lag, word, 0, list[int]()
        self.run, self.matches = (~word & word + 1).bit_length() - 1, (word & (1 << TOP) - 1).bit_count()


class State:
    """What one request learns. `names[token]`: what is drafted instead of it."""

    def __init__(self) -> None:
        self.lags, self.chances, self.copies = Lags(), Chances(), list[Copy]()
        self.votes: dict[int, dict[int, int]] = {}
        self.names: dict[int, int] = {}

    def find(self, k: int) -> list[Copy]:
        """The lag of the longest run and that of the best score, the smallest of equals; both may be one."""
        lags = self.lags
        by_run, by_score = lags.longest(), lags.closest() if k else 0
        found = [Copy(by_run, lags.word(by_run))] if by_run else []
        if by_score and by_score != by_run and (copy := Copy(by_score, lags.word(by_score))).matches >= TOP - k:
            found.append(copy)
        return found

    def vote(self, text: list[int], copy: Copy, new: int, least: int, kept: frozenset[int]) -> None:
        """Learns from the `new` newest tokens what was replaced: one token between two matches, or was kept there.

        `least` equal votes and more than half of all decide; tokens in `kept` are left alone.
        """
        for at in range(min(new, TOP) - 1, -1, -1):
            bits = copy.word >> at
            if bits & 5 != 5 or (bits & 0xFFFFFFFF).bit_count() < TOP // 2:
                continue
            to, old = text[-2 - at], text[-2 - at - copy.lag]
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
            state.vote(text, copies[-1], new, self.votes, ctx.sampler.stops)
        heap = [(-state.chances.of(c.run, c.matches), i) for i, c in enumerate(copies)] if ctx.depth > 0 else []
        # As many matching tokens as give the same chance by Laplace's rule, (m + 1) / (m + 2).
        matches = [max(1, round((2 * p - 1) / (1 - p))) for p in (min(-value, 0.99) for value, _ in heap)]
        heapify(heap)
        while heap and len(tree) < budget:
            value, i = heappop(heap)
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
                heappush(heap, (value * state.chances.of(copy.run + depth, copy.matches + depth // 2), i))
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
