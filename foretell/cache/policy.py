"""What stands beside a cache's own rows: a policy that changes them, and shared rows."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from foretell.ops.attention import Attention

NEVER = 1 << 62  # more tokens than any text has
EVERY = slice(None)


class CachePolicy:
    """The treatment of a cache's committed rows, besides keeping them: the base does nothing.

    Rows change only where a cache reaches certain lengths, which committed tokens alone decide.
    Drafts and prompt chunks end there, so that every token is computed over the rows that plain
    decoding has: speculation on a policy's cache equals plain decoding on it.
    """

    name = ""  # as users know it
    plain = True  # its rows are read by ordinary attention; else `attend_job` computes it
    # Whether rows change only after a draft that crosses such a length. A draft model's may: no
    # distribution depends on its rows.
    waits = False
    endless = False  # whether positions stay within the model's context however long a text is
    pieces = False  # whether that holds in prompts too: they are read over what is held so far
    spared = 0  # tokens that its texts may have beyond the positions that they take
    prompt = 0  # tokens of the text when its cache was made

    def begin_text(self, prompt: int) -> None:
        """Begins a new cache under this policy, of a text that begins with `prompt` tokens."""
        self.prompt = prompt

    def fork(self) -> CachePolicy:
        """A policy for a copy of the cache. What it holds is never changed in place."""
        return copy.copy(self)

    @property
    def bytes(self) -> int:
        """Bytes of memory that the policy takes beside the cache's own rows: for rows that it
        holds, and for what it finds rows by.
        """
        return 0

    def drop(self) -> None:
        """Frees what the policy holds, as its cache is dropped."""

    def watches_job(self, job: Any) -> bool:
        """Whether `attend_job` computes the attention of this job's nodes."""
        return not self.plain

    def keep_nodes(self, cache: Any, nodes: Sequence[int]) -> None:
        """Takes note that these scratch rows, a path, become the next committed ones; the others
        are forgotten.
        """

    def room_left(self, length: int) -> int:
        """Tokens (1 or more) that a cache of this length takes before its rows change next."""
        return NEVER

    def room_of(self, length: int, prompt: int) -> int:
        """`room_left` of a cache whose text begins with so many tokens."""
        if prompt == self.prompt:
            return self.room_left(length)
        twin = copy.copy(self)
        twin.prompt = prompt
        return twin.room_left(length)

    def change_rows(self, cache: Any) -> None:
        """Changes the rows of a cache that has reached such a length; Cache.commit calls it."""

    def attend_job(self, job: Any, attention: Attention) -> torch.Tensor:
        """Attention of its own for the jobs that it watches -> (n, H, D)."""
        raise NotImplementedError

    def runs_layers(self, job: Any) -> bool:
        """Whether `run_layers` takes this job's nodes through the layers: not all of them pass all.

        Only models that say so (`skips`) ask, see kv/evict/layer_skipping.py.
        """
        return False

    def run_layers(self, job: Any, taps: Sequence[int], run_jobs: Any) -> Any:
        """Computes what `Model.compute` gives of this job alone, by forwards of parts of it, which
        `run_jobs(jobs, taps)` computes as quickly as the model can.
        """
        raise NotImplementedError


def max_text_length(policy: CachePolicy | None, model: Any) -> int:
    """Tokens that a text under this policy may have for a model, by its positions."""
    if policy is None:
        return int(model.context)
    is_endless = policy.endless and "blocks" not in model.caps
    return NEVER if is_endless else int(model.context) + policy.spared


@dataclass(eq=False)
class Segment:
    """Rows of some first tokens of a text, which several caches read and none writes."""

    tokens: tuple[int, ...]
    start: int  # position of its first row
    k: Sequence[Any]  # of each layer (KV, rows, D), None where it keeps none
    v: Sequence[Any]
    states: Mapping[int, torch.Tensor]  # tapped hidden states (rows, E), see TappedStates

    readers: int = 0  # caches that read it now

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    def has_states(self, taps: Iterable[int]) -> bool:
        """Whether the hidden states of all these taps stand beside its rows."""
        return set(taps) <= self.states.keys()

    @property
    def bytes(self) -> int:
        """Bytes of the rows and states."""
        all_tensors = [*self.k, *self.v, *self.states.values()]
        return sum(
            layer_tensor.numel() * layer_tensor.element_size()
            for layer_tensor in all_tensors
            if layer_tensor is not None
        )


def copy_rows(layers: Sequence[Any], rows: slice = EVERY) -> list[Any]:
    """Copies of these rows of every layer (KV, n, D); layers of one shape lie in one tensor."""
    copied_layers: list[Any] = [None] * len(layers)
    by_shape: dict[Any, list[int]] = {}
    for layer_index, layer in enumerate(layers):
        if layer is not None:
            by_shape.setdefault(layer.shape, []).append(layer_index)
    for layer_indices in by_shape.values():
        stacked_rows = torch.stack([layers[layer_index][:, rows] for layer_index in layer_indices])
        for layer_index, layer_copy in zip(layer_indices, stacked_rows, strict=True):
            copied_layers[layer_index] = layer_copy
    return copied_layers
