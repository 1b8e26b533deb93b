"""Connections: how long a request may take to come, and how many there may be.

A connection waits for the head of a request, then for its body; what still comes of a body after
its answer is thrown away for a moment. Each has a time in all, however often a byte comes. Where
there are more connections than the process has descriptors for, or one peer has more unfinished
requests than its share, the one goes that has waited longest: who sends slowly keeps nobody out.
"""

from __future__ import annotations

import os
from collections import defaultdict
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 15.0  # that the first line and headers of a request may take
LINGER_SECONDS = 2.0  # that the rest of a body may take after an answer that did not need it
MOST = 1024  # connections
SPARE = 16  # descriptors left for everything else
PARTS = 1024  # of a body that may be tiny
SMALLEST = 64  # bytes that its other parts have on average: each costs the loop the same time


def connection_limits() -> tuple[int, int]:
    """Returns how many connections there may be, and how many of these may be taken in at once: a
    loop takes in all that wait before it looks at any.
    """
    free_descriptors = 2 * MOST
    try:
        import resource

        descriptor_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if descriptor_limit != resource.RLIM_INFINITY:
            free_descriptors = min(
                free_descriptors, descriptor_limit - len(os.listdir("/proc/self/fd")) - SPARE
            )
    except (ImportError, OSError):  # no such numbers on this system
        pass
    at_once = max(8, min(512, free_descriptors // 3))
    return max(8, min(MOST, free_descriptors - at_once)), at_once


class Config(uvicorn.Config):
    """Uvicorn's configuration, which has few options here. `patience`: seconds that a body may
    take.
    """

    def __init__(self, app: Any, patience: float = 30.0, **options: Any):
        self.patience = patience
        self.most, at_once = connection_limits()
        fixed_options: dict[str, Any] = {
            "http": Protocol,
            "ws": "none",
            "lifespan": "on",
            "access_log": False,
            "log_config": None,
            "server_header": False,
            "proxy_headers": False,
            "timeout_keep_alive": 30,
            "timeout_graceful_shutdown": 2,
            "backlog": at_once,
        }
        super().__init__(app, **(fixed_options | options))


class Parts(h11.Connection):
    """A connection that refuses a body which comes in very many tiny parts."""

    parts = size = 0

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self.parts = self.size = 0
        elif isinstance(event, h11.Data):
            self.parts += 1
            self.size += len(event.data)
            if self.parts > PARTS + self.size // SMALLEST:
                raise h11.RemoteProtocolError("the body comes in too many parts")
        return event


class Protocol(H11Protocol):
    """The HTTP protocol, closing a connection whose request does not come."""

    config: Config

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.conn = Parts(h11.SERVER)
        self.since = self.loop.time()  # when it began to wait for this request
        self.stage = ""  # what it waits for: head, body or rest; "": the answer, or nothing
        self._timer: Any = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._follow_stage()
        self._make_room()

    def data_received(self, data: bytes) -> None:
        try:
            super().data_received(data)
        except h11.LocalProtocolError:  # nonsense came, and no answer to it can be sent any more
            self.transport.close()
            return
        self._follow_stage()

    def send_400_response(self, msg: str) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # what it would say comes too late
            self.cycle.message_event.set()
        super().send_400_response(msg)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.since = self.loop.time()
        self._follow_stage()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    # --- time

    @property
    def peer(self) -> str:
        return self.client[0] if self.client else ""

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for its client, for more of a request or for the next one."""
        return bool(self.stage) or self.conn.their_state is h11.IDLE

    def _current_stage(self) -> str:
        client_state = self.conn.their_state
        if client_state is h11.IDLE and (self.cycle is None or self.conn.trailing_data[0]):
            return "head"
        if client_state is h11.SEND_BODY and self.cycle is not None:
            return "rest" if self.cycle.response_complete else "body"
        return ""  # between two requests uvicorn looks at the time

    def _follow_stage(self) -> None:
        """Starts the time of a stage as it begins, whatever comes meanwhile."""
        stage = "" if self.transport.is_closing() else self._current_stage()
        if stage != self.stage:
            self._stop_timer()
            self.stage = stage
            self._start_timer()

    def _start_timer(self) -> None:
        stage_seconds = {
            "head": HEADER_SECONDS,
            "body": self.config.patience + LINGER_SECONDS,  # the application tells the client first
            "rest": LINGER_SECONDS,
        }
        if self.stage:
            self._timer = self.loop.call_later(stage_seconds[self.stage], self._end_late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end_late(self) -> None:
        if self.stage == "body" and self.flow.read_paused:  # it is we who do not read
            self._start_timer()
        else:
            self._end_connection()

    def _end_connection(self) -> None:
        self._stop_timer()
        self.connections.discard(self)
        self.transport.abort()

    # --- how many there are

    def _make_room(self) -> None:
        """Ends the connection that has waited longest where there are too many."""
        waiting_by_peer: dict[str, list[Protocol]] = defaultdict(list)
        for connection in self.connections:
            if isinstance(connection, Protocol) and connection.is_waiting:
                waiting_by_peer[connection.peer].append(connection)
        peer_connections = [
            connection for connection in waiting_by_peer[self.peer] if connection.stage
        ]
        if len(peer_connections) > max(4, self.config.most // 2):
            _longest_waiting(peer_connections)._end_connection()
        elif len(self.connections) > self.config.most:
            largest_group = max(waiting_by_peer.values(), key=len) or [self]
            _longest_waiting(largest_group)._end_connection()


def _longest_waiting(waiting_connections: list[Protocol]) -> Protocol:
    return min(waiting_connections, key=lambda connection: connection.since)
