"""Options of commands that can run on Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from foretell.cli._cluster import ClusterOptions, portable_options
from foretell.cli._options import ModelOptions
from foretell.errors import BadConfig


@pytest.mark.parametrize(("text", "counts"), [("1", (1, 1)), ("3", (3, 3)), ("1:4", (1, 4))])
def test_numbers_of_workers(text: str, counts: tuple[int, int]) -> None:
    assert ClusterOptions(ray=True, workers=text).counts() == counts


@pytest.mark.parametrize("text", ["0", "x", "4:1", "1:", ":", "", "1:2:3", "-1"])
def test_numbers_that_are_none(text: str) -> None:
    with pytest.raises(BadConfig, match=r"^--workers .*: must be a number, or two as in 1:4$"):
        ClusterOptions(ray=True, workers=text).counts()


@pytest.mark.parametrize("options", [["--workers", "2"], ["--ray-address", "auto"]])
def test_options_for_clusters_need_ray(run: Any, tmp_path: Path, options: list[str]) -> None:
    files = ["--in", str(tmp_path / "in"), "--out", str(tmp_path / "out")]
    code, out, err = run("batch", *files, *options)
    assert (code, out) == (2, "")
    assert err == f"error: {options[0]} is for clusters; add --ray\n"


def test_a_batch_has_one_number_of_workers(run: Any, tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.write_text(
        '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}\n'
    )
    files = ["--in", str(source), "--out", str(tmp_path / "out")]
    code, _, err = run("batch", *files, "--ray", "--workers", "1:2")
    assert code == 2 and err == "error: --workers 1:2: a batch has one number of workers\n"


def test_folders_are_named_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    named = ["judge=./model", "small=demo"]
    found = portable_options(ModelOptions(model="./model", draft="demo", named=named))
    assert found.model == str(tmp_path / "model") and found.draft == "demo"
    assert found.named_models == {"judge": str(tmp_path / "model"), "small": "demo"}
