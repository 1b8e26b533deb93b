"""KV cache eviction, and the base of all cache policies: rows given up at certain lengths, and the
attention that they got.

A policy that evicts decides which rows of a cache stay. Rows change at lengths that committed
tokens alone decide, and drafts end there; so a text is the same with drafts and without. Between
two changes the rows are ordinary ones: any backend reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from foretell.cache.buffers import bytes_of as bytes_of
from foretell.cache.policy import NEVER as NEVER
from foretell.cache.policy import CachePolicy as CachePolicy
from foretell.core.settings import Settings
from foretell.errors import BadConfig, Unsupported
from foretell.ops.attention import Attention
from foretell.ops.row_attention import attend_noting

if TYPE_CHECKING:
    from foretell.core.model import Model

Chosen = list[torch.Tensor | None]  # of each layer, the rows (KV, n) of its heads that stay


@dataclass(frozen=True)
class KV(Settings):
    """The base of what `kv=` takes: a frozen dataclass of settings."""

    # What it does where several are joined: evictor, selector, encoder or store, see
    # kv.store.composition; "": it goes alone.
    role: ClassVar[str] = ""
    aligned: ClassVar[bool] = False  # an encoder for which a row is one token's in all layers
    settles: ClassVar[bool] = False  # an evictor that gives up rows of a prompt alone, after it

    def build_policy(self, target: Model) -> CachePolicy:
        """The policy of a request's caches. Raises Unsupported where the target has no such
        rows.
        """
        raise NotImplementedError

    def build_view(self, target: Model) -> CachePolicy:
        """The policy by which drafts read a cache that keeps all rows; see kv/select/view_model.py.
        Raises Unsupported as `build_policy` does.
        """
        return self.build_policy(target)

    def build_named(self, target: Model) -> CachePolicy:
        """The policy, which knows what users call it."""
        cache_policy = self.build_policy(target)
        cache_policy.name = self.name
        return cache_policy

    def with_budget(self, rows: int) -> KV | None:
        """These settings with a budget of `rows` rows held or read, or as many of them as make
        whole pages; None where no setting says how many. Raises BadConfig where they are too few.
        """
        settings: Any = self
        if not hasattr(settings, "budget"):
            return None
        page = getattr(settings, "page", 1)
        return replace(settings, budget=rows // page * page)  # type: ignore[no-any-return]

    @property
    def name(self) -> str:
        """The policy's name, as users know it."""
        return self.method_name

    def check_target(self, target: Model) -> None:
        """Raises Unsupported for a target whose rows cannot be given up one by one."""
        check_rows(f"kv={self.name}", target, "leave kv out")


def check_rows(policy_name: str, target: Model, cure: str) -> None:
    """Raises Unsupported for a target that has no rows of all of a text in every layer."""
    loop = getattr(target, "loop", None)
    missing_need = ""
    if "source" in target.caps:  # its attention tells rows apart by their number
        missing_need = "a decoder without an encoder"
    elif not any(target.layout) or not target.layout or None in target.layout:
        missing_need = "cache rows of every layer"
    elif loop is not None and any(loop.windows):
        missing_need = "layers that see all of a text: some see a window of it"
    if missing_need:
        raise Unsupported.missing_capability(policy_name, target.name, missing_need, cure)


def check_budget(name: str, budget: int, min_rows: int, reserved_rows: str) -> None:
    """Raises BadConfig for a budget of rows that does not hold what always stays."""
    if budget < min_rows:
        raise BadConfig.field(f"{name}:budget", budget, f"at least {min_rows}, for {reserved_rows}")


@dataclass
class Evicting(CachePolicy):
    """Holds at most `budget` rows of a text after its prompt, and `every` - 1 more in between.

    A prompt is read as a whole, and what it has too much is given up after it. `every` 0: what
    follows the prompt stays.
    """

    budget: int
    every: int

    @property
    def first_eviction(self) -> int:
        """The length at which rows are given up for the first time."""
        if self.prompt > self.budget:
            return self.prompt
        return self.budget + self.every if self.every else NEVER

    def room_left(self, length: int) -> int:
        if length < self.first_eviction:
            return self.first_eviction - length
        return self.every - (length - self.first_eviction) % self.every if self.every else NEVER

    def next_change(self, length: int) -> int:
        """The length at which rows are given up next, of a cache this long before it."""
        if length < self.first_eviction:
            return self.first_eviction
        return length + Evicting.room_left(self, length)

    def evicts_at(self, length: int) -> bool:
        """Whether rows are given up at this length. `room_left` may end pieces elsewhere too."""
        tokens_beyond = length - self.first_eviction
        return (
            tokens_beyond % self.every == 0
            if self.every and tokens_beyond > 0
            else tokens_beyond == 0
        )

    def change_rows(self, cache: Any) -> None:
        """Gives up rows where there are too many of them."""
        if self.evicts_at(cache.length) and cache.base > self.budget:
            self.evict_rows(cache)

    def evict_rows(self, cache: Any) -> None:
        """Leaves `budget` rows or fewer of a cache that has more, by `cache.compact_rows` or
        `cache.keep_rows`.
        """
        raise NotImplementedError


