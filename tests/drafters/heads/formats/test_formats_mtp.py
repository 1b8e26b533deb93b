"""Heads for multi-token prediction among a model's own tensors, and as speculators has them,
against their computation over whole texts by transformers' layers.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from foretell.drafters.heads.formats.reading import check_taps, load_any_head
from foretell.drafters.heads.networks.folder import build_head, target_shape
from foretell.drafters.heads.networks.model import HeadModel
from foretell.errors import BadConfig, BadModel
from foretell.models.decoder.decoder import Decoder
from tests.drafters.heads.networks.published import (
    TEXT,
    Tensors,
    change,
    check_greedy,
    check_our_layout,
    drawn,
    logits_of,
    rms,
    said,
    states_of,
    written,
)
from tests.models.decoder import families

HIDDEN = 32
BELOW = [7, 50, 7]
OPTIONS: dict[str, Any] = {"qwen3_next": {"layer_types": ["full_attention"] * 3}}
# By layout: of the norms and the matrix about the layer, and in front of the layer's own names.
NAMES = {
    "deepseek": {
        "enter": "model.layers.3.eh_proj",
        "token": "model.layers.3.enorm",
        "state": "model.layers.3.hnorm",
        "last": "model.layers.3.shared_head.norm",
        "layer": "model.layers.3.",
    },
    "qwen": {
        "enter": "mtp.fc",
        "token": "mtp.pre_fc_norm_embedding",
        "state": "mtp.pre_fc_norm_hidden",
        "last": "mtp.norm",
        "layer": "mtp.layers.0.",
    },
    "speculators": {
        "enter": "mtp_layers.0.input_proj",
        "token": "mtp_layers.0.token_layernorm",
        "state": "mtp_layers.0.hidden_layernorm",
        "last": "mtp_layers.0.final_layernorm",
        "layer": "mtp_layers.0.",
    },
}


@cache
def target(family: str) -> Decoder:
    model = Decoder(families.tiny(family, **OPTIONS.get(family, {})), family)
    model.tokenizer = None
    return model


def own_layer(model: Decoder) -> Any:
    """One as the target's last, which attends in the plainest way."""
    config = copy.deepcopy(model.config)
    config._attn_implementation = "eager"
    assert model.loop is not None
    last: Any = model.loop.layers[-1]
    return type(last)(config, len(model.layout) - 1).eval()


def parted(name: str, value: torch.Tensor) -> Tensors:
    """Matrices of all experts as the files have them, expert by expert."""
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return {name: value}
    start, _, part = name.rpartition(".")
    found: Tensors = {}
    for i, matrix in enumerate(value):
        parts = matrix.chunk(2) if part == "gate_up_proj" else [matrix]
        kinds = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
        found |= {f"{start}.{i}.{k}.weight": p.clone() for k, p in zip(kinds, parts, strict=True)}
    return found


@cache
def layer_tensors(family: str) -> Tensors:
    shapes = {name: tuple(t.shape) for name, t in own_layer(target(family)).state_dict().items()}
    return drawn(shapes)


def folder(family: str, layout: str, experts: str = "each") -> tuple[dict[str, Any], Tensors]:
    """Among the model's own tensors but for speculators. `experts`: "all" in one matrix."""
    model, names = target(family), NAMES[layout]
    shapes: dict[str, tuple[int, ...]] = {f"{names['enter']}.weight": (HIDDEN, 2 * HIDDEN)}
    shapes |= {f"{names[part]}.weight": (HIDDEN,) for part in ("token", "state", "last")}
    tensors = drawn(shapes, seed=4)
    for name, value in layer_tensors(family).items():
        parts = parted(name, value) if experts == "each" else {name: value}
        tensors |= {f"{names['layer']}{part}": t for part, t in parts.items()}
    told = model.config.to_dict()
    if layout == "speculators":
        inner = {"speculators_model_type": "mtp", "transformer_layer_config": told}
        return inner, tensors
    own = {name: t.detach().clone() for name, t in model.hf.state_dict().items()}
    if layout == "deepseek":
        tensors["model.layers.3.embed_tokens.weight"] = own["model.embed_tokens.weight"].clone()
        tensors["model.layers.3.shared_head.head.weight"] = own["lm_head.weight"].clone()
    return told, {**own, **tensors}


