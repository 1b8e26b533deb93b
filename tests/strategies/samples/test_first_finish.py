"""First finish search: the shortest of the samples that the same draws give one by one."""

from __future__ import annotations

from typing import Any

import pytest

from foretell.core.request import Request
from foretell.core.types import Sampling
from foretell.drafters.lookup.ngram import Ngram
from foretell.engine.engine import Engine
from foretell.engine.live import Live
from foretell.strategies.plain import Plain
from foretell.strategies.samples.first_finish import FirstFinish
from foretell.testing.toy import Toy

SPECS = ["first-finish:n=1", "first-finish:n=3,inner=ngram"]
PROMPT = [0, 1, 2, 0, 1]


def sampled(seed: int, **options: Any) -> Sampling:
    return Sampling(temperature=1.0, seed=seed, stop_token_ids=(3,), **options)


def search(config: Any, sampling: Sampling, beside: int = 0) -> Live:
    engine = Engine({"target": Toy(5, 1, copy=1.0)})
    live = engine.add(Request(PROMPT, config, sampling))
    for seed in range(beside):
        engine.add(Request([2, 1, seed], FirstFinish(3), sampled(seed, max_new_tokens=11)))
    list(engine.run())
    assert live.error is None, live.error
    return live


def traces(seed: int, n: int, most: int) -> list[list[int]]:
    """Each sample by itself: those of a search that ends none early."""

    class Patient(FirstFinish):
        def sample(self, ctx: Any, finished: list[tuple[int, int]]) -> Any:
            texts[ctx.branch] = ctx
            yield from self.draw_sample(ctx)
            finished.append((len(ctx.output), ctx.branch))
            outputs[ctx.branch] = list(ctx.output)

    texts: dict[int, Any] = {}
    outputs: dict[int, list[int]] = {}
    search(Patient(n), sampled(seed, max_new_tokens=most))
    return [outputs[branch] for branch in sorted(outputs)]


@pytest.mark.parametrize("inner", [None, Ngram()])
def test_the_answer_is_the_shortest_finished_sample(inner: Any) -> None:
    shorter = 0
    for seed in range(20):
        texts = traces(seed, 4, 12)
        done = [text for text in texts if text[-1] == 3]
        want = min(done, key=len) if done else texts[0]
        live = search(FirstFinish(4, inner), sampled(seed, max_new_tokens=12))
        assert live.ctx.branches[live.result].output == want
        assert live.reason == ("stop" if done else "length")
        assert list(live.ctx.branches) == [live.result] and not live.caches
        shorter += len(want) < len(texts[0])
    assert shorter > 5


def test_samples_that_can_only_be_longer_are_cancelled() -> None:
    for seed in range(8):
        live = search(FirstFinish(4), sampled(seed, max_new_tokens=12))
        steps = len(live.ctx.branches[live.result].output)
        # One forward reads the prompt; one may be under way for others when the first has ended.
        assert live.ctx.stats.calls["target"] <= steps + 2


def test_one_sample_is_plain_sampling() -> None:
    for seed in range(8):
        sampling = sampled(seed, max_new_tokens=9)
        assert search(FirstFinish(1), sampling).ctx.output == search(Plain(), sampling).ctx.output


def test_other_requests_change_nothing() -> None:
    for seed in range(6):
        alone = search(FirstFinish(3, Ngram()), sampled(seed, max_new_tokens=12))
        among = search(FirstFinish(3, Ngram()), sampled(seed, max_new_tokens=12), beside=3)
        outputs = [live.ctx.branches[live.result].output for live in (alone, among)]
        assert outputs[0] == outputs[1]
