"""A table that many requests write while each goes on seeing it as it was when that request began.

So what a request draws from the table does not depend on what else runs beside it. Entries carry
the version they were written in; a snapshot reads what is not newer than itself. An older entry is
kept for a snapshot only when it is overwritten, so a snapshot costs nothing when it is taken.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Entry(NamedTuple, Generic[V]):
    """A value and the version of the table it was written in."""

    value: V
    version: int


class Table(Generic[K, V]):
    """`capacity` values by key, of which the one written longest ago is dropped first.

    Values must not be changed after they were written.
    """

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.entries: OrderedDict[K, Entry[V]] = OrderedDict()  # the newest last
        self.version = 0
        self.snapshots: list[weakref.ref[Snapshot[K, V]]] = []

    def __getstate__(self) -> dict[str, object]:
        """A copy of the table has no snapshots: those read the table they were taken of."""
        return {**self.__dict__, "snapshots": []}

    def __len__(self) -> int:
        return len(self.entries)

    def get(self, key: K) -> V | None:
        entry = self.entries.get(key)
        return entry.value if entry else None

    def write_value(self, key: K, value: V) -> None:
        old_entry = self.entries.pop(key, None)
        if old_entry:
            self._keep_for_snapshots(key, old_entry)
        elif len(self.entries) >= self.capacity:
            self._keep_for_snapshots(*self.entries.popitem(last=False))
        self.entries[key] = Entry(value, self.version)

    def clear(self) -> None:
        while self.entries:
            self._keep_for_snapshots(*self.entries.popitem())

    def snapshot(self) -> Snapshot[K, V]:
        """The table as it is now, for one reader."""
        new_snapshot = Snapshot(self, self.version)
        self.snapshots = [
            snapshot_ref for snapshot_ref in self.snapshots if snapshot_ref() is not None
        ]
        self.snapshots.append(weakref.ref(new_snapshot))
        self.version += 1
        return new_snapshot

    def _keep_for_snapshots(self, key: K, entry: Entry[V]) -> None:
        """Keeps an entry that leaves the table for the snapshots that still see it."""
        for snapshot_ref in reversed(self.snapshots):  # the newest first
            snapshot = snapshot_ref()
            if snapshot is None:
                continue
            if snapshot.version < entry.version:
                break
            snapshot.saved_values[key] = entry.value


class Snapshot(Generic[K, V]):
    """A table as it was at one moment, with what its owner has written since."""

    def __init__(self, table: Table[K, V], version: int):
        self.table = table
        self.version = version
        self.saved_values: dict[K, V] = {}  # seen by this snapshot, but in the table no more
        self.owner_values: dict[K, V] = {}  # by its owner

    def __deepcopy__(self, memo: dict[int, object]) -> Snapshot[K, V]:
        """A copy of its reader reads the same."""
        return self

    def get(self, key: K) -> V | None:
        if key in self.owner_values:
            return self.owner_values[key]
        entry = self.table.entries.get(key)
        if entry and entry.version <= self.version:
            return entry.value
        return self.saved_values.get(key)

    def update(self, key: K, change: Callable[[V | None], V]) -> None:
        """Replaces a value by what `change` makes of it.

        The table's value is replaced too; it may be another one by now, then with a change of its
        own.
        """
        seen_value, table_value = self.get(key), self.table.get(key)
        changed_value = change(seen_value)
        self.owner_values[key] = changed_value
        self.table.write_value(
            key, changed_value if table_value is seen_value else change(table_value)
        )
