"""Stores that requests of one tenant share, of a bounded number of tenants."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import Any

TENANTS = 64  # whose stores are kept; beyond that those unused for longest are forgotten


class Stores(dict[tuple[str, Hashable, str], Any]):
    """Stores that requests of one (tenant, config) share, by name, of so many tenants."""

    def __init__(self) -> None:
        self.used: dict[tuple[str, Hashable], None] = {}  # those used last at the end

    def touch(self, use: tuple[str, Hashable]) -> None:
        self.used[use] = self.used.pop(use, None)

    def trim(self, tenants: Collection[str], uses: Collection[Any]) -> None:
        """Forgets tenants unused for longest, except these; `uses`: what is in use of theirs."""
        latest_tenants = [
            *dict.fromkeys(tenant for tenant, _ in reversed(self.used))
        ]  # the latest first
        for use in [
            use for use in self.used if use[0] in latest_tenants[TENANTS:] and use[0] not in tenants
        ]:
            self.forget(use)

    def forget(self, use: tuple[str, Hashable]) -> None:
        del self.used[use]
        for key in [key for key in self if key[:2] == use]:
            del self[key]
