"""Models in .gguf files as they lie there: the file's own numbers, in the C library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf as lib
import pytest
import torch
from transformers import AutoModelForCausalLM, GgufConfig

import foretell
from foretell.errors import ForetellError, Unsupported
from foretell.models.decoder.decoder import Decoder
from foretell.models.gguf import gguf
from foretell.native import library
from foretell.native.gguf_blocks import TYPES
from foretell.native.packing import unpack_matrix
from tests import tiny

pytestmark = pytest.mark.skipif(not library.is_available(), reason="the C library is not built")

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
KINDS = ("Q8_0", "Q4_0", "Q5_1", "F16")
TEXTS = ("def add(a, b):", "return x")


def file_of(kind: str, folder: Path, **more: Any) -> Path:
    return tiny.gguf(tiny.llama(**SIZES), folder / "model.gguf", kind=kind, **more)


def rounded(weight: torch.Tensor, kind: str) -> torch.Tensor:
    """What the format makes of a matrix."""
    form = lib.GGMLQuantizationType[kind]
    numbers = lib.dequantize(lib.quantize(weight.detach().float().numpy(), form), form)
    return torch.from_numpy(numbers)


@pytest.mark.parametrize("kind", (*KINDS, "Q4_1", "Q5_0", "BF16", "MXFP4"))
def test_matrices_keep_the_file_s_numbers(kind: str, tmp_path: Path) -> None:
    found: Any = gguf.read_packed(file_of(kind, tmp_path))
    wanted: Any = tiny.llama(**SIZES)
    for ours, theirs in zip(found.model.layers, wanted.model.layers, strict=True):
        for place in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.down_proj"):
            weight = unpack_matrix(ours.get_submodule(place).packed).float()
            assert torch.equal(weight, rounded(theirs.get_submodule(place).weight, kind)), place
    head = rounded(wanted.lm_head.weight, kind)
    assert torch.equal(unpack_matrix(found.lm_head.packed).float(), head)
    rows = found.get_input_embeddings()(torch.tensor([3, 1]))
    table = rounded(wanted.model.embed_tokens.weight, kind)
    assert torch.equal(rows, table[[3, 1]].to(torch.bfloat16))


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_runs_as_it_is(kind: str, tmp_path: Path) -> None:
    lm = foretell.load(file_of(kind, tmp_path), exact_bits=True)
    target = lm.models["target"]
    assert isinstance(target, Decoder) and target.usual_backend == "native"
    assert lm.encode(TEXTS[0]) == tiny.tokenizer()(TEXTS[0])["input_ids"]
    wanted = [lm.generate(text, "plain", max_new_tokens=16).tokens for text in TEXTS]
    for text, tokens in zip(TEXTS, wanted, strict=True):
        assert lm.generate(text, "suffix+token-recycling", max_new_tokens=16).tokens == tokens
    together = lm.generate(list(TEXTS), "ngram", max_new_tokens=16)
    assert [out.tokens for out in together] == wanted


@torch.inference_mode()
def test_logits_are_near_those_of_the_unpacked_file(tmp_path: Path) -> None:
    file = file_of("Q8_0", tmp_path)
    hf = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        gguf_file=file.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    near = foretell.wrap(hf)
    text = tiny.tokenizer()(TEXTS[0])["input_ids"]
    ours = foretell.load(file).models["target"].score(text)
    theirs = near.models["target"].score(text)
    assert (ours - theirs).norm() <= 0.05 * theirs.norm()


def test_other_formats_are_left_to_llama_cpp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = file_of("F16", tmp_path)
    monkeypatch.delitem(TYPES, "F16")
    with pytest.raises(LookupError, match=r"has the format F16, and it takes F32, BF16, Q8_0"):
        gguf.read_packed(file)
    with pytest.raises(Unsupported, match="backend='native' cannot run on"):
        foretell.load(file, backend="native")


def test_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    file = file_of("Q8_0", tmp_path)
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(ForetellError) as refused:
        foretell.load(file, backend="native")
    assert "\n" not in str(refused.value) and "cannot be read" in str(refused.value)
