"""Views of a cache: what they read, and that nothing of a draft stays in it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import foretell
from foretell.cache.cache import Cache
from foretell.cache.policy import Segment
from foretell.core.tree import TokenTree
from foretell.core.types import Ask
from foretell.errors import BadConfig, Unsupported
from foretell.kv.select.base import Ends, Selecting
from foretell.kv.select.view_model import Once, Viewed, ViewedCache, build_viewed, once_per_draft
from foretell.spec import build_cache_policy
from foretell.testing.toy import Toy
from tests import laws, tiny
from tests.models.decoder.test_retrieved import read

TEXT = [(7 * i * i + 3 * i) % 300 + 1 for i in range(170)]
TREE = TokenTree(TEXT[-1]).chain([5, 6, 9]).chain([7], at=1)
KVS = [
    "quest:budget=48,dense=0",
    "quest:budget=12,page=4,dense=1",
    "double-sparsity:budget=20,channels=8,dense=0",
]


def decoder() -> Any:
    hf = tiny.llama(max_position_embeddings=512)
    return foretell.wrap(hf, tiny.tokenizer(), None, "tiny").models["target"]


def beside(model: Any, tokens: list[int], policy: Selecting) -> tuple[Viewed, ViewedCache]:
    """The model under the policy, and its view of a cache that has taken in all but the last."""
    target = model.cache()
    read(model, target, Ask(TokenTree(tokens[-1]), rows=()), tokens)
    view = Viewed(model, policy, "view")
    cache = view.cache(beside=target)
    assert isinstance(cache, ViewedCache)
    return view, cache


@pytest.mark.parametrize("kv", KVS)
def test_it_reads_what_the_policy_reads_of_a_cache_of_its_own(kv: str) -> None:
    model = decoder()
    policy = build_cache_policy(kv).build_view(model)
    assert isinstance(policy, Selecting)
    view, cache = beside(model, TEXT, policy)
    own = model.cache()
    own.use(build_cache_policy(kv).build_policy(model), len(TEXT) - 1)
    assert own.policy is not None
    own.policy.waits = True  # or the tree would cross the end of a page
    got = read(view, cache, Ask(TREE), TEXT).logits
    want = read(model, own, Ask(TREE), TEXT).logits
    assert torch.allclose(got, want, atol=1e-5)
    whole = read(model, cache.beside, Ask(TREE), TEXT).logits
    assert not torch.allclose(got, whole, atol=1e-3), "it read everything"


def test_first_and_last_rows_are_read_where_they_stand() -> None:
    toy = Toy(6)
    text = [t % 6 for t in TEXT[:40]]
    tree = TokenTree(text[-1]).chain([1, 2]).chain([3], at=1)
    view, cache = beside(toy, text, Ends(0, 2, 5))
    rows = read(view, cache, Ask(tree), text).logits
    for node in range(len(tree)):
        places = [0, 1, *range(34, 40 + tree.depths[node])]
        tokens = [*text, *tree.tokens_to(node)]
        seen = torch.tensor([tokens[place] for place in places])
        want = toy.row(seen.double().numpy(), torch.tensor(places).double().numpy())
        assert rows[node].tolist() == pytest.approx(list(want), abs=1e-6)


def test_over_all_rows_it_is_the_model_itself() -> None:
    model = decoder()
    for kv in ("quest:budget=512", "streaming-llm:window=512", "double-sparsity:budget=400"):
        kind = build_cache_policy(f"{kv},channels=8" if "double" in kv else kv)
        view = build_viewed(model, kind, "view:kv")
        target = model.cache()
        read(model, target, Ask(TokenTree(TEXT[-1]), rows=()), TEXT)
        cache = view.cache(beside=target)
        got = read(view, cache, Ask(TREE), TEXT).logits
        assert torch.equal(got, read(model, target, Ask(TREE), TEXT).logits)


def test_nothing_of_a_draft_stays_and_no_row_is_copied() -> None:
    model = decoder()
    view, cache = beside(model, TEXT[:150], build_cache_policy(KVS[0]).build_view(model))  # type: ignore[arg-type]
    target = cache.beside
    assert cache.bytes == 0
    for end in (150, 153, 156, 161, 168):
        tree = TokenTree(TEXT[end - 1]).chain(TEXT[end : end + 3] or [4]).chain([7])
        read(model, target, Ask(TokenTree(TEXT[end - 1]), rows=()), TEXT[:end])
        read(view, cache, Ask(tree), TEXT[:end])
        assert cache.k[0].data_ptr() == target.k[0].data_ptr()
        assert (cache.base, cache.length) == (end - 1, end - 1) == (target.base, target.length)
        assert target.tokens == [] and len(cache.tokens) == len(tree)
        known = cache.policy.bytes  # of pages
        assert (cache.bytes - known) * target.base == target.bytes * len(tree) and known > 0
        read(model, target, Ask(tree), TEXT[:end])
        check_rows(target, model, TEXT[: end + 2])
        cache.sync(TEXT[: end + 2])
        assert cache.tokens == [] and cache.base == min(end + 1, target.base)


@torch.inference_mode()
def check_rows(cache: Cache, model: Any, tokens: list[int]) -> None:
    """They are, but for rounding, those of a fresh prefill."""
    cache.commit(tokens)
    fresh = laws.fresh_rows(model, tokens[: cache.length + 1])
    for ours, theirs in zip((*cache.k, *cache.v), (*fresh.k, *fresh.v), strict=True):
        assert torch.allclose(ours[:, : cache.base], theirs[:, : cache.base], atol=1e-5)


def test_two_views_and_the_model_itself_share_the_rows_behind_the_text() -> None:
    model = decoder()
    view, cache = beside(model, TEXT, build_cache_policy(KVS[1]).build_view(model))  # type: ignore[arg-type]
    other = Viewed(model, Ends(0, 3, 20), "other")
    second = other.cache(beside=cache.beside)
    chain = TokenTree(TEXT[-1]).chain([5, 6, 9])
    want = [read(m, c, Ask(chain), TEXT).logits for m, c in ((view, cache), (other, second))]
    whole = read(model, cache.beside, Ask(chain), TEXT).logits
    begun = TokenTree(TEXT[-1]).chain([5, 6])
    last = Ask(chain, rows=[3])
    for between in ((other, second), (model, cache.beside)):
        read(view, cache, Ask(begun), TEXT)
        read(*between, Ask(TokenTree(TEXT[-1]).chain([8, 8, 8])), TEXT)
        assert torch.allclose(read(view, cache, last, TEXT).logits, want[0][3:], atol=1e-5)
        assert torch.allclose(read(other, second, last, TEXT).logits, want[1][3:], atol=1e-5)
        got = read(model, cache.beside, last, TEXT).logits
        assert torch.allclose(got, whole[3:], atol=1e-5)
    read(view, cache, Ask(begun), TEXT)
    read(other, second, Ask(TokenTree(TEXT[-1]).chain([8, 8, 8])), TEXT)
    cache.beside.guest = cache  # as if nobody had written since
    assert not torch.allclose(read(view, cache, last, TEXT).logits, want[0][3:], atol=1e-3)


@pytest.mark.parametrize("own", [0, 30])
def test_behind_shared_rows_it_reads_them_too(own: int) -> None:
    model = decoder()
    first = model.cache()
    read(model, first, Ask(TokenTree(TEXT[99]), rows=()), TEXT[:100])
    segment: Segment = first.share_rows(TEXT[:100])
    target = model.cache()
    target.adopt_segment(segment)
    text = TEXT[: 100 + own]
    read(model, target, Ask(TokenTree(text[-1]), rows=()), text)
    view = Viewed(model, build_cache_policy(KVS[0]).build_view(model), "view")  # type: ignore[arg-type]
    cache = view.cache(beside=target)
    tree = TokenTree(text[-1]).chain([5, 6]).chain([7], at=1)
    got = read(view, cache, Ask(tree), text).logits
    assert not target.segments and not segment.readers and target.base == len(text) - 1
    alone, fresh = beside(model, text, build_cache_policy(KVS[0]).build_view(model))  # type: ignore[arg-type]
    assert torch.allclose(got, read(alone, fresh, Ask(tree), text).logits, atol=1e-5)
    check_rows(target, model, text)


def test_a_copy_goes_on_by_itself() -> None:
    model = decoder()
    view, cache = beside(model, TEXT[:150], once_per_draft(Ends(0, 3, 20), True))
    read(view, cache, Ask(TokenTree(TEXT[149]).chain([5, 6])), TEXT[:150])
    twin, target = cache.fork(), cache.beside.fork()
    twin.beside = target
    texts = (TEXT[:150], [*TEXT[:149], 9, 4, 8])
    for one, text in ((cache, texts[0]), (twin, [*texts[0], *texts[1][150:]])):
        read(model, one.beside, Ask(TokenTree(text[-1]), rows=()), text)
        tree = TokenTree(text[-1]).chain([3, 2])
        _, fresh = beside(model, text, once_per_draft(Ends(0, 3, 20), True))
        want = read(view, fresh, Ask(tree), text).logits
        assert torch.allclose(read(view, one, Ask(tree), text).logits, want, atol=1e-5)


@pytest.mark.parametrize("kv", KVS)
def test_once_all_nodes_read_what_the_root_reads(kv: str) -> None:
    """However the tree grew: in one forward, or level by level."""
    model = decoder()
    policy = build_cache_policy(kv).build_view(model)
    assert isinstance(policy, Selecting)
    view, cache = beside(model, TEXT, once_per_draft(policy, True))
    whole = read(view, cache, Ask(TREE), TEXT).logits
    found = cache.policy
    assert isinstance(found, Once) and found.watched
    chosen = {layer: rows.clone() for layer, rows in found.root_rows.items()}
    _, again = beside(model, TEXT, once_per_draft(policy, True))
    rows = []
    for nodes in (1, 2, 3, 5):
        tree = TokenTree(TEXT[-1])
        for node in range(1, nodes):
            tree.add(TREE.parents[node], TREE.tokens[node])
        rows += [*read(view, again, Ask(tree, rows=range(len(rows), nodes)), TEXT).logits]
    assert torch.allclose(torch.stack(rows), whole, atol=1e-5)
    plain, alone = beside(model, TEXT, policy)
    by_each = read(plain, alone, Ask(TREE), TEXT).logits
    assert torch.allclose(by_each[0], whole[0], atol=1e-5)
    if "quest" in kv:  # a choice by the first query that all others would make too tests nothing
        assert not torch.allclose(by_each, whole, atol=1e-4)
    read(model, cache.beside, Ask(TREE), TEXT)
    longer = [*TEXT, 5, 6]
    read(view, cache, Ask(TokenTree(6)), longer)
    fresh = cache.policy.root_rows  # type: ignore[union-attr]
    assert all(fresh[layer].shape[-1] == len(longer) - 1 for layer in chosen)


def test_what_changes_rows_is_no_view() -> None:
    model = decoder()
    for kv in ("snapkv", "offload", "gear", "infllm"):
        with pytest.raises(BadConfig, match=rf"view:kv='{kv}': must be a policy that reads a part"):
            build_viewed(model, build_cache_policy(kv), "view:kv")
    with pytest.raises(Unsupported, match="view cannot run on"):
        build_viewed(foretell.testing.toy.ToyRecurrent(3), build_cache_policy("quest"), "view:kv")
