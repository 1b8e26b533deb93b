"""Batches of what `foretell train dlm` learns from: texts with their masks, a forward at a time."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from foretell.train.draft import blocks
from foretell.train.lists import Example
from foretell.train.masking import OUTSIDE, Masked, complements, drawn

if TYPE_CHECKING:
    from foretell.train.dlm import TrainDLM


class Examples(Protocol):
    """Texts to learn from, each by its number, without end."""

    def __getitem__(self, number: int) -> Example: ...


def padded(texts: Sequence[Example]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids (B, n) and which of them are answers; what is behind a shorter text is OUTSIDE."""
    width = max(len(text.ids) for text in texts)
    ids = np.full((len(texts), width), OUTSIDE, np.int64)
    answers = np.zeros((len(texts), width), bool)
    for row, text in enumerate(texts):
        ids[row, : len(text.ids)] = text.ids
        answers[row, text.given : len(text.ids)] = True
    return torch.from_numpy(ids), torch.from_numpy(answers)


@dataclass
class Canvases:
    """Of one forward: ids (B, n), and what is masked of them, or for certainty the parts."""

    ids: torch.Tensor
    masks: Masked | tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Batches(Dataset[list[Canvases]]):
    """The examples of every step by its number, in its forwards, with their masks."""

    def __init__(self, config: TrainDLM, data: Examples, block: int):
        self.config, self.data, self.block = config, data, block

    def __getitem__(self, step: int) -> list[Canvases]:
        c = self.config
        numbers = range(step * c.batch, (step + 1) * c.batch)
        texts = [self.data[number] for number in numbers]
        found = []
        for group in blocks([len(text.ids) for text in texts], c.micro, step):
            ids, answers = padded([texts[i] for i in group])
            seeds = [(c.seed, numbers[i]) for i in group]
            if c.objective == "certainty":
                found.append(Canvases(ids, complements(answers, seeds, c.certain)))
            else:
                found.append(Canvases(ids, drawn(answers, seeds, c.masks, self.block)))
        return found

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
