"""One forward: the jobs of the asks that take part, their replies, and what it cost."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from foretell.cache.job import Job
from foretell.core.stats import noted
from foretell.core.types import Reply
from foretell.engine.live import Host, OpenAsk


@dataclass(slots=True)
class Prepared:
    """An ask with its job; `whole`: the job answers it, else takes in a piece of its text."""

    entry: OpenAsk
    tokens: int  # of its text that it may compute
    job: Job
    whole: bool


def answer(engine: Host, planned: Sequence[tuple[OpenAsk, int]]) -> None:
    """One forward for these asks of one model; a long text takes part with a piece."""
    prepared = prepare(engine, planned)
    if not prepared:
        return
    model = prepared[0].entry.model
    start = time.perf_counter()
    try:
        replies = model.forward([part.job for part in prepared])
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)  # or the seconds would be those of launching
    except Exception as error:
        if len(prepared) == 1:
            engine.fail(prepared[0].entry.live, error)
            return
        for part in prepared:  # whose fault it is shows when each runs alone
            answer(engine, [(part.entry, part.tokens)])
        return
    seconds = time.perf_counter() - start
    engine.forwards += 1
    noted(engine, prepared, seconds, model.took)
    total = sum(len(part.job.tokens) for part in prepared)
    for part, reply in zip(prepared, replies, strict=True):
        count = len(part.job.tokens)
        reply.seconds = seconds * count / total
        if part.whole:
            deliver(part.entry, reply)
        else:
            part.entry.pending -= count
            part.entry.since = engine.forwards


def prepare(engine: Host, planned: Sequence[tuple[OpenAsk, int]]) -> list[Prepared]:
    """The jobs of these asks, at most one a cache. A request whose job cannot be made ends."""
    prepared: list[Prepared] = []
    taken = set()
    for entry, tokens in planned:
        live, ask = entry.live, entry.ask
        key = (live, ask.model, ask.branch)
        if key in taken or live not in engine.live:
            continue
        taken.add(key)
        try:
            cache = engine.cache_of(live, ask.model, ask.branch)
            text = live.ctx.branches[ask.branch].tokens
            job, whole = cache.prepare(ask, text, max(1, tokens))
        except Exception as error:
            engine.fail(live, error)
        else:
            prepared.append(Prepared(entry, tokens, job, whole))
    prepared = [part for part in prepared if part.entry.live in engine.live]
    # Pieces of texts, and what is left of forwards, run other layers than asked: who has waited
    # for longest decides, and the others wait.
    first = max(prepared, key=lambda part: part.entry.waited, default=None)
    return [part for part in prepared if first and part.job.entry == first.job.entry]


def deliver(entry: OpenAsk, reply: Reply) -> None:
    """Answers an ask; its task goes on when it has all replies."""
    live, task = entry.live, entry.task
    live.asks.remove(entry)
    for other in live.asks:
        if other.after is entry:
            other.after = None
    if task is None:
        return
    task.replies[entry.place] = reply
    if None not in task.replies:
        task.wake(task.replies[0] if task.single else list(task.replies))
