"""The server on Ray: who gets a request, and what happens when replicas come, go and die."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.cluster import toy

if TYPE_CHECKING:
    from foretell.cluster.serving import Replica

# Ray is imported by the tests themselves, so that collecting them takes no time.
pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed"),
]
PATIENCE = 60.0


def until(holds: Callable[[], Any]) -> Any:
    """Waits until something holds, and returns it."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if found := holds():
            return found
        time.sleep(0.05)
    raise AssertionError("it never came")


@pytest.fixture
def deployed(two_cpus: None, free_port: int, tmp_path: Path) -> Iterator[Any]:
    """Deploys a version of the toy server; returns a client of it."""
    from ray import serve

    from foretell.cluster.serving import Scale, build_application

    serve.start(http_options={"host": "127.0.0.1", "port": free_port})
    client = httpx.Client(base_url=f"http://127.0.0.1:{free_port}", timeout=PATIENCE)

    def deploy(version: str = "1", **scale: Any) -> httpx.Client:
        made = build_application(
            partial(toy.app, tmp_path, version), Scale(cpus=0.1, health_every=0.5, **scale)
        )
        serve.run(made, name="foretell")
        return client

    with client:
        yield deploy
    serve.shutdown()


def ask(client: httpx.Client, prompt: str, **more: Any) -> dict[str, Any]:
    answer = client.post("/v1/completions", json={"prompt": prompt, **more})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_the_life_of_two_replicas(deployed: Any, tmp_path: Path) -> None:
    """One story, since a cluster takes seconds to start."""
    client = deployed(min_replicas=2, max_replicas=2, busy=2, body=10_000)
    with ThreadPoolExecutor(16) as threads:
        # Prompts that begin alike go to one replica, others to both.
        alike = {ask(client, "a" * 300 + str(i))["pid"] for i in range(4)}
        assert len(alike) == 1
        pids = {ask(client, f"{i} prompt")["pid"] for i in range(16)}
        assert len(pids) == 2 and alike < pids

        # Where that one is busy, the next one is asked.
        many = threads.map(lambda i: ask(client, "a" * 300 + str(i), sleep=0.7), range(5))
        assert {one["pid"] for one in many} == pids

        # Numbers of both, each by its name.
        page = client.get("/metrics").text
        lines = [line for line in page.splitlines() if line.startswith("asked_total{replica=")]
        assert len(lines) == 2 and page.count("# TYPE asked_total counter") == 1
        assert sum(float(line.split()[1]) for line in lines) == 25

        # Too much, unknown, and a client that leaves.
        refused = client.post("/v1/completions", content=b" " * 10_001)
        assert refused.status_code == 413
        assert refused.json()["error"]["code"] == "request_too_large"
        assert client.get("/nothing").status_code == 404
        with client.stream("POST", "/v1/completions", json={"prompt": "", "parts": 500}) as answer:
            assert next(answer.iter_lines()) == "part 0"
        until(lambda: list(tmp_path.glob("left-*")))

        # One replica is killed while it has requests: all of them are answered by the other one.
        (victim,) = alike
        for note in tmp_path.glob("began-*"):
            note.unlink()
        held = [threads.submit(ask, client, "a" * 300 + str(i), sleep=1.0) for i in range(2)]
        until(lambda: (tmp_path / f"began-{victim}").exists())
        os.kill(victim, signal.SIGKILL)
        assert {one.result()["pid"] for one in held} == pids - {victim}

        # A new version, while requests come in: none fails, and the old replicas end in order.
        stop = time.monotonic() + PATIENCE
        versions: list[str] = []

        def keep_asking() -> None:
            while time.monotonic() < stop and versions[-3:] != ["2"] * 3:
                versions.append(ask(client, f"{len(versions)}", sleep=0.05)["version"])

        asking = threads.submit(keep_asking)
        until(lambda: versions)
        deployed("2", min_replicas=2, max_replicas=2)
        asking.result()
        assert versions[0] == "1" and versions[-1] == "2"
        until(lambda: (tmp_path / f"ended-{(pids - {victim}).pop()}").exists())

        # An ill replica is replaced.
        before = {ask(client, f"{i}")["pid"] for i in range(16)}
        (tmp_path / "ill").touch()
        started = len(list(tmp_path.glob("started-*")))
        until(lambda: len(list(tmp_path.glob("started-*"))) > started)
        (tmp_path / "ill").unlink()
        until(lambda: ask(client, "x")["pid"] not in before)


def test_a_replica_is_the_server_itself() -> None:
    """The real application over a tiny model, whole and streamed."""
    from foretell.cluster.serving import Replica

    body = {"prompt": "def add(a", "max_tokens": 6, "temperature": 0}
    start, *rest = messages_of(Replica(toy.tiny_server), body)
    assert start["status"] == 200
    whole = json.loads(b"".join(message["body"] for message in rest))
    assert whole["usage"]["completion_tokens"] == 6
    start, *rest = messages_of(Replica(toy.tiny_server), body | {"stream": True})
    assert dict(start["headers"])[b"content-type"].startswith(b"text/event-stream")
    events = b"".join(message["body"] for message in rest).decode().split("\n\n")
    assert events[-2] == "data: [DONE]"
    text = "".join(
        choice["text"]
        for event in events[:-2]
        for choice in json.loads(event.removeprefix("data: "))["choices"]
    )
    assert text == whole["choices"][0]["text"]


@pytest.mark.parametrize(("least", "most"), [(2, 2), (1, 4)])
def test_replicas_grow_with_the_load_where_they_may(least: int, most: int) -> None:
    from foretell.cluster.serving import Scale, build_application

    made: Any = build_application(toy.tiny_server, Scale(least, most, cpus=2, busy=8))
    (bound,) = [
        one for one in made._bound_deployment.init_args if hasattr(one, "_bound_deployment")
    ]
    deployment = bound._bound_deployment
    assert deployment.ray_actor_options["num_cpus"] == 2
    grows = deployment._deployment_config.autoscaling_config
    if least == most:
        assert grows is None and deployment.num_replicas == 2
    else:
        assert (grows.min_replicas, grows.max_replicas) == (1, 4)
        assert grows.target_ongoing_requests == 4


def messages_of(replica: Replica, body: dict[str, Any]) -> list[dict[str, Any]]:
    import asyncio

    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/v1/completions",
        "raw_path": b"/v1/completions",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }

    async def collect() -> list[dict[str, Any]]:
        sent = json.dumps(body).encode()
        found = [message async for message in replica.answer("", scope, sent)]
        await replica.close()
        return found

    return asyncio.run(collect())
