"""How many bytes a request takes, before it takes them: what `LM.limit(budget=...)` decides by.

Counted is what a model keeps and what a forward is asked for: weights, cache rows, the
distributions that drafts are drawn from, rows of logits and masks. What layers compute in between
is not: backends differ in that, and it does not grow with the text.

    weights   of all models                    once
    rows      (length - 1, and the nodes of a tree beyond the first) x bytes of a token's keys and
              values, and a head's states      of each cache, from the beginning
    distributions      nodes x V                        where drafts are drawn
    logits    (1 + nodes) x V                  of one forward
    masks     new nodes x rows they may see    of one forward, its largest
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from foretell.cache.buffers import row_bytes

WIDE = 4  # bytes of a number of a row of logits, in float32


@dataclass(frozen=True)
class Sizes:
    """Bytes that a model takes for one of each."""

    weights: int  # all of them
    row: int  # keys and values of a token in all layers, and states that are kept for it
    logits: int  # a row
    law: int  # a distribution over its vocabulary
    pair: int  # a new node and a row that it may see, in the masks
    blocks: bool = True  # whether rows of a canvas hide some from each other


@dataclass(frozen=True)
class Footprint:
    """Bytes, by what takes them."""

    weights: int
    rows: int
    laws: int
    logits: int
    masks: int

    @property
    def total(self) -> int:
        return self.weights + self.rows + self.laws + self.logits + self.masks


@dataclass(frozen=True)
class Room:
    """Space that a budget leaves a request: drafted nodes a step, tokens of its text, the rows
    that each of its caches begins with, and the bytes that it then takes beside the weights.
    """

    nodes: int
    length: int
    rows: int
    bytes: int


@dataclass(frozen=True)
class Demand:
    """Sizes that a request asks for.

    `drawn`: whether its drafts are samples of laws; `chains`: whether no draft branches; `forced`:
    nodes that a constraint may add to a draft; `chunk`: tokens of a prompt in a forward.
    """

    prompt: int  # tokens
    length: int  # tokens of the whole text at most
    nodes: int  # drafted a step at most
    drawn: bool = False
    chains: bool = False
    forced: int = 0
    chunk: int = 512
    canvases: int = 0  # side by side at most, each computed as a whole; 0: it is no canvas


def sizes_of(model: Any) -> Sizes:
    """Sizes of a core.model.Model; those of its cache are read off an empty one."""
    cache = model.cache()
    row = row_bytes(cache.layout, cache.dtype)
    cache.drop()
    number = max(WIDE, model.dtype.itemsize)
    # A row in a narrow format is there in that format as well until it is in float32.
    narrow = model.dtype.itemsize if model.dtype.itemsize < WIDE else 0
    return Sizes(
        weights=model.weight_bytes,
        row=row + model.fed_bytes,
        logits=model.vocab * (number + narrow),
        law=model.vocab * number,
        pair=model.dtype.itemsize * model.mask_copies,
        blocks=bool(getattr(model, "block", 0)),
    )


def width_of(demand: Demand) -> int:
    """The most nodes of a step, its root counted. One token always follows a draft."""
    depth = demand.length - demand.prompt - 1
    if depth < 1:
        return 1
    return 1 + demand.forced + (min(demand.nodes, depth) if demand.chains else demand.nodes)


def rows_of(demand: Demand) -> int:
    """The most rows that a cache needs: those of all tokens but the last, which is never computed.

    A tree may still have all its nodes where two tokens are lacking, below a root whose row follows
    those of the tokens before it. A canvas has a row for each of its positions.
    """
    if demand.canvases:
        return demand.length
    branching_rows = 0 if demand.chains else max(0, width_of(demand) - 2)
    return demand.length - 1 + branching_rows


def compute_footprint(
    target: Sizes, drafts: Sequence[Sizes], demand: Demand, batch: int = 1
) -> Footprint:
    """The most that `batch` such requests take at a time, all of them in one forward.

    `drafts`: the models that draft.
    """
    if demand.canvases:
        return _of_canvases(target, demand, batch)
    width = width_of(demand)
    drafted = width - 1 - demand.forced if width > 1 else 0
    asked_models = drafts if demand.nodes else ()  # a model that is never asked has no rows
    rows = rows_of(demand) * sum(model.row for model in (target, *asked_models))
    laws = drafted * target.law if demand.drawn else 0
    logits = width * target.logits
    masks = target.pair * _count_pairs(demand, width)
    for model in asked_models:  # whose forwards are over when the target's begins
        draft_bytes = model.logits + model.pair * _count_pairs(demand, drafted)
        if draft_bytes > logits + masks:
            logits, masks = model.logits, draft_bytes - model.logits
    weights = sum(model.weights for model in (target, *drafts))
    parts = (batch * part for part in (rows, laws, logits, masks))
    return Footprint(weights, *parts)


def _of_canvases(target: Sizes, demand: Demand, batch: int) -> Footprint:
    """A row, and a mask's distribution beside its logits, of every position after the prompt."""
    copies = batch * demand.canvases
    masked_count = copies * (demand.length - demand.prompt)
    pair_count = copies * demand.length**2 if target.blocks else 0
    rows = copies * demand.length * target.row
    parts = (
        rows,
        masked_count * target.law,
        masked_count * target.logits,
        pair_count * target.pair,
    )
    return Footprint(target.weights, *parts)


def _count_pairs(demand: Demand, width: int) -> int:
    """New nodes times the rows that they may see, of the largest forward: a piece of the prompt
    before the tree, or the last step that drafts as much.
    """
    pending = demand.prompt - 1
    pieces = max(0, -(-pending // demand.chunk) - 1)  # without the tree
    last_piece = pending - pieces * demand.chunk
    forwards = [(last_piece + width, pending + width), (width, rows_of(demand))]
    most_pairs = demand.chunk * pieces * demand.chunk
    for new_nodes, seen_rows in forwards:
        if new_nodes > 1:  # a single node sees every row, and needs no mask
            most_pairs = max(most_pairs, new_nodes * seen_rows)
    return most_pairs


def find_largest(lowest: int, highest: int, fits: Callable[[int], bool]) -> int:
    """The largest number from `lowest` to `highest` that fits, where all smaller ones do as well;
    `lowest` - 1 where none does.
    """
    lowest -= 1
    while lowest < highest:
        middle = (lowest + highest + 1) // 2
        if fits(middle):
            lowest = middle
        else:
            highest = middle - 1
    return lowest


def find_room(target: Sizes, drafts: Sequence[Sizes], demand: Demand, available: int) -> Room | int:
    """The most drafts that fit into `available` bytes beside the weights, or none and the longest
    text that fits; where not even one more token does, the bytes that it needs.

    Raises nothing: who asks says what was asked for.
    """

    def count_bytes(nodes: int, length: int) -> int:
        step_footprint = compute_footprint(
            target, drafts, replace(demand, nodes=nodes, length=length)
        )
        return step_footprint.total - step_footprint.weights

    length = demand.length
    nodes = find_largest(0, demand.nodes, lambda n: count_bytes(n, length) <= available)
    if nodes < 0:
        nodes, shortest_length = 0, demand.prompt + 1
        length = find_largest(shortest_length, length, lambda n: count_bytes(0, n) <= available)
        if length < shortest_length:
            return count_bytes(0, shortest_length)
    rows = rows_of(replace(demand, nodes=nodes, length=length))
    return Room(nodes, length, rows, count_bytes(nodes, length))
