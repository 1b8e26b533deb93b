"""How many tokens two texts begin with alike."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from foretell.ops.common_prefix import shared_prefix_length

texts = st.lists(st.integers(0, 1), max_size=12)


@given(texts, texts, texts)
def test_it_is_the_length_of_the_common_beginning(a: list[int], b: list[int], c: list[int]) -> None:
    first, second = a + b, a + c
    count = 0
    while count < min(len(first), len(second)) and first[count] == second[count]:
        count += 1
    assert shared_prefix_length(first, second) == count == shared_prefix_length(second, first)
