"""A batch on a Ray cluster: several workers with a model each (`foretell batch --ray`).

The process that reads the requests deals them out in pieces and is the only one that writes
results. A worker hands over each answer when it is done. If it dies, whatever of its piece has no
result yet is dealt out again, so nothing is lost, and nothing is there twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from foretell.batch.requests import Item, Prepared, prepare
from foretell.batch.running import Limits, run
from foretell.errors import RequestFailed, first_line
from foretell.scaling.sharding import pieces
from foretell.serve.errors import ApiError
from foretell.serve.served import Served

DEATHS = 3  # workers that a piece of one request may take with it before it is given up
POLL = 1.0  # seconds between two calls of `tick`
Answered = tuple[int, "dict[str, Any] | ApiError"]  # the line, and its answer or why there is none
Deliver = Callable[[Item, "dict[str, Any] | ApiError"], None]


@dataclass(frozen=True)
class Workers:
    """How many, and what one of them takes of the cluster."""

    count: int
    cpus: float = 1.0
    gpus: float = 0.0


class Worker:
    """One process with the model. `make` loads it, there."""

    def __init__(self, make: Callable[[], tuple[Served, Limits]], method: str):
        self.served, self.limits = make()
        self.method = method

    async def ready(self) -> None:
        """Answers when the model is loaded."""

    async def answer(self, items: Sequence[Item]) -> AsyncIterator[Answered]:
        """The answers of a piece, each as soon as it is done."""
        done: asyncio.Queue[Answered | None] = asyncio.Queue()
        batch: list[Prepared] = []
        for item in items:
            try:
                batch.append(await asyncio.to_thread(prepare, item, self.served, self.method))
            except ApiError as error:
                yield item.line, error

        def deliver(one: Prepared, answer: dict[str, Any] | ApiError) -> None:
            done.put_nowait((one.item.line, answer))

        async def work() -> None:
            try:
                await run(self.served.lm, batch, self.limits, deliver)
            finally:
                done.put_nowait(None)

        task = asyncio.create_task(work())
        try:
            while (answered := await done.get()) is not None:
                yield answered
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

    def halves(self) -> list[Piece]:
        """Smaller ones, so that a request that kills its worker is alone in the end."""
        if not self.items:
            return []
        if len(self.items) == 1:
            return [self]
        middle = len(self.items) // 2
        return [Piece(self.items[:middle]), Piece(self.items[middle:])]


class Deal:
    """Who has what, until every item is delivered.

    `start` starts a worker. `deliver` is called once for each item.
    """

    def __init__(
        self, items: Sequence[Item], start: Callable[[], Any], count: int, deliver: Deliver
    ):
        self.waiting = [Piece(one) for one in reversed(pieces(items, count))]  # next one last
        self.running: dict[Any, tuple[Any, Piece]] = {}  # a worker's answers -> it, its piece
        self.start = start
        self.deliver = deliver
        self.fruitless = 0  # workers that died since the last answer
        self.most_fruitless = DEATHS * count
        self.idle = [start() for _ in range(min(count, len(self.waiting)))]

    def run(self, tick: Callable[[], None] = lambda: None) -> None:
        """Deals until all is done. `tick` is called about once a second.

        Raises RequestFailed where workers cannot be started or fail of themselves.
        """
        try:
            ray.get([worker.ready.remote() for worker in self.idle])
        except RayActorError as error:
            raise RequestFailed(f"a worker cannot be started: {reason(error)}") from error
        while self.waiting or self.running:
            while self.idle and self.waiting:
                worker, piece = self.idle.pop(), self.waiting.pop()
                self.running[worker.answer.remote(piece.items)] = worker, piece
            tick()
            ready, _ = ray.wait(list(self.running), timeout=POLL)
            for answers in ready:
                self.take(answers)

    def take(self, answers: Any) -> None:
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
            self.bury(piece, error)
        except RayTaskError as error:
            raise RequestFailed(f"a worker failed: {reason(error)}") from error
        else:
            self.fruitless = 0
            self.deliver(piece.without(line), answer)

    def bury(self, piece: Piece, error: RayActorError) -> None:
        """Deals out again what a dead worker had, and starts another worker."""
        self.fruitless += 1
        piece.deaths += 1
        if len(piece.items) == 1 and piece.deaths >= DEATHS:
            self.deliver(piece.items.pop(), died(piece.deaths))
        elif self.fruitless > self.most_fruitless:
            raise RequestFailed(f"workers end again and again: {reason(error)}") from error
        self.waiting += piece.halves()
        self.idle.append(self.start())


def died(times: int) -> ApiError:
    """Of a request that nobody survives."""
    return ApiError(f"{times} workers ended while they had this request", None, "worker_died", 500)


def reason(error: Exception) -> str:
    """The last line of an error of Ray, whose first ones say where it was."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else first_line(error)
