"""Continues the text by what followed its newest tokens before, in proportion to how often it did.

Every string of up to `depth` tokens of prompt and output is counted. The longest of the text's
endings that stands earlier starts a draft, and so do shorter ones that stand there more often: best
first by the share of the places that continue so, as many nodes as the ending is long (times
`factor`, plus `offset`), none below `min_prob`. The draft whose shares add up highest is proposed,
of equals the one with the longest match. With `shared`, past outputs of the same tenant are
searched as well.

Paper: Oliaro et al., SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications,
arXiv:2411.04975
Guarantee: exact
Cost: target 1
Needs: a model that takes trees (with tree=no: nothing)
Trains: nothing
Differs:
- factor and offset are 4 and 8 where the reference has 1 and 0, as a draft no longer than its match
gave fewer tokens a step than plain prompt lookup on recorded answers, and how many nodes pay is the
policy's choice - it branches unless told not to - shares are of the places that something follows,
so that the text's own end does not count against a copy, and a copy of what stands at most 8 times
goes on into itself there - an ending is searched up to half of `depth` and only if it stands at
least twice as often as the last longer one tried - the last 8 tokens of a prompt stand before its
output in what is shared, of which the oldest tokens are forgotten one by one
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

from foretell.core.context import Context
from foretell.core.drafter import Drafter, Feedback
from foretell.core.tree import TokenTree
from foretell.errors import BadConfig
from foretell.ops.suffix import Place, Suffixes, Text
from foretell.ops.trees import plant

# tokens of the prompt that stand before an output in the shared store, so that its beginning can
# match
LEAD = 8


@dataclass
class State:
    """`own` counts this request's `text`, `past` the outputs of all, this one's `output` too.
    `done`: tokens read.
    """

    own: Suffixes
    text: Text
    past: Suffixes | None
    output: Text
    done: int


class Found(NamedTuple):
    """A draft: parent, token and value of its nodes, the root being 0; `score` is the sum of the
    values.
    """

    score: float
    match: int
    parents: list[int]
    tokens: list[int]
    values: list[float]


NOTHING = Found(0.0, 0, [], [], [])


@dataclass(frozen=True)
class Suffix(Drafter):
    """Lengths are counts of tokens, `min_prob` is a product of shares, `megabytes` bounds the
    shared store.
    """

    depth: int = 64  # strings counted; a match and the draft behind it are together no longer
    factor: float = 4.0  # nodes drafted for each token of the match
    offset: float = 8.0  # nodes drafted besides
    min_prob: float = 0.1  # no node has a smaller value
    tree: bool = True  # branch, instead of following the most frequent token alone
    shared: bool = False  # search past outputs of the same tenant too
    megabytes: int = 64  # of past outputs and their counts kept, the newest

    @property
    def needs(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("tree",) if self.tree else ()

    def __post_init__(self) -> None:
        ranges = {
            "depth": (2, 256),
            "factor": (0, 64),
            "offset": (-64, 64),
            "min_prob": (0, 1),
            "megabytes": (1, 65536),
        }
        for name, (low, high) in ranges.items():
            if not low <= getattr(self, name) <= high:
                raise BadConfig.field(
                    f"suffix:{name}", getattr(self, name), f"between {low} and {high}"
                )

    def start(self, ctx: Context) -> State:
        own, text, past, output = Suffixes(self.depth), Text(), None, Text()
        own.extend(text, ctx.tokens)
        if self.shared:
            vocab = ctx.models["target"].vocab
            past = ctx.shared(lambda: Suffixes(self.depth, self.megabytes << 20, vocab))
            past.extend(output, ctx.tokens[-LEAD:])
        return State(own, text, past, output, len(ctx.tokens))

    def propose(self, ctx: Context, state: State, budget: int) -> TokenTree:
        self._read(ctx, state)
        best = self._search(state.own, state.text, budget - 1, ctx.depth)
        if state.past is not None:
            past = self._search(state.past, state.output, budget - 1, ctx.depth)
            best = past if past.score > best.score else best
        return plant(ctx.tokens[-1], best.parents, best.tokens, best.values, "suffix", best.match)

    def observe(self, ctx: Context, state: State, step: Feedback) -> None:
        if state.past is not None:  # the last tokens of a request are for others too
            self._read(ctx, state)

    def _read(self, ctx: Context, state: State) -> None:
        """Takes in what the text has more than last time."""
        if new := ctx.tokens[state.done :]:
            state.own.extend(state.text, new)
            if state.past is not None:
                state.past.extend(state.output, new)
            state.done += len(new)

    def _search(self, strings: Suffixes, text: Text, size: int, levels: int) -> Found:
        """The best draft of at most `size` nodes on so many levels."""
        best, tried = NOTHING, 0
        for match, count, place in strings.matches(text, self.depth // 2):
            room = min(size, math.floor(match * self.factor + self.offset + 1e-6))
            if room <= best.score:  # nor has a shorter match more room
                break
            if count >= 2 * tried:
                tried = count
                parents, tokens, values = self._expand(
                    strings, text, place, room, min(levels, self.depth - match)
                )
                if (score := sum(values)) > best.score:
                    best = Found(score, match, parents, tokens, values)
        return best

    def _expand(
        self, strings: Suffixes, text: Text, place: Place, room: int, levels: int
    ) -> tuple[list[int], list[int], list[float]]:
        """Parents, tokens and values of the nodes that follow there, best first."""
        parents, tokens, values = list[int](), list[int](), list[float]()
        heap: list[
            tuple[float, int, int, int, int, Place]
        ] = []  # -value, insertion order, level, parent, token, place
        order, value, level, begin = 0, 1.0, 0, place[1]
        while True:
            if level < levels and not (
                heap and -heap[0][0] >= value
            ):  # what all places go on with alike is best
                run = strings.alike(place, min(room - len(tokens), levels - level), text, begin)
                parents += range(len(tokens), len(tokens) + len(run))
                tokens += run
                values += [value] * len(run)
                place, level = (place[0], place[1] + len(run)), level + len(run)
            if level < levels and len(tokens) < room:
                # What is surely too rare is left out at once; the share is rounded down, the value
                # itself decides.
                total, steps = strings.after(place, self.min_prob / value * (1 - 1e-9), text, begin)
                for count, _, token, thing in steps if self.tree else steps[:1]:
                    if (
                        chance := value * count / total if count < total else value
                    ) >= self.min_prob:
                        order += 1
                        heappush(
                            heap,
                            (-chance, order, level + 1, len(tokens), token, (thing, place[1] + 1)),
                        )
            if not heap or len(tokens) >= room:
                return parents, tokens, values
            chance, _, level, parent, token, place = heappop(heap)
            value = -chance
            parents.append(parent)
            tokens.append(token)
            values.append(value)
