"""Every family that is described: torch's fused layers and the C library compute what transformers'
own code does, and a description that is wrong in one place is caught.

Families are found by their files, so that a new one is tested at once; what it needs beside the
usual sizes, to have all switched on that it has, stands in tests/models/decoder/families.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields, replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from foretell.audit.bits import compare_steps
from foretell.backends.native import NativeBackend
from foretell.core.tree import TokenTree
from foretell.core.types import Ask
from foretell.models.decoder import fused, loop
from foretell.models.decoder.backend_check import use_all_experts
from foretell.models.decoder.decoder import PROVEN, Decoder
from foretell.models.decoder.fused import Fused, describe_layers, fused_blocks
from foretell.models.decoder.packed import pack_layers, without_rounding
from foretell.models.decoder.packed_experts import pack_experts
from foretell.models.families.description import (
    ConfigFields,
    ExpertsDescription,
    LayerDescription,
    find_family,
    find_skeleton,
    known_families,
)
from foretell.native import library
from tests.models.decoder.families import (
    DESCRIBED,
    VARIANTS,
    VOCAB,
    WINDOW,
    described,
    described_config,
)
from tests.models.decoder.test_families import answer

FAMILIES = known_families()
CASES = sorted([*FAMILIES, *VARIANTS])
CONFIGS = {case: described_config(case) for case in CASES}
TEXT = [(7 * i * i + 3 * i + 16) % VOCAB for i in range(40)]
CUT = 23  # tokens of the text that are read in pieces; a tree below them has the others
TREE = (
    TokenTree(TEXT[CUT - 1])
    .chain(TEXT[CUT : CUT + 3])
    .chain([5, 6], at=1)
    .chain(TEXT[CUT + 3 :], at=3)
)
ON_PATH = [0, 1, 2, 3, *range(6, len(TREE))]  # nodes that are the text's own
NEAR = 1e-4  # of the largest logit, in float32
# The largest distance of a row, by its length: caches are of bfloat16 whatever the weights are.
ROUNDING = {"float32": 0.05, "bfloat16": 0.06, "int8": 0.15}
SHOWN = 0.02  # the median distance from which on a slip shows
PATHS = "query key value qkv out gate up gate_up down attention experts".split()
EXPERT_PATHS = "count block router experts transposed".split()


def has_experts(config: Any) -> bool:
    describe = find_family(config.model_type)
    assert describe is not None
    layers = range(config.num_hidden_layers)
    return any(describe(ConfigFields(config), layer).experts is not None for layer in layers)


def turns_a_part(config: Any) -> bool:
    """Whether a part of each head turns, by halves and by tables that have each angle twice."""
    describe = find_family(config.model_type)
    assert describe is not None
    is_usual = describe(ConfigFields(config), 0).rotation == "halves"
    return is_usual and config.rope_parameters.get("partial_rotary_factor", 1.0) < 1


MIXTURES = [case for case in CASES if has_experts(CONFIGS[case])]
TURNED_IN_PART = [case for case in CASES if turns_a_part(CONFIGS[case])]
LEARNT = [case for case in CASES if find_skeleton(CONFIGS[case]).positions]
WINDOWED = [case for case in CASES if getattr(CONFIGS[case], "sliding_window", None)]
every_case = pytest.mark.parametrize("case", CASES)
needs_library = pytest.mark.skipif(not library.is_available(), reason="the C library is not built")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@torch.inference_mode()
def stock_rows(hf: Any) -> torch.Tensor:
    """Logits (T, V) of the text by transformers' own code."""
    logits: torch.Tensor = hf(torch.tensor([TEXT]), use_cache=False).logits[0]
    return logits


@cache
def model(case: str) -> tuple[Decoder, torch.Tensor]:
    """A decoder with fused layers, and transformers' logits, computed before anything is joined."""
    hf = described(case)
    rows = stock_rows(hf)
    return Decoder(hf, case, fused_blocks), rows


