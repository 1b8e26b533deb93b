"""What the scratch rows of a cache are to be in the next forward, and which are there already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from foretell.core.types import Ask


@dataclass(slots=True)
class Plan:
    """What the scratch rows are to be: pending committed tokens, then the tree unless `part`."""

    tokens: list[int]
    parents: list[int]  # -1: the committed text
    depths: list[int]
    pending: int
    part: bool  # the tree waits: this is a piece of a long text
    layers: frozenset[int]  # that run
    done: frozenset[int]  # layers whose rows will then be written
    shared: int = 0  # first nodes whose rows are there already


class Scratch(Protocol):
    """The scratch rows as the last forward left them."""

    tokens: list[int]
    parents: list[int]
    done: frozenset[int]
    all_layers: frozenset[int]


def plan_part(piece: Sequence[int], layers: frozenset[int]) -> Plan:
    """The next pending tokens alone; their rows are kept, so all layers run."""
    depths = list(range(len(piece)))
    parents = [depth - 1 for depth in depths]
    return Plan(list(piece), parents, depths, len(piece), True, layers, layers)


def plan_tree(ask: Ask, before: Sequence[int], scratch: Scratch) -> Plan:
    """The pending tokens `before` the tree, and the tree."""
    tree, pending = ask.tree, len(before)
    tokens = [*before, *tree.tokens]
    parents = [*range(-1, pending), *(parent + pending for parent in tree.parents[1:])]
    depths = [*range(pending), *(depth + pending for depth in tree.depths)]
    layers = scratch.all_layers if ask.layers is None else frozenset(ask.layers)
    # The same nodes again, entered with states: further layers of a forward that stopped before.
    same_nodes = (scratch.tokens, scratch.parents) == (tokens, parents)
    goes_on = ask.states is not None and same_nodes and not layers & scratch.done
    done = layers | scratch.done if goes_on else layers
    return Plan(tokens, parents, depths, pending, False, layers, done)


def reusable(plan: Plan, ask: Ask, scratch: Scratch) -> int:
    """How many of the plan's first nodes have their rows already."""
    if plan.layers != scratch.done:
        return 0
    # Nodes with given states are computed anew, and so are those whose logits are wanted.
    known = len(plan.tokens) - (0 if ask.states is None else len(ask.states))
    first_wanted = min(ask.rows) if ask.rows else len(ask.tree)
    end = min(len(scratch.tokens), known, plan.pending + first_wanted)
    shared = 0
    while shared < end:
        node = (plan.tokens[shared], plan.parents[shared])
        if node != (scratch.tokens[shared], scratch.parents[shared]):
            break
        shared += 1
    return plan.pending if shared == len(plan.tokens) else shared
