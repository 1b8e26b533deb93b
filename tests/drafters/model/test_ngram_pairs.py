"""Streams of one vocabulary read in another: the law of what is read, against all streams."""

from __future__ import annotations

import itertools
from collections import defaultdict

import numpy as np
import pytest
import torch

from foretell.drafters.model.ngram_pairs import EACH, Pairs, Reading, note_sequence

SEQUENCES = (
    {(0, 1): 10},
    {(0, 1): 10, (0, 1, 1): 11},
    {(0, 1): 10, (1, 0): 11, (1, 0, 2): 12},
    {(0, 0): 10, (0, 0, 0): 11, (2, 1, 0): 12, (1, 2): 13},
    {(0, 1, 2): 10, (1, 2, 0): 11, (2, 0, 1): 12},
)
LENGTH = 7  # of the streams: long enough that two words are read of each


def random_laws(seed: int) -> dict[tuple[int, ...], torch.Tensor]:
    """A law (3,) after every path."""
    draw = np.random.default_rng(seed)
    laws = {}
    for size in range(LENGTH):
        for path in itertools.product(range(3), repeat=size):
            laws[path] = torch.from_numpy(draw.dirichlet(np.ones(3)))
    return laws


def read(stream: tuple[int, ...], sequences: dict[tuple[int, ...], int]) -> tuple[int, ...]:
    """The word that a stream begins with: the longest known one."""
    for size in range(3, 1, -1):
        if stream[:size] in sequences:
            return stream[:size]
    return stream[:1]


@pytest.mark.parametrize("sequences", SEQUENCES)
def test_laws_are_those_of_all_streams_read_from_the_left(
    sequences: dict[tuple[int, ...], int],
) -> None:
    """The first word, the second after each, and the third after both."""
    laws = random_laws(1)
    want: dict[tuple[tuple[int, ...], ...], float] = defaultdict(float)
    for stream in itertools.product(range(3), repeat=LENGTH):
        chance = 1.0
        for place, token in enumerate(stream):
            chance *= float(laws[stream[:place]][token])
        first = read(stream, sequences)
        second = read(stream[len(first) :], sequences)
        want[(first,)] += chance
        want[first, second] += chance
    single = torch.arange(3)
    whole = Reading(laws, sequences)
    law = whole.token_masses(single, single, 16)
    assert float(law.sum()) == pytest.approx(1.0, abs=1e-12)
    for first in {key[0] for key in want}:
        token = sequences.get(first, first[0])
        assert float(law[token]) == pytest.approx(want[(first,)], abs=1e-12)
        behind = {path[len(first) :]: q for path, q in laws.items() if path[: len(first)] == first}
        reading = Reading(behind, sequences, whole.impossible_rests(first))
        second_law = reading.token_masses(single, single, 16)
        second_law /= second_law.sum()
        for second in {key[1] for key in want if key[0] == first and len(key) > 1}:
            token = sequences.get(second, second[0])
            joint = want[(first,)] * float(second_law[token])
            assert joint == pytest.approx(want[first, second], abs=1e-12)


def test_without_the_correction_the_law_is_another() -> None:
    """Power: the first token's whole probability, and a second one that forgets what was barred."""
    laws, single = random_laws(2), torch.arange(3)
    sequences = {(0, 1): 10}
    right = Reading(laws, sequences).token_masses(single, single, 16)
    assert float(laws[()][0] - right[0]) == pytest.approx(float(right[10])) and right[10] > 1e-3
    behind = {path[1:]: q for path, q in laws.items() if path[:1] == (0,)}
    free = Reading(behind, sequences).token_masses(single, single, 16)
    barred = Reading(behind, sequences, [(1,)]).token_masses(single, single, 16)
    assert float(barred[1]) == 0 and float(free[1]) > 1e-3


def test_tokens_that_are_none_of_ours_keep_their_chance() -> None:
    law = random_laws(3)
    found = Reading(law, {}).token_masses(torch.tensor([4, 1]), torch.tensor([0, 2]), 6)
    assert found.tolist() == [0, float(law[()][2]), 0, 0, float(law[()][0]), 0]


def test_the_cache_forgets_what_was_noted_longest_ago() -> None:
    cache: Pairs = Pairs(2)
    seen = cache.snapshot()
    for first in (1, 2, 1, 3):  # 2 is the one that gives way
        note_sequence(seen, (first, 9), 100 + first)
    assert sorted(cache.entries) == [1, 3]
    for size in range(EACH + 5):
        note_sequence(seen, (3, size), size)
    group = cache.get(3)
    assert group is not None and len(group) == EACH and group[-1] == ((3, EACH + 4), EACH + 4)
    note_sequence(seen, (3, 7), 7)
    group = cache.get(3)
    assert group is not None and len(group) == EACH and group[-1] == ((3, 7), 7)
    assert cache.snapshot().get(3) == group


def test_a_reader_sees_the_cache_as_it_was_and_what_it_wrote() -> None:
    cache: Pairs = Pairs(8)
    one = cache.snapshot()
    two = cache.snapshot()
    note_sequence(two, (1, 2), 5)
    assert one.get(1) is None and two.get(1) == (((1, 2), 5),) == cache.get(1)
    note_sequence(one, (1, 3), 6)
    assert one.get(1) == (((1, 3), 6),) and two.get(1) == (((1, 2), 5),)
    assert cache.get(1) == (((1, 2), 5), ((1, 3), 6))
