"""Marks of a target: the same for every number format, others for other weights, tokens, templates.

How heads use them is in tests/drafters/heads/networks/test_folder.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from foretell.ops.fingerprint import fingerprint, norm_mark
from foretell.testing.toy import Toy


def model(weight: torch.Tensor, words: dict[str, int], template: str | None = None) -> Any:
    tokenizer = SimpleNamespace(get_vocab=lambda: words, chat_template=template)
    loop = SimpleNamespace(norm=SimpleNamespace(weight=weight))
    return SimpleNamespace(loop=loop, tokenizer=tokenizer)


def test_each_part_has_a_mark_of_its_own() -> None:
    weight = torch.tensor([0.5, 1.0])
    base = fingerprint(model(weight, {"a": 0, "b": 1}))
    assert base == fingerprint(model(weight.bfloat16(), {"b": 1, "a": 0}, ""))
    others = {
        "norm": model(weight * 2, {"a": 0, "b": 1}),
        "tokens": model(weight, {"a": 1, "b": 0}),
        "template": model(weight, {"a": 0, "b": 1}, "x"),
    }
    for changed, other in others.items():
        told = fingerprint(other)
        assert {name for name in base if told[name] != base[name]} == {changed}


def test_a_model_without_layers_one_by_one_or_weights_of_its_norm_has_none() -> None:
    assert norm_mark(Toy(4)) == ""
    for norm in (torch.nn.Identity(), torch.nn.LayerNorm(4, elementwise_affine=False)):
        assert norm_mark(SimpleNamespace(loop=SimpleNamespace(norm=norm))) == ""
