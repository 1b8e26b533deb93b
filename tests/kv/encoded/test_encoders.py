"""Encoders of contexts against loops over transformers' own layers, and the folders they lie in."""

from __future__ import annotations

import copy
import json
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch

from foretell.errors import BadModel, Unsupported
from foretell.kv.encoded.encoders import average_groups, compressor_of, save_compressor
from foretell.models.decoder.decoder import Decoder
from tests.kv.encoded.encoders import folder, made
from tests.kv.policies import target

IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


def rotated(x: torch.Tensor, place: int, width: int) -> torch.Tensor:
    """One head's query or key (D,) turned to a place, by pairs."""
    out = x.clone()
    for i in range(width // 2):
        angle = torch.tensor(place * 10_000 ** (-2 * i / width), dtype=x.dtype)
        a, b = x[i], x[i + width // 2]
        out[i] = a * angle.cos() - b * angle.sin()
        out[i + width // 2] = b * angle.cos() + a * angle.sin()
    return out


def layer_by_loops(
    layer: Any, asking: torch.Tensor, read: torch.Tensor, causal: bool
) -> torch.Tensor:
    """Queries at places 0, 1, ... of states (m, d) to the keys of states (n, d)."""
    part = layer.self_attn
    width, shared = part.head_dim, part.num_key_value_groups
    normed, keys_of = layer.input_layernorm(asking), layer.input_layernorm(read)
    outs = []
    for place, state in enumerate(normed):
        q = part.q_proj(state).view(-1, width)
        heads = []
        for head in range(len(q)):
            turned = rotated(q[head], place, width)
            seen = range(place + 1) if causal else range(len(read))
            scores, values = [], []
            for other in seen:
                key = part.k_proj(keys_of[other]).view(-1, width)[head // shared]
                scores.append(turned @ rotated(key, other, width) / width**0.5)
                values.append(part.v_proj(keys_of[other]).view(-1, width)[head // shared])
            heads.append(torch.stack(scores).softmax(0) @ torch.stack(values))
        outs.append(part.o_proj(torch.cat(heads)))
    h = asking + torch.stack(outs)
    out: torch.Tensor = h + layer.mlp(layer.post_attention_layernorm(h))
    return out


def by_loops(encoder: Any, ids: list[int], slip: str = "") -> torch.Tensor:
    """Rows of arc-encoder, with its mark."""
    h = encoder.body.get_input_embeddings()(torch.tensor(ids))
    first, last = encoder.body.layers
    h = layer_by_loops(first, h, h, causal=slip == "causal")
    count = ceil(len(ids) / encoder.shape.ratio)
    base, more = divmod(len(ids), count)
    sizes = [base + (i < more) for i in range(count)]
    pooled = torch.stack([part.mean(0) for part in h.split(sizes)])
    h = layer_by_loops(last, pooled, pooled if slip == "keys" else h, causal=False)
    return torch.cat([encoder.wide(encoder.narrow(h)), encoder.go_on[None]])


@torch.inference_mode()
@pytest.mark.parametrize("ratio", [1, 3, 4, 20])
def test_arc_encoder_is_what_loops_say(ratio: int) -> None:
    encoder: Any = made(target(dtype=torch.float64), "arc-encoder", layers=2, ratio=ratio)
    rows = encoder.encode_rows(IDS)
    assert len(rows) == ceil(len(IDS) / ratio) + 1 == encoder.row_count(len(IDS))
    assert torch.allclose(rows, by_loops(encoder, IDS), atol=1e-4)
    for slip in ("causal", "keys") if ratio > 1 else ("causal",):
        assert not torch.allclose(rows, by_loops(encoder, IDS, slip), atol=1e-3)


@torch.inference_mode()
def test_at_a_ratio_of_1_nothing_is_pooled() -> None:
    """Then rows are what the last layer leaves of every token; without layers, the embeddings."""
    model = target(dtype=torch.float64)
    encoder: Any = made(model, "arc-encoder", layers=2, ratio=1)
    h = encoder.embed_ids(torch.tensor([IDS]))[0]
    for layer in encoder.body.layers:
        h = layer_by_loops(layer, h, h, causal=False)
    assert torch.allclose(encoder.encode_ids(torch.tensor([IDS]))[0], h, atol=1e-4)
    model = target()
    nothing: Any = made(model, "arc-encoder", layers=0, ratio=1, marks=False)
    for matrix in (nothing.narrow, nothing.wide):
        matrix.weight.copy_(torch.eye(nothing.hidden))
    assert torch.allclose(nothing.encode_rows(IDS), model.embed(IDS), atol=1e-6)


@torch.inference_mode()
def test_lclm_is_what_loops_say() -> None:
    encoder: Any = made(target(dtype=torch.float64), "lclm", layers=1, ratio=2, window=4)
    want = [encoder.start]
    for window in (IDS[:4], IDS[4:8], IDS[8:]):
        h = encoder.body.get_input_embeddings()(torch.tensor(window))
        h = encoder.body.norm(layer_by_loops(encoder.body.layers[0], h, h, causal=True))
        for i in range(0, len(window), 2):
            mean = h[i : i + 2].mean(0)
            mean = mean / (mean.square().mean() + 1e-6).sqrt() * encoder.norm.weight
            want.append(encoder.second(torch.nn.functional.gelu(encoder.first(mean))))
    want.append(encoder.end)
    rows = encoder.encode_rows(IDS)
    assert len(rows) == 2 + 2 + 2 + 2 == encoder.row_count(len(IDS))
    assert torch.allclose(rows, torch.stack(want), atol=1e-4)


@torch.inference_mode()
def test_editing_a_window_changes_its_rows_only() -> None:
    encoder = made(target(), "lclm", layers=2, ratio=2, window=4)
    before = encoder.encode_rows(IDS)
    for place in range(len(IDS)):
        edited = list(IDS)
        edited[place] += 1
        changed = (encoder.encode_rows(edited) != before).any(1).nonzero().flatten().tolist()
        window = place // 4
        ends = 1 + 2 * window, min(1 + 2 * (window + 1), len(before) - 1)
        assert changed and {*changed} <= {*range(*ends)}
        assert int(encoder.row_places(len(IDS))[place]) in changed
    whole = made(target(), "arc-encoder", layers=2)
    other = whole.encode_rows([IDS[0] + 1, *IDS[1:]]) != whole.encode_rows(IDS)
    assert other[:-1].any(1).all(), "there every row has seen all of a context"


def test_contexts_side_by_side_are_those_apart() -> None:
    for kind in ("arc-encoder", "lclm"):
        encoder = made(target(), kind, layers=2)
        both = encoder(torch.tensor([IDS, IDS[::-1]]))
        assert torch.allclose(both[0], encoder.encode_rows(IDS), atol=1e-5)
        assert torch.allclose(both[1], encoder.encode_rows(IDS[::-1]), atol=1e-5)


def test_means_are_of_those_with_the_same_place() -> None:
    h = torch.arange(10.0).view(1, 5, 2)
    got = average_groups(h, torch.tensor([0, 0, 1, 1, 1]))
    assert got.tolist() == [[[1.0, 2.0], [6.0, 7.0]]]


@pytest.mark.parametrize("kind", ["arc-encoder", "lclm"])
def test_a_folder_gives_what_was_saved_once(kind: str, tmp_path: Path) -> None:
    model = target()
    encoder = made(model, kind)
    save_compressor(encoder, tmp_path, model, {})
    found = compressor_of(model, "kv", kind, str(tmp_path))
    assert found.shape == encoder.shape
    for name, weight in found.state_dict().items():
        assert torch.equal(weight, encoder.state_dict()[name].bfloat16().float())
    assert compressor_of(model, "kv", kind, str(tmp_path)) is found
    near = torch.cosine_similarity(found.encode_rows(IDS), encoder.encode_rows(IDS), dim=1)
    assert float(near.min()) > 0.99


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    model = target()
    kind = "arc-encoder"
    given = folder(model, kind)
    with pytest.raises(Unsupported, match="arc-encoder:folder=FOLDER"):
        compressor_of(model, "kv", kind, "")
    with pytest.raises(BadModel, match="for kv=arc-encoder, not for kv=lclm"):
        compressor_of(model, "kv", "lclm", given)
    with pytest.raises(BadModel, match="is no compressor's"):
        compressor_of(model, "kv", kind, str(tmp_path))
    other = Decoder(copy.deepcopy(model.hf), "other")
    with torch.no_grad():
        other.loop.norm.weight += 0.5  # type: ignore[union-attr,operator]
    with pytest.raises(BadModel, match="other weights than those of other"):
        compressor_of(other, "kv", kind, given)
    config = json.loads((Path(given) / "config.json").read_text())
    weights = (Path(given) / "model.safetensors").read_bytes()

    def damaged(**more: Any) -> str:
        (tmp_path / "config.json").write_text(json.dumps({**config, **more}))
        return str(tmp_path)

    cases = [
        ({"hidden": 8}, "width 8"),
        ({"schema": "x"}, "schema 'x'"),
        ({"ratio": 0}, "is damaged"),
        ({"body": {}}, "is damaged"),
        ({"width": 5}, "narrow.weight is damaged"),
        ({"marks": False}, "has go_on"),
    ]
    (tmp_path / "model.safetensors").write_bytes(weights)
    for more, said in cases:
        with pytest.raises(BadModel, match=said) as raised:
            compressor_of(model, "kv", kind, damaged(**more))
        assert "\n" not in str(raised.value)
    damaged()
    (tmp_path / "model.safetensors").write_bytes(weights[:100])
    with pytest.raises(BadModel, match="cannot be read"):
        compressor_of(model, "kv", kind, str(tmp_path))
