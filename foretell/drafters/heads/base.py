"""The base of drafters whose tokens come from a trained head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import cached_property
from typing import Any, ClassVar

from foretell.core.context import Context
from foretell.core.drafter import Drafter, Drafting
from foretell.core.model import Model
from foretell.drafters.heads.attach import attach_head
from foretell.drafters.heads.head_tree import HeadReader, grow_head_tree
from foretell.drafters.heads.networks.tree_shape import TreeShape


class HeadDrafter(Drafter):
    """Settings of a drafter with a head: a frozen dataclass that has this field, and overrides
    `steps`.
    """

    head: str  # folder of the head; without one, the head that ships for the target
    network: ClassVar[str] = ""  # kind of the head; "": the method's name
    models = ("head",)
    needs = ("tree",)

    def bring(self, models: Mapping[str, Model]) -> Mapping[str, Model]:
        network = self.network or self.method_name
        return attach_head(models["target"], self.method_name, network, self.head, self.grown_shape)

    @property
    def grown_shape(self) -> TreeShape | None:
        """The shape of trees that the head may grow in one call, if it can."""
        return None

    def start(self, ctx: Context) -> Any:
        return HeadReader(ctx)


class HeadTreeDrafter(HeadDrafter):
    """Settings of a drafter whose trees grow by their nodes' probabilities: it has some fields of
    TreeShape besides.
    """

    in_one_call: ClassVar[bool] = False  # whether the head can grow its trees by itself

    @cached_property
    def shape(self) -> TreeShape:
        """The limits of its trees."""
        names = [field.name for field in fields(TreeShape) if hasattr(self, field.name)]
        return TreeShape(**{name: getattr(self, name) for name in names})

    @property
    def grown_shape(self) -> TreeShape | None:
        return self.shape if self.in_one_call else None

    def steps(self, ctx: Context, reader: HeadReader, budget: int) -> Drafting:
        tree = yield from grow_head_tree(ctx, reader, budget, self.shape, self.method_name)
        return tree
