"""The toy models answer from exactly what a node sees, or the laws would have no power."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.cache.cache import Cache
from foretell.core.context import Context
from foretell.core.drafter import Drafter
from foretell.core.model import Model
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Reply, Sampling
from foretell.errors import Unsupported
from foretell.speculation.strategy import Speculative
from foretell.testing.toy import RecurrentCache, Toy, ToyHead, ToyRecurrent
from foretell.testing.toy_hashes import GOLDEN, feature_hash
from tests import laws

texts = st.lists(st.integers(0, 7), min_size=1, max_size=8)


@given(texts, texts)
def test_different_texts_have_different_rows(a: list[int], b: list[int]) -> None:
    toy = Toy(8)
    assert (laws.row(toy, a) == laws.row(toy, b)) == (a == b)


@given(texts, st.integers(0, 6))
def test_a_tree_gives_the_rows_of_its_paths(text: list[int], shape: int) -> None:
    toy = Toy(8, copy=1.0, noise=0.3)
    tree = TokenTree(text[-1]).chain([1, 2, 3]).chain([1, 4]).chain([shape])
    for node, row in enumerate(toy.score(text, tree)):
        assert torch.equal(row, toy.score([*text, *tree.tokens_to(node)])[0])
        assert row.tolist() == laws.row(toy, [*text, *tree.tokens_to(node)])


@given(texts, st.integers(1, 9))
def test_a_window_hides_all_that_lies_before_it(text: list[int], window: int) -> None:
    toy, free = Toy(8, window=window), Toy(8)
    same = toy.score(text)[0].tolist() == free.score(text)[0].tolist()
    assert same == (len(text) <= window)
    changed = [(text[0] + 1) % 8, *text[1:]]
    assert torch.equal(toy.score(text), toy.score(changed)) == (len(text) > window)


def test_noise_makes_a_relative_and_copy_makes_texts_repeat() -> None:
    toy, near, far = Toy(8, seed=3), Toy(8, seed=3, noise=0.3), Toy(8, seed=4)
    prompts = laws.prompts(200, 8)

    def agree(a: Toy, b: Toy) -> int:
        return sum(int(a.score(p)[0].argmax()) == int(b.score(p)[0].argmax()) for p in prompts)

    assert 200 > agree(toy, near) > 2 * agree(toy, far)
    repeating = Toy(8, copy=5.0).score([1, 2, 3, 4, 1])[0]
    assert int(repeating.argmax()) == 2


def test_rows_are_float64_and_the_same_every_time() -> None:
    rows = Toy(5, seed=9).score([1, 2, 3])
    assert rows.dtype == torch.float64 and torch.equal(rows, Toy(5, seed=9).score([1, 2, 3]))
    assert Toy(5).caps == Model.caps | {"taps"}


def answer(model: Model, cache: Cache, ask: Ask, tokens: Sequence[int], chunk: int = 512) -> Reply:
    """What the engine does to answer one ask."""
    done = False
    while not done:
        job, done = cache.prepare(ask, tokens, chunk)
        reply = model.forward([job])[0]
    return reply


# --- hidden states


def states(toy: Toy, tokens: Sequence[int], tap: int = 2) -> list[float]:
    """The hidden state of the last token, from an empty cache."""
    reply = answer(toy, toy.cache(), Ask(TokenTree(tokens[-1]), taps=(tap,)), tokens)
    return reply.hidden[tap][-1].tolist()  # type: ignore[no-any-return]


@given(texts, texts)
def test_different_texts_have_different_hidden_states(a: list[int], b: list[int]) -> None:
    toy = Toy(8)
    assert (states(toy, a) == states(toy, b)) == (a == b)


@settings(max_examples=40)
@given(texts, st.integers(0, 2), st.integers(1, 4))
def test_hidden_states_in_a_tree_are_those_of_its_paths(
    text: list[int], tap: int, chunk: int
) -> None:
    toy = Toy(8, window=5)
    tree = TokenTree(text[-1]).chain([1, 2, 3]).chain([1, 4])
    reply = answer(toy, toy.cache(), Ask(tree, taps=(tap,)), text, chunk)
    ours = reply.hidden[tap][-len(tree) :]
    assert ours.dtype == torch.float64 and ours.shape == (len(tree), 2)
    assert bool((ours.abs() <= 1).all()) and torch.equal(ours, ours.float().double())
    for node, state in enumerate(ours):
        assert state.tolist() == states(toy, [*text, *tree.tokens_to(node)], tap)


def test_hidden_states_differ_by_tap_and_by_seed() -> None:
    seen = [tuple(states(Toy(8, seed), [1, 2, 3], tap)) for seed in range(5) for tap in range(3)]
    assert len(set(seen)) == 15


def test_logits_are_the_same_with_and_without_taps() -> None:
    toy = Toy(8)
    plain = answer(toy, toy.cache(), Ask(TokenTree(3)), [1, 2, 3])
    tapped = answer(toy, toy.cache(), Ask(TokenTree(3), taps=(0, 2)), [1, 2, 3])
    assert torch.equal(plain.logits, tapped.logits)
    assert plain.hidden == {} and tapped.hidden.keys() == {0, 2}


def test_rows_come_in_the_order_they_are_asked_in() -> None:
    toy, tree = Toy(8), TokenTree(3).chain([4])
    for rows in ([0, 1], [1, 0], [1, 1], []):
        reply = answer(toy, toy.cache(), Ask(tree, rows=rows), [1, 2, 3])
        assert torch.equal(reply.logits, toy.score([1, 2, 3], tree)[rows])


# --- a head that reads features


def read(
    head: ToyHead,
    cache: Cache,
    tree: TokenTree,
    tokens: Sequence[int],
    features: torch.Tensor | None,
) -> Reply:
    """The answer where feature i is that of token i of the text, then of the tree's nodes."""
    job, done = cache.prepare(Ask(tree, taps=(2,)), tokens, 512)
    assert done
    if features is not None:
        job.features = features[job.start : job.start + len(job.tokens)]
    return head.forward([job])[0]


