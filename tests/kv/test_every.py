"""What every cache policy is held to."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foretell.cards import card
from foretell.core.context import Context
from foretell.core.request import Request
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Commit, Drop, Finish, Fork, Sampling, Steps
from foretell.engine.engine import Engine
from foretell.speculation.strategy import Strategy
from foretell.strategies.plain import Plain
from tests.cache.users import by_chunks
from tests.kv.policies import JOINED, NAMES, PROMPT, drafted, large, run, small, target

every = pytest.mark.parametrize("name", [*NAMES, *JOINED])


@every
def test_with_room_for_everything_it_changes_nothing(name: str) -> None:
    (want,) = run(target(), [PROMPT], None)
    (live,) = run(target(), [PROMPT], large(name))
    assert live.ctx.output == want.ctx.output


@every
def test_it_changes_something(name: str) -> None:
    """Else none of these tests would say anything; but what is exact changes no text."""
    texts = []
    for kv in (None, small(name)):
        lives = run(target(), [PROMPT, PROMPT[3:], PROMPT[:-2]], kv)
        texts.append([live.ctx.output for live in lives])
    exact = "+" not in name and card(name, "kv").guarantee == "exact"
    assert (texts[0] == texts[1]) == exact


@every
@pytest.mark.parametrize("wrong", [0, 3, 10])
def test_drafts_leave_the_text_as_it_is(name: str, wrong: int) -> None:
    kv = small(name)
    (want,) = run(target(), [PROMPT], kv)
    (live,) = run(target(), [PROMPT], kv, drafted(want.ctx.output, wrong))
    assert live.ctx.output == want.ctx.output
    if wrong == 0:
        assert live.ctx.stats.calls["target"] < want.ctx.stats.calls["target"]


@every
def test_a_text_in_company_is_the_text_alone(name: str) -> None:
    kv = small(name)
    prompts = [PROMPT, PROMPT[4:], PROMPT[:8], PROMPT[:3]]
    together = run(target(), prompts, kv)
    for prompt, live in zip(prompts, together, strict=True):
        (alone,) = run(target(), [prompt], kv)
        assert live.ctx.output == alone.ctx.output


class OnACopy(Strategy):
    """Reads the prompt and goes on on a copy of it, beside one that writes something else."""

    def run(self, ctx: Context) -> Steps:
        yield Ask(TokenTree(ctx.tokens[-1]), rows=())
        other, own = yield Fork(ctx.branch, 2)
        for token in (5, 7, 9):
            view = ctx.on(other)
            yield Ask(TokenTree(view.tokens[-1]), branch=other)
            yield Commit([token], torch.empty(0), other)
            if token == 5:
                yield Ask(TokenTree(ctx.on(own).tokens[-1]), branch=own, rows=())
        yield Drop(other)
        yield from Plain().run(ctx.on(own))
        yield Finish(own)


@every
def test_a_copy_of_a_prompt_goes_on_as_the_prompt(name: str) -> None:
    kv = small(name)
    (want,) = run(target(), [PROMPT], kv)
    (live,) = run(target(), [PROMPT], kv, OnACopy())
    assert live.error is None and live.ctx.output == want.ctx.output


@every
def test_a_prompt_in_pieces_keeps_the_rows_of_a_whole_one(name: str) -> None:
    """In float64: what a form makes of a row magnifies its rounding."""
    kv = small(name)
    model = target("llama", torch.float64)
    held = []
    for chunk in (1000, 7, 1):
        engine = Engine({"target": model}, plan=by_chunks(chunk))
        sampling = Sampling(temperature=0.0, max_new_tokens=9)
        policy = kv.build_policy(model)
        live = engine.add(Request(list(PROMPT), Plain(), sampling, policy=policy))
        rows: Any = None
        while engine.live:
            engine.step()
            if ("target", 0) in live.caches and len(live.ctx.output) == 8:
                cache = live.caches["target", 0]
                rows = [part[:, : cache.base].clone() for part in (*cache.k, *cache.v)]
        held.append((live.ctx.output, rows))
    for output, rows in held[1:]:
        assert output == held[0][0]
        for ours, whole in zip(rows, held[0][1], strict=True):
            assert torch.allclose(ours, whole, atol=1e-9)


@every
def test_it_holds_no_more_rows_than_it_declares(name: str) -> None:
    kv = small(name)
    last = getattr(kv, "window", 0) or getattr(kv, "recent", 0)
    budget = getattr(kv, "budget", 0) or getattr(kv, "sinks", 0) + last
    if not budget:
        pytest.skip("its rows are a share of the text: see its own tests")
    parts = getattr(kv, "parts", (kv,))
    prompt_alone = any(part.settles for part in parts)  # what follows it stays
    if not prompt_alone and not any(part.role == "evictor" for part in parts):
        pytest.skip("it gives up no rows")
    most = budget + getattr(kv, "every", 1) - 1
    engine = Engine({"target": target()})
    sampling = Sampling(temperature=0.0, max_new_tokens=24)
    live = engine.add(Request(list(PROMPT), Plain(), sampling, policy=kv.build_policy(target())))
    seen = []
    while engine.live:
        engine.step()
        if ("target", 0) in live.caches and len(live.ctx.output) > 1:
            cache = live.caches["target", 0]
            grown = cache.length - len(PROMPT) if prompt_alone else 0
            seen.append(cache.base - grown)
    assert len(seen) > 10 and max(seen) <= most and max(seen) >= budget


@every
def test_rows_are_given_up_again_where_a_cache_is_computed_anew(name: str) -> None:
    kv = small(name)
    (want,) = run(target(), [PROMPT], kv)
    engine = Engine({"target": target()})
    sampling = Sampling(temperature=0.0, max_new_tokens=24)
    live = engine.add(Request(list(PROMPT), Plain(), sampling, policy=kv.build_policy(target())))
    while engine.live:
        engine.step()
        if engine.live and len(live.ctx.output) in (5, 14):
            live.caches["target", 0].forget()
    assert live.ctx.output == want.ctx.output
