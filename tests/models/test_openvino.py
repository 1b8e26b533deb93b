"""The step on OpenVINO: the same logits, rows and tokens as torch's, for every family whose loop is ours."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache

import pytest
import torch

import foretell
from foretell import LM, wrap
from foretell.errors import BadConfig, Unsupported
from foretell.models.decoder import Decoder
from foretell.models.openvino import SIZES, Executor, runtime
from foretell.tree import TokenTree
from foretell.types import Ask
from tests.models.families import tiny
from tests.models.test_families import LOOPED, PROMPTS, TREE, answer, decoder
from tests.tiny import CONTEXT, llama, tokenizer

here = pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="openvino is not installed")
# Which experts a token goes to is decided by Python code in these, and a recording would always take the same.
ROUTED = {"mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"}


@cache
def fast(family: str) -> Decoder:
    model = Decoder(tiny(family), family, foretell.models.fused.blocks)
    model.use(Executor)
    return model


def close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return bool((ours - theirs).abs().max() <= 1e-4 * theirs.abs().max())


@here
@pytest.mark.parametrize("family", sorted(set(LOOPED) - ROUTED))
@torch.inference_mode()
def test_a_tree_behind_a_prompt_has_the_logits_and_rows_of_torch(family: str) -> None:
    quick, slow = fast(family), decoder(family)
    one, two = quick.cache(), slow.cache()
    for tokens, tree in ((PROMPTS[0], TokenTree(PROMPTS[0][-1])), (PROMPTS[1], TREE)):
        ours, theirs = answer(quick, one, Ask(tree), tokens), answer(slow, two, Ask(tree), tokens)
        assert ours.nodes == theirs.nodes
        assert close(ours.logits, theirs.logits)
        for mine, other in zip((*one.k, *one.v), (*two.k, *two.v), strict=True):
            end = one.length + len(one.tokens)
            assert close(mine[:, :end], other[:, :end])
    assert quick.calls >= 2


@here
@pytest.mark.parametrize("family", sorted(ROUTED))
def test_experts_chosen_by_python_stay_with_torch(family: str) -> None:
    model = Decoder(tiny(family), family)
    try:
        model.use(Executor)
    except LookupError as error:
        assert str(error)
        assert model.executor is None
    else:  # a version that decides in the graph is as good as any family
        assert close(answer(model, model.cache(), Ask(TREE), PROMPTS[1]).logits,
                     answer(decoder(family), decoder(family).cache(), Ask(TREE), PROMPTS[1]).logits)  # fmt: skip


@cache
def pair() -> tuple[LM, LM]:
    quick, slow = (wrap(llama(), tokenizer(), llama(1), "tiny") for _ in range(2))
    for model in quick.models.values():
        model.use(Executor)  # type: ignore[attr-defined]
    return quick, slow


@here
@pytest.mark.parametrize("method", ["plain", "ngram", "suffix+token-recycling", "draft:nodes=6"])
def test_texts_are_those_of_torch(method: str) -> None:
    quick, slow = pair()
    for more in ({}, {"temperature": 0.9, "seed": 3, "n": 2}, {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3}):
        ours, theirs = (lm.generate("def add(a, b):", method, max_new_tokens=40, **more) for lm in (quick, slow))
        assert [s.tokens for s in ours.samples] == [s.tokens for s in theirs.samples]


@here
@torch.inference_mode()
def test_every_size_and_a_growing_and_a_shared_cache_agree() -> None:
    quick, slow = (lm.models["target"] for lm in pair())
    for model in (quick, slow):
        assert isinstance(model, Decoder)
    one, two = quick.cache(), slow.cache()
    one.capacity = two.capacity = 4  # grows under the graph
    one._allocate()
    two._allocate()
    tokens = [5, 6, 7, 8, 9]
    for size in sorted({1, 2, *SIZES, *(s + 1 for s in SIZES if s < 64)}):
        tree = TokenTree(tokens[-1]).chain((i * 7) % 300 for i in range(1, size))
        ours, theirs = answer(quick, one, Ask(tree), tokens), answer(slow, two, Ask(tree), tokens)
        assert close(ours.logits, theirs.logits), size
        twin = one.fork()  # who writes first copies
        other = [*tokens, 3]
        assert close(answer(quick, twin, Ask(TokenTree(3)), other).logits, slow.score(other))
        tokens = [*tokens, *tree.tokens[1:2]]


@here
@torch.inference_mode()
def test_what_it_does_not_do_is_torch_s() -> None:
    quick, slow = (lm.models["target"] for lm in pair())
    tokens = [5, 6, 7]
    before = quick.calls
    ours, theirs = (answer(m, m.cache(), Ask(TokenTree(7), taps=(1,)), tokens) for m in (quick, slow))
    assert torch.equal(ours.hidden[1], theirs.hidden[1])
    assert quick.calls > before
    long = [i % 300 for i in range(CONTEXT - 1)]
    assert close(answer(quick, quick.cache(), Ask(TokenTree(long[-1])), long).logits, slow.score(long))


@here
def test_another_number_of_threads_is_noticed() -> None:
    model = Decoder(llama(), "tiny")
    model.use(Executor)
    executor, before = model.executor, torch.get_num_threads()
    assert isinstance(executor, Executor)
    slots = dict(executor.slots)
    try:
        torch.set_num_threads(2 if before == 1 else 1)
        model.score([1, 2, 3])
        assert executor.threads == torch.get_num_threads()
        assert not set(slots.values()) & set(executor.slots.values())
    finally:
        torch.set_num_threads(before)


def test_why_it_cannot_be_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LookupError, match="does not compute in"):
        Decoder(llama().double(), "tiny").use(Executor)
    with pytest.raises(LookupError, match="loop over the layers"):
        Decoder(tiny("gpt2"), "tiny").use(Executor)
    runtime.cache_clear()
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(LookupError, match=r"foretell\[cpu\]"):
        Decoder(llama(), "tiny").use(Executor)
    with pytest.raises(Unsupported, match=r"executor='openvino'.*foretell\[cpu\]"):
        foretell.load("demo", executor="openvino")
    assert foretell.load("demo").models["target"].executor is None  # type: ignore[attr-defined]
    with pytest.raises(BadConfig, match="executor='fast': must be one of auto, torch, openvino, graphs"):
        foretell.load("demo", executor="fast")


@here
def test_wrong_numbers_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Executor.__call__
    monkeypatch.setattr(Executor, "__call__", lambda self, jobs, threads: run(self, jobs, threads) * 1.01)
    model = Decoder(llama(), "tiny")
    with pytest.raises(LookupError, match="differ"):
        model.use(Executor)
    assert model.executor is None


@here
def test_a_graph_that_fails_when_it_runs_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Executor, size: int) -> None:
        raise RuntimeError("no such instruction\nand more")

    monkeypatch.setattr(Executor, "_compile", broken)
    model = Decoder(llama(), "tiny")
    with pytest.raises(LookupError, match="it fails: no such instruction$"):
        model.use(Executor)
    assert model.executor is None
    assert len(model.score([1, 2, 3])) == 1


@here
def test_what_it_has_no_rule_for_is_named() -> None:
    with pytest.raises(LookupError, match="No conversion rule found for operations"):
        Decoder(tiny("mixtral"), "tiny").use(Executor)


@here
def test_an_audit_is_of_the_executor() -> None:
    from foretell.audit import _in_float32

    lm = wrap(llama().bfloat16(), tokenizer(), name="tiny")
    assert _in_float32(lm)["target"].executor is None  # type: ignore[attr-defined]
    lm.models["target"].use(Executor)  # type: ignore[attr-defined]
    wide = _in_float32(lm)["target"]
    assert isinstance(wide.executor, Executor) and wide.dtype == torch.float32  # type: ignore[attr-defined]


@here
def test_it_reports_to_nobody() -> None:
    Decoder(llama(), "tiny").use(Executor)
    assert sys.modules.get("openvino_telemetry") is None
