"""Logits equal to the last bit, whatever else is in the forward."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import foretell
from foretell import LM, wrap
from foretell.audit.bits import compare_steps
from foretell.cli import run
from foretell.core.tree import TokenTree
from foretell.core.types import Ask
from foretell.engine.cost_profile import model_identity
from foretell.errors import BadConfig, ForetellError, Unsupported
from foretell.models.decoder.decoder import Decoder
from foretell.models.decoder.exact import (
    ExactCache,
    ExactDecoder,
    exact_exp2,
    exact_tanh,
    in_pieces,
)
from foretell.models.decoder.packed import PackedLinear, pack_layers, without_rounding
from tests import tiny as small
from tests.models.decoder.families import tiny
from tests.models.decoder.test_families import PROMPTS, TREE, answer, stock
from tests.native.machines import no_library

ODD = {"hidden_size": 36, "intermediate_size": 51, "head_dim": 14}  # no multiples of any vector


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def exact(family: str, dtype: torch.dtype = torch.float32, **more: object) -> ExactDecoder:
    hf = tiny(family, dtype=dtype, **more)
    pack_layers(hf, "int8")
    return ExactDecoder(hf, family)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_rows_of_fused_layers_do_not_depend_on_the_forward(family: str, dtype: torch.dtype) -> None:
    model = exact(family, dtype, **ODD)
    assert model.fused
    assert compare_steps(model, 8, max_length=40) == (8, "")


@pytest.mark.parametrize(
    ("family", "format", "count"),
    [("llama", "int8", 2), ("llama", "int4", 1), ("gemma2", "int8", 1), ("gemma2", "int4", 1)],
)
def test_nor_without_the_c_library(family: str, format: str, count: int, threads: None) -> None:
    torch.set_num_threads(count)
    steps = 1 if count > 1 else 4  # several are slow where other work holds a core
    hf = tiny(family, dtype=torch.bfloat16)
    pack_layers(hf, format)
    with no_library():
        assert compare_steps(ExactDecoder(hf, family), steps, max_length=40) == (steps, "")


def test_nor_in_4_bits(threads: None) -> None:
    hf = tiny("llama", dtype=torch.bfloat16, **ODD)
    pack_layers(hf, "int4")
    assert compare_steps(ExactDecoder(hf, "llama"), 6, max_length=40) == (6, "")
    torch.set_num_threads(2)
    assert compare_steps(ExactDecoder(hf, "llama"), 1, max_length=40) == (1, "")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "gpt_neox"])
def test_nor_do_rows_of_others(family: str, dtype: torch.dtype) -> None:
    model = exact(family, dtype)
    assert not model.fused
    assert compare_steps(model, 4, max_length=40) == (4, "")


@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "gpt_oss", "deepseek_v3"]
)
def test_what_is_computed_is_the_same_model(family: str) -> None:
    """With activations as they are, so that nothing but attention and norms is compared."""
    model = exact(family)
    with without_rounding():
        logits = answer(model, model.cache(), Ask(TREE), PROMPTS[1], chunk=4).logits
    for node in range(len(TREE)):
        with without_rounding():
            theirs = stock(model.hf, [*PROMPTS[1], *TREE.tokens_to(node)])[-1]
        assert (logits[node] - theirs).abs().max() <= 3e-5 * theirs.abs().max()


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 40_000), st.integers(0, 40_000), st.sampled_from([torch.float32, torch.bfloat16])
)
def test_elements_do_not_depend_on_their_place(count: int, start: int, dtype: torch.dtype) -> None:
    x = torch.linspace(-9, 9, 41_111).to(dtype)
    for function in (torch.nn.functional.silu, torch.exp2):
        whole = in_pieces(function, x)
        part = slice(start, start + count)
        assert torch.equal(in_pieces(function, x[part].clone()), whole[part])


def test_elementwise_functions_are_right() -> None:
    x = torch.linspace(-30, 30, 1001, dtype=torch.float64)
    assert torch.allclose(exact_exp2(x), torch.exp2(x), rtol=1e-14)
    assert torch.allclose(exact_tanh(x), torch.tanh(x), rtol=1e-12, atol=1e-15)


@torch.inference_mode()
def test_caches_grow_fork_and_commit_to_the_same_bits() -> None:
    model = exact("llama", max_position_embeddings=400)
    text = [
        *((7 * i) % 97 for i in range(300)),
        TREE.tokens[0],
    ]  # more than a cache has room for at first
    cache = model.cache()
    assert isinstance(cache, ExactCache)
    whole = answer(model, cache, Ask(TREE), text, chunk=64).logits
    twin = cache.fork()
    ahead = answer(model, twin, Ask(TokenTree(TREE.tokens[1])), [*text, TREE.tokens[1]]).logits
    assert torch.equal(ahead[0], whole[1])
    assert torch.equal(answer(model, cache, Ask(TREE), text).logits, whole[: len(TREE)])


def test_generation_is_the_same_token_for_token() -> None:
    hf, draft = tiny("llama", dtype=torch.bfloat16), tiny("llama", noise=0.03, dtype=torch.bfloat16)
    pack_layers(hf, "int8"), pack_layers(draft, "int8")
    lm = wrap(hf, draft=draft, name="tiny", exact_bits=True)
    plain = [lm.generate(p, "plain", max_new_tokens=24).tokens for p in PROMPTS]
    for method in ("ngram:nodes=6", "token-recycling:nodes=8", "draft:nodes=6", "suffix", "auto"):
        outs = lm.generate(PROMPTS, method, max_new_tokens=24)
        assert [out.tokens for out in outs] == plain, method
        same = [
            lm.generate(p, method, max_new_tokens=24, temperature=1.0, seed=3).tokens
            for p in PROMPTS
        ]
        assert len(same[0]) == 24


def test_load_builds_it(tmp_path: Path) -> None:
    path = small.save(small.llama(), tmp_path / "tiny")
    lm: LM = foretell.load(path, dtype="int8", exact_bits=True, backend="torch")
    model = lm.models["target"]
    assert isinstance(model, ExactDecoder) and model.exact_bits and model.backend is None
    assert any(isinstance(m, PackedLinear) for m in model.hf.modules())
    assert compare_steps(model, 3, max_length=40) == (3, "")
    ordinary = foretell.load(path, dtype="int8", backend="torch").models["target"]
    assert isinstance(ordinary, Decoder) and not ordinary.exact_bits
    assert model_identity(model) != model_identity(ordinary)  # their costs differ


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "float32"}, "dtype='float32' with exact_bits=True: must be auto, bfloat16, "),
        (
            {"backend": "openvino"},
            "backend='openvino' with exact_bits=True: must be auto, native or torch",
        ),
        ({"device": "meta", "dtype": "int8"}, "needs a CPU"),
    ],
)
def test_options_that_exclude_each_other_are_refused(options: dict[str, str], words: str) -> None:
    with pytest.raises(ForetellError, match=words):
        foretell.load("demo", exact_bits=True, **options)  # type: ignore[arg-type]


def test_models_that_cannot_are_refused() -> None:
    with pytest.raises(
        Unsupported,
        match=r"exact_bits=True cannot run on nanochat.*needs layers whose loop is ours",
    ):
        exact("nanochat")
    with pytest.raises(Unsupported, match="needs linear layers of 8 or 4 bits"):
        wrap(tiny("llama"), name="tiny", exact_bits=True)
    with pytest.raises(Unsupported, match="needs heads of at most 512"):
        exact("llama", head_dim=514)
    with pytest.raises(BadConfig, match="exact_bits"):
        foretell.load("demo", exact_bits=True, dtype="float16")


def test_the_command_line_takes_it(capsys: pytest.CaptureFixture[str]) -> None:
    line = [
        "generate",
        "def add(",
        "--max-new-tokens",
        "6",
        "--method",
        "ngram",
        "--exact-bits",
        "--json",
    ]
    assert run(line) == 0
    tokens = json.loads(capsys.readouterr().out)["tokens"]
    assert (
        tokens
        == foretell.load("demo", exact_bits=True)
        .generate("def add(", "plain", max_new_tokens=6)
        .tokens
    )
    assert run([*line, "--dtype", "float32"]) == 2
    assert (
        "dtype='float32' with exact_bits=True: must be auto, bfloat16, int8 or int4"
        in capsys.readouterr().err
    )
