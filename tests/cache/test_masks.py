"""cache/masks.py against a walk from each node to the root."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from foretell.cache.masks import ancestors


@given(st.integers(1, 14).flatmap(lambda n: st.tuples(*(st.integers(-1, i - 1) for i in range(n)))))
def test_ancestors_follow_parents(parents: tuple[int, ...]) -> None:
    mask = ancestors(parents)
    for node in range(len(parents)):
        seen, at = set(), node
        while at >= 0:
            seen.add(at)
            at = parents[at]
        assert set(mask[node].nonzero().flatten().tolist()) == seen
