"""The spans of a passage as tokens, in a tree of what they begin with alike, and the search for
those that are the likeliest answers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from foretell.core.tree import TokenTree
from foretell.core.types import Message
from foretell.strategies.log_probs import log_probs
from foretell.strategies.rollouts import RowsReply

if TYPE_CHECKING:
    from foretell.core.context import Context

WORD = re.compile(r"\w+|[^\w\s]")
NODES = 1024  # of one tree, unless all spans that begin with one token have more
ROWS = 256  # of one forward
Text = tuple[int, ...]


# --- spans


@dataclass(slots=True)
class Stem:
    """Tokens that some spans begin with, one token longer than its parent."""

    token: int = -1  # the last one; -1: nothing yet
    below: dict[int, Stem] = field(default_factory=dict)  # by their last token
    is_span: bool = False  # whether it is a span
    longest_span: int = 0  # tokens of the longest span that begins so
    size: int = 1  # stems from this one on


def iterate_spans(passage: str, longest: int) -> Iterator[str]:
    """Every stretch from one word or mark to the same or another, of at most `longest` of them, as
    it is written; 0: of any number.
    """
    word_spans = [match.span() for match in WORD.finditer(passage)]
    for first_word, (start, _) in enumerate(word_spans):
        last_word = first_word + longest if longest else len(word_spans)
        for _, span_end in word_spans[first_word:last_word]:
            yield passage[start:span_end]


def build_stem_tree(
    passage: str, longest: int, max_tokens: int, encode: Callable[[bytes], Sequence[int]]
) -> tuple[Stem, int]:
    """The tree of all spans of at most `max_tokens` tokens, each also after a space, as a text may
    begin with one; and how many different ones there are.
    """
    root = Stem()
    span_texts = dict.fromkeys(iterate_spans(passage, longest))
    span_count = 0
    for span in span_texts:
        for span_text in (span, " " + span):
            tokens = encode(span_text.encode())
            if 0 < len(tokens) <= max_tokens:
                span_count += _add_span(root, tokens)
    _measure_stems(root)
    return root, span_count


def _add_span(root: Stem, tokens: Sequence[int]) -> bool:
    """Adds a span, and returns whether it is new."""
    stem = root
    for token in tokens:
        stem = stem.below.setdefault(token, Stem(token))
        stem.longest_span = max(stem.longest_span, len(tokens))
    is_new = not stem.is_span
    stem.is_span = True
    return is_new


def _measure_stems(root: Stem) -> None:
    """Counts the stems from each on; without recursion, since spans may be long."""
    stem_order = [root]
    for stem in stem_order:
        stem_order += stem.below.values()
    for stem in reversed(stem_order):
        stem.size = 1 + sum(child.size for child in stem.below.values())
    root.longest_span = max((child.longest_span for child in root.below.values()), default=0)


def text_between(text: str, start: str, stop: str) -> str | None:
    """Text between the first `start` and the next `stop` after it; empty marks are the text's
    ends. None where a mark is missing.
    """
    position = text.find(start)
    if position < 0:
        return None
    position += len(start)
    end_position = text.find(stop, position) if stop else len(text)
    return None if end_position < 0 else text[position:end_position]


# --- the search


@dataclass(frozen=True)
class Found:
    """A span as an answer, with its end; `total`: its log-probability."""

    text: Text
    total: float
    score: float


@dataclass(frozen=True)
class Place:
    """A stem that is to be looked at; `parent`: the node of the one before it."""

    stem: Stem
    parent: int
    text: Text
    total: float


@dataclass
class Search:
    """The best `count` spans so far, and what may still be among them."""

    ctx: Context
    rows_of: Callable[[TokenTree, Sequence[int]], RowsReply]
    normalised: bool
    count: int
    best_spans: list[Found] = field(default_factory=list)

    def read_rows(
        self, tree: TokenTree, nodes: Sequence[int]
    ) -> Generator[Message, Any, list[torch.Tensor]]:
        """The rows of these nodes, ascending, so many a forward."""
        rows_by_node: dict[int, torch.Tensor] = {}
        for start in range(0, len(nodes), ROWS):
            node_part = nodes[start : start + ROWS]
            part_tree = (
                tree if node_part[-1] == len(tree) - 1 else tree.keep(range(1, node_part[-1] + 1))
            )
            reply = yield from self.rows_of(part_tree, node_part)
            rows_by_node.update(zip(reply.nodes, reply.logits, strict=True))
        return [rows_by_node[node] for node in nodes]

    def is_hopeful(self, place: Place) -> bool:
        """Whether a span that begins so may still be one of the best."""
        score_bound = (
            place.total / (place.stem.longest_span + 1) if self.normalised else place.total
        )
        lowest_score = (
            self.best_spans[-1].score if len(self.best_spans) == self.count else -math.inf
        )
        return score_bound > lowest_score

    def offer_span(self, text: Text, total: float) -> None:
        offered_span = Found(text, total, total / len(text) if self.normalised else total)
        if total > -math.inf and all(text != other_span.text for other_span in self.best_spans):
            self.best_spans.append(offered_span)
            self.best_spans.sort(
                key=lambda other_span: -other_span.score
            )  # stable: the older one stands first
            del self.best_spans[self.count :]

    def offer_end(self, place: Place, log_probs: torch.Tensor) -> None:
        """Offers the span that has come to this row of log-probabilities (V,), if it is one."""
        if place.stem.is_span:
            end_token = max(
                sorted(self.ctx.sampler.stops), key=lambda token: float(log_probs[token])
            )
            self.offer_span((*place.text, end_token), place.total + float(log_probs[end_token]))

    def follow_greedy(self, root: Stem, row: torch.Tensor) -> Generator[Message, Any, Text | None]:
        """Greedy decoding's answer, offered with the spans it begins with; None: it is no span."""
        tree = TokenTree(self.ctx.tokens[-1])
        current_place, node = Place(root, 0, (), 0.0), 0
        while True:
            logs = log_probs(self.ctx, row, current_place.text)
            self.offer_end(current_place, logs)
            token = int(logs.argmax())
            text, total_log_prob = (
                (*current_place.text, token),
                current_place.total + float(logs[token]),
            )
            if token in self.ctx.sampler.stops:
                return text if current_place.stem.is_span else None
            if token not in current_place.stem.below:
                return None
            current_place = Place(current_place.stem.below[token], node, text, total_log_prob)
            node = tree.add(node, token)
            if self.ctx.ends(tree, node):
                if current_place.stem.is_span:
                    self.offer_span(text, total_log_prob)
                return text if current_place.stem.is_span else None
            (row,) = yield from self.read_rows(tree, [node])

    def run(self, root: Stem, row: torch.Tensor) -> Generator[Message, Any, None]:
        """Looks at all spans, those with the likeliest first token first."""
        places = self.places_below(Place(root, 0, (), 0.0), 0, log_probs(self.ctx, row, ()))
        places.sort(key=lambda place: -place.total)
        for group in group_places(places):
            tree = TokenTree(self.ctx.tokens[-1])
            while group:
                group = yield from self.search_level(tree, group)

    def search_level(
        self, tree: TokenTree, places: Sequence[Place]
    ) -> Generator[Message, Any, list[Place]]:
        """Looks at these places, which lie at one depth; returns those below them."""
        places_by_node: dict[int, Place] = {}
        for place in filter(self.is_hopeful, places):
            node = tree.add(place.parent, place.text[-1])
            if not self.ctx.ends(tree, node):
                places_by_node[node] = place
            elif place.stem.is_span:
                self.offer_span(place.text, place.total)
        node_rows = yield from self.read_rows(tree, list(places_by_node))
        places_below = []
        for (node, place), row in zip(places_by_node.items(), node_rows, strict=True):
            logs = log_probs(self.ctx, row, place.text)
            self.offer_end(place, logs)
            places_below += self.places_below(place, node, logs)
        return places_below

    def places_below(self, place: Place, node: int, log_probs: torch.Tensor) -> list[Place]:
        """Returns the possible places below this one."""
        child_stems = list(place.stem.below.values())
        child_log_probs = (
            log_probs[[stem.token for stem in child_stems]].tolist() if child_stems else []
        )
        return [
            Place(stem, node, (*place.text, stem.token), place.total + child_log_prob)
            for stem, child_log_prob in zip(child_stems, child_log_probs, strict=True)
            if child_log_prob > -math.inf
        ]


def group_places(places: Sequence[Place]) -> Iterator[list[Place]]:
    """Places whose stems fit into one tree."""
    place_group: list[Place] = []
    stem_count = 0
    for place in places:
        if place_group and stem_count + place.stem.size > NODES:
            yield place_group
            place_group, stem_count = [], 0
        place_group.append(place)
        stem_count += place.stem.size
    if place_group:
        yield place_group
