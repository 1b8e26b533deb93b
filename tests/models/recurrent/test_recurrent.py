"""Families with recurrent layers: tokens and rows are transformers' own, and what a cache remembers
after any drafts is what a fresh prefill of the text leaves behind.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import foretell
from foretell import LM, wrap
from foretell.cache.prefix_tree import PrefixTree
from foretell.core.distribution import Sampler, Target
from foretell.core.random import Rng
from foretell.core.request import Request
from foretell.core.tree import Law, TokenTree
from foretell.core.types import Ask, Reply, Sampling
from foretell.engine.engine import Engine
from foretell.engine.prefix_cache import WORTH, Reuse
from foretell.errors import Unsupported
from foretell.models.recurrent.recurrent import Recurrent, StateCache
from foretell.speculation.strategy import Speculative
from foretell.strategies.plain import Plain
from foretell.verification.acceptance import verify_in_order
from tests import laws
from tests.cache.users import Evictor, Guess, run
from tests.models.decoder.families import RECURRENT, VOCAB, tiny

NEW = 16
PROMPTS = [[5, 17, 3, 5, 17, 3, 9, 60, 33, 2, 5, 17, 3, 44, 81], list(range(1, 22))]
METHODS = ("ngram:nodes=6", "token-recycling:nodes=8", "draft:nodes=6")
every_family = pytest.mark.parametrize("family", sorted(RECURRENT))


@cache
def stock(family: str) -> PreTrainedModel:
    return tiny(family)


@cache
def lm(family: str) -> LM:
    return wrap(stock(family), draft=tiny(family, noise=0.03), name=family)


def adapter(family: str) -> Recurrent:
    model = lm(family).models["target"]
    assert isinstance(model, Recurrent)
    return model


@cache
def expected(family: str) -> list[list[int]]:
    """transformers' own greedy tokens, one prompt at a time."""
    answers = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = stock(family).generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False
        )
        answers.append(out[0, len(prompt) :].tolist())
    return answers


@torch.inference_mode()
def whole(family: str, tokens: Sequence[int]) -> torch.Tensor:
    """Rows (L, V) by transformers alone."""
    return stock(family)(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]


@torch.inference_mode()
def answer(model: Recurrent, held: Any, ask: Ask, tokens: Sequence[int], chunk: int = 512) -> Reply:
    """What the engine does to answer one ask."""
    done = False
    while not done:
        job, done = held.prepare(ask, tokens, chunk)
        reply = model.forward([job])[0]
    return reply


def remembered(held: Any) -> list[torch.Tensor]:
    """All that a cache keeps of its committed tokens."""
    parts = [rows[:, : held.base] for rows in (*held.k, *held.v) if rows is not None]
    for layer in held.held.values():
        parts += [layer.text.window, layer.text.state]
    return parts


def same_memory(model: Recurrent, held: StateCache, tokens: Sequence[int]) -> None:
    """It is that of a fresh prefill of as many tokens, and answers as that does."""
    held.commit(tokens)
    assert held.length == len(tokens) - 1
    fresh = model.cache()
    want = answer(model, fresh, Ask(TokenTree(tokens[-1])), tokens)
    text = [*tokens, 0]
    fresh.commit(text)
    twin = held.fork()
    got = answer(model, twin, Ask(TokenTree(tokens[-1])), tokens)
    twin.commit(text)
    torch.testing.assert_close(got.logits, want.logits, atol=1e-4, rtol=1e-4)
    for ours, theirs in zip(remembered(twin), remembered(fresh), strict=True):
        largest = max(1.0, float(theirs.abs().amax())) if theirs.numel() else 1.0
        torch.testing.assert_close(ours, theirs, atol=1e-5 * largest, rtol=0)


def random_tree(chooser: random.Random, root: int, size: int, wide: bool) -> TokenTree:
    tree = TokenTree(root)
    for _ in range(size):
        parent = chooser.randrange(len(tree)) if wide else len(tree) - 1
        tree.add(parent, chooser.randrange(VOCAB))
    return tree


# --- tokens and rows


@every_family
def test_greedy_tokens_are_those_of_transformers(family: str) -> None:
    accepted = 0
    more = ("plain", "suffix:nodes=6") if family in ("mamba2", "jamba") else ()
    for method in (*METHODS, *more):
        outs = lm(family).generate(PROMPTS, method, max_new_tokens=NEW)
        assert [out.tokens for out in outs] == expected(family), method
        accepted += sum(out.stats.accepted for out in outs)
    assert accepted > 5
    assert len({token for answer in expected(family) for token in answer}) > 5


