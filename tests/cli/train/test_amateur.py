"""`foretell train amateur`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from foretell.cli.train import amateur
from tests.train.test_amateur import answers


def test_a_folder_is_made_that_generate_takes(run: Any, folder: str, tmp_path: Path) -> None:
    path, out = str(answers(tmp_path)), str(tmp_path / "amateur")
    options = ["train", "amateur", "--model", folder, "--answers", path, "--out", out]
    code, said, _ = run(*options, "--epochs", "1", "--json")
    report = json.loads(said)
    assert code == 0 and report["folder"] == out and report["after"] < report["before"]
    code, said, _ = run(*options, "--epochs", "1")
    assert code == 0 and said.count("\n") == 1 and f"--rows lol:amateur={out}" in said
    rows = ["--rows", f"lol:amateur={out}", "--max-new-tokens", "4"]
    code, said, _ = run("generate", "--model", folder, *rows, "Is 3 odd?")
    assert code == 0 and said
    code, _, err = run(*options, "--rank", "0")
    assert code == 2 and "rank=0: must be between" in err
    code, _, err = run(*options[:4], "--answers", "./none", "--out", out)
    assert code == 2 and "none: cannot be read" in err and err.count("\n") == 1
    assert amateur.as_folder(Path("here")) == "./here"
