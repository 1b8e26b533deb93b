"""The numbers of a request, where a step is not one commit of one text."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foretell.core.context import Context
from foretell.core.request import Request
from foretell.core.stats import Stats, row_logprobs
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Commit, Sampling, Steps
from foretell.engine.engine import Engine
from foretell.speculation.strategy import Strategy
from foretell.strategies.plain import Plain
from foretell.testing.toy import Toy
from tests import laws
from tests.engine.test_engine import Beam
from tests.engine.users import Ahead, BestOf, Guidance


def run(strategy: Strategy, count: int = 10, **more: Any) -> Stats:
    models = laws.world(strategy, 8, copy=1.5)
    engine = Engine(models)
    live = engine.add(Request([1, 2, 1], strategy, Sampling(max_new_tokens=count), **more))
    laws.finish(engine, live)
    assert live.ctx.stats.tokens == count == len(live.ctx.output)
    return live.ctx.stats


def test_steps_are_forwards_and_not_commits() -> None:
    """Several texts share a forward, so their tokens are one step."""
    for strategy in (Plain(), Beam(3), BestOf(Plain(), 3)):
        stats = run(strategy)
        assert stats.calls["target"] == 10
        assert stats.steps == 9 and stats.first_tokens == 1 and stats.mat == 1.0, strategy


def test_a_drafted_text_has_fewer_steps() -> None:
    for strategy in (laws.build("token-recycling"), laws.build("draft"), Ahead()):
        stats = run(strategy, 40)
        assert stats.steps == stats.calls["target"] - 1
        assert stats.mat == pytest.approx((40 - stats.first_tokens) / stats.steps) and stats.mat > 1


class Late(Strategy):
    """Commits all its tokens at the end, as a search does."""

    def run(self, ctx: Context) -> Steps:
        tree = TokenTree(ctx.tokens[-1])
        tokens: list[int] = []
        for _ in range(10):
            reply = yield Ask(tree)
            tokens.append(int(reply.logits[-1].argmax()))
            tree.add(len(tree) - 1, tokens[-1])
        yield Commit(tokens, reply.logits)


def test_a_text_committed_at_the_end_has_a_token_a_forward() -> None:
    stats = run(Late())
    assert stats.steps == 9 and stats.first_tokens == 0 and stats.mat == 1.0


def test_quiet_branches_count_in_nothing_but_forwards() -> None:
    guided = run(Plain(), source=Guidance())
    assert guided.steps == 9 and guided.mat == 1.0 and guided.drafted == 0


def test_a_long_prompt_is_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretell.engine.scheduler.CHUNK", 8)
    monkeypatch.setattr("foretell.engine.scheduler.LEAST", 8)
    monkeypatch.setattr("foretell.engine.scheduler.STEP", 8)
    engine = Engine({"target": Toy(8)})
    live = engine.add(Request([1, 2] * 20, Plain(), Sampling(max_new_tokens=3)))
    laws.finish(engine, live)
    stats = live.ctx.stats
    assert stats.calls["target"] == 4 + 3 and stats.steps == 2 and stats.first_tokens == 1
    assert 0 < stats.prefill_s <= stats.ttft_s <= stats.total_s


def test_the_best_log_probabilities_are_those_of_the_row() -> None:
    rows = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 0.0]])
    (first, best), (second, _) = row_logprobs(rows, [2, 0], 2)
    logs = rows.log_softmax(-1)
    assert first == pytest.approx(float(logs[0, 2])) and second == pytest.approx(float(logs[1, 0]))
    assert [token for token, _ in best] == [1, 2]
    assert len(row_logprobs(rows, [2], 9)[0][1]) == 3


def test_nothing_is_divided_by_nothing() -> None:
    stats = Stats()
    assert stats.mat == 1.0 and stats.tokens_per_s == 0.0 and stats.tpot_s == 0.0
    assert stats.to_dict()["MAT"] == 1.0


def test_what_came_by_one_forward_came_in_one_step() -> None:
    """As a canvas may that is filled at once."""
    stats = Stats(tokens=16, first_tokens=16)
    assert stats.paced == (16, 1) and stats.mat == 16.0
    stats = Stats(tokens=16, first_tokens=6, steps=2)
    assert stats.paced == (10, 2) and stats.mat == 5.0
    stats = Stats(tokens=16, steps=1)
    assert stats.paced == (16, 2) and stats.mat == 8.0
    assert Stats(tokens=4, first_tokens=4, steps=3).mat == 0.0
