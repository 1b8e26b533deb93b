"""Rows that have no token, computed beside the nodes of a tree in the same forward.

Below a node hangs a chain of them. Each sees what its node sees, the node, and the rows of the
chain before it; no node sees any of them, so a node's logits are what they are without. They enter
the model at a layer of one's choice, with vectors of one's own. What they say is read once: their
cache rows are no token's and are never kept.

    n  rows in all, in the order of their nodes and, at one node, of their places in the chain
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Message, Reply

if TYPE_CHECKING:
    from foretell.core.context import Context

BLANK = -1  # no token's id


@dataclass
class Beside:
    """What stands beside a tree: `counts[i]` rows below node i; nodes behind the last have none."""

    counts: Sequence[int]
    # From the states (n, E) that enter layer `entry` at the rows' nodes to those that the rows
    # enter it with, (n, E). At entry 0 nobody knows them, and it is given None.
    vectors: Callable[[torch.Tensor | None], torch.Tensor]
    entry: int = 0
    nodes: list[int] = field(init=False)  # (n,) of each row
    places: list[int] = field(init=False)  # (n,) in its chain, from 0

    def __post_init__(self) -> None:
        pairs = [(node, i) for node, count in enumerate(self.counts) for i in range(count)]
        self.nodes = [node for node, _ in pairs]
        self.places = [place for _, place in pairs]

    def widened(self, tree: TokenTree) -> TokenTree:
        """The nodes of the tree, and the rows behind the last of them."""
        wide = TokenTree(tree.tokens[0])
        for node in range(1, len(tree)):
            wide.add(tree.parents[node], tree.tokens[node])
        above = -1
        for node, place in zip(self.nodes, self.places, strict=True):
            above = wide.add(above if place else node, BLANK)
        return wide


Answers = Generator[Message, Any, tuple[Reply, list[torch.Tensor]]]


def read_beside(
    ctx: Context, tree: TokenTree, beside: Beside, model: str = "target", taps: Sequence[int] = ()
) -> Answers:
    """The reply with the rows of all nodes of `tree`; and of each node its rows' logits (n, V).

    With an entry above 0 the layers below run over the nodes alone, and those from there on over
    both: two forwards, in which no layer runs twice over a node.
    """
    if not beside.nodes:
        alone: Reply = yield Ask(tree, model, ctx.branch, rows=range(len(tree)), taps=tuple(taps))
        return alone, [alone.logits[:0]] * len(tree)
    wide = beside.widened(tree)
    wanted = range(len(wide))
    layers: tuple[int, ...] | None = None
    if not beside.entry:
        states = beside.vectors(None)
    else:
        entry, count = beside.entry, len(ctx.models[model].layout)
        tapped = tuple({entry, *(tap for tap in taps if tap < entry)})
        layers = tuple(range(entry))
        lower = yield Ask(tree, model, ctx.branch, rows=[], taps=tapped, layers=layers)
        entering = lower.hidden[entry]
        first = len(entering) - len(tree)  # nodes stand behind the tokens that the cache lacked
        own = beside.vectors(entering[[first + node for node in beside.nodes]])
        states = torch.cat([entering, own.to(entering)])
        layers = tuple(range(entry, count))
    reply: Reply = yield Ask(
        wide, model, ctx.branch, rows=wanted, taps=tuple(taps), layers=layers, states=states
    )
    below: list[torch.Tensor] = []
    start = len(tree)
    for node in range(len(tree)):
        count = beside.counts[node] if node < len(beside.counts) else 0
        below.append(reply.logits[start : start + count])
        start += count
    rows = len(wide) - len(tree)
    kept = len(reply.new) - rows  # of the nodes, and of tokens before them
    nodes = Reply(
        logits=reply.logits[: len(tree)],
        hidden={tap: states[:kept] for tap, states in reply.hidden.items()},
        nodes=reply.nodes[: len(tree)],
        new=reply.new[:kept],
        seconds=reply.seconds,
        computed_by=reply.computed_by,
    )
    return nodes, below
