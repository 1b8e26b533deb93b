"""The target's rows, whatever was asked of it before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from foretell.core.context import Context
from foretell.core.drafter import Drafter, Drafting
from foretell.core.request import Request
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Sampling
from foretell.speculation.strategy import Speculative
from foretell.strategies.plain import Plain
from foretell.testing.toy import Toy
from tests.cache.users import run


@dataclass(frozen=True)
class AsksTheTarget(Drafter):
    """Lets the target compute a part of the tree that is verified afterwards."""

    def steps(self, ctx: Context, state: Any, budget: int) -> Drafting:
        tree = TokenTree(ctx.tokens[-1])
        reply = yield Ask(tree, branch=ctx.branch)
        if ctx.depth:
            tree.chain([int(reply.logits[0].argmax())])
            yield Ask(tree, branch=ctx.branch)
            tree.chain([0])
        return tree


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_row_of_a_tree_that_was_computed_in_parts(temperature: float) -> None:
    models = {"target": Toy(8, seed=3)}
    sampling = Sampling(max_new_tokens=20, temperature=temperature)
    prompt = [1, 2, 3, 1]
    plain = run(models, Request(prompt, Plain(), sampling))[0].ctx.output
    live = run(models, Request(prompt, Speculative(AsksTheTarget(), nodes=4), sampling))[0]
    assert live.ctx.output == plain
    assert 0 < live.ctx.stats.accepted < live.ctx.stats.drafted
