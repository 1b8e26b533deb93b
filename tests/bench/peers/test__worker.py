"""A peer's process: what goes in and out, and every way in which it can fail."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from foretell.bench.peers import Run, _worker
from foretell.bench.peers._worker import Worker
from foretell.errors import RequestFailed

FAKE = """
import json, os, signal, sys
for line in sys.stdin:
    ask, how = json.loads(line), sys.argv[1]
    n = ask.get("max_new_tokens")
    if how == "exit":
        sys.exit(3)
    if how == "hang":
        sys.stdin.read()
    if how == "crash":
        os.kill(os.getpid(), signal.SIGABRT)
    if "open" in ask:
        print(json.dumps({"opened": "soon" if how == "kinds" else 0.25}), flush=True)
        continue
    answer = {
        "good": {
            "tokens": [ask["seed"] + i for i in range(n)],
            "times": [0.5, 1.0],
            "counts": [1, n - 1],
        },
        "error": {"error": "ValueError: the prompt is too long"},
        "empty": {"tokens": [], "times": [], "counts": []},
        "other counts": {"tokens": [1, 2], "times": [1.0], "counts": [1]},
        "other times": {"tokens": [1, 2], "times": [1.0], "counts": [1, 1]},
        "keys": {"token": [1]},
        "kinds": {"tokens": ["one"], "times": [1.0], "counts": [1]},
        "list": [1, 2],
        "null": {"tokens": None, "times": [1.0], "counts": [1]},
    }.get(how)
    print("rubbish" if answer is None else json.dumps(answer), flush=True)
"""


class Place:
    """An environment whose peer is the script above."""

    def __init__(self, folder: Path, how: str):
        self.script, self.how = folder / "fake.py", how
        self.script.write_text(FAKE)

    def command(self, task: str, options: dict[str, Any]) -> list[str]:
        assert task == "start"
        assert options == {"threads": 3}
        return [sys.executable, str(self.script), self.how]

    def variables(self) -> dict[str, str]:
        return dict(os.environ)


def worker(folder: Path, how: str) -> Worker:
    return Worker("the peer", "as it is", Place(folder, how), {"threads": 3})  # type: ignore[arg-type]


def test_requests_and_answers(tmp_path: Path) -> None:
    peer = worker(tmp_path, "good")
    assert peer.process is None, "it starts with the first run"
    assert peer.run([1, 2], 3, 0.0, 5) == Run([5, 6, 7], [0.5, 1.0], [1, 2])
    process = peer.process
    assert peer.run([1, 2], 2, 0.5, 6) == Run([6, 7], [0.5, 1.0], [1, 1])
    assert peer.process is process
    peer.close()
    assert process is not None
    assert process.poll() is not None
    assert peer.process is None
    peer.close()
    assert peer.run([1], 2, 0.0, 0).tokens == [0, 1], "it starts again"
    peer.close()


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("exit", "exit code 3"),
        ("crash", "SIGABRT"),
        ("error", "ValueError: the prompt is too long"),
        *(
            (how, "something that is no answer")
            for how in (
                "rubbish",
                "empty",
                "other counts",
                "other times",
                "keys",
                "kinds",
                "list",
                "null",
            )
        ),
    ],
)
def test_a_failure_is_one_line_and_ends_the_process(how: str, why: str, tmp_path: Path) -> None:
    peer = worker(tmp_path, how)
    with pytest.raises(RequestFailed, match=why) as failed:
        peer.run([4321], 2, 0.0, 0)
    assert str(failed.value).startswith("the peer: ")
    assert "\n" not in str(failed.value)
    assert "4321" not in str(failed.value), "prompts are nobody's business"
    assert peer.process is None


def test_loading_is_timed_and_the_process_weighed(tmp_path: Path) -> None:
    peer = worker(tmp_path, "good")
    assert peer.memory() is None, "nothing runs"
    assert peer.open() == 0.25
    assert peer.run([1], 2, 0.0, 0).tokens == [0, 1]
    if sys.platform == "linux":
        now, most = peer.memory() or (0, 0)
        assert 0 < now <= most
    peer.close()
    bad = worker(tmp_path, "kinds")
    with pytest.raises(RequestFailed, match="something that is no answer"):
        bad.open()
    assert bad.process is None


def test_one_that_does_not_answer_keeps_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_worker, "PATIENCE", 0.5)
    peer = worker(tmp_path, "hang")
    with pytest.raises(RequestFailed, match=r"the peer: it had not answered after 0\.5 seconds"):
        peer.run([1], 2, 0.0, 0)
    assert peer.process is None
    monkeypatch.setattr(_worker, "PATIENCE", 60.0)
    threads, good = threading.active_count(), worker(tmp_path, "good")
    assert good.run([1], 2, 0.0, 0).tokens == [0, 1] and threading.active_count() == threads, (
        "no alarm is left"
    )
    good.close()


def test_a_process_that_is_gone_before_it_is_asked(tmp_path: Path) -> None:
    peer = worker(tmp_path, "good")
    peer.run([1], 2, 0.0, 0)
    assert peer.process is not None
    peer.process.kill()
    peer.process.wait()
    with pytest.raises(RequestFailed, match="SIGKILL"):
        peer.run(list(range(100_000)), 2, 0.0, 0)


def test_the_process_ends_with_its_worker(tmp_path: Path) -> None:
    peer = worker(tmp_path, "good")
    peer.run([1], 2, 0.0, 0)
    process = peer.process
    del peer
    gc.collect()
    assert process is not None
    assert process.poll() is not None


def test_threads_are_set_for_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    real = subprocess.Popen

    def popen(command: list[str], env: dict[str, str], **how: Any) -> subprocess.Popen[str]:
        seen.update(env)
        return real(command, env=env, **how)

    monkeypatch.setattr(subprocess, "Popen", popen)
    peer = worker(tmp_path, "good")
    peer.run([1], 2, 0.0, 0)
    assert seen["OMP_NUM_THREADS"] == "3"
    peer.close()
