"""Clients that leave, servers that end, requests that break, checks while nothing runs."""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import socket
import threading
from typing import Any

import httpx
import pytest

from foretell.constraints.grammar_trials import TRIALS
from foretell.serve import connections, lifecycle
from foretell.serve.settings import Settings
from foretell.serve.translate import Bounds
from tests import tiny
from tests.serve.asked import completion
from tests.serve.live import Live, running, until

ENDLESS = {"max_tokens": 100, "ignore_eos": True, "temperature": 0, "speculation": "off"}


def slow_lm(seconds: float = 0.02) -> tuple[Any, threading.Event]:
    """A model whose forwards take their time, so that a request is still there when a test looks,
    until the event is set.
    """
    lm = tiny.lm(draft=False)
    target = lm.models["target"]
    forward = target.forward
    opened = threading.Event()

    def slowly(jobs: Any) -> Any:
        opened.wait(seconds)
        return forward(jobs)

    target.forward = slowly
    return lm, opened


def status(live: Live) -> dict[str, Any]:
    return live.lm.engine.status()


def nothing_is_left(live: Live) -> bool:
    numbers = status(live)
    return not (numbers["running"] or numbers["waiting"] or numbers["cache_bytes"])


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_rows(stream: bool) -> None:
    lm, gate = slow_lm()
    with running(lm, Settings(prefixes=0)) as live:
        body = json.dumps({"prompt": "The quick", **ENDLESS, "n": 2, "stream": stream}).encode()
        with socket.create_connection(("127.0.0.1", int(live.url.rpartition(":")[2]))) as raw:
            raw.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
                b"Content-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
            )
            until(lambda: status(live)["cache_bytes"] > 0)
        until(lambda: nothing_is_left(live))
        assert status(live)["generation_tokens"] < 200
        gate.set()
        until(lambda: live.service.gate.requests == 0 and live.service.gate.answers == 0)
        assert (
            'finished_reason="abort",model_name="tiny"} 2.0'
            in live.service.metrics.render_text().decode()
        )


def test_a_server_that_ends_lets_requests_finish() -> None:
    lm, gate = slow_lm(0.01)
    answers: list[httpx.Response] = []
    with running(lm) as live, live.client() as client:

        def ask() -> None:
            answers.append(client.post("/v1/completions", json={"prompt": "a", **ENDLESS}))

        thread = threading.Thread(target=ask)
        thread.start()
        until(lambda: status(live)["running"] == 1)
        live.server.handle_exit(15, None)
        late = httpx.post(f"{live.url}/v1/completions", json={"prompt": "a"}, trust_env=False)
        assert late.status_code == 503 and int(late.headers["Retry-After"]) >= 1
        assert late.json()["error"]["code"] == "draining"
        health = httpx.get(f"{live.url}/health", trust_env=False)
        assert health.status_code == 503 and health.json()["status"] == "draining"
        assert live.server.started and not live.server.should_exit
        gate.set()
        thread.join()
        until(lambda: live.server.should_exit)
    assert answers[0].status_code == 200
    assert answers[0].json()["usage"]["completion_tokens"] == 100


def test_a_server_does_not_wait_for_ever() -> None:
    lm, gate = slow_lm(0.05)
    with running(lm, Settings(drain=0.1)) as live, live.client() as client:
        answers: list[httpx.Response] = []

        def ask() -> None:
            answers.append(client.post("/v1/completions", json={"prompt": "a", **ENDLESS}))

        thread = threading.Thread(target=ask)
        thread.start()
        until(lambda: status(live)["running"] == 1)
        live.server.handle_exit(15, None)
        until(lambda: live.server.should_exit)
        live.server.handle_exit(15, None)  # who cannot wait asks twice
        thread.join()
        gate.set()
    assert answers[0].status_code == 503 and "Retry-After" in answers[0].headers


