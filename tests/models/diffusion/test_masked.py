"""Files of published denoisers: their rows are those of a plain computation written here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from foretell.errors import BadModel, ForetellError
from foretell.loading.load import load
from foretell.models.diffusion.canvas import Denoiser
from tests.diffusion.worlds import text

V, E, F, H, KV, LAYERS = 61, 32, 40, 4, 2, 2
D = E // H
MASK = 60


def weights(qkv_bias: bool = False, qk_norm: bool = False) -> dict[str, torch.Tensor]:
    """Of a decoder, by the llama family's names."""
    torch.manual_seed(0)

    def drawn(*size: int) -> torch.Tensor:
        return 0.3 * torch.randn(size)

    made = {"embed": drawn(V, E), "norm": 1 + drawn(E), "head": drawn(V, E)}
    for i in range(LAYERS):
        made |= {
            f"{i}.norm1": 1 + drawn(E),
            f"{i}.norm2": 1 + drawn(E),
            f"{i}.q": drawn(H * D, E),
            f"{i}.k": drawn(KV * D, E),
            f"{i}.v": drawn(KV * D, E),
            f"{i}.o": drawn(E, H * D),
            f"{i}.gate": drawn(F, E),
            f"{i}.up": drawn(F, E),
            f"{i}.down": drawn(E, F),
        }
        if qkv_bias:
            made |= {f"{i}.{n}b": drawn(w * D) for n, w in (("q", H), ("k", KV), ("v", KV))}
        if qk_norm:
            made |= {f"{i}.qn": 1 + drawn(D), f"{i}.kn": 1 + drawn(D)}
    return made


