"""What a .gguf file says beside its matrices: read right by every runtime, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf as lib
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

import foretell
from foretell.errors import ForetellError
from foretell.models.gguf import gguf, header
from foretell.native import library
from tests import tiny

SIZES = {
    "initializer_range": 0.2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
IDS = list(range(1, tiny.CONTEXT - 1))
FACTORS = np.linspace(1, 8, 16, dtype=np.float32)
LONG = np.linspace(1, 40, 16, dtype=np.float32)
THETA = {"rope_theta": 10000.0}


def llama(**more: Any) -> PreTrainedModel:
    model = tiny.llama(**{**SIZES, **more})
    return with_biases(model)


def qwen2(**more: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {name: value for name, value in SIZES.items() if name != "head_dim"}
    config = Qwen2Config(
        **{
            **tiny.llama().config.to_dict(),
            **sizes,
            "num_attention_heads": 2,
            "head_dim": 32,
            **more,
        }
    )
    return with_biases(Qwen2ForCausalLM(config).eval())


def with_biases(model: PreTrainedModel) -> PreTrainedModel:
    torch.manual_seed(1)
    for name, part in model.named_parameters():
        if name.endswith(".bias"):
            part.data = torch.randn_like(part)
        elif "norm" in name:
            part.data = 1 + 0.2 * torch.randn_like(part)
    return model


def scaled(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, **THETA, **more}}


def longrope(original: int) -> dict[str, Any]:
    return scaled(
        "longrope",
        short_factor=FACTORS.tolist(),
        long_factor=LONG.tolist(),
        original_max_position_embeddings=original,
        attention_factor=1.2,
        factor=2.0,
    )


def llama3() -> tuple[dict[str, Any], np.ndarray]:
    """Llama 3's scaling, and the factors that its files have in place of its parameters."""
    fields = scaled(
        "llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=32,
    )
    turned = tiny.llama(**SIZES, **fields).model.rotary_emb.inv_freq
    whole = tiny.llama(**SIZES).model.rotary_emb.inv_freq
    return fields, (whole / turned).numpy()


