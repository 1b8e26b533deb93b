"""Sizes, patience, names and headers."""

from __future__ import annotations

import logging
import socket

import httpx
import pytest

from foretell.serve.keys import Key, Keys, _hash_key
from foretell.serve.settings import Settings
from tests.serve.asked import completion
from tests.serve.live import Live, running, until

SECRET = "sk-0123456789abcdef"
OTHER = "sk-fedcba9876543210"


def keys(**limits: int) -> Keys:
    return Keys([Key("one", _hash_key(SECRET), **limits), Key("two", _hash_key(OTHER))])


def bearer(key: str = SECRET) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def port(live: Live) -> int:
    return int(live.url.rpartition(":")[2])


def test_a_body_that_is_too_long_is_refused_while_it_is_read() -> None:
    with running(settings=Settings(body=1000)) as live, live.client() as client:
        told = client.post("/v1/completions", json={"prompt": "a" * 2000})
        assert told.status_code == 413 and told.json()["error"]["code"] == "request_too_large"

        def endless():  # type: ignore[no-untyped-def]
            for _ in range(50):
                yield b"a" * 100

        untold = client.post(
            "/v1/completions", content=endless(), headers={"Content-Type": "application/json"}
        )
        assert untold.status_code == 413
        assert completion(client, "a", max_tokens=1)["choices"]


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    with running(settings=Settings(patience=0.2)) as live:
        with socket.create_connection(("127.0.0.1", port(live))) as raw:
            raw.settimeout(10)
            raw.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
                b"Content-Type: application/json\r\nContent-Length: 500\r\n\r\n{"
            )
            answer = raw.recv(4096)
        assert b" 408 " in answer.splitlines()[0]


@pytest.mark.parametrize("path", ["/v1/models", "/foretell/status", "/metrics"])
def test_without_its_key_nobody_learns_anything(path: str) -> None:
    with running(settings=Settings(keys=keys())) as live, live.client() as client:
        for headers in ({}, bearer("sk-wrong-wrong-wrong"), {"Authorization": f"Basic {SECRET}"}):
            answer = client.get(path, headers=headers)
            assert answer.status_code == 401
            error = answer.json()["error"]
            assert error["code"] == "invalid_api_key" and error["type"] == "invalid_request_error"
            assert answer.headers["WWW-Authenticate"] == "Bearer"
        assert client.get(path, headers=bearer()).status_code == 200
        assert client.get("/health").status_code == 200


def test_a_key_is_looked_at_before_the_body() -> None:
    with running(settings=Settings(keys=keys())) as live, live.client() as client:
        answer = client.post("/v1/completions", content=b"{" * 100)
        assert answer.status_code == 401


def test_each_key_has_its_own_limits() -> None:
    settings = Settings(keys=keys(requests_per_minute=2))
    with running(settings=settings) as live, live.client() as client:
        body = {"prompt": "a", "max_tokens": 1}

        def ask(key: str) -> httpx.Response:
            return client.post("/v1/completions", json=body, headers=bearer(key))

        assert [ask(SECRET).status_code for _ in range(3)] == [200, 200, 429]
        assert int(ask(SECRET).headers["Retry-After"]) > 1
        assert [ask(OTHER).status_code for _ in range(3)] == [200, 200, 200]


@pytest.mark.parametrize("share", [True, False])
def test_keys_share_what_drafters_learn_only_when_told(share: bool) -> None:
    settings = Settings(keys=keys(), share_between_keys=share)
    with running(settings=settings) as live, live.client() as client:
        body = {"prompt": "The quick brown", "max_tokens": 8, "method": "suffix:shared=yes"}
        for key in (SECRET, OTHER):
            assert client.post("/v1/completions", json=body, headers=bearer(key)).status_code == 200
        tenants = {tenant for tenant, *_ in live.lm.engine.stores}
    assert tenants == ({""} if share else {"one", "two"})


def test_pages_of_other_sites_may_not_ask() -> None:
    asked = {
        "Origin": "https://other.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    with running() as live, live.client() as client:
        answer = client.options("/v1/completions", headers=asked)
        assert "access-control-allow-origin" not in answer.headers
        form = client.post("/v1/completions", content=b'{"prompt": "a"}')  # needs no such question
        assert form.status_code == 400
    allowed = Settings(origins=("https://other.example",), keys=keys())
    with running(settings=allowed) as live, live.client() as client:
        answer = client.options("/v1/completions", headers=asked)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://other.example"
        refused = client.get("/v1/models", headers={"Origin": "https://other.example"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://other.example"


def test_a_name_that_a_page_made_up_is_not_answered() -> None:
    settings = Settings(hosts=("localhost", "127.0.0.1", "::1"))
    with running(settings=settings) as live, live.client() as client:
        for name in ("localhost", "localhost:80", "127.0.0.1:9", "[::1]:8000", "[::1]"):
            assert client.get("/health", headers={"Host": name}).status_code == 200, name
        for name in ("evil.example", "evil.example:8000", "localhost.evil.example", ""):
            assert client.get("/health", headers={"Host": name}).status_code == 421, name


def test_answers_have_the_headers_of_a_careful_page(client: httpx.Client) -> None:
    for path in ("/health", "/nowhere"):
        headers = client.get(path).headers
        assert headers["X-Content-Type-Options"] == "nosniff"
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
        assert "server" not in headers


@pytest.mark.parametrize("told", [True, False])
def test_prompts_are_logged_only_when_told(caplog: pytest.LogCaptureFixture, told: bool) -> None:
    secret = "a word nobody says"
    with (
        caplog.at_level(logging.DEBUG),
        running(settings=Settings(log_prompts=told, keys=keys())) as live,
        live.client() as client,
    ):
        body = {"prompt": secret, "max_tokens": 2}
        client.post("/v1/completions", json=body, headers=bearer())
        client.post("/v1/completions", json=body | {"temperature": "x"}, headers=bearer())
    assert "/v1/completions" in caplog.text
    assert (secret in caplog.text) == told
    assert SECRET not in caplog.text


@pytest.mark.parametrize("share", [True, False])
def test_keys_share_prefixes_only_when_told(share: bool) -> None:
    settings = Settings(keys=keys(), share_between_keys=share)
    with running(settings=settings) as live, live.client() as client:
        body = {"prompt": list(range(1, 100)), "max_tokens": 1}

        def reused(key: str) -> int:
            before = live.lm.engine.status()["prefix_tokens_reused"]
            assert client.post("/v1/completions", json=body, headers=bearer(key)).status_code == 200
            return live.lm.engine.status()["prefix_tokens_reused"] - before

        assert reused(SECRET) == 0
        assert reused(SECRET) > 0
        assert (reused(OTHER) > 0) == share


def test_what_is_asked_every_few_seconds_is_logged_where_it_fails(
    live: Live, client: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="foretell.serve"):
        for path in ("/foretell/status", "/health", "/metrics"):
            assert client.get(path).status_code == 200
        assert client.get("/version").status_code == 200
        assert client.post("/metrics").status_code == 405
        until(lambda: "POST" in caplog.text)  # it is logged after its answer
    lines = [" ".join(record.getMessage().split()[:3]) for record in caplog.records]
    assert lines == ["GET /version 200", "POST /metrics 405"]
