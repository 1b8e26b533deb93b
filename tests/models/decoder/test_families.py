"""Every proven family: the packed forest forward gives what the stock transformers model gives,
token and number.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache

import pytest
import torch
from transformers import PreTrainedModel

from foretell import LM, wrap
from foretell.cache.cache import Cache
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Reply
from foretell.models.decoder.decoder import PROVEN, Decoder
from foretell.models.families.description import find_skeleton, known_families
from tests.models.decoder.families import FAMILIES, WINDOW, tiny

NEW = 20
PROMPTS = [
    [5, 17, 3, 5, 17, 3, 9, 60, 33, 2, 5, 17, 3, 44, 81],
    list(range(1, 22)),
]  # both longer than a window
TREE = (
    TokenTree(PROMPTS[1][-1]).chain([3, 4, 5]).chain([6, 7]).chain([8], at=1).chain([9, 10], at=2)
)
METHODS = ("plain", "ngram", "suffix+token-recycling", "draft:nodes=6")
WHOLE = {"nanochat"}  # not the usual skeleton: no layers to address
LOOPED = sorted(set(FAMILIES) - WHOLE)
every_family = pytest.mark.parametrize("family", sorted(FAMILIES))
every_loop = pytest.mark.parametrize("family", LOOPED)


@cache
def expected(family: str) -> list[list[int]]:
    """transformers' own greedy tokens, one prompt at a time, with its own cache and attention."""
    hf = tiny(family)
    assert hf.config._attn_implementation in ("sdpa", "eager")
    answers = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = hf.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW,
            do_sample=False,
            use_cache=True,
        )
        answers.append(out[0, len(prompt) :].tolist())
    return answers


@cache
def lm(family: str) -> LM:
    return wrap(tiny(family), draft=tiny(family, noise=0.03), name=family)


@cache
def decoder(family: str) -> Decoder:
    """The stock layers, without faster equals."""
    return Decoder(tiny(family), family)


def stock(hf: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    """Logits (L, V) by the model alone."""
    with torch.inference_mode():
        return hf(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]


@torch.inference_mode()
def answer(
    model: Decoder, cache: Cache, ask: Ask, tokens: Sequence[int], chunk: int = 512
) -> Reply:
    """What the engine does to answer one ask."""
    done = False
    while not done:
        job, done = cache.prepare(ask, tokens, chunk)
        reply = model.forward([job])[0]
    return reply


def same_texts(quick: LM, slow: LM, method: str) -> None:
    """Greedy, sampled and penalised ones, of one backend and another."""
    for more in (
        {},
        {"temperature": 0.9, "seed": 3, "n": 2},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
    ):
        ours, theirs = (
            lm.generate("def add(a, b):", method, max_new_tokens=40, **more) for lm in (quick, slow)
        )
        assert [s.tokens for s in ours.samples] == [s.tokens for s in theirs.samples]
    assert ours.tokens and len(set(ours.tokens)) > 5


def test_the_list_of_proven_families_is_the_list_of_tested_ones() -> None:
    """Those that are described have tests of their own, tests/models/families."""
    assert {*FAMILIES, *known_families()} == PROVEN


@pytest.mark.parametrize(
    "method", ["plain", "token-recycling:nodes=8", "ngram:nodes=6", "draft:nodes=6"]
)
@every_family
def test_greedy_tokens_are_those_of_transformers(family: str, method: str) -> None:
    outs = lm(family).generate(PROMPTS, method, max_new_tokens=NEW)
    assert [out.tokens for out in outs] == expected(family)
    assert len({token for answer in expected(family) for token in answer}) > 5, (
        "a text that hardly varies shows nothing"
    )
    if method.startswith("draft"):
        drafted, accepted = (
            sum(getattr(out.stats, name) for out in outs) for name in ("drafted", "accepted")
        )
        assert 0 < accepted < drafted, "rows kept and rows forgotten, both should have occurred"


@every_family
def test_rows_of_a_packed_tree_are_those_of_its_paths(family: str) -> None:
    narrow = family == "gemma2"  # transformers' own softmax is float32 there, whatever the model is
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.float64, 1e-5 if narrow else 1e-8)):
        hf = tiny(family, dtype=dtype)
        model = decoder(family) if dtype == torch.float32 else Decoder(hf, family)
        rows = model.score(PROMPTS[1], TREE)
        assert rows.dtype == dtype
        for node in range(len(TREE)):
            row = stock(hf, PROMPTS[1] + TREE.tokens_to(node))[-1]
            assert float((row - rows[node]).abs().max()) <= tolerance, (dtype, node)


