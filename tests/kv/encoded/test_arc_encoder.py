"""arc-encoder as users meet it. Its rows are tested in
tests/kv/encoded/test_encoders.py, how a text is read over them in
tests/kv/encoded/test_base.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from foretell import Contexts
from foretell.errors import BadConfig, BadModel, ForetellError, Unsupported
from foretell.kv.encoded.arc_encoder import ArcEncoder
from foretell.models.decoder.decoder import Decoder
from tests import tiny
from tests.kv.encoded.encoders import folder
from tests.models.decoder.families import tiny as family

# What laws of all policies use, see tests/kv/policies.py.
SMALL_SPEC = "arc-encoder:prefix=3,sizes=5 7,folder={arc-encoder}"
LARGE_SPEC = "arc-encoder:prefix=3,sizes=40,folder={arc-encoder}"

LM = tiny.lm()
DOCS = ["def add(a, b):\n    return a + b\n", "The quick brown fox jumps over the lazy dog. "]
QUESTION = "The dog"


def spec(**more: Any) -> str:
    return f"arc-encoder:folder={folder(LM.models['target'], 'arc-encoder', **more)}"


@pytest.mark.parametrize("method", ["suffix", "draft", "token-recycling"])
def test_drafts_leave_the_text_as_it_is(method: str) -> None:
    prompt = Contexts(DOCS, QUESTION, "Read.")
    plain = LM.generate(prompt, "plain", max_new_tokens=12, kv=spec())
    assert LM.generate(prompt, method, max_new_tokens=12, kv=spec()).tokens == plain.tokens
    assert plain.tokens != LM.generate(prompt, "plain", max_new_tokens=12).tokens


def test_contexts_may_be_longer_than_all_positions_together() -> None:
    docs = [doc * 2 for doc in DOCS * 6]
    assert sum(len(LM.encode(doc)) for doc in docs) > tiny.CONTEXT
    prompt = Contexts(docs, QUESTION)
    answer = LM.generate(prompt, "plain", max_new_tokens=8, kv=spec(ratio=8))
    assert len(answer.tokens) == 8
    with pytest.raises(ForetellError, match="positions and"):
        LM.generate(prompt, "plain", max_new_tokens=8, kv=spec(ratio=1))


def test_the_target_stays_as_it_is() -> None:
    hf: Any = LM.models["target"].hf  # type: ignore[attr-defined]
    before = {name: weight.clone() for name, weight in hf.state_dict().items()}
    LM.generate(Contexts(DOCS, QUESTION), "plain", max_new_tokens=4, kv=spec())
    assert all(torch.equal(weight, hf.state_dict()[name]) for name, weight in before.items())


def test_a_context_without_layers_marks_and_pooling_is_the_text_itself() -> None:
    path = Path(folder(LM.models["target"], "arc-encoder", layers=0, ratio=1, marks=False))
    weights = load_file(path / "model.safetensors")
    for name in ("narrow.weight", "wide.weight"):
        weights[name] = torch.eye(len(weights[name])).bfloat16()
    save_file(weights, path / "model.safetensors")
    # Embeddings that bfloat16 holds: those of the folder are rounded.
    model: Any = LM.models["target"]
    table = model.hf.get_input_embeddings().weight
    before = table.clone()
    with torch.no_grad():
        table.copy_(table.bfloat16())
    prompt = [*LM.encode(DOCS[0], special=False), *LM.encode(QUESTION, special=False)]
    try:
        kv = f"arc-encoder:folder={path}"
        got = LM.generate(Contexts(DOCS[:1], QUESTION, [1]), "plain", max_new_tokens=16, kv=kv)
        assert got.tokens == LM.generate([1, *prompt], "plain", max_new_tokens=16).tokens
    finally:
        with torch.no_grad():
            table.copy_(before)


def test_what_cannot_be_meant_is_one_line() -> None:
    cases: list[tuple[str, type[ForetellError], str]] = [
        ("arc-encoder", Unsupported, "foretell train compressor --kind arc-encoder"),
        ("arc-encoder:folder=/dev/null", BadModel, "is no compressor's"),
        ("arc-encoder:prefix=-1", BadConfig, "arc-encoder:prefix=-1"),
        ("arc-encoder:sizes=0", BadConfig, "arc-encoder:sizes"),
        (spec().replace("arc-encoder:", "lclm:"), BadModel, "not for kv=lclm"),
    ]
    for kv, error, said in cases:
        with pytest.raises(error, match=said) as raised:
            LM.generate(Contexts(DOCS, QUESTION), "plain", max_new_tokens=2, kv=kv)
        assert "\n" not in str(raised.value)
    with pytest.raises(BadConfig, match="it reads contexts, and the prompt has none"):
        LM.generate("a", "plain", max_new_tokens=2, kv=spec())
    with pytest.raises(BadConfig, match=r"context 1: it has .* encodes 128 at once"):
        LM.generate(Contexts([DOCS[0] * 20], QUESTION), "plain", max_new_tokens=2, kv=spec())
    with pytest.raises(Unsupported):
        ArcEncoder("x", 1, (3,)).build_policy(Decoder(family("nanochat"), "nanochat"))
