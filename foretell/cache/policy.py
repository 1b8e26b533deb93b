"""What stands beside a cache's own rows: a policy that changes them, and shared rows."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from foretell.ops.attention import Attention

NEVER = 1 << 62  # more tokens than any text has
EVERY = slice(None)


class CachePolicy:
    """What a cache does with its committed rows, besides keeping them: the base does nothing.

    Rows change only where a cache reaches certain lengths, which committed tokens alone decide.
    Drafts and prompt chunks end there, so that every token is computed over the rows that plain
    decoding has: speculation on a policy's cache equals plain decoding on it.
    """

    name = ""  # as users know it
    plain = True  # its rows are read by ordinary attention; else `attend` computes it
    # Whether rows change only behind a draft that crosses such a length. A draft model's may: no
    # law depends on its rows.
    waits = False
    endless = False  # whether positions stay within the model's context however long a text is
    pieces = False  # whether that holds in prompts too: they are read over what is held so far
    spared = 0  # tokens that its texts may have beyond the positions that they take
    prompt = 0  # tokens of the text when its cache was made

    def begin(self, prompt: int) -> None:
        """A new cache is under it, of a text that begins with so many tokens."""
        self.prompt = prompt

    def fork(self) -> CachePolicy:
        """The same for a copy of the cache. What it holds is never changed in place."""
        return copy.copy(self)

    @property
    def bytes(self) -> int:
        """Of memory that it takes beside the cache's own rows: for rows that it holds, and for what
        it finds rows by.
        """
        return 0

    def drop(self) -> None:
        """Its cache is dropped, and it with it."""

    def watches(self, job: Any) -> bool:
        """Whether `attend` computes the attention of this job's nodes."""
        return not self.plain

    def keep(self, cache: Any, nodes: Sequence[int]) -> None:
        """These scratch rows, a path, become the next committed ones; the others are forgotten."""

    def room(self, length: int) -> int:
        """Tokens (1 or more) that a cache of this length takes before its rows change next."""
        return NEVER

    def room_of(self, length: int, prompt: int) -> int:
        """`room` of a cache whose text begins with so many tokens."""
        if prompt == self.prompt:
            return self.room(length)
        twin = copy.copy(self)
        twin.prompt = prompt
        return twin.room(length)

    def change(self, cache: Any) -> None:
        """Changes the rows of a cache that has just reached such a length; see Cache.compact."""

    def attend(self, job: Any, asked: Attention) -> torch.Tensor:
        """Attention of its own for the jobs that it watches -> (n, H, D)."""
        raise NotImplementedError

    def skips(self, job: Any) -> bool:
        """Whether `through` takes this job's nodes through the layers: not all of them pass all.

        Only models that say so (`skips`) ask, see kv/evict/layer_skipping.py.
        """
        return False

    def through(self, job: Any, taps: Sequence[int], run: Any) -> Any:
        """What `Model.compute` gives of this job alone, by forwards of parts of it, which
        `run(jobs, taps)` computes as quickly as the model can.
        """
        raise NotImplementedError


def longest(policy: CachePolicy | None, model: Any) -> int:
    """Tokens that a text under this policy may have for a model, by its positions."""
    if policy is None:
        return int(model.context)
    endless = policy.endless and "blocks" not in model.caps
    return NEVER if endless else int(model.context) + policy.spared


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
        """Of its rows and states."""
        held = [*self.k, *self.v, *self.states.values()]
        return sum(part.numel() * part.element_size() for part in held if part is not None)


def copied(layers: Sequence[Any], rows: slice = EVERY) -> list[Any]:
    """Copies of these rows of every layer (KV, n, D); layers of one shape lie in one tensor."""
    parts: list[Any] = [None] * len(layers)
    by_shape: dict[Any, list[int]] = {}
    for place, layer in enumerate(layers):
        if layer is not None:
            by_shape.setdefault(layer.shape, []).append(place)
    for places in by_shape.values():
        together = torch.stack([layers[place][:, rows] for place in places])
        for place, part in zip(places, together, strict=True):
            parts[place] = part
    return parts
