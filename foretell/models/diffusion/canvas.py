"""Decoders that fill canvases: every position sees every other, or its block and those before it.

The layers are those of an ordinary decoder; what differs is who sees whom. A canvas's cache has a
row for each position, which holds what was computed there last. A Look (core/masked_text.py) says
which positions are computed anew and which rows they read. Packed beside other jobs, it is a job
like any.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from foretell.cache.cache import Cache
from foretell.cache.job import Job, RowMemory
from foretell.cache.states import NO_STATES
from foretell.core.masked_text import MASKED, Look
from foretell.core.model import Model
from foretell.errors import Unsupported
from foretell.models.decoder.decoder import Decoder
from foretell.models.decoder.fused import fused_blocks
from foretell.models.diffusion.diffusion_gemma import KIND
from foretell.models.diffusion.masked import OURS
from foretell.ops.attention import LayerQuery

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedModel

    from foretell.core.request import Request
    from foretell.core.types import Ask
    from foretell.models.decoder.decoder import Accelerate, Make


@dataclass(slots=True, eq=False)
class CanvasJob(Job):
    """Positions of a canvas that are computed; `attended`: the rows that they read, None: all."""

    attended: torch.Tensor | None = None
    length: int = 0  # of the canvas
    block: int = 0  # positions that see each other and those before; 0: all positions do

    def suits(
        self, layers: bool, segments: bool, watched: bool = False, canvases: bool = False
    ) -> bool:
        return canvases and self._sees_all

    @property
    def watched(self) -> bool:
        return False  # policies of canvases say what is computed, not how

    @property
    def _sees_all(self) -> bool:
        """Whether each position reads the same rows, those that are computed among them."""
        read_positions = self._read_positions
        if self.attended is not None and not set(self.positions) <= set(read_positions):
            return False
        return (
            not self.block or max(read_positions) // self.block <= min(self.positions) // self.block
        )

    @property
    def _read_positions(self) -> Sequence[int]:
        """The positions whose rows are read."""
        return range(self.length) if self.attended is None else self.attended.tolist()

    def lay_out(self) -> RowMemory:
        """Rows that are read and not computed, in front of those that are."""
        keys, values = self.cache.keys[0], self.cache.values[0]
        new_count = len(self.tokens)
        if new_count == self.length:
            return RowMemory(0, new_count, keys, values)
        computed = set(self.positions)
        other_positions = [
            position for position in self._read_positions if position not in computed
        ]
        other_rows = torch.tensor(other_positions, dtype=torch.long)
        memory_parts = [_rows_in_front(rows, other_rows, new_count) for rows in (keys, values)]
        return RowMemory(len(other_rows), len(other_rows) + new_count, *memory_parts)

    def take_back(self, rows: RowMemory) -> None:
        if len(self.tokens) == self.length:
            return
        positions = torch.tensor(self.positions)
        self.cache.keys[0][:, :, positions] = rows.keys[:, :, rows.start :]
        self.cache.values[0][:, :, positions] = rows.values[:, :, rows.start :]

    def write(
        self, layer: int, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores k, v (KV, n, D) at their positions; returns the rows that are read."""
        keys, values = self.cache.k[layer], self.cache.v[layer]
        positions = torch.tensor(self.positions, device=k.device)
        keys[:, positions] = k.to(keys)
        values[:, positions] = v.to(values)
        if self.attended is None:
            return keys[:, : self.length], values[:, : self.length]
        return keys[:, self.attended], values[:, self.attended]

    def attend(self, query: LayerQuery) -> torch.Tensor:
        keys, values = self.write(query.layer, query.k, query.v)
        mask = self._block_mask(query.q.dtype, query.mask_repeats)
        return query.attend(keys, values, mask)

    def _block_mask(self, dtype: torch.dtype, repeats: int) -> torch.Tensor | None:
        """Additive (times * n, rows): later blocks are hidden."""
        if not self.block:
            return None
        mask_key = (None, repeats)
        if mask_key not in self.masks:
            rows = torch.tensor(self._read_positions)
            position_blocks = torch.tensor(self.positions) // self.block
            is_hidden = rows[None, :] // self.block > position_blocks[:, None]
            mask = torch.zeros(is_hidden.shape, dtype=dtype).masked_fill(is_hidden, -torch.inf)
            self.masks[mask_key] = mask.repeat(repeats, 1).to(self.cache.device)
        return self.masks[mask_key]


def _rows_in_front(rows: torch.Tensor, row_indices: torch.Tensor, new_count: int) -> torch.Tensor:
    """Copies some of the rows (layers, KV, n, D) to the front, with room for new ones after."""
    layers, head_count, _, width = rows.shape
    memory = rows.new_empty(layers, head_count, len(row_indices) + new_count, width)
    torch.index_select(rows, 2, row_indices, out=memory[:, :, : len(row_indices)])
    return memory


