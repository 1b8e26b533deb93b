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
from foretell.errors import BadModel, Unsupported
from foretell.models.decoder.decoder import Decoder
from foretell.models.decoder.packed import WHOLE_NUMBERS
from foretell.ops.expert_blocks import dense, routed, union

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
        scores = routed(logits, self.router_scale, self.eps)
        watched = WATCHED.get()
        if watched is not None:
            watched.append(logits)
        # A recording would keep the union of its example, and blocks that learn need all gradients.
        if torch.is_grad_enabled() or torch.jit.is_tracing() or torch.compiler.is_compiling():
            return dense(x, scores, self.up, self.down)
        out, count = union(x, scores, self.up, self.down)
        rows = scores.flatten(0, -2)
        self.last = len(rows), count, float((rows != 0).sum()) / len(rows)
        return out


class BlockFFNForCausalLM(LlamaForCausalLM):
    """Llama with such layers."""

    config_class = BlockFFNConfig

    def __init__(self, config: Any):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = BlockFFN(config)


@contextmanager
def routers() -> Iterator[list[torch.Tensor]]:
    """Inside, the logits (B, n, blocks) of every layer's router are added to the list."""
    seen: list[torch.Tensor] = []
    token = WATCHED.set(seen)
    try:
        yield seen
    finally:
        WATCHED.reset(token)


class Unions:
    """How large a part of the blocks forwards need, by their rows: running means."""

    def __init__(self, blocks: int):
        self.blocks = blocks  # of all layers
        self.means: dict[int, float] = {}

    def note(self, rows: int, part: float) -> None:
        """A forward of so many rows needed this part of the blocks."""
        before = self.means.get(rows)
        self.means[rows] = part if before is None else before + RATE * (part - before)

    def curve(self, size: int) -> np.ndarray:
        """Parts (size,) that forwards of 1, 2, ..., `size` rows need; never falling."""
        known = sorted(self.means)
        rising = np.maximum.accumulate([self.means[rows] for rows in known])
        rows = np.log2(np.arange(1, size + 1))
        parts: np.ndarray = np.interp(rows, np.log2(known), rising)
        return parts


class BlockDecoder(Decoder):
    """A decoder of blocks, computed by torch, which knows what unions cost."""

    def __init__(self, hf: Any, name: str):
        self.unions = Unions(0)
        self.layers = [module for module in hf.modules() if isinstance(module, BlockFFN)]
        super().__init__(hf, name)
        blocks = sum(layer.router.out_features for layer in self.layers)
        self.unions = Unions(blocks)
        self.block_bytes = sum(layer.up.nbytes + layer.down.nbytes for layer in self.layers)
        self._probe()

    @torch.inference_mode()
    def _probe(self) -> None:
        """First means, of random tokens: a text's are noted as it is computed."""
        generator = torch.Generator().manual_seed(0)
        count = min(PROBED, self.context)
        ids = torch.randint(self.vocab, (1, count), generator=generator).to(self.device)
        with routers() as seen:
            self.hf(input_ids=ids, use_cache=False)
        active = torch.cat([logits[0] > 0 for logits in seen], -1)  # (n, all blocks)
        size = 1
        while size <= count:
            groups = active[: count // size * size].unflatten(0, (-1, size)).any(1)
            self.unions.note(size, float(groups.float().mean()))
            size *= 2

    def _by_torch(self, jobs: Sequence[Job], taps: Sequence[int]) -> Computed:
        for layer in self.layers:
            layer.last = None
        computed = super()._by_torch(jobs, taps)
        ran = [layer.last for layer in self.layers if layer.last is not None]
        if len(ran) == len(self.layers) and self.unions.blocks:
            rows = ran[0][0]
            self.unions.note(rows, sum(last[1] for last in ran) / self.unions.blocks)
            if rows > 1:
                self.unions.note(1, sum(last[2] for last in ran) / self.unions.blocks)
        return computed

    def work(self, size: int) -> np.ndarray:
        """What forwards of 1, 2, ..., `size` rows cost, (size,), in bytes of weights that they
        read: what all need, and the union of their blocks. Beyond LARGEST rows it grows with them.
        """
        rows = np.arange(1, size + 1)
        read = self.weight_bytes - self.block_bytes + self.block_bytes * self.unions.curve(size)
        cost: np.ndarray = read * (1 + np.maximum(0, rows - LARGEST) / LARGEST)
        return cost


def model_class(raw: Mapping[str, Any]) -> type[BlockFFNForCausalLM]:
    """What loads a folder with these settings. Raises BadModel."""
    for name in ("num_blocks", "block_width"):
        value = raw.get(name)
        if not isinstance(value, int) or value < 1:
            raise BadModel(f"config.json: {name}={value!r} must be how many a BlockFFN layer has")
    return BlockFFNForCausalLM


def adapter(hf: Any, name: str, exact_bits: bool, dtype: str, executor: str) -> BlockDecoder:
    """See own.py. Torch alone computes unions."""
    asked = []
    if exact_bits:
        asked.append("exact_bits=True")
    if dtype in WHOLE_NUMBERS:
        asked.append(f"dtype={dtype!r}")
    if executor not in ("auto", "torch"):
        asked.append(f"executor={executor!r}")
    if asked:
        need = "a model whose layers are no blocks: unions of blocks are computed by torch"
        raise Unsupported.missing(asked[0], name, need, "leave it out")
    return BlockDecoder(hf, name)
