"""One engine thread, any number of callers.

Neither an engine nor a model may be used by two threads at once, and one forward should serve
everybody who waits. So a `Driver` has a thread of its own that runs the engine's steps while
requests are in flight and sleeps otherwise:

    caller A   submit ────────────────────────────── events of A
    caller B             submit ───── events ─ events of B
    engine        step  │ step │ step │ step │ step       (one forward each, for A and B)

Whoever needs the engine or its models otherwise (to measure, to save what drafters learnt, to
audit) has them to itself between two steps: `exclusive` and `run`.

The thread starts with the first request. It is a daemon and ends with its driver, so it keeps
neither the process nor a model alive. After a fork the child starts with an engine without requests
and starts a thread when it needs one.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch

from foretell.core.request import Event, Request
from foretell.engine.engine import Engine
from foretell.engine.live import Live
from foretell.errors import BadConfig, ForetellError, RequestFailed
from foretell.ops.threads import threads_here

T = TypeVar("T")
Deliver = Callable[[list[Event]], None]
STOPPING_SECONDS = 30.0  # that the end of the process waits for a step to end


class Call:
    """Requests that one caller waits for, and where their events go."""

    def __init__(self, lives: list[Live], deliver: Deliver, every_step: bool):
        self.lives = lives
        self.deliver = deliver
        self.every_step = every_step
        self.unfinished = len(lives)
        self.pending: list[Event] = []  # events that were not delivered yet

    @property
    def whole(self) -> bool:
        """Whether what is pending is to be delivered."""
        return self.every_step or not self.unfinished


class Courier:
    """Brings events from the engine thread to an event loop, which is woken once for all that have
    come: with many callers a step has something for each of them.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = weakref.ref(loop)
        self._parcels: deque[tuple[asyncio.Queue[list[Event]], list[Event]]] = deque()

    def carry(self, inbox: asyncio.Queue[list[Event]], events: list[Event]) -> None:
        """Raises RuntimeError where the loop is closed."""
        self._parcels.append((inbox, events))
        if len(self._parcels) > 1:
            return
        try:
            loop = self._loop()
            if loop is None:
                raise RuntimeError("the event loop is gone")
            loop.call_soon_threadsafe(self._hand_over)
        except RuntimeError:
            self._parcels.clear()
            raise

    def _hand_over(self) -> None:
        while self._parcels:
            inbox, events = self._parcels.popleft()
            inbox.put_nowait(events)


