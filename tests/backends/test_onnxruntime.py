"""The step on ONNX Runtime: the same logits, rows and tokens as torch's, for every family whose
layers are fused.
"""

from __future__ import annotations

import importlib.util
import sys
from functools import cache, partial
from typing import Any

import pytest
import torch

import foretell
from foretell import LM, wrap
from foretell.backends import onnxruntime
from foretell.backends.onnxruntime import TEXT_NODES, OnnxRuntimeBackend, suits_model
from foretell.backends.onnxruntime_graph import load_package
from foretell.backends.openvino import OpenVinoBackend
from foretell.cache.cache import Cache
from foretell.cache.job import Job
from foretell.core.model import Computed
from foretell.core.tree import TokenTree
from foretell.core.types import Ask
from foretell.errors import BadConfig, Unsupported
from foretell.models.decoder.decoder import Decoder
from foretell.models.decoder.fused import fused_blocks
from foretell.models.decoder.packed import pack_layers
from foretell.native.library import is_available
from foretell.native.packing import GROUP, Packed, centred_numbers
from tests.backends.questions import (
    backend_logits,
    close,
    growing_trees_agree,
    hidden_states_are_those_of_torch,
    interruptions_leave_nothing_half_done,
    other_texts_stay_the_same,
    refuses_what_is_not_plain,
)
from tests.backends.test_openvino import FLAGS, in_bfloat16
from tests.models.decoder import families
from tests.models.decoder.families import WINDOW
from tests.models.decoder.test_families import LOOPED, METHODS, PROMPTS, TREE, answer, same_texts
from tests.native.machines import no_library
from tests.tiny import CONTEXT, tokenizer
from tests.tiny import llama as small


def missing(*names: str) -> bool:
    return any(importlib.util.find_spec(name) is None for name in names)


here = pytest.mark.skipif(
    missing("onnx", "onnxruntime"), reason="onnx and onnxruntime are not installed"
)
both = pytest.mark.skipif(
    missing("onnx", "onnxruntime", "openvino"), reason="not all of both runtimes are installed"
)


UNLIKE = {"deepseek_v3", "phi3", "gpt_neox", "stablelm"}  # with heads of other kinds
# Heads that are wide enough for the runtime's attention.
llama = partial(small, head_dim=16)
tiny = partial(families.tiny, head_dim=16)


@cache
def decoder(family: str) -> Decoder:
    """The stock layers, computed by torch."""
    return Decoder(tiny(family), family)


@cache
def fused(family: str) -> Decoder:
    return Decoder(tiny(family), family, fused_blocks)


def is_plain(family: str) -> bool:
    """Whether its layers compute what llama's do: the runtime's graph knows no others."""
    blocks: Any = fused(family).loop.blocks  # type: ignore[union-attr]
    return fused(family).fused and all(block.description.is_plain for block in blocks)


FUSED = sorted(family for family in LOOPED if family not in UNLIKE and is_plain(family))
WINDOWED = [name for name in FUSED if any(w is not None for w in decoder(name).loop.windows)]  # type: ignore[union-attr]


@cache
def fast(family: str) -> Decoder:
    model = fused(family)
    model.use(OnnxRuntimeBackend)
    return model


def narrow(beside: bool = False) -> Decoder:
    """A small model with weights of 8 bits; `beside`: OpenVINO computes what this runtime leaves to
    fallback.
    """
    hf = llama()
    pack_layers(hf, "int8")
    model = Decoder(hf, "tiny", fused_blocks)
    if beside:
        model.use(OpenVinoBackend)
    model.use(partial(OnnxRuntimeBackend, fallback=model.backend))
    return model


def test_there_are_families_to_test() -> None:
    assert {"llama", "mistral", "qwen2", "qwen3"} <= {*FUSED} and WINDOWED


@here
@pytest.mark.parametrize("family", FUSED)
@torch.inference_mode()
def test_a_tree_behind_a_prompt_has_the_logits_and_rows_of_torch(family: str) -> None:
    quick, slow = fast(family), decoder(family)
    one, two = quick.cache(), slow.cache()
    steps = (
        (PROMPTS[0][:-1], TokenTree(PROMPTS[0][-2])),
        (PROMPTS[0], TokenTree(PROMPTS[0][-1])),
        (PROMPTS[1], TREE),
    )
    steps += (([*PROMPTS[1], 3], TokenTree(3).chain([4, 5]).chain([6, 7]).chain([8], at=1)),)
    for tokens, tree in steps:
        ours, theirs = answer(quick, one, Ask(tree), tokens), answer(slow, two, Ask(tree), tokens)
        assert ours.nodes == theirs.nodes
        assert close(ours.logits, theirs.logits)
        for a, b in zip((*one.k, *one.v), (*two.k, *two.v), strict=True):
            end = one.length + len(one.tokens)
            assert close(a[:, :end], b[:, :end])
    if family not in WINDOWED:  # it was not torch that computed the tree
        cache = quick.cache()
        answer(quick, cache, Ask(TokenTree(7)), [5, 6, 7])
        job, _ = cache.prepare(Ask(TREE), [5, 6, 7, TREE.tokens[0]], 999)
        assert backend_logits(quick, [job]) is not None


