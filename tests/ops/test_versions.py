"""Tables and their snapshots: a snapshot is a copy that costs nothing."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.ops.versions import Snapshot, Table

KEYS = range(5)
# (what, of which snapshot, key): a snapshot is taken, writes, or is given back; or all is forgotten
actions = st.lists(
    st.tuples(
        st.sampled_from(["open", "update", "update", "put", "close", "clear"]),
        st.integers(0, 3),
        st.integers(0, 4),
    ),
    max_size=40,
)


@settings(max_examples=200)
@given(actions, st.integers(1, 5))
def test_a_snapshot_reads_as_a_copy_would(steps: list[tuple[str, int, int]], room: int) -> None:
    table: Table[int, str] = Table(room)
    everything: dict[int, str] = {}  # the table's twin
    copies: list[tuple[Snapshot[int, str], dict[int, str]]] = []

    def write(key: int, value: str) -> None:
        everything.pop(key, None)
        everything[key] = value
        if len(everything) > room:
            del everything[next(iter(everything))]

    for turn, (what, which, key) in enumerate(steps):
        if what == "open":
            copies.append((table.snapshot(), dict(everything)))
        elif what == "put":
            table.write_value(key, f"{turn}")
            write(key, f"{turn}")
        elif what == "clear":
            table.clear()
            everything.clear()
        elif copies and what == "close":
            del copies[which % len(copies)]
        elif copies:
            snapshot, twin = copies[which % len(copies)]
            snapshot.update(key, lambda value, turn=turn: f"{value} {turn}")  # type: ignore[misc]
            twin[key] = f"{twin.get(key)} {turn}"
            write(key, f"{everything.get(key)} {turn}")
        assert {key: entry.value for key, entry in table.entries.items()} == everything
        assert list(table.entries) == list(everything)
        for snapshot, twin in copies:
            assert {key: snapshot.get(key) for key in KEYS} == {key: twin.get(key) for key in KEYS}


def test_what_nobody_sees_any_more_is_not_kept() -> None:
    table: Table[int, str] = Table(4)
    table.write_value(1, "a")
    first, second = table.snapshot(), table.snapshot()
    for turn in range(9):
        table.write_value(1, f"{turn}")
        table.write_value(2, f"{turn}")
    assert first.saved_values == second.saved_values == {1: "a"}, (
        "one entry each, whatever was written since"
    )
    del first
    table.snapshot()
    assert len(table.snapshots) == 2


def test_a_copy_of_a_table_leaves_the_snapshots_of_the_first_alone() -> None:
    table: Table[int, str] = Table(4)
    table.write_value(1, "a")
    snapshot = table.snapshot()
    other: Any = copy.deepcopy(table)
    other.write_value(1, "b")
    assert (table.get(1), other.get(1), snapshot.get(1)) == (
        "a",
        "b",
        "a",
    ) and not snapshot.saved_values
