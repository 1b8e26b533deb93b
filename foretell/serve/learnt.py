"""Stores of what drafters learn of all clients, within bounds that no client can use up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable
from typing import Any

from foretell.core.stores import Stores

Use = tuple[str, Hashable]  # a tenant, and the config of a method or of a part of it
CONFIGS = 128  # methods of a tenant that keep what they learnt


class Learnt(Stores):
    """Stores of what drafters have learnt: a tenant keeps those of the methods used last.

    Beyond `limit` bytes in all, the least recently used stores of the tenant with the largest share
    go first. Stores that requests in flight use stay.
    """

    def __init__(self, limit: int, known_stores: Stores):
        super().__init__()
        self.limit = limit
        self.update(known_stores)
        self.used.update(known_stores.used)

    def trim(self, tenants: Collection[str], uses: Collection[Any]) -> None:
        super().trim(tenants, uses)
        tenant_counts = Counter(tenant for tenant, _ in self.used)
        for use in list(self.used):
            if tenant_counts[use[0]] > CONFIGS and use not in uses:
                tenant_counts[use[0]] -= 1
                self.forget(use)
        held_bytes: Counter[Use] = Counter()
        for (tenant, config, _), store in self.items():
            held_bytes[tenant, config] += getattr(store, "nbytes", 0)
        while idle_uses := [use for use in self.used if held_bytes[use] and use not in uses]:
            if held_bytes.total() <= self.limit:
                return
            tenant_bytes: Counter[str] = Counter()
            for use in idle_uses:
                tenant_bytes[use[0]] += held_bytes[use]
            largest_share = max(tenant_bytes.values())
            use = next(use for use in idle_uses if tenant_bytes[use[0]] == largest_share)
            del held_bytes[use]
            self.forget(use)
