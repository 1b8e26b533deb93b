"""Retrieved rows: which are chosen, and that they are the target's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import foretell
from foretell.cache.cache import Cache
from foretell.cache.policy import Segment
from foretell.core.request import Request
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Sampling
from foretell.engine.engine import Engine
from foretell.errors import Unsupported
from foretell.models.decoder import retrieved
from foretell.models.decoder.retrieved import Chunks, RetrievedCache
from foretell.testing.toy import Toy, ToyRetrieving
from tests import laws, tiny

TEXT = [(7 * i * i + 3 * i) % 300 + 1 for i in range(170)]


def decoder(**more: Any) -> Any:
    model = tiny.llama(max_position_embeddings=512, **more)
    return foretell.wrap(model, tiny.tokenizer(), None, "tiny").models["target"]


@torch.inference_mode()
def read(model: Any, cache: Cache, ask: Ask, tokens: list[int], piece: int = 1000) -> Any:
    """The reply to an ask, whose text may take several forwards."""
    whole = False
    while not whole:
        job, whole = cache.prepare(ask, tokens, piece)
        reply = model.forward([job])[0]
    return reply


def beside(model: Any, tokens: list[int], budget: int, chunk: int) -> tuple[Any, RetrievedCache]:
    """The model over retrieved rows, and its cache, whose rows are not chosen yet."""
    target = model.cache()
    read(model, target, Ask(TokenTree(tokens[-1]), rows=()), tokens)
    retrieving = model.retrieving_model(budget, chunk)
    return retrieving, retrieving.cache(beside=target)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 90), st.integers(1, 60), st.integers(1, 20), st.integers(0, 9))
def test_rows_are_those_of_the_best_chunks_in_order(
    length: int, budget: int, size: int, seed: int
) -> None:
    chunks = Chunks.of(length, budget, size)
    assert 1 <= chunks.size <= size and chunks.chunk_count * chunks.size <= length
    scores = torch.randn(2, chunks.chunk_count, generator=torch.Generator().manual_seed(seed))
    rows = chunks.best_rows(scores)
    for head in range(2):
        others = sorted(range(1, chunks.chunk_count), key=lambda c: -float(scores[head, c]))
        kept = sorted([0, *others][: min(chunks.kept_count, chunks.chunk_count)])
        want = [c * chunks.size + i for c in kept for i in range(chunks.size)]
        want += range(chunks.chunk_count * chunks.size, length)
        assert rows[head].tolist() == want
    assert rows.shape[1] <= max(min(budget, length // 4), chunks.size) + chunks.size


def test_each_head_keeps_the_chunks_that_its_queries_are_nearest_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = decoder()
    queries = []

    def noted(q: torch.Tensor, means: torch.Tensor) -> torch.Tensor:
        queries.append(q[:, 0])
        return likeness(q, means)

    likeness = retrieved.score_chunks
    monkeypatch.setattr(retrieved, "score_chunks", noted)
    retrieving, cache = beside(model, TEXT, 40, 8)
    read(retrieving, cache, Ask(TokenTree(TEXT[-1])), TEXT)
    assert cache.chosen_rows is not None and len(queries) == 2 and cache.length == len(TEXT) - 1
    assert cache.base == 40 + 169 % 8 and cache.bytes < 0.35 * cache.beside.bytes
    chosen = set()
    for layer, q in enumerate(queries):
        for head in range(2):
            keys = cache.beside.k[layer][head]
            scores = {}
            for chunk in range(1, 21):
                mean = sum(keys[8 * chunk + i] for i in range(8)) / 8
                scores[chunk] = sum(float(q[2 * head + i] @ mean) for i in range(2))
            best = sorted(sorted(scores, key=lambda c: -scores[c])[:4])
            want = [*range(8), *(8 * c + i for c in best for i in range(8)), 168]
            assert cache.chosen_rows[layer][head].tolist() == want
            chosen.add(tuple(best))
            for own, theirs in ((cache.k, cache.beside.k), (cache.v, cache.beside.v)):
                assert torch.equal(own[layer][head, : len(want)], theirs[layer][head, want])
    assert len(chosen) > 1, "all heads chose the same: not put to the test"


def test_over_all_rows_it_is_the_model_itself() -> None:
    model = decoder()
    retrieving, cache = beside(model, TEXT, 40, 8)
    every = torch.arange(len(TEXT) - 1).expand(2, -1)
    cache.sync(TEXT)
    cache.choose_rows({0: every, 1: every})
    tree = TokenTree(TEXT[-1]).chain([5, 6]).chain([7], at=1)
    got = read(retrieving, cache, Ask(tree), TEXT).logits
    want = read(model, cache.beside, Ask(tree), TEXT).logits
    assert torch.allclose(got, want, atol=1e-5)
    _, few = beside(model, TEXT, 40, 8)
    other = read(retrieving, few, Ask(tree), TEXT).logits
    assert not torch.allclose(other, want, atol=1e-3), "the retrieved rows are too many to tell"


@torch.inference_mode()
def test_later_rows_are_the_targets_also_behind_shared_ones() -> None:
    model = decoder()
    whole = model.cache()
    read(model, whole, Ask(TokenTree(TEXT[99]), rows=()), TEXT[:100])
    segment: Segment = whole.share_rows(TEXT[:100])
    target = model.cache()
    target.adopt_segment(segment)
    read(model, target, Ask(TokenTree(TEXT[149]), rows=()), TEXT[:150])
    retrieving = model.retrieving_model(40, 8)
    cache = retrieving.cache(beside=target)
    read(retrieving, cache, Ask(TokenTree(TEXT[149])), TEXT[:150])
    kept = cache.base
    tree = TokenTree(TEXT[149]).chain(TEXT[150:160])
    read(retrieving, cache, Ask(tree), TEXT[:150])  # what it thinks of them is not kept
    read(model, target, Ask(tree), TEXT[:150])
    assert cache.sync(TEXT[:158]) == 0
    assert cache.base == kept + 8 and cache.length == 157
    for layer in range(2):
        assert torch.equal(cache.k[layer][:, kept : kept + 8], target.k[layer][:, 50:58])
        assert torch.equal(cache.v[layer][:, kept : kept + 8], target.v[layer][:, 50:58])
    rows, _ = cache.rows_beside(0)
    assert torch.allclose(rows[:, :99], whole.k[0][:, :99], atol=1e-6) and rows.shape[1] == 157


def test_a_preempted_request_chooses_again_and_says_the_same() -> None:
    strategy = laws.build("triforce")
    models = laws.world(strategy, 8, copy=2.0)
    outputs = []
    for often in (0, 3):
        engine = Engine(models)
        sampling = Sampling(temperature=1.0, seed=2, max_new_tokens=25)
        live = engine.add(Request([1, 2, 3] * 9, strategy, sampling))
        count = 0
        while engine.live:
            engine.step()
            count += 1
            if often and count % often == 0 and engine.live:
                assert engine.preempt_request(live)
        assert live.error is None
        outputs.append(live.ctx.output)
    assert outputs[0] == outputs[1]


def test_rows_of_drafts_that_are_kept_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The laws see a cache that takes the estimates of its own for the target's rows."""

    class Keeping(RetrievedCache):
        def commit(self, tokens: Any) -> None:
            self.beside.commit(tokens)
            Cache.commit(self, tokens)

    monkeypatch.setattr("foretell.testing.toy.RetrievedCache", Keeping)
    monkeypatch.setattr(ToyRetrieving, "_node_values", lambda self, job, at: at + 0.5)
    with pytest.raises(AssertionError, match="stale rows"):
        laws.check_close(laws.build("triforce"), 1.0)


def test_models_whose_layers_do_not_see_a_whole_text_are_refused() -> None:
    config = {"sliding_window": 16, "layer_types": ["sliding_attention"] * 2}
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 330, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
    more = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    hf = Qwen3ForCausalLM(Qwen3Config(**sizes, **more, **config, use_sliding_window=True))
    model = foretell.wrap(hf.eval(), tiny.tokenizer(), None, "tiny").models["target"]
    with pytest.raises(Unsupported, match=r"some see a window of it.*use the method draft"):
        model.retrieving_model(64, 8)


def test_a_toy_has_the_rows_that_it_chose() -> None:
    toy = Toy(6)
    text = [1, 2, 3, 4, 5, 0, 1, 1, 2] * 5
    retrieving, cache = beside(toy, text, 12, 2)
    read(retrieving, cache, Ask(TokenTree(text[-1])), text)
    assert cache.chosen_rows is not None
    for layer in range(2):
        rows = cache.chosen_rows[layer][0].tolist()
        assert cache.k[layer][0, : len(rows), 0].tolist() == [text[row] for row in rows]
        assert cache.v[layer][0, : len(rows), 0].tolist() == rows