def twin(
    family: str,
    layout: str,
    tensors: Tensors,
    below: Sequence[int],
    normed: bool = True,
    hands_on_normed: bool = True,
) -> list[torch.Tensor]:
    """What is said after the text and these tokens; every time over the whole text again."""
    model, names = target(family), NAMES[layout]
    assert model.loop is not None
    plus = 1.0 if family == "qwen3_next" else 0.0  # its norms keep what they differ by from 1
    eps = model.config.rms_norm_eps

    def norm(x: torch.Tensor, part: str) -> torch.Tensor:
        weight = plus + tensors[f"{names[part]}.weight"]
        return torch.stack([rms(row, weight, eps) for row in x])

    layer = own_layer(model)
    layer.load_state_dict(layer_tensors(family))
    states = states_of(model, (3,))[1 : len(TEXT)]
    if normed:
        states = model.loop.norm(states)
    tokens, found = TEXT[1:], []
    for token in (*below, None):
        embedded = model.embedded(torch.tensor(tokens))
        read = torch.cat([norm(embedded, "token"), norm(states, "state")], -1)
        h = (read @ tensors[f"{names['enter']}.weight"].T)[None]
        count = len(tokens)
        mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
        rotation = model.loop.rotary(h, torch.arange(count)[None])
        out = layer(h, attention_mask=mask, position_embeddings=rotation)
        out = (out[0] if isinstance(out, tuple) else out)[0]
        read = norm(out, "last")
        matrix = tensors.get("model.layers.3.shared_head.head.weight", model.head.weight)
        found.append(matrix @ read[-1])
        if token is not None:
            states = torch.cat([states, (read if hands_on_normed else out)[-1:]])
            tokens = [*tokens, token]
    return found


# By layout and family: whether the target's state is read normed, and the own one handed on so.
LAYOUTS = {
    ("deepseek", "deepseek_v3"): (True, False),
    ("deepseek", "qwen3"): (True, False),
    ("qwen", "qwen3_next"): (True, True),
    ("qwen", "qwen3"): (True, True),
    ("speculators", "qwen3_next"): (False, True),
}


def close(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> None:
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("layout", "family"), LAYOUTS)
@torch.inference_mode()
def test_the_head_says_what_the_published_code_says(
    layout: str, family: str, tmp_path: Path
) -> None:
    told, tensors = folder(family, layout)
    place = written(tmp_path, told, tensors)
    normed, handed = LAYOUTS[layout, family]
    wanted = twin(family, layout, tensors, BELOW, normed, handed)
    close(said(target(family), place, "mtp", BELOW), wanted)
    other = twin(family, layout, tensors, BELOW, normed, not handed)
    assert (other[1] - wanted[1]).abs().max() > 0.01


@pytest.mark.parametrize(("layout", "family"), list(LAYOUTS)[::2])
def test_greedy_tokens_are_those_of_plain_decoding(
    layout: str, family: str, tmp_path: Path
) -> None:
    place = written(tmp_path / "theirs", *folder(family, layout))
    check_greedy(target(family), "mtp", place)
    check_our_layout(target(family), place, "mtp", tmp_path / "ours")


@torch.inference_mode()
def test_what_state_it_reads_can_be_told_and_is_measured(tmp_path: Path) -> None:
    told, tensors = folder("qwen3", "qwen")
    place = written(tmp_path, told, tensors)
    model = target("qwen3")
    for way in ("normed", "stream"):
        head, kept = load_any_head(place, model, taps=way)
        rows = logits_of(HeadModel(head, kept, model), states_of(model, head.taps), BELOW)
        close(rows, twin("qwen3", "qwen", tensors, BELOW, way == "normed"))
    assert {*check_taps(place, model, TEXT)} == {"normed", "stream"}
    with pytest.raises(BadConfig, match=r"taps='input'.*normed, stream"):
        load_any_head(place, model, taps="input")


