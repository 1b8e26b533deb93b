"""Copies along the two lags at which the text repeats itself best, counting mismatches instead of stopping at them.

A lag is how far back a copy begins. One draft continues the longest exact match of the newest
tokens. The other continues the lag at which most of the last 4, 8, 16 and 32 tokens agree, so that
after a renamed word or a typing error the copy goes on with the next token, where exact lookup must
find its place again. Up to 8 tokens that were replaced by the same others in several places, also
by more or fewer, are replaced in the drafts too: the place that the text is a changed copy of is
followed through such gaps, and gives a third draft where it is neither of the two. How often a copy
held, by the length of its match and by its matches among the last 32, is learnt while decoding;
from all drafts the likeliest tokens are taken.

Paper: Chan, Jin, Vassilevska Williams, Xu, Faster Algorithms for Text-to-Pattern Hamming Distances,
arXiv:2310.13174 (the problem; the drafter is this project's)
Guarantee: exact
Cost: target 1
Needs: a model that takes trees
Trains: nothing
Differs:
- the paper bounds the time of finding all places with at most k mismatches of one pattern - here
the matches of the newest 64 tokens are counted at every place at once, and the best place is taken
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heappop, heappush

from foretell.core.drafter import Drafter, Feedback
from foretell.core.context import Context
from foretell.core.tree import TokenTree
from foretell.errors import BadConfig
from foretell.ops.aligned import TOP, Aligned
from foretell.ops.lags import Lags

PRIOR = 4.0  # trials that the first estimate counts for
KEEP = 1 - 1 / 256  # what a trial leaves of the weight of earlier ones


@lru_cache(None)
def prior(run: int, matches: int) -> float:
    """Before any trial a run of 3 or 16 matches hold as often as not; either is enough."""
    return 0.98 - 0.98 / (1 + (run / 3) ** 2) / (1 + (matches / 16) ** 4)


class Chances:
    """How often the next copied token was right: [trials, accepted] by the exact match's length and
    the matches.

    Lengths count by powers of two and matches by fours, so that a short text is enough to learn
    from.
    """

    def __init__(self) -> None:
        self.cells: dict[tuple[int, int], list[float]] = {}

    def of(self, run: int, matches: int) -> float:
        run, matches = min(run, TOP), min(matches, TOP)
        trials, accepted = self.cells.get((run.bit_length(), matches // 4), (0.0, 0.0))
        return (PRIOR * prior(run, matches) + accepted) / (PRIOR + trials)

    def note(self, run: int, matches: int, accepted: bool) -> None:
        cell = self.cells.setdefault(
            (min(run, TOP).bit_length(), min(matches, TOP) // 4), [0.0, 0.0]
        )
        cell[0], cell[1] = KEEP * cell[0] + 1, KEEP * cell[1] + accepted


class Copy:
    """A draft along one lag: the exact match and the matches in TOP that speak for it, its tokens
    and last node.

    `word`: bit j says whether the token j from the end matches. `at`: the place it copies next, in
    the text and then in its own tokens; `rest`: what comes before that, of a replacement under way.
    """

    def __init__(self, lag: int, word: int, at: int, rest: tuple[int, ...] = ()):
        self.lag, self.word, self.at, self.rest, self.node, self.tokens = (
            lag,
            word,
            at,
            rest,
            0,
            list[int](),
        )
        self.run, self.matches = (
            (~word & word + 1).bit_length() - 1,
            (word & (1 << TOP) - 1).bit_count(),
        )

    def next(self, text: list[int], names: Aligned) -> int:
        """Its next token."""
        if not self.rest:
            size, to = names.replaced(text, self.at) if self.at < len(text) else (0, ())
            token = text[self.at] if self.at < len(text) else self.tokens[self.at - len(text)]
            self.rest, self.at = to or (token,), self.at + (size or 1)
        token, self.rest = self.rest[0], self.rest[1:]
        self.tokens.append(token)
        return token


class State:
    """What one request learns."""

    def __init__(self, least: int, kept: frozenset[int]):
        self.lags, self.chances, self.copies = Lags(), Chances(), list[Copy]()
        self.aligned = Aligned(least, kept)

    def find(self, k: int, text: list[int]) -> list[Copy]:
        """The lag of the longest run and that of the best score, the smallest of equals, and the
        one that is followed.

        Two of them or all may be one.
        """
        lags, aligned, size = self.lags, self.aligned, len(text)
        by_run, by_score = lags.longest(), lags.closest() if k else 0
        found = [Copy(by_run, lags.word(by_run), size - by_run)] if by_run else []
        if by_score and by_score != by_run:
            copy = Copy(by_score, lags.word(by_score), size - by_score)
            found += [copy] * (copy.matches >= TOP - k)
        if not found or not aligned.least:
            return found
        best = max(found, key=lambda copy: copy.matches)
        if aligned.lost(size) or best.matches > aligned.word.bit_count():
            aligned.anchor(text, best.lag, best.word)
            return found
        gap = size - aligned.held
        replaced, rest = aligned.begun(text)
        if gap and not replaced:
            return found
        word, at = aligned.word << gap | (1 << gap) - 1, aligned.held - aligned.lag + replaced
        return [
            Copy(aligned.lag, word, at, rest),
            *(copy for copy in found if gap or copy.lag != aligned.lag),
        ]


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
                raise BadConfig.field(
                    f"approx:{name}", getattr(self, name), f"between 0 and {high}"
                )

    def start(self, ctx: Context) -> State:
        state = State(self.votes, frozenset(ctx.sampler.stops))
        state.lags.extend(ctx.tokens)
        return state

    def propose(self, ctx: Context, state: State, budget: int) -> TokenTree:
        text, tree = ctx.tokens, TokenTree(ctx.tokens[-1])
        state.aligned.follow(text, state.lags.extend(text))
        copies = state.copies = state.find(self.k, text)
        heap = (
            [(-state.chances.of(c.run, c.matches), i) for i, c in enumerate(copies)]
            if ctx.depth > 0
            else []
        )
        # As many matching tokens as give the same chance by Laplace's rule, (m + 1) / (m + 2).
        matches = [
            max(1, round((2 * p - 1) / (1 - p))) for p in (min(-value, 0.99) for value, _ in heap)
        ]
        heapify(heap)
        while heap and len(tree) < budget:
            value, i = heappop(heap)
            if -value < self.floor:
                break
            copy = copies[i]
            copy.node = tree.add(
                copy.node, copy.next(text, state.aligned), None, -value, "approx", matches[i]
            )
            if (depth := len(copy.tokens)) < ctx.depth:
                heappush(
                    heap, (value * state.chances.of(copy.run + depth, copy.matches + depth // 2), i)
                )
        return tree

    def observe(self, ctx: Context, state: State, step: Feedback) -> None:
        tested = dict(step.outcome.tested)
        for copy in state.copies:
            node = 0
            for depth, token in enumerate(copy.tokens):
                node = step.tree.child(node, token)
                if node not in tested:
                    break  # cut, or behind a refusal
                state.chances.note(copy.run + depth, copy.matches + depth // 2, tested[node])
        state.copies = []