@here
@pytest.mark.parametrize("family", WINDOWED)
@torch.inference_mode()
def test_a_chain_beyond_its_window_is_taken_and_a_tree_is_not(family: str) -> None:
    quick, slow = fast(family), decoder(family)
    text = [(11 * i) % 90 for i in range(3 * WINDOW)]
    chain, tree = (
        TokenTree(text[-1]).chain([3, 4, 5]),
        TokenTree(text[-1]).chain([3, 4]).chain([5], at=0),
    )
    cache = quick.cache()
    logits = backend_logits(quick, [cache.prepare(Ask(TokenTree(text[-2])), text[:-1], 999)[0]])
    assert logits is not None and close(logits, slow.score(text[:-1]))
    cache.finish()
    job, _ = cache.prepare(Ask(chain), text, 999)
    logits = backend_logits(quick, [job])
    assert logits is not None and close(logits, slow.score(text, chain))
    job, _ = cache.prepare(Ask(tree), text, 999)
    assert backend_logits(quick, [job]) is None
    assert close(quick.score(text, tree), slow.score(text, tree))


@cache
def pair(beside: bool = False) -> tuple[LM, LM]:
    quick, slow = (wrap(llama(), tokenizer(), llama(1), "tiny") for _ in range(2))
    for model in quick.models.values():
        assert isinstance(model, Decoder)
        if beside:
            model.use(OpenVinoBackend)
        model.use(partial(OnnxRuntimeBackend, fallback=model.backend))
    return quick, slow


@here
@pytest.mark.parametrize("method", METHODS)
def test_texts_are_those_of_torch(method: str) -> None:
    same_texts(*pair(), method)


@both
@torch.inference_mode()
def test_what_it_leaves_to_others_lies_in_the_same_rows() -> None:
    """Long pieces and several requests go to OpenVINO, in turns with single ones that this runtime
    computes.
    """
    quick, slow = (lm.models["target"] for lm in pair(beside=True))
    assert isinstance(quick, Decoder) and isinstance(quick.backend, OnnxRuntimeBackend)
    texts = [[(7 * i + j) % 300 for i in range(60)] for j in range(3)]
    caches = [quick.cache() for _ in texts]
    for n, together in ((50, True), (3, False), (5, True), (1, False), (40, False), (2, False)):
        trees = [TokenTree(text[-1]).chain((11 * i) % 300 for i in range(1, n)) for text in texts]
        prepared = [
            c.prepare(Ask(tr), t, 999)[0] for c, tr, t in zip(caches, trees, texts, strict=True)
        ]
        found = (
            backend_logits(quick, prepared)
            if together
            else torch.cat([backend_logits(quick, [job]) for job in prepared])
        )  # type: ignore[misc]
        assert found is not None
        for row, text, tree in zip(
            found.split([len(job.rows) for job in prepared]), texts, trees, strict=True
        ):
            assert close(row, slow.score(text, tree)[-len(row) :])
        for part in caches:
            part.finish()
        texts = [[*text, *tree.tokens[1:3], 5] for text, tree in zip(texts, trees, strict=True)]
    assert quick.backend.fallback is not None and quick.backend.fallback.name == "openvino"
    one, two = (
        lm.generate(["def f(", "class A:", "x = "], "ngram", max_new_tokens=24)
        for lm in pair(beside=True)
    )
    assert [out.tokens for out in one] == [out.tokens for out in two]


