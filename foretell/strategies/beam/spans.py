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
from foretell.strategies.rollouts import Rows

if TYPE_CHECKING:
    from foretell.core.context import Context

WORD = re.compile(r"\w+|[^\w\s]")
NODES = 1024  # of one tree, unless all spans that begin with one token have more
ROWS = 256  # of one forward
Text = tuple[int, ...]


# --- spans


@dataclass(slots=True)
class Stem:
    """What some spans begin with, one token longer than its parent."""

    token: int = -1  # the last one; -1: nothing yet
    below: dict[int, Stem] = field(default_factory=dict)  # by their last token
    whole: bool = False  # whether it is a span
    deepest: int = 0  # tokens of the longest span that begins so
    size: int = 1  # stems from this one on


def spans(passage: str, longest: int) -> Iterator[str]:
    """Every stretch from one word or mark to the same or another, of at most `longest` of them, as
    it is written; 0: of any number.
    """
    places = [match.span() for match in WORD.finditer(passage)]
    for first, (start, _) in enumerate(places):
        last = first + longest if longest else len(places)
        for _, end in places[first:last]:
            yield passage[start:end]


def stems(
    passage: str, longest: int, most: int, encode: Callable[[bytes], Sequence[int]]
) -> tuple[Stem, int]:
    """The tree of all spans of at most `most` tokens, each also behind a space, as a text may begin
    with one; and how many different ones there are.
    """
    root = Stem()
    written = dict.fromkeys(spans(passage, longest))
    count = 0
    for span in written:
        for text in (span, " " + span):
            tokens = encode(text.encode())
            if 0 < len(tokens) <= most:
                count += _plant(root, tokens)
    _measure(root)
    return root, count


def _plant(root: Stem, tokens: Sequence[int]) -> bool:
    """Adds a span; whether it is new."""
    stem = root
    for token in tokens:
        stem = stem.below.setdefault(token, Stem(token))
        stem.deepest = max(stem.deepest, len(tokens))
    fresh = not stem.whole
    stem.whole = True
    return fresh


def _measure(root: Stem) -> None:
    """Counts the stems from each on; without recursion, since spans may be long."""
    order = [root]
    for stem in order:
        order += stem.below.values()
    for stem in reversed(order):
        stem.size = 1 + sum(child.size for child in stem.below.values())
    root.deepest = max((child.deepest for child in root.below.values()), default=0)


def between(text: str, start: str, stop: str) -> str | None:
    """What stands between the first `start` and the next `stop` behind it; empty marks are the
    text's ends. None where a mark is missing.
    """
    place = text.find(start)
    if place < 0:
        return None
    place += len(start)
    end = text.find(stop, place) if stop else len(text)
    return None if end < 0 else text[place:end]


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
    rows_of: Callable[[TokenTree, Sequence[int]], Rows]
    normalised: bool
    count: int
    best: list[Found] = field(default_factory=list)

    def rows(
        self, tree: TokenTree, nodes: Sequence[int]
    ) -> Generator[Message, Any, list[torch.Tensor]]:
        """The rows of these nodes, ascending, so many a forward."""
        found: dict[int, torch.Tensor] = {}
        for start in range(0, len(nodes), ROWS):
            part = nodes[start : start + ROWS]
            whole = tree if part[-1] == len(tree) - 1 else tree.keep(range(1, part[-1] + 1))
            reply = yield from self.rows_of(whole, part)
            found.update(zip(reply.nodes, reply.logits, strict=True))
        return [found[node] for node in nodes]

    def hopeful(self, place: Place) -> bool:
        """Whether a span that begins so may still be one of the best."""
        bound = place.total / (place.stem.deepest + 1) if self.normalised else place.total
        least = self.best[-1].score if len(self.best) == self.count else -math.inf
        return bound > least

    def offer(self, text: Text, total: float) -> None:
        found = Found(text, total, total / len(text) if self.normalised else total)
        if total > -math.inf and all(text != known.text for known in self.best):
            self.best.append(found)
            self.best.sort(key=lambda known: -known.score)  # stable: the older one stands first
            del self.best[self.count :]

    def end(self, place: Place, logs: torch.Tensor) -> None:
        """Offers the span that has come to this row of log-probabilities (V,), if it is one."""
        if place.stem.whole:
            stop = max(sorted(self.ctx.sampler.stops), key=lambda token: float(logs[token]))
            self.offer((*place.text, stop), place.total + float(logs[stop]))

    def greedy(self, root: Stem, row: torch.Tensor) -> Generator[Message, Any, Text | None]:
        """Greedy decoding's answer, offered with the spans it begins with; None: it is no span."""
        tree = TokenTree(self.ctx.tokens[-1])
        place, node = Place(root, 0, (), 0.0), 0
        while True:
            logs = log_probs(self.ctx, row, place.text)
            self.end(place, logs)
            token = int(logs.argmax())
            text, total = (*place.text, token), place.total + float(logs[token])
            if token in self.ctx.sampler.stops:
                return text if place.stem.whole else None
            if token not in place.stem.below:
                return None
            place = Place(place.stem.below[token], node, text, total)
            node = tree.add(node, token)
            if self.ctx.ends(tree, node):
                if place.stem.whole:
                    self.offer(text, total)
                return text if place.stem.whole else None
            (row,) = yield from self.rows(tree, [node])

    def run(self, root: Stem, row: torch.Tensor) -> Generator[Message, Any, None]:
        """Looks at all spans, those with the likeliest first token first."""
        places = self.below(Place(root, 0, (), 0.0), 0, log_probs(self.ctx, row, ()))
        places.sort(key=lambda place: -place.total)
        for group in grouped(places):
            tree = TokenTree(self.ctx.tokens[-1])
            while group:
                group = yield from self.level(tree, group)

    def level(
        self, tree: TokenTree, places: Sequence[Place]
    ) -> Generator[Message, Any, list[Place]]:
        """Looks at these places, which lie at one depth; returns those below them."""
        nodes: dict[int, Place] = {}
        for place in filter(self.hopeful, places):
            node = tree.add(place.parent, place.text[-1])
            if not self.ctx.ends(tree, node):
                nodes[node] = place
            elif place.stem.whole:
                self.offer(place.text, place.total)
        rows = yield from self.rows(tree, list(nodes))
        found = []
        for (node, place), row in zip(nodes.items(), rows, strict=True):
            logs = log_probs(self.ctx, row, place.text)
            self.end(place, logs)
            found += self.below(place, node, logs)
        return found

    def below(self, place: Place, node: int, logs: torch.Tensor) -> list[Place]:
        """What a place goes on to that is possible."""
        stems = list(place.stem.below.values())
        values = logs[[stem.token for stem in stems]].tolist() if stems else []
        return [
            Place(stem, node, (*place.text, stem.token), place.total + value)
            for stem, value in zip(stems, values, strict=True)
            if value > -math.inf
        ]


def grouped(places: Sequence[Place]) -> Iterator[list[Place]]:
    """Places whose stems fit into one tree."""
    group: list[Place] = []
    size = 0
    for place in places:
        if group and size + place.stem.size > NODES:
            yield group
            group, size = [], 0
        group.append(place)
        size += place.stem.size
    if group:
        yield group
