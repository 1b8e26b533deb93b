"""Trains a target to prefer the better of two answers: `foretell train dpo`.

Direct preference optimisation: the loss is that of a classifier which tells the better answer from
the other by how much likelier each has become than the model had it before, times `beta`. The
model's own words before training are the reference, and so nothing else is loaded. What comes of a
run is the target of the next: pairs, training, and pairs again.

Sources: Rafailov et al., "Direct Preference Optimization: Your Language Model is Secretly a Reward
Model" (arXiv 2305.18290), equation 7; the term of the better answer's surprise beside it, and the
settings, are those of Cheng et al., SPaR (arXiv 2412.11605), src/configs/dpo.yaml.
Differs: LoRA weights learn, at a rate a hundred times theirs; a step has 32 pairs, where theirs has
4 a device; what is longer than `length` is left out, and not cut; the refiner, which theirs trains
too, stays the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from foretell.train import recipes
from foretell.train.preferences.pairs import read_pairs
from foretell.train.preferences.preferences import Reader, TrainPairs

if TYPE_CHECKING:
    from foretell.api.lm import LM


@dataclass(frozen=True)
class TrainDpo(TrainPairs):
    """Shape of the LoRA weights and of the training. Lengths are in tokens."""

    beta: float = 0.1  # how much the divergence from the model before counts
    sft: float = 0.1  # weight of the better answer's mean surprise
    rank: int = 16  # numbers between the two matrices of a layer
    alpha: float = 32.0  # by which, divided by the rank, their product is multiplied
    layers: str = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj"  # ends of their names
    length: int = 2048  # tokens of a prompt with its answer at most
    epochs: int = 1  # times that each pair is learnt from
    batch: int = 32  # pairs a step
    micro: int = 1  # pairs a forward
    rate: float = 0.00002  # learning rate (AdamW), which falls to 0
    warmup: float = 0.1  # share of the steps over which it rises
    precision: str = "bfloat16"  # of forwards; or float32
    seed: int = 0  # of weights and the order

    def __post_init__(self) -> None:
        super().__post_init__()
        recipes.check_ranges(self, {"beta": (0, 100), "sft": (0, 100)})

    @property
    def compares(self) -> bool:
        return True

    def loss(
        self, current: torch.Tensor, reference: torch.Tensor, counts: torch.Tensor
    ) -> torch.Tensor:
        surprise = -current[:, 0] / counts[:, 0]
        return self.sft * surprise - F.logsigmoid(self.beta * preference_gaps(current, reference))

    def numbers(
        self, current: torch.Tensor, reference: torch.Tensor, counts: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """The mean loss, the share of which the better answer is the likelier one, the share of
        which it has become likelier more than the other has, and the mean difference of rewards.
        """
        gap = preference_gaps(current, reference)
        return {
            "loss": self.loss(current, reference, counts).mean(),
            "likelier": (current[:, 0] > current[:, 1]).float().mean(),
            "preferred": (gap > 0).float().mean(),
            "margin": self.beta * gap.mean(),
        }


def preference_gaps(current: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """(n,) by how many nats more the better answer has become likelier than the other."""
    gained = current - reference
    return gained[:, 0] - gained[:, 1]


def read_dpo(lm: LM, files: Sequence[Path], config: TrainDpo) -> Reader:
    """The pairs of these files. Raises BadConfig."""
    reader = Reader(lm, config.length, ", ".join(map(str, files)))
    for path in files:
        read_pairs(path, reader)
    return reader