@both
@pytest.mark.skipif("avx512_vnni" not in FLAGS, reason="seen to hold on AVX-512 with VNNI")
@pytest.mark.parametrize("length", [1, 2, 20, TEXT_NODES - 1, TEXT_NODES, TEXT_NODES + 1, 90])
@torch.inference_mode()
def test_who_computes_a_token_does_not_depend_on_a_draft(length: int) -> None:
    """A first step with a chain or a tree leaves the rows of one without, whoever took the
    prompt.
    """
    model = narrow(beside=True)
    text = [(7 * i) % 300 for i in range(length)]
    plain = model.cache()
    alone, caches = answer(model, plain, Ask(TokenTree(text[-1])), text).logits, []
    for tree in (
        TokenTree(text[-1]).chain([3, 4, 5]),
        TokenTree(text[-1]).chain([3, 4]).chain([5, 6], at=0),
    ):
        for rows in (None, [3, 0, 2]):
            caches.append(model.cache())
            found = answer(model, caches[-1], Ask(tree, rows=rows), text)
            assert found.nodes == (rows or [*range(len(tree))])
            assert torch.equal(found.logits[found.nodes.index(0)], alone[0])
            every = answer(model, model.cache(), Ask(tree), text).logits
            assert torch.equal(found.logits, every if rows is None else every[rows])
    for held in caches:
        for a, b in zip((*plain.k, *plain.v), (*held.k, *held.v), strict=True):
            assert torch.equal(a[:, : length - 1], b[:, : length - 1])


@here
@pytest.mark.skipif("avx512_vnni" not in FLAGS, reason="seen to hold on AVX-512 with VNNI")
@pytest.mark.parametrize("kind", ["float32", "int8"])
@torch.inference_mode()
def test_a_row_is_the_same_to_the_last_bit_in_any_forward(kind: str) -> None:
    """However many nodes are computed at once: what makes drafts change nothing."""
    model = narrow() if kind == "int8" else pair()[0].models["target"]
    assert isinstance(model, Decoder)
    text = [(13 * i * i + 5 * i) % 300 for i in range(150)]

    def rows(count: int) -> torch.Tensor:
        held, found = model.cache(), []
        for low in range(0, len(text) - 1, count):
            tree = TokenTree(text[low]).chain(text[low + 1 : min(low + count, len(text) - 1)])
            logits = backend_logits(model, [held.prepare(Ask(tree), text[: low + 1], 999)[0]])
            assert logits is not None
            found.append(logits.clone())
            held.finish()
            held.commit(text[: low + len(tree) + 1])
        return torch.cat(found)

    whole = rows(TEXT_NODES)
    if kind == "int8":
        assert all(torch.equal(whole, rows(count)) for count in (1, 2, 3, 5, 8, 16, 31))
    else:  # products of float32 are not ours to choose
        assert all(close(whole, rows(count)) for count in (1, 2, 3, 5, 8, 16, 31))


@here
@pytest.mark.parametrize("format", ["int8", "int4"])
@pytest.mark.parametrize("family", FUSED)
@torch.inference_mode()
def test_packed_weights_are_those_of_torch(family: str, format: str) -> None:
    """The same matrices, also where a row has no whole number of groups."""
    hf = tiny(family)
    assert hf.config.intermediate_size % GROUP
    pack_layers(hf, format)
    model = Decoder(hf, "tiny", fused_blocks)

    def rows() -> torch.Tensor:
        held, text = model.cache(), PROMPTS[1]
        answer(model, held, Ask(TokenTree(text[-2])), text[:-1])
        return answer(model, held, Ask(TREE), text).logits

    theirs = rows()
    model.use(OnnxRuntimeBackend)
    ours = rows()
    # Of the sums that minima are multiplied by, it rounds nothing.
    allowed = 0.05 if format == "int8" else 0.15
    assert (ours - theirs).abs().max() <= allowed * theirs.abs().max()
    assert not torch.equal(ours, theirs)


@here
@torch.inference_mode()
def test_a_tree_that_grows_level_by_level_sees_what_it_saw() -> None:
    growing_trees_agree(*(lm.models["target"] for lm in pair()))


