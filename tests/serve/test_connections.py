"""Bodies that come slowly, in tiny parts or never, and more connections than there is room for."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from foretell.serve import connections
from foretell.serve.settings import Settings
from tests.serve.asked import completion
from tests.serve.live import Live, running, until
from tests.serve.test_guard import keys

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\n"
LENGTH = HEAD + b"Content-Length: 100000\r\n\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


@contextlib.contextmanager
def connected(live: Live) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", int(live.url.rpartition(":")[2]))) as raw:
        raw.settimeout(10)
        yield raw


def trickled(raw: socket.socket, part: bytes, pause: float = 0.02) -> bytes:
    """Sends a part again and again, until the other side ends it; returns what was answered."""
    answer = b""
    raw.settimeout(pause)
    while True:
        try:
            raw.sendall(part)
            received = raw.recv(4096)
        except TimeoutError:
            continue
        except OSError:
            return answer
        if not received:
            return answer
        answer += received


@pytest.mark.parametrize(("head", "part"), [(LENGTH, b"a"), (CHUNKED, b"1\r\na\r\n")])
@pytest.mark.parametrize("status", [408, 421, 401, 404])
def test_a_body_that_comes_byte_by_byte_is_cut_off(
    head: bytes, part: bytes, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "LINGER_SECONDS", 0.1)
    settings = Settings(
        patience=0.2,
        hosts=("localhost",) if status == 421 else (),
        keys=keys() if status == 401 else Settings().keys,
    )
    head %= b"other" if status == 421 else b"localhost"
    if status == 404:
        head = head.replace(b"completions", b"nothing")
    with running(settings=settings) as live, connected(live) as raw:
        raw.sendall(head)
        answer = trickled(raw, part)
    assert b" %d " % status in answer.splitlines()[0]


def test_tiny_parts_of_a_body_are_refused_before_there_are_many() -> None:
    with running() as live:
        with connected(live) as raw:
            raw.sendall(CHUNKED % b"localhost" + b"1\r\na\r\n" * 3000)
            assert raw.recv(4096).startswith(b"HTTP/1.1 400 ")
        with connected(live) as raw:
            raw.sendall(
                CHUNKED % b"localhost" + b"40\r\n%s\r\n" % (b" " * 64) * 3000 + b"0\r\n\r\n"
            )
            assert b"application/json" in raw.recv(4096)  # it was read, and is no request


def test_who_waits_longest_makes_room_for_who_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "connection_limits", lambda: (12, 8))
    with contextlib.ExitStack() as stack, running() as live, live.client() as client:
        slow = []
        for count in range(1, 9):
            raw = stack.enter_context(connected(live))
            raw.sendall(LENGTH % b"localhost")
            slow.append(raw)
            until(lambda: len(live.server.server_state.connections) == min(count, 6))  # noqa: B023
        assert completion(client, "a", max_tokens=1)["choices"]
        ended = []
        for raw in slow:
            raw.settimeout(0.05)
            try:
                ended.append(raw.recv(1) == b"")
            except ConnectionResetError:
                ended.append(True)
            except TimeoutError:
                ended.append(False)
        assert ended[:2] == [True, True] and not any(ended[4:])


def test_there_is_room_for_fewer_connections_than_descriptors() -> None:
    resource = pytest.importorskip("resource")
    most, at_once = connections.connection_limits()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert 8 <= most <= connections.MOST and at_once >= 8
    assert limit == resource.RLIM_INFINITY or most + at_once < limit
