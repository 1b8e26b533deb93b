"""Tables of key channels: what is measured, against a model's own layers, and damaged files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from foretell.errors import BadFile, Unsupported
from foretell.kv.select.channels import CHANNELS, measure_channels, save_channels
from foretell.models.decoder.decoder import Decoder
from foretell.ops.assets import shipped_files
from foretell.testing.toy import ToyRecurrent
from tests.models.decoder.families import tiny

TEXTS = [[5, 9, 13, 2, 40], [7, 7, 1, 30, 22, 11, 4]]


def by_layers(hf: Any) -> torch.Tensor:
    """The mean |q_d k_d| by the projections of transformers' own layers, (L, KV, D)."""
    sums = torch.zeros(3, 2, 8, dtype=torch.float64)
    for text in TEXTS:
        with torch.no_grad():
            states = hf.model(torch.tensor([text]), output_hidden_states=True).hidden_states
            angles = hf.model.rotary_emb(states[0], torch.arange(len(text))[None])
            for number, layer in enumerate(hf.model.layers):
                entering = layer.input_layernorm(states[number])
                q, k = (
                    project(entering).view(1, len(text), -1, 8).transpose(1, 2)
                    for project in (layer.self_attn.q_proj, layer.self_attn.k_proj)
                )
                q, k = apply_rotary_pos_emb(q, k, *angles)
                for head in range(4):
                    sums[number, head // 2] += (q[0, head] * k[0, head // 2]).abs().sum(0) / 2
    return sums / sum(map(len, TEXTS))


def test_what_is_measured_is_what_layers_make() -> None:
    hf = tiny("llama", dtype=torch.float64)
    importance, tokens = measure_channels(Decoder(hf, "llama"), TEXTS)
    assert tokens == 12
    assert torch.allclose(importance, by_layers(hf), rtol=1e-9)


def test_a_model_without_rows_is_refused() -> None:
    with pytest.raises(Unsupported, match="train channels cannot run on"):
        measure_channels(ToyRecurrent(11), TEXTS)


def test_a_table_has_the_channels_in_order_of_importance(tmp_path: Path) -> None:
    model = Decoder(tiny("llama"), "llama")
    importance = torch.rand(3, 2, 8)
    save_channels(importance, tmp_path / "t", model, 12)
    channels, _ = CHANNELS.read_table(tmp_path / "t")
    assert torch.equal(
        importance.gather(-1, channels.long()), importance.sort(-1, descending=True)[0]
    )


def test_the_tables_that_ship_can_be_read() -> None:
    for path in shipped_files("channels/*.safetensors"):
        channels, mark = CHANNELS.read_table(path)
        assert channels.dim() == 3 and len(mark) == 16


@pytest.mark.parametrize("channels", [[[[0, 0, 1]]], [[[0, 1, 3]]], [0, 1]])
def test_damaged_tables_are_refused(tmp_path: Path, channels: list[object]) -> None:
    table = torch.tensor(channels)
    save_file({"channels": table}, tmp_path / "t", {"schema": CHANNELS.schema})
    with pytest.raises(BadFile, match=r"t: is damaged.*foretell train channels"):
        CHANNELS.read_table(tmp_path / "t")
