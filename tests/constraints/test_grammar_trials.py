"""Forms that take long, break what compiles them, or crowd out others."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from foretell.constraints import grammar_trials as form_trials
from foretell.constraints import grammars as forms
from foretell.constraints.grammar_trials import Trials
from foretell.constraints.grammar_worker import try_form
from foretell.constraints.grammars import LARGEST, Grammars
from foretell.errors import BadConfig, DeadlineExceeded
from tests import tiny

SLOW = json.dumps({"type": "integer", "multipleOf": 99991})
# Each rule holds the next: what compiles it has no stack left.
DEEP = "start: r0\n" + "\n".join(f'r{n}: "a{n}" r{n + 1}' for n in range(9000)) + '\nr9000: "z"'


@pytest.fixture
def trials() -> Iterator[Trials]:
    own = Trials()
    yield own
    own.end_processes()


def question(name: str, source: str) -> dict[str, Any]:
    return {"name": name, "source": source, "vocab": 9, "specials": {0: "<end>"}, "end": 0}


def asked(trials: Trials, name: str, source: str, seconds: float = 60, **given: Any) -> Any:
    options = {"tenant": "", "deadline": time.perf_counter() + 600, **given}
    return trials.ask_process(question(name, source), seconds=seconds, **options)


def letters(answer: Any) -> str:
    return bytes(one - 16 for one in answer["ending"]).decode()


def test_a_process_tells_how_texts_end_and_is_asked_again(trials: Trials) -> None:
    assert letters(asked(trials, "regex", ".*ab")) == "ab"
    [process] = trials._idle
    assert letters(asked(trials, "json_schema", '{"type": "string", "pattern": "x"}')) == '"x"'
    assert "unclosed group" in asked(trials, "regex", "a(")["refused"]
    assert trials._idle == [process] and process.process.poll() is None


def test_what_takes_too_long_is_ended(trials: Trials) -> None:
    with pytest.raises(BadConfig, match=r"json_schema: it takes more than 0\.2 seconds to compile"):
        asked(trials, "json_schema", SLOW, seconds=0.2)
    assert not trials._idle and not trials._busy
    with pytest.raises(DeadlineExceeded, match="json_schema: it was not compiled in the time"):
        asked(trials, "json_schema", SLOW, deadline=time.perf_counter() + 0.2)
    assert letters(asked(trials, "regex", "a*b")) == "b"


def test_what_breaks_a_process_is_refused(trials: Trials) -> None:
    with pytest.raises(BadConfig, match=r"grammar: it is too large, or nested too deeply"):
        asked(trials, "grammar", DEEP)
    assert letters(asked(trials, "regex", "a*b")) == "b"


def test_one_tenant_does_not_crowd_out_another(trials: Trials) -> None:
    """It waits for itself, no longer than it may."""
    begun = threading.Event()
    own = trials._take_process

    def taken(*given: Any) -> Any:
        process = own(*given)
        begun.set()
        return process

    trials._take_process = taken  # type: ignore[method-assign]
    ended: list[str] = []

    def slow() -> None:
        try:
            asked(trials, "json_schema", SLOW, tenant="a", seconds=600)
        except BadConfig as error:
            ended.append(str(error))

    thread = threading.Thread(target=slow)
    thread.start()
    assert begun.wait(60)
    with pytest.raises(DeadlineExceeded, match="regex: others were compiled in all the time"):
        asked(trials, "regex", "a", tenant="a", deadline=time.perf_counter() + 0.1)
    assert letters(asked(trials, "regex", "a*b", tenant="b")) == "b"
    trials.end_processes()
    thread.join(60)
    assert not thread.is_alive() and len(ended) == 1
    assert not trials._busy and not trials._of_tenant


def test_who_waits_is_refused_when_the_processes_are_ended() -> None:
    trials = Trials(0)
    refused: list[str] = []

    def wait() -> None:
        try:
            asked(trials, "regex", "a")
        except DeadlineExceeded as error:
            refused.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    while thread.is_alive():
        trials.end_processes()
        thread.join(0.01)
    assert len(refused) == 1


def test_a_fork_begins_without_processes(trials: Trials) -> None:
    asked(trials, "regex", "a")
    if not (child := os.fork()):
        os._exit(0 if not trials._idle and not trials._busy else 1)
    assert os.waitpid(child, 0)[1] == 0 and len(trials._idle) == 1


def test_the_program_says_what_is_nested_too_deeply() -> None:
    nested = '{"items":' * 300 + "{}" + "}" * 300
    refused = try_form(question("json_schema", nested))["refused"]
    assert refused.startswith("json_schema") and "\n" not in refused
    assert try_form(question("regex", "a*b"))["ending"] == [16 + ord("b")]


# --- through a model


def test_forms_have_a_size_and_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = Grammars(tiny.tokenizer(), 330)
    with pytest.raises(BadConfig, match=f"regex: it has {LARGEST + 1} bytes.*shorten it"):
        grammars.compile_form({"regex": "a" * (LARGEST + 1)})
    monkeypatch.setattr(forms, "COMPILING", 0.0)
    with pytest.raises(BadConfig, match="regex: it takes too long to compile; simplify it"):
        grammars.compile_form({"regex": "ab+"})
    monkeypatch.setattr(forms, "SECONDS", 0.01)
    with pytest.raises(BadConfig, match=r"json_schema: it takes more than 0\.01 seconds"):
        grammars.compile_form({"json_schema": SLOW})


def test_a_text_without_a_choice_is_not_spelled_over_and_over() -> None:
    with pytest.raises(BadConfig, match=r"gave up after 0 tokens \(more than 8192 bytes"):
        Grammars(tiny.tokenizer(), 330).compile_form({"regex": "(word ){3000}"})


def test_a_call_waits_no_longer_for_a_form_than_its_own_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor do others wait for it on an event loop."""
    own = Trials()
    monkeypatch.setattr(forms, "TRIALS", own)
    lm = tiny.lm()
    deep = {"grammar": DEEP}

    async def calls() -> list[Any]:
        many = [
            lm.agenerate("a", "plain", json_schema=SLOW, timeout=0.3, max_new_tokens=4)
            for _ in range(36)
        ]
        free = [lm.agenerate("a", "plain", max_new_tokens=4) for _ in range(9)]
        return await asyncio.gather(*many, *free, return_exceptions=True)

    answers = asyncio.run(calls())
    assert all(isinstance(one, DeadlineExceeded | BadConfig) for one in answers[:36])
    assert all(len(one.tokens) == 4 for one in answers[36:])
    with pytest.raises(BadConfig, match="nested too deeply"):
        lm.generate("a", "plain", **deep)
    assert own.processes == form_trials.PROCESSES
    own.end_processes()
