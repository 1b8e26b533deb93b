"""Trains a target to write code with comments sooner than without: `foretell train mango`.

Beside the cross-entropy of commented code stands a hinge: the mean log-probability of its tokens is
to be above that of the same code without its comments by a margin. What is trained is used with the
cue of the strategy `mango`.

Source: Chen et al., "Comments as Natural Logic Pivots" (arXiv 2404.07549), whose repository has the
losses (my_modeling_llama.py) and the settings (train.sh).
Differs: LoRA weights learn, at a rate ten times theirs; the rate falls linearly, not as a cosine;
comments are found by Python's tokenizer, where theirs end a line at its first #; the cross-entropy
is the mean over an answer's tokens, where theirs divides by the prompt's too; code without comments
is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from foretell.train import recipes
from foretell.train.preferences.comments import UNREADABLE, read_commented, strip_answer
from foretell.train.preferences.preferences import Reader, TrainPairs

if TYPE_CHECKING:
    from foretell.api.lm import LM

LEAST = 10  # tokens without comments, above which there is a hinge


@dataclass(frozen=True)
class TrainMango(TrainPairs):
    """Shape of the LoRA weights and of the training. Lengths are in tokens."""

    margin: float = 0.1  # nats a token by which code with comments is to be likelier
    hinge: float = 1.0  # weight of what lacks of the margin, beside the cross-entropy
    rank: int = 16  # numbers between the two matrices of a layer
    alpha: float = 32.0  # by which, divided by the rank, their product is multiplied
    layers: str = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj"  # ends of their names
    length: int = 2048  # tokens of a prompt with its answer at most
    epochs: int = 3  # times that each answer is learnt from
    batch: int = 64  # answers a step
    micro: int = 1  # answers a forward, each with its other form
    rate: float = 0.0002  # learning rate (AdamW), which falls to 0
    warmup: float = 0.05  # share of the steps over which it rises
    precision: str = "bfloat16"  # of forwards; or float32
    seed: int = 0  # of weights and the order

    def __post_init__(self) -> None:
        super().__post_init__()
        recipes.check_ranges(self, {"margin": (0, 100), "hinge": (0, 100)})

    @property
    def compares(self) -> bool:
        return False

    def loss(
        self, current: torch.Tensor, reference: torch.Tensor, counts: torch.Tensor
    ) -> torch.Tensor:
        mean = current / counts
        lacking = (self.margin - (mean[:, 0] - mean[:, 1])).clamp_min(0)
        return self.hinge * lacking * (counts[:, 1] > LEAST) - mean[:, 0]

    def numbers(
        self, current: torch.Tensor, reference: torch.Tensor, counts: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """The mean loss, the mean surprise of a token with comments and without, and the share in
        which code with comments has the margin.
        """
        mean = current / counts
        return {
            "loss": self.loss(current, reference, counts).mean(),
            "commented": -mean[:, 0].mean(),
            "uncommented": -mean[:, 1].mean(),
            "above": (mean[:, 0] - mean[:, 1] >= self.margin).float().mean(),
        }


def read_mango(lm: LM, sources: Sequence[str], config: TrainMango) -> Reader:
    """Commented code, with the same without comments. Raises BadConfig."""
    reader = Reader(lm, config.length, ", ".join(sources))
    for prompt, answer in read_commented(list(sources)):
        try:
            plain = strip_answer(answer)
        except UNREADABLE:
            reader.leave_out("not read by Python")
            continue
        if plain == answer:
            reader.leave_out("without comments")
        else:
            reader.add(prompt, answer, plain)
    return reader