@every_family
def test_rows_of_a_tree_behind_pieces_are_those_of_its_paths(family: str) -> None:
    model, prompt = adapter(family), PROMPTS[1]
    chooser = random.Random(1)
    for chunk, wide in ((5, True), (512, True), (1, False)):
        tree = random_tree(chooser, prompt[-1], 9, wide)
        rows = answer(model, model.cache(), Ask(tree), prompt, chunk).logits
        for node in range(len(tree)):
            row = whole(family, prompt + tree.tokens_to(node))[-1]
            assert float((row - rows[node]).abs().max()) <= 2e-4, (chunk, node)


@every_family
def test_a_long_prompt_gives_transformers_rows(family: str) -> None:
    model = adapter(family)
    chooser = random.Random(2)
    prompt = [chooser.randrange(VOCAB) for _ in range(120)]
    want = whole(family, prompt)[-1]
    for chunk in (512, 50):
        held = model.cache()
        row = answer(model, held, Ask(TokenTree(prompt[-1])), prompt, chunk).logits[0]
        assert float((row - want).abs().max()) <= 5e-4, chunk


def test_a_text_longer_than_a_chunk() -> None:
    for family in ("mamba2", "qwen3_next"):
        model = Recurrent(tiny(family, max_position_embeddings=2048), family)
        chooser = random.Random(3)
        prompt = [chooser.randrange(VOCAB) for _ in range(700)]
        tree = TokenTree(prompt[-1]).chain([1, 2])
        rows = answer(model, model.cache(), Ask(tree), prompt).logits
        with torch.inference_mode():
            want = model.hf(input_ids=torch.tensor([[*prompt, 1, 2]]), use_cache=False).logits[0]
        assert float((rows - want[-3:]).abs().max()) <= 1e-3


@every_family
def test_seeds_give_the_tokens_of_plain_decoding(family: str) -> None:
    options: dict[str, Any] = {"temperature": 0.8, "seed": 3, "max_new_tokens": 12, "n": 2}
    plain = lm(family).generate(PROMPTS[0], "plain", **options)
    trees = lm(family).generate(PROMPTS[0], "token-recycling:nodes=8", **options)
    assert [s.tokens for s in trees.samples] == [s.tokens for s in plain.samples]


# --- what is remembered


@every_family
@pytest.mark.parametrize("wide", [False, True], ids=["chains", "trees"])
def test_after_any_accepted_drafts_the_memory_is_that_of_a_prefill(family: str, wide: bool) -> None:
    """Random drafts of which random parts are accepted, prompts in pieces, trees that grow."""
    model = adapter(family)
    for seed in range(2):
        chooser = random.Random(f"{family} {wide} {seed}")
        tokens = [chooser.randrange(VOCAB) for _ in range(chooser.randrange(2, 20))]
        held = model.cache()
        for _ in range(5):
            tree = random_tree(chooser, tokens[-1], chooser.randrange(7), wide)
            answer(model, held, Ask(tree), tokens, chooser.choice([2, 3, 512]))
            if chooser.random() < 0.5:  # it grows, and its new nodes alone are computed
                at = chooser.randrange(len(tree)) if wide else len(tree) - 1
                new = [tree.add(at, chooser.randrange(VOCAB)) for at in [at]]
                row = answer(model, held, Ask(tree, rows=new), tokens).logits[0]
                want = whole(family, tokens + tree.tokens_to(new[0]))[-1]
                assert float((row - want).abs().max()) <= 2e-4
            node = chooser.randrange(len(tree))
            accepted = tree.tokens_to(node)
            tokens = [*tokens, *accepted, chooser.randrange(VOCAB)]
        same_memory(model, held, tokens)


@every_family
def test_rejected_drafts_leave_the_memory_bit_for_bit(family: str) -> None:
    model, prompt = adapter(family), PROMPTS[0]
    held = model.cache()
    answer(model, held, Ask(TokenTree(prompt[-2])), prompt[:-1])
    held.commit(prompt)
    before = [part.clone() for part in remembered(held)]
    tree = TokenTree(prompt[-1]).chain([1, 2, 3]).chain([4, 5], at=1)
    answer(model, held, Ask(tree), prompt)
    held.commit(prompt)  # nothing of it was accepted
    assert all(torch.equal(a, b) for a, b in zip(before, remembered(held), strict=True))
    same_memory(model, held, prompt)


