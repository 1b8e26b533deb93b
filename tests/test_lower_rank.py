"""scripts/lower_rank.py: the nearest product of a lower rank, of every layer with its own scale."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from foretell.models.decoder import adapted
from tests import tiny
from tests.test_project import script

Q, K = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.k_proj"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """LoRA weights of rank 4 on two layers of the tiny model, whose scales differ."""
    out = tmp_path / "given"
    out.mkdir()
    draw = torch.Generator().manual_seed(0)
    made = {}
    for name, width in ((Q, 32), (K, 16)):
        prefix = f"base_model.model.{name}"
        made[f"{prefix}.lora_A.weight"] = torch.randn(4, 32, generator=draw)
        made[f"{prefix}.lora_B.weight"] = torch.randn(width, 4, generator=draw)
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "alpha_pattern": {"k_proj": 1}}
    (out / adapted.CONFIG).write_text(json.dumps(settings))
    save_file(made, out / adapted.WEIGHTS)
    return out


def products(folder: Path) -> dict[str, torch.Tensor]:
    """What each layer's weights become larger by."""
    found = {}
    for name, _, (a, b), scale in adapted.added_layers(tiny.llama(), folder, "tiny"):
        found[name] = scale * (b.float() @ a.float())
    return found


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_products_are_the_nearest_ones(
    rank: int, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = folder.parent / "lower"
    script("lower_rank").main([str(folder), str(out), "--rank", str(rank)])
    whole = lost = 0.0
    before, after = products(folder), products(out)
    assert before.keys() == after.keys() == {Q, K}
    for name, product in before.items():
        u, values, v = torch.linalg.svd(product)
        nearest = u[:, :rank] * values[:rank] @ v[:rank]
        difference = (after[name] - nearest).abs().max()
        assert difference < 0.02 * product.abs().max(), "bfloat16 tells no more apart"
        whole += float(values.square().sum())
        lost += float(values[rank:].square().sum())
    assert f"rank {rank}, {lost / whole:.4f} of the squares lost" in capsys.readouterr().out
