"""Halves of layers: their rows are those of models whose other halves add nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foretell import wrap
from foretell.core.tree import TokenTree
from foretell.core.types import Ask
from foretell.models.decoder.decoder import Decoder
from foretell.testing.views import Skipped
from tests.models.decoder.families import tiny
from tests.models.decoder.test_families import PROMPTS, TREE, answer

PROMPT = PROMPTS[1]
WITHOUT = [((1, "attention"),), ((0, "mlp"), (2, "attention")), ((1, "attention"), (1, "mlp"))]


def silenced(family: str, without: tuple[tuple[int, str], ...]) -> Decoder:
    """The family's model in which these halves add nothing to the residual stream."""
    hf: Any = tiny(family)
    for layer, half in without:
        block = hf.get_decoder().layers[layer]
        last = block.self_attn.o_proj if half == "attention" else block.mlp.down_proj
        with torch.no_grad():
            for parameter in last.parameters():
                parameter.zero_()
    return Decoder(hf, family)


def parts(without: tuple[tuple[int, str], ...]) -> tuple[int | tuple[int, str], ...]:
    left: list[int | tuple[int, str]] = []
    for layer in range(3):
        halves = [(layer, half) for half in ("attention", "mlp") if (layer, half) not in without]
        left += [layer] if len(halves) == 2 else halves
    return tuple(left)


@pytest.mark.parametrize("without", WITHOUT)
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen2"])
def test_what_is_left_out_adds_nothing(family: str, without: tuple[tuple[int, str], ...]) -> None:
    wanted = silenced(family, without).score(PROMPT, TREE)
    for model in (Decoder(tiny(family), family), wrap(tiny(family)).models["target"]):
        assert isinstance(model, Decoder) and "parts" in model.caps
        reply = answer(model, model.cache(), Ask(TREE, layers=parts(without)), PROMPT, chunk=999)
        torch.testing.assert_close(reply.logits, wanted, atol=1e-4, rtol=0)
    assert isinstance(model, Decoder) and model.fused


def test_rows_that_halves_wrote_are_never_kept() -> None:
    model = Decoder(tiny("llama"), "llama")
    cache = model.cache()
    answer(model, cache, Ask(TokenTree(PROMPT[-2])), PROMPT[:-1])
    answer(model, cache, Ask(TREE, layers=parts(WITHOUT[0])), PROMPT)
    tokens = [*PROMPT, 3, 4, 8]
    reply = answer(model, cache, Ask(TokenTree(8)), tokens)
    torch.testing.assert_close(reply.logits, model.score(tokens), atol=1e-4, rtol=0)
    answer(model, cache, Ask(TREE.reroot_at(8), layers=parts(WITHOUT[1]), rows=[0]), tokens)
    assert cache.length == len(tokens) - 1, "what all layers wrote stays"


@pytest.mark.parametrize("family", ["gemma2", "granite", "gpt_neox", "olmo2"])
def test_layers_of_another_build_have_no_halves(family: str) -> None:
    assert "parts" not in Decoder(tiny(family), family).caps


def test_a_view_leaves_out_halves_of_its_layers() -> None:
    model = Decoder(tiny("llama"), "llama")
    view = Skipped(model, (0, 2))
    wanted = parts(((1, "attention"), (1, "mlp"), (2, "attention")))
    reply = answer(view, view.cache(), Ask(TREE, layers=(0, (1, "mlp"), (2, "mlp"))), PROMPT)
    theirs = answer(model, model.cache(), Ask(TREE, layers=wanted), PROMPT)
    torch.testing.assert_close(reply.logits, theirs.logits)
