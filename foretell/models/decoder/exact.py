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
from transformers import PreTrainedModel

from foretell.cache.buffers import Shape
from foretell.cache.cache import Cache
from foretell.cache.job import Job
from foretell.core.model import STEP
from foretell.errors import Unsupported
from foretell.models.decoder.decoder import Decoder
from foretell.models.decoder.fused import Fused, Norm, find_descriptions, fused_blocks
from foretell.models.decoder.head_merging import FIELD
from foretell.models.decoder.loop import Block, Loop
from foretell.models.decoder.packed import PackedLinear
from foretell.ops.attention import LayerQuery

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
    pieces = [function(piece) for piece in flat.split(PIECE)]
    output = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
    return output[: x.numel()].view(x.shape)


def exact_exp2(x: torch.Tensor) -> torch.Tensor:
    return in_pieces(torch.exp2, x)


def exact_tanh(x: torch.Tensor) -> torch.Tensor:
    """The hyperbolic tangent of x float64."""
    return 1 - 2 / (exact_exp2(x * (2 * LOG2E)) + 1)


def round_by(x: torch.Tensor, shift: torch.Tensor | float) -> torch.Tensor:
    """x rounded, in place, to multiples of half a last place of `shift`, which is at least twice as
    large.
    """
    return x.add_(shift).sub_(shift)


@dataclass(frozen=True)
class Scope:
    """Rows that the queries of one call of attention see.

    `end`: rows there are. `masked_from`: the first row that a node may not see. `mask` (n, end -
    masked_from): 0 or -inf from there on; None: each node sees all rows.
    """

    end: int
    masked_from: int
    mask: torch.Tensor | None

    def part(self, first_node: int, end_node: int) -> Scope:
        """The scope of the nodes `first_node` to `end_node` - 1."""
        mask = None if self.mask is None else self.mask[first_node:end_node]
        return Scope(self.end, self.masked_from, mask)


