"""The cache against a twin that keeps only each branch's tokens, driven by random asks, commits,
forks and drops.

The toy model's rows hold tokens and positions and its logits are a hash of what a node sees, so
equality of logits is equality of masks, positions and kept rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.cache.cache import Cache
from foretell.cache.job import Job
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Reply
from foretell.testing.toy import Toy
from tests import laws

VOCAB = 3
shapes = st.lists(st.tuples(st.integers(0, 99), st.integers(0, VOCAB - 1)), max_size=7)


def planted(
    root: int, shape: Sequence[tuple[int, int]], tree: TokenTree | None = None
) -> TokenTree:
    """Adds nodes, each below any earlier node, to a tree."""
    tree = tree or TokenTree(root)
    for parent, token in shape:
        tree.add(parent % len(tree), token)
    return tree


def expected(toy: Toy, tokens: Sequence[int], tree: TokenTree, node: int) -> list[float]:
    """Logits of a node from the tokens on its way alone, those within the window."""
    seen = [*tokens, *tree.tokens_to(node)]
    start = max(0, len(seen) - toy.window) if toy.window else 0
    return list(
        toy.row(
            torch.tensor(seen[start:]).double().numpy(),
            torch.arange(start, len(seen)).double().numpy(),
        )
    )


@torch.inference_mode()
def ask(
    toy: Toy,
    cache: Cache,
    tokens: Sequence[int],
    tree: TokenTree,
    rows: list[int] | None,
    chunk: int,
) -> Reply:
    """As the engine does: in parts while too much is pending."""
    for _ in range(len(tokens) + 1):
        job, whole = cache.prepare(Ask(tree, rows=rows), tokens, chunk)
        assert len(job.tokens) <= chunk or whole
        reply = toy.forward([job])[0]
        if whole:
            return reply
    raise AssertionError("the prompt never came to its end")


class Broken(Toy):
    """Fails in the middle of a forward: after its rows were written, before anybody is told."""

    def run(self, *args: object) -> object:  # type: ignore[override]
        super().run(*args)  # type: ignore[arg-type]
        raise KeyboardInterrupt


@settings(max_examples=150)
@given(st.data(), st.sampled_from([None, None, 2, 5]))
def test_any_history_leaves_the_rows_of_the_branch(data: st.DataObject, window: int | None) -> None:
    toy, broken = Toy(VOCAB, seed=2, window=window), Broken(VOCAB, seed=2, window=window)
    caches = [Cache(toy.layout, toy.dtype, toy.device, capacity=2)]
    texts = [data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6), "prompt")]
    trees: list[TokenTree | None] = [None]
    gone: list[Cache] = []
    for _ in range(data.draw(st.integers(1, 8), "actions")):
        i = data.draw(st.integers(0, len(caches) - 1), "branch")
        cache, text = caches[i], texts[i]
        action = data.draw(
            st.sampled_from("ask ask grow commit commit fork drop break".split()), "action"
        )
        chunk = data.draw(st.integers(1, 8), "chunk")
        old = trees[i]
        if action == "ask" or (action == "grow" and old is None):
            trees[i] = tree = planted(text[-1], data.draw(shapes))
            rows = list(range(len(tree)))
            reply = ask(toy, cache, text, tree, rows, chunk)
            assert reply.nodes == rows
        elif action == "grow":
            assert old is not None
            size = len(old)
            tree = planted(text[-1], data.draw(shapes), old)
            reply = ask(
                toy, cache, text, tree, data.draw(st.sampled_from([None, [len(tree) - 1]])), chunk
            )
            assert reply.nodes == [len(tree) - 1] or set(range(size, len(tree))) <= set(reply.nodes)
        elif action == "commit":
            tree = old or TokenTree(text[-1])
            path = tree.tokens_to(data.draw(st.integers(0, len(tree) - 1), "accepted"))
            texts[i] = [
                *text,
                *path,
                *data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3), "more"),
            ]
            trees[i] = None
            continue
        elif action == "fork":
            caches.append(cache.fork())
            texts.append(list(text))
            trees.append(None)
            continue
        elif action == "drop":
            if len(caches) > 1:
                cache.drop()
                gone.append(cache)
                del caches[i], texts[i], trees[i]
            continue
        else:
            trees[i] = None
            with pytest.raises(KeyboardInterrupt):
                ask(broken, cache, text, planted(text[-1], data.draw(shapes)), None, chunk)
            continue
        for row, node in zip(reply.logits, reply.nodes, strict=True):
            assert row.tolist() == expected(toy, text, tree, node), (
                f"node {node} of {tree.tokens} saw something else"
            )
        if window is None:
            assert torch.equal(reply.logits, toy.score(text, tree)[reply.nodes])
    for cache, text in zip(caches, texts, strict=True):
        with torch.inference_mode():
            cache.commit(text)
        size = cache.length
        assert size <= len(text) - 1
        for keys, values in zip(cache.k, cache.v, strict=True):
            assert keys[0, :size, 0].tolist() == text[:size] and values[
                0, :size, 0
            ].tolist() == list(range(size))
        alike = [c for c in caches if c.sharers is cache.sharers]
        assert cache.sharers == [len(alike)], "the buffers' users are miscounted"
        assert all(c.k[0].data_ptr() == cache.k[0].data_ptr() for c in alike)
        assert not [
            c for c in caches if c not in alike and c.k[0].data_ptr() == cache.k[0].data_ptr()
        ]


@given(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40), st.integers(1, 45))
def test_a_long_prompt_goes_in_by_chunks(tokens: list[int], chunk: int) -> None:
    toy = Toy(VOCAB)
    cache = toy.cache()
    tree = planted(tokens[-1], [(0, 1), (0, 2), (1, 0)])
    reply = ask(toy, cache, tokens, tree, None, chunk)
    assert (
        toy.calls == max(1, -(-(len(tokens) - 1 - chunk) // chunk) + 1)
        if len(tokens) - 1 > chunk
        else 1
    )
    assert torch.equal(reply.logits, Toy(VOCAB).score(tokens, tree))


def test_growing_a_tree_computes_its_new_nodes_only() -> None:
    toy = Toy(VOCAB)
    cache, text, tree = toy.cache(), [1, 2, 0, 1], TokenTree(1)
    sizes = []
    for shape in ([], [(0, 1), (0, 2)], [(1, 0), (2, 0), (2, 1)], [(3, 1)]):
        planted(1, shape, tree)
        job, _ = cache.prepare(Ask(tree), text, 99)
        sizes.append(len(job.tokens))
        with torch.inference_mode():
            reply = toy.forward([job])[0]
        for row, node in zip(reply.logits, reply.nodes, strict=True):
            assert row.tolist() == expected(toy, text, tree, node)
    assert sizes == [4, 2, 3, 1]


def test_forked_rows_are_shared_until_one_writes() -> None:
    toy = Toy(VOCAB)
    cache = toy.cache()
    ask(toy, cache, [0, 1, 2], TokenTree(2), None, 99)
    twins = [cache.fork(), cache.fork()]
    assert {c.k[0].data_ptr() for c in (cache, *twins)} == {
        cache.k[0].data_ptr()
    } and cache.sharers == [3]
    ask(toy, twins[0], [0, 1, 2, 1], TokenTree(1), None, 99)
    assert (
        twins[0].k[0].data_ptr() != cache.k[0].data_ptr()
        and cache.sharers == [2]
        and twins[0].sharers == [1]
    )
    twins[1].drop()
    before = cache.k[0].data_ptr()
    ask(toy, cache, [0, 1, 2, 0], TokenTree(0), None, 99)
    assert cache.k[0].data_ptr() == before, "its only user need not copy"


def write(job: Job, layers: Sequence[int]) -> None:
    """What a model with these layers would store: the token in one layer, token + 10 in the
    next.
    """
    for layer in layers:
        rows = torch.tensor(job.tokens, dtype=torch.float64)[None, :, None] + 10 * layer
        job.write(layer, rows, rows)
    job.cache.finish()


def test_rows_of_some_layers_only_are_never_committed() -> None:
    cache = Toy(VOCAB).cache()
    job, _ = cache.prepare(Ask(TokenTree(1).chain([2, 0]), layers=(0,)), [0, 1], 99)
    write(job, (0,))
    cache.commit([0, 1, 2, 0])
    assert cache.length == 0, "layer 1 was never run"
    job, _ = cache.prepare(Ask(TokenTree(0)), [0, 1, 2, 0], 99)
    assert job.tokens == [0, 1, 2, 0]
    write(job, (0, 1))
    cache.commit([0, 1, 2, 0, 1])
    assert cache.length == 4 and cache.k[1][0, :4, 0].tolist() == [10, 11, 12, 10]


def test_layers_run_one_after_the_other_count_as_all() -> None:
    """First layer 0, then layer 1 entered with states, over the same tree."""
    cache, tree = Toy(VOCAB).cache(), TokenTree(1).chain([2, 0])
    job, _ = cache.prepare(Ask(tree, layers=(0,)), [0, 1], 99)
    write(job, (0,))
    job, _ = cache.prepare(Ask(tree, layers=(1,), states=torch.zeros(4, 2)), [0, 1], 99)
    assert job.tokens == [0, 1, 2, 0]
    write(job, (1,))
    cache.commit([0, 1, 2, 1])
    assert cache.length == 3 and [k[0, :3, 0].tolist() for k in cache.k] == [
        [0, 1, 2],
        [10, 11, 12],
    ]


def test_layers_of_different_shapes_keep_their_own_rows() -> None:
    layout = ((1, 2, 2), (2, 3, 1), (1, 2, 2))
    cache = Cache(layout, torch.float64, torch.device("cpu"), capacity=1)
    tree = TokenTree(5).chain([6]).chain([7, 8])
    job, _ = cache.prepare(Ask(tree), [4, 5], 99)
    assert job.tokens == [4, 5, 6, 7, 8] and job.positions == [0, 1, 2, 2, 3]
    for layer, (heads, k, v) in enumerate(layout):
        base = torch.tensor(job.tokens, dtype=torch.float64)[None, :, None] + 100 * layer
        job.write(layer, base.expand(heads, -1, k), base.expand(heads, -1, v))
    cache.finish()
    cache.commit([4, 5, 7, 8, 9])
    assert cache.length == 4
    for layer, (heads, k, v) in enumerate(layout):
        want = torch.tensor([4.0, 5, 7, 8], dtype=torch.float64)[None, :, None] + 100 * layer
        assert torch.equal(cache.k[layer][:, :4], want.expand(heads, -1, k))
        assert torch.equal(cache.v[layer][:, :4], want.expand(heads, -1, v))


def test_the_laws_own_check_tells_a_spoilt_row() -> None:
    toy = Toy(VOCAB)
    cache = toy.cache()
    ask(toy, cache, [0, 1, 2], TokenTree(2), None, 99)
    laws.check_cache(cache, toy, [0, 1, 2, 1])
    with torch.inference_mode():
        cache.k[1][0, 1] += 1
    with pytest.raises(AssertionError, match="stale rows"):
        laws.check_cache(cache, toy, [0, 1, 2, 1])


def test_a_long_prompt_goes_in_whole_though_the_ask_runs_some_layers() -> None:
    model, prompt = Toy(7), [1, 2, 3, 4, 5, 6, 0] * 3
    cache, rounds, whole = model.cache(), 0, False
    while not whole and rounds < 9:
        rounds += 1
        job, whole = cache.prepare(Ask(TokenTree(prompt[-1]), layers=(1,)), prompt, 5)
        assert job.layers == ((1,) if whole else None)
        model.forward([job])
    assert whole and rounds == 4 and cache.length == 15 and cache.done == {1}
