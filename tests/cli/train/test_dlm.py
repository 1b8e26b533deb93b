"""`foretell train dlm`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

SIZE = ["--hidden", "16", "--layers", "1", "--heads", "2", "--intermediate", "24"]
RUN = ["--examples", "16", "--batch", "8", "--micro", "512", "--masks", "count"]


def test_from_nothing_to_a_model_that_fills_canvases(run: Any, tmp_path: Path) -> None:
    out = tmp_path / "run"
    code, said, err = run("train", "dlm", "--out", str(out), *SIZE, *RUN)
    assert code == 0 and "16 examples seen" in said and said.count("\n") == 1, err
    assert "examples = 16" in (out / "recipe.toml").read_text()
    model = ["--model", str(out / "model"), "--executor", "torch"]
    code, said, _ = run("generate", "Copy the list.", *model, "--max-new-tokens", "4")
    assert code == 0
    certain = ["--objective", "certainty", "--own", "40", "--longest", "6", "--certain", "4"]
    given = ["train", "dlm", "--init", str(out / "model"), "--out", str(tmp_path / "sure")]
    code, said, err = run(*given, *certain, *RUN, "--matrix-rate", "0")
    assert code == 0 and str(tmp_path / "sure" / "model") in said, err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--objective", "certainty"], "give --init"),
        (["--masks", "some"], "one of rate, count"),
        (["--answers", "./none"], "none: has no answers"),
        (["--init", "./none"], "./none"),
        (["--text", "stdlib"], "give --init"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(
    args: list[str], words: str, run: Any, tmp_path: Path
) -> None:
    code, out, err = run("train", "dlm", "--out", str(tmp_path / "run"), *args)
    assert code == 2 and not out
    assert words in err.splitlines()[-1]
