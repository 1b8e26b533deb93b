"""Models whose rotated keys are projected: the same rows at full rank, and who computes them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import foretell
from foretell.drafters.heads import attach
from foretell.drafters.heads.networks.folder import target_shape
from foretell.errors import BadModel, Unsupported
from foretell.models.decoder.decoder import Decoder
from foretell.models.decoder.fused import fused_blocks
from foretell.models.decoder.head_merging import (
    FIELD,
    commuting_basis,
    gather_products,
    leading_basis,
    pooled_basis,
)
from foretell.models.decoder.loop import StockBlock
from foretell.ops import assets
from foretell.ops.fingerprint import norm_mark
from foretell.train.caches.kv_heads import compress_heads
from tests import tiny
from tests.models.decoder import families

TEXTS = [[(7 * i * j + 3 + i) % 97 for i in range(30)] for j in range(1, 4)]


def made(family: str, merge: int, make: Any = leading_basis, fold: bool = False) -> tuple[Any, Any]:
    """A tiny model of float64, and what becomes of it."""
    hf = families.tiny(family, dtype=torch.float64)
    products, _ = gather_products(Decoder(copy.deepcopy(hf), family, fused_blocks), TEXTS, merge)
    return hf, compress_heads(hf, make(products, merge), fold)


def rows_of(hf: Any) -> torch.Tensor:
    with torch.inference_mode():
        rows: torch.Tensor = hf(torch.tensor(TEXTS[:1])).logits[0]
    return rows


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_a_group_of_one_head_is_a_change_of_basis(family: str) -> None:
    """With biases, norms of queries and keys, and windows."""
    before, after = made(family, 1)
    torch.testing.assert_close(rows_of(after), rows_of(before), rtol=1e-9, atol=1e-9)
    decoder = Decoder(after, family, fused_blocks)
    assert decoder.fused and decoder.layout == Decoder(before, family).layout
    with torch.no_grad():
        after.model.layers[1].self_attn.key_basis[0, 0, 0, 0] += 0.1
    assert not torch.allclose(rows_of(after), rows_of(before), atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_merged_heads_are_computed_alike_by_all_of_torchs_ways(family: str) -> None:
    """By transformers' forward, the layers one by one and fused ones; with half the rows' bytes."""
    before, after = made(family, 2)
    fused, stock = Decoder(copy.deepcopy(after), family, fused_blocks), Decoder(after, family)
    assert fused.fused and fused.loop and stock.loop
    assert all(isinstance(block, StockBlock) for block in stock.loop.blocks)
    for decoder in (fused, stock):
        with torch.inference_mode():
            decoder.self_test()
        torch.testing.assert_close(
            decoder.score(TEXTS[0])[0], rows_of(after)[-1], atol=1e-5, rtol=0
        )
    whole = Decoder(before, family).cache()
    assert 2 * fused.cache().bytes == whole.bytes
    assert not torch.allclose(rows_of(after), rows_of(before), atol=0.01)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("make", [commuting_basis, pooled_basis])
def test_a_basis_that_commutes_is_folded_into_an_ordinary_model(family: str, make: Any) -> None:
    _, projected = made(family, 2, make)
    _, folded = made(family, 2, make, fold=True)
    torch.testing.assert_close(rows_of(folded), rows_of(projected), rtol=1e-9, atol=1e-9)
    assert type(folded) is type(families.tiny(family)) and not hasattr(folded.config, FIELD)
    assert Decoder(folded, family).layout == ((1, 8, 8),) * 3


def test_pooled_heads_are_the_means_of_matrices() -> None:
    before, folded = made("llama", 2, pooled_basis, fold=True)
    twin = copy.deepcopy(before)
    with torch.no_grad():
        for layer in twin.model.layers:
            for part in (layer.self_attn.k_proj, layer.self_attn.v_proj):
                heads = part.weight.view(2, 8, -1)
                heads[:] = heads.mean(0, keepdim=True).clone()
    torch.testing.assert_close(rows_of(folded), rows_of(twin), rtol=1e-9, atol=1e-9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    hf = tiny.llama(hidden_size=64, num_hidden_layers=1, num_attention_heads=2)
    products, _ = gather_products(Decoder(copy.deepcopy(hf), "tiny", fused_blocks), TEXTS, 2)
    return tiny.save(
        compress_heads(hf, leading_basis(products, 2), False),
        tmp_path_factory.mktemp("merged") / "model",
    )


def test_a_folder_is_loaded_by_its_path_and_backends_take_it_or_say_why(folder: Path) -> None:
    lm = foretell.load(folder, backend="torch")
    hf: Any = lm.models["target"].hf  # type: ignore[attr-defined]
    kept = load_file(folder / "model.safetensors")
    assert torch.equal(hf.model.layers[0].self_attn.key_basis, kept[f"{START}0.{BASIS}"])
    assert lm.models["target"].layout == ((1, 32, 32),)
    said = lm.generate(TEXTS[0], max_new_tokens=12, method="plain").tokens
    fast = foretell.load(folder, backend="openvino")
    assert fast.models["target"].usual_backend == "openvino"
    assert fast.generate(TEXTS[0], max_new_tokens=12, method="plain").tokens == said
    drafted = lm.generate(TEXTS[0], max_new_tokens=12, method="ngram")
    assert drafted.tokens == said
    for backend, dtype in (("native", "bfloat16"), ("onnxruntime", "int8")):
        with pytest.raises(Unsupported, match="rotated keys are projected to fewer heads"):
            foretell.load(folder, backend=backend, dtype=dtype)
    exact = foretell.load(folder, dtype="int8", exact_bits=True)
    assert len(exact.generate(TEXTS[0], max_new_tokens=3, method="plain").tokens) == 3
    # It is known by its last norm, in exact bits too.
    assert norm_mark(exact.models["target"]) == norm_mark(lm.models["target"])


def test_heads_that_draft_for_the_model_before_do_not_draft_for_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last norm is that of the model before, by which heads that ship are found."""
    target: Any = foretell.load(folder, backend="torch").models["target"]
    monkeypatch.setattr(assets, "model_folders", lambda: [tmp_path])
    (tmp_path / "one").mkdir()
    for kv_heads, found in ((2, None), (1, tmp_path / "one")):
        config = {"kind": "eagle3", "target": {"kv_heads": kv_heads}}
        config["fingerprint"] = {"norm": norm_mark(target)}
        (tmp_path / "one" / "config.json").write_text(json.dumps(config))
        assert attach.shipped_head(target, "eagle3") == found
    with pytest.raises(Unsupported, match="not projected after their rotation"):
        target_shape(target)


