"""A batch on a Ray cluster: several workers with a model each (`foretell batch --ray`).

The process that reads the requests deals them out in pieces and is the only one that writes
results. A worker hands over each answer when it is done. If it dies, whatever of its piece has no
result yet is dealt out again, so nothing is lost, and nothing is there twice.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from foretell.batch.answering import Shared, Tell, list_pending, model_digest, result_writer
from foretell.batch.progress import Meter
from foretell.batch.requests import Item, Prepared, Requests, prepare_item
from foretell.batch.results import Results
from foretell.batch.running import Limits, run_batch
from foretell.cluster.sharding import cut_batch
from foretell.errors import RequestFailed, first_message_line
from foretell.serve.errors import ApiError
from foretell.serve.served import Served

DEATHS = 2  # of workers over the same piece, before it is cut up or given up
FRUITLESS = 4  # deaths without an answer, beside DEATHS of each worker, before the batch ends
POLL = 1.0  # seconds between two calls of `tick`
Answered = tuple[int, "dict[str, Any] | ApiError"]  # the line, and its answer or why there is none
Deliver = Callable[[Item, "dict[str, Any] | ApiError"], None]


class Worker:
    """Process with the model, which `make` loads there."""

    def __init__(self, make: Callable[[], tuple[Served, Limits]], method: str):
        self.served, self.limits = make()
        self.method = method

    async def load_digest(self) -> str:
        """The digest of what results depend on, when the model is loaded."""
        return model_digest(self.served.lm, self.method)

    async def process(self) -> int:
        """Number of this process on its machine."""
        return os.getpid()

    async def reused(self) -> int:
        """Prompt tokens that need not be computed so far."""
        return int(self.served.lm.engine.status()["prefix_tokens_reused"])

    async def answer(self, items: Sequence[Item]) -> AsyncIterator[Answered]:
        """The answers of a piece, each as soon as it is done."""
        answer_queue: asyncio.Queue[Answered | None] = asyncio.Queue()
        batch: list[Prepared] = []
        for item in items:
            try:
                batch.append(await asyncio.to_thread(prepare_item, item, self.served, self.method))
            except ApiError as error:
                yield item.line, error

        def deliver(prepared: Prepared, answer: dict[str, Any] | ApiError) -> None:
            answer_queue.put_nowait((prepared.item.line, answer))

        async def work() -> None:
            try:
                await run_batch(self.served.lm, batch, self.limits, deliver)
            finally:
                answer_queue.put_nowait(None)

        task = asyncio.create_task(work())
        try:
            while (finished_line := await answer_queue.get()) is not None:
                yield finished_line
            await task  # raises what went wrong
        finally:
            task.cancel()


@dataclass
class Piece:
    """Some requests, and how many workers died over them."""

    items: list[Item]
    deaths: int = 0

    def without(self, line: int) -> Item:
        """Takes out the item of this line."""
        place = next(i for i, item in enumerate(self.items) if item.line == line)
        return self.items.pop(place)

    def after_death(self) -> list[Piece]:
        """Returns the pieces that are dealt out again when a worker died over this one.

        The first time nothing is known to be wrong with it. The second time its requests go one by
        one, so that one that kills its worker is alone; where that dies twice, it is given up.
        """
        self.deaths += 1
        if not self.items or (len(self.items) == 1 and self.deaths >= DEATHS):
            return []
        if self.deaths < DEATHS:
            return [self]
        return [Piece([item]) for item in self.items]


class Crew:
    """The workers, and who of them has what. `start` starts one.

    Raises RequestFailed where workers cannot be started, or fail of themselves.
    """

    def __init__(self, start: Callable[[], Any], count: int):
        self.start = start
        self.count = count
        self.idle = [start() for _ in range(count)]
        self.waiting: list[Piece] = []  # the next one is the last
        self.running: dict[Any, tuple[Any, Piece]] = {}  # a worker's answers -> it, its piece
        self.fruitless = 0  # workers that died since the last answer
        try:
            digests = set(ray.get([worker.load_digest.remote() for worker in self.idle]))
        except RayActorError as error:
            raise RequestFailed(f"a worker cannot be started: {error_reason(error)}") from error
        if len(digests) > 1:
            raise RequestFailed(
                "the workers' models differ in weights, number format or settings; "
                "give all machines of the cluster the same"
            )
        self.digest: str = digests.pop()

    def answer(
        self, items: Sequence[Item], deliver: Deliver, tick: Callable[[], None] = lambda: None
    ) -> None:
        """Answers every item and delivers each once. `tick` is called about once a second."""
        self.waiting = [Piece(item_group) for item_group in reversed(cut_batch(items, self.count))]
        while self.waiting or self.running:
            while self.idle and self.waiting:
                worker, piece = self.idle.pop(), self.waiting.pop()
                self.running[worker.answer.remote(list(piece.items))] = worker, piece
            tick()
            ready_answers, _ = ray.wait(list(self.running), timeout=POLL)
            for answers in ready_answers:
                self._take(answers, deliver)

    def reused(self) -> int:
        """Prompt tokens that need not be computed, those of dead workers not counted."""
        try:
            return sum(ray.get([worker.reused.remote() for worker in self.idle]))
        except RayActorError:
            return 0

    def _take(self, answers: Any, deliver: Deliver) -> None:
        """The next of a worker's answers, or its end."""
        worker, piece = self.running[answers]
        try:
            line, answer = ray.get(next(answers))
        except StopIteration:
            del self.running[answers]
            if piece.items:
                raise RequestFailed(f"a worker left {len(piece.items)} requests open") from None
            self.idle.append(worker)
        except RayActorError as error:
            del self.running[answers]
            self._bury(piece, deliver, error)
        except RayTaskError as error:
            raise RequestFailed(f"a worker failed: {error_reason(error)}") from error
        else:
            self.fruitless = 0
            deliver(piece.without(line), answer)

    def _bury(self, piece: Piece, deliver: Deliver, error: RayActorError) -> None:
        """Deals out again what a dead worker had, and starts another worker."""
        self.fruitless += 1
        if self.fruitless > FRUITLESS + DEATHS * self.count:
            raise RequestFailed(f"workers end again and again: {error_reason(error)}") from error
        dealt_again = piece.after_death()
        self.waiting += dealt_again
        if not dealt_again:
            for item in piece.items:
                deliver(item, death_error())
        self.idle.append(self.start())


def worker_starter(
    make: Callable[[], tuple[Served, Limits]], method: str, cpus: float = 1.0, gpus: float = 0.0
) -> Callable[[], Any]:
    """Returns a function that starts a worker on the cluster that this process is connected to."""
    worker_class: Any = ray.remote(Worker)
    worker_class = worker_class.options(num_cpus=cpus, num_gpus=gpus)
    return lambda: worker_class.remote(make, method)


def answer_on_cluster(
    crew: Crew,
    requests: Requests,
    results: Results,
    meter: Meter,
    tick: Callable[[], None],
    tell: Tell,
) -> Shared:
    """Answers what has no result yet, and writes each result as soon as it is there."""

    def ticking() -> None:
        results.sync()
        tick()

    items = list_pending(requests, results, tell)
    crew.answer(items, result_writer(results, meter, tell), ticking)
    return Shared(meter.prompt_tokens, crew.reused())


def death_error() -> ApiError:
    """Error of a request that no worker survives."""
    return ApiError(f"{DEATHS} workers ended over this request alone", None, "worker_died", 500)


def error_reason(error: Exception) -> str:
    """The last line of an error of Ray, whose first ones say where it was."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else first_message_line(error)
