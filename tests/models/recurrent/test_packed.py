"""Recurrent layers whose products are packed: what is packed, and that drafts change nothing."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import foretell
from foretell import wrap
from foretell.core.request import Request
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Sampling
from foretell.errors import ForetellError
from foretell.models.decoder.packed import (
    PackedEmbedding,
    PackedLinear,
    is_as_near,
    widen_rest,
    without_rounding,
)
from foretell.models.decoder.packed_experts import PackedExperts
from foretell.models.decoder.smoothing import round_layers
from foretell.models.recurrent.recurrent import Recurrent, recurrent_adapter
from foretell.native import library
from tests import laws
from tests import tiny as small
from tests.cache.users import run
from tests.models.decoder.families import VOCAB, tiny
from tests.models.gguf.cases import CASES, model_of
from tests.models.gguf.files import write_file
from tests.models.recurrent.test_recurrent import (
    PROMPTS,
    answer,
    every_family,
    random_tree,
    remembered,
)

NEW = 12
METHODS = ("plain", "suffix:nodes=6", "ngram:nodes=6", "draft:nodes=6")


def rounded(family: str, dtype: str, noise: float = 0.0) -> Recurrent:
    """The family's tiny model as `load` makes it of a folder in bfloat16."""
    hf = tiny(family, noise, dtype=torch.bfloat16)
    assert round_layers(hf, dtype)
    model = recurrent_adapter(hf, family, False, dtype, "auto")
    assert model is not None
    return model


@cache
def packed(family: str, dtype: str = "int8") -> Recurrent:
    return rounded(family, dtype)


