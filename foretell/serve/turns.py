"""Turns at what takes long: so many at once, and clients one after the other.

Used by one event loop. Who has asked for much waits behind those who have asked for little.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

T = TypeVar("T")


class Errand:
    """Work in a thread, which looks now and then whether anybody waits for it still."""

    over = False


class Turns:
    """`places` at once, of which one client has at most `each`."""

    def __init__(self, places: int, each: int):
        self.places = places
        self.each = each
        self.taken: Counter[str] = Counter()  # by client
        self._queues: dict[str, deque[asyncio.Future[None]]] = {}  # the next client first

    async def take(self, client: str) -> None:
        """Returns when it is this client's turn."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(client, deque()).append(turn)
        self._call()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it was called as it left
                self.give(client)
            raise

    def give(self, client: str) -> None:
        """Its turn is over."""
        self.taken[client] -= 1
        self._call()

    @asynccontextmanager
    async def turn(self, client: str) -> AsyncIterator[None]:
        await self.take(client)
        try:
            yield
        finally:
            self.give(client)

    async def run(self, client: str, work: Callable[[Errand], T]) -> T:
        """What `work` returns, in a thread. Its turn lasts as long as the thread is at it, also
        where who waited has left: then its errand is over.
        """
        await self.take(client)
        errand = Errand()
        future = asyncio.get_running_loop().run_in_executor(None, work, errand)
        future.add_done_callback(lambda done: self._done(client, done))
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            errand.over = True
            raise

    def _done(self, client: str, future: asyncio.Future[T]) -> None:
        self.give(client)
        if not future.cancelled():
            future.exception()  # nobody may be left to be told

    def _call(self) -> None:
        """Calls who is next, as long as there are places."""
        while self.taken.total() < self.places:
            able = (one for one in self._queues if self.taken[one] < self.each)
            client = next(able, None)
            if client is None:
                return
            queue = self._queues.pop(client)
            turn = queue.popleft()
            if queue:
                self._queues[client] = queue  # behind the others
            if not turn.done():
                self.taken[client] += 1
                turn.set_result(None)
