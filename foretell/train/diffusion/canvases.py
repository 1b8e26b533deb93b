"""Batches of what `foretell train dlm` learns from: texts with their masks, a forward at a time."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from foretell.train.diffusion.lists import Example
from foretell.train.diffusion.masking import OUTSIDE, Masked
from foretell.train.draft import group_lengths

Masks = Masked | tuple[torch.Tensor, torch.Tensor, torch.Tensor]
# (which positions are answers (B, n), a seed a text) -> what is masked
Mask = Callable[[torch.Tensor, Sequence[Any]], Masks]


class Examples(Protocol):
    """Texts to learn from, each by its number, without end."""

    def __getitem__(self, number: int) -> Example: ...


def pad_texts(texts: Sequence[Example]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids (B, n) and which of them are answers; what is after a shorter text is OUTSIDE."""
    max_length = max(len(text.ids) for text in texts)
    ids = np.full((len(texts), max_length), OUTSIDE, np.int64)
    answers = np.zeros((len(texts), max_length), bool)
    for row, text in enumerate(texts):
        ids[row, : len(text.ids)] = text.ids
        answers[row, text.given_count : len(text.ids)] = True
    return torch.from_numpy(ids), torch.from_numpy(answers)


@dataclass
class Canvases:
    """Texts of one forward: ids (B, n), and what is masked of them, or for certainty the parts."""

    ids: torch.Tensor
    masks: Masks


class Batches(Dataset[list[Canvases]]):
    """The examples of every step by its number, with their masks: `batch` of them, in forwards of
    about `micro` tokens.
    """

    def __init__(self, data: Examples, mask: Mask, batch: int, micro: int, seed: int):
        self.data, self.mask, self.seed = data, mask, seed
        self.batch, self.micro = batch, micro

    def __getitem__(self, step: int) -> list[Canvases]:
        numbers = range(step * self.batch, (step + 1) * self.batch)
        texts = [self.data[number] for number in numbers]
        canvases = []
        for group in group_lengths([len(text.ids) for text in texts], self.micro, step):
            ids, answers = pad_texts([texts[i] for i in group])
            seeds = [(self.seed, numbers[i]) for i in group]
            canvases.append(Canvases(ids, self.mask(answers, seeds)))
        return canvases

    def of(self, steps: range, workers: int) -> Iterator[list[Canvases]]:
        """The batches of these steps in turn, made by so many processes; 0: by this one.

        They are new ones, not forks: this one may have threads, and a GPU.
        """
        loader = DataLoader(
            self,
            batch_size=None,
            sampler=steps,
            num_workers=workers,
            multiprocessing_context="spawn" if workers else None,
            worker_init_fn=ignoring_interrupts,
        )
        return iter(loader)


def ignoring_interrupts(worker: int) -> None:
    """Leaves it to the run itself to end after a step and to be kept."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