@every_family
def test_a_prompt_in_pieces_gives_what_it_gives_in_one(family: str) -> None:
    model = decoder(family)
    cache = model.cache()
    reply = answer(model, cache, Ask(TREE), PROMPTS[1], chunk=5)
    assert cache.length >= 15
    torch.testing.assert_close(reply.logits, model.score(PROMPTS[1], TREE), atol=1e-4, rtol=0)


@every_family
def test_which_families_have_the_loop(family: str) -> None:
    assert ("layers" in decoder(family).caps) == (family in LOOPED)


@every_loop
def test_hidden_states_are_those_of_transformers(family: str) -> None:
    model, hf, prompt = decoder(family), tiny(family), PROMPTS[1]
    count = len(model.layout)
    reply = answer(
        model, model.cache(), Ask(TokenTree(prompt[-1]), taps=tuple(range(count + 1))), prompt
    )
    with torch.inference_mode():
        theirs = hf(
            input_ids=torch.tensor([prompt]), use_cache=False, output_hidden_states=True
        ).hidden_states
        assert model.loop is not None
        for i in range(count):
            torch.testing.assert_close(reply.hidden[i], theirs[i][0], atol=1e-4, rtol=1e-5)
        last = model.loop.norm(reply.hidden[count])
    torch.testing.assert_close(last, theirs[count][0], atol=1e-4, rtol=1e-5)


@every_loop
def test_layers_can_be_entered_in_the_middle(family: str) -> None:
    model, prompt = decoder(family), PROMPTS[1]
    count, whole = len(model.layout), model.score(prompt, TREE)
    for a in range(1, count):
        cache = model.cache()
        answer(model, cache, Ask(TokenTree(prompt[-2])), prompt[:-1], chunk=5)
        below = answer(model, cache, Ask(TREE, rows=[], taps=(a,), layers=tuple(range(a))), prompt)
        assert below.logits.shape[0] == 0 and cache.done == set(range(a))
        above = answer(
            model, cache, Ask(TREE, layers=tuple(range(a, count)), states=below.hidden[a]), prompt
        )
        assert cache.done == cache.all_layers
        torch.testing.assert_close(above.logits, whole, atol=1e-4, rtol=0)
        # Both halves wrote their rows, so what the tree's path leaves behind serves the next step.
        tokens = [*prompt, 3, 4, 8]
        reply = answer(model, cache, Ask(TokenTree(8)), tokens)
        assert len(reply.hidden) == 0 and cache.length == len(prompt) + 2
        torch.testing.assert_close(reply.logits, model.score(tokens), atol=1e-4, rtol=0)


@every_loop
def test_rows_of_a_partial_forward_are_not_kept(family: str) -> None:
    model, prompt = decoder(family), PROMPTS[1]
    cache = model.cache()
    answer(model, cache, Ask(TokenTree(prompt[-2])), prompt[:-1])
    answer(model, cache, Ask(TREE, layers=(0, 1)), prompt)
    before = cache.length
    tokens = [*prompt, 3, 4, 8]
    reply = answer(model, cache, Ask(TokenTree(8)), tokens)
    assert before == cache.length == len(prompt) - 1
    torch.testing.assert_close(reply.logits, model.score(tokens), atol=1e-4, rtol=0)


@every_loop
def test_left_out_layers_are_as_if_the_model_had_none(family: str) -> None:
    model, prompt = decoder(family), PROMPTS[1]
    count = len(model.layout)
    for out in range(count):
        stay = tuple(i for i in range(count) if i != out)
        smaller = copy.deepcopy(tiny(family))
        body, skeleton = smaller.get_decoder(), find_skeleton(smaller.config)
        kept_layers = torch.nn.ModuleList(skeleton.layers_of(body)[i] for i in stay)
        setattr(body, skeleton.layers, kept_layers)
        smaller.config.num_hidden_layers = len(stay)
        if getattr(smaller.config, "layer_types", None):
            smaller.config.layer_types = [smaller.config.layer_types[i] for i in stay]
        reply = answer(
            model, model.cache(), Ask(TokenTree(prompt[-1]), layers=stay, taps=(out, count)), prompt
        )
        torch.testing.assert_close(reply.logits[0], stock(smaller, prompt)[-1], atol=1e-4, rtol=0)
        assert reply.hidden.keys() == {out, count}  # what would enter the layer left out, too


def test_windows_are_measured() -> None:
    for family, windows in (
        ("mistral", [WINDOW] * 3),
        ("gemma2", [WINDOW, None, WINDOW]),
        ("llama", [None] * 3),
    ):
        loop = decoder(family).loop
        assert loop is not None and loop.windows == windows
