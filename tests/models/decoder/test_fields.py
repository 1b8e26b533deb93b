"""Fields of config.json: honoured by the faster layers, known to change nothing, or a reason to let
the model's own layers compute.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RopeParameters

import foretell
from foretell.backends import native
from foretell.models.decoder import fields, fused
from foretell.models.decoder.decoder import Decoder
from foretell.models.decoder.fused import fused_blocks
from foretell.models.families.description import (
    ConfigFields,
    describe_llama,
    find_family,
    known_families,
)
from foretell.native import library
from tests import tiny
from tests.models.decoder.families import BASE, described_config

# Families that are described, and those whose layers have the parts of the llama family's.
FAMILIES = sorted({*known_families(), "ministral3", "internlm3", "iquestcoder", "cwm"})
WIDE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
THETA = {"rope_theta": 10000.0}
FACTORS = torch.linspace(1, 8, 16).tolist()
LONG = torch.linspace(1, 40, 16).tolist()
ROTATIONS: dict[str, dict[str, Any]] = {
    "default": {"rope_theta": 300.0},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "longrope": {
        "short_factor": FACTORS,
        "long_factor": LONG,
        "original_max_position_embeddings": 64,
        "factor": 2.0,
    },
}


def model(family: str, **more: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**{**BASE, "initializer_range": 0.2, **more})
    return AutoModelForCausalLM.from_config(config).eval()  # type: ignore[no-any-return]


def decoder(hf: PreTrainedModel) -> Decoder:
    return Decoder(hf, "tiny", fused_blocks)


@torch.inference_mode()
def agrees(made: Decoder, hf: PreTrainedModel, ids: list[int], near: float = 1e-3) -> bool:
    wanted = hf(torch.tensor([ids])).logits[0, -1].float()
    found = made.score(ids)[-1].float()
    return float((found - wanted).norm()) <= near * float(wanted.norm())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_of_a_family_is_known(family: str) -> None:
    """A newer release has a field that nobody looked at: put it into one of the tables."""
    config = described_config(family)
    read = ConfigFields(config)
    for layer in range(config.num_hidden_layers):
        (find_family(family) or describe_llama)(read, layer)
    known = fields.HONOURED | fields.SILENT | read.read
    assert {field.name for field in dataclasses.fields(CONFIG_MAPPING[family])} <= known


def test_every_parameter_of_a_rotation_is_known() -> None:
    assert set(RopeParameters.__annotations__) <= fields.OF_ROTATIONS
    assert {*ROPE_INIT_FUNCTIONS, "default"} == fields.ROTATIONS
    assert set(ROTATIONS) == fields.ROTATIONS - {"proportional"}  # Gemma 4's


@pytest.mark.skipif(not library.is_available(), reason="the C library is not built")
@pytest.mark.parametrize("kind", sorted(ROTATIONS))
def test_the_c_library_computes_every_rotation(kind: str, tmp_path: Path) -> None:
    rope = {"rope_type": kind, **THETA, **ROTATIONS[kind]}
    hf = tiny.llama(**WIDE, initializer_range=0.2, rope_parameters=rope)
    lm = foretell.load(tiny.save(hf, tmp_path), dtype="bfloat16", backend="native")
    target: Any = lm.models["target"]
    assert target.usual_backend == "native"
    wanted = 64 if kind == "longrope" else tiny.CONTEXT  # beyond, it depends on the longest text
    assert target.context == wanted
    assert agrees(target, hf, list(range(1, wanted - 1)), 0.1)


UNREAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "a second text": ("gpt2", {"add_cross_attention": True}, "(add_cross_attention)"),
    "norms without weights": (
        "opt",
        {"layer_norm_elementwise_affine": False},
        "(layer_norm_elementwise_affine)",
    ),
    "a scale of queries that grows": (
        "ministral3",
        {
            "rope_parameters": {
                "rope_type": "default",
                "llama_4_scaling_beta": 0.5,
                "original_max_position_embeddings": 16,
                **THETA,
            }
        },
        "its rotation has llama_4_scaling_beta",
    ),
}


@pytest.mark.parametrize("case", sorted(UNREAD))
def test_what_the_faster_layers_do_not_honour_is_left_to_the_model_s_own(case: str) -> None:
    family, more, reason = UNREAD[case]
    small = {**more, "initializer_range": 0.02}  # so small that a probe sees little
    made = decoder(model(family, **small).bfloat16())
    assert not made.fused and reason in str(made.blocks_refused)
    hf = model(family, **more)
    assert agrees(decoder(hf), hf, list(range(1, 60)))


@pytest.mark.parametrize("family", ["helium", "ernie4_5"])
def test_another_order_of_turned_heads_is_seen(family: str, monkeypatch: Any) -> None:
    """Neighbours turn together there: taken for a family that is built as llama is, it is not."""
    assert decoder(model(family, head_dim=8)).fused
    monkeypatch.setattr(fused, "find_family", lambda model_type: describe_llama)
    small = model(family, head_dim=8, initializer_range=0.02)  # a probe sees little
    assert "turn in another order" in str(decoder(small.bfloat16()).blocks_refused)


def test_a_base_for_each_layer_is_left_to_the_whole_model() -> None:
    hf = model("granite_swa", layer_rope_theta=[100.0, 10000.0, 100.0], sliding_window=8)
    made = decoder(hf)
    assert made.loop is None and "turns by a rotation of its own" in str(made.loop_refused)


@pytest.mark.parametrize(
    "more",
    [
        {"do_layer_norm_before": False},
        {"_remove_final_layer_norm": True},
        {"word_embed_proj_dim": 16},
    ],
)
def test_a_skeleton_that_is_not_described_is_left_to_the_whole_model(more: dict[str, Any]) -> None:
    hf = model("opt", init_std=0.2, **more)
    made = decoder(hf)
    assert made.loop is None and f"({next(iter(more))})" in str(made.loop_refused)
    assert not native.suits_model(hf.bfloat16())
    hf = model("opt", init_std=0.2, **more)
    assert agrees(decoder(hf), hf, list(range(1, 60)))


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("llama", {"unsloth_fixed": True, "a_note_of_mine": "x"}),
        ("gpt2", {"n_ctx": 1024, "task_specific_params": {"text-generation": {"max_length": 50}}}),
        ("opt", {"activation_dropout": 0.0, "prefix": "</s>", "output_projection": True}),
    ],
)
def test_fields_that_no_code_names_change_nothing(family: str, more: dict[str, Any]) -> None:
    assert decoder(model(family, **more)).fused


def test_a_field_that_the_family_s_code_names_is_not_passed_over() -> None:
    made = decoder(model("llama", training=1))
    assert not made.fused and "its configuration has training" in str(made.blocks_refused)