@every_family
def test_forks_go_different_ways(family: str) -> None:
    model, prompt = adapter(family), PROMPTS[0]
    held = model.cache()
    tree = TokenTree(prompt[-1]).chain([1, 2]).chain([4, 5], at=1)
    answer(model, held, Ask(tree), prompt)
    twin = held.fork()
    same_memory(model, held, [*prompt, 1, 2, 9])
    same_memory(model, twin, [*prompt, 1, 4, 5, 7])
    answer(model, twin, Ask(TokenTree(7)), [*prompt, 1, 4, 5, 7])
    same_memory(model, held, [*prompt, 1, 2, 9])


@pytest.mark.parametrize("family", ["mamba2", "jamba", "qwen3_next", "recurrent_gemma"])
def test_interrupted_forwards_are_forgotten(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that fails in the middle, where some layers have taken its nodes in and others not."""
    model, prompt = adapter(family), PROMPTS[0]
    held = model.cache()
    tree = TokenTree(prompt[-1]).chain([1, 2])
    answer(model, held, Ask(tree), prompt)
    last = model.mixers[max(model.mixers)]

    def fail(*_: Any) -> Any:
        raise RuntimeError("interrupted")

    for more, text in ((tree.chain([3], at=2), prompt), (TokenTree(4), [*prompt, 1, 4])):
        job, _ = held.prepare(Ask(more, rows=[len(more) - 1]), text, 512)
        with monkeypatch.context() as patch:
            patch.setattr(last, "project_inputs", fail)
            with pytest.raises(RuntimeError, match="interrupted"), torch.inference_mode():
                model.forward([job])
    answer(model, held, Ask(TokenTree(4).chain([6, 6])), [*prompt, 1, 4])
    same_memory(model, held, [*prompt, 1, 4, 6, 8])


@every_family
def test_requests_in_pieces_preempted_or_together_equal_each_alone(family: str) -> None:
    models = dict(lm(family).models)
    text = (*PROMPTS[0], *expected(family)[0])
    drafters = [
        Guess(text, 5, 3, vocab=VOCAB),
        Guess(text, 4, 0, vocab=VOCAB, wide=True),
        Guess(text, 3, 1, vocab=VOCAB),
    ]
    strategies = [Plain(), *(Speculative(drafter, nodes=12) for drafter in drafters)]
    requests = [
        Request(PROMPTS[0], strategy, Sampling(max_new_tokens=NEW, seed=1))
        for strategy in (*strategies, laws.build("draft"))
    ]
    for options in ({}, {"chunk": 4}, {"preempt": 2}):
        outputs = [live.ctx.output for live in run(models, *requests, **options)]
        assert outputs == [expected(family)[0]] * len(requests), options
    live = run(models, requests[2], chunk=3)[0]
    assert live.ctx.output == expected(family)[0] and live.ctx.stats.accepted > 8


def test_several_texts_of_a_request() -> None:
    """Beams and samples fork what is remembered."""
    for family in ("mamba2", "qwen3_next"):
        out = lm(family).generate(PROMPTS[0], "plain", n=3, temperature=0.9, max_new_tokens=6)
        singles = {tuple(sample.tokens) for sample in out.samples}
        assert len(singles) == 3


def test_what_is_remembered_counts_as_memory() -> None:
    model = adapter("falcon_h1")
    held = model.cache()
    empty = held.bytes
    shapes = [part.shape for start in model.start.values() for part in (start.window, start.state)]
    assert empty == model.state_bytes == 4 * sum(shape.numel() for shape in shapes) > 0
    answer(model, held, Ask(TokenTree(3).chain([4])), PROMPTS[1] + [3])
    assert held.bytes > empty + held.base * model.row_bytes


def test_memory_for_one_text_runs_them_one_after_the_other() -> None:
    """A text without rows, too, waits until there is room for its states."""
    model = adapter("mamba2")
    assert not model.row_bytes
    engine = Engine({"target": model})
    engine.admission.memory = 3 * model.state_bytes
    requests = [Request(PROMPTS[0], Plain(), Sampling(max_new_tokens=8)) for _ in range(5)]
    lives = [engine.add(request) for request in requests]
    laws.finish(engine, *lives)
    assert [live.ctx.output for live in lives] == [expected("mamba2")[0][:8]] * 5


def test_policies_change_the_rows_and_leave_the_states() -> None:
    """Rows of the layers that attend are evicted where committed tokens say so, drafts or not."""
    text = (*PROMPTS[0], *expected("jamba")[0])
    for family in ("jamba", "falcon_h1"):
        models = {"target": adapter(family)}
        for options in ({}, {"chunk": 3}, {"preempt": 3}):
            plain, drafted, wide = (
                Request(PROMPTS[0], strategy, Sampling(max_new_tokens=NEW), policy=Evictor())
                for strategy in (
                    Plain(),
                    Speculative(Guess(text, 4, 3, vocab=VOCAB), nodes=8),
                    Speculative(Guess(text, 4, wide=True, vocab=VOCAB), nodes=8),
                )
            )
            lives = run(models, plain, drafted, wide, **options)
            first, *others = [live.ctx.output for live in lives]
            assert others == [first, first] and len(first) == NEW
    request = Request(PROMPTS[0], Plain(), Sampling(max_new_tokens=4), policy=Evictor())
    with pytest.raises(Unsupported, match="cache rows that it can change"):
        Engine({"target": adapter("mamba2")}).add(request)


def test_transformers_generate_by_our_methods() -> None:
    ids = torch.tensor([PROMPTS[0]])
    for family in ("mamba2", "jamba"):
        out = stock(family).generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW,
            do_sample=False,
            custom_generate=foretell.hf("ngram"),
        )
        assert out[0, len(PROMPTS[0]) :].tolist() == expected(family)[0]
    hf = stock("mamba2")
    with torch.inference_mode():
        filled = hf(input_ids=ids, use_cache=True).cache_params
    with pytest.raises(Unsupported, match="cache_params that hold tokens"):
        hf.generate(
            ids, max_new_tokens=4, cache_params=filled, custom_generate=foretell.hf("ngram")
        )


def test_texts_that_begin_alike_share_no_rows() -> None:
    """Rows of the layers that attend are half of what such a text is."""
    models = {"target": adapter("falcon_h1")}
    prefix = [(7 * i) % VOCAB for i in range(2 * WORTH)]
    requests = [
        Request([*prefix, i], Plain(), Sampling(max_new_tokens=4), tenant="same") for i in range(2)
    ]
    engine = Engine(models)
    engine.reuse = Reuse(engine, PrefixTree(1 << 30))
    lives = [engine.add(request) for request in requests]
    laws.finish(engine, *lives)
    assert engine.reuse.tree.bytes == engine.reuse.tree.reused == 0
    alone = [run(models, request)[0].ctx.output for request in requests]
    assert [live.ctx.output for live in lives] == alone
    assert not adapter("falcon_h1").cache().adopt_segment(None)  # type: ignore[arg-type]


def test_verifying_a_drawn_tree_changes_no_law_and_no_row() -> None:
    """A published sampler zeroes tried tokens in the drafter's own laws, so that a second look at
    the same tree finds other ones.
    """
    model, prompt = adapter("mamba2"), PROMPTS[0]
    chances = torch.softmax(torch.randn(VOCAB, generator=torch.Generator().manual_seed(0)), 0)
    law = Law(chances.double())
    tree = TokenTree(prompt[-1])
    for token in (3, 4, 3):
        tree.add(0, token, law=law)
    tree.add(1, 5, law=law)
    rows = model.score(prompt, tree)
    before = rows.clone(), chances.double().clone()
    sampler = Sampler(Sampling(temperature=1.0), prompt, (), VOCAB, None)
    outcomes = [
        verify_in_order(tree, Target(rows, sampler, [], tree), Rng(seed % 4), 0)
        for seed in range(8)
    ]
    assert outcomes[:4] == outcomes[4:]
    assert torch.equal(rows, before[0]) and torch.equal(law.dense(VOCAB), before[1])


# --- every method


@pytest.mark.filterwarnings("ignore:.*was not trained with exits")
@pytest.mark.parametrize("spec", laws.claiming("exact"))
def test_every_exact_drafter_says_what_transformers_says(spec: str) -> None:
    """On a hybrid of both kinds of layers; who needs what it has not is refused by name."""
    models = dict(lm("falcon_h1").models)
    request = Request(PROMPTS[0], laws.build(spec), Sampling(max_new_tokens=NEW), name=spec)
    try:
        live = run(models, request)[0]
    except Unsupported as error:
        assert spec.partition(":")[0] in str(error) and "falcon_h1" in str(error)
    else:
        assert live.ctx.output == expected("falcon_h1")[0]
