"""What drafters have learnt, within a number of methods and of bytes."""

from __future__ import annotations

from foretell.core.stores import Stores
from foretell.serve.learnt import CONFIGS, Learnt
from tests.core.test_stores import add, held


def test_who_has_most_bytes_loses_its_own() -> None:
    known = Stores()
    add(known, "small", 0, 30)
    for config in range(5):
        add(known, "large", config, 20)
    known.trim(set(), set())
    assert len(known) == 6  # without a limit
    stores = Learnt(90, known)
    stores.trim(set(), {("large", 0)})
    assert held(stores, "small") == [0] and held(stores, "large") == [0, 3, 4]
    stores.limit = 1
    stores.trim(set(), {("large", 0)})
    assert held(stores, "small") == [] and held(stores, "large") == [0]


def test_of_many_methods_those_used_last_are_kept_and_others_lose_nothing() -> None:
    stores = Learnt(1, Stores())
    add(stores, "other", 0)
    for config in range(2 * CONFIGS):
        add(stores, "one", config)
        stores.touch(("one", 3))  # used again and again
        stores.trim({"one"}, {("one", 5)})
    assert held(stores, "other") == [0]
    kept = held(stores, "one")
    assert len(kept) == CONFIGS and kept[:2] == [3, 5] and kept[2] == CONFIGS + 2
