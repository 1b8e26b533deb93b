"""What masked diffusion learns by: tokens of an answer are masked, and told from all that is left.

A batch is B texts of n positions; `answers` (B, n) says which of them belong to the answer, the
rest is given. Every text has a share of masks and a loss of its own, and a batch's loss is their
mean; what stands behind a text that is shorter than its batch nobody sees. So the loss is the same
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

OUTSIDE = -1  # the id of a position behind its text
LEAST = 1e-3  # share of masks (LLaDA)
HALF = 0.5  # of a block's positions are masked at a time (dParallel)


@dataclass
class Masked:
    """Positions (B, n) that are masked, and what the surprise of each one counts (B,)."""

    places: torch.Tensor
    weight: torch.Tensor

    def to(self, device: torch.device) -> Masked:
        return Masked(self.places.to(device), self.weight.to(device))


def by_rate(answers: np.ndarray, draw: np.random.Generator) -> tuple[np.ndarray, float]:
    """Masks of one text's positions (n,), each with the chance t, which is uniform; what each
    counts: 1 / t of the answer's mean.
    """
    rate = (1 - LEAST) * draw.random() + LEAST
    return answers & (draw.random(len(answers)) < rate), 1 / (rate * answers.sum())


def by_count(answers: np.ndarray, draw: np.random.Generator) -> tuple[np.ndarray, float]:
    """As many masks as is drawn from 1 to all. Its loss is expected to be that of `by_rate`, and
    scatters less.
    """
    places = answers.nonzero()[0]
    count = int(draw.integers(1, len(places) + 1))
    found = np.zeros_like(answers)
    found[draw.permutation(places)[:count]] = True
    return found, 1 / count


MASKS = {"rate": by_rate, "count": by_count}


def in_block(
    answers: np.ndarray, block: int, draw: np.random.Generator
) -> tuple[np.ndarray, float]:
    """The answer's positions in one of its blocks, which begin at multiples of `block`, and what
    the mean over these counts for the mean over the answer.
    """
    blocks = np.arange(len(answers)) // block
    own = np.unique(blocks[answers])
    chosen = answers & (blocks == draw.choice(own))
    return chosen, float(len(own) * chosen.sum() / answers.sum())


def drawn(answers: torch.Tensor, seeds: Sequence[Any], masks: str, block: int = 0) -> Masked:
    """Masks of a batch, by a seed for each text. With blocks, those of one block each: no later
    one is seen.
    """
    rows, weights = [], []
    for own, seed in zip(answers.numpy(), seeds, strict=True):
        draw = np.random.default_rng(seed)
        share = 1.0
        if block:
            own, share = in_block(own, block, draw)
        places, weight = MASKS[masks](own, draw)
        rows.append(places)
        weights.append(share * weight)
    return Masked(torch.from_numpy(np.stack(rows)), torch.tensor(weights, dtype=torch.float32))


def complements(
    answers: torch.Tensor, seeds: Sequence[Any], block: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each text one block of its answer, counted from where that begins, is split in two: those
    parts, each (B, n), and the positions of later blocks, which are masked with either.
    """
    first, second, later = [], [], []
    for own, seed in zip(answers.numpy(), seeds, strict=True):
        draw = np.random.default_rng(seed)
        number = np.where(own, own.cumsum() - 1, 0) // block
        chosen = int(draw.integers(0, number.max() + 1))
        inside = own & (number == chosen)
        part = inside & (draw.random(len(own)) < HALF)
        first.append(part)
        second.append(inside & ~part)
        later.append(own & (number > chosen))
    one, two, rest = (torch.from_numpy(np.stack(rows)) for rows in (first, second, later))
    return one, two, rest


def seen_by(length: int, block: int) -> torch.Tensor:
    """Additive (1, 1, n, n): every position sees all, or its block and those before it."""
    if not block:
        return torch.zeros(1, 1, length, length)
    number = torch.arange(length) // block
    hidden = number[None, :] > number[:, None]
    return torch.zeros(1, 1, length, length).masked_fill(hidden, -torch.inf)


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
        self, ids: torch.Tensor, masked: torch.Tensor, wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        """(m, V) of the wanted positions (B, n), without any the masked ones, of canvases with
        these ids (B, n), which nobody sees where they are OUTSIDE; never the mask itself.
        """
        wanted = masked if wanted is None else wanted
        canvas = ids.masked_fill(masked, self.mask_id).clamp_min(0)
        seen = seen_by(ids.shape[1], self.block).to(ids.device)
        outside = ids == OUTSIDE
        if outside.any():
            seen = seen.masked_fill(outside[:, None, None, :], -torch.inf)
        decoder = self.hf.get_decoder()
        states = decoder(input_ids=canvas, attention_mask=seen, use_cache=False).last_hidden_state
        row, place = wanted.nonzero().T
        rows = states[row, (place - self.shift).clamp_min(0)]
        found: torch.Tensor = self.hf.get_output_embeddings()(rows).float()
        found.detach()[:, self.mask_id] = -torch.inf  # which has no gradient, so nothing is copied
        return found


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
    masked: the mean cross entropy of the part, and `beta` times the mean entropy of its laws at
    this temperature, over the tokens of the part that the model has right. Of others it is not
    asked to be certain.
    """
    *halves, later = parts
    total = torch.zeros(len(ids), device=ids.device)
    for part in halves:
        row = part.nonzero()[:, 0]
        labels = ids[part]
        logits = reader.logits(ids, part | later, part)
        nats = F.cross_entropy(logits, labels, reduction="none")
        right = logits.argmax(-1) == labels
        total = total + means(nats, row, len(ids))
        if beta:
            total = total + beta * means(entropy(logits[right] / temperature), row[right], len(ids))
    return total


def entropy(logits: torch.Tensor) -> torch.Tensor:
    """(m,) of laws by logits (m, V), in nats. A token that cannot be counts nothing."""
    logs = logits.log_softmax(-1)
    return -(logs.exp() * logs.masked_fill(logs == -torch.inf, 0.0)).sum(-1)


def means(values: torch.Tensor, row: torch.Tensor, count: int) -> torch.Tensor:
    """(count,) of the values (m,) of each row; 0 of a row that has none."""
    number = torch.bincount(row, minlength=count).clamp_min(1)
    return values.new_zeros(count).index_add(0, row, values) / number


@torch.no_grad()
def right_at(
    reader: Reader, ids: torch.Tensor, answers: torch.Tensor, rate: float, seeds: Sequence[Any]
) -> tuple[int, int]:
    """How many masked tokens the model has right, of how many, where this share of an answer's
    tokens is masked, each text's by its seed.
    """
    rows = []
    for own, seed in zip(answers.numpy(), seeds, strict=True):
        rows.append(own & (np.random.default_rng(seed).random(len(own)) < rate))
    masked = torch.from_numpy(np.stack(rows)).to(reader.hf.device)
    if not masked.any():
        return 0, 0
    ids = ids.to(reader.hf.device)
    said = reader.logits(ids, masked).argmax(-1)
    return int((said == ids[masked]).sum()), int(masked.sum())