@dataclass
class Watching(CachePolicy):
    """Knows what attention rows got from certain nodes, those that `counts_token` names.

    The mean over the query heads that share a key head is added up for each row of it, in float32.
    Scratch rows that are rejected leave no trace: theirs counts when they are committed.
    """

    received: dict[int, torch.Tensor] = field(default_factory=dict)  # of each layer (parts, base)
    # Of each layer what the scratch rows gave: all pending ones together (parts, rows), and each
    # node of a tree by its scratch row.
    pending: dict[int, torch.Tensor] = field(default_factory=dict)
    nodes: dict[int, dict[int, torch.Tensor]] = field(default_factory=dict)

    def begin_text(self, prompt: int) -> None:
        super().begin_text(prompt)
        self.received, self.pending, self.nodes = {}, {}, {}

    def fork(self) -> Watching:
        twin = super().fork()
        assert isinstance(twin, Watching)
        twin.received, twin.pending = dict(self.received), dict(self.pending)
        twin.nodes = {layer: dict(rows) for layer, rows in self.nodes.items()}
        return twin

    def counts_token(self, token_position: int) -> bool:
        """Whether the token at this place of the text is one that rows are judged by.

        `room_left` ends there and where such tokens end, so that all nodes of a forward count or
        none.
        """
        raise NotImplementedError

    def watches_job(self, job: Any) -> bool:
        return self.counts_token(self.job_position(job))

    def job_position(self, job: Any) -> int:
        """The place in the text of a job's first new node."""
        return int(job.positions[0] + job.cache.offset)

    def split_scores(self, job: Any, given_scores: torch.Tensor) -> torch.Tensor:
        """Divides the attention that new nodes gave (KV, n, rows) into the parts that a policy adds
        up (parts, n, rows).
        """
        return given_scores

    def attend_job(self, job: Any, attention: Attention) -> torch.Tensor:
        node_outputs, given_scores = attend_noting(attention)
        self.note_scores(job, attention.layer, self.split_scores(job, given_scores))
        return node_outputs

    def note_scores(self, job: Any, layer: int, given_scores: torch.Tensor) -> None:
        """Takes note of what new nodes gave to all rows (parts, n, rows)."""
        first_row = job.start - job.cache.base
        if not first_row:
            self.pending.pop(layer, None)
        pending_count = max(0, -job.first)
        if pending_count:
            pending_sum = given_scores[:, :pending_count].sum(1)
            earlier_sum = self.pending.get(layer)
            if earlier_sum is not None:
                pending_sum[:, : earlier_sum.shape[1]] += earlier_sum
            self.pending[layer] = pending_sum
        noted_nodes = self.nodes.get(layer, {}) if first_row else {}
        remaining_nodes = {node: rows for node, rows in noted_nodes.items() if node < first_row}
        remaining_nodes |= {
            first_row + i: given_scores[:, i] for i in range(pending_count, given_scores.shape[1])
        }
        self.nodes[layer] = remaining_nodes

    def keep_nodes(self, cache: Any, nodes: Sequence[int]) -> None:
        received: dict[int, torch.Tensor] = {}
        kept_indices = [*range(cache.base), *(cache.base + node for node in nodes)]
        for layers in self._layer_groups() if nodes else ():
            first_layer = layers[0]
            # What they got of the pending nodes and of each node of the path.
            given_parts = (
                [[self.pending[layer] for layer in layers]] if first_layer in self.pending else []
            )
            noted_nodes = [node for node in nodes if node in self.nodes[first_layer]]
            given_parts += [[self.nodes[layer][node] for layer in layers] for node in noted_nodes]
            row_count = max(kept_indices) + 1
            padded_parts = [_pad_rows(torch.stack(parts), row_count) for parts in given_parts]
            summed_scores = (
                padded_parts[0] if len(padded_parts) == 1 else torch.stack(padded_parts).sum(0)
            )
            if len(kept_indices) < row_count:
                summed_scores = summed_scores[..., kept_indices]
            earlier_scores = [self.received[layer] for layer in layers if layer in self.received]
            if earlier_scores:
                summed_scores[..., : earlier_scores[0].shape[1]] += torch.stack(earlier_scores)
            received |= dict(zip(layers, summed_scores, strict=True))
        for layer, layer_scores in self.received.items():
            if layer not in received:
                received[layer] = _pad_rows(layer_scores, layer_scores.shape[1] + len(nodes))
        self.received, self.pending, self.nodes = received, {}, {}

    def _layer_groups(self) -> list[list[int]]:
        """The layers that took notes, those together whose notes are of one shape."""
        layer_groups: dict[Any, list[int]] = {}
        for layer, noted_nodes in self.nodes.items():
            layer_notes = [
                *noted_nodes.values(),
                *([self.pending[layer]] if layer in self.pending else ()),
            ]
            shapes = tuple(note.shape for note in layer_notes)
            group_key = shapes, tuple(noted_nodes), layer in self.pending, layer in self.received
            layer_groups.setdefault(group_key, []).append(layer)
        return list(layer_groups.values())


@dataclass
class Attended(Watching, Evicting):
    """Evicts by the attention that rows got."""

    def evict_rows(self, cache: Any) -> None:
        surviving_rows: Chosen = []
        for layer in range(len(cache.layout)):
            layer_rows = self.choose_rows(cache, layer, self.received[layer]).sort(-1).values
            surviving_rows.append(layer_rows)
            self.received[layer] = self.received[layer].gather(1, layer_rows)
        cache.keep_rows(surviving_rows)

    def choose_rows(self, cache: Any, layer: int, received: torch.Tensor) -> torch.Tensor:
        """The rows (KV, budget) that stay of those that received so much (KV, base)."""
        raise NotImplementedError


def _pad_rows(rows: torch.Tensor, count: int) -> torch.Tensor:
    """Rows with zeros after them, `count` in all (..., count)."""
    missing = count - rows.shape[-1]
    return torch.nn.functional.pad(rows, (0, missing)) if missing else rows


def top_rows(scores: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` rows of the highest scores (..., rows), of equal ones the later."""
    order = scores.flip(-1).argsort(dim=-1, descending=True, stable=True)
    return scores.shape[-1] - 1 - order[..., :count]
