"""The log: nobody forges a record, and nobody floods it."""

from __future__ import annotations

import io
import logging
import socket
import sys

import pytest

from foretell.serve import logs
from tests.serve.live import running


def record(
    text: str, *arguments: object, second: float = 0.0, error: bool = False
) -> logging.LogRecord:
    info = sys.exc_info() if error else None
    level = logging.ERROR if error else logging.INFO
    made = logging.LogRecord("foretell.serve", level, "", 0, text, arguments, info)
    made.created = second
    return made


def test_what_clients_send_stays_within_its_line() -> None:
    lines = logs.Lines("%(levelname)s %(message)s")
    forged = "a\r\nINFO GET / 200\x1b[2J\x00\x9b\u2028b\u202e"
    said = lines.format(record("%s", forged))
    assert said == "INFO a\\r\\nINFO GET / 200\\x1b[2J\\x00\\x9b\\u2028b\\u202e"
    assert lines.format(record("Größe 漢字 🙂")) == "INFO Größe 漢字 🙂"
    try:
        raise ValueError(forged)
    except ValueError:
        said = lines.format(record("failed", error=True))
    first, *others = said.splitlines()
    assert first == "ERROR failed" and len(others) >= 3
    assert all(line.startswith("  ") for line in others) and "\x1b" not in said


def test_a_flood_is_counted_not_written() -> None:
    bounded = logs.Bounded()
    passed = [one for one in (record("%d", k) for k in range(1000)) if bounded.filter(one)]
    assert len(passed) == logs.MOST[logging.INFO]
    error = record("bad", error=True)
    assert bounded.filter(error)  # others do not hide it
    after = record("%d", 7, second=1.0)
    assert bounded.filter(after)
    assert after.getMessage() == "7 (900 records before it were left out)"
    assert bounded.filter(record("%d", 8, second=2.0))


@pytest.mark.parametrize("path", ["/a%0aINFO%20forged", "/%1b%5b2J%00", "/" + "x" * 3000])
def test_a_path_is_logged_as_it_came(path: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), running() as live, live.client() as client:
        client.get("/health")
        with socket.create_connection(("127.0.0.1", int(live.url.rpartition(":")[2]))) as raw:
            raw.settimeout(10)
            raw.sendall(f"GET {path} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
            assert raw.recv(100)
    said = [one.getMessage() for one in caplog.records if one.name == "foretell.serve"]
    assert any(f"GET {path[:200]} 404" in line for line in said)
    assert all(line.isprintable() for line in said)


def test_everything_goes_through_it() -> None:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    root.handlers[:] = []
    try:
        stream = io.StringIO()
        logs.begin_logging(stream)
        logging.getLogger("asyncio").error("one\ntwo")
        assert stream.getvalue().endswith(" ERROR one\\ntwo\n")
    finally:
        root.handlers[:] = before
        root.setLevel(level)
