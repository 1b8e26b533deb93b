"""Turns for work that takes long: a few at once, and clients one after the other.

Used by one event loop. A client that has asked for much waits after those with little.
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
    """A number of `places` at once, of which one client has at most `per_client`."""

    def __init__(self, places: int, per_client: int):
        self.places = places
        self.each = per_client
        self.taken: Counter[str] = Counter()  # by client
        self._queues: dict[str, deque[asyncio.Future[None]]] = {}  # the next client first

    async def take_turn(self, client: str) -> None:
        """Waits until it is this client's turn."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(client, deque()).append(turn)
        self._call_next()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it was called as it left
                self.end_turn(client)
            raise

    def end_turn(self, client: str) -> None:
        """Ends a turn of this client."""
        self.taken[client] -= 1
        self._call_next()

    @asynccontextmanager
    async def hold_turn(self, client: str) -> AsyncIterator[None]:
        await self.take_turn(client)
        try:
            yield
        finally:
            self.end_turn(client)

    async def run_errand(self, client: str, work: Callable[[Errand], T]) -> T:
        """Returns what `work` returns, run in a thread. The turn lasts as long as the thread is at
        it, also where who waited has left: then its errand is over.
        """
        await self.take_turn(client)
        errand = Errand()
        future = asyncio.get_running_loop().run_in_executor(None, work, errand)
        future.add_done_callback(lambda finished_future: self._end_errand(client, finished_future))
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            errand.over = True
            raise

    def _end_errand(self, client: str, future: asyncio.Future[T]) -> None:
        self.end_turn(client)
        if not future.cancelled():
            future.exception()  # nobody may be left to be told

    def _call_next(self) -> None:
        """Calls the clients who are next, as long as there are places."""
        while self.taken.total() < self.places:
            ready_clients = (
                client_name for client_name in self._queues if self.taken[client_name] < self.each
            )
            client = next(ready_clients, None)
            if client is None:
                return
            queue = self._queues.pop(client)
            turn = queue.popleft()
            if queue:
                self._queues[client] = queue  # after the others
            if not turn.done():
                self.taken[client] += 1
                turn.set_result(None)