def rows_in_pieces(decoder: Decoder) -> torch.Tensor:
    """Rows of the text's nodes in a tree, below a text that was read in pieces."""
    with torch.inference_mode():
        reply = answer(decoder, decoder.cache(), Ask(TREE), TEXT[:CUT], chunk=7)
    assert reply.nodes == list(range(len(TREE)))
    return reply.logits[ON_PATH]


def rows_at_once(decoder: Decoder) -> torch.Tensor:
    """Rows (T, V) of the whole text, by one forward."""
    with torch.inference_mode():
        tree = TokenTree(TEXT[0]).chain(TEXT[1:])
        return answer(decoder, decoder.cache(), Ask(tree), TEXT[:1]).logits


def error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference, as a part of the largest logit; no number is far from all."""
    return float(((ours - theirs).abs().max() / theirs.abs().max()).nan_to_num(torch.inf))


def distances(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """The distance of each row, by its length."""
    return (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)


def layer_descriptions(decoder: Decoder) -> list[LayerDescription]:
    assert decoder.loop is not None
    return describe_layers(decoder.loop.config, decoder.loop.layers)[0]


def test_families_that_are_described_are_proven_and_configured() -> None:
    assert set(FAMILIES) <= PROVEN
    assert set(DESCRIBED) <= set(FAMILIES)
    assert {family for family, _ in VARIANTS.values()} <= set(FAMILIES)


@every_case
def test_fused_layers_give_transformers_logits(case: str) -> None:
    decoder, stock = model(case)
    assert decoder.fused, (decoder.loop_refused, decoder.blocks_refused)
    assert error(rows_in_pieces(decoder), stock[CUT - 1 :]) < NEAR
    assert error(rows_at_once(decoder), stock) < NEAR


# --- the C library


def computed_by_library(case: str, format: str) -> tuple[Decoder, torch.Tensor]:
    """A decoder whose steps the library computes, whatever torch says, and what transformers' own
    code makes of the packed weights in float32: of 8 and 16 bits with all experts, as rounding may
    choose another one.
    """
    hf = described(case)
    pack_layers(hf, format)
    pack_experts(hf, format)
    with without_rounding(), all_experts(hf, format):
        rows = stock_rows(hf)
    decoder = Decoder(hf.bfloat16(), case, fused_blocks)
    use_library(decoder)
    return decoder, rows


def all_experts(hf: Any, format: str, backend: Any = None) -> AbstractContextManager[None]:
    """Lets all experts compute every token, where weights are of 8 or 16 bits."""
    return nullcontext() if format == "float32" else use_all_experts(hf, backend)


def use_library(decoder: Decoder) -> None:
    assert decoder.loop is not None
    decoder.backend = NativeBackend(decoder.loop, decoder.layout, decoder.dtype, decoder.vocab)


@needs_library
@pytest.mark.parametrize(
    ("case", "format"),
    [(family, format) for family in FAMILIES for format in ROUNDING]
    + [(case, "float32") for case in sorted(VARIANTS)],
)
def test_the_library_gives_transformers_logits(case: str, format: str) -> None:
    """Up to rounding; and each row by itself to the last bit, in trees, pieces and batches."""
    decoder, stock = computed_by_library(case, format)
    with all_experts(decoder.hf, format, decoder.backend):
        far = distances(rows_in_pieces(decoder), stock[CUT - 1 :])
    # Of 8 and 16 bits no token has other experts than in the reference; of 32 few have.
    decides = 2 * far.median() if format == "float32" and case in MIXTURES else far.max()
    assert decides < ROUNDING[format]
    if format != "float32":
        assert compare_steps(decoder, 3, max_length=28) == (3, "")


# --- slips


def slips(description: LayerDescription) -> dict[str, dict[str, Any]]:
    """Ways in which a description can be wrong in one place, by what they say of it."""
    other_activations = {"silu", "gelu", "gelu_tanh", "relu", "relu2"} - {description.activation}
    rotations = {"halves", "interleaved", ""} - {description.rotation}
    found: dict[str, dict[str, Any]] = {
        "norm": {"norm": "layer" if description.norm == "rms" else "rms"},
        "norm_offset": {"norm_offset": 1.0 - description.norm_offset},
        "scale": {"scale": 0.25 if description.scale is None else None},
        "score_cap": {"score_cap": 0.0 if description.score_cap else 2.0},
        "residual": {"residual": 0.9 * description.residual},
        "parallel": {"parallel": not description.parallel},
    }
    if description.rotation:
        found["angles_once"] = {"angles_once": not description.angles_once}
    if description.experts is None:
        found |= {f"activation {name}": {"activation": name} for name in other_activations}
    found |= {f"rotation {name}": {"rotation": name} for name in rotations}
    usual = LayerDescription()
    for name, value in description.differences().items():
        if name not in PATHS:
            found.setdefault(name, {name: getattr(usual, name)})
        if name.startswith(("before", "after")) and value:
            found[f"no {name}"] = {name: ""}
    if description.query_norm:
        found["whole_heads"] = {"whole_heads": not description.whole_heads}
        found["query_norm"] = {"query_norm": "", "key_norm": ""}
        found.pop("key_norm")
    return found


def describe_wrong(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[LayerDescription], LayerDescription]
) -> None:
    """Lets every family's file describe its layers with a change."""

    def find_wrong(model_type: str) -> Any:
        describe = find_family(model_type)
        assert describe is not None
        return lambda config, layer: change(describe(config, layer))

    monkeypatch.setattr(fused, "find_family", find_wrong)


