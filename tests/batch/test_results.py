"""Files of results: whole lines, of one run only, whatever happens to the process."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from foretell.batch.requests import Item, Refused
from foretell.batch.results import Results, Run
from foretell.errors import BadFile
from foretell.serve.errors import ApiError
from tests.batch.files import read

RUN = Run("a1" * 32, "b2" * 32)
ITEMS = [Item(line, f"c{line}", "/v1/completions", {}) for line in range(1, 6)]


def filled(path: Path, lines: int = 3, run: Run = RUN) -> Path:
    with Results(path, run).opened() as results:
        for item in ITEMS[:lines]:
            results.write_answer(item, {"choices": [item.line], "text": "ü漢\n"})
    return path


def test_a_result_has_the_form_of_openai(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with Results(path, RUN).opened() as results:
        results.write_answer(ITEMS[0], {"object": "text_completion"})
        results.write_refused(Refused(2, None, ApiError("it is no JSON", code="invalid_line")))
        results.broken(ITEMS[2], ApiError("top_k: too many", "top_k", "invalid_value", 400))
        assert results.failed == 2 and results.lines == {1, 2, 3}
    good, refused, broken = read(path)
    key = "a1a1a1a1a1a1b2b2b2b2b2b2_1"
    assert good == {
        "id": f"batch_req_{key}",
        "custom_id": "c1",
        "response": {
            "status_code": 200,
            "request_id": f"req_{key}",
            "body": {"object": "text_completion"},
        },
        "error": None,
    }
    assert refused["custom_id"] is None and refused["response"] is None
    assert refused["error"] == {
        "code": "invalid_line",
        "message": "line 2: it is no JSON",
        "param": None,
        "line": 2,
    }
    assert broken["response"]["status_code"] == 400
    assert broken["response"]["body"]["error"]["param"] == "top_k"
    assert broken["error"]["line"] == 3 and broken["custom_id"] == "c3"


def test_what_is_there_is_known_when_it_is_opened_again(tmp_path: Path) -> None:
    path = filled(tmp_path / "out")
    with Results(path, RUN).opened() as results:
        assert results.lines == {1, 2, 3} and not results.failed and not results.torn
        results.broken(ITEMS[3], ApiError("no", status=500))
    with Results(path, RUN).opened() as results:
        assert results.lines == {1, 2, 3, 4} and results.failed == 1


@pytest.mark.parametrize("missing", [1, 2, 40, 100])
def test_a_line_that_was_torn_is_removed(tmp_path: Path, missing: int) -> None:
    path = filled(tmp_path / "out")
    whole = path.read_bytes()
    path.write_bytes(whole[:-missing])
    with Results(path, RUN).opened() as results:
        assert results.torn and results.lines == {1, 2}
        results.write_answer(ITEMS[2], {"choices": [3], "text": "ü漢\n"})
    assert path.read_bytes() == whole


@pytest.mark.parametrize("tail", [b'{"id": "bat', b'{"id": "batch_req_\0\0', b"\0\0\0"])
def test_what_a_crash_of_the_system_leaves_is_removed(tmp_path: Path, tail: bytes) -> None:
    path = filled(tmp_path / "out")
    whole = path.read_bytes()
    path.write_bytes(whole + tail)
    with Results(path, RUN).opened() as results:
        assert results.torn and results.lines == {1, 2, 3}
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    "content",
    [
        b"dear diary\n",
        b"dear diary",
        b'{"id": 1}\n',
        b'["batch_req_"]\n',
        b'{"id": "batch_req_other", "error": null}\n',
    ],
)
def test_another_file_is_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "out"
    path.write_bytes(content)
    with (
        pytest.raises(BadFile, match="out, line 1: no result of a batch; name another"),
        Results(path, RUN).opened(),
    ):
        pass
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (Run("c3" * 32, RUN.model), "results of another file of requests"),
        (Run(RUN.requests, "c3" * 32), "of another model or other settings"),
    ],
)
def test_results_of_two_runs_never_mix(tmp_path: Path, run: Run, message: str) -> None:
    path = filled(tmp_path / "out")
    before = path.read_bytes()
    with pytest.raises(BadFile, match=message), Results(path, run).opened():
        pass
    assert path.read_bytes() == before


def test_a_line_with_two_results_is_noticed(tmp_path: Path) -> None:
    path = filled(tmp_path / "out", 2)
    path.write_bytes(path.read_bytes() * 2)
    with (
        pytest.raises(BadFile, match="line 3: a second result of line 1"),
        Results(path, RUN).opened(),
    ):
        pass


def test_one_process_at_a_time_writes(tmp_path: Path) -> None:
    """Another process is refused, and one that dies lets go."""
    code = (
        "import sys\n"
        "from filelock import FileLock\n"
        "lock = FileLock(sys.argv[1])\n"
        "lock.acquire()\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    path = tmp_path / "out"
    command = [sys.executable, "-c", code, str(tmp_path / ".out.lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        with (
            pytest.raises(BadFile, match="another process is writing it"),
            Results(path, RUN).opened(),
        ):
            pass
        other.kill()
    filled(path)
    assert len(read(path)) == 3


def test_a_full_disk_is_one_line_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = filled(tmp_path / "out", 2)
    real = os.write
    left = 50

    def write(file: int, data: bytes) -> int:
        nonlocal left
        if not left:
            raise OSError(errno.ENOSPC, "No space left on device")
        size = min(left, len(data))
        left -= size
        return real(file, data[:size])

    monkeypatch.setattr(os, "write", write)
    with (
        pytest.raises(BadFile, match="No space left on device; free some space and run the same"),
        Results(path, RUN).opened() as results,
    ):
        results.write_answer(ITEMS[2], {"choices": []})
    monkeypatch.undo()
    assert not path.read_bytes().endswith(b"\n")
    with Results(path, RUN).opened() as results:
        assert results.torn and results.lines == {1, 2}
        results.write_answer(ITEMS[2], {"choices": []})
    assert [one["custom_id"] for one in read(path)] == ["c1", "c2", "c3"]


def test_results_are_with_the_system_at_once_and_synced_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    with Results(tmp_path / "out", RUN).opened() as results:
        results.write_answer(ITEMS[0], {})
        count = len(synced)
        for item in ITEMS[1:]:
            results.write_answer(item, {})
            assert len(read(tmp_path / "out")) == item.line, "not kept in this process"
        assert len(synced) == count, "not each by itself: the disk would set the pace"
    assert len(synced) == count + 1


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_json_is_never_written(tmp_path: Path, value: Any) -> None:
    with Results(tmp_path / "out", RUN).opened() as results:
        with pytest.raises(ValueError, match="not JSON compliant"):
            results.write_answer(ITEMS[0], {"logprob": value})
        assert not results.lines
    assert (tmp_path / "out").read_bytes() == b""


def test_a_device_or_a_folder_is_no_file_of_results(tmp_path: Path) -> None:
    for path in (tmp_path, Path("/dev/null")):
        with pytest.raises(BadFile, match="no ordinary file"), Results(path, RUN).opened():
            pass


def test_any_text_is_one_line(tmp_path: Path) -> None:
    text = "a\u2028b\u0085c\n\ud800 漢"
    with Results(tmp_path / "out", RUN).opened() as results:
        results.write_answer(ITEMS[0], {"text": text})
    (line,) = (tmp_path / "out").read_bytes().splitlines()
    assert json.loads(line)["response"]["body"]["text"] == text
