"""The trees that a drafter with a head proposes on a toy."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from foretell.core.context import Context
from foretell.core.drafter import Drafter, Drafting
from foretell.core.request import Request
from foretell.core.tree import TokenTree
from foretell.core.types import Sampling
from foretell.engine.engine import Engine
from foretell.speculation.strategy import Speculative
from foretell.testing.toy import Toy


def trees(
    drafter: Drafter,
    toy: Toy,
    prompt: Sequence[int] = (1, 2, 3),
    nodes: int = 64,
    tokens: int = 6,
    **sampling: Any,
) -> tuple[list[TokenTree], dict[str, int]]:
    """What it drafts while so many tokens are written, and the calls of each model."""
    seen: list[TokenTree] = []
    kind: Any = type(drafter)

    class Spy(kind):  # type: ignore[misc]
        def steps(self, ctx: Context, state: Any, budget: int) -> Drafting:
            tree = yield from super().steps(ctx, state, budget)
            tree.check()
            seen.append(tree)
            return tree

    given: Any = drafter
    spy = Spy(**{field.name: getattr(given, field.name) for field in dataclasses.fields(given)})
    engine = Engine({"target": toy})
    options = Sampling(max_new_tokens=tokens, **{"temperature": 0.0, **sampling})
    live = engine.add(Request(list(prompt), Speculative(spy, nodes=nodes), options))
    for _ in engine.run():
        pass
    assert live.error is None, live.error
    return seen, dict(live.ctx.stats.calls)
