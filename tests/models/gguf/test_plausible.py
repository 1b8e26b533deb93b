"""Values of headers: what no model can have is refused by name, and what only some families have
is not.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foretell.errors import BadModel
from foretell.models.gguf import limits
from tests.models.gguf import damaged
from tests.models.gguf.damaged import BOOL, F32, I32, LIST, TEXT, U32

RIGHT: dict[str, dict[str, Any]] = {
    "as it is": {},
    "heads by layer": {"llama__attention__head_count": (LIST, (U32, [4]))},
    "layers without heads": {"llama__attention__head_count_kv": (LIST, (U32, [0]))},
    "no attention": {"llama__attention__head_count": (U32, 0)},
    "no MLP": {"llama__feed_forward_length": (U32, 0)},
    "gates of half the length": {"llama__feed_forward_length": (U32, 2 * 262)},
    "whole numbers of either kind": {"llama__block_count": (I32, 1)},
    "a base without a fraction": {"llama__rope__freq_base": (U32, 10_000)},
    "no scaling": {"llama__rope__scaling__factor": (F32, 0.0)},
    "numbers below zero where they may be": {"llama__attention__clamp_kqv": (F32, -1.0)},
    "a list that is read nowhere": {"general__tags": (LIST, (TEXT, ["a", "b"]))},
    "no beginning": {"tokenizer__ggml__bos_token_id": None},
    "scores": {"tokenizer__ggml__scores": (LIST, (F32, [0.0] * damaged.WORDS))},
    "no merges": {"tokenizer__ggml__merges": (LIST, (TEXT, []))},
    "no vocabulary": {
        "tokenizer__ggml__model": (TEXT, "none"), "tokenizer__ggml__tokens": None,
        "tokenizer__ggml__token_type": None,
    },
}  # fmt: skip
WRONG: dict[str, dict[str, Any]] = {
    "general.architecture names no family": {"general__architecture": None},
    "block_count is 0, which cannot be": {"llama__block_count": (U32, 0)},
    "block_count is '1', and no whole number": {"llama__block_count": (TEXT, "1")},
    "block_count is True, and no whole number": {"llama__block_count": (BOOL, True)},
    "block_count is a list of 1": {"llama__block_count": (LIST, (U32, [1]))},
    "head_count is a list of 2": {"llama__attention__head_count": (LIST, (U32, [4, 4]))},
    "embedding_length is 263, and its tensors": {"llama__embedding_length": (U32, 263)},
    "feed_forward_length is 525, and its": {"llama__feed_forward_length": (U32, 525)},
    "head_count_kv is 17, and its tensors": {"llama__attention__head_count_kv": (U32, 17)},
    "freq_base is '1', and no number": {"llama__rope__freq_base": (TEXT, "1")},
    "freq_base is a list": {"llama__rope__freq_base": (LIST, (F32, [1.0]))},
    "freq_base is inf, which cannot be": {"llama__rope__freq_base": (F32, float("inf"))},
    "logit_scale is nan, which cannot be": {"llama__logit_scale": (F32, float("nan"))},
    "epsilon is 1.0, which cannot be": {
        "llama__attention__layer_norm_rms_epsilon": (F32, 1.0)
    },
    "scaling.type is 1, and no text": {"llama__rope__scaling__type": (U32, 1)},
    "tokens has no words": {"tokenizer__ggml__tokens": (LIST, (TEXT, []))},
    "tokens is no list of texts": {"tokenizer__ggml__tokens": (LIST, (U32, [1]))},
    "scores is 0.0, and no list": {"tokenizer__ggml__scores": (F32, 0.0)},
    "scores has 1 numbers, and tokenizer.ggml.tokens has 262": {
        "tokenizer__ggml__scores": (LIST, (F32, [0.0])),
    },
    "eos_token_id is 262, and the file has the tokens 0 to 261": {
        "tokenizer__ggml__eos_token_id": (U32, 262),
    },
    "eos_token_id is a list, and no whole number": {
        "tokenizer__ggml__eos_token_id": (LIST, (U32, [1])),
    },
    "add_bos_token is 1, and no yes or no": {"tokenizer__ggml__add_bos_token": (U32, 1)},
}  # fmt: skip


def written(folder: Path, changed: dict[str, Any]) -> Path:
    path = folder / "it.gguf"
    path.write_bytes(damaged.right_file().with_keys(**changed).encode())
    return path


@pytest.mark.parametrize("name", RIGHT)
def test_what_some_family_has_is_left_to_whoever_computes_it(name: str, tmp_path: Path) -> None:
    assert limits.check_file(written(tmp_path, RIGHT[name])).tensors


@pytest.mark.parametrize("said", WRONG)
def test_what_no_model_has_is_refused_by_name(said: str, tmp_path: Path) -> None:
    with pytest.raises(BadModel, match=said):
        limits.check_file(written(tmp_path, WRONG[said]))


def test_a_vocabulary_alone_is_no_wrong_file(tmp_path: Path) -> None:
    path = tmp_path / "words.gguf"
    path.write_bytes(replace(damaged.right_file(), tensors=(), data_bytes=0).encode())
    assert limits.check_file(path).lengths["tokenizer.ggml.tokens"] == damaged.WORDS
