"""A toy whose layers, and halves of layers, can be run one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from foretell.cache.job import Job, entering
from foretell.core.model import STEP, Model
from foretell.drafters.heads.networks.anchored import Anchored
from foretell.drafters.heads.networks.folder import kinds
from foretell.testing.toy import TAP, Toy, ToyHead
from foretell.testing.toy_hashes import (
    GOLDEN,
    RELATIVE,
    kept_spread,
    mix,
    path_key,
    spread,
    whole_numbers,
)
from foretell.verification.judge_model import LinearJudge

Seen = tuple[np.ndarray, np.ndarray]  # keys and positions of rows, (m,) each


class ToyLayers(Toy):
    """A toy whose layers are computed one behind the other, so that some can be left out.

    What a layer passes on of a node, (1 + V,), is a hash of all that it has seen and, beside it,
    the logits so far. Each half of a layer (attention, which alone sees other nodes, and MLP)
    changes the hash and adds to the logits, later layers less than earlier ones: who exits early,
    or leaves out halves, agrees with the whole in part. The rows of a layer's attention hold the
    hash that entered it, and the position.
    """

    caps = Toy.caps | {"layers", "parts"}
    layers = 4
    shares = (0.7, 0.4)  # of the logits' spread that attention and MLP of the first layer have
    fading = 0.6  # each further layer's share, to that of the one before

    def embedded(self, tokens: np.ndarray) -> np.ndarray:
        """What enters layer 0, (n, 1 + V)."""
        states = np.zeros((len(tokens), 1 + self.vocab))
        states[:, 0] = tokens
        return states

    def embed(self, tokens: Sequence[int]) -> torch.Tensor:
        return torch.from_numpy(self.embedded(np.array(tokens, dtype=np.float64)))

    def read(self, h: torch.Tensor) -> torch.Tensor:
        return h[:, 1:]

    def headed(self, method: str, kind: str, folder: str, shape: Any) -> Model:
        made = kinds()[kind]
        if issubclass(made, Anchored):
            return ToyRows(self, self.layers // 2 if "entry" in made.options else 0)
        return ToyLayersHead(self, kind)

    def judge(self) -> LinearJudge:
        weight = torch.zeros(1 + self.vocab)
        weight[1:3] = torch.tensor([9.0, -9.0])
        return LinearJudge(weight, torch.tensor(5.0))

    def row(self, tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
        states = self.embedded(tokens)
        for layer in range(self.layers):
            seen = []
            for here in positions:
                visible = positions <= here
                if self.window is not None:
                    visible &= here - positions < self.window
                seen.append((states[visible, 0], positions[visible]))
            states = self.thought(layer, self.attended(layer, states, seen))
        return states[np.argmax(positions), 1:]

    def run(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        first: Job,
        taps: Sequence[int],
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        jobs = STEP.get()
        given = entering(jobs, self.embed)
        if given is None:
            states = self.embedded(ids[0].double().numpy())
        else:
            states = given.double().numpy().copy()
        hidden: dict[int, torch.Tensor] = {}
        for part in range(self.layers) if first.layers is None else first.layers:
            layer, halves = (
                (part, ("attention", "mlp")) if isinstance(part, int) else (part[0], part)
            )
            for tap in taps:
                if tap <= layer and tap not in hidden:
                    hidden[tap] = torch.from_numpy(states.copy())
            if "attention" in halves:
                seen = self._seen(layer, states, positions[0].double(), jobs)
                states = self.attended(layer, states, seen)
            if "mlp" in halves:
                states = self.thought(layer, states)
        last = torch.from_numpy(states)
        for tap in taps:
            hidden.setdefault(tap, last)
        return self.read(last[rows]), hidden

    def _seen(
        self, layer: int, states: np.ndarray, positions: torch.Tensor, jobs: Sequence[Job]
    ) -> list[Seen]:
        """Writes a layer's rows of states (T, 1 + V); what each node sees by its job's mask."""
        seen: list[Seen] = []
        low = 0
        for job in jobs:
            high = low + len(job.tokens)
            keys = torch.from_numpy(states[low:high, 0].copy())[None, :, None]
            all_keys, all_values = job.write(layer, keys, positions[None, low:high, None])
            mask = job.mask(self.window, torch.float64)
            if job.cache.segments:
                all_keys, all_values, mask = self._with_prefix(
                    job, all_keys, all_values, mask, layer
                )
            rows = all_keys[0, :, 0].numpy(), all_values[0, :, 0].numpy()
            visible = None if mask is None else mask.numpy() == 0
            for node in range(len(job.tokens)):
                which = slice(None) if visible is None else visible[node]
                seen.append((rows[0][which], rows[1][which]))
            low = high
        return seen

    def attended(self, layer: int, states: np.ndarray, seen: Sequence[Seen]) -> np.ndarray:
        """States (n, 1 + V) behind the attention of a layer in which they see these rows."""
        keys = np.array([path_key(*rows) for rows in seen])[:, None]
        share = self.sharpness * self.shares[0] * self.fading**layer
        logits = states[:, 1:] + share * spread(keys, self.seed + TAP * layer, self.vocab)
        if layer == 0 and self.copy:
            for row, (tokens, positions) in zip(logits, seen, strict=True):
                text = tokens[np.argsort(positions)]
                for earlier in np.flatnonzero(text[:-1] == text[-1]):
                    row[int(text[earlier + 1])] += self.copy
        if layer == 0 and self.noise:
            other = spread(keys, self.seed + RELATIVE, self.vocab)
            logits += self.noise * self.sharpness * other
        return np.concatenate([whole_numbers(keys), logits], 1)

    def thought(self, layer: int, states: np.ndarray) -> np.ndarray:
        """The same behind the MLP."""
        with np.errstate(over="ignore"):
            keys = mix(states[:, :1].astype(np.uint64) * GOLDEN + np.uint64(layer))
        share = self.sharpness * self.shares[1] * self.fading**layer
        logits = states[:, 1:] + share * spread(keys, self.seed + layer, self.vocab)
        return np.concatenate([whole_numbers(keys), logits], 1)


class ToyLayersHead(ToyHead):
    """A head of such a toy, with which it agrees in part."""

    def __init__(self, target: ToyLayers, kind: str):
        super().__init__(target.vocab, target.seed, context=target.context, kind=kind)
        self.target = target

    def _row(self, tokens: np.ndarray, values: np.ndarray) -> np.ndarray:
        other = kept_spread(self._key(tokens, values), self.seed + RELATIVE, self.vocab)
        return self.target.row(tokens, values[:, 0]) + self.noise * self.sharpness * other


class ToyRows(Model):
    """Rows for such a toy that were not trained, see drafters/heads/networks/anchored.py: hashes of
    their places, and in the middle of what enters there at their nodes, whose logits so far they go
    on from.
    """

    layout = ()
    deepest = 3
    ranks: Sequence[Sequence[float]] = ()

    def __init__(self, target: ToyLayers, entry: int):
        self.target, self.entry = target, entry
        self.name = f"{target.name} (rows)"
        self.vocab, self.context = target.vocab, target.context
        self.dtype, self.device = target.dtype, target.device

    def entering(
        self, places: Sequence[int], tokens: Sequence[int], states: torch.Tensor | None
    ) -> torch.Tensor:
        made = np.zeros((len(places), 1 + self.vocab)) if states is None else states.numpy().copy()
        with np.errstate(over="ignore"):
            keys = mix(made[:, 0].astype(np.uint64) * GOLDEN + np.array(places, np.uint64))
        made[:, 0] = whole_numbers(keys)
        return torch.from_numpy(made)

    def noised(self, noise: Sequence[float], temperature: float) -> torch.Tensor:
        """The same of rows of noise: hashes of their places and of 16 bits of it."""
        made = np.zeros((len(noise), 1 + self.vocab))
        numbers = (np.array(noise) * 65_536).astype(np.uint64)
        with np.errstate(over="ignore"):
            keys = mix(numbers * GOLDEN + np.arange(len(noise), dtype=np.uint64))
        made[:, 0] = whole_numbers(keys)
        return torch.from_numpy(made)
