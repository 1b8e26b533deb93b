"""Weights, and the memory's size and speed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import foretell
from foretell import wrap
from foretell.bench import hardware
from foretell.models.decoder.packed import PackedLinear, pack_layers
from tests import tiny
from tests.models.decoder import families


def test_weights_count_once_and_those_of_a_file_as_it_says() -> None:
    class File:
        weight_bytes = 7

    model = tiny.lm().models["target"]
    assert hardware.held_bytes(model) == 4 * sum(p.numel() for p in model.hf.parameters())  # type: ignore[attr-defined]
    assert hardware.held_bytes(File()) == 7 and hardware.held_bytes(None) == 0  # type: ignore[arg-type]


def test_the_peak_can_be_forgotten() -> None:
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("this system does not let a process forget its peak")
    block = torch.ones(1 << 26)  # 256 MB
    high = hardware.peak_memory()
    del block
    hardware.forget_peak()
    low = hardware.peak_memory()
    assert high is not None
    assert low is not None
    assert low < high - (1 << 27)


def test_weights_are_counted_once_and_embeddings_only_as_head() -> None:
    lm = tiny.lm(torch.bfloat16)
    model = tiny.llama()
    table = model.get_input_embeddings().weight.numel()
    assert hardware.weight_bytes(lm.models["target"]) == 2 * (
        sum(p.numel() for p in model.parameters()) - table
    )
    tied = foretell.wrap(tiny.gpt2(), tiny.tokenizer())
    assert hardware.weight_bytes(tied.models["target"]) == 4 * sum(
        p.numel() for p in tiny.gpt2().parameters()
    )
    assert hardware.weight_bytes(None) is None


def test_the_speed_of_memory_is_the_best_try(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(1000))
    gaps = iter([5.0, 4.0, 0.5] + [9.0] * 9)
    now = [0.0]

    def clock() -> float:
        if next(ticks) % 2:
            now[0] += next(gaps)
        return now[0]

    monkeypatch.setattr(hardware.time, "perf_counter", clock)
    assert hardware.measure_bandwidth("cpu", 1 << 16) == (1 << 16) / 0.5


def test_packed_weights_count() -> None:
    for tied in (False, True):
        hf = families.tiny("llama", tie_word_embeddings=tied)
        pack_layers(hf, "int8")
        model = wrap(hf, name="tiny").models["target"]
        layers = [m.packed.nbytes for m in hf.modules() if isinstance(m, PackedLinear)]
        norms = sum(4 * p.numel() for p in hf.parameters() if p.ndim == 1)
        table = 0 if tied else 4 * hf.get_input_embeddings().weight.numel()
        assert hardware.weight_bytes(model) == sum(layers) + norms
        assert hardware.held_bytes(model) == sum(layers) + norms + table
