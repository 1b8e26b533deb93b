"""What masked diffusion learns by: tokens of an answer are masked, and told from all that is left.

A batch is B texts of n positions; `answers` (B, n) says which of them belong to the answer, the
rest is given. Every text has a share of masks and a loss of its own, and a batch's loss is their
mean; what follows a text that is shorter than its batch nobody sees. So the loss is the same
however a step's texts are put into forwards. (Published trainers draw the masks of the last text
for the whole batch, or count masked tokens over the batch, and are right for one text at a time
only.)

Sources: Nie et al., Large Language Diffusion Models (arXiv 2502.09992), sections 2.1 to 2.3; Chen
et al., dParallel (arXiv 2509.26488), section 4; with blocks, Arriola et al., Block Diffusion (arXiv
2503.09573), section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

OUTSIDE = -1  # the id of a position after its text
LEAST = 1e-3  # share of masks (LLaDA)
HALF = 0.5  # of a block's positions are masked at a time (dParallel)


@dataclass
class Masked:
    """Positions (B, n) that are masked, and what the surprise of each one counts (B,)."""

    places: torch.Tensor
    weight: torch.Tensor

    def to(self, device: torch.device) -> Masked:
        return Masked(self.places.to(device), self.weight.to(device))


def by_rate(answers: np.ndarray, generator: np.random.Generator) -> tuple[np.ndarray, float]:
    """Masks of one text's positions (n,), each with the probability t, which is uniform; what each
    counts: 1 / t of the answer's mean.
    """
    rate = (1 - LEAST) * generator.random() + LEAST
    return answers & (generator.random(len(answers)) < rate), 1 / (rate * answers.sum())


def by_count(answers: np.ndarray, generator: np.random.Generator) -> tuple[np.ndarray, float]:
    """Masks a number of positions that is drawn from 1 to all. The loss is expected to be that of
    `by_rate`, and scatters less.
    """
    answer_places = answers.nonzero()[0]
    count = int(generator.integers(1, len(answer_places) + 1))
    masked = np.zeros_like(answers)
    masked[generator.permutation(answer_places)[:count]] = True
    return masked, 1 / count


MASKS = {"rate": by_rate, "count": by_count}


def in_block(
    answers: np.ndarray, block: int, generator: np.random.Generator
) -> tuple[np.ndarray, float]:
    """The answer's positions in one of its blocks, which begin at multiples of `block`, and what
    the mean over these counts for the mean over the answer.
    """
    block_numbers = np.arange(len(answers)) // block
    answer_blocks = np.unique(block_numbers[answers])
    block_answers = answers & (block_numbers == generator.choice(answer_blocks))
    return block_answers, float(len(answer_blocks) * block_answers.sum() / answers.sum())


def draw_masks(answers: torch.Tensor, seeds: Sequence[Any], masks: str, block: int = 0) -> Masked:
    """Masks of a batch, by a seed for each text. With blocks, those of one block each: no later
    one is seen.
    """
    mask_rows, weights = [], []
    for text_answers, seed in zip(answers.numpy(), seeds, strict=True):
        generator = np.random.default_rng(seed)
        share = 1.0
        if block:
            text_answers, share = in_block(text_answers, block, generator)
        places, weight = MASKS[masks](text_answers, generator)
        mask_rows.append(places)
        weights.append(share * weight)
    return Masked(torch.from_numpy(np.stack(mask_rows)), torch.tensor(weights, dtype=torch.float32))


def split_blocks(
    answers: torch.Tensor, seeds: Sequence[Any], block: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Splits one block of each text's answer, counted from where that begins, in two: those parts,
    each (B, n), and the positions of later blocks, which are masked with either.
    """
    first_parts, second_parts, later_parts = [], [], []
    for text_answers, seed in zip(answers.numpy(), seeds, strict=True):
        generator = np.random.default_rng(seed)
        block_numbers = np.where(text_answers, text_answers.cumsum() - 1, 0) // block
        chosen_block = int(generator.integers(0, block_numbers.max() + 1))
        in_chosen = text_answers & (block_numbers == chosen_block)
        in_first = in_chosen & (generator.random(len(text_answers)) < HALF)
        first_parts.append(in_first)
        second_parts.append(in_chosen & ~in_first)
        later_parts.append(text_answers & (block_numbers > chosen_block))
    first_half, second_half, later_blocks = (
        torch.from_numpy(np.stack(rows)) for rows in (first_parts, second_parts, later_parts)
    )
    return first_half, second_half, later_blocks


