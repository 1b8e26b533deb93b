"""What fails ends alone, and what cannot be served says so before it costs anything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from foretell.cache.cache import Cache
from foretell.cache.job import Job
from foretell.core.context import Context
from foretell.core.request import Request
from foretell.core.stores import TENANTS
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Sampling, Steps
from foretell.engine.engine import Engine
from foretell.engine.live import Live
from foretell.errors import RequestFailed, Unsupported
from foretell.speculation.strategy import Speculative, Strategy
from foretell.strategies.plain import Plain
from foretell.testing.toy import Toy
from tests import laws
from tests.engine.users import Wise


class Poisoned(Toy):
    """Its forwards break if they hold a text whose second token is 7."""

    def run(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        first: Job,
        taps: Sequence[int],
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        if ((ids == 7) & (positions == 1)).any():
            raise RuntimeError("the device says no")
        return super().run(ids, positions, rows, first, taps)


def outputs(engine: Engine, spec: str, prompts: Sequence[list[int]]) -> list[Live]:
    sampling = Sampling(max_new_tokens=8, logit_bias={7: -1e9})
    lives = [engine.add(Request(prompt, laws.build(spec), sampling)) for prompt in prompts]
    list(engine.run())
    return lives


def engine() -> Engine:
    return Engine({"target": Poisoned(8, copy=1.0), "draft": Poisoned(8, noise=0.4, copy=1.0)})


@pytest.mark.parametrize("spec", ["plain", "ngram", "draft", "token-recycling"])
def test_a_forward_that_breaks_ends_the_request_that_broke_it(spec: str) -> None:
    prompts = [[1, 2, 1], [3, 7, 3], [4, 5, 4], [2, 7]]
    lives = outputs(engine(), spec, prompts)
    for live, prompt in zip(lives, prompts, strict=True):
        if 7 in prompt:
            assert isinstance(live.error, RequestFailed) and "says no" in str(live.error)
            assert live.reason == "error" and not live.caches
        else:
            (alone,) = outputs(engine(), spec, [prompt])
            assert live.error is None and live.ctx.output == alone.ctx.output


def test_a_job_that_cannot_be_made_ends_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Cache.prepare

    def prepare(self: Cache, ask: Ask, tokens: Sequence[int], chunk: int) -> Any:
        if tokens[0] == 3 and len(tokens) == 5:
            raise MemoryError("no room for its rows")
        return real(self, ask, tokens, chunk)

    monkeypatch.setattr(Cache, "prepare", prepare)
    good, bad = outputs(engine(), "plain", [[1, 2, 1], [3, 3, 3]])
    assert isinstance(bad.error, RequestFailed) and "no room" in str(bad.error)
    assert len(bad.ctx.output) == 2 and not bad.caches
    assert good.error is None and len(good.ctx.output) == 8


# --- what a model cannot do


@dataclass(frozen=True)
class Asking(Strategy):
    """Asks once, in a way that needs a capability."""

    change: Callable[[Ask], None]

    def run(self, ctx: Context) -> Steps:
        ask = Ask(TokenTree(ctx.tokens[-1]))
        self.change(ask)
        yield ask


def tapped(ask: Ask) -> None:
    ask.taps = (0,)


def layered(ask: Ask) -> None:
    ask.layers = (0,)


def entered(ask: Ask) -> None:
    ask.states = torch.zeros(1, 2)


def branching(ask: Ask) -> None:
    ask.tree.add(0, 1)
    ask.tree.add(0, 2)


@pytest.mark.parametrize("change", [tapped, layered, entered, branching])
def test_an_ask_the_model_cannot_answer_is_unsupported(change: Callable[[Ask], None]) -> None:
    target = Toy(8)
    target.caps = frozenset()
    made = Engine({"target": target})
    live = made.add(Request([1], Asking(change), name="asking"))
    list(made.run())
    assert isinstance(live.error, Unsupported) and target.calls == 0
    assert "asking" in str(live.error) and "toy" in str(live.error)
    assert "\n" not in str(live.error)


# --- models that a method brings


def test_a_method_brings_its_models_once_for_each_engine_and_config() -> None:
    made: list[int] = []
    wise = Wise(2, made=lambda: made.append(1))
    models = {"target": Toy(8, 3, copy=0.5)}
    first, second = Engine(models), Engine(models)
    plain = second.add(Request([1, 2, 1], Plain(), Sampling(max_new_tokens=9)))
    for engine_, count in ((first, 1), (first, 1), (second, 2)):
        live = engine_.add(
            Request([1, 2, 1], Speculative(wise, nodes=2), Sampling(max_new_tokens=9))
        )
        laws.finish(engine_, live)
        assert len(made) == count and live.ctx.stats.accepted
        assert "wise" not in engine_.models, "it is the method's own"
    laws.finish(second, plain)
    assert live.ctx.output == plain.ctx.output
    longer = Wise(3, made=wise.made)
    laws.finish(first, first.add(Request([1], Speculative(longer, nodes=2), Sampling())))
    assert len(made) == 3, "another config has another"


def test_a_method_with_a_model_of_its_own_keeps_the_laws() -> None:
    for setting in ("plain", "penalties"):
        laws.check_law(Speculative(Wise(2), nodes=2), setting)
    laws.check_batch([Speculative(Wise(2), nodes=2), Plain()])


# --- what is kept


def test_the_output_is_not_copied() -> None:
    """Or a text of n tokens would take time that grows with n for each of them."""
    made = Engine({"target": Toy(8)})
    live = made.add(Request([1], Plain(), Sampling(max_new_tokens=9)))
    output, tokens = live.ctx.output, live.ctx.tokens
    for _ in range(4):
        made.step()
    assert live.ctx.output is output and live.ctx.tokens is tokens and len(output) > 2


@dataclass(frozen=True)
class Remembering(Strategy):
    """Shares a list with the requests of its tenant."""

    def run(self, ctx: Context) -> Steps:
        seen: list[str] = ctx.shared(list)
        seen.append(ctx.request.tenant)
        yield from Plain().run(ctx)


def test_stores_are_kept_of_a_bounded_number_of_tenants() -> None:
    made = Engine({"target": Toy(8)})
    staying = made.add(Request([1], Remembering(), Sampling(max_new_tokens=900), tenant="long"))
    made.step()
    count = 2 * TENANTS
    for i in range(count):
        for tenant in (f"tenant {i}", "often"):
            live = made.add(Request([1], Remembering(), Sampling(max_new_tokens=1), tenant=tenant))
            while live.reason is None:
                made.step()
    tenants = {key[0] for key in made.stores}
    assert len(tenants) <= TENANTS + 1 and len(made.stores) == len(tenants)
    assert {"long", "often", f"tenant {count - 1}"} <= tenants and "tenant 0" not in tenants
    assert len(made.stores["often", Remembering(), "store"]) == count
    made.end(staying)
