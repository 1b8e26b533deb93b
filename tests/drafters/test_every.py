"""What every drafter keeps to: its budget, its depth, and silence after a token that ends the
text.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foretell.cache.cache import Cache
from foretell.core.context import Context
from foretell.core.drafter import Drafter
from foretell.core.request import Request
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Reply, Sampling
from foretell.engine.engine import Engine
from foretell.engine.live import Live, Task
from foretell.engine.messages import handle_message
from foretell.speculation.strategy import Speculative
from tests import laws

# Every method, and a third of its further specs.
DRAFTERS = [
    spec
    for place, spec in enumerate(laws.claiming("exact", "greedy", "bounded", "lossy"))
    if laws.is_first(spec) or place % 3 == 0
]
MANY = ["draft:drafts=7,length=5", "retrieval-fused:drafts=7,threshold=0", "lookahead:window=2,n=3"]


def answered(ask: Ask, cache: Cache, tokens: list[int], ctx: Context) -> Reply:
    """The reply to an ask on the branch `tokens`, as many forwards as it may take."""
    whole = False
    while not whole:
        job, whole = cache.prepare(ask, tokens, len(tokens))
        with torch.inference_mode():
            reply = ctx.models[ask.model].forward([job])[0]
    return reply


def drafted(strategy: Speculative, ctx: Context, state: Any, budget: int) -> TokenTree:
    """One draft; its asks are answered by hand, other messages by the engine."""
    steps = strategy.drafter.steps(ctx, state, budget)
    engine: Any = ctx.engine
    live = Live(0, ctx, Task(steps), 0.0)
    live.next_branch = 1 + max(ctx.branches)
    reply: Any = None
    while True:
        try:
            message = steps.send(reply)
        except StopIteration as end:
            assert isinstance(end.value, TokenTree)
            return end.value
        if isinstance(message, Ask):
            tokens = ctx.branches[message.branch].tokens
            cache = engine.cache_of(live, message.model, message.branch)
            if cache.beside is not None:
                answered(Ask(TokenTree(tokens[-1]), rows=()), cache.beside, tokens, ctx)
            reply = answered(message, cache, tokens, ctx)
        else:
            handle_message(engine, live, live.root, message)
            reply = live.root.answer


def proposes(spec: str) -> bool:
    """Whether it drafts by itself; others draft of rows that the step before computed."""
    strategy = laws.build(spec)
    assert isinstance(strategy, Speculative)
    return type(strategy.drafter).target_rows is Drafter.target_rows


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("spec", [*filter(proposes, [*DRAFTERS, *MANY])])
def test_no_draft_is_larger_or_deeper_than_it_may_be(spec: str, temperature: float) -> None:
    strategy = laws.build(spec)
    assert isinstance(strategy, Speculative)
    models = laws.world(strategy, 8, copy=2.0)
    engine = Engine(models)
    for seed in range(2):  # something to draw from, for those that learn from others
        sampling = Sampling(max_new_tokens=24, temperature=1.0, seed=seed)
        laws.finish(engine, engine.add(Request(laws.PROMPT, strategy, sampling)))
    largest = 0
    for seed in range(2 if temperature else 1):
        for room in (1, 2, 3, 6, 40):
            sampling = Sampling(max_new_tokens=room, temperature=temperature, seed=seed)
            ctx = Context(engine, Request(laws.PROMPT, strategy, sampling)).scope_to(
                strategy.drafter
            )
            state = strategy.drafter.start(ctx)
            for budget in (1, 2, 3, 5, 9):
                tree = drafted(strategy, ctx, state, budget)
                tree.check()
                assert len(tree) <= budget, f"{len(tree)} nodes where {budget} are allowed"
                assert max(tree.depths) <= ctx.depth == room - 1
                assert all(0 < value <= 1 for value in tree.values), "the policy needs a chance"
                largest = max(largest, len(tree))
    assert largest > 1, "nothing was drafted: not put to the test"


class Refusing:
    """A processor, as of a grammar, that has no answer after an end; `asked`: how often."""

    def __init__(self, ends: set[int], prompt: int):
        self.ends = ends
        self.prompt = prompt
        self.asked = 0

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.asked += 1
        output = ids[0, self.prompt :].tolist()
        assert not self.ends & set(output), f"asked for what follows {output}"
        return scores


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("spec", [*DRAFTERS, *MANY])
def test_no_drafter_asks_what_follows_an_end(spec: str, temperature: float) -> None:
    """Two of four tokens end the text, so that many drafts contain an end."""
    strategy = laws.build(spec)
    assert isinstance(strategy, Speculative)
    models = laws.world(strategy, 4, copy=1.0)
    engine = Engine(models)
    for seed in range(3):
        sampling = Sampling(max_new_tokens=16, temperature=1.0, seed=seed)
        laws.finish(engine, engine.add(Request(laws.PROMPT, strategy, sampling)))
    for seed in range(10 if temperature else 1):
        processor = Refusing({0, 1}, len(laws.PROMPT))
        sampling = Sampling(
            max_new_tokens=16,
            temperature=temperature,
            seed=seed,
            stop_token_ids=(0, 1),
            logits_processors=(processor,),
        )
        ctx = Context(engine, Request(laws.PROMPT, strategy, sampling)).scope_to(strategy.drafter)
        drafted(strategy, ctx, strategy.drafter.start(ctx), 12).check()
