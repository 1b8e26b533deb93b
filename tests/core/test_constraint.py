"""The guide of a branch, on a constraint that is a list of texts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from foretell.core import constraint
from foretell.core.constraint import MARGIN, Guide
from foretell.core.distribution import Sampler
from foretell.core.tree import TokenTree
from foretell.core.types import Sampling
from foretell.errors import BadConfig

VOCAB = 6
END = 5


class Listed:
    """These texts and no others."""

    def __init__(self, *texts: Sequence[int]):
        self.texts = [list(text) for text in texts]

    def track(self) -> Listed:
        return self

    def permits(self, output: Sequence[int]) -> bool:
        return any(text[: len(output)] == list(output) for text in self.texts)

    def whole(self, output: Sequence[int]) -> bool:
        return list(output) in self.texts

    def allowed(self, output: Sequence[int]) -> torch.Tensor:
        return torch.tensor([self.permits([*output, token]) for token in range(VOCAB)])

    def forced(self, output: Sequence[int]) -> list[int]:
        found: list[int] = []
        while not self.whole([*output, *found]) and int(self.allowed([*output, *found]).sum()) == 1:
            found.append(int(self.allowed([*output, *found]).nonzero()[0]))
        return found


TEXTS = Listed([1, 2], [1, 2, 3], [1, 4, 4])


def test_ends_may_come_where_a_text_is_whole_and_only_there() -> None:
    guide = Guide(TEXTS, [END])
    row = torch.zeros(VOCAB)
    for output, tokens in (([], [1]), ([1], [2, 4]), ([1, 2], [3, END]), ([1, 4], [4])):
        scores = guide.masked(row, output)
        assert (scores > -torch.inf).nonzero()[:, 0].tolist() == tokens
        for token in range(VOCAB):
            assert guide.permits([*output, token]) == (token in tokens)
            assert guide.may_follow(output, token) == (token in tokens)
    assert bool((row == 0).all()), "the row was changed"


def test_a_tracker_may_have_a_quicker_way_to_check_one_token() -> None:
    class Quick(Listed):
        def may_follow(self, output: Sequence[int], token: int) -> bool:
            asked.append(token)
            return self.permits([*output, token])

    asked: list[int] = []
    guide = Guide(Quick([1, 2], [1, 2, 3]), [END])
    assert [token for token in range(VOCAB) if guide.may_follow([1, 2], token)] == [3, END]
    assert asked == [0, 1, 2, 3, 4]


def test_a_text_is_complete_where_nothing_else_may_follow() -> None:
    guide = Guide(TEXTS, [END])
    assert [guide.complete(text) for text in ([1], [1, 2], [1, 2, 3], [1, 4, 4])] == [
        False,
        False,
        True,
        True,
    ]
    with pytest.raises(BadConfig, match="not of the given form"):
        guide.complete([2])


def test_a_tree_ends_at_complete_texts_and_at_forbidden_ones() -> None:
    sampler = Sampler(Sampling(constraint=TEXTS), [0], [END], VOCAB)
    tree = TokenTree(0)
    tree.chain([1, 2, 3])
    tree.chain([3], at=1)
    tree.chain([END], at=2)
    assert [sampler.ends(tree, node, []) for node in range(len(tree))] == [
        False,
        False,
        False,
        True,
        True,
        True,
    ]
    assert not sampler.plain


def test_a_stop_token_that_a_form_needs_may_stand_where_it_needs_it() -> None:
    """Stop tokens of the user's are ends beside what they are in the form."""
    guide = Guide(TEXTS, [4])
    assert (guide.masked(torch.zeros(VOCAB), [1]) > -torch.inf).nonzero()[:, 0].tolist() == [2, 4]
    assert (guide.masked(torch.zeros(VOCAB), [1, 2]) > -torch.inf).tolist()[4]


class Closing(Listed):
    """Texts whose endings are known."""

    def ending(self, output: Sequence[int]) -> list[int] | None:
        rests = [text[len(output) :] for text in self.texts if text[: len(output)] == list(output)]
        return min(rests, key=len, default=None)

    def ends_within(self, output: Sequence[int], token: int, room: int) -> bool:
        ending = self.ending([*output, token])
        return ending is not None and len(ending) <= room


def following(guide: Guide, output: Sequence[int], row: torch.Tensor | None = None) -> list[int]:
    """The tokens that have a probability after `output`, which two functions agree about."""
    scores = guide.masked(torch.zeros(VOCAB) if row is None else row, output)
    found = (scores > -torch.inf).nonzero()[:, 0].tolist()
    if row is None:
        asked = [token for token in range(VOCAB) if guide.may_follow(output, token)]
        assert asked == found
    return found


def test_a_text_whose_length_runs_out_goes_where_it_can_still_end() -> None:
    texts = Closing([1, 2], [1, 2, 3, 3, 3], [1, 4, 4], [3])
    for longest, behind in ((1, [3]), (2, [1, 3]), (5, [1, 3])):
        assert following(Guide(texts, [END], longest), []) == behind
    assert following(Guide(texts, [END], 2), [1]) == [2]
    assert following(Guide(texts, [END], 3), [1]) == [2, 4]
    assert following(Guide(texts, [END], 3), [1, 2]) == [END]
    assert following(Guide(texts, [END], 5), [1, 2]) == [3, END]
    assert Guide(texts, [END], 5).forced([1, 2, 3]) == [3, 3]


def test_a_text_that_cannot_end_in_time_goes_on_as_it_would() -> None:
    texts = Closing([1, 2, 2, 2], [1, 4, 4, 4])
    assert following(Guide(texts, [END], 3), [1]) == [2, 4]
    banned = torch.zeros(VOCAB).index_fill(0, torch.tensor([3]), -torch.inf)
    short = Closing([3], [1, 2])
    assert following(Guide(short, [END], 1), [], banned) == [1], "the one that fits is banned"
    assert following(Guide(short, [END], 1), []) == [3]


def test_nothing_is_asked_while_there_is_room() -> None:
    class Counting(Closing):
        def ends_within(self, output: Sequence[int], token: int, room: int) -> bool:
            asked.append(token)
            return super().ends_within(output, token, room)

    asked: list[int] = []
    texts = Counting([1, 2], [1, 4, 4])
    assert following(Guide(texts, [END], 3 + MARGIN), []) == [1] and not asked
    assert following(Guide(texts, [END], 2 + MARGIN), []) == [1] and asked


def test_a_whole_text_may_end_however_unlikely_that_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraint, "LOOKED_AT", 1)
    row = torch.zeros(VOCAB).index_fill(0, torch.tensor([2]), 9.0)
    assert following(Guide(Closing([1], [1, 2, 2]), [END], 2), [1], row) == [END]
    assert following(Guide(Closing([1], [1, 2, 2]), [END], 3), [1], row) == [2, END]


def test_of_many_tokens_the_best_are_asked_about_and_the_ending_is_among_them() -> None:
    texts = Closing([0], *([token, token] for token in range(VOCAB)))
    row = -torch.arange(VOCAB).float().flip(0)
    guide = Guide(texts, [END], 1)
    assert following(guide, [], row) == [0]
    assert following(Guide(texts, [END], 2), [], row) == list(range(VOCAB))
