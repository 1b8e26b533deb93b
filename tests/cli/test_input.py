"""What is read must be UTF-8 text; where it is not, one line says where."""

from __future__ import annotations

import io
import os
import sys
from typing import Any

import pytest

from foretell.cli._input import check_arguments, prompt_text
from foretell.errors import BadConfig
from tests import tiny

SHORT = ["--max-new-tokens", "12", "--method", "plain"]


def give(monkeypatch: pytest.MonkeyPatch, data: bytes, **options: Any) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), **options))


def test_standard_input_is_read_as_utf8_whatever_the_locale_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    give(monkeypatch, "Größe 🙂\n".encode(), encoding="latin-1")
    assert prompt_text("-") == "Größe 🙂\n"
    assert prompt_text("plain text") == "plain text"


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_other_bytes_on_standard_input_are_named(
    run: Any, folder: str, monkeypatch: pytest.MonkeyPatch, errors: str
) -> None:
    give(monkeypatch, b"one\ntwo \xff", encoding="utf-8", errors=errors)
    code, out, err = run("generate", "--model", folder, "-")
    assert (code, out) == (2, "")
    assert err.startswith("error: standard input, line 2: not UTF-8 text (byte 0xff); convert it")
    assert err.count("\n") == 1


def test_a_closed_standard_input_is_named(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    code, out, err = run("generate", "-")
    assert (code, out) == (2, "") and err.startswith("error: standard input is closed")


@pytest.mark.parametrize(
    "args",
    [
        ["generate", "caf\udce9 au lait"],
        ["generate", "x", "--stop", "\udcff"],
        ["audit", "--method", "ngram", "--prompts", "\udcff.jsonl"],
    ],
    ids=["prompt", "option", "path"],
)
def test_an_argument_that_is_not_utf8_is_named(run: Any, args: list[str]) -> None:
    code, out, err = run(*args)
    number = next(i for i, a in enumerate(args, 1) if not a.isprintable())
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert err.startswith(f"error: argument {number}, after ") and "not UTF-8 text (byte 0x" in err


def test_the_byte_is_the_one_that_was_given() -> None:
    check_arguments(["generate", "Größe 🙂"])
    with pytest.raises(BadConfig, match=r"argument 1, after 'caf': not UTF-8 text \(byte 0xe9\)"):
        check_arguments([os.fsdecode(b"caf\xe9")])


def test_a_prompt_in_other_scripts_passes(run: Any, folder: str) -> None:
    prompt = "Größe 漢字 🙂"
    code, out, _ = run("generate", "--model", folder, *SHORT, prompt)
    plain = tiny.lm().generate(prompt, "plain", max_new_tokens=12)
    assert (code, out) == (0, plain.text + "\n")
