"""What requests of one tenant share, of a bounded number of tenants."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

TENANTS = 64  # whose stores are kept; beyond that those unused for longest are forgotten


class Stores(dict[tuple[str, Hashable, str], Any]):
    """What requests of one (tenant, config) share, by name, of a bounded number of tenants."""

    def __init__(self) -> None:
        super().__init__()
        self.used: dict[str, None] = {}  # tenants, those used last at the end

    def touch(self, tenant: str) -> None:
        self.used.pop(tenant, None)
        self.used[tenant] = None

    def trim(self, in_flight: set[str]) -> None:
        """Forgets tenants unused for longest, except those that have requests in flight."""
        idle = [tenant for tenant in self.used if tenant not in in_flight]
        for tenant in idle[: max(0, len(self.used) - TENANTS)]:
            del self.used[tenant]
            for key in [key for key in self if key[0] == tenant]:
                del self[key]