def random_features(count: int) -> torch.Tensor:
    return torch.rand(count, 2, generator=torch.Generator().manual_seed(count)).double() * 2 - 1


TEXT = [3, 1, 4, 1, 5]
TREE = TokenTree(5).chain([2, 6]).chain([2, 7]).chain([0])  # 5 nodes


def expected_row(
    head: ToyHead, tokens: Sequence[int], features: torch.Tensor | None
) -> list[float]:
    """Asked of the head's hash, without cache or mask."""
    hashes = np.zeros(len(tokens)) if features is None else feature_hash(features.numpy())
    places = np.arange(len(tokens), dtype=np.float64)
    return head._row_logits(
        np.array(tokens, dtype=np.float64), np.stack([places, hashes], 1)
    ).tolist()


def test_a_head_answers_from_the_features_on_its_path() -> None:
    head = ToyHead(8)
    features = random_features(len(TEXT) - 1 + len(TREE))
    reply = read(head, head.cache(), TREE, TEXT, features)
    for node, row in enumerate(reply.logits):
        path = [len(TEXT) - 1 + i for i in (0, *TREE.path(node))]
        rows = [*range(len(TEXT) - 1), *path]
        tokens = [*TEXT, *TREE.tokens_to(node)]
        assert row.tolist() == expected_row(head, tokens, features[rows])


def test_a_wrong_or_missing_feature_changes_what_sees_it_and_nothing_else() -> None:
    head = ToyHead(8)
    features = random_features(len(TEXT) - 1 + len(TREE))
    right = read(head, head.cache(), TREE, TEXT, features)
    first = len(TEXT) - 1
    for place in range(len(features)):
        wrong = features.clone()
        wrong[place, place % 2] += 2**-20
        reply = read(head, head.cache(), TREE, TEXT, wrong)
        for node in range(len(TREE)):
            sees = place < first or place - first in (0, node, *TREE.path(node))
            same = torch.equal(reply.logits[node], right.logits[node])
            assert same != sees
            assert torch.equal(reply.hidden[2][first + node], right.hidden[2][first + node]) == same
    none = read(head, head.cache(), TREE, TEXT, None)
    assert not any(map(torch.equal, none.logits, right.logits))


def test_features_stay_in_the_cache_with_the_accepted_tokens() -> None:
    head = ToyHead(8)
    features = random_features(len(TEXT) - 1 + len(TREE))
    cache = head.cache()
    read(head, cache, TREE, TEXT, features)
    tokens = [*TEXT, 2, 7, 1]  # nodes 1 and 3, then what the target said
    later = random_features(20)
    reply = read(head, cache, TokenTree(1), tokens, later)
    assert cache.length == len(tokens) - 1
    rows = [*range(len(TEXT)), len(TEXT), len(TEXT) + 2]
    seen = torch.cat([features[rows], later[len(tokens) - 1 : len(tokens)]])
    assert reply.logits[0].tolist() == expected_row(head, tokens, seen)


def test_a_head_agrees_with_its_target_in_part() -> None:
    toy, head = Toy(8, seed=3), ToyHead(8, seed=3, noise=0.3)
    assert head.feeds == (2,) and head.caps == Model.caps | {"taps"}
    agree = 0
    for prompt in laws.prompts(200, 8):
        row = read(
            head, head.cache(), TokenTree(prompt[-1]), prompt, random_features(len(prompt))
        ).logits[0]
        agree += int(row.argmax()) == int(toy.score(prompt)[0].argmax())
    assert 60 < agree < 200


# --- a state in place of rows


def recurrent_row(model: ToyRecurrent, tokens: Sequence[int]) -> list[float]:
    state = GOLDEN
    for token in tokens:
        state = model.step(state, token)
    return model.row(state).tolist()  # type: ignore[no-any-return]


