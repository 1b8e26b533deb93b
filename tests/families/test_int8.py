"""Linear layers of 8 bits: the product is that of the numbers they hold, row by row, and little is
lost.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import foretell
from foretell import LM, wrap
from foretell.core.tree import TokenTree
from foretell.core.types import Ask
from foretell.errors import Unsupported
from foretell.families.int8 import Linear8, quantize
from foretell.measure.profiling import numbers
from foretell.runtimes.openvino import OpenVinoExecutor
from tests.families.families import tiny
from tests.families.test_families import PROMPTS, TREE, answer
from tests.tiny import llama


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 20), st.integers(2, 40), st.integers(1, 40), st.booleans(), st.integers(0, 99)
)
def test_the_product_is_that_of_the_rounded_numbers(
    rows: int, wide: int, out: int, bias: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    linear = nn.Linear(wide, out, bias=bias)
    narrow, x = Linear8.of(linear), torch.randn(rows, wide) * 3
    step = x.abs().amax(1, keepdim=True) / 127
    exact = (x / step).round().double() @ narrow.weight.double().t() * step * narrow.scale
    exact = exact + linear.bias if bias else exact
    assert torch.allclose(narrow(x).double(), exact, rtol=1e-5, atol=1e-6)
    assert (
        narrow.weight.float() * narrow.scale[:, None] - linear.weight
    ).abs().max() <= narrow.scale.max() * 0.51
    lost = x.abs().max() * narrow.scale.max() + linear.weight.abs().max() * step.max()
    assert (narrow(x) - linear(x)).abs().max() <= wide * lost


def test_a_row_does_not_depend_on_the_others_to_the_last_bit() -> None:
    torch.manual_seed(0)
    narrow, x = Linear8.of(nn.Linear(50, 70)), torch.randn(33, 50)
    x[5] *= 1000  # one scale for all rows would ruin the rest
    whole = narrow(x)
    for rows in ([0], [4, 5, 6], list(range(20)), list(range(32, -1, -1))):
        assert torch.equal(narrow(x[rows]), whole[rows])
    assert narrow(x.view(3, 11, 50)).shape == (3, 11, 70)
    assert torch.equal(narrow(torch.zeros(1, 50)), narrow.bias[None])


def test_joined_layers_give_what_they_gave_and_share_the_memory() -> None:
    torch.manual_seed(0)
    parts, x = [Linear8.of(nn.Linear(24, n)) for n in (8, 16, 8)], torch.randn(5, 24)
    before = torch.cat([part(x) for part in parts], -1)
    joined = Linear8.join(parts)
    assert torch.equal(joined(x), before)
    assert torch.equal(torch.cat([part(x) for part in parts], -1), before)
    assert parts[1].weight.data_ptr() == joined.weight.data_ptr() + 8 * 24


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "phi3", "stablelm", "gpt_neox"])
def test_models_of_8_bits_stay_near_and_trees_are_right(family: str) -> None:
    hf = tiny(family)
    assert quantize(hf) >= 3 * 4
    lm, wide = wrap(hf, name=family), wrap(tiny(family), name=family)
    ours, theirs = (x.models["target"].score(PROMPTS[1]) for x in (lm, wide))
    assert (ours - theirs).abs().max() <= 0.1 * theirs.abs().max()
    assert not torch.equal(ours, theirs)
    outs = [
        lm.generate(PROMPTS, method, max_new_tokens=16) for method in ("plain", "ngram:nodes=6")
    ]
    assert [o.tokens for o in outs[0]] == [o.tokens for o in outs[1]]


@pytest.mark.skipif(
    importlib.util.find_spec("openvino") is None, reason="openvino is not installed"
)
@torch.inference_mode()
def test_openvino_computes_with_the_same_weights() -> None:
    hf = tiny("llama")
    quantize(hf)
    lm = wrap(hf, name="tiny")
    model = lm.models["target"]
    before = answer(model, model.cache(), Ask(TREE), PROMPTS[1]).logits
    model.use(OpenVinoExecutor)
    after = answer(model, model.cache(), Ask(TREE), PROMPTS[1]).logits
    assert not torch.equal(before, after)
    assert (
        before - after
    ).abs().max() <= 0.05 * before.abs().max()  # it rounds activations otherwise
    kinds = {
        str(c.get_element_type())
        for c in model.executor.recording.graph.get_ops()
        if c.get_type_name() == "Constant"
    }
    assert "<Type: 'uint8_t'>" in kinds


def test_the_embedded_model_in_8_bits() -> None:
    lm: LM = foretell.load("demo", dtype="int8", executor="torch")
    assert all(
        p.dtype == torch.int8
        for n, p in lm.models["target"].hf.named_parameters()
        if "proj.weight" in n
    )
    wide = foretell.load("demo", executor="torch")
    text = lm.encode(
        "def add(a, b):\n    return a + b\n\n\n"
        "class P:\n    def __init__(self, x):\n        self.x = x\n"
    )
    tree = TokenTree(text[0]).chain(text[1:])
    laws = [x.models["target"].score(text[:1], tree).log_softmax(-1) for x in (lm, wide)]
    assert [numbers(x.models["target"]) for x in (lm, wide)] == ["int8", "bfloat16"]
    bits = [-float(law[range(len(text) - 1), text[1:]].mean()) for law in laws]
    assert bits[0] <= bits[1] * 1.02
    assert lm.generate("def add(", "ngram", max_new_tokens=8).tokens


def test_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert quantize(nn.ModuleList([nn.Embedding(3, 4), nn.Linear(1, 4)])) == 0
    assert quantize(llama()) == 2 * 7 + 1
    monkeypatch.setattr("foretell.loading.quantize", lambda hf: 0)
    with pytest.raises(
        Unsupported, match="dtype='int8' cannot run on demo: it needs torch's linear layers"
    ):
        foretell.load("demo", dtype="int8")
