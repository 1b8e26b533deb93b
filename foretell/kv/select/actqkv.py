"""Holds older tokens in blocks, and asks for them by the queries that stand out.

As infllm, but for two things. A span's queries count in its probe by how far they are from the
running mean of their layer, in units of its variance. And layers where many blocks matter read more
of them: the layers of a token share `blocks` times their number by how even the chances are that
they give to all blocks, by the mean entropy of the last `history` tokens. Blocks are compared by
the cosine.

Paper: Xiao et al., Activation-aware Probe-Query: Effective Key-Value Retrieval for Long-Context LLM
Inference, arXiv:2502.13542
Guarantee: lossy: queries leave rows out, and far ones lose their order; with drafts the text is the
one without them
Cost: target 1
Needs: rotary positions, and cache rows of every layer, of all of the text
Trains: nothing
Differs:
- the differences that infllm names, all of them
- statistics are each layer's and each request's own; the published code has them once for all
- shares are settled whenever a block leaves, from the tokens before; the published code lets each
token's own entropy join its mean, which a draft could not know
- layers share `blocks` times their number; the published code has half of that to share, which its
floor exceeds, so that all layers stand at the floor, and its ceiling is `blocks`: most=46
- no part of a prompt is known to be its question, which the published code adds by a weight of 4
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from foretell.errors import BadConfig
from foretell.kv.base import KV, best
from foretell.kv.select.blocks import Remembering, check, grouped, parts_of

if TYPE_CHECKING:
    from foretell.core.model import Model

Statistics = tuple[int, torch.Tensor, torch.Tensor]  # updates, mean and variance (H * D,)


@dataclass(frozen=True)
class Actqkv(KV):
    """Counts of tokens and of blocks."""

    initial: int = 64  # first tokens, which are always read
    local: int = 512  # last tokens, which are always read
    block: int = 32  # tokens of a block
    blocks: int = 46  # blocks that a query reads, in the mean of all layers
    least: int = 32  # blocks that it reads in any layer
    most: int = 0  # blocks that it reads at most in a layer; 0: as many as its share says
    representatives: int = 4  # tokens that a block is found by
    every: int = 256  # tokens of a prompt that read the same blocks
    alone: int = 64  # last tokens of a prompt, which choose their blocks by themselves
    history: int = 100  # tokens whose entropies a layer's share follows
    temperature: float = 1.0  # of the chances that these are of
    updates: int = 1000  # spans after which the running mean and variance follow at a steady rate
    cached: int = 128  # blocks of a layer that stay near the model, where others lie elsewhere
    dir: str = ""  # a folder for a file of blocks; without one they lie in RAM

    def __post_init__(self) -> None:
        check(self)
        if not 1 <= self.least <= self.blocks:
            allowed = f"between 1 and blocks={self.blocks}"
            raise BadConfig.field("actqkv:least", self.least, allowed)
        if self.most and self.most < self.least:
            raise BadConfig.field("actqkv:most", self.most, f"0, or at least least={self.least}")
        for name in ("history", "updates"):
            if getattr(self, name) < 1:
                raise BadConfig.field(f"actqkv:{name}", getattr(self, name), "at least 1")
        if not self.temperature > 0:
            raise BadConfig.field("actqkv:temperature", self.temperature, "above 0")

    def policy(self, target: Model) -> ActqkvPolicy:
        return ActqkvPolicy(kv=self, **parts_of(self, target))


@dataclass(kw_only=True)
class ActqkvPolicy(Remembering):
    """Of each layer: what is known of the queries of earlier spans, the entropies of the tokens
    that chose last (at most `history`) and of the scratch rows, and how many blocks it reads.
    """

    kv: Actqkv
    known: dict[int, Statistics] = field(default_factory=dict)
    entropies: dict[int, torch.Tensor] = field(default_factory=dict)
    scratch: dict[int, torch.Tensor] = field(default_factory=dict)
    shares: Sequence[int] = ()

    def begin(self, prompt: int) -> None:
        super().begin(prompt)
        self.known, self.entropies, self.scratch, self.shares = {}, {}, {}, ()

    def probe(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        rows = queries.transpose(0, 1).flatten(1)
        self.known = {**self.known, layer: learnt(self.known.get(layer), rows, self.kv.updates)}
        _, mean, variance = self.known[layer]
        weights = activation(rows, mean, variance)
        return (weights @ rows).view(len(queries), 1, -1)

    def scores(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """Cosines of the heads' queries and representatives, laid end to end."""
        found = self.found[layer]
        products = grouped(queries, found.shape[1]).flatten(1) @ found.flatten(1).T
        times = len(queries) // found.shape[1]
        sizes = queries.transpose(0, 1).flatten(1).norm(dim=1)
        lengths = found.flatten(1).norm(dim=1) * times**0.5
        return products / (sizes[:, None] * lengths).clamp_min(torch.finfo(products.dtype).tiny)

    def reads(self, job: Any, layer: int, queries: torch.Tensor) -> torch.Tensor:
        scores = self.scores(layer, queries)
        blocks = scores.shape[1]
        if blocks > 1:
            before = self.scratch.get(layer, scores.new_empty(0))[: job.start - job.cache.base]
            new = evenness(scores / self.kv.temperature)
            self.scratch = {**self.scratch, layer: torch.cat([before, new])}
        count = self.shares[layer] if self.shares else self.kv.blocks
        return best(scores, min(count, blocks))

    def keep(self, cache: Any, nodes: Sequence[int]) -> None:
        super().keep(cache, nodes)
        if nodes:
            for layer, found in self.scratch.items():
                before = self.entropies.get(layer, found[:0])
                kept = torch.cat([before, found[list(nodes)]])[-self.kv.history :]
                self.entropies = {**self.entropies, layer: kept}
        self.scratch = {}

    def change(self, cache: Any) -> None:
        super().change(cache)
        layers = len(cache.layout)
        known = [self.entropies.get(layer, ()) for layer in range(layers)]
        if min(map(len, known)) == self.kv.history:
            means = [float(torch.as_tensor(one).mean()) for one in known]
            kv = self.kv
            self.shares = shared_out(means, kv.blocks * layers, kv.least, kv.most)


