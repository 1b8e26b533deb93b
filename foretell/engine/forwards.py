"""Forwards: the jobs of the asks that take part, their replies, and what it cost."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from foretell.cache.job import Job
from foretell.core.stats import note_forwards
from foretell.core.types import Reply
from foretell.engine.live import Host, OpenAsk


@dataclass(slots=True)
class Prepared:
    """An ask with its job; `whole`: the job answers it, else takes in a piece of its text."""

    open_ask: OpenAsk
    tokens: int  # of its text that it may compute
    job: Job
    whole: bool


def answer_asks(engine: Host, planned: Sequence[tuple[OpenAsk, int]]) -> None:
    """Runs one forward for these asks of a model; a long text takes part with a piece."""
    prepared = prepare_jobs(engine, planned)
    if not prepared:
        return
    model = prepared[0].open_ask.model
    start_time = time.perf_counter()
    try:
        replies = model.forward([part.job for part in prepared])
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)  # or the seconds would be those of launching
    except Exception as error:
        if len(prepared) == 1:
            engine.fail_request(prepared[0].open_ask.live, error)
            return
        for part in prepared:  # whose fault it is shows when each runs alone
            answer_asks(engine, [(part.open_ask, part.tokens)])
        return
    seconds = time.perf_counter() - start_time
    engine.forwards += 1
    note_forwards(engine, prepared, seconds, model.took)
    total = sum(len(part.job.tokens) for part in prepared)
    for part, reply in zip(prepared, replies, strict=True):
        count = len(part.job.tokens)
        reply.seconds = seconds * count / total
        if part.whole:
            deliver_reply(part.open_ask, reply)
        else:
            part.open_ask.pending -= count
            part.open_ask.since = engine.forwards


def prepare_jobs(engine: Host, planned: Sequence[tuple[OpenAsk, int]]) -> list[Prepared]:
    """The jobs of these asks, at most one a cache. A request whose job cannot be made ends."""
    prepared: list[Prepared] = []
    taken_keys = set()
    for open_ask, tokens in planned:
        live_request, ask = open_ask.live, open_ask.ask
        key = (live_request, ask.model, ask.branch)
        if key in taken_keys or live_request not in engine.live:
            continue
        taken_keys.add(key)
        try:
            cache = engine.cache_of(live_request, ask.model, ask.branch)
            text = live_request.ctx.branches[ask.branch].tokens
            job, answers_ask = cache.prepare(ask, text, max(1, tokens))
        except Exception as error:
            engine.fail_request(live_request, error)
        else:
            prepared.append(Prepared(open_ask, tokens, job, answers_ask))
    prepared = [part for part in prepared if part.open_ask.live in engine.live]
    # Pieces of texts, and what is left of forwards, run other layers than asked: who has waited
    # for longest decides, and the others wait.
    oldest_part = max(prepared, key=lambda part: part.open_ask.waited, default=None)
    shared_key = oldest_part.job.forward_key if oldest_part else None
    return [part for part in prepared if part.job.forward_key == shared_key]


def deliver_reply(open_ask: OpenAsk, reply: Reply) -> None:
    """Answers an ask; its task goes on when it has all replies."""
    live_request, task = open_ask.live, open_ask.task
    live_request.asks.remove(open_ask)
    for other_ask in live_request.asks:
        if other_ask.after is open_ask:
            other_ask.after = None
    if task is None:
        return
    task.replies[open_ask.place] = reply
    if None not in task.replies:
        task.wake_task(task.replies[0] if task.single else list(task.replies))
