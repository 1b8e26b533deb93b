"""Sources of the target's rows: a value, so that any of them goes with any drafter.

`Direct` asks the target. Others mix rows of several branches, models or layers: guidance,
contrastive decoding, ensembles, judges. What they return is verified as the target's own rows, so
whatever drafts, the text has the mixed distribution.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from foretell.core.request import Request, RowSource
from foretell.core.settings import Settings
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Commit, Message, Reply

if TYPE_CHECKING:
    from foretell.core.context import Context
    from foretell.core.drafter import Reading

Nodes = Sequence[int] | None  # whose rows are wanted; None: of all


class Source(Settings, RowSource):
    """The base: a frozen dataclass. It asks on branches of its own, opened in `start`."""

    def start(self, ctx: Context) -> Generator[Message, Any, Any]:
        """Opens what it needs; returns its state."""
        return None
        yield Ask(TokenTree(0))  # never reached: makes this a generator

    def read_rows(
        self, ctx: Context, state: Any, tree: TokenTree, taps: Sequence[int], nodes: Nodes = None
    ) -> Reading:
        """The reply with the rows of `nodes`, ascending, and the target's hidden states `taps`."""
        raise NotImplementedError


@dataclass(frozen=True)
class Direct(Source):
    """The target's own rows."""

    def read_rows(
        self, ctx: Context, state: Any, tree: TokenTree, taps: Sequence[int], nodes: Nodes = None
    ) -> Reading:
        # All rows by name: a drafter that asks the target may have computed some nodes before.
        rows = range(len(tree)) if nodes is None else nodes
        reply: Reply = yield Ask(tree, branch=ctx.branch, rows=rows, taps=tuple(taps))
        return reply


def source_of(request: Request) -> RowSource:
    """Returns the source that gives the request's target rows."""
    return request.source or Direct()


def follow_text(ctx: Context, branch: int, start: int) -> Generator[Message, Any, None]:
    """Brings a quiet branch, opened when the text had `start` tokens, up to the text's end."""
    mirrored = len(ctx.branches[branch].output)
    missing = ctx.tokens[start + mirrored :]
    if missing:
        yield Commit(list(missing), torch.empty(0), branch)