@here
@pytest.mark.parametrize("at", range(10))
@torch.inference_mode()
def test_a_step_that_was_interrupted_leaves_nothing_half_done(
    at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it was while it told the runtime what is new."""
    interruptions_leave_nothing_half_done(
        *(lm.models["target"] for lm in pair()), OnnxRuntimeBackend, at, monkeypatch
    )


@here
@torch.inference_mode()
def test_logits_that_somebody_holds_are_left_alone() -> None:
    quick = pair()[0].models["target"]
    held, text = quick.cache(), [5, 6, 7]
    parts: list[tuple[torch.Tensor, torch.Tensor]] = []
    for i in range(40):
        logits = answer(quick, held, Ask(TokenTree(text[-1]).chain([i, i + 1])), text).logits
        if i % 3 == 0:
            parts.append((logits[1:2], logits[1:2].clone()))
        text = [*text, (7 * i) % 300]
    assert all(torch.equal(part, copy) for part, copy in parts)


@here
@torch.inference_mode()
def test_growing_and_shared_caches_and_rows_in_any_order() -> None:
    quick, slow = (lm.models["target"] for lm in pair())
    one, two = quick.cache(), slow.cache()
    one.capacity = two.capacity = (
        8  # grows under the session, once for the second place of a single node
    )
    one._allocate()
    two._allocate()
    tokens = [5, 6, 7, 8, 9]
    for size in (3, 1, 1, 1, 2, 7, 1, 16, TEXT_NODES, 1):
        tree = TokenTree(tokens[-1]).chain((i * 7) % 300 for i in range(1, size))
        rows = [*range(size)][::-1] if size % 2 else None
        ours, theirs = (
            answer(m, c, Ask(tree, rows=rows), tokens) for m, c in ((quick, one), (slow, two))
        )
        assert ours.nodes == theirs.nodes and close(ours.logits, theirs.logits), size
        twin = one.fork()  # who writes first copies
        other = [*tokens, 3]
        assert close(answer(quick, twin, Ask(TokenTree(3)), other).logits, slow.score(other))
        tokens = [*tokens, *tree.tokens[1:3]]


@here
@torch.inference_mode()
def test_what_it_does_not_do_is_torch_s() -> None:
    quick, slow = (lm.models["target"] for lm in pair())
    tokens = [5, 6, 7]
    ours, theirs = (
        answer(m, m.cache(), Ask(TokenTree(7), layers=(1,)), tokens) for m in (quick, slow)
    )
    assert close(ours.logits, theirs.logits)
    refuses_what_is_not_plain(quick)  # type: ignore[arg-type]
    long = [
        i % 300 for i in range(CONTEXT - 1)
    ]  # a piece of it, and where the last place is no cache's any more
    assert close(
        answer(quick, quick.cache(), Ask(TokenTree(long[-1])), long).logits, slow.score(long)
    )
    jobs = [quick.cache().prepare(Ask(TokenTree(7)), tokens, 999)[0] for _ in range(2)]
    assert backend_logits(quick, jobs) is None  # type: ignore[arg-type]


@here
def test_another_number_of_threads_is_noticed() -> None:
    model = Decoder(llama(), "tiny", fused_blocks)
    model.use(OnnxRuntimeBackend)
    backend, before = model.backend, torch.get_num_threads()
    assert isinstance(backend, OnnxRuntimeBackend)
    session = backend.session
    try:
        torch.set_num_threads(2 if before == 1 else 1)
        model.score([1, 2, 3])
        assert backend.threads == torch.get_num_threads() and backend.session is not session
    finally:
        torch.set_num_threads(before)


@both
@in_bfloat16
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_narrow_models_have_it_where_the_c_library_cannot_be_had(dtype: str) -> None:
    with no_library():
        lm = foretell.load("demo", dtype=dtype)
        assert lm.refusals == {"target": (), "draft": ()}
        for model in lm.models.values():
            assert isinstance(model, Decoder) and isinstance(model.backend, OnnxRuntimeBackend)
            assert model.dtype == torch.float32 and model.matrices == dtype
            assert isinstance(model.backend.fallback, OpenVinoBackend)
            assert not model.backend.fallback.compiled, "graphs that only a probe needed"
            assert not model.exact_bits
        wide = foretell.load("demo").models["target"]
    assert isinstance(wide, Decoder) and isinstance(wide.backend, OpenVinoBackend)
    target = foretell.load("demo", dtype=dtype, backend="openvino").models["target"]
    assert isinstance(target, Decoder) and isinstance(target.backend, OpenVinoBackend)
    assert target.dtype == torch.bfloat16


@here
def test_large_models_and_wide_ones_do_not_suit(monkeypatch: pytest.MonkeyPatch) -> None:
    hf = llama()
    other = families.tiny("gemma2")  # whose layers it would refuse: they keep their number format
    with no_library():
        assert not suits_model(hf) and not suits_model(hf, by_name=True)
        pack_layers(hf, "int8"), pack_layers(other, "int8")
        assert suits_model(hf) and not suits_model(other)
        monkeypatch.setattr("foretell.backends.onnxruntime.LARGEST", 1000)
        assert not suits_model(hf)
    assert suits_model(hf, by_name=True)
    if is_available():
        monkeypatch.undo()
        assert not suits_model(hf), "the C library is quicker"
        target = foretell.load("demo", dtype="int8", backend="onnxruntime").models["target"]
        assert isinstance(target, Decoder) and isinstance(target.backend, OnnxRuntimeBackend)


@here
@pytest.mark.parametrize("format", ["int8", "int4"])
@torch.inference_mode()
def test_a_wrong_graph_of_narrow_weights_is_refused(
    format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One layer's scales taken for another's: nothing that rounding explains."""
    hf = llama()
    pack_layers(hf, format)
    model = Decoder(hf, "tiny", fused_blocks)

    def other(packed: Packed) -> tuple[torch.Tensor, int, torch.Tensor, torch.Tensor | None]:
        numbers, bits, scales, minima = centred_numbers(packed)
        return numbers, bits, scales.roll(1, 0), minima

    monkeypatch.setattr("foretell.backends.onnxruntime_graph.centred_numbers", other)
    with pytest.raises(LookupError, match="differ from torch's by more than rounding"):
        model.use(OnnxRuntimeBackend)
    monkeypatch.undo()
    model.use(OnnxRuntimeBackend)


@here
def test_why_it_cannot_be_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LookupError, match="computes in float32"):
        Decoder(llama().bfloat16(), "tiny", fused_blocks).use(OnnxRuntimeBackend)
    with pytest.raises(Unsupported, match=r"backend='onnxruntime'.*float32"):
        foretell.load("demo", backend="onnxruntime")
    with pytest.raises(LookupError, match="loop over the layers"):
        Decoder(families.tiny("nanochat"), "tiny").use(OnnxRuntimeBackend)
    load_package.cache_clear()
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(LookupError, match=r"onnx is missing.*foretell\[cpu\]"):
        Decoder(llama(), "tiny", fused_blocks).use(OnnxRuntimeBackend)
    with pytest.raises(Unsupported, match=r"backend='onnxruntime'.*foretell\[cpu\]"):
        foretell.load("demo", dtype="int8", backend="onnxruntime")
    with pytest.raises(
        BadConfig,
        match="backend='fast': must be one of auto, torch, openvino, onnxruntime, native, graphs",
    ):
        foretell.load("demo", backend="fast")


