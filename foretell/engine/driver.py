"""The engine's thread, shared by any number of callers.

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

    def __init__(self, live_requests: list[Live], deliver: Deliver, every_step: bool):
        self.lives = live_requests
        self.deliver = deliver
        self.every_step = every_step
        self.unfinished = len(live_requests)
        self.pending: list[Event] = []  # events that were not delivered yet

    @property
    def is_due(self) -> bool:
        """Whether what is pending is to be delivered."""
        return self.every_step or not self.unfinished


class Courier:
    """Brings events from the engine thread to an event loop, which is woken once for all that have
    come: with many callers a step has something for each of them.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = weakref.ref(loop)
        self._parcels: deque[tuple[asyncio.Queue[list[Event]], list[Event]]] = deque()

    def carry_events(self, inbox: asyncio.Queue[list[Event]], events: list[Event]) -> None:
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
        self._reset_state()
        _drivers.add(self)

    def _reset_state(self) -> None:
        """Nobody uses the engine, and there is no thread."""
        self._changed = threading.Condition()
        self._holder: int | None = None  # the thread that may use the engine now
        self._waiting = 0  # threads that want to be the holder, the engine thread not counted
        self._thread: threading.Thread | None = None
        self._stopped = False
        weakref.finalize(self, _wake_waiting, self._changed)

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
            live_requests: list[Live] = []
            try:
                for request in requests:
                    request.streamed = every_step
                    live_requests.append(self.engine.add(request))
            except BaseException:
                for live_request in live_requests:
                    self.engine.end(live_request)
                raise
            call = Call(live_requests, deliver, every_step)
            self._calls |= {live_request.index: call for live_request in live_requests}
            self._threads = count
        self._start_thread()
        return call

    def cancel(self, call: Call, wait: bool = True) -> None:
        """Ends what is left of a call's requests, between two steps. `wait`: return after that."""
        if not any(live_request.index in self._calls for live_request in call.lives):
            return
        self._cancelled.append(call)
        if self.is_held:
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
            yield call.lives, self._receive_events(call, inbox)
        finally:
            self.cancel(call)

    def _receive_events(self, call: Call, inbox: SimpleQueue[list[Event]]) -> Iterator[list[Event]]:
        unfinished = len(call.lives)
        while unfinished:
            while self.is_held and inbox.empty():
                with self.exclusive():  # who has the engine to itself runs the steps itself
                    self._run_turn()
            batch = inbox.get()
            unfinished -= sum(event.done is not None for event in batch)
            yield batch

    @asynccontextmanager
    async def following_async(
        self, requests: Sequence[Request], every_step: bool = True, threads: int | None = None
    ) -> AsyncIterator[tuple[list[Live], AsyncIterator[list[Event]]]]:
        """Submits requests as `following` does, on an event loop, which it never blocks."""
        loop = asyncio.get_running_loop()
        inbox: asyncio.Queue[list[Event]] = asyncio.Queue()
        courier = self._couriers.setdefault(loop, Courier(loop))

        def deliver(events: list[Event]) -> None:
            courier.carry_events(inbox, events)

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
        if self.is_held:
            if self._stepping:
                raise BadConfig(
                    "the model was used from inside one of its own steps (by a logits processor, "
                    "say), which cannot be answered: use it before or after the request"
                )
            yield
            return
        try:
            self._acquire_engine(thread)
            yield
        finally:
            self._release_engine(thread)

    @property
    def is_held(self) -> bool:
        """Whether the engine belongs to this thread now."""
        return self._holder == threading.get_ident()

    # --- who may use the engine

    def _acquire_engine(self, thread: int) -> None:
        with self._changed:
            self._waiting += 1
            try:
                self._changed.wait_for(lambda: self._holder is None)
                self._holder = thread
            finally:
                self._waiting -= 1

    def _release_engine(self, thread: int) -> None:
        with self._changed:
            if self._holder == thread:
                self._holder = None
                self._changed.notify_all()

    def _is_due(self) -> bool:
        """Whether it is the engine thread's turn."""
        if self._holder is not None or self._waiting:
            return False
        return bool(self._cancelled or self.engine.live or self.engine.events)

    # --- the engine thread

    def _start_thread(self) -> None:
        with self._changed:
            if self._stopped:
                raise RequestFailed("the process is ending: no request can be taken in any more")
            if self._thread is None or not self._thread.is_alive():
                # Called last in, first out: before what the models' libraries registered.
                atexit.unregister(_stop_all)
                atexit.register(_stop_all)
                arguments = (weakref.ref(self), self._changed)
                self._thread = threading.Thread(
                    target=_serve_engine, args=arguments, name="foretell-engine", daemon=True
                )
                self._thread.start()

    def _own_turn(self) -> None:
        """A turn of the engine thread, which is the holder."""
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        try:
            self._run_turn()
        except BaseException as error:  # a processor that exits, say: its callers are told
            self._fail_all(error)
        finally:
            self._release_engine(threading.get_ident())

    def _run_turn(self) -> None:
        """Runs a step of the engine, in the thread that holds it, and delivers its events."""
        self._end_cancelled()
        if not (self.engine.live or self.engine.events):
            return
        self._stepping = True
        try:
            events = self.engine.step()
        except Exception as error:
            self._fail_all(error)
            return
        finally:
            self._stepping = False
        self._deliver_events(events)

    def _fail_all(self, error: BaseException) -> None:
        """Ends every request with the error of a step that the engine put down to none of them."""
        failure = error
        if isinstance(error, Exception) and not isinstance(error, ForetellError):
            failure = RequestFailed(f"a step failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
        events = list(self.engine.events)
        self.engine.events.clear()
        for live_request in list(self.engine.live):
            live_request.error = failure
            live_request.reason = "error"
            with suppress(Exception):  # what else goes wrong here follows from the first error
                self.engine.end(live_request)
            events.append(Event(live_request.index, [], [], "error"))
        self.engine.live.clear()
        self._deliver_events(events)

    def _deliver_events(self, events: Sequence[Event]) -> None:
        ready_calls: dict[Call, None] = {}
        for event in events:
            call = self._calls.get(event.request)
            if call is None:
                continue
            call.pending.append(event)
            if event.done is not None:
                call.unfinished -= 1
                self._calls.pop(event.request, None)
            if call.is_due:
                ready_calls[call] = None
        for call in ready_calls:
            batch = call.pending
            call.pending = []
            try:
                call.deliver(batch)
            except RuntimeError:  # the event loop of who waits is closed
                self._cancelled.append(call)

    def _end_cancelled(self) -> None:
        while self._cancelled:
            call = self._cancelled.popleft()
            for live_request in call.lives:
                if self._calls.pop(live_request.index, None) is not None:
                    self.engine.end(live_request)

    # --- the ends of processes

    def stop(self) -> None:
        """Waits for the step that runs, and ends the thread. The process is ending."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(STOPPING_SECONDS)

    def _after_fork(self) -> None:
        """Starts anew in the child, which has no thread but the one that forked."""
        unfinished = dict(self._calls)
        if self._stepping:  # what drafters learn may be half written
            self.engine.stores.clear()
        self.engine.live.clear()
        self.engine.events.clear()
        self._cancelled.clear()
        self._calls.clear()
        self._stepping = False
        self._reset_state()
        for index, call in unfinished.items():
            for live_request in call.lives:
                if live_request.index == index:
                    live_request.error = RequestFailed(
                        "the process was forked: its parent has the request"
                    )
                    live_request.reason = "error"
            call.pending.append(Event(index, [], [], "error"))
        for call in set(unfinished.values()):
            call.deliver(call.pending)


_drivers: weakref.WeakSet[Driver] = weakref.WeakSet()


def _serve_engine(reference: weakref.ref[Driver], changed: threading.Condition) -> None:
    """Runs the engine thread, which holds its driver only while there is something to do."""
    initial_driver = reference()
    if initial_driver is not None and initial_driver.engine.models["target"].device.type == "cuda":
        torch.cuda.set_device(initial_driver.engine.models["target"].device)
    del initial_driver
    while True:
        with changed:
            driver = reference()
            if driver is None or driver._stopped:
                return
            if not driver._is_due():
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
        if all(live_request.ctx.request.trace is None for live_request in call.lives):
            batch = _join_events(batch)
        unfinished -= sum(event.done is not None for event in batch)
        yield batch


def _join_events(events: list[Event]) -> list[Event]:
    """Joins the events of each request: its tokens together, its end after them."""
    if len(events) < 2:
        return events
    events_by_request: dict[int, Event] = {}
    for event in events:
        joined_event = events_by_request.setdefault(event.request, Event(event.request, [], []))
        joined_event.tokens += event.tokens
        joined_event.sources += event.sources
        joined_event.done = event.done or joined_event.done
        joined_event.placed = [*joined_event.placed, *event.placed]
        joined_event.length = joined_event.length if event.length is None else event.length
    return list(events_by_request.values())


def _wake_waiting(changed: threading.Condition) -> None:
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