def rms(h: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return h * (h.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight


def turned(x: torch.Tensor, theta: float) -> torch.Tensor:
    """Of x (heads, n, D), the first half of a head's numbers beside the second."""
    n, half = x.shape[1], D // 2
    angles = torch.arange(n)[:, None] * theta ** (-torch.arange(half) * 2.0 / D)[None]
    cos, sin = angles.cos(), angles.sin()
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def plain(w: dict[str, torch.Tensor], ids: list[int], block: int, theta: float) -> torch.Tensor:
    """Rows (n, V): every position sees all, or its block and those before it."""
    n = len(ids)
    h = w["embed"][ids]
    at = torch.arange(n)
    hidden = at[None] // block > at[:, None] // block if block else torch.zeros(n, n).bool()
    for i in range(LAYERS):
        x = rms(h, w[f"{i}.norm1"])
        parts = []
        for name, heads in (("q", H), ("k", KV), ("v", KV)):
            y = x @ w[f"{i}.{name}"].T + w.get(f"{i}.{name}b", torch.zeros(1))
            y = y.view(n, heads, D).transpose(0, 1)
            if f"{i}.{name}n" in w:
                y = rms(y, w[f"{i}.{name}n"])
            parts.append(y)
        q, k = (turned(part, theta) for part in parts[:2])
        k, v = (part.repeat_interleave(H // KV, 0) for part in (k, parts[2]))
        scores = (q @ k.transpose(1, 2) / D**0.5).masked_fill(hidden, -torch.inf)
        h = h + (scores.softmax(-1) @ v).transpose(0, 1).reshape(n, -1) @ w[f"{i}.o"].T
        x = rms(h, w[f"{i}.norm2"])
        gate = torch.nn.functional.silu(x @ w[f"{i}.gate"].T)
        h = h + (gate * (x @ w[f"{i}.up"].T)) @ w[f"{i}.down"].T
    return rms(h, w["norm"]) @ w["head"].T


LLAMA_NAMES = {
    "embed": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
    "norm1": "model.layers.{i}.input_layernorm.weight",
    "norm2": "model.layers.{i}.post_attention_layernorm.weight",
    **{n: f"model.layers.{{i}}.self_attn.{n}_proj.weight" for n in "qkvo"},
    **{f"{n}b": f"model.layers.{{i}}.self_attn.{n}_proj.bias" for n in "qkv"},
    **{f"{n}n": f"model.layers.{{i}}.self_attn.{n}_norm.weight" for n in "qk"},
    **{n: f"model.layers.{{i}}.mlp.{n}_proj.weight" for n in ("gate", "up", "down")},
}
LLADA_NAMES = {
    "embed": "model.transformer.wte.weight",
    "norm": "model.transformer.ln_f.weight",
    "head": "model.transformer.ff_out.weight",
    "norm1": "model.transformer.blocks.{i}.attn_norm.weight",
    "norm2": "model.transformer.blocks.{i}.ff_norm.weight",
    **{n: f"model.transformer.blocks.{{i}}.{n}_proj.weight" for n in "qkv"},
    "o": "model.transformer.blocks.{i}.attn_out.weight",
    "gate": "model.transformer.blocks.{i}.ff_proj.weight",
    "up": "model.transformer.blocks.{i}.up_proj.weight",
    "down": "model.transformer.blocks.{i}.ff_out.weight",
}
USUAL: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": E,
    "intermediate_size": F,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": H,
    "num_key_value_heads": KV,
    "head_dim": D,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "mask_token_id": MASK,
}
LLADA: dict[str, Any] = {
    "model_type": "llada",
    "d_model": E,
    "n_heads": H,
    "n_kv_heads": KV,
    "n_layers": LAYERS,
    "mlp_hidden_size": F,
    "vocab_size": V - 1,
    "embedding_size": V,
    "max_sequence_length": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "weight_tying": False,
    "mask_token_id": MASK,
    "block_type": "llama",
    "layer_norm_type": "rms",
    "auto_map": {"AutoConfig": "configuration_llada.LLaDAConfig"},
}
FILES = {
    "llada": (LLADA, LLADA_NAMES, {}, 0, 0),
    "dream": ({**USUAL, "model_type": "Dream"}, LLAMA_NAMES, {"qkv_bias": True}, 1, 0),
    "sdar": ({**USUAL, "model_type": "sdar"}, LLAMA_NAMES, {"qk_norm": True}, 0, 4),
    "a2d": ({**USUAL, "model_type": "a2d-qwen3"}, LLAMA_NAMES, {"qk_norm": True}, 0, 0),
    "ours": (
        {**USUAL, "model_type": "llama", "canvas": {"mask_id": MASK, "shift": 1, "block": 0}},
        LLAMA_NAMES,
        {},
        1,
        0,
    ),
}


def folder(place: Path, kind: str, **changes: Any) -> tuple[Path, dict[str, torch.Tensor]]:
    config, names, options, _, _ = FILES[kind]
    made = weights(**options)
    tensors = {}
    for name, tensor in made.items():
        layer, dot, part = name.partition(".")
        pattern = names[part if dot else name]
        tensors[pattern.format(i=layer) if dot else pattern] = tensor
    save_file(tensors, place / "model.safetensors", {"format": "pt"})
    (place / "config.json").write_text(json.dumps({**config, **changes}))
    return place, made


def loaded(place: Path) -> Denoiser:
    with pytest.warns(UserWarning, match="tokenizer"):
        model = load(place).models["target"]
    assert isinstance(model, Denoiser)
    return model


@pytest.mark.parametrize("kind", FILES)
def test_rows_are_those_of_a_plain_computation(kind: str, tmp_path: Path) -> None:
    _, _, _, shift, block = FILES[kind]
    place, made = folder(tmp_path, kind)
    model = loaded(place)
    assert (model.mask_id, model.shift, model.block) == (MASK, shift, block)
    canvas = [5, 9, 31, MASK, MASK, 12, MASK, 3, MASK, MASK]
    rows = plain(made, canvas, block, 10000.0)
    said = []
    forward = model.forward

    def noted(jobs: Any) -> Any:
        replies = forward(jobs)
        said.append(replies[0].logits)
        return replies

    model.forward = noted  # type: ignore[method-assign]
    given = [-1 if token == MASK else token for token in canvas[3:]]
    inputs = {"canvas": given}
    text(model, "confidence:block=0", canvas[:3], inputs=inputs, max_new_tokens=7)
    wanted = [place - shift for place, token in enumerate(canvas) if token == MASK]
    ours = said[0].clone()
    ours[:, MASK] = rows[wanted][:, MASK]  # a mask is never proposed
    assert torch.allclose(ours, rows[wanted], atol=1e-5 * float(rows.abs().max()))
    # A wrong shift and a causal mask do not give these rows.
    other = [place - 1 + 2 * shift for place in wanted]
    assert not torch.allclose(ours, rows[other], atol=1e-2)
    assert not torch.allclose(ours, plain(made, canvas, 1, 10000.0)[wanted], atol=1e-2)


def test_bad_files_are_named(tmp_path: Path) -> None:
    place, _ = folder(tmp_path, "llada", alibi=True)
    with pytest.raises(BadModel, match="alibi"):
        load(place)
    place, _ = folder(tmp_path, "dream", mask_token_id=V + 3)
    with pytest.raises(BadModel, match="mask_token_id"):
        load(place)


def test_other_backends_are_refused(tmp_path: Path) -> None:
    place, _ = folder(tmp_path, "dream")
    for options in ({"backend": "openvino"}, {"backend": "native"}, {"exact_bits": True}):
        with pytest.raises(ForetellError, match=r"leave (it|backend) out"):
            load(place, dtype="bfloat16", **options)