@torch.inference_mode()
def test_experts_may_be_in_one_matrix(tmp_path: Path) -> None:
    each, both = (
        said(target("qwen3_next"), written(tmp_path / kind, *made), "mtp", [7])
        for kind, made in (
            (kind, folder("qwen3_next", "speculators", kind)) for kind in ("each", "all")
        )
    )
    assert all(torch.equal(a, b) for a, b in zip(each, both, strict=True))


@torch.inference_mode()
def test_a_matrix_that_is_not_the_targets_is_the_heads_own(tmp_path: Path) -> None:
    told, tensors = folder("qwen3", "deepseek")
    head, _ = load_any_head(written(tmp_path / "copy", told, tensors), target("qwen3"))
    assert head.matrix is None
    tensors["model.layers.3.shared_head.head.weight"] = torch.randn(97, HIDDEN)
    place = written(tmp_path / "own", told, tensors)
    close(
        said(target("qwen3"), place, "mtp", BELOW),
        twin("qwen3", "deepseek", tensors, BELOW, True, False),
    )


WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "unknown": ("qwen", {"mtp.gate.weight": torch.ones(2)}, "has mtp.gate.weight"),
    "missing": ("qwen", {"mtp.norm.weight": None}, "lacks mtp.norm.weight"),
    "expert": (
        "qwen",
        {"mtp.layers.0.mlp.experts.2.up_proj.weight": None},
        "lacks mtp.layers.0.mlp.experts.2.up_proj.weight",
    ),
    "experts": (
        "qwen",
        {f"mtp.layers.0.mlp.experts.3.{part}_proj.weight": None for part in ("gate", "up", "down")},
        r"experts.gate_up_proj is \(3, ",
    ),
    "layers": ("qwen", {"mtp.layers.1.mlp.gate.weight": torch.ones(2)}, "has 2 MTP layers"),
    "more layers": ("deepseek", {"model.layers.4.eh_proj.weight": torch.ones(2)}, "has 2 MTP"),
    "depth": ("qwen", {"num_hidden_layers": 4}, "num_hidden_layers=4"),
    "width": ("qwen", {"hidden_size": 64}, "hidden_size=64"),
    "vocabulary": ("qwen", {"vocab_size": 98}, "vocab_size=98"),
    "shape": ("qwen", {"mtp.fc.weight": torch.ones(32, 32)}, r"mtp.fc.weight is \(32, 32\)"),
    "table": (
        "deepseek",
        {"model.layers.3.embed_tokens.weight": torch.randn(97, 32)},
        "layers.3.embed_tokens.weight is not the table",
    ),
    "model": (
        "qwen",
        {"model.embed_tokens.weight": torch.randn(97, 32)},
        "embed_tokens.weight is not the table",
    ),
    "extra": ("speculators", {"fc.weight": torch.ones(2)}, "has fc.weight"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_does_not_fit_is_refused_by_name(wrong: str, tmp_path: Path) -> None:
    layout, changes, message = WRONG[wrong]
    family = "qwen3" if layout == "deepseek" else "qwen3_next"
    told, tensors = folder(family, layout)
    change(told, tensors, changes)
    with pytest.raises(BadModel, match=message):
        load_any_head(written(tmp_path, told, tensors), target(family))


def test_a_layer_at_another_depth_is_of_another_model(tmp_path: Path) -> None:
    told, tensors = folder("qwen3", "deepseek")
    moved = {re.sub(r"layers\.3\.", "layers.5.", name): t for name, t in tensors.items()}
    with pytest.raises(BadModel, match=r"layers.5.eh_proj.weight: qwen3 has 3 layers"):
        load_any_head(written(tmp_path, told, moved), target("qwen3"))


def test_a_family_whose_layers_attend_otherwise_is_refused() -> None:
    model = Decoder(families.tiny("gemma2"), "gemma2")
    fields = model.config.to_dict()
    with pytest.raises(BadConfig, match=r"mtp:family='gemma2': .*softcap"):
        build_head("mtp", target_shape(model), {"family": fields})
    with pytest.raises(BadConfig, match="mtp:family='none'"):
        build_head("mtp", target_shape(model), {"family": {"model_type": "none"}})