def make_blocks(
    decoder: Decoder,
    descriptions: list[LayerDescription],
    window_error: int = 0,
    block_class: type[Fused] = Fused,
) -> list[Any]:
    """Makes the layers of a decoder again, by other descriptions."""
    loop = decoder.loop
    assert loop is not None
    right: list[Any] = [*loop.blocks]
    layouts = {block.table_layout for block in right} - {"", "once"} or {"halves"}
    found = []
    for index, (layer, description) in enumerate(zip(loop.layers, descriptions, strict=True)):
        window = loop.windows[index]
        block = block_class(layer, index, window and window + window_error, description)
        block.table_layout = "once" if description.angles_once else min(layouts)
        found.append(block)
    return found


@contextmanager
def computed_by(decoder: Decoder, blocks: list[Any]) -> Iterator[None]:
    """Inside, these are the decoder's layers."""
    loop = decoder.loop
    assert loop is not None
    before, loop.blocks = loop.blocks, blocks
    try:
        yield
    finally:
        loop.blocks = before


def is_caught(decoder: Decoder, stock: torch.Tensor, right: list[LayerDescription]) -> bool | None:
    """Whether the layers of another build, or the comparison with transformers' logits, show that
    the descriptions of now are wrong. None: the layers' own parts put them right.
    """
    loop = decoder.loop
    assert loop is not None
    wrong, reason = describe_layers(loop.config, loop.layers)
    if reason is not None:
        return True
    if wrong == right:
        return None
    try:
        with computed_by(decoder, make_blocks(decoder, wrong)):
            rows = rows_at_once(decoder)
    except (RuntimeError, LookupError, TypeError):  # shapes that do not fit each other
        return True
    return error(rows, stock) > NEAR


