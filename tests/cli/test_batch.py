"""`foretell batch`: a whole run, a run that is killed or interrupted, and input that is wrong."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import foretell
from foretell import cli
from foretell.batch import answering
from foretell.batch.requests import Item, prepare_item
from foretell.errors import BadFile
from foretell.serve.served import Served
from tests import tiny
from tests.batch.files import SHARED, chat, completion, read, write

Run = Callable[..., tuple[int, str, str]]


def arguments(folder: str, requests: Path, results: Path, *more: str) -> list[str]:
    files = ["--in", str(requests), "--out", str(results)]
    return ["batch", "--model", folder, "--backend", "torch", *files, *more]


def documents(count: int, tokens: int) -> list[dict[str, Any]]:
    """Greedy and drawn ones, half of which share a beginning."""
    asked = []
    for i in range(count):
        body = {"max_tokens": tokens + i % 5, "temperature": 0.8 * (i % 2), "method": "plain"}
        shared = SHARED if i % 4 < 2 else ""
        asked.append(completion(f"c{i}", f"{shared}{i} foxes", **body))
    return asked


def said(body: dict[str, Any]) -> Any:
    return [(one["text"], one["finish_reason"]) for one in body["choices"]], body["usage"]


def expected(folder: str, asked: list[dict[str, Any]]) -> dict[str, Any]:
    """What each request says alone."""
    lm = foretell.load(folder, backend="torch")
    served = Served(lm, folder)
    found = {}
    for one in asked:
        ready = prepare_item(Item(1, one["custom_id"], one["url"], one["body"]), served)
        outputs = lm.generate(ready.call.prompts, ready.call.method, **ready.call.arguments)
        found[one["custom_id"]] = said(ready.answer.full_answer(outputs))
    return found


@pytest.fixture(scope="module")
def long_run(folder: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Requests that take a while, and what each says alone."""
    asked = documents(24, 24)
    return asked, expected(folder, asked)


def found(results: Path) -> dict[str, Any]:
    """What the results say; no request has two."""
    lines = read(results)
    answers = {one["custom_id"]: said(one["response"]["body"]) for one in lines}
    assert len(answers) == len(lines)
    return answers


def test_a_file_of_requests_is_answered(run: Run, folder: str, tmp_path: Path) -> None:
    asked = documents(8, 5)
    results = tmp_path / "out.jsonl"
    requests = write(tmp_path / "in.jsonl", *asked)
    code, out, err = run(*arguments(folder, requests, results))
    assert code == 0 and not out
    assert re.search(r"8 requests in \d+ s: 5\d tokens, [\d,.]+ tokens/s; [3-9]\d\.\d% of", err)
    assert err.endswith("8 of 8 answered, 0 failed\n")
    assert found(results) == expected(folder, asked)
    before = results.read_bytes()
    code, _, err = run(*arguments(folder, requests, results))
    assert code == 0 and "8 of 8 are done already" in err
    assert results.read_bytes() == before, "nothing is done twice"


def test_bad_lines_are_told_by_number_and_the_rest_done(
    run: Run, folder: str, tmp_path: Path
) -> None:
    lines = [
        completion("fine", "The fox", max_tokens=2),
        "{",
        completion("late", "The fox", timeout=1e-6),
        chat("field", "hello", max_tokens=2, flavour="sweet"),
        chat("too", "fine", max_tokens=2),
    ]
    results = tmp_path / "out"
    code, _, err = run(*arguments(folder, write(tmp_path / "in", *lines), results))
    assert code == 1
    assert "in, line 2: it is no JSON" in err
    assert "in, line 3: the request was not done" in err
    assert "in, line 4: flavour: unknown field" in err
    assert err.endswith("2 of 5 answered, 3 failed\n")
    by_line = {int(one["id"].rpartition("_")[2]): one for one in read(results)}
    assert sorted(by_line) == [1, 2, 3, 4, 5]
    assert [by_line[line]["error"] is None for line in range(1, 6)] == [True, *[False] * 3, True]
    assert run(*arguments(folder, tmp_path / "in", results))[0] == 1, "they failed before"


def test_many_bad_lines_are_told_in_a_few(run: Run, folder: str, tmp_path: Path) -> None:
    requests = write(tmp_path / "in", completion("fine", "x", max_tokens=1), *["{"] * 30)
    code, _, err = run(*arguments(folder, requests, tmp_path / "out"))
    assert code == 1 and err.count("it is no JSON") == 20
    assert f"more such lines follow: {tmp_path / 'out'} has all of them" in err
    assert len(read(tmp_path / "out")) == 31


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork")
def test_a_run_that_is_killed_goes_on_without_loss_or_repetition(
    run: Run, folder: str, long_run: Any, tmp_path: Path
) -> None:
    asked, alone = long_run
    requests, results = write(tmp_path / "in", *asked), tmp_path / "out"
    command = arguments(folder, requests, results, "--max-requests", "2")
    seen = 0
    for _ in range(2):
        process = multiprocessing.get_context("fork").Process(target=cli.run, args=(command,))
        process.start()
        until = time.monotonic() + 60
        while not results.exists() or results.read_bytes().count(b"\n") < seen + 3:
            assert process.is_alive() and time.monotonic() < until
            time.sleep(0.002)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        seen = results.read_bytes().count(b"\n")
        assert seen < len(asked), "it was killed in the middle"
    with results.open("ab") as file:
        file.write(results.read_bytes()[:33])  # as if it had been killed while it wrote
    code, _, err = run(*arguments(folder, requests, results))
    assert code == 0
    assert "its last line was not whole; that request is answered again" in err
    assert f"{seen} of 24 are done already" in err
    assert found(results) == alone