def block_mask(length: int, block: int) -> torch.Tensor:
    """Additive (1, 1, n, n): every position sees all, or its block and those before it."""
    if not block:
        return torch.zeros(1, 1, length, length)
    block_numbers = torch.arange(length) // block
    is_hidden = block_numbers[None, :] > block_numbers[:, None]
    return torch.zeros(1, 1, length, length).masked_fill(is_hidden, -torch.inf)


@dataclass(frozen=True)
class Reader:
    """A model that reads canvases: `mask_id` stands at masked positions, row j speaks of the
    position j + `shift`, `block` as in `seen_by`. `longest`: positions of the longest canvas that
    it is taught; 0: as long as its texts.
    """

    hf: Any
    mask_id: int
    shift: int = 0
    block: int = 0
    longest: int = 0

    def logits(
        self, ids: torch.Tensor, masked: torch.Tensor, requested: torch.Tensor | None = None
    ) -> torch.Tensor:
        """(m, V) of the wanted positions (B, n), without any the masked ones, of canvases with
        these ids (B, n), which nobody sees where they are OUTSIDE; never the mask itself.
        """
        requested = masked if requested is None else requested
        canvas = ids.masked_fill(masked, self.mask_id).clamp_min(0)
        mask = block_mask(ids.shape[1], self.block).to(ids.device)
        is_outside = ids == OUTSIDE
        if is_outside.any():
            mask = mask.masked_fill(is_outside[:, None, None, :], -torch.inf)
        decoder = self.hf.get_decoder()
        states = decoder(input_ids=canvas, attention_mask=mask, use_cache=False).last_hidden_state
        row, place = requested.nonzero().T
        rows = states[row, (place - self.shift).clamp_min(0)]
        logits: torch.Tensor = self.hf.get_output_embeddings()(rows).float()
        logits.detach()[:, self.mask_id] = -torch.inf  # which has no gradient, so nothing is copied
        return logits


def masked_loss(reader: Reader, ids: torch.Tensor, masked: Masked) -> torch.Tensor:
    """(B,) a bound on each answer's surprise, in nats a token: the cross entropy of its masked
    tokens with their weights.
    """
    row = masked.places.nonzero()[:, 0]
    logits = reader.logits(ids, masked.places)
    nats = F.cross_entropy(logits, ids[masked.places], reduction="none")
    return nats.new_zeros(len(ids)).index_add(0, row, nats * masked.weight[row])


def certainty_loss(
    reader: Reader,
    ids: torch.Tensor,
    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    beta: float,
    temperature: float = 0.5,
) -> torch.Tensor:
    """(B,) of two canvases of each text, in which one part of a block and the later blocks are
    masked: the mean cross entropy of the part, and `beta` times the mean entropy of its
    distributions at this temperature, over the tokens of the part that the model has right. Of
    others it is not asked to be certain.
    """
    *halves, later_blocks = parts
    total = torch.zeros(len(ids), device=ids.device)
    for part in halves:
        row = part.nonzero()[:, 0]
        labels = ids[part]
        logits = reader.logits(ids, part | later_blocks, part)
        nats = F.cross_entropy(logits, labels, reduction="none")
        is_right = logits.argmax(-1) == labels
        total = total + row_means(nats, row, len(ids))
        if beta:
            total = total + beta * row_means(
                entropy(logits[is_right] / temperature), row[is_right], len(ids)
            )
    return total


def entropy(logits: torch.Tensor) -> torch.Tensor:
    """(m,) of distributions by logits (m, V), in nats. A token that cannot be counts nothing."""
    logs = logits.log_softmax(-1)
    return -(logs.exp() * logs.masked_fill(logs == -torch.inf, 0.0)).sum(-1)


def row_means(values: torch.Tensor, row: torch.Tensor, count: int) -> torch.Tensor:
    """(count,) of the values (m,) of each row; 0 of a row that has none."""
    row_counts = torch.bincount(row, minlength=count).clamp_min(1)
    return values.new_zeros(count).index_add(0, row, values) / row_counts


@torch.no_grad()
def count_right(
    reader: Reader, ids: torch.Tensor, answers: torch.Tensor, rate: float, seeds: Sequence[Any]
) -> tuple[int, int]:
    """How many masked tokens the model has right, of how many, where this share of an answer's
    tokens is masked, each text's by its seed.
    """
    mask_rows = []
    for text_answers, seed in zip(answers.numpy(), seeds, strict=True):
        mask_rows.append(
            text_answers & (np.random.default_rng(seed).random(len(text_answers)) < rate)
        )
    masked = torch.from_numpy(np.stack(mask_rows)).to(reader.hf.device)
    if not masked.any():
        return 0, 0
    ids = ids.to(reader.hf.device)
    predicted = reader.logits(ids, masked).argmax(-1)
    return int((predicted == ids[masked]).sum()), int(masked.sum())
