"""Holds older tokens in blocks, and asks for them by the queries that stand out.

As infllm, but for two things. A span's queries count in its probe by how far they are from the
running mean of their layer, in units of its variance. And layers where many blocks matter read more
of them: the layers of a token share `blocks` times their number by how even the probabilities are
that they give to all blocks, by the mean entropy of the last `history` tokens. Blocks are compared
by the cosine.

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
from typing import TYPE_CHECKING, Annotated, Any

import torch

from foretell.core.settings import Range
from foretell.errors import BadConfig
from foretell.kv.base import KV, top_rows
from foretell.kv.select.blocks import Remembering, check_settings, parts_of, sum_by_key_head

if TYPE_CHECKING:
    from foretell.core.model import Model

Statistics = tuple[int, torch.Tensor, torch.Tensor]  # updates, mean and variance (H * D,)


@dataclass(frozen=True)
class Actqkv(KV):
    """Counts of tokens and of blocks."""

    initial: Annotated[int, Range(0)] = 64  # first tokens, which are always read
    local: Annotated[int, Range(1)] = 512  # last tokens, which are always read
    block: Annotated[int, Range(1)] = 32  # tokens of a block
    blocks: Annotated[int, Range(1)] = 46  # blocks that a query reads, in the mean of all layers
    least: Annotated[int, Range(1)] = 32  # blocks that it reads in any layer
    most: int = 0  # blocks that it reads at most in a layer; 0: as many as its share says
    representatives: Annotated[int, Range(1)] = 4  # tokens that a block is found by
    every: Annotated[int, Range(1)] = 256  # tokens of a prompt that read the same blocks
    # last tokens of a prompt, which choose their blocks by themselves
    alone: Annotated[int, Range(1)] = 64
    history: Annotated[int, Range(1)] = 100  # tokens whose entropies a layer's share follows
    # of the probabilities that these are of
    temperature: Annotated[float, Range(0, open_low=True)] = 1.0
    # spans after which the running mean and variance follow at a steady rate
    updates: Annotated[int, Range(1)] = 1000
    # blocks of a layer that stay near the model, where others lie elsewhere
    cached: Annotated[int, Range(1)] = 128
    dir: str = ""  # a folder for a file of blocks; without one they lie in RAM

    def __post_init__(self) -> None:
        super().__post_init__()
        check_settings(self)
        if self.least > self.blocks:
            raise BadConfig.field("actqkv:least", self.least, f"at most blocks={self.blocks}")
        if self.most and self.most < self.least:
            raise BadConfig.field("actqkv:most", self.most, f"0, or at least least={self.least}")

    def build_policy(self, target: Model) -> ActqkvPolicy:
        return ActqkvPolicy(kv=self, **parts_of(self, target))


@dataclass(kw_only=True)
class ActqkvPolicy(Remembering):
    """Knows of each layer the statistics of the queries of earlier spans, the entropies of the
    tokens that chose last (at most `history`) and of the scratch rows, and how many blocks it
    reads.
    """

    kv: Actqkv
    query_statistics: dict[int, Statistics] = field(default_factory=dict)
    entropies: dict[int, torch.Tensor] = field(default_factory=dict)
    scratch: dict[int, torch.Tensor] = field(default_factory=dict)
    shares: Sequence[int] = ()

    def begin_text(self, prompt: int) -> None:
        super().begin_text(prompt)
        self.query_statistics, self.entropies, self.scratch, self.shares = {}, {}, {}, ()

    def probe_query(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        query_rows = queries.transpose(0, 1).flatten(1)
        self.query_statistics = {
            **self.query_statistics,
            layer: update_statistics(self.query_statistics.get(layer), query_rows, self.kv.updates),
        }
        _, mean, variance = self.query_statistics[layer]
        row_weights = weigh_rows(query_rows, mean, variance)
        return (row_weights @ query_rows).view(len(queries), 1, -1)

    def score_blocks(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """Cosines of the heads' queries and representatives, laid end to end."""
        block_keys = self.block_keys[layer]
        key_products = (
            sum_by_key_head(queries, block_keys.shape[1]).flatten(1) @ block_keys.flatten(1).T
        )
        heads_per_key = len(queries) // block_keys.shape[1]
        query_norms = queries.transpose(0, 1).flatten(1).norm(dim=1)
        key_norms = block_keys.flatten(1).norm(dim=1) * heads_per_key**0.5
        return key_products / (query_norms[:, None] * key_norms).clamp_min(
            torch.finfo(key_products.dtype).tiny
        )

    def select_blocks(self, job: Any, layer: int, queries: torch.Tensor) -> torch.Tensor:
        scores = self.score_blocks(layer, queries)
        block_count = scores.shape[1]
        if block_count > 1:
            earlier_entropies = self.scratch.get(layer, scores.new_empty(0))[
                : job.start - job.cache.base
            ]
            new_entropies = entropy_share(scores / self.kv.temperature)
            self.scratch = {**self.scratch, layer: torch.cat([earlier_entropies, new_entropies])}
        count = self.shares[layer] if self.shares else self.kv.blocks
        return top_rows(scores, min(count, block_count))

    def keep_nodes(self, cache: Any, nodes: Sequence[int]) -> None:
        super().keep_nodes(cache, nodes)
        if nodes:
            for layer, node_entropies in self.scratch.items():
                earlier_entropies = self.entropies.get(layer, node_entropies[:0])
                kept_entropies = torch.cat([earlier_entropies, node_entropies[list(nodes)]])[
                    -self.kv.history :
                ]
                self.entropies = {**self.entropies, layer: kept_entropies}
        self.scratch = {}

    def change_rows(self, cache: Any) -> None:
        super().change_rows(cache)
        layer_count = len(cache.layout)
        layer_entropies = [self.entropies.get(layer, ()) for layer in range(layer_count)]
        if min(map(len, layer_entropies)) == self.kv.history:
            mean_entropies = [
                float(torch.as_tensor(entropies).mean()) for entropies in layer_entropies
            ]
            kv = self.kv
            self.shares = share_blocks(mean_entropies, kv.blocks * layer_count, kv.least, kv.most)


