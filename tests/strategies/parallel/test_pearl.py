"""Drafting beside verification: the schedule of its rounds, what is written of them, and its law
against slips; that it has the law at all is in test_laws.py.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from foretell.core.random import Rng
from foretell.core.request import Request
from foretell.core.types import Ask, Sampling
from foretell.drafters.model import chains
from foretell.drafters.model import reader as reading
from foretell.engine.engine import Engine
from foretell.engine.live import Live
from foretell.errors import Unsupported
from foretell.strategies.parallel import pearl
from foretell.strategies.parallel.pearl import Pearl
from foretell.strategies.plain import Plain
from foretell.testing.toy import Toy
from foretell.verification.acceptance import verify_by_default
from tests import laws

SPECS = ["pearl:gamma=1", "pearl:gamma=2,lane=thread"]
PROMPT = [1, 2, 3, 1, 2]
TWO: Any = {"vocab": 2, "prompt": (0, 1, 0), "warm": False}  # few outcomes, so deep laws


def models(noise: float = 0.0, **more: Any) -> dict[str, Any]:
    draft = Toy(8, 3, noise=noise, copy=1.5, name="draft", **more)
    return {"target": Toy(8, 3, copy=1.5), "draft": draft}


def run(method: Any, count: int, noise: float = 0.0, **options: Any) -> Live:
    sampling = Sampling(max_new_tokens=count, **options)
    return laws.generate(method, PROMPT, laws.Setting(sampling), models(noise))


class Widths(Toy):
    """A target that notes how many nodes each forward computed."""

    def forward(self, jobs: Any) -> Any:
        self.widths = [*getattr(self, "widths", []), sum(len(job.tokens) for job in jobs)]
        return super().forward(jobs)


# --- the schedule


def test_with_a_perfect_draft_a_run_has_no_longest_length() -> None:
    """A round of the first kind gives one token, all others gamma: no round has a bonus."""
    for gamma in (1, 2, 4):
        live = run(Pearl(gamma), 1 + gamma * 6)
        assert live.ctx.stats.calls["target"] == 7
        assert live.ctx.output == run(Plain(), 1 + gamma * 6).ctx.output


def test_a_verification_takes_in_gamma_tokens_at_once() -> None:
    target = Widths(8, 3, copy=1.5)
    engine = Engine({"target": target, "draft": models()["draft"]})
    sampling = Sampling(max_new_tokens=1 + 4 * 6)
    laws.finish(engine, engine.add(Request(PROMPT, Pearl(4), sampling)))
    assert target.widths == [len(PROMPT), 4, 4, 4, 4, 4, 4]


def test_every_round_is_one_forward_of_the_target_beside_gamma_of_the_draft_model() -> None:
    live = run(Pearl(3), 90, noise=0.5, temperature=1.0)
    calls = live.ctx.stats.calls
    assert 3 * calls["target"] - 6 <= calls["draft"] <= 3 * calls["target"]


def test_after_a_refusal_a_round_begins_without_a_tail() -> None:
    """What a round commits: one token, or a whole tail and one more, or a part and a correction."""
    live = run(Pearl(4), 120, noise=1.2)
    plain = run(Plain(), 120)
    assert live.ctx.output == plain.ctx.output
    assert 35 < live.ctx.stats.calls["target"] < 120


# --- what is written


def test_nothing_unverified_is_written_at_the_end() -> None:
    """Published code stops by the length with an unverified tail after the text."""
    for count in range(1, 14):
        for noise in (0.0, 0.4, 3.0):
            live = run(Pearl(4), count, noise)
            assert (
                live.ctx.output == run(Plain(), count).ctx.output and len(live.ctx.output) == count
            )


def test_an_end_inside_a_draft_ends_the_text_there() -> None:
    whole = run(Plain(), 40).ctx.output
    for place in range(3, 12):
        setting = laws.Setting(Sampling(max_new_tokens=40), (whole[place],))
        live = laws.generate(Pearl(4), PROMPT, setting, models())
        assert live.ctx.output == whole[: whole.index(whole[place]) + 1] and live.reason == "stop"


def test_only_verified_tokens_are_streamed() -> None:
    plain = run(Plain(), 60, temperature=0.0).ctx.output
    engine = Engine(models(0.5))
    live = engine.add(Request(PROMPT, Pearl(5), Sampling(max_new_tokens=60)))
    told: list[int] = []
    while engine.live:
        for event in engine.step():
            told += event.tokens
        assert told == plain[: len(told)]
    assert told == plain and live.ctx.stats.accepted > 0


def test_the_draft_models_context_and_vocabulary_end_drafts_not_texts() -> None:
    plain = run(Plain(), 30).ctx.output
    short = {"target": models()["target"], "draft": models(context=14)["draft"]}
    setting = laws.Setting(Sampling(max_new_tokens=30))
    live = laws.generate(Pearl(4), PROMPT, setting, short)
    assert live.ctx.output == plain and live.ctx.stats.accepted > 3
    narrow = {"target": models()["target"], "draft": Toy(4, 3, copy=1.5, name="draft")}
    assert laws.generate(Pearl(4), PROMPT, setting, narrow).ctx.output == plain


# --- the law, and what it must catch


def test_no_two_decisions_share_a_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """Published code draws one number for two decisions. Here every draw of a text has a key."""
    keys: list[tuple[str, int, int]] = []
    uniform = Rng.uniform

    def noted(self: Rng, purpose: str, position: int, index: int = 0) -> float:
        keys.append((purpose, position, index))
        return uniform(self, purpose, position, index)

    monkeypatch.setattr(Rng, "uniform", noted)
    for gamma in (1, 3, 5):
        keys.clear()
        run(Pearl(gamma), 50, noise=0.6, temperature=1.0)
        assert len(keys) == len(set(keys)) > 80


def test_the_law_of_four_tokens() -> None:
    """Deep enough for a tail that is accepted, and one that is refused."""
    law = laws.check_law(Pearl(2), "plain", tokens=4, **TWO)
    assert law.depth == 2
    laws.check_law(Pearl(3), "plain", tokens=3, **TWO)


def drawn_again(ctx: Any, tree: Any, node: int, row: Any, **more: Any) -> Any:
    """A slip: draft draws are keyed by the token's position alone, as if nothing was redrawn."""
    output = [*ctx.output, *tree.tokens_to(node)]
    q = ctx.sampler.law(row, output)
    token = ctx.rng.sample(q, "draft", len(output))
    return [tree.add(node, token, law=chains.Law(q))]


