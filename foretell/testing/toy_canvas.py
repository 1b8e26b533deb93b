"""Toys that fill canvases, for laws: what a row says is a function of exactly what it sees.

ToyCanvas   logits are a hash of the tokens at all positions that are read
Oracle      knows the law of all texts, and says the exact law of a position given what it sees
ToyNoise    fills uniform noise: it sees what it said before as well
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from foretell.cache.job import Job
from foretell.core.masked_text import NOISE
from foretell.core.model import STEP, Computed
from foretell.models.diffusion.canvas import CanvasCache
from foretell.models.diffusion.renoised import BehindText, TextCache
from foretell.testing.toy import Toy, stacked
from foretell.testing.toy_hashes import path_key, spread

if TYPE_CHECKING:
    from foretell.cache.cache import Cache
    from foretell.core.request import Request

PLACE = 104729  # what the position that a row is of adds to the seed


class ToyCanvas(Toy):
    """The last id of its vocabulary is the mask. Rows of the cache hold tokens and positions, so a
    row that was kept too long is seen as what it was.
    """

    caps = frozenset({"canvas", "masks"})

    def __init__(self, vocab: int = 5, seed: int = 0, shift: int = 0, block: int = 0, **toy: Any):
        super().__init__(vocab, seed, **toy)
        self.mask_id = vocab - 1
        self.shift, self.block = shift, block

    def cache(self, request: Request | None = None, beside: Cache | None = None) -> Cache:
        cache = CanvasCache(self.layout, self.dtype, self.device)
        cache.mask_id, cache.shift, cache.block = self.mask_id, self.shift, self.block
        return self.prepared(cache, request, beside)

    def run(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        first: Job,
        taps: Sequence[int],
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        wanted = set(rows.tolist())
        logits: dict[int, np.ndarray] = {}
        low = 0
        for job in STEP.get():
            high = low + len(job.tokens)
            tokens = ids[:, low:high, None].double()
            places = positions[:, low:high, None].double()
            for layer in self.stored:
                keys, values = job.write(layer, tokens, places)
            for node in wanted & {*range(low, high)}:
                place = job.positions[node - low]
                seen = np.ones(keys.shape[1], dtype=bool)
                if self.block:
                    seen = values[0, :, 0].numpy() // self.block <= place // self.block
                known = keys[0, :, 0].numpy()[seen], values[0, :, 0].numpy()[seen]
                logits[node] = self.said(*known, place + self.shift)
            low = high
        return stacked([logits[node] for node in rows.tolist()], self.vocab), {}

    def said(self, tokens: np.ndarray, positions: np.ndarray, place: int) -> np.ndarray:
        """Logits (V,) of the token at `place`, of who sees these tokens at these positions."""
        return self.sharpness * spread(
            path_key(tokens, positions), self.seed + PLACE * place, self.vocab
        )


class Oracle(ToyCanvas):
    """Behind a prompt of `first` tokens stands one of the `texts`, each with its chance."""

    def __init__(
        self, texts: Mapping[tuple[int, ...], float], vocab: int, first: int = 1, **toy: Any
    ):
        super().__init__(vocab, **toy)
        self.first = first
        self.texts = np.array([*texts], dtype=np.int64)  # (texts, positions)
        self.chances = np.array([*texts.values()])

    def said(self, tokens: np.ndarray, positions: np.ndarray, place: int) -> np.ndarray:
        fits = np.ones(len(self.texts), dtype=bool)
        for token, position in zip(tokens, positions, strict=True):
            behind = int(position) - self.first
            if token != self.mask_id and behind >= 0:
                fits &= self.texts[:, behind] == token
        chances = np.zeros(self.vocab)
        if 0 <= place - self.first < self.texts.shape[1]:
            np.add.at(chances, self.texts[fits, place - self.first], self.chances[fits])
        if not chances.sum():  # a text that cannot be: any token will do
            chances[: self.mask_id] = 1
        with np.errstate(divide="ignore"):
            return np.log(chances / chances.sum())


class ToyNoise(Toy):
    """Its text's rows hold tokens and positions; what it said before counts by its best tokens."""

    caps = frozenset({"canvas", NOISE})
    reads_segments = False

    def __init__(self, vocab: int = 5, seed: int = 0, canvas_length: int = 4, **toy: Any):
        super().__init__(vocab, seed, **toy)
        self.canvas_length = canvas_length

    def cache(self, request: Request | None = None, beside: Cache | None = None) -> Cache:
        return self.prepared(TextCache(self.layout, self.dtype, self.device), request, beside)

    def compute(self, jobs: Sequence[Job], taps: Sequence[int]) -> Computed:
        logits: list[np.ndarray] = []
        for job in jobs:
            own = [torch.tensor(x)[None, :, None].double() for x in (job.tokens, job.positions)]
            if not isinstance(job, BehindText):
                for layer in self.stored:
                    job.write(layer, *own)
                continue
            pairs = zip(job.read(0), own, strict=True)
            seen = [torch.cat(pair, 1)[0, :, 0] for pair in pairs]
            best = torch.full((len(job.rows),), -1) if job.said is None else job.said.argmax(-1)
            tokens = torch.cat([seen[0], best.double()]).numpy()
            places = torch.cat([seen[1], torch.zeros(len(best)).double()]).numpy()
            for row in job.rows:
                salt = self.seed + PLACE * job.positions[row]
                logits.append(self.sharpness * spread(path_key(tokens, places), salt, self.vocab))
        width = sum(len(job.tokens) for job in jobs)
        return Computed(stacked(logits, self.vocab), {}, "torch", width)


def shuffles(items: Sequence[int]) -> dict[tuple[int, ...], float]:
    """All orders of these items, each as likely."""
    orders = list(itertools.permutations(items))
    return {order: 1 / len(orders) for order in orders}


def replacements(items: Sequence[int], new: int) -> dict[tuple[int, ...], float]:
    """These items with any one of them replaced, each as likely."""
    texts = [(*items[:i], new, *items[i + 1 :]) for i in range(len(items))]
    return {text: 1 / len(texts) for text in texts}
