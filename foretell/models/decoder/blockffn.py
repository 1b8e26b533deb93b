"""Decoders of the llama family's build whose feed-forward layers are blocks, routed by ReLU and
RMSNorm (BlockFFN): a forward computes the blocks that some of its rows activates, and no others.

So a tree costs what the union of its nodes' blocks costs, which grows far slower than their number
where the model was trained for it (`foretell train blockffn`). The adapter notes how large unions
are, by rows, and says what forwards cost by that (`BlockDecoder.work`); from it the policy of sizes
prices trees (speculation/costs.py).

In config.json `model_type` is "blockffn", `num_blocks` and `block_width` say the blocks, and all
else is llama's.

Source: Song et al., "BlockFFN: Towards End-Side Acceleration-Friendly Mixture-of-Experts with
Chunk-Level Activation Sparsity" (arXiv 2507.08771), sections on the architecture and the kernels.
Differs: attention is llama's, where the published models have latent attention (MLA); these are
refused. A forward may have any number of rows, and blocks are told by scores other than 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from foretell.cache.job import Job
from foretell.core.model import Computed
from foretell.errors import BadModel
from foretell.models.decoder.decoder import Decoder
from foretell.models.decoder.own import check_torch_alone
from foretell.ops.expert_blocks import active_blocks, all_blocks, route_blocks

PROBED = 64  # tokens by which unions are first measured
RATE = 1 / 16  # of the running means
LARGEST = 64  # rows from which on a forward takes longer by its rows, too
WATCHED: ContextVar[list[torch.Tensor] | None] = ContextVar("foretell_routers", default=None)


class BlockFFNConfig(LlamaConfig):
    """Llama's settings, and the blocks."""

    model_type = "blockffn"

    num_blocks: int = 32
    block_width: int = 128
    router_norm_eps: float = 1e-6