@here
def test_layers_of_another_build_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LookupError, match="of another build"):
        Decoder(tiny("gemma2"), "tiny", fused_blocks).use(OnnxRuntimeBackend)
    with pytest.raises(LookupError, match="multiple of 16"):
        Decoder(small(), "tiny", fused_blocks).use(OnnxRuntimeBackend)
    monkeypatch.setattr("foretell.backends.onnxruntime_graph.LARGEST", 1000)
    with pytest.raises(LookupError, match="more than 2 GB"):
        Decoder(llama(), "tiny", fused_blocks).use(OnnxRuntimeBackend)


@both
def test_a_refusal_leaves_the_backend_that_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    run = OnnxRuntimeBackend._run_session

    def wrong(self: OnnxRuntimeBackend, job: Job) -> Computed:
        return Computed(run(self, job).logits * 1.01)

    monkeypatch.setattr(OnnxRuntimeBackend, "_run_session", wrong)
    model = Decoder(llama(), "tiny", fused_blocks)
    model.use(OpenVinoBackend)
    before = model.backend
    with pytest.raises(LookupError, match="differ"):
        model.use(partial(OnnxRuntimeBackend, fallback=before))
    assert model.backend is before

    def broken(*_: Any) -> None:
        raise RuntimeError("no such instruction\nand more")

    monkeypatch.setattr(OnnxRuntimeBackend, "_open_session", broken)
    with pytest.raises(LookupError, match=r"it fails: no such instruction$"):
        model.use(partial(OnnxRuntimeBackend, fallback=before))
    assert model.backend is before and len(model.score([1, 2, 3])) == 1


@here
def test_an_audit_is_of_the_backend() -> None:
    from foretell.audit.copies import float32_copy

    lm = wrap(llama(), tokenizer(), name="tiny")
    lm.models["target"].use(OnnxRuntimeBackend)  # type: ignore[attr-defined]
    assert isinstance(float32_copy(lm).models["target"].backend, OnnxRuntimeBackend)  # type: ignore[attr-defined]


@here
def test_it_says_nothing_while_it_is_made(capfd: pytest.CaptureFixture[str]) -> None:
    model = Decoder(llama(), "tiny", fused_blocks)
    model.use(OnnxRuntimeBackend)
    model.score([1, 2, 3])
    assert capfd.readouterr() == ("", "")