@every_case
def test_a_slip_in_a_description_is_caught(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, stock = model(case)
    right = layer_descriptions(decoder)
    names = {name for description in right for name in slips(description)}
    found = {}
    for name in sorted(names):
        with monkeypatch.context() as patch:
            describe_wrong(patch, lambda d, name=name: replace(d, **slips(d).get(name, {})))  # type: ignore[misc]
            found[name] = is_caught(decoder, stock, right)
    assert [name for name, caught in found.items() if caught is False] == []
    assert sum(caught is True for caught in found.values()) > 8


@pytest.mark.parametrize("by", [-1, 1])
@pytest.mark.parametrize("case", WINDOWED)
def test_a_window_that_is_off_by_one_is_caught(case: str, by: int) -> None:
    decoder, stock = model(case)
    assert decoder.loop is not None and WINDOW in decoder.loop.windows
    with computed_by(decoder, make_blocks(decoder, layer_descriptions(decoder), by)):
        assert error(rows_at_once(decoder), stock) > NEAR


class Widened(Fused):
    """A layer that pairs the numbers of whole heads, though a part of them turns."""

    def _turn(self, heads: torch.Tensor, rotary: Any) -> torch.Tensor:
        missing = (self.width - rotary[0].shape[-1]) // 2
        tables = []
        for table, filler in zip(rotary, (1.0, 0.0), strict=True):
            half = table.chunk(2, -1)[0]
            wide = F.pad(half, (0, missing), value=filler)
            tables.append(torch.cat([wide, wide], -1))
        return super()._turn(heads, tables)


@pytest.mark.parametrize("case", TURNED_IN_PART)
def test_turning_whole_heads_is_caught_where_a_part_turns(case: str) -> None:
    decoder, stock = model(case)
    blocks = make_blocks(decoder, layer_descriptions(decoder), block_class=Widened)
    with computed_by(decoder, blocks):
        assert error(rows_at_once(decoder), stock) > NEAR


@pytest.mark.parametrize(
    ("case", "change"),
    [
        ("gemma", {"norm_offset": 0.0}),
        ("cohere", {"rotation": "halves"}),
        ("llama", {"rotation": "interleaved"}),
        ("granite", {"residual": 1.0}),
        ("gemma2", {"score_cap": 0.0}),
        ("phi", {"parallel": False}),
        ("gpt_oss", {"sinks": ""}),
    ],
)
def test_a_slip_never_computes_a_model_that_is_loaded(
    case: str, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checks at loading leave such a model to its own layers."""
    hf = described(case)
    stock = stock_rows(hf)
    describe_wrong(monkeypatch, lambda description: replace(description, **change))
    decoder = Decoder(hf, case, fused_blocks)
    assert not decoder.fused and decoder.blocks_refused
    assert error(rows_in_pieces(decoder), stock[CUT - 1 :]) < NEAR


# --- positions that are learnt


@pytest.mark.parametrize("change", [{"positions": ""}, {"first_position": 1}])
@pytest.mark.parametrize("case", LEARNT)
def test_a_slip_in_a_skeleton_never_computes_a_model(
    case: str, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    hf = described(case)
    stock = stock_rows(hf)
    wrong = replace(find_skeleton(hf.config), **change)
    monkeypatch.setattr(loop, "find_skeleton", lambda config: wrong)
    decoder = Decoder(hf, case, fused_blocks)
    assert decoder.loop is None and "give other rows" in str(decoder.loop_refused)
    assert error(rows_in_pieces(decoder), stock[CUT - 1 :]) < NEAR


def row_at(decoder: Decoder, position: int) -> torch.Tensor:
    """The row (1, V) of a token that stands alone at a position."""
    cache = decoder.cache()
    cache.offset = -position
    with torch.inference_mode():
        return answer(decoder, cache, Ask(TokenTree(TEXT[0])), TEXT[:1]).logits


@needs_library
@pytest.mark.parametrize("case", LEARNT)
def test_positions_beyond_those_learnt_are_refused(case: str) -> None:
    by_torch, _ = model(case)
    by_library, _ = computed_by_library(case, "bfloat16")
    last = by_torch.context - 1
    wanted = row_at(by_torch, last)
    assert error(row_at(by_library, last), wanted) < 0.05 < error(row_at(by_torch, 0), wanted)
    for decoder in (by_torch, by_library):
        with pytest.raises(IndexError):
            row_at(decoder, last + 1)


@needs_library
@pytest.mark.parametrize("case", LEARNT)
def test_given_states_stand_for_embeddings_where_layer_0_runs(case: str) -> None:
    by_library, _ = computed_by_library(case, "bfloat16")
    tree = TokenTree(TEXT[0]).chain(TEXT[1:9])
    for decoder in (model(case)[0], by_library):
        states = decoder.embed(TEXT[:9])
        with torch.inference_mode():
            rows, given = (
                answer(decoder, decoder.cache(), ask, TEXT[:1]).logits
                for ask in (Ask(tree), Ask(tree, states=states))
            )
        assert error(given, rows) < 0.02  # embeddings that are given were rounded once more


@needs_library
@pytest.mark.parametrize("format", ["bfloat16", "int8", "int4"])
@pytest.mark.parametrize("case", [case for case in LEARNT if CONFIGS[case].tie_word_embeddings])
def test_texts_go_on_in_one_call_as_by_forwards_of_their_own(case: str, format: str) -> None:
    decoder, _ = computed_by_library(case, format)
    text, found = TEXT[:9], []
    with torch.inference_mode():
        ask = Ask(TokenTree(text[-1]), rows=[0], follow=6)
        followed = answer(decoder, decoder.cache(), ask, text).followed
        for _ in followed:
            row = answer(decoder, decoder.cache(), Ask(TokenTree(text[-1])), text).logits[0]
            found.append(int(row.argmax()))
            text = [*text, found[-1]]
    assert len(found) == 6 and [token for token, _, _ in followed] == found


@needs_library
def test_nothing_is_added_for_a_position_beyond_those_learnt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder, _ = computed_by_library("gpt2", "int8")
    monkeypatch.setattr(NativeBackend, "_count_follows", lambda self, jobs: jobs[0].follow)
    cache = decoder.cache()
    cache.offset = 2 - decoder.context
    ask = Ask(TokenTree(TEXT[0]), rows=[0], follow=4)  # the last two of them would be beyond
    with torch.inference_mode(), pytest.raises(IndexError, match="ft_follow"):
        answer(decoder, cache, ask, TEXT[:1])


# --- slips of experts, which torch leaves to the family's own module and the library computes


def expert_slips(experts: ExpertsDescription) -> dict[str, dict[str, Any]]:
    """Ways in which a description of experts can be wrong in one place."""
    activation = "silu" if experts.activation != "silu" else "gelu"
    found: dict[str, dict[str, Any]] = {
        "chosen": {"chosen": experts.chosen - 1},
        "scaling": {"scaling": 1.25 * experts.scaling},
        "activation": {"activation": activation},
    }
    weighs_chosen = experts.scoring == "softmax_of_chosen"
    for scoring in {"softmax", "softmax_of_chosen", "logistic"} - {experts.scoring}:
        # The softmax of those chosen is the softmax of all, renormalised.
        if not (
            experts.renormalized and {scoring, experts.scoring} == {"softmax", "softmax_of_chosen"}
        ):
            found[f"scoring {scoring}"] = {"scoring": scoring}
    if not weighs_chosen:
        found["renormalized"] = {"renormalized": not experts.renormalized}
    usual = ExpertsDescription(1, 1)
    for field in fields(experts):
        value = getattr(experts, field.name)
        if field.name not in (*EXPERT_PATHS, *found) and value != getattr(usual, field.name):
            found.setdefault(field.name, {field.name: getattr(usual, field.name)})
    found.pop("scoring", None)
    if experts.groups > 1:
        found["groups"] = {"groups": 1, "chosen_groups": 1}
    return found


@needs_library
@pytest.mark.parametrize("case", MIXTURES)
def test_a_slip_in_experts_is_caught(case: str) -> None:
    decoder, stock = computed_by_library(case, "float32")
    assert decoder.loop is not None
    blocks: list[Any] = [*decoder.loop.blocks]
    right = [block.description for block in blocks]
    experts = next(description.experts for description in right if description.experts)
    slips_in_layers = {
        name: {"experts": replace(experts, **change)}
        for name, change in expert_slips(experts).items()
    }
    if any(description.after_mlp for description in right):  # a norm takes a factor away
        for name in ("scaling", "renormalized", "scoring softmax_of_chosen"):
            del slips_in_layers[name]
    if any(description.experts and description.down for description in right):
        slips_in_layers["of the MLP beside them"] = {"activation": "gelu"}
    for name, change in slips_in_layers.items():
        for block, description in zip(blocks, right, strict=True):
            if description.experts is not None:
                block.description = replace(description, **change)
        use_library(decoder)
        far = distances(rows_at_once(decoder), stock)
        assert far.median() > SHOWN, (name, float(far.median()))