def test_keys_that_cannot_be_moved_are_not(folder: Path) -> None:
    lm = foretell.load(folder, backend="torch")
    out = lm.generate(TEXTS[0] * 2, max_new_tokens=4, kv="snapkv:budget=40", method="plain")
    assert len(out.tokens) == 4
    with pytest.raises(Unsupported, match="rotations"):
        lm.generate(TEXTS[0], max_new_tokens=4, kv="streaming-llm:window=10,sinks=2")


START, BASIS = "model.layers.", "self_attn.key_basis"


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ({"heads": 3}, "cannot be loaded"),  # not those of its weights
        ({"heads": "two"}, "must give a multiple of 1 heads"),
        ({}, "must give a multiple of 1 heads"),
        (None, "cannot be loaded"),  # the weights have what the configuration does not know
    ],
)
def test_other_weights_are_refused_in_a_line(
    folder: Path, tmp_path: Path, field: Any, words: str
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for file in folder.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    config = json.loads((other / "config.json").read_text())
    config[FIELD] = field
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadModel) as caught:
        foretell.load(other, backend="torch")
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_folder_without_its_bases_is_refused(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for file in folder.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    weights = load_file(other / "model.safetensors")
    del weights[f"{START}0.{BASIS}"]
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(BadModel, match="key_basis"):
        foretell.load(other, backend="torch")
