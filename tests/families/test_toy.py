"""The toy model answers from exactly what a node sees, or the laws would have no power."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from foretell.core.tree import TokenTree
from foretell.families.toy import Toy
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
    assert Toy(5).caps == {"tree", "rows"}