LLAMA3, LLAMA3_FACTORS = llama3()
# Of each: fields of a configuration, keys of a file's header after its architecture, tensors.
Case = tuple[dict[str, Any], dict[str, Any], dict[str, np.ndarray]]
SCALINGS: dict[str, Case] = {
    "linear": (
        scaled("linear", factor=4.0),
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
        {},
    ),
    "linear without its name": (scaled("linear", factor=4.0), {"rope.scaling.factor": 4.0}, {}),
    "linear by its old name": (scaled("linear", factor=4.0), {"rope.scale_linear": 4.0}, {}),
    "none": ({}, {"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, {}),
    "yarn": (
        scaled("yarn", factor=4.0, original_max_position_embeddings=32),
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 32,
        },
        {},
    ),
    "yarn with all": (
        scaled(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=32,
            beta_fast=8.0,
            beta_slow=2.0,
            attention_factor=0.8 * (0.1 * np.log(4) + 1),
        ),
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 32,
            "rope.scaling.yarn_beta_fast": 8.0,
            "rope.scaling.yarn_beta_slow": 2.0,
            "rope.scaling.yarn_ext_factor": 1.0,
            "rope.scaling.attn_factor": 0.8,
        },
        {},
    ),
    "llama3": (LLAMA3, {}, {"rope_freqs.weight": LLAMA3_FACTORS}),
    "short": (
        longrope(tiny.CONTEXT),
        {
            "rope.scaling.type": "longrope",
            "rope.scaling.original_context_length": tiny.CONTEXT,
            "rope.scaling.attn_factor": 1.2,
        },
        {"rope_factors_long.weight": LONG, "rope_factors_short.weight": FACTORS},
    ),
    "another base": ({"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, {}, {}),
}
BIASES = {
    "attention": {"attention_bias": True},
    "mlp": {"mlp_bias": True},
    "all": {"attention_bias": True, "mlp_bias": True},
}
families = pytest.mark.parametrize("family", [llama, qwen2])
Family = Callable[..., PreTrainedModel]


@torch.inference_mode()
def rows(hf: Any) -> torch.Tensor:
    found: torch.Tensor = hf(torch.tensor([IDS])).logits[0].float()
    return found


def check(model: PreTrainedModel, folder: Path, **more: Any) -> None:
    """A file in float32, unpacked, has the model's own rows; one in bfloat16 has them up to
    rounding in the C library.
    """
    wanted = rows(model)
    found = rows(gguf.read_unpacked(tiny.gguf(model, folder / "wide.gguf", **more), torch.float32))
    assert torch.allclose(found, wanted, atol=1e-4 * float(wanted.abs().max()))
    if library.is_available():
        file = tiny.gguf(model, folder / "short.gguf", kind="BF16", **more)
        last = foretell.load(file, backend="native").models["target"].score(IDS)[-1]
        assert float((last - wanted[-1]).norm()) <= 0.1 * float(wanted[-1].norm())


@pytest.mark.parametrize("case", sorted(SCALINGS))
@families
def test_scaled_rotations(family: Family, case: str, tmp_path: Path) -> None:
    fields, keys, tensors = SCALINGS[case]
    model = family(**fields)
    kind = model.config.model_type
    named = {f"{kind}.{key}": value for key, value in keys.items()}
    check(model, tmp_path, keys=named, tensors=tensors)


@pytest.mark.parametrize("case", sorted(BIASES))
def test_biases_stand_in_the_order_of_their_weights(case: str, tmp_path: Path) -> None:
    check(llama(**BIASES[case]), tmp_path)


def test_a_bias_that_the_file_lacks_is_zero(tmp_path: Path) -> None:
    model = llama(attention_bias=True)
    for layer in model.model.layers:
        layer.self_attn.o_proj.bias.data.zero_()
    lacking = tiny.gguf(model, tmp_path / "model.gguf", without=("attn_output.bias",))
    assert not any("attn_output.bias" in name for name in header.read_header(lacking).tensors)
    found = rows(gguf.read_unpacked(lacking, torch.float32))
    assert torch.allclose(found, rows(model), atol=1e-4)


def test_a_long_rotation_is_computed_within_its_short_range(tmp_path: Path) -> None:
    fields = longrope(64)
    keys = {
        "llama.rope.scaling.type": "longrope",
        "llama.rope.scaling.original_context_length": 64,
        "llama.rope.scaling.attn_factor": 1.2,
    }
    parts = {"rope_factors_long.weight": LONG, "rope_factors_short.weight": FACTORS}
    file = tiny.gguf(llama(**fields), tmp_path / "model.gguf", keys=keys, tensors=parts)
    found = gguf.read_unpacked(file, torch.float32)
    assert torch.allclose(rows(found), rows(llama(**fields)), atol=1e-3)
    assert foretell.wrap(found).models["target"].context == 64


REFUSED = {
    "llama.attention.scale": 0.5,
    "llama.logit_scale": 4.0,
    "llama.embedding_scale": 12.0,
    "llama.residual_scale": 0.25,
    "llama.attn_logit_softcapping": 50.0,
    "llama.final_logit_softcapping": 30.0,
    "llama.attention.sliding_window": 16,
    "llama.attention.clamp_kqv": 8.0,
    "llama.attention.max_alibi_bias": 8.0,
    "llama.attention.causal": False,
    "llama.attention.value_length": 16,
    "llama.attention.layer_norm_epsilon": 1e-5,
    "llama.attention.head_count_kv": [2, 1],
    "llama.attention.temperature_length": 64,
    "llama.expert_weights_scale": 2.5,
    "llama.vocab_size": 331,
    "llama.nextn_predict_layers": 1,
    "llama.swin_norm": True,
    "llama.use_parallel_residual": True,
    "llama.rope.dimension_count": 16,
    "llama.rope.dimension_sections": [8, 4, 4, 0],
    "llama.rope.freq_base_swa": 500.0,
    "llama.rope.scaling.alpha": 1000.0,
    "llama.rope.scaling.type": "dynamic",
    "llama.rope.scaling.yarn_ext_factor": 0.5,
    "llama.rope.scaling.yarn_log_multiplier": 0.1,
    "llama.a_key_of_tomorrow": 1,
    "tokenizer.ggml.a_key_of_tomorrow": 1,
    "tokenizer.ggml.remove_extra_whitespaces": True,
    "tomorrow.key": 1,
    "diffusion.shift_logits": True,
    "adapter.type": "lora",
    "general.type": "adapter",
    "split.count": 2,
}
NEUTRAL = {
    "llama.attention.scale": 0.0,
    "llama.logit_scale": 1.0,
    "llama.attention.sliding_window": 0,
    "llama.attention.causal": True,
    "llama.attention.layer_norm_rms_epsilon": 1e-6,
    "llama.attention.head_count_kv": [2, 2],
    "llama.expert_count": 0,
    "llama.use_parallel_residual": False,
    "llama.vocab_size": 330,
    "general.sampling.temp": 0.7,
    "general.tags": ["text"],
    "quantize.imatrix.file": "some.dat",
    "tokenizer.ggml.fim_pre_token_id": 3,
    "split.count": 1,
}


@pytest.mark.parametrize("key", sorted(REFUSED))
def test_what_would_change_numbers_unread_is_refused_by_name(key: str, tmp_path: Path) -> None:
    file = tiny.gguf(llama(), tmp_path / "model.gguf", keys={key: REFUSED[key]})
    with pytest.raises(LookupError) as refused:
        gguf.read_unpacked(file, torch.float32)
    assert key in str(refused.value) and "\n" not in str(refused.value)


def test_a_refusal_says_the_key_in_every_runtime(tmp_path: Path) -> None:
    keys = {"llama.logit_scale": 4.0}
    file = tiny.gguf(llama(), tmp_path / "model.gguf", keys=keys, kind="BF16")
    for backend in ("auto", "native", "torch"):
        if backend == "auto" and find_spec("llama_cpp"):
            continue
        with pytest.raises(ForetellError, match=r"llama\.logit_scale=4\.0") as refused:
            foretell.load(file, backend=backend)
        assert "; " in str(refused.value) and "\n" not in str(refused.value)


def test_keys_that_say_nothing_are_passed(tmp_path: Path) -> None:
    file = tiny.gguf(llama(), tmp_path / "model.gguf", keys=NEUTRAL)
    assert torch.equal(rows(gguf.read_unpacked(file, torch.float32)), rows(llama()))


@pytest.mark.parametrize("key", ["block_count", "attention.layer_norm_rms_epsilon"])
def test_a_key_that_is_missing_is_named(key: str, tmp_path: Path) -> None:
    file = tiny.gguf(llama(), tmp_path / "model.gguf", keys={f"llama.{key}": None})
    with pytest.raises(LookupError, match=f"lacks llama.{key}"):
        gguf.read_unpacked(file, torch.float32)


@pytest.mark.parametrize(
    "name", ["blk.0.attn_norm.bias", "blk.1.attn_q_norm.weight", "output.bias", "blk.0.attn_sinks"]
)
def test_tensors_that_nothing_reads_are_refused_by_name(name: str, tmp_path: Path) -> None:
    file = tiny.gguf(llama(), tmp_path / "m.gguf", tensors={name: np.ones(32, np.float32)})
    with pytest.raises(LookupError, match=name):
        gguf.read_unpacked(file, torch.float32)


def constants(group: type = lib.Keys) -> list[str]:
    """Every key that the package `gguf` knows."""
    found = []
    for name, value in vars(group).items():
        if isinstance(value, str) and not name.startswith("_"):
            found.append(value)
        elif isinstance(value, type):
            found += constants(value)
    return found


def test_every_key_of_the_package_is_known() -> None:
    """A newer release has a key that nobody looked at: put it into one of the tables."""
    names = {**dict.fromkeys(header.STATED), **dict.fromkeys(header.ROTATION)}
    names |= {**dict.fromkeys(header.SILENT), **header.REFUSED}
    tokens = header.TOKENS_READ | header.TOKENS_SILENT | set(header.TOKENS_REFUSED)
    beginnings = (*header.SILENT_BEGINNINGS, *header.REFUSED_BEGINNINGS)
    unknown = []
    for key in constants():
        if key.startswith("{arch}."):
            known = key.removeprefix("{arch}.") in names
        elif key.startswith("tokenizer."):
            name = key.removeprefix("tokenizer.")
            known = name in tokens or name.startswith("chat_template.")
        else:
            known = key in header.SPLIT or key.startswith(beginnings)
        if not known:
            unknown.append(key)
    assert not unknown
    assert {kind.value for kind in lib.RopeScalingType} == set(header.KINDS)


def test_a_key_has_one_meaning() -> None:
    tables = [header.STATED, header.ROTATION, header.SILENT, header.REFUSED]
    assert len(set().union(*tables)) == sum(map(len, tables))
    assert set(header.NOTHING) <= set(header.STATED)


@pytest.mark.parametrize("end", ["eos", "eot", "eom"])
def test_every_end_that_a_file_names_ends_a_text(end: str, tmp_path: Path) -> None:
    for backend in ("native", "torch") if library.is_available() else ("torch",):

        def text(token: int, backend: str = backend) -> list[int]:
            keys = {f"tokenizer.ggml.{end}_token_id": token}
            file = tiny.gguf(llama(), tmp_path / "model.gguf", keys=keys, kind="BF16")
            lm = foretell.load(file, backend=backend)
            return lm.generate(IDS[:9], "plain", max_new_tokens=12).tokens

        whole = text(329)
        last = whole[len(set(whole)) // 2]
        assert 329 not in whole and len(whole) == 12
        assert text(last) == whole[: whole.index(last) + 1], backend


def test_a_control_token_of_a_known_text_is_an_end(tmp_path: Path) -> None:
    file = tiny.gguf(llama(), tmp_path / "model.gguf")
    found = header.read_header(file)
    kinds, texts = (
        found.values["tokenizer.ggml.token_type"],
        list(found.values["tokenizer.ggml.tokens"]),
    )
    texts[5], kinds[5], texts[6] = "<|im_end|>", header.CONTROL, "<|eot_id|>"
    keys = {"tokenizer.ggml.tokens": texts, "tokenizer.ggml.token_type": kinds}
    renamed = tiny.gguf(llama(), tmp_path / "renamed.gguf", keys=keys)
    assert header.end_tokens(header.read_header(renamed)) == [0, 5]
