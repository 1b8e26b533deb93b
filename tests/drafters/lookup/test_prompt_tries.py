"""Tries that begin with a copy say what those say that took in every token."""

from __future__ import annotations

import random
from array import array

import pytest

from foretell.drafters.lookup.prompt_tries import KEPT, LEAST, Beginnings, shared_length
from foretell.drafters.lookup.suffix_tree import Node, Suffixes, Text


def told(suffixes: Suffixes, text: Text) -> object:
    """All that a trie knows."""

    def of(node: Node) -> object:
        inner = [(token, of(child)) for token, child in node.inner.items()]
        return node.count, node.ends, node.last, inner, list(node.leaves.items())

    active = [(node.count, node.ends, node.last) for node in text.active]
    return of(suffixes.root), text.tokens, text.first, active, suffixes.sizes, suffixes.keys


def written(seed: int, length: int, alphabet: int = 6) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(alphabet) for _ in range(length)]


def fresh(tokens: list[int]) -> tuple[Suffixes, Text]:
    suffixes, text = Suffixes(16), Text()
    suffixes.extend(text, tokens)
    return suffixes, text


@pytest.mark.parametrize("alphabet", [2, 6, 500])
def test_a_text_that_begins_like_others_has_the_trie_of_all_its_tokens(alphabet: int) -> None:
    rules = written(0, 2 * LEAST, alphabet)
    beginnings = Beginnings(16)
    for number in range(1, 6):
        tokens = rules + written(number, 40, alphabet)
        own = beginnings.begin_text(tokens)
        assert told(*own) == told(*fresh(tokens))
        own[0].extend(own[1], [1, 2, 1, 2, 1, 2])  # grows by itself: the copy kept does not
    assert 1 <= len(beginnings.kept) <= KEPT


def test_what_they_have_in_common_is_taken_in_twice_and_not_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted: list[int] = []
    extend = Suffixes.extend
    monkeypatch.setattr(
        Suffixes,
        "extend",
        lambda self, text, new: counted.append(len(new)) or extend(self, text, new),
    )
    rules = written(0, 2 * LEAST)
    beginnings = Beginnings(16)
    taken = []
    for number in range(4):
        counted.clear()
        beginnings.begin_text([*rules, 100 + number, *written(number, 9)])
        taken.append(sum(counted))
    assert taken == [2 * LEAST + 10, 2 * LEAST + 10, 10, 10]


def test_a_chat_goes_on_from_its_last_turn() -> None:
    """Each prompt is the one before and more."""
    beginnings = Beginnings(16)
    tokens = written(0, LEAST)
    for turn in range(1, 7):
        assert told(*beginnings.begin_text(tokens)) == told(*fresh(tokens))
        tokens = tokens + written(turn, LEAST)
    assert 1 < len(beginnings.kept) <= KEPT


def test_short_beginnings_are_not_kept_and_memory_is_told() -> None:
    beginnings = Beginnings(16)
    for number in range(9):
        beginnings.begin_text([*written(0, LEAST - 1), 100 + number])
    assert not beginnings.kept and len(beginnings.recent) == KEPT
    assert beginnings.nbytes == 4 * KEPT * LEAST


def test_how_many_tokens_two_texts_begin_with() -> None:
    for one, two, length in (([], [1], 0), ([1, 2], [1, 2, 3], 2), ([1, 2], [2], 0), ([1], [1], 1)):
        assert shared_length(array("i", one), array("i", two)) == length
