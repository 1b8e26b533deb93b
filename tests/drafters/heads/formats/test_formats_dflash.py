"""DFlash heads as their authors publish them, against their computation written plainly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from foretell.drafters.heads.formats.reading import hit_share, load_any_head
from foretell.drafters.heads.networks.base import Texts
from foretell.drafters.heads.networks.layers import Rotation, turn_rows
from foretell.errors import BadConfig, BadModel
from foretell.models.decoder.decoder import Decoder
from tests.models.decoder.families import tiny

TARGET: Any = Decoder(tiny("llama"), "llama")
TARGET.tokenizer = None
LAYERS = len(TARGET.layout)
WIDTH, HEADS, KEYS, SIZE, BLOCK, MASK = 32, 4, 2, 16, 5, 7
CONFIG = {
    "architectures": ["DFlashDraftModel"],
    "hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEYS,
    "head_dim": SIZE,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_target_layers": LAYERS,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "block_size": BLOCK,
    "vocab_size": TARGET.vocab,
    "layer_types": ["full_attention"] * 2,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 1]},
}


def tensors() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=draw) / columns**0.5

    def norm(width: int) -> torch.Tensor:
        return 1 + 0.3 * torch.randn(width, generator=draw)

    made = {"fc.weight": matrix(WIDTH, 2 * WIDTH), "hidden_norm.weight": norm(WIDTH)}
    made["norm.weight"] = norm(WIDTH)
    for i in range(2):
        made |= {
            f"layers.{i}.self_attn.q_proj.weight": matrix(HEADS * SIZE, WIDTH),
            f"layers.{i}.self_attn.k_proj.weight": matrix(KEYS * SIZE, WIDTH),
            f"layers.{i}.self_attn.v_proj.weight": matrix(KEYS * SIZE, WIDTH),
            f"layers.{i}.self_attn.o_proj.weight": matrix(WIDTH, HEADS * SIZE),
            f"layers.{i}.self_attn.q_norm.weight": norm(SIZE),
            f"layers.{i}.self_attn.k_norm.weight": norm(SIZE),
            f"layers.{i}.mlp.gate_proj.weight": matrix(40, WIDTH),
            f"layers.{i}.mlp.up_proj.weight": matrix(40, WIDTH),
            f"layers.{i}.mlp.down_proj.weight": matrix(WIDTH, 40),
            f"layers.{i}.input_layernorm.weight": norm(WIDTH),
            f"layers.{i}.post_attention_layernorm.weight": norm(WIDTH),
        }
    return made


def folder(path: Path, **changes: Any) -> Path:
    """What `changes` names in another way; None: leaves it out."""
    weights, config = tensors(), dict(CONFIG)
    for name, value in changes.items():
        part: dict[str, Any] = weights if "." in name else config
        if value is None:
            del part[name]
        else:
            part[name] = value
    path.mkdir(exist_ok=True)
    save_file(weights, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config), "utf-8")
    return path


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def published(states: torch.Tensor, anchor: torch.Tensor, place: int) -> torch.Tensor:
    """(BLOCK, E) of a block after `place` tokens whose states are given, (place, 2 E)."""
    w = tensors()
    text = normed(states @ w["fc.weight"].T, w["hidden_norm.weight"])
    mask = TARGET.embedded(torch.tensor([MASK]))
    h = torch.cat([anchor[None], mask.expand(BLOCK - 1, -1)])
    cosines, sines = Rotation(SIZE, 1e6)(torch.arange(place + BLOCK))
    for i in range(2):
        at = {k.split(".", 2)[2]: v for k, v in w.items() if k.startswith(f"layers.{i}.")}
        inner = normed(h, at["input_layernorm.weight"])
        both = torch.cat([text, inner])
        q = (inner @ at["self_attn.q_proj.weight"].T).unflatten(-1, (HEADS, SIZE))
        k = (both @ at["self_attn.k_proj.weight"].T).unflatten(-1, (KEYS, SIZE))
        v = (both @ at["self_attn.v_proj.weight"].T).unflatten(-1, (KEYS, SIZE))
        q = normed(q, at["self_attn.q_norm.weight"]).transpose(0, 1)
        k = normed(k, at["self_attn.k_norm.weight"]).transpose(0, 1)
        q = turn_rows(q, cosines[place:], sines[place:])
        k = turn_rows(k, cosines, sines)
        mixed = F.scaled_dot_product_attention(
            q[None], k[None], v.transpose(0, 1)[None], enable_gqa=True
        )
        h = h + mixed[0].transpose(0, 1).flatten(1) @ at["self_attn.o_proj.weight"].T
        inner = normed(h, at["post_attention_layernorm.weight"])
        gate = F.silu(inner @ at["mlp.gate_proj.weight"].T)
        h = h + (gate * (inner @ at["mlp.up_proj.weight"].T)) @ at["mlp.down_proj.weight"].T
    return normed(h, w["norm.weight"])


@torch.inference_mode()
def test_blocks_say_what_the_published_code_says(tmp_path: Path) -> None:
    head, kept = load_any_head(folder(tmp_path), TARGET, "dflash")
    assert kept is None and head.taps == (1, 2)
    draw = torch.Generator().manual_seed(1)
    embedded = torch.randn(1, 6, WIDTH, generator=draw)
    states = torch.randn(1, 6, 2 * WIDTH, generator=draw)
    drafted = list(
        head.unroll_depths(Texts(torch.zeros(1, 6).long(), embedded, states, embedded), 9)
    )
    assert len(drafted) == BLOCK - 1
    for place in range(6):
        wanted = published(states[0, :place], embedded[0, place], place)
        for part in drafted:
            torch.testing.assert_close(
                part.states[0, place], wanted[part.depth + 1], rtol=1e-4, atol=1e-4
            )


def test_layers_are_counted_by_what_leaves_them(tmp_path: Path) -> None:
    even = {"mask_token_id": MASK}
    path = folder(tmp_path, dflash_config=even, num_target_layers=LAYERS)
    assert load_any_head(path, TARGET)[0].taps == tuple(
        round(1 + i * (LAYERS - 4)) + 1 for i in range(2)
    )
    assert load_any_head(folder(tmp_path), TARGET, taps="input")[0].taps == (0, 1)
    with pytest.raises(BadConfig, match="taps='left'"):
        load_any_head(path, TARGET, taps="left")
    head, kept = load_any_head(path, TARGET)
    assert 0 <= hit_share(head, kept, TARGET, [1, 5, 3, 8, 2]) <= 1


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "mask": ({"dflash_config": {"mask_token_id": 10**6}}, "mask_token_id=1000000 must be"),
    "no mask": ({"dflash_config": None}, "mask_token_id=None must be"),
    "block": ({"block_size": 1}, "block_size=1 must be"),
    "target": ({"num_target_layers": 99}, "num_target_layers=99, and the target has"),
    "layers": (
        {"dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 98]}},
        "98., and the target has",
    ),
    "ids": (
        {"dflash_config": {"mask_token_id": MASK, "target_layer_ids": "all"}},
        "target_layer_ids='all'",
    ),
    "taps": (
        {"dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1]}},
        r"fc.weight is \(32, 64\)",
    ),
    "windows": ({"layer_types": ["sliding_attention"] * 2}, "layer_types="),
    "anchor": ({"sample_from_anchor": True}, "sample_from_anchor"),
    "width": ({"hidden_size": 64}, "hidden_size=64"),
    "missing": ({"layers.1.mlp.up_proj.weight": None}, "lacks layers.1.mlp.up_proj.weight"),
    "unknown": ({"markov.weight": torch.zeros(2)}, "has markov.weight"),
    "table": (
        {"embed_tokens.weight": torch.zeros(TARGET.vocab, WIDTH)},
        "embed_tokens.weight is not the table",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_does_not_fit_is_refused_by_name(wrong: str, tmp_path: Path) -> None:
    changes, said = WRONG[wrong]
    with pytest.raises(BadModel, match=said):
        load_any_head(folder(tmp_path, **changes), TARGET)