class CanvasCache(Cache):
    """Rows of one canvas, a row a position. It takes in no text by itself: a Look brings all."""

    mask_id = 0
    shift = 0
    block = 0
    sharable = False

    def sync(self, tokens: Sequence[int]) -> int:
        self.synced = len(tokens)
        return 0

    def commit(self, tokens: Sequence[int]) -> None:
        """Rows stay what they were: which are computed again is the denoiser's matter."""

    settle = commit

    def use(self, policy: Any, prompt: int = 0) -> None:
        super().use(policy, prompt)
        self.recomputable = False  # rows that are not computed in every round

    def prepare(self, ask: Ask, tokens: Sequence[int], chunk: int) -> tuple[Job, bool]:
        if not isinstance(ask, Look):
            raise Unsupported(
                "a model that fills canvases writes no text from left to right; choose a method "
                "of the kind 'diffusion', for example method='threshold', or diffuspec, for which "
                "it drafts"
            )
        length = len(ask.canvas)
        computed_positions: Sequence[int] = range(length)
        if ask.computed is not None:  # and rows that it never had, or was made to give up
            computed_positions = sorted({*ask.computed, *range(self.base, length)})
        node_at = {position: node for node, position in enumerate(computed_positions)}
        self.reserve(length)
        self.base = max(self.base, length)
        self.synced = len(tokens)
        attended = None
        if ask.attended is not None:
            attended = torch.tensor(list(ask.attended), device=self.device)
        job = CanvasJob(
            cache=self,
            tokens=[
                self.mask_id
                if ask.canvas[computed_position] == MASKED
                else ask.canvas[computed_position]
                for computed_position in computed_positions
            ],
            scratch_positions=list(computed_positions),
            start=0,
            seen=None,
            rows=[node_at[max(0, position - self.shift)] for position in ask.wanted],
            first=0,
            attended=attended,
            length=length,
            block=self.block,
        )
        return job, True

    def finish(self, hidden: Mapping[int, torch.Tensor] = NO_STATES) -> None:
        """Rows hold what was computed at their positions last."""

    def forget(self) -> None:
        self.base = 0


class Denoiser(Decoder):
    """A decoder that fills canvases.

    `mask_id`: what stands at a masked position. `shift`: its row j says what token stands at
    j + shift. `block`: positions of a block, which sees itself and the blocks before it; 0: every
    position sees all. `longest`: positions of the longest canvas that it has been taught; 0: as
    long as its texts.
    """

    def __init__(
        self,
        hf_model: PreTrainedModel,
        model_name: str,
        mask_id: int,
        shift: int = 0,
        block: int = 0,
        longest_canvas: int = 0,
        accelerate: Accelerate | None = None,
    ):
        super().__init__(hf_model, model_name, accelerate)
        self.mask_id, self.shift, self.block = mask_id, shift, block
        self.longest_canvas = longest_canvas
        self.caps = frozenset({"canvas", "masks"})
        self.known_ids = self.vocab

    def use(self, make_backend: Make) -> None:
        caps, self.caps = self.caps, Model.caps  # it is tested as any decoder
        try:
            super().use(make_backend)
        finally:
            self.caps = caps

    def cache(self, request: Request | None = None, beside: Cache | None = None) -> Cache:
        if "canvas" not in self.caps:  # while its layers are tested, as those of any decoder
            return super().cache(request, beside)
        dtype = self.dtype if self.backend is None else self.backend.cache().dtype
        cache = CanvasCache(self.layout, dtype, self.device)
        cache.mask_id, cache.shift, cache.block = self.mask_id, self.shift, self.block
        return self.prepare_cache(cache, request, beside)


def fills_canvases(config: Any) -> bool:
    """Whether a model with this configuration fills canvases."""
    return hasattr(config, OURS) or config.model_type == KIND


def check_computed(
    hf_model: PreTrainedModel, model_name: str, backend: str, exact_bits: bool
) -> None:
    """Raises Unsupported where a model that fills canvases is not computed as it is asked for."""
    is_noise = hf_model.config.model_type == KIND
    backends = ("auto", "torch") if is_noise else ("auto", "torch", "native")
    if backend in backends and not exact_bits:
        return
    refused_option = "exact_bits=True" if exact_bits else f"backend={backend!r}"
    backend_text = " and ".join(backends[1:])
    need = f"a model that writes from left to right: canvases are computed by {backend_text}"
    raise Unsupported.missing_capability(refused_option, model_name, need, "leave it out")


def build_denoiser(hf_model: PreTrainedModel, model_name: str) -> Denoiser:
    """The adapter of a loaded model that fills masks, whose configuration says what it reads
    (models/diffusion/masked.py). Raises Unsupported for what it cannot compute.
    """
    canvas_settings = getattr(hf_model.config, OURS)
    denoiser_options = (
        canvas_settings["mask_id"],
        canvas_settings["shift"],
        canvas_settings["block"],
        canvas_settings.get("longest", 0),
    )
    return Denoiser(
        hf_model, model_name, *denoiser_options, accelerate=partial(fused_blocks, owns_weights=True)
    )
