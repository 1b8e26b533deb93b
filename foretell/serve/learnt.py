"""What drafters have learnt of all clients, within bounds that no client can use up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable
from typing import Any

from foretell.core.stores import Stores

Use = tuple[str, Hashable]  # a tenant, and the config of a method or of a part of it
CONFIGS = 128  # methods of a tenant that keep what they learnt


class Learnt(Stores):
    """Of a tenant's methods those used last keep their stores. Beyond `limit` bytes in all those go
    that the tenant who has most used least lately. What requests in flight use stays.
    """

    def __init__(self, limit: int, known: Stores):
        super().__init__()
        self.limit = limit
        self.update(known)
        self.used.update(known.used)

    def trim(self, tenants: Collection[str], uses: Collection[Any]) -> None:
        super().trim(tenants, uses)
        counts = Counter(tenant for tenant, _ in self.used)
        for use in list(self.used):
            if counts[use[0]] > CONFIGS and use not in uses:
                counts[use[0]] -= 1
                self.forget(use)
        held: Counter[Use] = Counter()
        for (tenant, config, _), store in self.items():
            held[tenant, config] += getattr(store, "nbytes", 0)
        while idle := [use for use in self.used if held[use] and use not in uses]:
            if held.total() <= self.limit:
                return
            owners: Counter[str] = Counter()
            for use in idle:
                owners[use[0]] += held[use]
            most = max(owners.values())
            use = next(use for use in idle if owners[use[0]] == most)
            del held[use]
            self.forget(use)