@given(texts, texts)
def test_recurrent_rows_are_those_of_the_whole_text(a: list[int], b: list[int]) -> None:
    model = ToyRecurrent(8, noise=0.3)
    assert (recurrent_row(model, a) == recurrent_row(model, b)) == (a == b)
    tree = TokenTree(a[-1]).chain(b)
    for chunk in (1, 3, 99):
        reply = answer(model, model.cache(), Ask(tree), a, chunk)
        for node, row in enumerate(reply.logits):
            assert row.tolist() == recurrent_row(model, [*a, *tree.tokens_to(node)])


def test_a_state_keeps_all_of_a_chain_or_nothing() -> None:
    model = ToyRecurrent(8)
    cache = model.cache()
    chain = TokenTree(TEXT[-1]).chain([2, 6])
    answer(model, cache, Ask(chain), TEXT)
    whole = [*TEXT, 2, 6, 7]
    twin = cache.fork()
    reply = answer(model, twin, Ask(TokenTree(7)), whole)
    assert twin.length == len(whole) - 1 and model.width == 1
    assert reply.logits[0].tolist() == recurrent_row(model, whole)
    part = [*TEXT, 2, 3]
    reply = answer(model, cache, Ask(TokenTree(3)), part)
    assert cache.length == 0 and model.width == len(part), "the text is computed again"
    assert reply.logits[0].tolist() == recurrent_row(model, part)


def test_a_chain_that_grows_goes_on_from_its_end() -> None:
    model = ToyRecurrent(8)
    cache = model.cache()
    chain = TokenTree(TEXT[-1])
    for token in (2, 6, 2):
        reply = answer(model, cache, Ask(chain), TEXT)
        assert reply.logits[-1].tolist() == recurrent_row(
            model, [*TEXT, *chain.tokens_to(len(chain) - 1)]
        )
        chain.chain([token], at=len(chain) - 1)
    assert model.width == 1
    answer(model, cache, Ask(TokenTree(TEXT[-1]).chain([3])), TEXT)
    assert model.width == len(TEXT) + 1, "another chain begins at the committed state"


@settings(max_examples=40)
@given(st.integers(0, 10**6))
def test_whatever_is_asked_of_a_recurrent_cache_its_rows_are_right(seed: int) -> None:
    rng = random.Random(seed)
    model = ToyRecurrent(3, seed)
    text = [rng.randrange(3)]
    cache = model.cache()
    for _ in range(12):
        tree = TokenTree(text[-1]).chain(rng.choices(range(3), k=rng.randint(0, 4)))
        job, _ = cache.prepare(Ask(tree), text, rng.randint(1, 5))
        if rng.random() < 0.8:  # else it was interrupted before its forward
            model.forward([job])
        reply = answer(model, cache, Ask(tree, rows=[len(tree) - 1]), text, rng.randint(1, 5))
        path = tree.tokens_to(len(tree) - 1)
        assert reply.logits[0].tolist() == recurrent_row(model, [*text, *path])
        accepted = rng.randint(0, len(tree) - 1)
        text += [*tree.tokens[1 : 1 + accepted], rng.randrange(3)]


def test_an_interrupted_forward_leaves_the_state_as_it_was() -> None:
    model = ToyRecurrent(8)
    cache = model.cache()
    answer(model, cache, Ask(TokenTree(TEXT[-1])), TEXT)
    assert isinstance(cache, RecurrentCache)
    cache.prepare(Ask(TokenTree(TEXT[-1]).chain([1])), TEXT, 9)
    cache.next_state = GOLDEN  # its forward got as far as this, and ended in an exception
    reply = answer(model, cache, Ask(TokenTree(TEXT[-1]).chain([2])), TEXT)
    assert reply.logits[-1].tolist() == recurrent_row(model, [*TEXT, 2])


def test_branches_are_refused() -> None:
    model = ToyRecurrent(8)
    assert "rows" in model.caps and not {"tree", "rollback"} & model.caps
    with pytest.raises(Unsupported, match="a tree cannot run on recurrent: it needs a cache that"):
        answer(model, model.cache(), Ask(TokenTree(5).chain([1]).chain([2])), TEXT)


class Guesses(Drafter):
    """Chains that are right at times."""

    def propose(self, ctx: Context, state: None, budget: int) -> TokenTree:
        tree = TokenTree(ctx.tokens[-1])
        state_after = GOLDEN
        for token in ctx.tokens:
            state_after = ToyRecurrent.step(state_after, token)
        for depth in range(min(budget, ctx.depth, 3)):
            best = int(ToyRecurrent(4, noise=0.4).row(state_after).argmax())
            tree.chain([best], at=depth)
            state_after = ToyRecurrent.step(state_after, best)
        return tree


def test_the_engine_drafts_on_it_and_the_tokens_are_those_of_plain_decoding() -> None:
    setting = laws.Setting(Sampling(max_new_tokens=30))
    models = {"target": ToyRecurrent(4)}
    plain = laws.generate(laws.build("plain"), [1, 2], setting, models).ctx.output
    live = laws.generate(Speculative(Guesses(), nodes=4), [1, 2], setting, models)
    assert live.ctx.output == plain and len(plain) == 30
    assert 0 < live.ctx.stats.accepted < live.ctx.stats.drafted