def test_a_server_ends_within_its_time_while_forms_are_compiled() -> None:
    """Whoever waits for one is told, and what tries it is ended."""
    with running(tiny.lm(draft=False), Settings(drain=0.1)) as live, live.client() as client:
        slow = {"structured_outputs": {"json": {"type": "integer", "multipleOf": 99991}}}
        answers: list[int] = []

        def ask() -> None:
            body = {"prompt": "The", "max_tokens": 4, **slow}
            answers.append(client.post("/v1/completions", json=body).status_code)

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        until(lambda: TRIALS._busy)
        live.server.handle_exit(signal.SIGTERM, None)
        for thread in threads:
            thread.join(60)
        assert answers == [503] * 4
        until(lambda: not TRIALS._busy and not TRIALS._idle)
        assert live.server.config.timeout_graceful_shutdown == 0


def test_more_than_may_wait_are_told_when_to_come_back() -> None:
    lm, gate = slow_lm(0.02)
    with running(lm, Settings(running=1, waiting=1)) as live, live.client() as client:
        threads = []
        for count in (1, 2):
            body = {"prompt": "a", **ENDLESS}
            threads.append(
                threading.Thread(
                    target=client.post, args=("/v1/completions",), kwargs={"json": body}
                )
            )
            threads[-1].start()
            until(lambda: live.service.gate.answers == count)  # noqa: B023
        refused = client.post("/v1/completions", json={"prompt": "a"})
        assert refused.status_code == 429 and 1 <= int(refused.headers["Retry-After"]) <= 120
        assert refused.json()["error"]["type"] == "rate_limit_error"
        until(lambda: status(live)["waiting"] == 1)
        gate.set()
        for thread in threads:
            thread.join()
        assert completion(client, "a", max_tokens=1)["choices"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_that_is_late_ends(stream: bool) -> None:
    lm, gate = slow_lm(0.02)
    with running(lm) as live, live.client() as client:
        body = {"prompt": "a", **ENDLESS, "timeout": 0.3, "stream": stream}
        answer = client.post("/v1/completions", json=body)
        gate.set()
        if stream:
            events = [line for line in answer.text.split("\n\n") if line]
            assert len(events) > 2 and events[-1] == "data: [DONE]"
            error = json.loads(events[-2].removeprefix("data: "))["error"]
        else:
            assert answer.status_code == 408 and answer.headers["x-should-retry"] == "false"
            error = answer.json()["error"]
        assert error["code"] == "timeout"
        assert completion(client, "a", max_tokens=1)["choices"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_step_that_takes_long_keeps_no_client_beyond_its_deadline(stream: bool) -> None:
    lm, gate = slow_lm(60)  # the engine ends nothing before its step is done
    with running(lm) as live, live.client() as client:
        body = {"prompt": "a", **ENDLESS, "timeout": 0.1, "stream": stream}
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 408 and answer.json()["error"]["code"] == "timeout"
        aborted = 'finished_reason="abort",model_name="tiny"} 1.0'
        until(lambda: aborted in live.service.metrics.render_text().decode())
        gate.set()
        until(lambda: nothing_is_left(live))


def test_a_server_bounds_the_time_of_all_requests() -> None:
    lm, gate = slow_lm(0.02)
    with running(lm, Settings(bounds=Bounds(timeout=0.2))) as live, live.client() as client:
        answer = client.post("/v1/completions", json={"prompt": "a", **ENDLESS, "timeout": 60})
        gate.set()
        assert answer.status_code == 408


def test_a_request_that_breaks_takes_nobody_along(caplog: pytest.LogCaptureFixture) -> None:
    lm, gate = slow_lm(0.01)
    broken = "a secret in the message"
    with running(lm) as live, live.client() as client:
        answers: dict[str, httpx.Response] = {}

        def ask(name: str, **fields: Any) -> None:
            answers[name] = client.post("/v1/completions", json={"prompt": "a", **ENDLESS} | fields)

        threads = [threading.Thread(target=ask, args=("sound",))]
        threads[0].start()
        until(lambda: status(live)["running"] == 1)
        original = lm.engine.models["target"].forward

        def forward(jobs: Any) -> Any:
            if any(len(job.tokens) > 5 for job in jobs):
                raise ValueError(broken)
            return original(jobs)

        lm.engine.models["target"].forward = forward
        with caplog.at_level(logging.ERROR):
            ask("broken", prompt="The quick brown fox jumps over the lazy dog")
        gate.set()
        threads[0].join()
        assert answers["sound"].status_code == 200
        assert answers["sound"].json()["usage"]["completion_tokens"] == 100
        assert answers["broken"].status_code == 500
        assert broken not in answers["broken"].text and "Traceback" not in answers["broken"].text
        assert broken in caplog.text
        until(lambda: nothing_is_left(live))


def test_what_nobody_expected_has_a_name_and_no_trace(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running() as live, live.client() as client:
        monkeypatch.setattr(live.lm, "read_prompt", lambda *_: 1 / 0)
        for stream in (True, False):
            answer = client.post("/v1/completions", json={"prompt": "a", "stream": stream})
            assert answer.status_code == 500
            name = answer.json()["error"]["code"]
            assert "ZeroDivisionError" not in answer.text and name in caplog.text
        assert "ZeroDivisionError" in caplog.text


def test_caches_are_checked_while_nothing_runs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with running(settings=Settings(check_every=0.05)) as live, live.client() as client:
        until(lambda: live.service.health.checked is not None)
        told = client.get("/health").json()
        assert told["status"] == "ok" and told["integrity"]["troubles"] == []
        assert 'foretell:sound{model_name="tiny"} 1.0' in client.get("/metrics").text
        monkeypatch.setattr(live.lm, "check_integrity", lambda: ["a row is not its text's"])
        until(lambda: not live.service.health.sound)
        answer = client.get("/health")
        assert answer.status_code == 503 and answer.json()["status"] == "damaged"
        assert answer.json()["integrity"]["troubles"] == ["a row is not its text's"]
        assert 'foretell:sound{model_name="tiny"} 0.0' in client.get("/metrics").text
        assert "a row is not its text's" in caplog.text


def test_freed_memory_is_given_back_while_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(lifecycle, "trim_memory", lambda: calls.append(1))
    with running(settings=Settings(check_every=0.05)) as live:
        until(lambda: live.service.health.checked is not None)
        assert calls


@pytest.mark.parametrize("sent", [b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nHost: x\r\nA:"])
def test_a_request_that_does_not_come_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(connections, "HEADER_SECONDS", 0.2)
    with (
        running() as live,
        socket.create_connection(("127.0.0.1", int(live.url.rpartition(":")[2]))) as raw,
    ):
        raw.settimeout(10)
        raw.sendall(sent)
        assert raw.recv(100) == b""


@pytest.mark.parametrize(
    "sent",
    [
        b"\x00\xff\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\nmore and more",
        b"A" * 200_000,
    ],
)
def test_nonsense_ends_its_own_connection_alone(
    client: httpx.Client, live: Live, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_connection(("127.0.0.1", int(live.url.rpartition(":")[2]))) as raw:
        raw.settimeout(10)
        with contextlib.suppress(OSError):  # it may close while this is still being sent
            raw.sendall(sent)
            while raw.recv(4096):
                pass
    assert client.get("/health").status_code == 200
    assert "Traceback" not in caplog.text


def test_bodies_that_still_come_have_no_time_beyond_the_drain() -> None:
    with (
        running(settings=Settings(drain=0)) as live,
        socket.create_connection(("127.0.0.1", int(live.url.rpartition(":")[2]))) as raw,
    ):
        raw.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: 500\r\n\r\n{"
        )
        until(lambda: live.server.server_state.tasks)
        live.server.handle_exit(15, None)
        until(lambda: live.server.should_exit)
        assert live.server.config.timeout_graceful_shutdown == 0
        raw.settimeout(10)
        assert b" 503 " in raw.recv(4096).splitlines()[0]
