"""scripts/damage.py: what it damages is damaged, and a reader that lets something by is told."""

from __future__ import annotations

import random
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
import damage


def test_every_change_changes_something() -> None:
    data = bytes(range(256)) * 8
    changed = [damage.bytes_changed(data, random.Random(seed)) for seed in range(200)]
    assert sum(made != data for made in changed) > 190
    assert any(len(made) < len(data) for made in changed)
    value = {"a": {"b": [1, 2]}, "c": "x"}
    values = [damage.value_changed(value, random.Random(seed)) for seed in range(200)]
    assert sum(made != value for made in values) > 190


@pytest.mark.parametrize("name", ["gates", "states"])
def test_some_damaged_files_are_read_or_refused_in_a_line(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert damage.check(name, 8, 0) == 0
    assert f"{name}: 8 mutations" in capsys.readouterr().out


def test_a_reader_that_breaks_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Careless(damage.Gates):
        def use(self, folder: Path) -> None:
            if (folder / "gates.safetensors").read_bytes() != self.good:
                raise IndexError("a row too far")

        def __init__(self, folder: Path):
            super().__init__(folder)
            self.good = (folder / "gates.safetensors").read_bytes()

    kinds: dict[str, Any] = {"gates": Careless}
    monkeypatch.setattr(damage, "KINDS", kinds)
    assert damage.check("gates", 3, 0) >= 2
    assert "fault: IndexError: a row too far" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["clover", "eagle3", "medusa"])
def test_heads_whose_rows_have_no_law_draft_nothing(kind: str, tmp_path: Path) -> None:
    heads = damage.Heads(tmp_path)
    for folder in tmp_path.iterdir():
        if folder.name != kind:
            shutil.rmtree(folder)
    path = tmp_path / kind / "model.safetensors"
    tensors = load_file(path)
    huge = {n: torch.full_like(t, 3e38) for n, t in tensors.items() if t.is_floating_point()}
    save_file({**tensors, **huge}, path)
    heads.use(tmp_path)