@torch.inference_mode()
def stock_rows(model: Recurrent, tokens: list[int]) -> torch.Tensor:
    return model.hf(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


# --- what is packed


@every_family
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_all_matrices_are_packed_and_the_rest_is_float32(family: str, dtype: str) -> None:
    model = packed(family, dtype)
    names = {name.rpartition(".")[2]: m for name, m in model.hf.named_modules()}
    plain = {name for name, module in names.items() if type(module) is nn.Linear}
    assert plain <= {"dt_proj"} and model.matrices == dtype and not model.exact_bits
    assert {part.dtype for part in model.hf.parameters()} == {torch.float32} == {model.dtype}
    assert isinstance(model.hf.get_input_embeddings(), PackedEmbedding)
    assert isinstance(model.head, PackedLinear) and model.head.packed.name == "int8"
    if "x_proj" in names:
        assert names["x_proj"].packed.name == "int8"
    assert not hasattr(names.get("experts"), "gate_up_proj")


@every_family
def test_rows_are_near_those_of_the_weights(family: str) -> None:
    """As near as the same matrices are by transformers' own forward."""
    model, tokens = packed(family), PROMPTS[1]
    wide = tiny(family, dtype=torch.bfloat16).float()
    with torch.inference_mode():
        want = wide(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    tree = TokenTree(tokens[0]).chain(tokens[1:])
    rows = answer(model, model.cache(), Ask(tree), tokens[:1]).logits
    assert is_as_near(rows, stock_rows(model, tokens), lambda: want, most_rows=True)
    distance = (rows - want).norm(dim=-1) / want.norm(dim=-1)
    # Of experts another one may be chosen, in tiny models often.
    assert 0 < float(distance.median()) < (0.5 if model._has_experts() else 0.1)


# --- drafts: products without the rounding of activations, which is no matter of states


@every_family
def test_rows_of_a_tree_are_those_of_its_paths(family: str) -> None:
    model, prompt = packed(family), PROMPTS[1]
    tree = random_tree(random.Random(1), prompt[-1], 5, True)
    with without_rounding():
        rows = answer(model, model.cache(), Ask(tree), prompt, 5).logits
        for node in range(len(tree)):
            row = stock_rows(model, prompt + tree.tokens_to(node))[-1]
            assert float((row - rows[node]).abs().max()) <= 2e-4, node


@every_family
def test_greedy_texts_are_those_of_plain_decoding(family: str) -> None:
    models: Any = {"target": packed(family), "draft": rounded(family, "int4", noise=0.03)}
    with without_rounding():
        requests = [
            Request(PROMPTS[0], laws.build(spec), Sampling(max_new_tokens=NEW), name=spec)
            for spec in METHODS
        ]
        lives = run(models, *requests)
    texts = [live.ctx.output for live in lives]
    assert texts == [texts[0]] * len(METHODS) and len(texts[0]) == NEW
    assert sum(live.ctx.stats.accepted for live in lives) > 0


@every_family
def test_rejected_drafts_leave_the_memory_bit_for_bit(family: str) -> None:
    model, prompt = packed(family), PROMPTS[0]
    held = model.cache()
    answer(model, held, Ask(TokenTree(prompt[-2])), prompt[:-1])
    held.commit(prompt)
    before = [part.clone() for part in remembered(held)]
    answer(model, held, Ask(TokenTree(prompt[-1]).chain([1, 2]).chain([4], at=1)), prompt)
    held.commit(prompt)
    assert all(torch.equal(a, b) for a, b in zip(before, remembered(held), strict=True))


def test_an_expert_s_rows_depend_on_no_other_row() -> None:
    """Of experts that are no multiple of 16 wide, too."""
    for width in (24, 32):
        hf: Any = tiny("lfm2_moe", moe_intermediate_size=width)
        round_layers(hf, "int8")
        experts = next(part for part in hf.modules() if isinstance(part, PackedExperts))
        generator = torch.Generator().manual_seed(0)
        states = torch.randn(5, 32, generator=generator)
        chosen = torch.tensor([[0, 3], [1, 0], [3, 2], [2, 1], [0, 1]])
        weights = torch.rand(5, 2, generator=generator)
        together = experts(states, chosen, weights)
        for row in range(5):
            one = slice(row, row + 1)
            alone = experts(states[one], chosen[one], weights[one])
            assert torch.equal(alone[0], together[row])


# --- embeddings of their own


def test_embeddings_keep_their_numbers_and_bytes() -> None:
    hf: Any = tiny("lfm2", dtype=torch.bfloat16, vocab_size=96)
    table = hf.get_input_embeddings().weight.detach().clone()
    round_layers(hf, "int8")
    widen_rest(hf)
    ids = torch.arange(96)
    assert torch.equal(hf.get_input_embeddings()(ids), table.float())
    model = Recurrent(hf, "lfm2")
    packed_parts = [part.packed.nbytes for part in hf.modules() if isinstance(part, PackedLinear)]
    parts = [*hf.parameters(), *hf.buffers()]
    rest = sum({part.data_ptr(): part.nbytes for part in parts if part.numel()}.values())
    assert model.weight_bytes == sum(packed_parts) + table.nbytes + rest


# --- folders and files


def test_folders_load_in_8_and_4_bits(tmp_path: Path) -> None:
    for family, dtype in (("mamba", "int4"), ("jamba", "int8"), ("lfm2_moe", "int4")):
        folder = small.save(tiny(family, vocab_size=len(small.tokenizer())), tmp_path / family)
        lm = foretell.load(folder, dtype=dtype)
        model = lm.models["target"]
        assert isinstance(model, Recurrent) and model.matrices == dtype
        assert len(lm.generate("def add(a, b):", "ngram", max_new_tokens=6).tokens) == 6


def refusal(path: Path, **options: Any) -> str:
    with pytest.raises(ForetellError) as caught:
        foretell.load(path, **options)
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_equal_bits_and_other_backends_are_refused_in_a_line(tmp_path: Path) -> None:
    folder = small.save(tiny("mamba2", vocab_size=len(small.tokenizer())), tmp_path / "mamba2")
    for options in ({"exact_bits": True}, {"backend": "onnxruntime"}):
        assert "without recurrent layers" in refusal(folder, dtype="int8", **options)


def test_a_packed_layer_among_plain_ones() -> None:
    hf: Any = tiny("mamba2")
    mixer = hf.backbone.layers[0].mixer
    mixer.in_proj = PackedLinear.of(mixer.in_proj, "int8")
    lm = wrap(hf, name="tiny")
    assert lm.models["target"].matrices == "int8" and lm.models["target"].vocab == VOCAB


def file_of(name: str, path: Path) -> Path:
    case = CASES[name]
    words = len(small.tokenizer())
    sizes: dict[str, Any] = {"vocab_size": words, "intermediate_size": 64}
    if name == "lfm2moe":
        sizes["moe_intermediate_size"] = 32
    keys = {key: words for key in ("vocab_size",) if key in case.keys}
    if name == "lfm2moe":
        keys["expert_feed_forward_length"] = 32
    hf = model_of(type(case)(case.architecture, case.model_type, {**case.fields, **sizes}))
    return write_file(case, hf, path / f"{name}.gguf", keys, form="Q8_0", coder=True)


@pytest.mark.skipif(not library.is_available(), reason="the C library is not built")
@pytest.mark.parametrize("name", ["lfm2", "lfm2moe"])
def test_files_run_in_their_own_formats(name: str, tmp_path: Path) -> None:
    path = file_of(name, tmp_path)
    lm = foretell.load(path)
    model = lm.models["target"]
    assert isinstance(model, Recurrent) and model.dtype == torch.float32
    kinds = {m.packed.name for m in model.hf.modules() if isinstance(m, PackedLinear)}
    assert "int8" in kinds and not any(type(part) is nn.Linear for part in model.hf.modules())
    unpacked = foretell.load(path, backend="torch", dtype="float32")
    tokens = list(range(3, 30))
    with without_rounding(), torch.inference_mode():
        rows = answer(model, model.cache(), Ask(TokenTree(5)), [*tokens, 5]).logits
        want = unpacked.models["target"].hf(torch.tensor([[*tokens, 5]])).logits[0, -1:]
    assert float((rows - want).norm() / want.norm()) < 1e-3
    assert len(lm.generate("def add(a, b):", "ngram", max_new_tokens=6).tokens) == 6
    for options in ({"backend": "native"}, {"exact_bits": True}):
        line = refusal(path, **options)
        assert "without recurrent layers" in line and str(next(iter(options))) in line


@pytest.mark.skipif(not library.is_available(), reason="the C library is not built")
def test_bfloat16_is_packed_too(tmp_path: Path) -> None:
    """As quick rows want it; who asks for torch has torch alone."""
    hf = tiny("mamba", dtype=torch.bfloat16, vocab_size=len(small.tokenizer()))
    folder = small.save(hf, tmp_path / "mamba")
    model = foretell.load(folder).models["target"]
    assert isinstance(model, Recurrent) and model.narrow
    assert (model.matrices, model.dtype) == ("bfloat16", torch.float32)
    by_torch = foretell.load(folder, backend="torch").models["target"]
    assert isinstance(by_torch, Recurrent) and by_torch.dtype == torch.bfloat16
    tokens = PROMPTS[1]
    with torch.inference_mode():
        want = hf.float()(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
    ours, theirs = (one.score(tokens)[0].float() for one in (model, by_torch))
    assert float((ours - want).norm()) <= float((theirs - want).norm())
