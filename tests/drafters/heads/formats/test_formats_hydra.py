"""Hydra heads as their authors publish them, against their computation written plainly."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaModel

from foretell.drafters.heads.formats.reading import check_taps, load_any_head
from foretell.errors import BadConfig, BadModel
from foretell.models.decoder.decoder import Decoder
from tests.drafters.heads.networks import published
from tests.drafters.heads.networks.published import (
    TEXT,
    Tensors,
    change,
    check_greedy,
    check_our_layout,
    drawn,
    said,
    states_of,
    target,
    written,
)
from tests.models.decoder import families

HIDDEN, HEADS, VOCAB = 32, 3, 97
BELOW = [7, 50]
PREFIX = "prefix_embeding_layer."


def folder(plus: bool, layers: int) -> tuple[dict[str, Any], Tensors]:
    """`layers` of a head, which from the second on are one in the published code."""
    step, first, matrix = (2, 1, ".1") if plus else (1, 0, "")
    shapes: dict[str, tuple[int, ...]] = {}
    again: dict[str, str] = {}
    for i in range(HEADS):
        wide = (HIDDEN, (i + 2) * HIDDEN)
        for part in ("linear", "res_connection"):
            shapes[f"hydra_mlp.{i}.{first}.{part}.weight"] = wide
            shapes[f"hydra_mlp.{i}.{first}.{part}.bias"] = (HIDDEN,)
        for j in range(1, layers):
            place = f"hydra_mlp.{i}.{first + j * step}.linear"
            if j == 1:
                shapes |= {f"{place}.weight": (HIDDEN, HIDDEN), f"{place}.bias": (HIDDEN,)}
            else:
                shared = f"hydra_mlp.{i}.{first + step}.linear"
                again |= {f"{place}.{end}": f"{shared}.{end}" for end in ("weight", "bias")}
        shapes[f"hydra_lm_head.{i}{matrix}.weight"] = (VOCAB, HIDDEN)
        shapes[f"hydra_lm_head.{i}{matrix}.bias"] = (VOCAB,)
    if plus:
        config = {"hidden_size": HIDDEN, "intermediate_size": 48, "head_dim": 8}
        config |= {"num_attention_heads": 4, "num_key_value_heads": 2}
        shapes |= published.layer_shapes(config, f"{PREFIX}layers.0.", HIDDEN)
        shapes |= {f"{PREFIX}{name}.weight": (HIDDEN,) for name in ("layers.0.input_layernorm",)}
        shapes |= {f"{PREFIX}norm.weight": (HIDDEN,), f"{PREFIX}embed_tokens.weight": (VOCAB, 32)}
    tensors = drawn(shapes)
    tensors |= {name: tensors[source].clone() for name, source in again.items()}
    table = target().embedded(torch.arange(VOCAB)).detach().clone()
    told = {
        "hydra_num_heads": 2,  # fewer than there are
        "hydra_num_layers": layers,
        "hydra_head_arch": "prefix-mlp" if plus else "mlp",
        "grounded_heads": True,
        "hidden_state_offset": 0,
    }
    return told, {**tensors, "input_embed_fn.weight": table}


def twin(told: dict[str, Any], t: Tensors, below: Sequence[int]) -> list[torch.Tensor]:
    """What a head a depth says after the text and these tokens."""
    plus = told["hydra_head_arch"] == "prefix-mlp"
    step, first, matrix = (2, 1, ".1") if plus else (1, 0, "")
    norm: Any = target().loop.norm  # type: ignore[union-attr]
    states = norm(states_of(target(), (3,))[1 : len(TEXT)])
    if plus:
        config = copy.deepcopy(target().config)
        config.num_hidden_layers = 1
        model = LlamaModel(config)
        own = {n.removeprefix(PREFIX): v for n, v in t.items() if n.startswith(PREFIX)}
        model.load_state_dict(own)
        states = model(inputs_embeds=states[None]).last_hidden_state[0]
    table, read = t["input_embed_fn.weight"], states[-1]
    found = []
    for i, token in enumerate([TEXT[-1], *below]):
        read = torch.cat([read, table[token]])
        place = f"hydra_mlp.{i}.{first}"
        parts = {
            part: t[f"{place}.{part}.weight"] @ read + t[f"{place}.{part}.bias"]
            for part in ("linear", "res_connection")
        }
        z = parts["res_connection"] + F.silu(parts["linear"])
        for j in range(1, told["hydra_num_layers"]):
            place = f"hydra_mlp.{i}.{first + j * step}.linear"
            z = z + F.silu(t[f"{place}.weight"] @ z + t[f"{place}.bias"])
        out = f"hydra_lm_head.{i}{matrix}"
        found.append(t[f"{out}.weight"] @ z + t[f"{out}.bias"])
    return found


LAYOUTS = {"hydra": (False, 1), "deeper": (False, 3), "hydra++": (True, 3), "one block": (True, 1)}


@pytest.mark.parametrize("layout", LAYOUTS)
@torch.inference_mode()
def test_heads_say_what_the_published_code_says(layout: str, tmp_path: Path) -> None:
    told, tensors = folder(*LAYOUTS[layout])
    place = written(tmp_path / "theirs", told, tensors)
    wanted = twin(told, tensors, BELOW)
    for ours, theirs in zip(said(target(), place, "hydra", BELOW), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    other = twin(told, tensors, [BELOW[0], 51])
    assert (other[2] - wanted[2]).abs().max() > 0.01  # a token on the way is heard


@pytest.mark.parametrize("layout", ["hydra", "hydra++"])
def test_greedy_tokens_are_those_of_plain_decoding(layout: str, tmp_path: Path) -> None:
    place = written(tmp_path / "theirs", *folder(*LAYOUTS[layout]))
    check_greedy(target(), "hydra", place)
    check_our_layout(target(), place, "hydra", tmp_path / "ours")


@torch.inference_mode()
def test_the_row_of_the_first_token_is_seen_by_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No state stands before the first token, and so the published layer has no row for it."""
    told, tensors = folder(True, 1)
    place = written(tmp_path, told, tensors)
    monkeypatch.setattr(
        "foretell.drafters.heads.networks.model.without_first",
        lambda here, there: torch.zeros(1, len(here), len(there)),
    )
    (ours, *_), (theirs, *_) = said(target(), place, "hydra", []), twin(told, tensors, [])
    assert (ours - theirs).abs().max() > 1e-3


