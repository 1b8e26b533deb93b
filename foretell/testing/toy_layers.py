"""A toy whose layers, and halves of layers, can be run one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from foretell.cache.job import Job, join_entry_states
from foretell.core.model import STEP, Model
from foretell.drafters.heads.networks.anchored import Anchored
from foretell.drafters.heads.networks.folder import head_kinds
from foretell.testing.toy import TAP, Toy, ToyHead
from foretell.testing.toy_hashes import (
    GOLDEN,
    RELATIVE,
    kept_spread,
    mix_bits,
    path_key,
    spread_numbers,
    whole_numbers,
)
from foretell.verification.judge_model import LinearJudge

Seen = tuple[np.ndarray, np.ndarray]  # keys and positions of rows, (m,) each


class ToyLayers(Toy):
    """A toy whose layers are computed one after the other, so that some can be left out.

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
        """States (n, 1 + V) that enter layer 0."""
        states = np.zeros((len(tokens), 1 + self.vocab))
        states[:, 0] = tokens
        return states

    def embed(self, tokens: Sequence[int]) -> torch.Tensor:
        return torch.from_numpy(self.embedded(np.array(tokens, dtype=np.float64)))

    def head_rows(self, h: torch.Tensor) -> torch.Tensor:
        return h[:, 1:]

    def build_head(self, method: str, kind: str, folder: str, shape: Any) -> Model:
        head_class = head_kinds()[kind]
        if issubclass(head_class, Anchored):
            return ToyRows(self, self.layers // 2 if "entry" in head_class.options else 0)
        return ToyLayersHead(self, kind)

    def judge(self) -> LinearJudge:
        weight = torch.zeros(1 + self.vocab)
        weight[1:3] = torch.tensor([9.0, -9.0])
        return LinearJudge(weight, torch.tensor(5.0))

    def row(self, tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
        states = self.embedded(tokens)
        for layer in range(self.layers):
            seen_rows = []
            for position in positions:
                is_visible = positions <= position
                if self.window is not None:
                    is_visible &= position - positions < self.window
                seen_rows.append((states[is_visible, 0], positions[is_visible]))
            states = self.after_mlp(layer, self.attended(layer, states, seen_rows))
        return states[np.argmax(positions), 1:]

    def run(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        row_indices: torch.Tensor,
        first_job: Job,
        taps: Sequence[int],
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        jobs = STEP.get()
        given_states = join_entry_states(jobs, self.embed)
        if given_states is None:
            states = self.embedded(token_ids[0].double().numpy())
        else:
            states = given_states.double().numpy().copy()
        tapped_states: dict[int, torch.Tensor] = {}
        for layer_part in range(self.layers) if first_job.layers is None else first_job.layers:
            layer, halves = (
                (layer_part, ("attention", "mlp"))
                if isinstance(layer_part, int)
                else (layer_part[0], layer_part)
            )
            for tap in taps:
                if tap <= layer and tap not in tapped_states:
                    tapped_states[tap] = torch.from_numpy(states.copy())
            if "attention" in halves:
                seen_rows = self._seen_rows(layer, states, positions[0].double(), jobs)
                states = self.attended(layer, states, seen_rows)
            if "mlp" in halves:
                states = self.after_mlp(layer, states)
        last_states = torch.from_numpy(states)
        for tap in taps:
            tapped_states.setdefault(tap, last_states)
        return self.head_rows(last_states[row_indices]), tapped_states

    def _seen_rows(
        self, layer: int, states: np.ndarray, positions: torch.Tensor, jobs: Sequence[Job]
    ) -> list[Seen]:
        """Writes a layer's rows of states (T, 1 + V); returns what each node sees by its job's
        mask.
        """
        seen_rows: list[Seen] = []
        first_node = 0
        for job in jobs:
            end_node = first_node + len(job.tokens)
            keys = torch.from_numpy(states[first_node:end_node, 0].copy())[None, :, None]
            all_keys, all_values = job.write(
                layer, keys, positions[None, first_node:end_node, None]
            )
            mask = job.mask(self.window, torch.float64)
            if job.cache.segments:
                all_keys, all_values, mask = self._with_prefix(
                    job, all_keys, all_values, mask, layer
                )
            rows = all_keys[0, :, 0].numpy(), all_values[0, :, 0].numpy()
            visible = None if mask is None else mask.numpy() == 0
            for node in range(len(job.tokens)):
                selection = slice(None) if visible is None else visible[node]
                seen_rows.append((rows[0][selection], rows[1][selection]))
            first_node = end_node
        return seen_rows

    def attended(self, layer: int, states: np.ndarray, seen_rows: Sequence[Seen]) -> np.ndarray:
        """States (n, 1 + V) after the attention of a layer in which they see these rows."""
        keys = np.array([path_key(*rows) for rows in seen_rows])[:, None]
        share = self.sharpness * self.shares[0] * self.fading**layer
        logits = states[:, 1:] + share * spread_numbers(keys, self.seed + TAP * layer, self.vocab)
        if layer == 0 and self.copy:
            for row, (tokens, positions) in zip(logits, seen_rows, strict=True):
                text = tokens[np.argsort(positions)]
                for earlier_index in np.flatnonzero(text[:-1] == text[-1]):
                    row[int(text[earlier_index + 1])] += self.copy
        if layer == 0 and self.noise:
            relative_logits = spread_numbers(keys, self.seed + RELATIVE, self.vocab)
            logits += self.noise * self.sharpness * relative_logits
        return np.concatenate([whole_numbers(keys), logits], 1)

    def after_mlp(self, layer: int, states: np.ndarray) -> np.ndarray:
        """States (n, 1 + V) after the MLP of a layer."""
        with np.errstate(over="ignore"):
            keys = mix_bits(states[:, :1].astype(np.uint64) * GOLDEN + np.uint64(layer))
        share = self.sharpness * self.shares[1] * self.fading**layer
        logits = states[:, 1:] + share * spread_numbers(keys, self.seed + layer, self.vocab)
        return np.concatenate([whole_numbers(keys), logits], 1)


class ToyLayersHead(ToyHead):
    """A head of such a toy, with which it agrees in part."""

    def __init__(self, target: ToyLayers, kind: str):
        super().__init__(target.vocab, target.seed, context=target.context, kind=kind)
        self.target = target

    def _row_logits(self, tokens: np.ndarray, values: np.ndarray) -> np.ndarray:
        relative_logits = kept_spread(
            self._path_hash(tokens, values), self.seed + RELATIVE, self.vocab
        )
        return self.target.row(tokens, values[:, 0]) + self.noise * self.sharpness * relative_logits


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
        self, row_positions: Sequence[int], tokens: Sequence[int], states: torch.Tensor | None
    ) -> torch.Tensor:
        entry_states = (
            np.zeros((len(row_positions), 1 + self.vocab))
            if states is None
            else states.numpy().copy()
        )
        with np.errstate(over="ignore"):
            keys = mix_bits(
                entry_states[:, 0].astype(np.uint64) * GOLDEN + np.array(row_positions, np.uint64)
            )
        entry_states[:, 0] = whole_numbers(keys)
        return torch.from_numpy(entry_states)

    def noise_vectors(self, noise: Sequence[float], temperature: float) -> torch.Tensor:
        """Makes rows of noise: hashes of their places and of 16 bits of it."""
        entry_states = np.zeros((len(noise), 1 + self.vocab))
        numbers = (np.array(noise) * 65_536).astype(np.uint64)
        with np.errstate(over="ignore"):
            keys = mix_bits(numbers * GOLDEN + np.arange(len(noise), dtype=np.uint64))
        entry_states[:, 0] = whole_numbers(keys)
        return torch.from_numpy(entry_states)