def test_ctrl_c_ends_cleanly_and_says_how_to_go_on(
    run: Run, folder: str, long_run: Any, tmp_path: Path
) -> None:
    asked, alone = long_run
    requests, results = write(tmp_path / "in", *asked), tmp_path / "out"

    def interrupt() -> None:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            if results.exists() and results.read_bytes().count(b"\n") >= 2:
                break
            time.sleep(0.002)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    code, _, err = run(*arguments(folder, requests, results, "--max-requests", "2"))
    thread.join()
    assert code == 130
    done = len(read(results))
    assert 2 <= done < 24
    last = f"interrupted: {done} of 24 are done; the same command goes on from there\n"
    assert err.endswith(last) and err.count("interrupted") == 1
    code, _, err = run(*arguments(folder, requests, results))
    assert code == 0 and f"{done} of 24 are done already" in err
    assert found(results) == alone


def test_results_of_another_file_model_or_method_are_left_alone(
    run: Run, folder: str, small: str, tmp_path: Path
) -> None:
    one = write(tmp_path / "one", completion("a", "x", max_tokens=1))
    two = write(tmp_path / "two", completion("a", "y", max_tokens=1))
    results = tmp_path / "out"
    assert run(*arguments(folder, one, results))[0] == 0
    before = results.read_bytes()
    code, _, err = run(*arguments(folder, two, results))
    assert code == 2 and "results of another file of requests; name another" in err
    for others in (arguments(small, one, results), [*arguments(folder, one, results), "--method"]):
        more = ["ngram"] if others[-1] == "--method" else []
        code, _, err = run(*others, *more)
        assert code == 2 and "of another model or other settings" in err
    assert results.read_bytes() == before


def test_wrong_input_is_one_line_before_a_model_is_loaded(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foretell.cli.batch.load_model", None)
    good = write(tmp_path / "in", completion("a", "x"))
    empty = write(tmp_path / "empty")
    doubled = write(tmp_path / "doubled", completion("a", "x"), completion("a", "y"))
    out = tmp_path / "out"
    cases: list[tuple[list[str], str]] = [
        (arguments("m", tmp_path / "none", out), "none: No such file or directory"),
        (arguments("m", empty, out), "empty: it holds no request"),
        (arguments("m", doubled, out), "doubled: lines 1 and 2 have the custom_id 'a'"),
        (arguments("m", good, good), "that is the file of requests; name another"),
        (arguments("m", good, tmp_path), "a folder; name a file"),
        (arguments("m", good, tmp_path / "no" / "out"), "its folder does not exist"),
        (arguments("m", good, out, "--memory", "0"), "--memory=0.0: must be above 0"),
        (arguments("m", good, out, "--memory", "inf"), "--memory=inf: must be above 0"),
        (arguments("m", good, out, "--max-requests", "0"), "--max-requests"),
        (arguments("m", good, out, "--method", "telepathy"), "unknown method 'telepathy'"),
        (["batch", "--in", str(good)], "Missing option '--out'"),
    ]
    for command, message in cases:
        code, _, err = run(*command)
        assert code == 2 and message in err, (command, err)
        assert len(err.strip().splitlines()) == 1
    assert not out.exists()


def test_a_library_that_is_missing_is_named(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foretell.serve.find_spec", lambda name: None)
    code, _, err = run(*arguments("m", tmp_path / "in", tmp_path / "out"))
    assert code == 2 and "pip install 'foretell[serve]'" in err


def test_a_full_disk_ends_the_run_in_one_line(
    run: Run, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise BadFile("out: No space left on device; free some space")

    monkeypatch.setattr(answering.Results, "write_answer", full)
    requests = write(tmp_path / "in", *documents(6, 4))
    code, _, err = run(*arguments(folder, requests, tmp_path / "out"))
    assert code == 2 and err.endswith("error: out: No space left on device; free some space\n")


def test_a_model_in_memory_has_a_digest_of_its_weights_and_numbers() -> None:
    one = answering.model_digest(tiny.lm(draft=False), "plain")
    assert one == answering.model_digest(tiny.lm(draft=True), "plain")
    assert one != answering.model_digest(tiny.lm(draft=False), "auto")
    judged = tiny.lm(draft=False)
    judged.models["judge"] = judged.models["target"]
    assert one != answering.model_digest(judged, "plain")
    other = foretell.wrap(tiny.llama(seed=1), tiny.tokenizer())
    assert one != answering.model_digest(other, "plain")
