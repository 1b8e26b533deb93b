"""Gates of key heads: which heads stream, and files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from foretell.errors import BadFile, Unsupported
from foretell.kv.select.gates import GATES, save_gates, select_streaming, streaming_of
from foretell.ops.assets import shipped_files
from tests.kv.policies import target


@pytest.mark.parametrize("sparsity", [0.0, 0.2, 0.5, 0.75, 1.0])
def test_the_lowest_gates_stream(sparsity: float) -> None:
    gates = torch.rand(7, 3, generator=torch.Generator().manual_seed(2))
    found = select_streaming(gates, sparsity)
    assert int(found.sum()) == round(sparsity * 21)
    if found.any() and not found.all():
        assert gates[found].max() <= gates[~found].min()


def test_of_equal_gates_the_first_stream() -> None:
    gates = torch.tensor([[1.0, 1.0], [0.0, 1.0]])
    assert select_streaming(gates, 0.5).tolist() == [[True, False], [True, False]]


def test_gates_are_read_for_the_model_they_were_made_for(tmp_path: Path) -> None:
    path = tmp_path / "gates.safetensors"
    gates = torch.tensor([[0.1, 0.9], [0.2, 0.8], [0.7, 0.3]])
    save_gates(gates, path, target(), 5)
    assert streaming_of(target(), 0.5, str(tmp_path), "kv=x").equal(gates < 0.5)
    save_gates(gates.T, path, target(), 5)
    with pytest.raises(BadFile, match="another model than llama; make some with"):
        streaming_of(target(), 0.5, str(path), "kv=x")
    with pytest.raises(Unsupported, match=r"kv=x.*foretell train gates.*gates=FILE"):
        streaming_of(target(), 0.5, "", "kv=x")
    assert not streaming_of(target(), 0.0, "", "kv=x").any()


@pytest.mark.parametrize("gates", [[[0.2, 1.1]], [0.2, 0.3], [[0, 1]], [[float("nan"), 0.2]]])
def test_damaged_gates_are_refused(tmp_path: Path, gates: list[object]) -> None:
    GATES.save_table(torch.tensor(gates), tmp_path / "g", target())
    with pytest.raises(BadFile, match=r"g: is damaged.*foretell train gates"):
        GATES.read_table(tmp_path / "g")


def test_those_that_ship_can_be_read() -> None:
    found = shipped_files("gates/*.safetensors")
    assert found
    for path in found:
        gates, mark = GATES.read_table(path)
        assert 0.2 < float(gates.mean()) < 0.98 and len(mark) == 16