class Driver:
    """The one user of an engine, on behalf of any number of callers in any threads."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self._calls: dict[int, Call] = {}  # of each unfinished request, by its index
        self._cancelled: deque[Call] = deque()
        self._couriers: WeakKeyDictionary[Any, Courier] = WeakKeyDictionary()  # by event loop
        self._threads = torch.get_num_threads()  # to compute with, as the latest caller has it
        self._stepping = False
        self._reset()
        _drivers.add(self)

    def _reset(self) -> None:
        """Nobody uses the engine, and there is no thread."""
        self._changed = threading.Condition()
        self._holder: int | None = None  # the thread that may use the engine now
        self._waiting = 0  # threads that want to be the holder, the engine thread not counted
        self._thread: threading.Thread | None = None
        self._stopped = False
        weakref.finalize(self, _wake, self._changed)

    # --- for callers

    def submit(
        self,
        requests: Sequence[Request],
        deliver: Deliver,
        every_step: bool = True,
        threads: int | None = None,
    ) -> Call:
        """Takes requests in, all before the same step. Raises what Engine.add raises; then none of
        them is taken in.

        `deliver` is called on the engine thread with lists of events, after every step that has
        some, or (not `every_step`) once when all requests are done; it must not wait. `threads`: to
        compute with; None: as many as torch has in this thread.
        """
        count = threads_here() if threads is None else threads
        with self.exclusive():
            lives: list[Live] = []
            try:
                for request in requests:
                    request.streamed = every_step
                    lives.append(self.engine.add(request))
            except BaseException:
                for live in lives:
                    self.engine.end(live)
                raise
            call = Call(lives, deliver, every_step)
            self._calls |= {live.index: call for live in lives}
            self._threads = count
        self._start()
        return call

    def cancel(self, call: Call, wait: bool = True) -> None:
        """Ends what is left of a call's requests, between two steps. `wait`: return after that."""
        if not any(live.index in self._calls for live in call.lives):
            return
        self._cancelled.append(call)
        if self.held:
            # In the middle of a step (a generator was collected as garbage) the next one does it.
            if not self._stepping:
                self._end_cancelled()
        elif wait:
            with self.exclusive():
                self._end_cancelled()
        else:
            with self._changed:
                self._changed.notify_all()

    @contextmanager
    def following(
        self, requests: Sequence[Request], every_step: bool = True
    ) -> Iterator[tuple[list[Live], Iterator[list[Event]]]]:
        """Submits requests; gives them and their events until all are done, as lists.

        However this is left, closed or interrupted, the requests end with it.
        """
        inbox: SimpleQueue[list[Event]] = SimpleQueue()
        call = self.submit(requests, inbox.put, every_step)
        try:
            yield call.lives, self._received(call, inbox)
        finally:
            self.cancel(call)

    def _received(self, call: Call, inbox: SimpleQueue[list[Event]]) -> Iterator[list[Event]]:
        unfinished = len(call.lives)
        while unfinished:
            while self.held and inbox.empty():
                with self.exclusive():  # who has the engine to itself runs the steps itself
                    self._turn()
            batch = inbox.get()
            unfinished -= sum(event.done is not None for event in batch)
            yield batch

    @asynccontextmanager
    async def following_async(
        self, requests: Sequence[Request], every_step: bool = True, threads: int | None = None
    ) -> AsyncIterator[tuple[list[Live], AsyncIterator[list[Event]]]]:
        """The same on an event loop, which it never blocks."""
        loop = asyncio.get_running_loop()
        inbox: asyncio.Queue[list[Event]] = asyncio.Queue()
        courier = self._couriers.setdefault(loop, Courier(loop))

        def deliver(events: list[Event]) -> None:
            courier.carry(inbox, events)

        def give_up(submission: asyncio.Future[Call]) -> None:
            if not submission.cancelled() and submission.exception() is None:
                self.cancel(submission.result(), wait=False)

        submit = partial(self.submit, requests, deliver, every_step, threads)
        submission = loop.run_in_executor(None, submit)  # it may wait for the end of a step
        try:
            call = await asyncio.shield(submission)
        except asyncio.CancelledError:
            submission.add_done_callback(give_up)
            raise
        try:
            yield call.lives, _received_async(call, inbox)
        finally:
            self.cancel(call, wait=False)

    def run(self, function: Callable[[], T]) -> T:
        """Calls a function that uses the engine or its models, in this thread, between two steps.

        No request moves on until it returns. What it asks of `LM.generate` is computed at once, in
        this thread.
        """
        with self.exclusive():
            return function()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Inside, the engine and its models belong to this thread. May be nested.

        Raises BadConfig inside a step, where a logits processor, say, uses the model it runs in.
        """
        thread = threading.get_ident()
        if self.held:
            if self._stepping:
                raise BadConfig(
                    "the model was used from inside one of its own steps (by a logits processor, "
                    "say), which cannot be answered: use it before or after the request"
                )
            yield
            return
        try:
            self._acquire(thread)
            yield
        finally:
            self._release(thread)

    @property
    def held(self) -> bool:
        """Whether the engine belongs to this thread now."""
        return self._holder == threading.get_ident()

    # --- who may use the engine

    def _acquire(self, thread: int) -> None:
        with self._changed:
            self._waiting += 1
            try:
                self._changed.wait_for(lambda: self._holder is None)
                self._holder = thread
            finally:
                self._waiting -= 1

    def _release(self, thread: int) -> None:
        with self._changed:
            if self._holder == thread:
                self._holder = None
                self._changed.notify_all()

    def _due(self) -> bool:
        """Whether it is the engine thread's turn."""
        if self._holder is not None or self._waiting:
            return False
        return bool(self._cancelled or self.engine.live or self.engine.events)

    # --- the engine thread

    def _start(self) -> None:
        with self._changed:
            if self._stopped:
                raise RequestFailed("the process is ending: no request can be taken in any more")
            if self._thread is None or not self._thread.is_alive():
                # Called last in, first out: before what the models' libraries registered.
                atexit.unregister(_stop_all)
                atexit.register(_stop_all)
                arguments = (weakref.ref(self), self._changed)
                self._thread = threading.Thread(
                    target=_serve, args=arguments, name="foretell-engine", daemon=True
                )
                self._thread.start()

    def _own_turn(self) -> None:
        """A turn of the engine thread, which is the holder."""
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        try:
            self._turn()
        except BaseException as error:  # a processor that exits, say: its callers are told
            self._fail(error)
        finally:
            self._release(threading.get_ident())

    def _turn(self) -> None:
        """One step of the engine, in the thread that holds it, and its events to who waits."""
        self._end_cancelled()
        if not (self.engine.live or self.engine.events):
            return
        self._stepping = True
        try:
            events = self.engine.step()
        except Exception as error:
            self._fail(error)
            return
        finally:
            self._stepping = False
        self._deliver(events)

    def _fail(self, error: BaseException) -> None:
        """Ends every request with the error of a step that the engine put down to none of them."""
        failure = error
        if isinstance(error, Exception) and not isinstance(error, ForetellError):
            failure = RequestFailed(f"a step failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
        events = list(self.engine.events)
        self.engine.events.clear()
        for live in list(self.engine.live):
            live.error = failure
            live.reason = "error"
            with suppress(Exception):  # what else goes wrong here follows from the first error
                self.engine.end(live)
            events.append(Event(live.index, [], [], "error"))
        self.engine.live.clear()
        self._deliver(events)

    def _deliver(self, events: Sequence[Event]) -> None:
        ready: dict[Call, None] = {}
        for event in events:
            call = self._calls.get(event.request)
            if call is None:
                continue
            call.pending.append(event)
            if event.done is not None:
                call.unfinished -= 1
                self._calls.pop(event.request, None)
            if call.whole:
                ready[call] = None
        for call in ready:
            batch = call.pending
            call.pending = []
            try:
                call.deliver(batch)
            except RuntimeError:  # the event loop of who waits is closed
                self._cancelled.append(call)

    def _end_cancelled(self) -> None:
        while self._cancelled:
            call = self._cancelled.popleft()
            for live in call.lives:
                if self._calls.pop(live.index, None) is not None:
                    self.engine.end(live)

    # --- the ends of processes

    def stop(self) -> None:
        """Waits for the step that runs, and ends the thread. The process is ending."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(STOPPING_SECONDS)

    def _after_fork(self) -> None:
        """In the child, which has none of the threads but the one that forked."""
        unfinished = dict(self._calls)
        if self._stepping:  # what drafters learn may be half written
            self.engine.stores.clear()
        self.engine.live.clear()
        self.engine.events.clear()
        self._cancelled.clear()
        self._calls.clear()
        self._stepping = False
        self._reset()
        for index, call in unfinished.items():
            for live in call.lives:
                if live.index == index:
                    live.error = RequestFailed("the process was forked: its parent has the request")
                    live.reason = "error"
            call.pending.append(Event(index, [], [], "error"))
        for call in set(unfinished.values()):
            call.deliver(call.pending)


_drivers: weakref.WeakSet[Driver] = weakref.WeakSet()


def _serve(reference: weakref.ref[Driver], changed: threading.Condition) -> None:
    """What the engine thread does. It holds its driver only while there is something to do."""
    first = reference()
    if first is not None and first.engine.models["target"].device.type == "cuda":
        torch.cuda.set_device(first.engine.models["target"].device)
    del first
    while True:
        with changed:
            driver = reference()
            if driver is None or driver._stopped:
                return
            if not driver._due():
                del driver
                if reference() is not None:  # else that was the last use of it
                    changed.wait()
                continue
            driver._holder = threading.get_ident()
        driver._own_turn()
        del driver


async def _received_async(
    call: Call, inbox: asyncio.Queue[list[Event]]
) -> AsyncIterator[list[Event]]:
    unfinished = len(call.lives)
    while unfinished:
        batch = await inbox.get()
        while not inbox.empty():  # who reads slowly gets more at a time
            batch += inbox.get_nowait()
        # Of a traced request each step is shown.
        if all(live.ctx.request.trace is None for live in call.lives):
            batch = _joined(batch)
        unfinished -= sum(event.done is not None for event in batch)
        yield batch


def _joined(events: list[Event]) -> list[Event]:
    """The same with the tokens of each request together; its end follows them."""
    if len(events) < 2:
        return events
    joined: dict[int, Event] = {}
    for event in events:
        known = joined.setdefault(event.request, Event(event.request, [], []))
        known.tokens += event.tokens
        known.sources += event.sources
        known.done = event.done or known.done
        known.placed = [*known.placed, *event.placed]
        known.length = known.length if event.length is None else event.length
    return list(joined.values())


def _wake(changed: threading.Condition) -> None:
    with changed:
        changed.notify_all()


def _stop_all() -> None:
    """A thread that is inside a library when the interpreter ends would take the process down."""
    for driver in list(_drivers):
        driver.stop()


def _renew_all() -> None:
    for driver in list(_drivers):
        driver._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_all)
