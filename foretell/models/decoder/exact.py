"""A decoder whose logits are the same to the last bit in any tree, batch and chunking, on a CPU.

A sum of floating-point numbers depends on its order, and the order on how many rows a product has.
So nothing is summed here whose order could matter:

- Linear layers have weights of 8 or 4 bits (packed.py): each row of activations is rounded by
  itself, groups of 32 are summed in whole numbers, and a row's groups in one order, by the C
  library and by torch alike.
- Attention rounds what it sums to whole multiples of a unit that only the node's own path
  determines, so small in number that every sum fits into the 53 bits of a double: exact, whatever
  the order, the padding or the masked rows, which add zeros. What is lost is about 2**-22 of
  a row's largest number, less than float32 loses by rounding.
- Elementwise functions run over pieces of whole vectors, never over a tail, for which torch has
  other code.
- Layers that have no fused equal run row by row, so that all of a row's operations have the same
  shape in any forward.

Between the sums stand single operations of IEEE 754, whose results are defined. Never a product and
a sum in one: whether such a pair is rounded once or twice differs between vectors and tails.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from foretell.cache.buffers import Shape
from foretell.cache.cache import Cache
from foretell.cache.job import Job
from foretell.core.model import STEP
from foretell.errors import Unsupported
from foretell.models.decoder.decoder import Decoder
from foretell.models.decoder.fused import Fused, blocks
from foretell.models.decoder.head_merging import FIELD
from foretell.models.decoder.loop import Block, Loop
from foretell.models.decoder.packed import WHOLE_NUMBERS, PackedLinear
from foretell.ops.attention import Bias

PIECE = 16_384  # elements that torch leaves to one thread
SCORES = 131_072  # numbers of attention that are worked on at a time
LENGTH = 131_072  # rows whose weights are summed exactly
VECTOR = 64  # elements: a multiple of what a vectorised loop takes at once, in any number format
ROTARY = 256  # positions whose rotations are computed together
WIDEST = 16_384  # of a norm: longer rows torch sums with several threads
HEAD = 512  # numbers of a key: as many products are summed exactly
LOG2E = math.log2(math.e)


def in_pieces(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """An elementwise function of x, with each element's result independent of its place and of the
    others.
    """
    flat = x.reshape(-1)
    padding = -len(flat) % VECTOR
    if padding:
        flat = F.pad(flat, (0, padding))
    parts = [function(part) for part in flat.split(PIECE)]
    out = torch.cat(parts) if len(parts) > 1 else parts[0]
    return out[: x.numel()].view(x.shape)


def exp2(x: torch.Tensor) -> torch.Tensor:
    return in_pieces(torch.exp2, x)


def tanh(x: torch.Tensor) -> torch.Tensor:
    """x float64."""
    return 1 - 2 / (exp2(x * (2 * LOG2E)) + 1)


def round_by(x: torch.Tensor, shift: torch.Tensor | float) -> torch.Tensor:
    """x rounded, in place, to multiples of half a last place of `shift`, which is at least twice as
    large.
    """
    return x.add_(shift).sub_(shift)


@dataclass(frozen=True)
class Scope:
    """What the queries of one call of attention see.

    `end`: rows there are. `masked_from`: the first row that a node may not see. `mask` (n, end -
    masked_from): 0 or -inf from there on; None: each node sees all rows.
    """

    end: int
    masked_from: int
    mask: torch.Tensor | None

    def part(self, low: int, high: int) -> Scope:
        """The same of the nodes low to high - 1."""
        mask = None if self.mask is None else self.mask[low:high]
        return Scope(self.end, self.masked_from, mask)


class ExactJob(Job):
    """A job whose nodes' results depend on their own paths alone. Rows are those of ExactCache."""

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        bias: Bias | None = None,
        node: int | None = None,
    ) -> torch.Tensor:
        """q (H, n, D), k, v (KV, n, D) -> (n, H, D). `node`: of this new node only, n is 1."""
        if bias is not None or not self.cache.plain:
            raise Unsupported.missing(
                "a bias, a cache policy or a shared prefix",
                "a model with exact_bits=True",
                "attention that is not exact",
                "leave exact_bits out",
            )
        count = q.shape[1]
        width = v.shape[-1]
        self._store(layer, k, v, self.start + (node or 0))
        # Queries become numbers of 22 bits beside their row's largest, as keys do: products have 44
        # bits, and sums 53.
        wide = q.double().mul_(scale if softcap is not None else scale * LOG2E)
        wide = round_by(wide, wide.abs().amax(-1, keepdim=True) * 2.0**32)
        wide = wide.view(len(k), -1, count, q.shape[-1])
        scope = self._scope(window, node)
        whole = scope.end + -scope.end % VECTOR  # rows from the end on only make vectors whole
        keys = self.cache.k[layer][:, :whole]
        values = self.cache.v[layer][:, :whole]
        sizes = values[..., width].contiguous()
        # As many nodes at a time as the processor's caches hold.
        step = max(1, SCORES // (len(q) * scope.end))
        outs = []
        for low in range(0, count, step):
            part = scope.part(low, low + step)
            queries = wide[:, :, low : low + step]
            outs.append(self._attend(queries, keys, values, sizes, part, softcap, sinks))
        out = outs[0] if len(outs) == 1 else torch.cat(outs, 2)
        return out.to(q.dtype).view(-1, count, width).transpose(0, 1)

    def _store(self, layer: int, k: torch.Tensor, v: torch.Tensor, first: int) -> None:
        """Writes k, v (KV, n, D) to the rows from `first` on, in 22 bits beside a row's largest.

        Values are stored as multiples of that largest number, which is their last column.
        """
        end = first + k.shape[1]
        width = v.shape[-1]
        wide = k.double()
        largest = wide.abs().amax(-1, keepdim=True)
        self.cache.k[layer][:, first:end] = round_by(wide, largest * 2.0**32)
        wide = v.double()
        largest = wide.abs().amax(-1, keepdim=True).clamp_min_(2.0**-500)
        values = self.cache.v[layer]
        values[:, first:end, :width] = round_by(wide / largest, 1.5 * 2**31)
        values[:, first:end, width:] = largest

    def _scope(self, window: int | None, node: int | None) -> Scope:
        if window is not None and self.scratch_positions and max(self.scratch_positions) < window:
            window = None
        mask = self.mask(window, torch.float64)
        masked_from = 0 if window is not None else self.cache.base
        if mask is not None:
            mask = mask[:, masked_from:] if node is None else mask[node : node + 1, masked_from:]
        return Scope(self.start + len(self.tokens), masked_from, mask)

    @staticmethod
    def _attend(
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        sizes: torch.Tensor,
        scope: Scope,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """q (KV, G, n, D) over keys, values (KV, rows, D), of which `sizes` (KV, rows) are the
        largest numbers -> (KV, G, n, D).
        """
        heads, _, count, key_width = q.shape
        whole = keys.shape[1]
        width = values.shape[-1] - 1
        end = scope.end
        masked_from = scope.masked_from
        mask = scope.mask
        scores = torch.bmm(q.reshape(heads, -1, key_width), keys.transpose(1, 2))
        if softcap is not None:
            scores = tanh(scores.div_(softcap)).mul_(softcap * LOG2E)
        scores = scores.view(heads, -1, count, whole)
        scores[..., end:] = -torch.inf
        if mask is None:
            largest = sizes[:, :end].amax(-1)[:, None]  # (KV, 1)
        else:
            scores[..., masked_from:end] += mask
            largest = (sizes[:, None, masked_from:end] + mask).amax(-1)  # (KV, n)
            if masked_from:
                largest = torch.maximum(largest, sizes[:, :masked_from].amax(-1)[:, None])
        top = scores.amax(-1, keepdim=True)
        if sinks is not None:
            sink = (sinks.double() * LOG2E).view(heads, -1, 1, 1)
            top = torch.maximum(top, sink)
        scores.sub_(top)
        for part in scores.view(-1).split(PIECE):  # whole vectors, since `whole` is
            part.exp2_()
        # Powers in multiples of 2**-36: a row of up to 2**17 of them is summed exactly.
        powers = round_by(scores, 1.5 * 2**16)
        total = powers.sum(-1, keepdim=True)
        if sinks is not None:
            total = total + exp2(sink - top)
        # What all rows can add up to, in 31 bits; with a value's 22 that makes 53.
        weights = powers.mul_(sizes[:, None, None])
        weights = round_by(weights, largest[:, None, :, None] * total * 2.0**23)
        out = torch.bmm(weights.view(heads, -1, whole), values[..., :width])
        return out.view(heads, -1, count, width).div_(total)


class SingleNode:
    """One new node of a job, for a forward of one row."""

    def __init__(self, job: ExactJob, node: int):
        self.job = job
        self.node = node
        self.tokens = [job.tokens[node]]

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
        bias: Bias | None = None,
    ) -> torch.Tensor:
        return self.job.attend(layer, q, k, v, scale, window, softcap, sinks, bias, self.node)


class ExactCache(Cache):
    """Keys, and values beside each row's largest, which is one more column; float64, so four times
    as large as bf16.
    """

    job_type = ExactJob

    def __init__(
        self,
        layout: Sequence[Shape | None],
        dtype: torch.dtype,
        device: torch.device,
        capacity: int = VECTOR,
    ):
        wider = tuple(shape and (shape[0], shape[1], shape[2] + 1) for shape in layout)
        super().__init__(wider, torch.float64, device, -(-capacity // VECTOR) * VECTOR)


class ExactFused(Fused):
    """A layer of the llama family: the fused one, with operations that do not look at the number of
    rows.
    """

    takes_padding = False

    def activate(self, gate: torch.Tensor) -> torch.Tensor:
        if isinstance(self.act, (nn.SiLU, type(ACT2FN["silu"]))):
            return in_pieces(F.silu, gate)
        return torch.cat([self.act(row.clone()) for row in gate.split(1)])

    @staticmethod
    def norm(module: Any, x: torch.Tensor) -> torch.Tensor:
        return Fused.norm(module, x.contiguous())

    @staticmethod
    def rotate(
        x: torch.Tensor, turned: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        return x * cos + turned * sin


class RowByRow:
    """A block that computes one row at a time.

    Each row is memory of its own, since some products look at where a row begins.
    """

    takes_padding = False

    def __init__(self, block: Block):
        self.block = block

    def __call__(self, hidden: torch.Tensor, rotary: Any, positions: torch.Tensor) -> torch.Tensor:
        jobs: Any = STEP.get()
        nodes: list[SingleNode] = []
        for job in jobs:
            if isinstance(job, SingleNode):
                nodes.append(job)
            else:
                nodes += [SingleNode(job, node) for node in range(len(job.tokens))]
        outs = []
        for i, node in enumerate(nodes):
            row = slice(i, i + 1)
            turned = tuple(part[:, row].clone() for part in rotary)
            token = STEP.set([node])  # type: ignore[list-item]
            try:
                outs.append(self.block(hidden[:, row].clone(), turned, positions[:, row].clone()))
            finally:
                STEP.reset(token)
        return torch.cat(outs, 1)


class ExactDecoder(Decoder):
    """A Decoder on which logits are equal to the last bit. Linear layers must be quantized. Raises
    Unsupported.
    """

    exact_bits = True  # type: ignore[assignment]
    cache_type = ExactCache
    skips = False  # no policy watches its attention

    def __init__(self, hf: PreTrainedModel, name: str = "model"):
        self.name = name
        if hf.device.type != "cpu":
            raise self._unsupported("a CPU", "use device='cpu'")
        super().__init__(hf, name, self._replace)
        self.context = min(self.context, LENGTH)
        if self.loop is None:
            family = self.config.model_type
            raise self._unsupported(
                f"layers whose loop is ours, and those of family {family} run whole"
            )
        if not self.fused:
            self.loop.blocks = [RowByRow(block) for block in self.loop.blocks]
            self.caps -= {"parts"}
            norm = self.loop.norm
            self.loop.norm = lambda h: torch.cat([norm(row.clone()) for row in h.split(1)])
            self.loop.norm.weight = norm.weight  # by which files know a model

    def _unsupported(self, capability: str, cure: str = "leave exact_bits out") -> Unsupported:
        return Unsupported.missing("exact_bits=True", self.name, capability, cure)

    def _replace(self, loop: Loop) -> list[Block] | None:
        """Makes the loop's own operations exact; its layers, too, where they can be fused."""
        head = loop.head
        if not isinstance(head, PackedLinear) or head.packed.format not in WHOLE_NUMBERS:
            raise self._unsupported("linear layers of 8 or 4 bits", "load it with foretell.load")
        if max(shape[1] for shape in self.layout) > HEAD:
            raise self._unsupported(f"heads of at most {HEAD}")
        loop.rotary_tables.clear()
        loop.table = partial(self._table, loop)  # type: ignore[method-assign]
        loop.logits = partial(_logits, loop)  # type: ignore[method-assign]
        if self.config.hidden_size > WIDEST or getattr(self.config, FIELD, None) is not None:
            return None
        fused = blocks(loop, ExactFused)
        if fused is not None:
            norm = loop.norm
            loop.norm = partial(ExactFused.norm, norm)
            loop.norm.weight = norm.weight  # by which files know a model
        return fused

    def _table(
        self, loop: Loop, h: torch.Tensor, needed: int, *kind: str
    ) -> tuple[torch.Tensor, ...]:
        """As Loop.table; computed in parts of one size, so that it does not depend on when it was
        needed.
        """
        tables = loop.rotary_tables
        known = tables[kind][0].shape[1] if kind in tables else 0
        while known < needed:
            # Some rotations change for every position once one is beyond the context.
            positions = torch.arange(known, known + ROTARY).clamp_(max=self.context - 1)
            made = loop.rotary(h, positions[None], *kind)
            if not isinstance(made, tuple):
                raise self._unsupported("rotations as cosines and sines")
            if not all(part.ndim == 3 and part.shape[1] == ROTARY for part in made):
                raise self._unsupported("rotations as cosines and sines")
            if known:
                made = tuple(torch.cat(parts, 1) for parts in zip(tables[kind], made, strict=True))
            tables[kind] = made
            known += ROTARY
        return tables[kind]


def _logits(loop: Loop, h: torch.Tensor) -> torch.Tensor:
    """As Loop.logits, with an exact cap."""
    cap = loop.logit_cap
    loop.logit_cap = None
    try:
        out = Loop.logits(loop, h)
    finally:
        loop.logit_cap = cap
    return tanh(out.double() / cap).mul_(cap).to(out.dtype) if cap else out
