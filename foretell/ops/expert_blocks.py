"""Feed-forward layers of blocks, of which each token activates some, a kind of mixture of experts:
routing, union, and losses that let neighbouring tokens activate the same ones.

    s = RMSNorm(ReLU(W_r x))                 of the B blocks; what ReLU leaves at 0 stays 0
    y = W_down (s by blocks * SiLU(W_up x))  block e is needed where s_e is not 0

Several tokens together need the union of their blocks, and the others' weights are not read.

Source: Song et al., "BlockFFN: Towards End-Side Acceleration-Friendly Mixture-of-Experts with
Chunk-Level Activation Sparsity" (arXiv 2507.08771), and its published code.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

SMOOTH = 1e-5  # in the logarithm of the chunk loss, and below the sum of a token's shares


def route_blocks(logits: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
    """Returns scores (..., B) of routers' logits (..., B): no bias, so that zeros stay zeros."""
    positive_logits = F.relu(logits)
    mean_square = positive_logits.float().square().mean(-1, keepdim=True)
    return (positive_logits * torch.rsqrt(mean_square + eps).to(logits.dtype)) * scale


def all_blocks(
    x: torch.Tensor, scores: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Computes all blocks of rows x (..., E), scores (..., B); up (B w, E), down (E, B w) -> (...,
    E).
    """
    block_activations = F.silu(x @ up.T).unflatten(-1, (scores.shape[-1], -1))
    return (block_activations * scores[..., None]).flatten(-2) @ down.T


def active_blocks(
    x: torch.Tensor, scores: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> tuple[torch.Tensor, int]:
    """Computes the blocks alone that some row needs; returns the output (..., E), and how many
    these are.
    """
    block_count = scores.shape[-1]
    needed_blocks = (scores != 0).reshape(-1, block_count).any(0).nonzero()[:, 0].tolist()
    block_width = len(up) // block_count
    block_output = torch.zeros_like(x)
    for first_block, end_block in consecutive_runs(
        needed_blocks
    ):  # views of the weights: nothing of them is copied
        weight_slice = slice(first_block * block_width, end_block * block_width)
        block_output = block_output + all_blocks(
            x, scores[..., first_block:end_block], up[weight_slice], down[:, weight_slice]
        )
    return block_output, len(needed_blocks)


def consecutive_runs(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """Yields runs of ascending numbers, each as its first one and the one after its last."""
    run_start = 0
    for position in range(1, len(numbers) + 1):
        if position == len(numbers) or numbers[position] != numbers[position - 1] + 1:
            yield numbers[run_start], numbers[position - 1] + 1
            run_start = position


def locality_loss(logits: torch.Tensor, steepness: float = 100.0) -> torch.Tensor:
    """How differently adjacent tokens activate blocks: of routers' logits (..., n, B) the cross
    entropy of a token's with the next one's. Both learn.
    """
    steep_logits = logits.float() * steepness
    return F.binary_cross_entropy_with_logits(
        steep_logits[..., :-1, :], steep_logits[..., 1:, :].sigmoid()
    )


def chunk_loss(logits: torch.Tensor, chunk: int = 64) -> torch.Tensor:
    """The mean probability that a block is activated by at least one token of a chunk, for logits
    (..., n, B) of texts whose length n is a multiple of `chunk`.
    """
    positive_logits = F.relu(logits.float())
    block_shares = positive_logits / (positive_logits.sum(-1, keepdim=True) + SMOOTH)
    none_active = (1 - block_shares + SMOOTH).log().unflatten(-2, (-1, chunk)).sum(-2).exp()
    return 1 - none_active.mean()


def block_sparsity(active: torch.Tensor, group_size: int = 1) -> float:
    """The share of blocks that no token of `group_size` successive ones activates, over full
    groups of them: active (..., n, B).
    """
    token_count = active.shape[-2] // group_size * group_size
    active_groups = active[..., :token_count, :].unflatten(-2, (-1, group_size)).any(-2)
    return 1 - float(active_groups.float().mean())


class AdaptiveWeight:
    """A weight of a loss that follows the loss: every `window` steps it is multiplied by what the
    loss's mean over the last window is to that over the one before, and by GROWTH at least where it
    rises, up to MOST times its start; it moves there linearly over the next window.
    """

    GROWTH = 1.025
    MOST = 4.0

    def __init__(self, start: float, window: int):
        self.start, self.window = start, window
        self.from_weight = self.to_weight = start
        self.steps = 0
        self.last_mean = 0.0  # mean of the window before
        self.loss_sum = 0.0  # of the running one

    @property
    def value(self) -> float:
        """The weight for the next step."""
        window_share = self.steps % self.window / self.window
        return self.from_weight + (self.to_weight - self.from_weight) * window_share

    def note_loss(self, loss: float) -> None:
        """Notes the loss of a step."""
        self.loss_sum += loss
        self.steps += 1
        if self.steps % self.window:
            return
        window_mean, self.loss_sum = self.loss_sum / self.window, 0.0
        self.from_weight = self.to_weight
        if self.last_mean > 0:
            mean_ratio = window_mean / self.last_mean
            mean_ratio = max(self.GROWTH, mean_ratio) if mean_ratio > 1 else mean_ratio
            self.to_weight = min(self.MOST * self.start, self.from_weight * mean_ratio)
        self.last_mean = window_mean

    @property
    def state(self) -> torch.Tensor:
        """The numbers that are needed to go on from here."""
        state_numbers = [
            self.from_weight,
            self.to_weight,
            float(self.steps),
            self.last_mean,
            self.loss_sum,
        ]
        return torch.tensor(state_numbers, dtype=torch.float64)

    @state.setter
    def state(self, state_numbers: torch.Tensor) -> None:
        self.from_weight, self.to_weight, steps, self.last_mean, self.loss_sum = (
            state_numbers.tolist()
        )
        self.steps = int(steps)
