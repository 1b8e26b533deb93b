"""A draft model over the first and the last rows of a text."""

from __future__ import annotations

import torch

from foretell.core.tree import TokenTree
from foretell.core.types import Ask
from foretell.drafters.own.windowed import Recent, Windowed
from foretell.testing.toy import Toy
from tests.models.decoder.test_retrieved import read

TEXT = [(7 * i * i + 3 * i) % 6 for i in range(200)]


def test_it_keeps_the_first_and_the_last_rows_with_their_positions() -> None:
    model = Windowed(Toy(6), sinks=3, window=13)
    cache = model.cache()
    most = 0
    for length in range(20, 120, 3):
        tree = TokenTree(TEXT[length - 1]).chain(TEXT[length : length + 9])  # beyond the change
        read(model, cache, Ask(tree), TEXT[:length])
        assert cache.length + len(cache.tokens) >= length
        positions = list(cache.row_positions())
        last = range(max(3, cache.length - len(positions) + 3), cache.length)
        assert positions == ([0, 1, 2, *last] if cache.base else [])
        assert cache.k[0][0, : cache.base, 0].tolist() == [TEXT[at] for at in positions]
        most = max(most, cache.base)
    assert 16 <= cache.base <= most <= 16 + 4 + 9


def test_a_long_text_is_read_in_pieces_that_fit() -> None:
    model = Windowed(Toy(6), sinks=2, window=14)
    cache = model.cache()
    whole = False
    largest = 0
    while not whole:
        job, whole = cache.prepare(Ask(TokenTree(TEXT[-1])), TEXT, 512)
        largest = max(largest, len(job.tokens))
        model.forward([job])
    assert largest <= 20 and cache.base <= 20


def test_while_nothing_is_given_up_it_is_the_model_itself() -> None:
    toy = Toy(6)
    tree = TokenTree(TEXT[29]).chain([1, 2]).chain([3], at=1)
    want = toy.score(TEXT[:30], tree)
    assert torch.equal(Windowed(toy, 16, 240).score(TEXT[:30], tree), want)
    assert not torch.equal(Windowed(toy, 4, 8).score(TEXT[:30], tree)[1:], want[1:])


def test_rows_are_given_up_at_lengths_that_depend_on_tokens_alone() -> None:
    policy = Recent(4, 12)
    changes = []
    length = 0
    while length < 60:
        length += policy.room_left(length)
        changes.append(length)
    assert changes == list(range(20, 64, 4))


def test_the_model_has_the_threads_that_it_was_given() -> None:
    """Its engine gives them to the models that it was made with, and a window is none of these."""
    toy = Toy(6)
    toy.threads_wanted = 3
    Windowed(toy, 4, 8).score(TEXT[:9])
    assert toy.threads_wanted == 3
