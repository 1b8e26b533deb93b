"""One step's drafting without an engine's loop."""

from __future__ import annotations

import copy
from collections.abc import Generator, Sequence
from typing import Any

from foretell.core.context import Context
from foretell.core.drafter import Drafter
from foretell.core.random import Door
from foretell.core.request import Request
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Reply, Sampling
from foretell.engine.engine import Engine
from foretell.speculation.strategy import Speculative
from foretell.testing.toy import Toy


def drive_step(
    drafter: Drafter,
    sampling: Sampling,
    toy: Toy,
    prompt: Sequence[int],
    budget: int,
    rng: Door | None = None,
    draft: Toy | None = None,
) -> tuple[TokenTree, list[Ask], Context]:
    """Runs the drafting of one step, answering each ask with rows worked out by hand.

    `toy` is the target, and the draft model where `draft` is None.
    """
    draft = draft or toy
    request = Request(prompt, Speculative(drafter), sampling, rng=rng)
    ctx = Context(Engine({"target": toy, "draft": draft}), request)
    steps: Generator[Any, Any, TokenTree] = drafter.steps(ctx, drafter.start(ctx), budget)
    asks: list[Ask] = []
    value = None
    while True:
        try:
            ask = steps.send(value)
        except StopIteration as end:
            end.value.check()
            return end.value, asks, ctx
        assert isinstance(ask, Ask) and ask.rows
        asks.append(copy.deepcopy(ask))  # the tree of the ask goes on growing
        nodes = list(ask.rows)
        value = Reply(draft.score(prompt, ask.tree)[nodes], {}, nodes)
