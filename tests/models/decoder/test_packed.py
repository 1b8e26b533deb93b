"""Packed linear layers: the product is that of the numbers they hold, row by row, and little is
lost.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import foretell
from foretell import wrap
from foretell.core.tree import TokenTree
from foretell.engine.cost_profile import number_format
from foretell.errors import Unsupported
from foretell.models.decoder.packed import (
    PackedEmbedding,
    PackedLinear,
    is_as_near,
    pack_layers,
    product_by_torch,
    recorded_layer,
    settle_weights,
    weight_bytes,
    without_rounding,
)
from foretell.native.packing import GROUP, unpack_matrix
from foretell.native.rounding import DTYPES
from tests.models.decoder.families import tiny
from tests.models.decoder.test_families import PROMPTS
from tests.native.machines import built, no_library
from tests.tiny import llama

NARROW = ("int8", "int4")


@pytest.fixture(params=["usual", "torch"])
def computed(request: pytest.FixtureRequest) -> Iterator[None]:
    """By the C library where it is built, and by torch."""
    with no_library() if request.param == "torch" else nullcontext():
        yield


def without_minima(layer: PackedLinear) -> PackedLinear:
    """A layer of 4 bits around zero with the same numbers."""
    packed = replace(layer.packed, minima=None, least_scaling="none", offset=8)
    return PackedLinear(packed, layer.bias, layer.in_features)


@pytest.mark.parametrize("format", ["int8", "int4", "int4 around zero"])
@settings(max_examples=25, deadline=None)
@given(st.integers(1, 20), st.integers(2, 70), st.integers(1, 40), st.booleans(), st.integers(0, 9))
def test_the_product_is_that_of_the_rounded_numbers(
    format: str, rows: int, wide: int, out: int, bias: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    linear = nn.Linear(wide, out, bias=bias)
    layer, x = PackedLinear.of(linear, format.split()[0]), torch.randn(rows, wide) * 3
    if format == "int4 around zero":
        layer = without_minima(layer)
    matrix = unpack_matrix(layer.packed)[:, :wide]
    parts = nn.functional.pad(x, (0, -wide % GROUP)).view(rows, -1, GROUP)
    step = parts.abs().amax(-1, keepdim=True) / 127
    rounded = ((parts / step.clamp_min(1e-30)).round() * step).flatten(1)[:, :wide]
    exact = rounded.double() @ matrix.double().t()
    exact = exact + linear.bias if bias else exact
    largest = exact.abs().max() + 1
    with no_library():
        assert (layer(x) - exact).abs().max() <= 2e-3 * largest  # a number beside a half
    assert (layer(x) - exact).abs().max() <= 2e-3 * largest
    with without_rounding():
        whole = nn.functional.linear(x, matrix, linear.bias)
        assert torch.allclose(layer(x), whole, rtol=1e-4, atol=1e-5)
    lost = (layer(x) - whole).abs().max()
    assert lost <= 0.51 * wide * step.max() * matrix.abs().max() + 1e-3


@built
@pytest.mark.parametrize("format", DTYPES)
def test_torch_s_product_is_near_the_library_s(format: str) -> None:
    torch.manual_seed(0)
    layer, x = PackedLinear.of(nn.Linear(96, 70), format), torch.randn(9, 96)
    ours = layer(x)
    with no_library():
        twin = layer(x)
    assert torch.allclose(ours, twin, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("computed")
@pytest.mark.parametrize("format", DTYPES)
def test_a_row_does_not_depend_on_the_others_to_the_last_bit(format: str) -> None:
    torch.manual_seed(0)
    layer, x = PackedLinear.of(nn.Linear(50, 70), format), torch.randn(33, 50)
    x[5] *= 1000  # one scale for all rows would ruin the rest
    whole = layer(x)
    for rows in ([0], [4, 5, 6], list(range(20)), list(range(32, -1, -1))):
        assert torch.equal(layer(x[rows]), whole[rows])
    assert torch.equal(layer(x.view(3, 11, 50)), whole.view(3, 11, 70))
    assert layer.bias is not None and torch.equal(layer(torch.zeros(1, 50)), layer.bias[None])
    assert layer(x[:0]).shape == (0, 70)
    assert layer(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.usefixtures("computed")
@pytest.mark.parametrize("format", DTYPES)
def test_joined_layers_give_what_they_gave_and_share_the_memory(format: str) -> None:
    torch.manual_seed(0)
    parts = [PackedLinear.of(nn.Linear(24, n), format) for n in (16, 32, 16)]
    x = torch.randn(5, 24)
    before = torch.cat([part(x) for part in parts], -1)
    joined = PackedLinear.join(parts)
    assert joined is not None
    assert torch.equal(joined(x), before)
    assert torch.equal(torch.cat([part(x) for part in parts], -1), before)
    for part in parts:
        inside = part.packed.weights.data_ptr() - joined.packed.weights.data_ptr()
        assert 0 <= inside < joined.packed.weights.nbytes
    assert PackedLinear.join([*parts, PackedLinear.of(nn.Linear(24, 8), format)]) is None


@pytest.mark.usefixtures("computed")
@pytest.mark.parametrize("format", DTYPES)
def test_embeddings_are_the_rows_of_the_head(format: str) -> None:
    torch.manual_seed(0)
    head = PackedLinear.of(nn.Linear(50, 70, bias=False), format)
    embedding = PackedEmbedding(head, torch.bfloat16)
    ids = torch.tensor([[69, 0, 15], [16, 17, 0]])
    wanted = unpack_matrix(head.packed)[:, :50].bfloat16()[ids]
    assert torch.equal(embedding(ids), wanted)
    assert embedding.rows(torch.empty(0, dtype=torch.long)).shape == (0, 50)
    assert embedding.float()(ids).dtype == torch.float32, "its format is the model's"
    assert not list(embedding.parameters()), "nothing is there twice"


def test_a_tied_model_keeps_one_matrix() -> None:
    hf = tiny("llama", dtype=torch.bfloat16, tie_word_embeddings=True)
    plain = weight_bytes(hf)
    pack_layers(hf, "int8")
    assert isinstance(hf.get_input_embeddings(), PackedEmbedding)
    assert hf.get_input_embeddings().head[0] is hf.get_output_embeddings()
    assert weight_bytes(hf) < 0.8 * plain


@pytest.mark.usefixtures("computed")
@pytest.mark.parametrize("format", DTYPES)
def test_settled_layers_give_what_they_gave_and_share_what_they_shared(format: str) -> None:
    torch.manual_seed(0)
    parts = [PackedLinear.of(nn.Linear(40, n), format) for n in (16, 32, 16)]
    joined, alone = PackedLinear.join(parts), PackedLinear.of(nn.Linear(40, 70), format)
    assert joined is not None
    every = [joined, alone, *parts]
    x = torch.randn(5, 40)
    before = [layer(x) for layer in every]
    settle_weights([*every, alone])
    assert all(torch.equal(layer(x), row) for layer, row in zip(every, before, strict=True))
    places = [layer.packed.weights.data_ptr() for layer in every]
    assert all(place % 64 == 0 for place in places[:2]), "vectors begin where lines do"
    first, end = places[0], places[0] + joined.packed.weights.nbytes
    assert all(first <= place < end for place in places[2:])
    settle_weights(every)
    assert [layer.packed.weights.data_ptr() for layer in every] == places, "they stay from then on"
    twin = copy.deepcopy(alone)
    twin.packed.weights.fill_(0)
    assert torch.equal(alone(x), before[1])


def test_layers_stay_where_there_are_no_large_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("mmap.MADV_HUGEPAGE", raising=False)
    layer = PackedLinear.of(nn.Linear(32, 16), "int8")
    place = layer.packed.weights.data_ptr()
    settle_weights([layer])
    settle_weights([])
    assert layer.packed.weights.data_ptr() == place


def test_copies_have_weights_of_their_own() -> None:
    layer, x = PackedLinear.of(nn.Linear(32, 16), "int8"), torch.randn(3, 32)
    before = layer(x)
    twin = copy.deepcopy(layer)
    twin.packed.weights.fill_(128)
    assert twin.bias is not None and torch.equal(twin(x), twin.bias.expand(3, -1))
    assert torch.equal(layer(x), before)


def test_a_recording_names_its_layers() -> None:
    layer = PackedLinear.of(nn.Linear(40, 16), "int4")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a newer way to record
        traced = torch.jit.trace(layer, torch.randn(3, 40), check_trace=False)
    nodes = list(traced.inlined_graph.nodes())
    assert [node.kind() for node in nodes].count("foretell::packed_linear") == 1
    assert recorded_layer(id(layer)) is layer
    held = [
        n.t("value") for n in nodes if "value" in n.attributeNames() and n.kindOf("value") == "t"
    ]
    assert all(value.numel() < 40 * 16 for value in held), "no weights are in it"


@pytest.mark.usefixtures("computed")
@pytest.mark.parametrize("format", NARROW)
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "phi3", "stablelm", "gpt_neox"])
def test_narrow_models_stay_near_and_trees_are_right(family: str, format: str) -> None:
    hf, same = tiny(family), tiny(family)
    assert pack_layers(hf, format) >= 3 * 4
    for name, layer in hf.named_modules():
        if isinstance(layer, PackedLinear):
            weight = unpack_matrix(layer.packed)[:, : layer.in_features]
            same.get_submodule(name).weight.data = weight  # type: ignore[assignment]
    lm = wrap(hf, name=family)
    theirs = wrap(same, name=family).models["target"].score(PROMPTS[1])
    with without_rounding():
        assert torch.allclose(lm.models["target"].score(PROMPTS[1]), theirs, rtol=1e-3, atol=1e-3)
    ours = lm.models["target"].score(PROMPTS[1])
    assert 0 < (ours - theirs).norm() <= 0.1 * theirs.norm()
    methods = ("plain", "ngram:nodes=6")
    outs = [lm.generate(PROMPTS, method, max_new_tokens=8) for method in methods]
    assert [o.tokens for o in outs[0]] == [o.tokens for o in outs[1]]


@pytest.mark.parametrize(("format", "most"), [("int8", 1.01), ("int4", 1.2)])
def test_the_embedded_model_loses_little(format: str, most: float) -> None:
    narrow = foretell.load("demo", dtype=format, backend="torch")
    wide = foretell.load("demo", backend="torch")
    text = wide.encode(
        "def add(a, b):\n    return a + b\n\n\n"
        "class P:\n    def __init__(self, x):\n        self.x = x\n"
    )
    tree = TokenTree(text[0]).chain(text[1:])
    laws = [x.models["target"].score(text[:1], tree).log_softmax(-1) for x in (narrow, wide)]
    assert [number_format(x.models["target"]) for x in (narrow, wide)] == [format, "bfloat16"]
    bits = [-float(law[range(len(text) - 1), text[1:]].mean()) for law in laws]
    assert bits[0] <= bits[1] * most


def test_of_4_bits_the_head_keeps_8() -> None:
    hf = llama()
    assert pack_layers(hf, "int4") == 2 * 7 + 1
    formats = {n: m.packed.name for n, m in hf.named_modules() if isinstance(m, PackedLinear)}
    assert formats.pop("lm_head") == "int8" and {*formats.values()} == {"int4"}


def test_a_slip_in_the_twin_is_found() -> None:
    torch.manual_seed(0)
    packed, x = PackedLinear.of(nn.Linear(64, 16), "int4").packed, torch.randn(2, 64)
    before = product_by_torch(packed, x)
    assert packed.minima is not None
    packed.minima[0, 1, 3] += 0.5
    changed = (product_by_torch(packed, x) != before).any(0)
    assert changed.nonzero().flatten().tolist() == [3]


def test_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pack_layers(nn.ModuleList([nn.Embedding(3, 4), nn.Linear(1, 4)]), "int8") == 0
    monkeypatch.setattr("foretell.models.decoder.smoothing.pack_layers", lambda *_: 0)
    with pytest.raises(
        Unsupported, match="dtype='int8' cannot run on demo: it needs torch's linear layers"
    ):
        foretell.load("demo", dtype="int8")


def test_two_ways_to_round_may_be_apart_where_both_are_near_to_what_they_stand_for() -> None:
    torch.manual_seed(0)
    rows = torch.randn(4, 300)
    noises = [torch.randn(4, 300) * 0.04 for _ in range(3)]
    ours, twin, wrong = (rows + noise for noise in noises)
    assert is_as_near(rows, rows, lambda: pytest.fail("asked for"))
    assert is_as_near(ours, twin, lambda: rows) and (ours - twin).norm() > 0.05 * rows.norm()
    assert not is_as_near(wrong + 0.2 * torch.randn(4, 300), twin, lambda: rows)
    assert not is_as_near(rows.roll(1, 0), twin, lambda: rows)
    assert not is_as_near(rows * torch.nan, twin, lambda: rows)