@torch.inference_mode()
def test_blocks_that_are_one_may_stand_in_the_file_once(tmp_path: Path) -> None:
    told, tensors = folder(True, 3)
    few = {name: t for name, t in tensors.items() if ".3.linear" not in name}
    assert len(few) < len(tensors)
    wanted = twin(told, tensors, BELOW)
    place = written(tmp_path, told, few)
    for ours, theirs in zip(said(target(), place, "hydra", BELOW), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    with pytest.raises(BadConfig, match="taps='output'"):
        load_any_head(place, target(), taps="output")
    assert list(check_taps(place, target(), TEXT)) == ["hydra"]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"hydra_head_arch": "eagle-attn"}, "hydra_head_arch='eagle-attn'"),
    "ungrounded": ({"grounded_heads": False}, "grounded_heads=False"),
    "offset": ({"hidden_state_offset": 1}, "hidden_state_offset=1"),
    "heads": ({"hydra_num_heads": 4}, "hydra_num_heads=4, and the file has 3"),
    "layers": ({"hydra_num_layers": 2}, "hydra_num_layers=2, and the file has 3"),
    "differ": ({"hydra_mlp.0.5.linear.weight": torch.ones(32, 32)}, "hydra_mlp.0.3.linear.weight "),
    "missing": ({"hydra_lm_head.1.1.bias": None}, "lacks hydra_lm_head.1.1.bias"),
    "head": ({"hydra_mlp.1.1.linear.weight": None}, "lacks the block of head 1"),
    "norm": ({f"{PREFIX}norm.weight": None}, f"lacks {PREFIX}norm.weight"),
    "unknown": ({"hydra_mlp.0.1.gate.weight": torch.ones(2)}, "has hydra_mlp.0.1.gate.weight"),
    "vocabulary": (
        {"hydra_lm_head.0.1.weight": torch.ones(98, 32)},
        r"hydra_lm_head.0.1.weight is \(98, 32\)",
    ),
    "width": (
        {"hydra_mlp.0.1.linear.weight": torch.ones(64, 128)},
        r"hydra_mlp.0.1.linear.weight is \(64, 128\)",
    ),
    "table": (
        {"input_embed_fn.weight": torch.randn(97, 32)},
        "input_embed_fn.weight is not the table",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_does_not_fit_is_refused_by_name(wrong: str, tmp_path: Path) -> None:
    changes, message = WRONG[wrong]
    told, tensors = folder(True, 3)
    change(told, tensors, changes)
    with pytest.raises(BadModel, match=message):
        load_any_head(written(tmp_path, told, tensors), target())


def test_a_layer_of_another_rotation_is_refused(tmp_path: Path) -> None:
    """The layer before the heads is one of the target's own build."""
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0}
    turned = Decoder(families.tiny("llama", rope_parameters=rope), "llama")
    turned.tokenizer = None
    place = written(tmp_path / "plus", *folder(True, 1))
    with pytest.raises(BadModel, match="rope_scaling='linear'"):
        load_any_head(place, turned)