def update_statistics(
    statistics: Statistics | None, rows: torch.Tensor, updates: int
) -> Statistics:
    """Mean and variance of each channel with those of one more span (n, channels)."""
    row_count, mean = len(rows), rows.mean(0)
    variance = rows.var(0, unbiased=False)
    if statistics is None:
        return 1, mean, variance * row_count / max(1, row_count - 1)
    update_count, old_mean, old_variance = statistics
    steady_count = min(update_count, updates)
    spread = (mean - old_mean) ** 2 / (1 + 1 / steady_count)
    variance = (old_variance * (steady_count - 1 / row_count) + variance + spread) / (
        steady_count + 1 - 1 / row_count
    )
    return update_count + 1, (old_mean * steady_count + mean) / (steady_count + 1), variance


def weigh_rows(rows: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
    """How much each row (n, channels) stands out, 1 in all (n,); alike where none does."""
    variance_floor = (variance.mean() / 100).clamp_min(torch.finfo(rows.dtype).tiny)
    row_distances = ((rows - mean) ** 2 / (variance + variance_floor)).mean(1)
    distance_sum = row_distances.sum()
    return (
        row_distances / distance_sum
        if bool(distance_sum > 0)
        else torch.full_like(row_distances, 1 / len(row_distances))
    )


def entropy_share(scores: torch.Tensor) -> torch.Tensor:
    """Entropy of the probabilities that scores (n, blocks) give, as a share of the largest one
    (n,).
    """
    log_probs = scores.log_softmax(-1)
    return -(log_probs.exp() * log_probs).sum(-1) / torch.log(torch.tensor(float(scores.shape[1])))


def share_blocks(
    mean_entropies: Sequence[float], total_blocks: int, min_blocks: int, max_blocks: int
) -> list[int]:
    """How many blocks each layer reads of `total_blocks`: by what it is of the layers still to
    come.

    At least `min_blocks`, at most `max_blocks` (0: any number), and never more than all in all.
    """
    shares: list[int] = []
    for layer, mean in enumerate(mean_entropies):
        entropy_ahead = sum(mean_entropies[layer:])
        remaining_blocks = total_blocks - sum(shares)
        share = (
            round(remaining_blocks * mean / entropy_ahead)
            if entropy_ahead > 0
            else remaining_blocks // (len(mean_entropies) - layer)
        )
        share = min(
            share,
            max_blocks or share,
            remaining_blocks - min_blocks * (len(mean_entropies) - layer - 1),
        )
        shares.append(max(share, min_blocks))
    return shares