def learnt(known: Statistics | None, rows: torch.Tensor, updates: int) -> Statistics:
    """Mean and variance of each channel with those of one more span (n, channels)."""
    count, mean = len(rows), rows.mean(0)
    variance = rows.var(0, unbiased=False)
    if known is None:
        return 1, mean, variance * count / max(1, count - 1)
    done, old_mean, old = known
    n = min(done, updates)
    spread = (mean - old_mean) ** 2 / (1 + 1 / n)
    variance = (old * (n - 1 / count) + variance + spread) / (n + 1 - 1 / count)
    return done + 1, (old_mean * n + mean) / (n + 1), variance


def activation(rows: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
    """How much each row (n, channels) stands out, 1 in all (n,); alike where none does."""
    floor = (variance.mean() / 100).clamp_min(torch.finfo(rows.dtype).tiny)
    found = ((rows - mean) ** 2 / (variance + floor)).mean(1)
    total = found.sum()
    return found / total if bool(total > 0) else torch.full_like(found, 1 / len(found))


def evenness(scores: torch.Tensor) -> torch.Tensor:
    """Entropy of the chances that scores (n, blocks) give, as a share of the largest one (n,)."""
    logs = scores.log_softmax(-1)
    return -(logs.exp() * logs).sum(-1) / torch.log(torch.tensor(float(scores.shape[1])))


def shared_out(means: Sequence[float], total: int, least: int, most: int) -> list[int]:
    """How many blocks each layer reads of `total`: by what it is of the layers still to come.

    At least `least`, at most `most` (0: any number), and never more than all in all.
    """
    shares: list[int] = []
    for layer, mean in enumerate(means):
        ahead = sum(means[layer:])
        left = total - sum(shares)
        share = round(left * mean / ahead) if ahead > 0 else left // (len(means) - layer)
        share = min(share, most or share, left - least * (len(means) - layer - 1))
        shares.append(max(share, least))
    return shares
