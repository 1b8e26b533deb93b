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
    """Rows beside a tree: `counts[i]` of them below node i; nodes after the last have none."""

    counts: Sequence[int]
    # From the states (n, E) that enter layer `entry` at the rows' nodes to those that the rows
    # enter it with, (n, E). At entry 0 nobody knows them, and it is given None.
    vectors: Callable[[torch.Tensor | None], torch.Tensor]
    entry: int = 0
    nodes: list[int] = field(init=False)  # (n,) of each row
    places: list[int] = field(init=False)  # (n,) in its chain, from 0

    def __post_init__(self) -> None:
        row_pairs = [
            (node, row_place)
            for node, count in enumerate(self.counts)
            for row_place in range(count)
        ]
        self.nodes = [node for node, _ in row_pairs]
        self.places = [place for _, place in row_pairs]

    def to_width(self, tree: TokenTree) -> TokenTree:
        """The nodes of the tree, and the rows after the last of them."""
        wide_tree = TokenTree(tree.tokens[0])
        for node in range(1, len(tree)):
            wide_tree.add(tree.parents[node], tree.tokens[node])
        last_row = -1
        for node, row_place in zip(self.nodes, self.places, strict=True):
            last_row = wide_tree.add(last_row if row_place else node, BLANK)
        return wide_tree


Answers = Generator[Message, Any, tuple[Reply, list[torch.Tensor]]]


def read_beside(
    ctx: Context,
    tree: TokenTree,
    extra_rows: Beside,
    model: str = "target",
    taps: Sequence[int] = (),
) -> Answers:
    """The reply with the rows of all nodes of `tree`; and of each node its rows' logits (n, V).

    With an entry above 0 the layers below run over the nodes alone, and those from there on over
    both: two forwards, in which no layer runs twice over a node.
    """
    if not extra_rows.nodes:
        plain_reply: Reply = yield Ask(
            tree, model, ctx.branch, rows=range(len(tree)), taps=tuple(taps)
        )
        return plain_reply, [plain_reply.logits[:0]] * len(tree)
    wide_tree = extra_rows.to_width(tree)
    all_rows = range(len(wide_tree))
    layers: tuple[int, ...] | None = None
    if not extra_rows.entry:
        states = extra_rows.vectors(None)
    else:
        entry_layer, count = extra_rows.entry, len(ctx.models[model].layout)
        tapped_layers = tuple({entry_layer, *(tap for tap in taps if tap < entry_layer)})
        layers = tuple(range(entry_layer))
        lower_reply = yield Ask(tree, model, ctx.branch, rows=[], taps=tapped_layers, layers=layers)
        entering_states = lower_reply.hidden[entry_layer]
        # Nodes follow the tokens that the cache lacked.
        first_node = len(entering_states) - len(tree)
        row_states = extra_rows.vectors(
            entering_states[[first_node + node for node in extra_rows.nodes]]
        )
        states = torch.cat([entering_states, row_states.to(entering_states)])
        layers = tuple(range(entry_layer, count))
    reply: Reply = yield Ask(
        wide_tree, model, ctx.branch, rows=all_rows, taps=tuple(taps), layers=layers, states=states
    )
    row_logits: list[torch.Tensor] = []
    first_row = len(tree)
    for node in range(len(tree)):
        count = extra_rows.counts[node] if node < len(extra_rows.counts) else 0
        row_logits.append(reply.logits[first_row : first_row + count])
        first_row += count
    row_count = len(wide_tree) - len(tree)
    node_count = len(reply.new) - row_count  # of the nodes, and of tokens before them
    node_reply = Reply(
        logits=reply.logits[: len(tree)],
        hidden={tap: states[:node_count] for tap, states in reply.hidden.items()},
        nodes=reply.nodes[: len(tree)],
        new=reply.new[:node_count],
        seconds=reply.seconds,
        computed_by=reply.computed_by,
    )
    return node_reply, row_logits
