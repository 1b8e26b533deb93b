"""Cache policies that are joined: rows of a prompt are given up, and what is left is encoded, and
stored elsewhere.

What may be joined is decided by what each policy declares, its `role`: one evictor at most, one
encoder and one store. Rows are given up first, so an evictor must have done with it when the prompt
is read (`settles`): what is encoded or stored is never given up one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from foretell.errors import BadConfig
from foretell.kv.base import KV, CachePolicy, Evicting
from foretell.kv.store.base import Stored
from foretell.ops.attention import Attention

if TYPE_CHECKING:
    from foretell.core.model import Model

ROLES = ("evictor", "encoder", "store")  # in the order in which they act
LEGAL = (
    "an evictor of prompts (snapkv), an encoder (gear, block-quantization) and offload go together"
)


@dataclass(frozen=True)
class Composition(KV):
    """Policies that act on one cache, at most one of each role. Raises BadConfig for others."""

    parts: tuple[KV, ...]

    def __post_init__(self) -> None:
        if not self.parts:
            raise BadConfig(f"kv: nothing is joined; {LEGAL}")
        for part in self.parts:
            if part.role not in ROLES and len(self.parts) > 1:
                reason = "reads the rows of one cache" if part.role == "selector" else "goes alone"
                raise BadConfig(f"kv={self.name}: {part.name} {reason} and joins no other; {LEGAL}")
        for role in ROLES:
            role_names = [part.name for part in self.parts if part.role == role]
            if len(role_names) > 1:
                conflict = f"{role}s: {' and '.join(role_names)}"
                raise BadConfig(
                    f"kv={self.name}: there are two {conflict}; leave one out, as {LEGAL}"
                )
        evictor = self.find_part("evictor")
        if evictor is not None and not evictor.settles and len(self.parts) > 1:
            raise BadConfig(
                f"kv={self.name}: {evictor.name} gives up rows at every step, and rows that are "
                f"stored are not given up one by one; {LEGAL}"
            )
        encoder = self.find_part("encoder")
        if evictor is not None and encoder is not None and encoder.aligned:
            raise BadConfig(
                f"kv={self.name}: {encoder.name} merges what layers hold of a token, and "
                f"{evictor.name} leaves each layer tokens of its own; leave one out"
            )

    @property
    def name(self) -> str:
        return "+".join(part.name for part in self.parts)

    def find_part(self, role: str) -> KV | None:
        """The policy of this role."""
        return next((part for part in self.parts if part.role == role), None)

    def with_budget(self, rows: int) -> Composition | None:
        """The evictor decides how many rows are left."""
        evictor = self.find_part("evictor")
        changed_evictor = None if evictor is None else evictor.with_budget(rows)
        if changed_evictor is None:
            return None
        return Composition(
            tuple(changed_evictor if part is evictor else part for part in self.parts)
        )

    def build_policy(self, target: Model) -> CachePolicy:
        if len(self.parts) == 1:
            return self.parts[0].build_policy(target)
        role_policies = {
            role: part.build_policy(target)
            for role in ROLES
            if (part := self.find_part(role)) is not None
        }
        store = role_policies.get("store")
        stored_policy = role_policies.get("encoder", store)
        assert isinstance(stored_policy, Stored), (
            "encoders and stores make policies that store rows"
        )
        if store is not stored_policy and isinstance(store, Stored):
            stored_policy = replace(stored_policy, shelf=store.shelf)
        evictor = role_policies.get("evictor")
        if evictor is None:
            return stored_policy
        assert isinstance(evictor, Evicting), "what settles evicts by a budget"
        return EvictedFirst(evictor, stored_policy)


@dataclass
class EvictedFirst(CachePolicy):
    """Gives up rows of a prompt, and stores those that are left."""

    evictor: Evicting
    stored: Stored

    plain = False

    def begin_text(self, prompt: int) -> None:
        super().begin_text(prompt)
        self.evictor.begin_text(prompt)
        self.stored.begin_text(prompt)

    def fork(self) -> EvictedFirst:
        twin = super().fork()
        assert isinstance(twin, EvictedFirst)
        twin.evictor = self.evictor.fork()  # type: ignore[assignment]
        stored_policy = self.stored.fork()
        twin.stored = stored_policy
        return twin

    def drop(self) -> None:
        self.evictor.drop()
        self.stored.drop()

    @property
    def bytes(self) -> int:
        return self.evictor.bytes + self.stored.bytes

    def room_left(self, length: int) -> int:
        if length < self.prompt:
            return min(self.evictor.room_of(length, self.prompt), self.prompt - length)
        surviving_rows = min(self.prompt, self.evictor.budget)
        return self.stored.room_behind(length - self.prompt + surviving_rows)

    def watches_job(self, job: Any) -> bool:
        return self.stored.watches_job(job) or self.evictor.watches_job(job)

    def keep_nodes(self, cache: Any, nodes: Sequence[int]) -> None:
        if cache.length < self.prompt:
            self.evictor.keep_nodes(cache, nodes)

    def change_rows(self, cache: Any) -> None:
        if cache.length <= self.prompt:
            self.evictor.change_rows(cache)
        self.stored.change_rows(cache)

    def attend_job(self, job: Any, attention: Attention) -> torch.Tensor:
        acting_policy = self.stored if self.stored.watches_job(job) else self.evictor
        return acting_policy.attend_job(job, attention)