class ExactJob(Job):
    """A job whose nodes' results depend on their own paths alone. Rows are those of ExactCache."""

    def attend(self, query: LayerQuery, node: int | None = None) -> torch.Tensor:
        """As `Job.attend`. `node`: of this new node only, n is 1."""
        if query.bias is not None or not self.cache.plain:
            raise Unsupported.missing_capability(
                "a bias, a cache policy or a shared prefix",
                "a model with exact_bits=True",
                "attention that is not exact",
                "leave exact_bits out",
            )
        layer, q, k, v, softcap = query.layer, query.q, query.k, query.v, query.softcap
        node_count = q.shape[1]
        value_width = v.shape[-1]
        self._store_rows(layer, k, v, self.start + (node or 0))
        # Queries become numbers of 22 bits beside their row's largest, as keys do: products have 44
        # bits, and sums 53.
        rounded_queries = q.double().mul_(query.scale * (1.0 if softcap is not None else LOG2E))
        rounded_queries = round_by(
            rounded_queries, rounded_queries.abs().amax(-1, keepdim=True) * 2.0**32
        )
        rounded_queries = rounded_queries.view(len(k), -1, node_count, q.shape[-1])
        scope = self._node_scope(query.window, node)
        padded_end = scope.end + -scope.end % VECTOR  # rows from the end on only make vectors whole
        keys = self.cache.k[layer][:, :padded_end]
        values = self.cache.v[layer][:, :padded_end]
        value_scales = values[..., value_width].contiguous()
        # As many nodes at a time as the processor's caches hold.
        nodes_at_once = max(1, SCORES // (len(q) * scope.end))
        outputs = []
        for first_node in range(0, node_count, nodes_at_once):
            part_scope = scope.part(first_node, first_node + nodes_at_once)
            queries = rounded_queries[:, :, first_node : first_node + nodes_at_once]
            outputs.append(
                self._attend_exactly(
                    queries, keys, values, value_scales, part_scope, softcap, query.sinks
                )
            )
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)
        return output.to(q.dtype).view(-1, node_count, value_width).transpose(0, 1)

    def _store_rows(self, layer: int, k: torch.Tensor, v: torch.Tensor, first_row: int) -> None:
        """Writes k, v (KV, n, D) to the rows from `first_row` on, in 22 bits beside a row's
        largest.

        Values are stored as multiples of that largest number, which is their last column.
        """
        end_row = first_row + k.shape[1]
        value_width = v.shape[-1]
        wide_rows = k.double()
        largest_numbers = wide_rows.abs().amax(-1, keepdim=True)
        self.cache.k[layer][:, first_row:end_row] = round_by(wide_rows, largest_numbers * 2.0**32)
        wide_rows = v.double()
        largest_numbers = wide_rows.abs().amax(-1, keepdim=True).clamp_min_(2.0**-500)
        values = self.cache.v[layer]
        values[:, first_row:end_row, :value_width] = round_by(
            wide_rows / largest_numbers, 1.5 * 2**31
        )
        values[:, first_row:end_row, value_width:] = largest_numbers

    def _node_scope(self, window: int | None, node: int | None) -> Scope:
        if window is not None and self.scratch_positions and max(self.scratch_positions) < window:
            window = None
        mask = self.mask(window, torch.float64)
        masked_from = 0 if window is not None else self.cache.base
        if mask is not None:
            mask = mask[:, masked_from:] if node is None else mask[node : node + 1, masked_from:]
        return Scope(self.start + len(self.tokens), masked_from, mask)

    @staticmethod
    def _attend_exactly(
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        value_scales: torch.Tensor,
        scope: Scope,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """q (KV, G, n, D) over keys, values (KV, rows, D), of which `value_scales` (KV, rows) are
        the largest numbers -> (KV, G, n, D).
        """
        heads, _, node_count, key_width = q.shape
        padded_end = keys.shape[1]
        value_width = values.shape[-1] - 1
        end_row = scope.end
        masked_from = scope.masked_from
        mask = scope.mask
        scores = torch.bmm(q.reshape(heads, -1, key_width), keys.transpose(1, 2))
        if softcap is not None:
            scores = exact_tanh(scores.div_(softcap)).mul_(softcap * LOG2E)
        scores = scores.view(heads, -1, node_count, padded_end)
        scores[..., end_row:] = -torch.inf
        if mask is None:
            largest_values = value_scales[:, :end_row].amax(-1)[:, None]  # (KV, 1)
        else:
            scores[..., masked_from:end_row] += mask
            largest_values = (value_scales[:, None, masked_from:end_row] + mask).amax(-1)  # (KV, n)
            if masked_from:
                largest_values = torch.maximum(
                    largest_values, value_scales[:, :masked_from].amax(-1)[:, None]
                )
        top_scores = scores.amax(-1, keepdim=True)
        if sinks is not None:
            sink_scores = (sinks.double() * LOG2E).view(heads, -1, 1, 1)
            top_scores = torch.maximum(top_scores, sink_scores)
        scores.sub_(top_scores)
        for piece in scores.view(-1).split(PIECE):  # whole vectors, since `padded_end` is
            piece.exp2_()
        # Powers in multiples of 2**-36: a row of up to 2**17 of them is summed exactly.
        powers = round_by(scores, 1.5 * 2**16)
        power_sums = powers.sum(-1, keepdim=True)
        if sinks is not None:
            power_sums = power_sums + exact_exp2(sink_scores - top_scores)
        # What all rows can add up to, in 31 bits; with a value's 22 that makes 53.
        weights = powers.mul_(value_scales[:, None, None])
        weights = round_by(weights, largest_values[:, None, :, None] * power_sums * 2.0**23)
        output = torch.bmm(weights.view(heads, -1, padded_end), values[..., :value_width])
        return output.view(heads, -1, node_count, value_width).div_(power_sums)


class SingleNode:
    """A new node of a job, for a forward of one row."""

    def __init__(self, job: ExactJob, node: int):
        self.job = job
        self.node = node
        self.tokens = [job.tokens[node]]

    def attend(self, query: LayerQuery) -> torch.Tensor:
        return self.job.attend(query, self.node)


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
        wider_layout = tuple(shape and (shape[0], shape[1], shape[2] + 1) for shape in layout)
        super().__init__(wider_layout, torch.float64, device, -(-capacity // VECTOR) * VECTOR)


class ExactFused(Fused):
    """A layer that is built as llama's: the fused one, with operations that do not look at the
    number of rows.
    """

    takes_padding = False

    def activate_gate(self, gate: torch.Tensor) -> torch.Tensor:
        if self.description.activation == "silu":
            return in_pieces(F.silu, gate)
        return torch.cat([self.act(row.clone()) for row in gate.split(1)])

    @staticmethod
    def norm(norm: Norm, x: torch.Tensor) -> torch.Tensor:
        return Fused.norm(norm, x.contiguous())

    @staticmethod
    def rotate(
        x: torch.Tensor, turned_rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        return x * cos + turned_rows * sin


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
        outputs = []
        for index, node in enumerate(nodes):
            row = slice(index, index + 1)
            row_rotary = rotary and tuple(part[:, row].clone() for part in rotary)
            context_token = STEP.set([node])  # type: ignore[list-item]
            try:
                outputs.append(
                    self.block(hidden[:, row].clone(), row_rotary, positions[:, row].clone())
                )
            finally:
                STEP.reset(context_token)
        return torch.cat(outputs, 1)


class ExactDecoder(Decoder):
    """A Decoder on which logits are equal to the last bit. Linear layers must be quantized. Raises
    Unsupported.
    """

    exact_bits = True  # type: ignore[assignment]
    cache_type = ExactCache
    skips = False  # no policy watches its attention

    def __init__(self, hf_model: PreTrainedModel, model_name: str = "model"):
        self.name = model_name
        if hf_model.device.type != "cpu":
            raise self._unsupported_error("a CPU", "use device='cpu'")
        super().__init__(hf_model, model_name, self._replace_blocks)
        self.context = min(self.context, LENGTH)
        if self.loop is None:
            family_name = self.config.model_type
            raise self._unsupported_error(
                f"layers whose loop is ours, and those of family {family_name} run whole"
            )
        if not self.fused:
            self.loop.blocks = [RowByRow(block) for block in self.loop.blocks]
            self.caps -= {"parts"}
            final_norm = self.loop.norm
            self.loop.norm = lambda h: torch.cat([final_norm(row.clone()) for row in h.split(1)])
            self.loop.norm.weight = final_norm.weight  # by which files know a model

    def _unsupported_error(
        self, capability: str, cure: str = "leave exact_bits out"
    ) -> Unsupported:
        return Unsupported.missing_capability("exact_bits=True", self.name, capability, cure)

    def _replace_blocks(self, loop: Loop) -> list[Block] | None:
        """Makes the loop's own operations exact; its layers, too, where they can be fused."""
        output_head = loop.head
        if not isinstance(output_head, PackedLinear) or not output_head.packed.is_whole:
            raise self._unsupported_error(
                "linear layers of 8 or 4 bits", "load it with foretell.load"
            )
        if max(shape[1] for shape in self.layout) > HEAD:
            raise self._unsupported_error(f"heads of at most {HEAD}")
        loop.rotary_tables.clear()
        loop.table = partial(self._exact_table, loop)  # type: ignore[method-assign]
        loop.logits = partial(_exact_logits, loop)  # type: ignore[method-assign]
        if self.config.hidden_size > WIDEST or getattr(self.config, FIELD, None) is not None:
            return None
        if not all(described.is_plain for described in find_descriptions(self.hf)):
            return None
        exact_blocks = fused_blocks(loop, ExactFused)
        if exact_blocks is not None:
            final_norm = loop.norm
            first_block: Any = exact_blocks[0]
            loop.norm = partial(ExactFused.norm, Norm(final_norm, first_block.description))
            loop.norm.weight = final_norm.weight  # by which files know a model
        return exact_blocks

    def _exact_table(
        self, loop: Loop, states: torch.Tensor, position_count: int, *kind: str
    ) -> tuple[torch.Tensor, ...]:
        """Computes Loop.table in parts of one size, so that it does not depend on when it was
        needed.
        """
        tables = loop.rotary_tables
        known_count = tables[kind][0].shape[1] if kind in tables else 0
        while known_count < position_count:
            # Some rotations change for every position once one is beyond the context.
            positions = torch.arange(known_count, known_count + ROTARY).clamp_(max=self.context - 1)
            rotation = loop.rotary(states, positions[None], *kind)
            if not isinstance(rotation, tuple):
                raise self._unsupported_error("rotations as cosines and sines")
            if not all(part.ndim == 3 and part.shape[1] == ROTARY for part in rotation):
                raise self._unsupported_error("rotations as cosines and sines")
            if known_count:
                rotation = tuple(
                    torch.cat(parts, 1) for parts in zip(tables[kind], rotation, strict=True)
                )
            tables[kind] = rotation
            known_count += ROTARY
        return tables[kind]


def _exact_logits(loop: Loop, states: torch.Tensor) -> torch.Tensor:
    """Computes Loop.logits with an exact cap."""
    logit_cap = loop.logit_cap
    loop.logit_cap = None
    try:
        logits = Loop.logits(loop, states)
    finally:
        loop.logit_cap = logit_cap
    return (
        exact_tanh(logits.double() / logit_cap).mul_(logit_cap).to(logits.dtype)
        if logit_cap
        else logits
    )
