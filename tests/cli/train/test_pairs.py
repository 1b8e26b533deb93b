"""`foretell train pairs`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from foretell.cli.train import pairs


def test_a_line_is_written_for_every_prompt(run: Any, folder: str, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "pairs.jsonl"
    prompts.write_text('{"prompt": "Hi"}\n{"prompt": "Ho"}\n')
    args = ["train", "pairs", "--model", folder, "--prompts", str(prompts), "--out", str(out)]
    args += ["--max-new-tokens", "2", "--method", "spar:depth=0"]
    code, said, err = run(*args)
    assert code == 0 and f"{out}: 0 pairs of 2 prompts" in said and said.count("\n") == 1
    assert "2 prompts, each with an answer of at most 2 tokens" in err
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert rows == [{"prompt": word, "chosen": None, "rejected": None} for word in ("Hi", "Ho")]
    code, said, _ = run(*args, "--json")
    assert json.loads(said) == {"file": str(out), "prompts": 2, "pairs": 0, "failed": 0}


def test_prompts_that_fail_are_counted(run: Any, folder: str, tmp_path: Path) -> None:
    """The model holds 128 tokens, and no judgement fits."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "pairs.jsonl"
    prompts.write_text('{"prompt": "Hi"}\n')
    args = ["train", "pairs", "--model", folder, "--prompts", str(prompts), "--out", str(out)]
    code, said, err = run(*args, "--max-new-tokens", "9")
    assert code == 0 and "0 pairs of 1 prompts" in said, err
    assert "warning: 1 prompts failed, the first with: spar" in err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--out", "{}/gone/pairs.jsonl"], "its folder does not exist"),
        (["--out", "{}/pairs.jsonl", "--method", "plain"], "method='plain': must be spar"),
        (["--out", "{}/other.jsonl"], "other.jsonl: holds pairs of other prompts"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(
    args: list[str], words: str, run: Any, tmp_path: Path
) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Hi"}\n')
    (tmp_path / "other.jsonl").write_text('{"prompt": "He", "chosen": null, "rejected": null}\n')
    options = [arg.format(tmp_path) for arg in args]
    code, out, err = run("train", "pairs", "--prompts", f"{tmp_path}/prompts.jsonl", *options)
    assert code == 2 and not out and words in err.splitlines()[-1]


def test_every_field_of_the_search_is_an_option() -> None:
    from foretell.train.preferences.pairs import Search

    options = {field.name: field.default for field in dataclasses.fields(pairs.Settings)}
    assert options == {field.name: field.default for field in dataclasses.fields(Search)}
