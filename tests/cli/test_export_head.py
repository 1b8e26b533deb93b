"""`foretell export-head`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import foretell
from foretell.drafters.heads.formats.reading import load_any_head
from foretell.drafters.heads.networks.folder import build_head, save_head, target_shape


def test_a_head_goes_to_speculators_and_back(run: Any, folder: str, tmp_path: Path) -> None:
    target = foretell.load(folder, device="cpu").models["target"]
    save_head(
        build_head("eagle3", target_shape(target), {"taps": [2, 1, 0]}),
        None,
        tmp_path / "head",
        target,
        {},
    )
    args = ["export-head", "--model", folder, "--check", "8"]
    code, said, err = run(*args, str(tmp_path / "head"), "--out", str(tmp_path / "theirs"))
    assert code == 0, err
    assert " tokens of a question and its answer: foretell " in said
    assert "layout speculators" in said
    back = [str(tmp_path / "theirs"), "--to", "foretell", "--out", str(tmp_path / "back")]
    code, said, _ = run(*args, *back)
    assert code == 0 and "input" in said and "layout foretell" in said
    head, kept = load_any_head(tmp_path / "back", target, "eagle3")
    assert head.matrix is not None and kept is not None and len(kept) == target.vocab


@pytest.mark.parametrize(
    ("kind", "to", "layout"),
    [
        ("medusa", [], "medusa"),
        ("medusa", ["--to", "medusa-vllm"], "medusa-vllm"),
        ("mlp-speculator", [], "mlp-speculator"),
        ("hydra", [], "foretell"),
    ],
)
def test_a_head_goes_to_the_layout_of_its_kind(
    kind: str, to: list[str], layout: str, run: Any, folder: str, tmp_path: Path
) -> None:
    target = foretell.load(folder, device="cpu").models["target"]
    save_head(
        build_head(kind, target_shape(target)), torch.tensor([1, 5]), tmp_path / "head", target, {}
    )
    args = ["export-head", "--model", folder, "--check", "0", str(tmp_path / "head"), *to]
    code, said, err = run(*args, "--out", str(tmp_path / "out"))
    assert code == 0 and f"a head of kind {kind} in the layout {layout}" in said, err
    _, kept = load_any_head(tmp_path / "out", target, kind)
    assert (kept is None) == (layout in ("medusa", "mlp-speculator"))


def test_what_cannot_be_exported_is_one_line(run: Any, folder: str, tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "a").write_text("")
    args = ["export-head", "--model", folder, str(tmp_path / "none"), "--out"]
    for given, said in (
        ([str(tmp_path / "new"), "--to", "mamba"], "--to='mamba'"),
        ([str(full)], "is there already"),
        ([str(tmp_path / "new")], "config.json"),
    ):
        code, _, err = run(*args, *given)
        assert code == 2 and said in err and "Traceback" not in err
