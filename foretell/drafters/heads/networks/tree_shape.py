"""The limits within which a head's tree grows."""

from __future__ import annotations

from dataclasses import dataclass

from foretell.errors import BadConfig


@dataclass(frozen=True)
class TreeShape:
    """Of a tree that grows by its nodes' chances."""

    depth: int = 8  # levels
    breadth: int = 10  # nodes of a level that have children, and children of each
    total: int = 59  # nodes that are kept, those with the likeliest paths
    least: float = 0.0  # no level follows one whose best path is less likely
    share: float = 0.0  # children less likely than this share of their best sibling are dropped
    reads: int = 0  # tokens of a prompt that the head reads, the last ones; 0: all of them

    def check(self, method: str) -> None:
        """Raises BadConfig."""
        for name, most in (("depth", 64), ("breadth", 64), ("total", 1023)):
            if not 1 <= getattr(self, name) <= most:
                allowed = f"between 1 and {most}"
                raise BadConfig.field(f"{method}:{name}", getattr(self, name), allowed)
        if self.reads < 0:
            raise BadConfig.field(f"{method}:reads", self.reads, "at least 0, which is all of them")
        for name in ("least", "share"):
            if not 0 <= getattr(self, name) < 1:
                allowed = "at least 0 and below 1"
                raise BadConfig.field(f"{method}:{name}", getattr(self, name), allowed)
