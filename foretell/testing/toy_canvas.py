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
from foretell.testing.toy import Toy, stack_rows
from foretell.testing.toy_hashes import path_key, spread_numbers

if TYPE_CHECKING:
    from foretell.cache.cache import Cache
    from foretell.core.request import Request

PLACE = 104729  # what the position that a row is of adds to the seed


class ToyCanvas(Toy):
    """A toy that fills canvases; the last id of its vocabulary is the mask. Rows of the cache hold
    tokens and positions, so a row that was kept too long is seen as what it was.
    """

    caps = frozenset({"canvas", "masks"})

    def __init__(self, vocab: int = 5, seed: int = 0, shift: int = 0, block: int = 0, **toy: Any):
        super().__init__(vocab, seed, **toy)
        self.mask_id = vocab - 1
        self.shift, self.block = shift, block

    def cache(self, request: Request | None = None, beside: Cache | None = None) -> Cache:
        cache = CanvasCache(self.layout, self.dtype, self.device)
        cache.mask_id, cache.shift, cache.block = self.mask_id, self.shift, self.block
        return self.prepare_cache(cache, request, beside)

    def run(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        row_indices: torch.Tensor,
        first_job: Job,
        taps: Sequence[int],
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        wanted_nodes = set(row_indices.tolist())
        logits: dict[int, np.ndarray] = {}
        first_node = 0
        for job in STEP.get():
            end_node = first_node + len(job.tokens)
            tokens = token_ids[:, first_node:end_node, None].double()
            node_positions = positions[:, first_node:end_node, None].double()
            for layer in self.row_layers:
                keys, values = job.write(layer, tokens, node_positions)
            for node in wanted_nodes & {*range(first_node, end_node)}:
                position = job.positions[node - first_node]
                is_seen = np.ones(keys.shape[1], dtype=bool)
                if self.block:
                    is_seen = values[0, :, 0].numpy() // self.block <= position // self.block
                seen_rows = keys[0, :, 0].numpy()[is_seen], values[0, :, 0].numpy()[is_seen]
                logits[node] = self.position_logits(*seen_rows, position + self.shift)
            first_node = end_node
        return stack_rows([logits[node] for node in row_indices.tolist()], self.vocab), {}

    def position_logits(
        self, tokens: np.ndarray, positions: np.ndarray, target_position: int
    ) -> np.ndarray:
        """Logits (V,) of the token at `target_position`, of who sees these tokens at these
        positions.
        """
        return self.sharpness * spread_numbers(
            path_key(tokens, positions), self.seed + PLACE * target_position, self.vocab
        )


class Oracle(ToyCanvas):
    """A toy that knows all texts: after a prompt of `first` tokens stands one of the `texts`, each
    with its probability.
    """

    def __init__(
        self, texts: Mapping[tuple[int, ...], float], vocab: int, prompt_length: int = 1, **toy: Any
    ):
        super().__init__(vocab, **toy)
        self.first = prompt_length
        self.texts = np.array([*texts], dtype=np.int64)  # (texts, positions)
        self.chances = np.array([*texts.values()])

    def position_logits(
        self, tokens: np.ndarray, positions: np.ndarray, target_position: int
    ) -> np.ndarray:
        is_possible = np.ones(len(self.texts), dtype=bool)
        for token, position in zip(tokens, positions, strict=True):
            offset = int(position) - self.first
            if token != self.mask_id and offset >= 0:
                is_possible &= self.texts[:, offset] == token
        probabilities = np.zeros(self.vocab)
        if 0 <= target_position - self.first < self.texts.shape[1]:
            np.add.at(
                probabilities,
                self.texts[is_possible, target_position - self.first],
                self.chances[is_possible],
            )
        if not probabilities.sum():  # a text that cannot be: any token will do
            probabilities[: self.mask_id] = 1
        with np.errstate(divide="ignore"):
            return np.log(probabilities / probabilities.sum())


class ToyNoise(Toy):
    """A toy that fills uniform noise: its text's rows hold tokens and positions; what it said
    before counts by its best tokens.
    """

    caps = frozenset({"canvas", NOISE})
    reads_segments = False

    def __init__(self, vocab: int = 5, seed: int = 0, canvas_length: int = 4, **toy: Any):
        super().__init__(vocab, seed, **toy)
        self.canvas_length = canvas_length

    def cache(self, request: Request | None = None, beside: Cache | None = None) -> Cache:
        return self.prepare_cache(TextCache(self.layout, self.dtype, self.device), request, beside)

    def compute(self, jobs: Sequence[Job], taps: Sequence[int]) -> Computed:
        logits: list[np.ndarray] = []
        for job in jobs:
            job_rows = [
                torch.tensor(values)[None, :, None].double()
                for values in (job.tokens, job.positions)
            ]
            if not isinstance(job, BehindText):
                for layer in self.row_layers:
                    job.write(layer, *job_rows)
                continue
            pairs = zip(job.text_rows(0), job_rows, strict=True)
            seen_rows = [torch.cat(pair, 1)[0, :, 0] for pair in pairs]
            best_tokens = (
                torch.full((len(job.rows),), -1) if job.said is None else job.said.argmax(-1)
            )
            tokens = torch.cat([seen_rows[0], best_tokens.double()]).numpy()
            seen_positions = torch.cat(
                [seen_rows[1], torch.zeros(len(best_tokens)).double()]
            ).numpy()
            for row in job.rows:
                salt = self.seed + PLACE * job.positions[row]
                logits.append(
                    self.sharpness
                    * spread_numbers(path_key(tokens, seen_positions), salt, self.vocab)
                )
        width = sum(len(job.tokens) for job in jobs)
        return Computed(stack_rows(logits, self.vocab), {}, "torch", width)


def all_orders(items: Sequence[int]) -> dict[tuple[int, ...], float]:
    """All orders of these items, each as likely."""
    orders = list(itertools.permutations(items))
    return {order: 1 / len(orders) for order in orders}


def all_replacements(items: Sequence[int], new_item: int) -> dict[tuple[int, ...], float]:
    """All texts of these items with any one of them replaced, each as likely."""
    texts = [(*items[:index], new_item, *items[index + 1 :]) for index in range(len(items))]
    return {text: 1 / len(texts) for text in texts}
