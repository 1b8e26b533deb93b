"""Who takes part in a bench: our methods, whose commits are noted, and peers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from foretell.api.lm import LM
from foretell.bench.peers import Peer, Run
from foretell.core.constraint import Constraint
from foretell.core.context import Context
from foretell.core.request import Request
from foretell.core.stats import Stats
from foretell.core.types import Commit, Kept, Sampling, Steps
from foretell.engine.engine import Engine
from foretell.engine.live import Live
from foretell.speculation.strategy import Strategy


@dataclass
class CommitMark:
    """A commit, at `time` (of time.perf_counter). `draft_s`, `target_s` and `calls`: what the
    request had spent until then.
    """

    time: float
    tokens: int
    drafted: int
    accepted: int
    draft_s: float
    target_s: float
    calls: dict[str, int]


@dataclass
class EngineRun(Run):
    """A generation by one of our methods, with what was noted in its engine."""

    stats: Stats
    marks: list[CommitMark]
    ended: str = ""  # why: "stop", "length"


@dataclass(frozen=True)
class Watched(Strategy):
    """A strategy whose commits are noted in `marks`."""

    strategy: Strategy
    marks: list[CommitMark] = field(default_factory=list, compare=False)

    @property
    def models(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.strategy.models

    @property
    def needs(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.strategy.needs

    def bring(self, models: Mapping[str, Any]) -> Mapping[str, Any]:
        return self.strategy.bring(models)

    def run(self, ctx: Context) -> Steps:
        steps = self.strategy.run(ctx)
        reply: Any = None
        try:
            while True:
                try:
                    message = steps.send(reply)
                except StopIteration:
                    return
                accepted_before = ctx.stats.accepted
                reply = yield message
                if isinstance(message, Commit):
                    self._note_commit(ctx.stats, message, reply, accepted_before)
        finally:
            steps.close()

    def _note_commit(
        self, stats: Stats, commit: Commit, commit_result: Kept, accepted_before: int
    ) -> None:
        mark = CommitMark(
            time=time.perf_counter(),
            tokens=len(commit_result.tokens),
            drafted=commit.drafted,
            accepted=stats.accepted - accepted_before,
            draft_s=stats.draft_s,
            target_s=stats.target_s,
            calls=dict(stats.calls),
        )
        self.marks.append(mark)


class MeteredEngine(Engine):
    """An engine that sums up the bytes of its requests' caches, as they are when a request ends."""

    def __init__(self, lm: LM):
        super().__init__(lm.models, lm.engine.eos)
        self.costs = lm.engine.costs
        self.cache_bytes = 0

    def end(self, live: Live) -> None:
        for cache in live.caches.values():
            for rows in (*cache.keys, *cache.values):
                self.cache_bytes += rows.numel() * rows.element_size()
        super().end(live)


class Contender(Protocol):
    """Anything that is measured: `name` in the document, `about` describes it in words."""

    name: str
    about: str

    def run(
        self, batch: list[list[int]], max_new_tokens: int, temperature: float, seed: int
    ) -> Sequence[Run]: ...

    def forget(self) -> None:
        """Forgets everything learnt from earlier prompts."""


class Method:
    """A method of ours, with an engine of its own.

    `cache_bytes`: of the caches of the largest batch so far. Raises BadConfig or UnknownMethod for
    a wrong spec.
    """

    def __init__(self, lm: LM, spec: str):
        self.name = spec
        self.lm = lm
        self.label, self.strategy = lm.resolve(spec)
        self.about = "foretell"
        if spec == "auto":
            choice_reason = "the default" if lm.auto == lm.default else "as foretell tune found"
            self.about = f"stands for {lm.auto}, {choice_reason}"
        self.engine = MeteredEngine(lm)
        self.cache_bytes = 0

    def forget(self) -> None:
        self.engine.stores.clear()

    def run(
        self,
        batch: list[list[int]],
        max_new_tokens: int,
        temperature: float,
        seed: int,
        constraint: Constraint | None = None,
    ) -> list[EngineRun]:
        """Runs a request for each prompt, all in one batch, with the seeds `seed`, `seed` + 1, ...

        `constraint`: what all texts have to follow. Raises the first error of a request.
        """
        engine = self.engine
        engine.cache_bytes = 0
        decode = self.lm.decode if self.lm.tokenizer is not None else None
        lives: list[Live] = []
        watched_strategies: list[Watched] = []
        try:
            for index, prompt_ids in enumerate(batch):
                watched_strategies.append(Watched(self.strategy))
                sampling = Sampling(
                    max_new_tokens=max_new_tokens,
                    temperature=temperature,
                    seed=seed + index,
                    constraint=constraint,
                )
                request = Request(
                    prompt_ids, watched_strategies[index], sampling, self.label, decode
                )
                lives.append(engine.add(request))
            start_time = time.perf_counter()
            for _ in engine.run():
                pass
        finally:
            for live in lives:
                engine.end(live)
        for live in lives:
            if live.error is not None:
                raise live.error
        self.cache_bytes = max(self.cache_bytes, engine.cache_bytes)
        return [
            _engine_run(live, watched_strategy.marks, start_time)
            for live, watched_strategy in zip(lives, watched_strategies, strict=True)
        ]


def _engine_run(live: Live, marks: list[CommitMark], start_time: float) -> EngineRun:
    """Result of a request. `start_time`: when its batch began, from where its marks count."""
    stats = live.ctx.stats
    tokens = live.ctx.output
    for mark in marks:
        mark.time -= start_time
    times = [mark.time for mark in marks]
    counts = [mark.tokens for mark in marks]
    if sum(counts) != len(tokens):
        # Several branches were written, and which is the answer was known at the end.
        times = [times[0], times[-1]]
        counts = [stats.first_tokens, len(tokens) - stats.first_tokens]
    return EngineRun(tokens, times, counts, stats, marks, live.reason or "")


class PeerContender:
    """A peer, which takes one request at a time and learns nothing."""

    def __init__(self, peer: Peer):
        self.name = peer.name
        self.about = peer.about
        self.peer = peer

    def forget(self) -> None:
        pass

    def run(
        self, batch: list[list[int]], max_new_tokens: int, temperature: float, seed: int
    ) -> list[Run]:
        return [self.peer.run(batch[0], max_new_tokens, temperature, seed)]
