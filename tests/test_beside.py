"""What is held of every guidance and every logits processor that there is; none is named."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from foretell import LM, registry, wrap
from foretell.core.processor import About
from foretell.core.types import Sampling
from tests import tiny

ROWS, PROCESSORS = registry.method_names("guidance"), registry.method_names("processor")
KINDS = [("guidance", name) for name in ROWS] + [("processor", name) for name in PROCESSORS]
PROMPTS = [tiny.TEXTS[0], tiny.TEXTS[1] * 2, "def def def"]


def test_there_is_something_to_hold() -> None:
    assert ROWS and PROCESSORS


@cache
def lm() -> LM:
    """With a model for every name that a source asks with its defaults."""
    asked = {model for name in ROWS for model in registry.load_method(name, "guidance")().models}
    model = tiny.llama(max_position_embeddings=256)
    others = {name: tiny.relative(model, 0.2) for name in sorted(asked)}
    return wrap(model, tiny.tokenizer(), tiny.relative(model), "tiny", models=others)


def tokens(method: str, **options: Any) -> list[list[int]]:
    return [lm().generate(p, method, max_new_tokens=24, **options).tokens for p in PROMPTS]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(("kind", "name"), KINDS)
def test_drafts_and_batches_change_no_token(kind: str, name: str, temperature: float) -> None:
    options = {kind: name, "temperature": temperature, "repetition_penalty": 1.1, "seed": 3}
    plain = tokens("plain", **options)
    for method in ("suffix:nodes=4", "draft:length=2,rule=walk,nodes=4"):
        assert tokens(method, **options) == plain, method
    many = lm().generate(PROMPTS, "suffix:nodes=4", max_new_tokens=24, **options)
    assert [one.tokens for one in many] == plain


@pytest.mark.parametrize(("kind", "name"), KINDS)
def test_a_form_is_honoured(kind: str, name: str) -> None:
    options = {kind: name, "regex": "(ab|cd){3}[0-9]+x"}
    plain = tokens("plain", **options)
    assert tokens("suffix:nodes=4", **options) == plain
    for answer in plain:
        assert lm().decode(answer)[:2] in ("ab", "cd")


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_warper_is_a_function_of_the_path(name: str) -> None:
    """Whatever it was asked before, and for the row it was given."""
    draw = np.random.default_rng(1)
    config = registry.load_method(name, "processor")()
    pieces = ("\n", "else:", "#", " ", "1", "=", "(")
    about = About(2, (0,), lambda ids: "".join(pieces[token] for token in ids))
    track = config.start_track(about)
    path: list[int] = []
    changed = 0
    for _ in range(200):
        path = path[: draw.integers(0, len(path) + 1)] if draw.random() < 0.4 else path
        path += path[-int(draw.integers(1, 9)) :] + draw.integers(0, 7, 2).tolist()
        ids = torch.tensor([path])
        row = torch.from_numpy(draw.normal(0, 3, (1, 7)))
        before = row.clone()
        got = track(ids, row)
        assert torch.equal(got, config.start_track(about)(ids, row)) and torch.equal(row, before)
        assert got.shape == row.shape and bool(got.isfinite().all())
        changed += not torch.equal(got, row)
    assert changed


@pytest.mark.parametrize("name", PROCESSORS)
def test_warpers_join_in_their_order(name: str) -> None:
    made = registry.load_method(name, "processor")()
    sampling = Sampling(processor=(made, made))
    assert len(sampling.path_processors([1], (), lm().decode)) == 2