@here
def test_a_cache_is_torch_s_where_nobody_else_has_one() -> None:
    assert type(pair()[0].models["target"].cache()) is Cache


@here
@torch.inference_mode()
def test_hidden_states_are_those_of_torch() -> None:
    quick, slow = (Decoder(llama(), "tiny", fused_blocks) for _ in range(2))
    quick.use(OnnxRuntimeBackend)
    hidden_states_are_those_of_torch(quick, slow, batches=False)


@both
@torch.inference_mode()
def test_hidden_states_of_long_texts_and_batches_are_the_fallback_s() -> None:
    quick, slow = (Decoder(llama(), "tiny", fused_blocks) for _ in range(2))
    quick.use(OpenVinoBackend)
    quick.use(partial(OnnxRuntimeBackend, fallback=quick.backend))
    assert quick.backend is not None and quick.backend.fallback is not None
    hidden_states_are_those_of_torch(quick, slow)
    # Those that only the fallback was asked for are left out where both give a part.
    text = [(7 * i) % 300 for i in range(TEXT_NODES + 9)]
    first, _ = quick.cache().prepare(Ask(TokenTree(5)), [4, 5], 999)
    quick.backend.fallback([first], 1, (0, 1, 2))
    ask = Ask(TokenTree(text[-1]).chain([3, 4]).chain([5], at=0), taps=(1,))
    ours, theirs = (answer(m, m.cache(), ask, text) for m in (quick, slow))
    assert ours.hidden.keys() == theirs.hidden.keys()
    assert close(ours.hidden[1], theirs.hidden[1])


@here
@torch.inference_mode()
def test_hidden_states_with_weights_of_8_bits() -> None:
    model = narrow()
    tree = TokenTree(7).chain([1, 2])
    job, _ = model.cache().prepare(Ask(tree), [5, 6, 7], 999)
    assert model.backend is not None
    computed = model.backend([job], torch.get_num_threads(), (0, 2))
    assert computed is not None
    backend, model.backend = model.backend, None
    theirs = answer(model, model.cache(), Ask(tree, taps=(0, 2)), [5, 6, 7])
    model.backend = backend
    assert torch.equal(computed.hidden[0], theirs.hidden[0])
    distance = (computed.hidden[2] - theirs.hidden[2]).abs().max()
    assert 0 < distance <= 0.05 * theirs.hidden[2].abs().max()


@here
def test_texts_are_the_same_before_and_after_a_tap() -> None:
    lm = wrap(llama(), tokenizer(), name="tiny")
    lm.models["target"].use(OnnxRuntimeBackend)  # type: ignore[attr-defined]
    other_texts_stay_the_same(lm)


@here
@torch.inference_mode()
def test_where_no_hidden_states_can_be_had_torch_computes_them_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quick, slow = (Decoder(llama(), "tiny", fused_blocks) for _ in range(2))
    quick.use(OnnxRuntimeBackend)
    export = onnxruntime.export_graph

    def refuses(graph: Any, *args: Any) -> bytes:
        if graph.taps:
            raise LookupError("no such output")
        return export(graph, *args)

    monkeypatch.setattr(onnxruntime, "export_graph", refuses)
    ask = Ask(TokenTree(7).chain([1]), taps=(1,))
    with pytest.warns(UserWarning, match="onnxruntime.*no such output.*others compute"):
        ours = answer(quick, quick.cache(), ask, [5, 6, 7])
    again = answer(quick, quick.cache(), ask, [5, 6, 7])  # and it is said once
    theirs = answer(slow, slow.cache(), ask, [5, 6, 7])
    assert torch.equal(ours.hidden[1], theirs.hidden[1])
    assert torch.equal(again.hidden[1], theirs.hidden[1])
    job, _ = quick.cache().prepare(Ask(TokenTree(7)), [5, 6, 7], 999)
    logits = backend_logits(quick, [job])
    assert logits is not None and close(logits, slow.score([5, 6, 7]))


@both
@torch.inference_mode()
def test_what_is_released_is_built_again() -> None:
    quick = narrow(beside=True)
    backend = quick.backend
    assert isinstance(backend, OnnxRuntimeBackend)
    assert isinstance(backend.fallback, OpenVinoBackend)
    before = quick.score([5, 6, 7], TokenTree(7).chain([1, 2]))
    backend.release()
    assert backend.session is None and not backend.fallback.compiled
    assert torch.equal(quick.score([5, 6, 7], TokenTree(7).chain([1, 2])), before)
