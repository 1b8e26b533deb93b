"""A batch on Ray: whatever dies, every request has one result."""

from __future__ import annotations

import json
import os
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from foretell.batch.progress import Meter
from foretell.batch.requests import Item, read_requests
from foretell.batch.results import Results, Run
from foretell.errors import RequestFailed
from foretell.serve.errors import ApiError
from tests.cluster import toy

# Ray is imported by the tests themselves, so that collecting them takes no time.
pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed"),
]
COUNT = 24


def items() -> list[Item]:
    """Most of them begin alike; one names a field that there is not."""
    found = []
    for line in range(1, COUNT + 1):
        prompt = "def add(a, b): " * (line % 4) + f"request {line}"
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": 4, "temperature": 0}
        if line == 7:
            body["tempature"] = 1
        found.append(Item(line, f"id-{line}", "/v1/completions", body))
    return found


def broken() -> Any:
    raise OSError("no such model")


def test_dead_workers_lose_and_double_nothing(two_cpus: None, tmp_path: Path) -> None:
    """Two workers, one of which is killed when it has given its first answer. Before them one that
    cannot start: a cluster takes seconds, so this is one test.
    """
    from foretell.cluster.batching import Crew, worker_starter

    with pytest.raises(RequestFailed, match=r"^a worker cannot be started: .*no such model$"):
        Crew(worker_starter(broken, "auto", cpus=0.5), 1)

    crew = Crew(worker_starter(toy.worker, "auto", cpus=0.5), 2)
    results: dict[int, Any] = {}
    killed: list[int] = []

    def deliver(item: Item, answer: Any) -> None:
        assert item.line not in results, "a second result"
        results[item.line] = answer
        if not killed:
            import ray

            (worker, _) = next(iter(crew.running.values()))
            killed.append(ray.get(worker.process.remote()))
            os.kill(killed[0], signal.SIGKILL)

    crew.answer(items(), deliver)
    assert sorted(results) == list(range(1, COUNT + 1))
    assert killed
    assert isinstance(results[7], ApiError) and results[7].param == "tempature"
    alone = toy.served().lm
    for line, answer in results.items():
        if line == 7:
            continue
        prompt = items()[line - 1].body["prompt"]
        expected = alone.generate(prompt, method="plain", max_new_tokens=4)
        assert answer["choices"][0]["text"] == expected.text
    file_to_file(crew, tmp_path)


def test_a_deadly_request_is_found_and_given_up() -> None:
    from foretell.cluster.batching import Piece

    piece = Piece(items()[:5])
    assert piece.without(2).line == 2
    assert piece.after_death() == [piece]  # nothing is known yet
    alone = piece.after_death()
    assert [[item.line for item in one.items] for one in alone] == [[1], [3], [4], [5]]
    assert alone[0].after_death() == [alone[0]]
    assert alone[0].after_death() == []  # given up
    assert len(alone[0].items) == 1
    done = Piece([])
    assert done.after_death() == []


def file_to_file(crew: Any, folder: Path) -> None:
    """The same workers answer a file, a second run what the first one left, and a third nothing."""
    from foretell.cluster.batching import answer_on_cluster

    lines = [json.dumps(line_of(item)) for item in items()[:4]]
    source = folder / "in.jsonl"
    source.write_text("\n".join([*lines, "nonsense", ""]))
    requests = read_requests(source)
    target = folder / "out.jsonl"
    for left in (5, 2, 0):
        told: list[int] = []
        results = Results(target, Run(requests.digest, crew.digest))
        with results.opened():
            assert len(requests) - len(results.lines) == left
            meter = Meter(left)
            answer_on_cluster(
                crew,
                requests,
                results,
                meter,
                lambda: None,
                lambda line, _, told=told: told.append(line),
            )
        assert told == ([5] if left else [])
        written = target.read_text().splitlines(keepends=True)
        found = sorted(int(json.loads(line)["id"].rpartition("_")[2]) for line in written)
        assert found == [1, 2, 3, 4, 5]
        if left == 5:  # as if the first run had been killed: two results are missing
            kept = [line for line in written if '_5"' not in line and '_2"' not in line]
            target.write_text("".join(kept))


def line_of(item: Item) -> dict[str, Any]:
    return {"custom_id": item.custom_id, "method": "POST", "url": item.url, "body": item.body}
