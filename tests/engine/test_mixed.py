"""Many requests of every kind at once: each ends as it would alone, and nobody waits for long."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from foretell.cache.job import Job
from foretell.core.model import Model
from foretell.core.request import Request
from foretell.core.source import Source
from foretell.core.types import Sampling
from foretell.engine.engine import Engine
from foretell.engine.live import Live
from foretell.engine.scheduler import CHUNK
from foretell.errors import RequestFailed
from foretell.speculation.strategy import Strategy
from foretell.testing.toy import Toy
from tests import laws
from tests.engine.users import BestOf, Contrast, Guidance

VOCAB = 32
POISON = 31  # as a text's second token it breaks the forward
LONG = 6000  # tokens of the long prompt


class Counting(Toy):
    """Counts the tokens of all models, and breaks on some texts."""

    computed: int = 0

    def run(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        first: Job,
        taps: Sequence[int],
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        if ((ids == POISON) & (positions == 1)).any():
            raise RuntimeError("the device says no")
        Counting.computed += ids.shape[1]
        return super().run(ids, positions, rows, first, taps)


def models() -> dict[str, Model]:
    made: dict[str, Model] = {}
    for i, name in enumerate(("target", "draft", "amateur", "judge")):
        noise = 0.3 * i
        made[name] = Counting(VOCAB, 3, noise, copy=1.0, context=8192, name=name)
    return made


def requests() -> list[Request]:
    """The first has the long prompt, the second breaks, the third will be cancelled."""
    strategies: list[Strategy] = [
        laws.build("draft:length=3"),
        laws.build("plain"),
        laws.build("ngram"),
        laws.build("token-recycling"),
        laws.build("draft:drafts=2"),
        laws.build("suffix"),
        BestOf(laws.build("ngram"), 2),
        laws.build("ngram+token-recycling"),
    ]
    sources: list[Source] = [laws.DIRECT, Guidance(), laws.DIRECT, Contrast(), laws.DIRECT]
    made = []
    for i, prompt in enumerate(laws.prompts(32, POISON)):
        if i == 0:
            prompt = [(7 * place + place * place // 9) % POISON for place in range(LONG)]
        elif i == 1:
            prompt = [1, POISON, 2]
        sampling = Sampling(
            temperature=0.9 * (i % 3 > 0), max_new_tokens=4 if i == 0 else 16 + i % 7, seed=i
        )
        strategy = strategies[i % len(strategies)]
        source = sources[i % len(sources)]
        made.append(Request(prompt, strategy, sampling, tenant=str(i), source=source))
    return made


class Waits:
    """The most tokens that were computed between two steps of each request."""

    def __init__(self) -> None:
        self.steps: dict[int, tuple[int, int]] = {}  # tokens committed, tokens computed by then
        self.longest: dict[int, int] = {}

    def note(self, lives: Sequence[Live]) -> None:
        for live in lives:
            committed = sum(len(branch.output) for branch in live.ctx.branches.values())
            before, computed = self.steps.get(live.index, (0, 0))
            if committed == before:
                continue
            if before:
                waited = Counting.computed - computed
                self.longest[live.index] = max(self.longest.get(live.index, 0), waited)
            self.steps[live.index] = committed, Counting.computed


def alone(request: Request) -> tuple[list[int], str | None]:
    engine = Engine(models())
    live = engine.add(request)
    list(engine.run())
    return live.ctx.output, live.reason


def test_thirty_two_mixed_requests_end_as_they_would_alone_and_none_waits_for_long() -> None:
    made = requests()
    waits = Waits()
    engine = Engine(models())
    lives = [engine.add(request) for request in made]
    long, broken, cancelled = lives[:3]
    told: dict[int, list[int]] = {live.index: [] for live in lives}
    while engine.live:
        for event in engine.step():
            told[event.request] += event.tokens
        waits.note(lives)
        if len(cancelled.ctx.output) >= 5 and cancelled in engine.live:
            engine.end(cancelled)
    assert isinstance(broken.error, RequestFailed) and "the device says no" in str(broken.error)
    for live, request in zip(lives, made, strict=True):
        want = alone(request)
        output = live.ctx.output
        assert told[live.index] == output and not live.caches
        if live is cancelled:
            assert output == want[0][: len(output)] and live.reason is None
        else:
            assert (output, live.reason) == want
            assert (live.error is not None) == (live is broken)
    assert len(long.ctx.output) == 4
    longest = max(waits.longest.values())
    assert longest <= 1.5 * CHUNK, f"{longest} tokens between two steps of a running request"
