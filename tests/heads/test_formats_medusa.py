"""Medusa heads as their authors publish them, against their computation written plainly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from foretell.errors import BadConfig, BadModel
from foretell.families.decoder import Decoder
from foretell.heads.base import Texts
from foretell.heads.formats.reading import check_taps, load
from tests.families.families import tiny

TARGET: Any = Decoder(tiny("llama"), "llama")
TARGET.tokenizer = None


def folder(path: Path, **changes: Any) -> tuple[Path, dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(0)
    tensors = {}
    for i in range(3):
        tensors[f"{i}.0.linear.weight"] = torch.randn(32, 32, generator=draw) / 6
        tensors[f"{i}.0.linear.bias"] = torch.randn(32, generator=draw)
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "version": "2"}
    for name, value in changes.items():
        (tensors if isinstance(value, torch.Tensor) else config)[name] = value
    path.mkdir(exist_ok=True)
    save_file(tensors, path / "medusa_lm_head.safetensors")
    (path / "config.json").write_text(json.dumps(config), "utf-8")
    return path, tensors


@torch.inference_mode()
def test_blocks_say_what_the_published_code_says(tmp_path: Path) -> None:
    path, tensors = folder(tmp_path)
    head, kept = load(path, TARGET, "medusa")
    assert kept is None
    states = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(1))
    drafted = list(head.unroll(Texts(torch.zeros(1, 5).long(), states, states, states), 3))
    said = [part.states @ TARGET.head.weight.T for part in drafted]
    wanted = []
    for i in range(3):
        inner = states @ tensors[f"{i}.0.linear.weight"].T + tensors[f"{i}.0.linear.bias"]
        wanted.append((states + inner * torch.sigmoid(inner)) @ TARGET.head.weight.T)
    for ours, theirs in zip(said, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert (said[0] - wanted[1]).abs().max() > 0.01  # swapped heads are caught


@torch.inference_mode()
def test_vllms_names_have_no_bias_unless_they_say_so(tmp_path: Path) -> None:
    path, tensors = folder(tmp_path)
    own, _ = load(path, TARGET)
    (path / "medusa_lm_head.safetensors").unlink()
    theirs = {f"blocks.{i}.layers.0.weight": tensors[f"{i}.0.linear.weight"] for i in range(3)}
    save_file(theirs, path / "model.safetensors")
    config = {"model_type": "medusa", "num_heads": 3, "num_hidden_layers": 1}
    (path / "config.json").write_text(json.dumps(config), "utf-8")
    head, _ = load(path, TARGET, "medusa")
    for name, weight in head.state_dict().items():
        wanted = torch.zeros_like(weight) if name.endswith("bias") else own.state_dict()[name]
        torch.testing.assert_close(weight, wanted, rtol=0, atol=0)
    (path / "config.json").write_text(json.dumps(config | {"medusa_fc_bias": True}), "utf-8")
    with pytest.raises(BadModel, match=r"lacks blocks.0.layers.0.bias"):
        load(path, TARGET)


def test_there_are_no_layers_to_count(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="taps='output'"):
        load(folder(tmp_path)[0], TARGET, taps="output")
    shares = check_taps(tmp_path, TARGET, [1, 5, 3, 8, 2])
    assert list(shares) == ["medusa"] and 0 <= shares["medusa"] <= 1


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "layers": ({"medusa_num_layers": 2}, "medusa_num_layers=2"),
    "matrix": ({"0.1.weight": torch.zeros(97, 32)}, "lacks 1.1.weight"),
    "unknown": ({"lstm": torch.zeros(2)}, "has lstm"),
    "gap": ({"4.0.linear.weight": torch.zeros(32, 32)}, "lacks the block of head 3"),
    "cut off": ({"medusa_num_heads": 4}, "medusa_num_heads=4, and the file has 3"),
    "count": ({"medusa_num_heads": "all"}, "medusa_num_heads='all'"),
    "many": (
        {f"{i}.0.linear.{part}": torch.zeros(1) for i in range(17) for part in ("weight", "bias")},
        "has 17 of medusa_num_heads",
    ),
    "table": ({"embed_tokens.weight": torch.zeros(97, 32)}, "embed_tokens.weight is not the table"),
    "width": ({"0.0.linear.weight": torch.zeros(64, 64)}, r"0.0.linear.weight is \(64, 64\)"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_does_not_fit_is_refused_by_name(wrong: str, tmp_path: Path) -> None:
    changes, said = WRONG[wrong]
    with pytest.raises(BadModel, match=said):
        load(folder(tmp_path, **changes)[0], TARGET)