RIGHT = pearl.without_bonus


def corrected_wrongly(last: int, tree: Any, target: Any, rng: Any, position: int) -> Any:
    """A slip: a refused draft is replaced by a plain sample of the target."""
    outcome = RIGHT(last, tree, target, rng, position)
    if outcome.token is not None and outcome.tested:
        node = outcome.path[-1] if outcome.path else 0
        outcome.token = rng.sample(target.p(node), "gumbel", position)
    return outcome


def unwarped(self: Any, reply: Any) -> Any:
    """A slip: the law kept of a draft is not the one that it was drawn from."""
    return [torch.stack([row, row.flip(0)]).mean(0) for row in reply.logits]


def test_slips_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    check = partial(laws.check_law, Pearl(2), "plain", tokens=3, **TWO)
    check()
    with monkeypatch.context() as patch:
        patch.setattr(pearl, "continue_chains", drawn_again)
        with pytest.raises(AssertionError, match="used twice"):
            check()
    with monkeypatch.context() as patch:
        patch.setattr(pearl, "without_bonus", corrected_wrongly)
        with pytest.raises(AssertionError, match="off by"):
            check()
    with monkeypatch.context() as patch:
        patch.setattr(pearl, "cut_chain", lambda chain, depth: chains.cut_chain(chain, depth - 1))
        with pytest.raises((AssertionError, IndexError)):
            check()
    with monkeypatch.context() as patch:
        patch.setattr(
            pearl, "verify_by_default", lambda t, p, *a: verify_by_default(plainly(t), p, *a)
        )
        with pytest.raises(AssertionError, match="off by"):
            check()


def plainly(tree: Any) -> Any:
    """A slip: the laws of a carried tail are lost, and its tokens judged as if drawn evenly."""
    even = chains.Law(torch.full((2,), 0.5, dtype=torch.float64))
    tree.laws = [None, *[even] * (len(tree) - 1)]
    return tree


def test_other_rows_of_the_draft_model_change_no_law(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading.DraftReader, "resized_rows", unwarped)
    laws.check_law(Pearl(2), "plain", tokens=3, drafts=False, **TWO)


def test_a_stream_needs_a_gpu() -> None:
    engine = Engine(models())
    live = engine.add(Request(PROMPT, Pearl(lane="stream"), Sampling()))
    list(engine.run())
    assert isinstance(live.error, Unsupported)
    assert "lane=stream" in str(live.error) and "CUDA" in str(live.error)


def test_asks_are_for_one_node_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids never travel as numbers of a law: a draft model's ask carries tokens, its reply rows."""
    asked = []
    answer = Ask.__init__

    def noted(self: Ask, *args: Any, **more: Any) -> None:
        answer(self, *args, **more)
        asked.append(self)

    monkeypatch.setattr(Ask, "__init__", noted)
    run(Pearl(3), 30, noise=0.4)
    rows = [ask.rows for ask in asked if ask.model == "draft"]
    assert rows and all(row is not None and len(row) == 1 for row in rows)
