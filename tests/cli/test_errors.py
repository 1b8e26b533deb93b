"""Every mistake is one line on stderr, with its exit code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from foretell import cli, registry
from tests import tiny

SHORT = ["--max-new-tokens", "12"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["generate", "x", "--model", "./nowhere"], "no such folder"),
        (["generate", "x", "--method", "ngrm"], "did you mean ngram"),
        (["generate", "x", "--temperature", "-1"], "temperature=-1.0"),
        (["generate", "x", "--temperature", "nan"], "temperature=nan"),
        (["generate", "x", "--temperature", "hot"], "--temperature"),
        (
            ["generate", "x", "--min-new-tokens", "9", "--max-new-tokens", "8"],
            "above max_new_tokens",
        ),
        (["generate", "x", "--logit-bias", "7"], "ID=BIAS"),
        (["generate", "x", "--compare", "--n", "2"], "--n"),
        (["generate", "x", "--dtype", "int3", "--model", "{folder}"], "dtype='int3'"),
        (["generate", "x", "--device", "toaster", "--model", "{folder}"], "toaster"),
        (["generate", "x", "--method", "draft", "--model", "{folder}"], "draft"),
        (["generate", "x", "--logit-bias", "7=inf", "--model", "{folder}"], "logit_bias"),
        (["generate", "x" * 5000, "--model", "{folder}"], "shorten"),
        (["generate"], "PROMPT"),
        (["generate", "x", "--nonsense"], "--nonsense"),
        (["audit"], "--method"),
        (["audit", "--method", ","], "--method is empty"),
        (["audit", "--method", "nothing"], "unknown method"),
        (["audit", "--method", "ngram", "--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
        (["methods", "nothing"], "unknown method"),
        (["methods", ""], "unknown method"),
        (
            ["train", "lm", "--out", "o", "--corpus", "c", "--text", "t", "--heads", "5"],
            "hidden=384",
        ),
        (
            ["train", "lm", "--out", "{tmp}/o", "--corpus", "{tmp}/c", "--text", "./none"],
            "--text ./none",
        ),
        (
            ["train", "lm", "--out", "o", "--corpus", "c", "--text", "t", "--teacher", "./none"],
            "./none: no such folder",
        ),
        (
            [
                "train",
                "lm",
                "--out",
                "{folder}/config.json/o",
                "--corpus",
                "{folder}/config.json",
                "--text",
                "t",
            ],
            "config.json",
        ),
        (["datastore", "stdlib", "--out", "{tmp}/x"], "--tokenizer"),
        (["datastore", "stdlib", "--tokenizer", "./none", "--out", "{tmp}/x"], "./none"),
        (
            ["datastore", "./none", "--tokenizer", "{folder}", "--out", "{tmp}/x"],
            "error: ./none: no such file",
        ),
        (
            [
                "datastore",
                "{folder}/model.safetensors",
                "--tokenizer",
                "{folder}",
                "--out",
                "{tmp}",
            ],
            "is a folder",
        ),
        (["datastore", "{tmp}", "--tokenizer", "{folder}", "--out", "{tmp}/x"], "no tokens"),
        (
            ["datastore", "t", "--tokenizer", "{folder}", "--out", "{folder}/config.json/x"],
            "config.json",
        ),
        (["generate", "x", "--model", "{folder}", "--method", "rest"], "foretell datastore"),
        (
            [
                "generate",
                "x",
                "--model",
                "{folder}",
                "--json",
                "--method",
                "rest:path={folder}/config.json",
            ],
            "json: dam",
        ),
        (["nonsense"], "nonsense"),
    ],
    ids=lambda value: " ".join(value)[:50] if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line(
    run: Any, folder: str, tmp_path: Path, args: list[str], said: str
) -> None:
    code, out, err = run(*[a.format(folder=folder, tmp=tmp_path) for a in args])
    assert code == 2 and out == ""
    assert err.startswith("error: ") and err.count("\n") == 1 and said in err


def test_options_that_leave_no_token_are_a_mistake(run: Any, folder: str) -> None:
    banned = [x for t in range(len(tiny.tokenizer())) for x in ("--logit-bias", f"{t}=-inf")]
    code, _, err = run("generate", "x", "--model", folder, "--temperature", "1", *banned)
    assert code == 2 and "no token possible" in err and err.count("\n") == 1


def test_a_request_that_fails_is_exit_1(
    run: Any, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise ArithmeticError("overflow")

    monkeypatch.setattr(registry.load_method("ngram", "drafter"), "propose", broken)
    for more in ([], ["--json"]):
        code, _, err = run("generate", "x", "--model", folder, "--method", "ngram", *more)
        assert (code, err) == (1, "error: ngram: ArithmeticError: overflow\n")


def test_ctrl_c_is_130(run: Any, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("foretell.engine.engine.Engine.step", interrupted)
    for more in ([], ["--json"], ["--compare"]):
        code, out, err = run("generate", "x", "--model", folder, *SHORT, *more)
        assert (code, out.strip(), err) == (130, "", "interrupted\n")


def test_ctrl_c_while_the_command_line_is_read_is_130(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(arguments: list[str]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "check_arguments", interrupted)
    assert run("methods") == (130, "", "interrupted\n")


def test_an_error_of_the_system_names_the_file(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(arguments: list[str]) -> None:
        raise PermissionError(13, "Permission denied", "/a/file")

    monkeypatch.setattr(cli, "check_arguments", refused)
    code, out, err = run("methods")
    assert (code, out) == (2, "")
    assert err.startswith("error: /a/file: Permission denied; ") and err.count("\n") == 1


def test_an_end_of_file_in_a_damaged_file_is_no_interrupt(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_off(*_: Any) -> Any:
        raise EOFError("cut off")

    monkeypatch.setattr("foretell.cards.card", cut_off)
    with pytest.raises(EOFError):
        run("methods", "ngram")


def test_a_model_without_tokenizer_is_a_warning_and_an_error(
    run: Any, folder: str, tmp_path: Path
) -> None:
    tiny.llama().save_pretrained(tmp_path)
    code, out, err = run("generate", "x", "--model", str(tmp_path))
    assert (
        code == 2
        and out == ""
        and err.splitlines()[0].startswith("warning: ")
        and "tokenizer" in err.splitlines()[-1]
    )
