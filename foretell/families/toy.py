"""A model made for laws: its logits are a hash of exactly the tokens and positions that a node
sees.

Any wrong mask, position, kept or lost row changes the answer, which a transformer would blur. Its
cache rows hold the token and its position, so what it sees is what the cache really has. `noise`
makes a relative that agrees in part: a draft model. `copy` makes texts that repeat: the chance mass
of the token that followed the same token before grows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from foretell.core.model import STEP, Model
from foretell.memory.job import Job

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(x: np.ndarray) -> np.ndarray:
    """splitmix64, elementwise on uint64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Toy(Model):
    """`sharpness`: spread of the logits. `window`: positions a node sees back, itself included;
    None: all.
    """

    def __init__(
        self,
        vocab: int = 4,
        seed: int = 0,
        noise: float = 0.0,
        sharpness: float = 4.0,
        context: int = 4096,
        copy: float = 0.0,
        window: int | None = None,
        name: str = "toy",
    ):
        self.name, self.vocab, self.context = name, vocab, context
        self.seed, self.noise, self.sharpness, self.copy, self.window = (
            seed,
            noise,
            sharpness,
            copy,
            window,
        )
        self.layout = (
            (1, 1, 1),
            (1, 1, 1),
        )  # two layers that store the same, so that a layer left out is noticed
        self.dtype, self.device = torch.float64, torch.device("cpu")

    def _noise(self, key: np.uint64, seed: int) -> np.ndarray:
        with np.errstate(over="ignore"):
            steps = np.arange(1, self.vocab + 1, dtype=np.uint64) * GOLDEN
            words = mix(mix(np.array(key) + np.uint64(seed) * GOLDEN) + steps)
        return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53 - 0.5

    def row(self, tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Logits (V,) of a node that sees these tokens at these positions, the newest last in
        position.
        """
        with np.errstate(over="ignore"):
            pairs = tokens.astype(np.uint64) * np.uint64(1_000_003) + positions.astype(np.uint64)
            parts = mix(pairs * GOLDEN + GOLDEN)
            key = np.uint64(parts.sum(dtype=np.uint64))
        logits = self.sharpness * self._noise(key, self.seed)
        if self.copy:
            order = np.argsort(positions)
            text = tokens[order]
            for earlier in np.flatnonzero(text[:-1] == text[-1]):
                logits[int(text[earlier + 1])] += self.copy
        if self.noise:
            logits = logits + self.noise * self.sharpness * self._noise(key, self.seed + 977)
        return logits

    def run(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        first: Job,
        taps: Sequence[int],
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        wanted, out, low = set(rows.tolist()), [], 0
        for job in STEP.get():
            high = low + len(job.tokens)
            k = ids[:, low:high, None].double()
            v = positions[:, low:high, None].double()
            for layer in range(2):
                keys, values = job.write(layer, k, v)
            mask = job.mask(self.window, torch.float64)
            for node in range(len(job.tokens)):
                if low + node in wanted:
                    seen = slice(None) if mask is None else mask[node] == 0
                    out.append(self.row(keys[0, seen, 0].numpy(), values[0, seen, 0].numpy()))
            low = high
        logits = (
            torch.from_numpy(np.stack(out))
            if out
            else torch.zeros(0, self.vocab, dtype=torch.float64)
        )
        return logits, {}
