"""What the scratch rows of a cache are to be in the next forward, and which are there already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from foretell.cache.states import TappedStates
    from foretell.core.types import Ask


@dataclass(slots=True)
class Plan:
    """Scratch rows of the next forward: pending committed tokens, then the tree unless `part`."""

    tokens: list[int]
    parents: list[int]  # -1: the committed text
    depths: list[int]
    pending: int
    part: bool  # the tree waits: this is a piece of a long text
    layers: frozenset[Any]  # that run
    done: frozenset[Any]  # layers whose rows will then be written
    goes_on: bool = False  # further layers of a forward that stopped before
    shared: int = 0  # first nodes whose rows are there already

    @property
    def lowest(self) -> int:
        """The first of the whole layers that run."""
        return min((layer for layer in self.layers if isinstance(layer, int)), default=0)

    @property
    def kept(self) -> int:
        """How many of the first nodes keep what the scratch holds of them."""
        return len(self.tokens) if self.goes_on else self.shared


class Scratch(Protocol):
    """The scratch rows as the last forward left them."""

    length: int  # committed tokens
    trusted: int  # first scratch rows that may be kept
    tokens: list[int]
    parents: list[int]
    done: frozenset[Any]
    all_layers: frozenset[int]
    tapped: Mapping[int, torch.Tensor]  # of a forward of some layers: its nodes' hidden states
    states: TappedStates | None
    beside: Any


def plan_part(text_piece: Sequence[int], layers: frozenset[int]) -> Plan:
    """The next pending tokens alone; their rows are kept, so all layers run."""
    depths = list(range(len(text_piece)))
    parents = [depth - 1 for depth in depths]
    return Plan(list(text_piece), parents, depths, len(text_piece), True, layers, layers)


def plan_tree(ask: Ask, pending_tokens: Sequence[int], scratch: Scratch) -> Plan:
    """The pending tokens `pending_tokens` the tree, and the tree."""
    tree, pending = ask.tree, len(pending_tokens)
    tokens, parents = _join_nodes(ask, pending_tokens)
    depths = [*range(pending), *(depth + pending for depth in tree.depths)]
    layers = scratch.all_layers if ask.layers is None else frozenset(ask.layers)
    # The same nodes again, entered with states: further layers of a forward that stopped before.
    # Rows that have no token may follow them: no layer below knows these.
    known_count = len(tokens)
    while known_count > len(scratch.tokens) and tokens[known_count - 1] < 0:
        known_count -= 1
    same_nodes = _begins_with(scratch, tokens[:known_count], parents[:known_count])
    goes_on = ask.states is not None and same_nodes and not layers & scratch.done
    done = layers | scratch.done if goes_on else layers
    return Plan(tokens, parents, depths, pending, False, layers, done, goes_on)


def _join_nodes(ask: Ask, pending_tokens: Sequence[int]) -> tuple[list[int], list[int]]:
    """Tokens and parents of the pending tokens and the tree."""
    pending = len(pending_tokens)
    parents = [*range(-1, pending), *(parent + pending for parent in ask.tree.parents[1:])]
    return [*pending_tokens, *ask.tree.tokens], parents


def _begins_with(scratch: Scratch, tokens: list[int], parents: list[int]) -> bool:
    count = len(tokens)
    return (scratch.tokens[:count], scratch.parents[:count]) == (tokens, parents)


def resume_ask(ask: Ask, pending_tokens: Sequence[int], scratch: Scratch) -> Ask:
    """Reduces an ask for all layers to what is left to run, where the first ones have run over its
    nodes.

    That is so after asks that ran the layers below E and tapped what enters layer E, as drafters do
    that exit early: the layers from E on are entered with those states.
    """
    first_layer = len(scratch.done)
    states = scratch.tapped.get(first_layer) if first_layer else None
    is_whole = ask.layers is None and ask.states is None and scratch.beside is None
    if states is None or not is_whole or scratch.done != frozenset(range(first_layer)):
        return ask
    needed_taps = {*ask.taps, *(() if scratch.states is None else scratch.states.taps)}
    lower_taps = {tap for tap in needed_taps if tap < first_layer}
    tokens, parents = _join_nodes(ask, pending_tokens)
    if not lower_taps <= scratch.tapped.keys() or not _begins_with(scratch, tokens, parents):
        return ask
    rest_layers = tuple(range(first_layer, len(scratch.all_layers)))
    return replace(ask, layers=rest_layers, states=states[: len(tokens)])


def accepted_path(tokens: Sequence[int], scratch: Scratch) -> list[int]:
    """The scratch rows that hold the branch's next tokens, one below the other."""
    accepted_nodes: list[int] = []
    node = -1
    child = 0
    for token in tokens[scratch.length : len(tokens) - 1]:
        while child < scratch.trusted:
            if scratch.parents[child] == node and scratch.tokens[child] == token:
                break
            child += 1
        if child >= scratch.trusted:
            break
        accepted_nodes.append(child)
        node = child
        child += 1
    return accepted_nodes


def count_reusable(plan: Plan, ask: Ask, scratch: Scratch) -> int:
    """How many of the plan's first nodes have their rows already."""
    if plan.layers != scratch.done:
        return 0
    # Nodes with given states are computed anew, and so are those whose logits are wanted.
    token_nodes = len(plan.tokens) - (0 if ask.states is None else len(ask.states))
    first_wanted = min(ask.rows) if ask.rows else len(ask.tree)
    last_candidate = min(len(scratch.tokens), token_nodes, plan.pending + first_wanted)
    shared_count = 0
    while shared_count < last_candidate:
        node = (plan.tokens[shared_count], plan.parents[shared_count])
        if node != (scratch.tokens[shared_count], scratch.parents[shared_count]):
            break
        shared_count += 1
    return plan.pending if shared_count == len(plan.tokens) else shared_count
