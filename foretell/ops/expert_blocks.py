"""Feed-forward layers of blocks, of which each token activates some: routing, union, and losses
that let neighbouring tokens activate the same ones.

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


def routed(logits: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
    """Scores (..., B) of routers' logits (..., B): no bias, so that zeros stay zeros."""
    positive = F.relu(logits)
    size = positive.float().square().mean(-1, keepdim=True)
    return (positive * torch.rsqrt(size + eps).to(logits.dtype)) * scale


def dense(
    x: torch.Tensor, scores: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """All blocks of rows x (..., E), scores (..., B); up (B w, E), down (E, B w) -> (..., E)."""
    inner = F.silu(x @ up.T).unflatten(-1, (scores.shape[-1], -1))
    return (inner * scores[..., None]).flatten(-2) @ down.T


def union(
    x: torch.Tensor, scores: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> tuple[torch.Tensor, int]:
    """The same of the blocks alone that some row needs, and how many these are."""
    blocks = scores.shape[-1]
    needed = (scores != 0).reshape(-1, blocks).any(0).nonzero()[:, 0].tolist()
    width = len(up) // blocks
    out = torch.zeros_like(x)
    for first, end in spans(needed):  # views of the weights: nothing of them is copied
        part = slice(first * width, end * width)
        out = out + dense(x, scores[..., first:end], up[part], down[:, part])
    return out, len(needed)


def spans(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """Runs of ascending numbers, each as its first one and the one behind its last."""
    start = 0
    for place in range(1, len(numbers) + 1):
        if place == len(numbers) or numbers[place] != numbers[place - 1] + 1:
            yield numbers[start], numbers[place - 1] + 1
            start = place


def locality_loss(logits: torch.Tensor, steepness: float = 100.0) -> torch.Tensor:
    """How differently adjacent tokens activate blocks: of routers' logits (..., n, B) the cross
    entropy of a token's with the next one's. Both learn.
    """
    steep = logits.float() * steepness
    return F.binary_cross_entropy_with_logits(steep[..., :-1, :], steep[..., 1:, :].sigmoid())


def chunk_loss(logits: torch.Tensor, chunk: int = 64) -> torch.Tensor:
    """The mean chance that a block is activated by at least one token of a chunk, for logits
    (..., n, B) of texts whose length n is a multiple of `chunk`.
    """
    positive = F.relu(logits.float())
    shares = positive / (positive.sum(-1, keepdim=True) + SMOOTH)
    none = (1 - shares + SMOOTH).log().unflatten(-2, (-1, chunk)).sum(-2).exp()
    return 1 - none.mean()


def sparsity(active: torch.Tensor, size: int = 1) -> float:
    """The share of blocks that no token of `size` successive ones activates, over whole groups of
    them: active (..., n, B).
    """
    count = active.shape[-2] // size * size
    groups = active[..., :count, :].unflatten(-2, (-1, size)).any(-2)
    return 1 - float(groups.float().mean())


class AdaptiveWeight:
    """The weight of a loss that follows the loss: every `window` steps it is multiplied by what the
    loss's mean over the last window is to that over the one before, and by GROWTH at least where it
    rises, up to MOST times its start; it moves there linearly over the next window.
    """

    GROWTH = 1.025
    MOST = 4.0

    def __init__(self, start: float, window: int):
        self.start, self.window = start, window
        self.before = self.after = start
        self.steps = 0
        self.last = 0.0  # mean of the window before
        self.sum = 0.0  # of the running one

    @property
    def value(self) -> float:
        """For the next step."""
        done = self.steps % self.window / self.window
        return self.before + (self.after - self.before) * done

    def note(self, loss: float) -> None:
        """The loss of a step."""
        self.sum += loss
        self.steps += 1
        if self.steps % self.window:
            return
        mean, self.sum = self.sum / self.window, 0.0
        self.before = self.after
        if self.last > 0:
            ratio = mean / self.last
            ratio = max(self.GROWTH, ratio) if ratio > 1 else ratio
            self.after = min(self.MOST * self.start, self.before * ratio)
        self.last = mean

    @property
    def state(self) -> torch.Tensor:
        """All that it knows, to go on from."""
        numbers = [self.before, self.after, float(self.steps), self.last, self.sum]
        return torch.tensor(numbers, dtype=torch.float64)

    @state.setter
    def state(self, numbers: torch.Tensor) -> None:
        self.before, self.after, steps, self.last, self.sum = numbers.tolist()
        self.steps = int(steps)
