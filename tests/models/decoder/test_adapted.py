"""LoRA weights on a decoder's own: the rows of merged weights, the same memory, what is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import foretell
from foretell.errors import BadModel, Unsupported
from foretell.models.decoder.adapted import LoraLinear, scale_of
from foretell.models.decoder.decoder import Decoder
from foretell.models.decoder.smoothing import smooth_layers
from foretell.testing.toy import Toy
from tests import tiny

NAMES = ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj")
TEXT = [5, 17, 3, 99, 42, 7]


def saved(folder: Path, model: Any, rank: int = 2, **settings: Any) -> Path:
    """A folder as PEFT writes it."""
    folder.mkdir(exist_ok=True)
    torch.manual_seed(1)
    weights = {}
    for name in NAMES:
        linear = model.get_submodule(name)
        start = f"base_model.model.{name}.lora_"
        weights[f"{start}A.weight"] = torch.randn(rank, linear.in_features) * 0.3
        weights[f"{start}B.weight"] = torch.randn(linear.out_features, rank) * 0.3
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 6, "bias": "none", **settings}
    (folder / "adapter_config.json").write_text(json.dumps(config), "utf-8")
    return folder


def merged(model: Any, folder: Path, scale: float) -> Any:
    """The same weights added to a copy of the model."""
    from safetensors.torch import load_file

    twin = copy.deepcopy(model)
    weights = load_file(folder / "adapter_model.safetensors")
    for name in NAMES:
        a, b = (weights[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
        linear = twin.get_submodule(name)
        with torch.no_grad():
            linear.weight += scale * (b @ a)
    return twin


def test_they_read_the_inputs_they_learnt_from_where_those_were_evened_out(tmp_path: Path) -> None:
    """As inputs are before weights are rounded to 8 bits."""
    hf = tiny.llama()
    with torch.no_grad():
        hf.model.layers[0].input_layernorm.weight[::3] *= 50
    folder = saved(tmp_path / "amateur", hf)
    want = Decoder(merged(hf, folder, 3.0), "merged").score(TEXT)
    assert smooth_layers(hf)
    assert hf.smoothed[NAMES[0]].max() > 2 and NAMES[1] not in hf.smoothed
    assert torch.allclose(Decoder(hf, "tiny").adapted(str(folder)).score(TEXT), want, atol=1e-3)


@pytest.mark.parametrize("rslora", [False, True])
def test_its_rows_are_those_of_merged_weights(tmp_path: Path, rslora: bool) -> None:
    hf = tiny.llama()
    folder = saved(tmp_path / "amateur", hf, use_rslora=rslora)
    base = Decoder(hf, "tiny")
    before = base.score(TEXT)
    model = base.adapted(str(folder))
    want = Decoder(merged(hf, folder, 6 / (2**0.5 if rslora else 2)), "merged")
    assert torch.allclose(model.score(TEXT), want.score(TEXT), atol=1e-4)
    assert not torch.allclose(model.score(TEXT), before, atol=0.1)
    assert torch.equal(base.score(TEXT), before), "the target changed"
    assert model.name == "tiny[amateur]" and "layers" in model.caps
    ours: Any = model
    assert isinstance(ours.hf.get_submodule(NAMES[0]), LoraLinear)
    assert not isinstance(hf.get_submodule(NAMES[0]), LoraLinear)
    shared = {p.data_ptr() for p in hf.parameters()}
    own = {p.data_ptr() for p in ours.hf.parameters()} - shared
    assert len(own) == 2 * len(NAMES), "weights were copied"


def test_scales_of_single_modules() -> None:
    settings = {"lora_alpha": 4, "alpha_pattern": {"q_proj": 16}}
    assert scale_of(settings, NAMES[0], 8) == 2 and scale_of(settings, NAMES[1], 8) == 0.5


def test_it_is_an_amateur(tmp_path: Path) -> None:
    """The same tokens with drafts as without, and as with the merged model by name."""
    hf = tiny.llama()
    folder = saved(tmp_path / "amateur", hf)
    lm = foretell.wrap(hf, tiny.tokenizer(), name="tiny")
    spec = f"lol:amateur={folder},b=0.5"
    plain = lm.generate(tiny.TEXTS[1], "plain", guidance=spec, max_new_tokens=20)
    drafted = lm.generate(tiny.TEXTS[1], "suffix:nodes=4", guidance=spec, max_new_tokens=20)
    by_name = foretell.wrap(
        hf, tiny.tokenizer(), name="tiny", models={"amateur": merged(hf, folder, 3)}
    ).generate(tiny.TEXTS[1], "plain", guidance="lol:b=0.5", max_new_tokens=20)
    assert plain.tokens == drafted.tokens == by_name.tokens
    assert plain.tokens != lm.generate(tiny.TEXTS[1], "plain", max_new_tokens=20).tokens


def test_on_packed_weights(tmp_path: Path) -> None:
    folder = saved(tmp_path / "amateur", tiny.llama())
    lm = foretell.load(str(tiny.save(tiny.llama(), tmp_path / "whole")), dtype="int8")
    out = lm.generate("The dog", "plain", guidance=f"lol:amateur={folder}", max_new_tokens=8)
    assert len(out.tokens) == 8 and out.stats.calls[str(folder)]


def damaged(folder: Path, change: str) -> None:
    """A folder with one thing wrong."""
    config, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    key = f"base_model.model.{NAMES[0]}.lora_"
    parts = {f"{key}A.weight": torch.ones(2, 32), f"{key}B.weight": torch.ones(32, 2)}
    if change == "no config":
        config.unlink()
    elif change == "no weights":
        weights.write_bytes(b"x")
    elif change == "other":
        config.write_text('{"peft_type": "IA3"}', "utf-8")
    elif change == "dora":
        config.write_text('{"peft_type": "LORA", "use_dora": true}', "utf-8")
    elif change == "size":
        save_file({**parts, f"{key}A.weight": torch.ones(2, 31)}, weights)
    elif change == "half":
        save_file({f"{key}A.weight": torch.ones(2, 32)}, weights)
    elif change == "module":
        save_file({name.replace("q_proj", "x"): part for name, part in parts.items()}, weights)
    else:
        save_file({"lm_head.weight": torch.ones(2, 2)}, weights)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("no config", "cannot be read"),
        ("no weights", "cannot be read"),
        ("other", "does not describe LoRA"),
        ("dora", "use_dora=True is not computed here"),
        ("size", "of another size"),
        ("half", "lacks one of its two parts"),
        ("module", "no linear layer of tiny"),
        ("foreign", "lm_head.weight is no LoRA weight"),
    ],
)
def test_damaged_folders_are_told_in_one_line(tmp_path: Path, change: str, message: str) -> None:
    hf = tiny.llama()
    folder = saved(tmp_path / "amateur", hf)
    damaged(folder, change)
    with pytest.raises(BadModel, match=message) as caught:
        Decoder(hf, "tiny").adapted(str(folder))
    assert "\n" not in str(caught.value) and "amateur" in str(caught.value)


def test_other_models_refuse_it(tmp_path: Path) -> None:
    class Special(Decoder):
        pass

    with pytest.raises(Unsupported, match="give a whole model by name"):
        Special(tiny.llama(), "special").adapted(str(tmp_path))
    assert not hasattr(Toy(8), "adapted")