class BlockFFN(nn.Module):
    """A feed-forward layer of blocks."""

    def __init__(self, config: Any):
        super().__init__()
        width = config.num_blocks * config.block_width
        self.router = nn.Linear(config.hidden_size, config.num_blocks, bias=False)
        self.router_scale = nn.Parameter(torch.ones(config.num_blocks))
        self.up = nn.Parameter(torch.empty(width, config.hidden_size))
        self.down = nn.Parameter(torch.empty(config.hidden_size, width))
        for weight in (self.router.weight, self.up, self.down):
            nn.init.normal_(weight, std=config.initializer_range)
        self.eps = config.router_norm_eps
        # Of the last forward: rows, blocks of their union, and of a row on the mean.
        self.last: tuple[int, int, float] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., E) -> (..., E)."""
        logits = self.router(x)
        scores = route_blocks(logits, self.router_scale, self.eps)
        router_log = WATCHED.get()
        if router_log is not None:
            router_log.append(logits)
        # A recording would keep the union of its example, and blocks that learn need all gradients.
        if torch.is_grad_enabled() or torch.jit.is_tracing() or torch.compiler.is_compiling():
            return all_blocks(x, scores, self.up, self.down)
        output, block_count = active_blocks(x, scores, self.up, self.down)
        score_rows = scores.flatten(0, -2)
        self.last = len(score_rows), block_count, float((score_rows != 0).sum()) / len(score_rows)
        return output


class BlockFFNForCausalLM(LlamaForCausalLM):
    """Llama with feed-forward layers of blocks."""

    config_class = BlockFFNConfig

    def __init__(self, config: Any):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = BlockFFN(config)


@contextmanager
def watch_routers() -> Iterator[list[torch.Tensor]]:
    """Inside, the logits (B, n, blocks) of every layer's router are added to the list that this
    yields.
    """
    router_logits: list[torch.Tensor] = []
    context_token = WATCHED.set(router_logits)
    try:
        yield router_logits
    finally:
        WATCHED.reset(context_token)


class Unions:
    """How large a part of the blocks forwards need, by their rows: running means."""

    def __init__(self, blocks: int):
        self.blocks = blocks  # of all layers
        self.means: dict[int, float] = {}

    def note_share(self, row_count: int, share: float) -> None:
        """Notes that a forward of so many rows needed this part of the blocks."""
        previous = self.means.get(row_count)
        self.means[row_count] = share if previous is None else previous + RATE * (share - previous)

    def share_curve(self, max_rows: int) -> np.ndarray:
        """Parts (max_rows,) that forwards of 1, 2, ..., `max_rows` rows need; never falling."""
        row_counts = sorted(self.means)
        rising = np.maximum.accumulate([self.means[rows] for rows in row_counts])
        rows = np.log2(np.arange(1, max_rows + 1))
        shares: np.ndarray = np.interp(rows, np.log2(row_counts), rising)
        return shares


class BlockDecoder(Decoder):
    """A decoder of blocks, computed by torch, which knows what unions cost."""

    def __init__(self, hf_model: Any, model_name: str):
        self.unions = Unions(0)
        self.layers = [module for module in hf_model.modules() if isinstance(module, BlockFFN)]
        super().__init__(hf_model, model_name)
        block_count = sum(layer.router.out_features for layer in self.layers)
        self.unions = Unions(block_count)
        self.block_bytes = sum(layer.up.nbytes + layer.down.nbytes for layer in self.layers)
        self._probe_unions()

    @torch.inference_mode()
    def _probe_unions(self) -> None:
        """Measures first means on random tokens: those of a text are noted as it is computed."""
        generator = torch.Generator().manual_seed(0)
        token_count = min(PROBED, self.context)
        token_ids = torch.randint(self.vocab, (1, token_count), generator=generator).to(self.device)
        with watch_routers() as router_logits:
            self.hf(input_ids=token_ids, use_cache=False)
        is_active = torch.cat([logits[0] > 0 for logits in router_logits], -1)  # (n, all blocks)
        row_count = 1
        while row_count <= token_count:
            group_active = (
                is_active[: token_count // row_count * row_count]
                .unflatten(0, (-1, row_count))
                .any(1)
            )
            self.unions.note_share(row_count, float(group_active.float().mean()))
            row_count *= 2

    def _by_torch(self, jobs: Sequence[Job], taps: Sequence[int]) -> Computed:
        for layer in self.layers:
            layer.last = None
        computed = super()._by_torch(jobs, taps)
        statistics = [layer.last for layer in self.layers if layer.last is not None]
        if len(statistics) == len(self.layers) and self.unions.blocks:
            row_count = statistics[0][0]
            self.unions.note_share(
                row_count,
                sum(layer_statistics[1] for layer_statistics in statistics) / self.unions.blocks,
            )
            if row_count > 1:
                self.unions.note_share(
                    1,
                    sum(layer_statistics[2] for layer_statistics in statistics)
                    / self.unions.blocks,
                )
        return computed

    def work(self, max_rows: int) -> np.ndarray:
        """The cost of forwards of 1, 2, ..., `max_rows` rows, (max_rows,), in bytes of weights that
        they read: what all need, and the union of their blocks. Beyond LARGEST rows it grows with
        them.
        """
        row_counts = np.arange(1, max_rows + 1)
        bytes_read = (
            self.weight_bytes
            - self.block_bytes
            + self.block_bytes * self.unions.share_curve(max_rows)
        )
        cost: np.ndarray = bytes_read * (1 + np.maximum(0, row_counts - LARGEST) / LARGEST)
        return cost


def model_class(raw_settings: Mapping[str, Any]) -> type[BlockFFNForCausalLM]:
    """The class that loads a folder with these settings. Raises BadModel."""
    for setting in ("num_blocks", "block_width"):
        value = raw_settings.get(setting)
        if not isinstance(value, int) or value < 1:
            raise BadModel(
                f"config.json: {setting}={value!r} must be how many a BlockFFN layer has"
            )
    return BlockFFNForCausalLM


def make_adapter(
    hf_model: Any, model_name: str, exact_bits: bool, dtype: str, backend: str
) -> BlockDecoder:
    """Makes the adapter, see own.py. Torch alone computes unions."""
    need = "a model whose layers are no blocks: unions of blocks are computed by torch"
    check_torch_alone(model_name, exact_bits, dtype, backend, need, "leave it out")
    return BlockDecoder(hf_model, model_name)
