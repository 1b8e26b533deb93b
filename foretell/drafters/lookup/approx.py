"""Copies along the two lags at which the text repeats itself best, mismatches allowed.

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
- the paper bounds the time of finding all places with at most k mismatches of one pattern; here the
matches of the newest 64 tokens are counted at every place at once, and the best place is taken
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heappop, heappush
from typing import Annotated

from foretell.core.context import Context
from foretell.core.drafter import Drafter, Feedback
from foretell.core.settings import Range
from foretell.core.tree import TokenTree
from foretell.drafters.lookup.aligned import TOP, Aligned
from foretell.drafters.lookup.lags import Lags

PRIOR = 4.0  # trials that the first estimate counts for
KEEP = 1 - 1 / 256  # what a trial leaves of the weight of earlier ones


@lru_cache(4096)
def prior_chance(run_length: int, matches: int) -> float:
    """The probability assumed before any trial: a run of 3 or 16 matches hold as often as not."""
    return 0.98 - 0.98 / (1 + (run_length / 3) ** 2) / (1 + (matches / 16) ** 4)


class Chances:
    """How often the next copied token was right: [trials, accepted] by the exact match's length and
    the matches.

    Lengths count by powers of two and matches by fours, so that a short text is enough to learn
    from.
    """

    def __init__(self) -> None:
        self.cells: dict[tuple[int, int], list[float]] = {}

    def chance_of(self, run_length: int, matches: int) -> float:
        run_length = min(run_length, TOP)
        matches = min(matches, TOP)
        trials, accepted = self.cells.get((run_length.bit_length(), matches // 4), (0.0, 0.0))
        return (PRIOR * prior_chance(run_length, matches) + accepted) / (PRIOR + trials)

    def note_trial(self, run_length: int, matches: int, accepted: bool) -> None:
        key = (min(run_length, TOP).bit_length(), min(matches, TOP) // 4)
        trial_cell = self.cells.setdefault(key, [0.0, 0.0])
        trial_cell[0] = KEEP * trial_cell[0] + 1
        trial_cell[1] = KEEP * trial_cell[1] + accepted


class Copy:
    """A draft along one lag, and what speaks for it.

    `agreement`: bit j says whether the token j from the end matches. `at`: the place it copies
    next, in the text and then in its own tokens. `rest`: what comes before that, of a replacement
    under way.
    """

    def __init__(self, lag: int, agreement: int, at: int, rest: tuple[int, ...] = ()):
        self.lag = lag
        self.agreement = agreement
        self.at = at
        self.rest = rest
        self.node = 0  # of its last token in the tree
        self.tokens: list[int] = []
        self.run = (~agreement & agreement + 1).bit_length() - 1  # length of the exact match
        self.matches = (agreement & (1 << TOP) - 1).bit_count()

    def next_token(self, text: list[int], aligned: Aligned) -> int:
        """Adds the copy's next token and returns it."""
        if not self.rest:
            replaced_count = 1
            replacement: tuple[int, ...] = ()
            if self.at < len(text):
                token = text[self.at]
                replaced_count, replacement = aligned.find_replacement(text, self.at)
            else:
                token = self.tokens[self.at - len(text)]
            self.rest = replacement or (token,)
            self.at += replaced_count or 1
        token, *rest_tokens = self.rest
        self.rest = tuple(rest_tokens)
        self.tokens.append(token)
        return token

    def next_chance(self, chances: Chances) -> float:
        """The probability that its next token is right, if those before it are."""
        depth = len(self.tokens)
        return chances.chance_of(self.run + depth, self.matches + depth // 2)


class State:
    """State of one request, and what it has learnt."""

    def __init__(self, min_votes: int, kept_tokens: frozenset[int]):
        self.lags = Lags()
        self.chances = Chances()
        self.aligned = Aligned(min_votes, kept_tokens)
        self.copies: list[Copy] = []  # of the step under way

    def find_copies(self, k: int, text: list[int]) -> list[Copy]:
        """The lag of the longest run and that of the best score, the smallest of equals, and the
        one that is followed.

        Two of them or all may be one.
        """
        text_length = len(text)
        copies: list[Copy] = []
        by_run = self.lags.longest_lag()
        if by_run:
            copies.append(Copy(by_run, self.lags.agreement(by_run), text_length - by_run))
        by_score = self.lags.closest_lag() if k else 0
        if by_score and by_score != by_run:
            copy = Copy(by_score, self.lags.agreement(by_score), text_length - by_score)
            if copy.matches >= TOP - k:
                copies.append(copy)
        if not copies or not self.aligned.least:
            return copies
        return self._with_followed(copies, text)

    def _with_followed(self, copies: list[Copy], text: list[int]) -> list[Copy]:
        """The given copies and, in front of them, the one that is followed."""
        aligned, text_length = self.aligned, len(text)
        best_copy = max(copies, key=lambda copy: copy.matches)
        if aligned.is_lost(text_length) or best_copy.matches > aligned.agreement.bit_count():
            aligned.follow_lag(text, best_copy.lag, best_copy.agreement)
            return copies
        gap = text_length - aligned.held
        replaced_count, rest_tokens = aligned.find_begun(text)
        if gap and not replaced_count:
            return copies
        agreement = aligned.agreement << gap | (1 << gap) - 1
        followed = Copy(
            aligned.lag, agreement, aligned.held - aligned.lag + replaced_count, rest_tokens
        )
        other_copies = [copy for copy in copies if gap or copy.lag != aligned.lag]
        return [followed, *other_copies]


@dataclass(frozen=True)
class Approx(Drafter):
    """`floor` is a probability."""

    # mismatches allowed in the last 32 tokens; 0: exact matches only
    k: Annotated[int, Range(0, 31)] = 30
    # times a replacement must be seen before it is drafted; 0: never
    votes: Annotated[int, Range(0, 1024)] = 2
    floor: Annotated[float, Range(0, 1)] = 0.05  # tokens less likely to be reached are not drafted

    needs = ("tree",)

    def start(self, ctx: Context) -> State:
        state = State(self.votes, frozenset(ctx.sampler.stops))
        state.lags.extend(ctx.tokens)
        return state

    def propose(self, ctx: Context, state: State, budget: int) -> TokenTree:
        text = ctx.tokens
        tree = TokenTree(text[-1])
        state.aligned.follow_text(text, state.lags.extend(text))
        copies = state.copies = state.find_copies(self.k, text)
        if ctx.depth < 1:
            return tree
        heap = [
            (-copy.next_chance(state.chances), copy_number)
            for copy_number, copy in enumerate(copies)
        ]
        # As many matching tokens as give the same probability by Laplace's rule, (m + 1) / (m + 2).
        match_lengths = []
        for negative_value, _ in heap:
            probability = min(-negative_value, 0.99)
            match_lengths.append(max(1, round((2 * probability - 1) / (1 - probability))))
        heapify(heap)
        while heap and len(tree) < budget:
            negative_value, copy_number = heappop(heap)
            if -negative_value < self.floor:
                break
            copy = copies[copy_number]
            token = copy.next_token(text, state.aligned)
            copy.node = tree.add(
                copy.node,
                token,
                value=-negative_value,
                source="approx",
                match=match_lengths[copy_number],
            )
            if len(copy.tokens) < ctx.depth:
                heappush(heap, (negative_value * copy.next_chance(state.chances), copy_number))
        return tree

    def observe(self, ctx: Context, state: State, step: Feedback) -> None:
        tested = dict(step.outcome.tested)
        for copy in state.copies:
            node = 0
            for depth, token in enumerate(copy.tokens):
                node = step.tree.find_child(node, token)
                if node not in tested:
                    break  # cut, or after a refusal
                state.chances.note_trial(copy.run + depth, copy.matches + depth // 2, tested[node])
        state.copies = []
