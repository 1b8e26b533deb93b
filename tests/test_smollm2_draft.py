"""The draft model that comes with the package for `smollm2`."""

from __future__ import annotations

import json

import pytest
import torch

import foretell
from foretell.drafters.model import vocabulary as trimming
from foretell.loading.fetch import fetch_shipped
from foretell.loading.load import OWN_VOCAB

FOLDER = fetch_shipped("smollm2-draft")
TEXT = "The capital of France is Paris. It is"


@pytest.fixture(scope="module")
def lm() -> foretell.LM:
    """It drafts for itself: its target is fetched, which tests do without."""
    return foretell.load("smollm2-draft", draft="smollm2-draft", dtype="int8")


def test_it_is_small_and_has_the_tokens_of_its_target(lm: foretell.LM) -> None:
    size = sum(file.stat().st_size for file in FOLDER.glob("*.safetensors"))
    assert size <= 25e6
    config = json.loads((FOLDER / "config.json").read_text("utf-8"))
    assert config["vocab_size"] == lm.models["target"].vocab == 49152
    assert lm.decode(lm.encode(TEXT)) == TEXT


def test_its_head_is_cut_down_to_the_tokens_in_its_folder(lm: foretell.LM) -> None:
    kept = trimming.load_kept_tokens(FOLDER / OWN_VOCAB)
    assert lm.models["draft"].name.endswith(f"[{len(kept.ids)} of 49152 tokens]")
    row = lm.models["draft"].score(lm.encode(TEXT))[0]
    whole = lm.models["target"].score(lm.encode(TEXT))[0]
    ids = torch.tensor(kept.ids)
    assert torch.equal(row[ids], whole[ids])
    assert int((row > -1e29).sum()) == len(kept.ids)


def test_it_drafts(lm: foretell.LM) -> None:
    plain = lm.generate(lm.encode(TEXT), "plain", max_new_tokens=32)
    drafted = lm.generate(lm.encode(TEXT), "draft:nodes=4", max_new_tokens=32)
    assert drafted.tokens == plain.tokens
    assert drafted.stats.accepted > 16, "it drafts what it would have written"
