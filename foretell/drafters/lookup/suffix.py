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
- factor and offset are 4 and 8 where the reference has 1 and 0: a draft no longer than its match
gave fewer tokens a step than plain prompt lookup on recorded answers, and how many nodes pay is the
policy's choice
- it branches unless told not to
- shares are of the places that something follows, so that the text's own end does not count against
a copy
- a copy of what stands at most 8 times goes on into itself there
- an ending is searched up to half of `depth`, and only if it stands at least twice as often as the
last longer one tried
- the last 8 tokens of a prompt stand before its output in what is shared
- of what is shared the oldest tokens are forgotten one by one
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Annotated, NamedTuple

from foretell.core.context import Context
from foretell.core.drafter import Drafter, Feedback
from foretell.core.settings import Range
from foretell.core.tree import TokenTree
from foretell.core.tree_building import plant_tree
from foretell.drafters.lookup.prompt_tries import Beginnings
from foretell.drafters.lookup.suffix_tree import Place, Suffixes, Text

# tokens of the prompt that stand before an output in the shared store, so that its beginning can
# match
LEAD = 8


@dataclass
class State:
    """State of a request."""

    local: Suffixes  # of its text alone
    text: Text
    past: Suffixes | None  # of the outputs of all requests, this one's included
    output: Text  # its part of `past`
    known: int  # tokens of the text taken in


class Nodes(NamedTuple):
    """Nodes of a draft, without the root, which is 0: parents, tokens and values."""

    parents: list[int]
    tokens: list[int]
    values: list[float]


class Proposal(NamedTuple):
    """A draft after a match of so many tokens; `score`: the sum of the values."""

    score: float
    match: int
    nodes: Nodes


@dataclass(frozen=True)
class Suffix(Drafter):
    """Lengths are counts of tokens, `min_prob` is a product of shares, `megabytes` bounds the
    shared store.
    """

    # strings counted; a match and the draft after it are together no longer
    depth: Annotated[int, Range(2, 256)] = 64
    factor: Annotated[float, Range(0, 64)] = 4.0  # nodes drafted for each token of the match
    offset: Annotated[float, Range(-64, 64)] = 8.0  # nodes drafted besides
    min_prob: Annotated[float, Range(0, 1)] = 0.1  # no node has a smaller value
    tree: bool = True  # branch, instead of following the most frequent token alone
    shared: bool = False  # search past outputs of the same tenant too
    # of past outputs and their counts kept, the newest
    megabytes: Annotated[int, Range(1, 1 << 16)] = 64

    @property
    def needs(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("tree",) if self.tree else ()

    def start(self, ctx: Context) -> State:
        beginnings = ctx.shared(lambda: Beginnings(self.depth), "beginnings")
        state = State(*beginnings.begin_text(ctx.tokens), None, Text(), len(ctx.tokens))
        if self.shared:
            vocab = ctx.models["target"].vocab
            state.past = ctx.shared(lambda: Suffixes(self.depth, self.megabytes << 20, vocab))
            state.past.extend(state.output, ctx.tokens[-LEAD:])
        return state

    def propose(self, ctx: Context, state: State, budget: int) -> TokenTree:
        self._read_text(ctx, state)
        best_draft = self._search_store(state.local, state.text, budget - 1, ctx.depth)
        if state.past is not None:
            past_draft = self._search_store(state.past, state.output, budget - 1, ctx.depth)
            if past_draft.score > best_draft.score:
                best_draft = past_draft
        return plant_tree(ctx.tokens[-1], *best_draft.nodes, "suffix", best_draft.match)

    def observe(self, ctx: Context, state: State, step: Feedback) -> None:
        if state.past is not None:  # the last tokens of a request are for others too
            self._read_text(ctx, state)

    def _read_text(self, ctx: Context, state: State) -> None:
        """Takes in what the text has more than last time."""
        new_tokens = ctx.tokens[state.known :]
        if not new_tokens:
            return
        state.local.extend(state.text, new_tokens)
        if state.past is not None:
            state.past.extend(state.output, new_tokens)
        state.known += len(new_tokens)

    def _search_store(self, strings: Suffixes, text: Text, size: int, levels: int) -> Proposal:
        """The best draft of at most `size` nodes on so many levels."""
        best_draft = Proposal(0.0, 0, Nodes([], [], []))
        last_count = 0  # how often the last ending stood that was tried
        for match, count, place in strings.find_matches(text, self.depth // 2):
            max_nodes = min(size, math.floor(match * self.factor + self.offset + 1e-6))
            if max_nodes <= best_draft.score:  # nor has a shorter match more room
                break
            if count >= 2 * last_count:
                last_count = count
                depth = min(levels, self.depth - match)
                nodes = self._expand_match(strings, text, place, max_nodes, depth)
                score = sum(nodes.values)
                if score > best_draft.score:
                    best_draft = Proposal(score, match, nodes)
        return best_draft

    def _expand_match(
        self, strings: Suffixes, text: Text, place: Place, max_nodes: int, levels: int
    ) -> Nodes:
        """The `max_nodes` best nodes that follow at a place, best first."""
        nodes = Nodes([], [], [])
        parents, tokens, values = nodes
        # (-value, insertion order, level, parent, token, place)
        heap: list[tuple[float, int, int, int, int, Place]] = []
        insertion = 0
        subtree, match = place
        length = match  # of the string, match and draft
        value, level = 1.0, 0
        while True:
            if level < levels and not (heap and -heap[0][0] >= value):
                # What all places go on with alike is best.
                max_run = min(max_nodes - len(tokens), levels - level)
                common_run = strings.common_run((subtree, length), max_run, text, match)
                parents += range(len(tokens), len(tokens) + len(common_run))
                tokens += common_run
                values += [value] * len(common_run)
                length += len(common_run)
                level += len(common_run)
            if level < levels and len(tokens) < max_nodes:
                # What is surely too rare is left out at once. The share is rounded down: the value
                # itself decides.
                min_share = self.min_prob / value * (1 - 1e-9)
                total, successors = strings.successors_of((subtree, length), min_share, text, match)
                parent = len(tokens)
                for count, _, token, child in successors if self.tree else successors[:1]:
                    child_value = value * count / total if count < total else value
                    if child_value >= self.min_prob:
                        insertion += 1
                        child_place = (child, length + 1)
                        heappush(
                            heap, (-child_value, insertion, level + 1, parent, token, child_place)
                        )
            if not heap or len(tokens) >= max_nodes:
                return nodes
            negative_value, _, level, parent, token, (subtree, length) = heappop(heap)
            value = -negative_value
            parents.append(parent)
            tokens.append(token)
            values.append(value)
