"""The forward in the C library: a whole step in one call, each row by itself to the last bit.

It takes layers that a description (models/families/) says all of, with packed weights
(models/decoder/packed.py): any number of requests, trees, windows, parts of the layers. Caches are
the ordinary ones, in bfloat16.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from foretell.backends.native_layers import ModelBuilder
from foretell.cache.buffers import Layout
from foretell.cache.cache import Cache
from foretell.cache.job import Job, RowMemory, join_entry_states
from foretell.cache.policy import Segment
from foretell.core.model import Computed
from foretell.models.backend import Backend, interleave_results
from foretell.models.decoder.fused import Fused, find_descriptions, half_table, table_layout
from foretell.models.decoder.loop import Loop
from foretell.models.decoder.packed import (
    PackedEmbedding,
    PackedLinear,
    pack_layers,
    settle_weights,
)
from foretell.models.decoder.packed_experts import PackedExperts, pack_experts
from foretell.native import library, steps
from foretell.native.packing import GROUP
from foretell.ops.attention import Attention
from foretell.ops.threads import torch_threads

DEVICE = "cpu"
PRIORITY = 3
DTYPE = None
WHOLE = True
HEAD_MULTIPLE = 32  # of which the width of a head must be a multiple
WIDEST_GROUP = 40  # query heads that share a key head
MUCH = 1 << 18  # scores of a head from which on torch is asked for with all threads


def suits_model(hf_model: Any, by_name: bool = False) -> bool:
    """Whether a model is of a build and of number formats that the library computes.

    So it is where the library is not built, too: then `make_backend` says so, as nobody should
    have the slower steps without a word. Who has switched it off knows.
    """
    is_packed = isinstance(hf_model.get_output_embeddings(), PackedLinear)
    return (
        not library.switched_off()
        and (is_packed or hf_model.dtype == torch.bfloat16)
        and bool(find_descriptions(hf_model))
    )


def prepare_model(hf_model: Any) -> None:
    """Packs the weights of a model of bfloat16, where there is a library to read them."""
    is_packed = isinstance(hf_model.get_output_embeddings(), PackedLinear)
    if library.is_available() and not is_packed and hf_model.dtype == torch.bfloat16:
        pack_layers(hf_model, "bfloat16")
        pack_experts(hf_model, "bfloat16")


def make_backend(
    loop: Loop, layout: Layout, dtype: torch.dtype, vocab_size: int, fallback: Backend | None = None
) -> Backend:
    """Makes the backend of a model. It leaves nothing to a fallback."""
    return NativeBackend(loop, layout, dtype, vocab_size)


class NativeBackend(Backend):
    """Computes plain jobs of any number of requests, and of parts of the layers, in one call; what
    lies between the attention of two layers where a cache policy computes that.

    Raises LookupError with the reason where this model or machine cannot have it.
    """

    name = "native"
    exact_bits = True
    takes_layers = True
    takes_segments = True
    takes_watched = True
    takes_canvases = True
    sizes: tuple[int, ...] = ()
    fallback: Backend | None = None

    def __init__(self, loop: Loop, layout: Layout, dtype: torch.dtype, vocab_size: int):
        self.library = steps.open_library()
        self.loop = loop
        self.layout = layout
        self.dtype = dtype
        self.vocab = vocab_size
        self.size = 0
        self._check_model()
        self.width = layout[0][1]
        self.hidden = int(loop.config.hidden_size)
        self.windows = [window or 0 for window in loop.windows]
        self.least_window = min(
            (layer_window for layer_window in self.windows if layer_window), default=0
        )
        # Kinds of layers that turn heads by tables of their own; one without a name: all do alike.
        self.kinds: list[str] = list(dict.fromkeys(loop.kinds or [""]))
        if loop.rotary is None:
            self.kinds = []
        is_interleaved = any(b.description.rotation == "interleaved" for b in self.blocks)
        rotated = [is_interleaved] * len(self.kinds)
        self.rotations = steps.Rotations(rotated, self.loop.context)
        self._extend_rotations(1)
        self.all_layers = np.arange(len(layout), dtype=np.int32)
        # Of shared rows their structure, and the tensors that it points into.
        self.segments: WeakKeyDictionary[Segment, tuple[steps.Segment, Any]] = WeakKeyDictionary()
        self._settle_weights()
        self.builder = ModelBuilder(loop, self.width, self.kinds)
        self.model = self.builder.build()
        self.experts = self.builder.experts  # see models/decoder/backend_check.py

    @property
    def blocks(self) -> list[Fused]:
        """The layers, all of them fused."""
        return [block for block in self.loop.blocks if isinstance(block, Fused)]

    def _check_model(self) -> None:
        loop = self.loop
        if not all(type(block) is Fused for block in loop.blocks):
            default_reason = "its layers are of another build than the llama family's"
            raise LookupError(loop.refused or default_reason)
        blocks = self.blocks
        if any(block.basis is not None for block in blocks):
            raise LookupError("its rotated keys are projected to fewer heads")
        if not isinstance(loop.head, PackedLinear):
            raise LookupError(
                "it computes weights of bfloat16, int8 and int4: load it with one of these as dtype"
            )
        if len(set(self.layout)) > 1 or self.layout[0][1] != self.layout[0][2]:
            raise LookupError("its layers have heads of several shapes")
        if self.layout[0][1] % HEAD_MULTIPLE or blocks[0].queries // blocks[0].keys > WIDEST_GROUP:
            raise LookupError(f"its heads are no multiple of {HEAD_MULTIPLE} wide, or too many")
        for layer, block in zip(loop.layers, blocks, strict=True):
            for name in block.description.matrices:
                linear = layer.get_submodule(name)
                if not isinstance(linear, PackedLinear):
                    raise LookupError(f"its matrix {name} is not packed")
                if linear.order is not None:
                    raise LookupError(f"its matrix {name} has inputs in another order (act-order)")
                if linear.in_features % GROUP:
                    raise LookupError(f"its layers are no multiple of {GROUP} wide")
            experts = block.description.experts
            if experts is not None:
                matrices = layer.get_submodule(experts.experts)
                if not isinstance(matrices, PackedExperts):
                    raise LookupError("its experts are not packed")
                if matrices.down.in_features % GROUP or matrices.down.out_features % GROUP:
                    raise LookupError(f"its experts are no multiple of {GROUP} wide")
        if loop.head.packed.outputs != self.vocab:
            raise LookupError(f"its head has {loop.head.packed.outputs} rows, not {self.vocab}")

    def _settle_weights(self) -> None:
        """Puts the weights beside each other, in the order in which a step reads them."""
        step_linears = [
            module
            for layer, block in zip(self.loop.layers, self.blocks, strict=True)
            for module in (block.qkv, block.out, *block.products, *layer.modules())
        ]
        settle_weights(
            module for module in (*step_linears, self.loop.head) if isinstance(module, PackedLinear)
        )

    def _extend_rotations(self, position_count: int) -> None:
        """Makes the cosines and sines (P, W / 2) of every kind reach so many positions."""
        if self.rotations.positions >= position_count:
            return
        table_size = max(position_count, min(2 * position_count + 256, self.loop.context))
        self.rotations.replace([self._find_tables(table_size, kind) for kind in self.kinds])

    def _find_tables(self, table_size: int, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.arange(table_size)[None]
        tables = self.loop.rotary(torch.empty(0), positions, *([kind] if kind else []))
        if not isinstance(tables, tuple) or any(
            table.ndim != 3 or table.shape[:2] != (1, table_size) for table in tables
        ):
            raise LookupError("its rotation is no table of cosines and sines")
        layout = table_layout(tables[0], self.blocks[0].description)
        cosines, sines = (half_table(table[0].float(), layout) for table in tables)
        return cosines, sines

    def cache(self) -> Cache:
        return Cache(self.layout, torch.bfloat16, torch.device("cpu"))

    def release(self) -> None:
        """Frees nothing: it holds nothing but the weights."""

    def __call__(
        self, jobs: Sequence[Job], threads: int, taps: Sequence[int] = ()
    ) -> Computed | None:
        watched_jobs = [job for job in jobs if job.watched]
        if watched_jobs and len(watched_jobs) < len(jobs):
            plain_jobs = [job for job in jobs if job not in watched_jobs]
            results = [
                (group_jobs, self._forward_jobs(group_jobs, threads, taps))
                for group_jobs in (plain_jobs, watched_jobs)
            ]
            self.size = sum(computed.width for _, computed in results)
            combined = interleave_results(jobs, *results)
            combined.computed_by = self.name
            return combined
        return self._forward_jobs(jobs, threads, taps)

    def _forward_jobs(self, jobs: Sequence[Job], threads: int, taps: Sequence[int]) -> Computed:
        """Computes jobs all of which a policy watches, or none."""
        node_count = sum(len(job.tokens) for job in jobs)
        rows = []
        first_node = 0
        for job in jobs:
            rows += [first_node + row for row in job.rows]
            first_node += len(job.tokens)
        self._extend_rotations(max(max(job.positions) for job in jobs) + 1)
        states = self._entry_states(jobs)
        row_numbers = np.array(rows, np.int32)
        tap_numbers = np.array(taps, np.int32)
        layer_numbers = self.all_layers
        if jobs[0].layers is not None:
            layer_numbers = np.array(jobs[0].layers, np.int32)
        logits = torch.empty(len(rows), self.vocab)
        tap_states = torch.empty(len(taps), node_count, self.hidden)
        row_memories = [job.lay_out() for job in jobs]
        job_structures = [
            self._describe_job(job, row_memory)
            for job, row_memory in zip(jobs, row_memories, strict=True)
        ]
        step = steps.Step(
            jobs=(steps.Job * len(jobs))(*(structure for structure, _ in job_structures)),
            job_count=len(jobs),
            nodes=node_count,
            states=library.checked_address(states, (node_count, self.hidden), torch.float32),
            **self.rotations.fields(),
            layers=layer_numbers.ctypes.data,
            layer_count=len(layer_numbers),
            rows=row_numbers.ctypes.data,
            row_count=len(rows),
            logits=logits.data_ptr(),
            taps=tap_numbers.ctypes.data,
            tap_count=len(taps),
            tapped=tap_states.data_ptr(),
        )
        follow_count = 0 if jobs[0].watched else self._count_follows(jobs)
        followed = []
        if follow_count:
            followed = self._follow_tokens(step, follow_count, threads)
        elif jobs[0].watched:
            self._forward_watched(
                step, jobs, states, dict(zip(taps, tap_states, strict=True)), threads
            )
        else:
            self.library.ft_forward(self.model, step, threads)
        for job, row_memory in zip(jobs, row_memories, strict=True):
            job.take_back(row_memory)
        self.size = node_count
        # Where a part of the layers ran, others are entered with these, and lose no bit by it.
        if jobs[0].layers is None:
            tap_states = tap_states.to(self.dtype)
        tapped_states = dict(zip(taps, tap_states, strict=True))
        return Computed(
            logits,
            tapped_states,
            width=node_count,
            followed=followed,
            forwards=max(1, follow_count),
        )

    def _forward_watched(
        self,
        step: steps.Step,
        jobs: Sequence[Job],
        states: torch.Tensor,
        tap_outputs: Mapping[int, torch.Tensor],
        threads: int,
    ) -> None:
        """Computes a step whose attention the policies of the jobs' caches compute; `tap_outputs`:
        where tapped states go (nodes, E).
        """
        node_count, query_heads, head_width = step.nodes, self.model.heads, self.width
        hidden_states = states.clone()
        qkv = torch.empty(node_count, (query_heads + 2 * self.model.kv_heads) * head_width)
        attended = torch.empty(node_count, query_heads, head_width)
        queries = (
            qkv[:, : query_heads * head_width]
            .view(node_count, query_heads, head_width)
            .transpose(0, 1)
        )
        between = steps.Between(
            hidden=hidden_states.data_ptr(), qkv=qkv.data_ptr(), attended=attended.data_ptr()
        )
        last_layer = -1  # the layer that ran before
        layers = range(len(self.layout)) if jobs[0].layers is None else jobs[0].layers
        with library.limit_threads(threads):
            for layer in (*layers, -1):
                between.after, between.before = last_layer, layer
                self.library.ft_go_between(self.model, step, between, threads)
                entered_layer = len(self.layout) if layer < 0 else layer
                for tap in range(last_layer + 1, entered_layer + 1) if tap_outputs else ():
                    if tap in tap_outputs:
                        tap_outputs[tap][:] = hidden_states
                if layer >= 0:
                    self._ask_policies(jobs, layer, queries, attended, threads)
                last_layer = layer

    def _ask_policies(
        self,
        jobs: Sequence[Job],
        layer: int,
        queries: torch.Tensor,
        attended: torch.Tensor,
        threads: int,
    ) -> None:
        """Asks the policies for the attention of all nodes (nodes, H, D), of queries (H, nodes, D)
        whose keys and values are in the caches.
        """
        q = queries.to(torch.bfloat16)
        window = self.windows[layer] or None
        first_node = 0
        for job in jobs:
            end_node = first_node + len(job.tokens)
            row_count = job.start + len(job.tokens)
            keys, values = job.cache.k[layer][:, :row_count], job.cache.v[layer][:, :row_count]
            mask = job.mask(window, torch.bfloat16)
            block = self.blocks[layer]
            query = (layer, q[:, first_node:end_node], keys, values, mask)
            attention = Attention(*query, block.scale, block.score_cap, block.sinks)
            with torch_threads(threads if row_count * len(job.tokens) >= MUCH else 1):
                attended[first_node:end_node] = job.by_policy(attention)
            first_node = end_node

    def _count_follows(self, jobs: Sequence[Job]) -> int:
        """Counts the tokens by which the jobs go on in the same call."""
        follow_count = min(job.follow for job in jobs)
        embed = self.loop.embed
        if not follow_count or not isinstance(embed, PackedEmbedding):
            return 0
        end_position = max(max(job.positions) for job in jobs) + follow_count
        is_padded = embed.head[0].packed.inputs != self.hidden
        if is_padded or 0 < self.least_window < end_position or end_position > self.loop.context:
            return 0
        self._extend_rotations(end_position)
        return follow_count

    def _follow_tokens(
        self, step: steps.Step, follow_count: int, threads: int
    ) -> list[list[tuple[int, float, int]]]:
        """Computes a step and what follows it; returns `followed` of each job's Reply."""
        job_count = step.job_count
        tokens = torch.empty(follow_count, job_count, dtype=torch.long)
        probabilities = torch.empty(follow_count, job_count)
        embedding_matrix = self.loop.embed.head[0].matrix
        following = steps.Following(
            embeddings=ctypes.pointer(embedding_matrix),
            scale=self.loop.scale * self.loop.embed.scale,
            names=steps.names_address(self.loop.kept, self.model.head),
            count=follow_count,
            tokens=tokens.data_ptr(),
            chances=probabilities.data_ptr(),
        )
        step.rotations, step.positions = self.rotations.structures, self.rotations.positions
        self.library.ft_follow(self.model, step, following, threads)
        pairs = zip(tokens.T.tolist(), probabilities.T.tolist(), strict=True)
        return [list(zip(*pair, range(-1, follow_count - 1), strict=True)) for pair in pairs]

    def _entry_states(self, jobs: Sequence[Job]) -> torch.Tensor:
        """States (T, E) that enter the first layer, float32."""
        given_states = join_entry_states(jobs, self._embed_tokens, self._place_states)
        if given_states is not None:
            return given_states.float().contiguous()
        embeddings = self._embed_tokens([token for job in jobs for token in job.tokens])
        return self._place_states(embeddings, [place for job in jobs for place in job.positions])

    def _place_states(self, states: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
        return self.loop.placed(states.float(), torch.tensor(positions)).contiguous()

    def _embed_tokens(self, tokens: Sequence[int]) -> torch.Tensor:
        token_ids = torch.tensor(tokens)
        embed = self.loop.embed
        if not isinstance(embed, PackedEmbedding):
            return self.loop.embedded(token_ids).float().contiguous()
        embeddings = embed.rows(token_ids)
        return embeddings if self.loop.scale == 1 else embeddings * self.loop.scale

    def _describe_job(self, job: Job, row_memory: RowMemory) -> tuple[steps.Job, Any]:
        """The C library's structure of a job, and what it points to."""
        cache = job.cache
        numbers = job.positions
        new_count, row_count = len(job.tokens), row_memory.start + len(job.tokens)
        is_windowed = (
            0 < self.least_window <= max(numbers) and row_memory.common <= row_memory.start
        )
        if is_windowed:
            numbers = [*numbers, *cache.row_positions(), *job.scratch_positions]
        position_numbers = np.array(numbers, np.int32)
        if len(position_numbers) != new_count + is_windowed * row_count:
            raise ValueError(
                f"{len(position_numbers)} positions are not of {new_count} nodes and {row_count} "
                "rows"
            )
        visible = None if job.seen is None else job.seen.contiguous()
        segments = (steps.Segment * len(cache.segments))(
            *map(self._describe_segment, cache.segments)
        )
        structure = steps.Job(
            nodes=new_count,
            start=row_memory.start,
            base=row_memory.common,
            positions=position_numbers.ctypes.data,
            seen=steps.seen_address(visible, new_count, row_count - row_memory.common),
            row_positions=position_numbers[new_count:].ctypes.data if is_windowed else None,
            **self._row_addresses(row_memory.keys, row_memory.values),
            room=row_memory.keys.shape[2],
            segments=len(segments),
            segment=segments,
        )
        return structure, (position_numbers, visible, segments)

    def _describe_segment(self, segment: Segment) -> steps.Segment:
        """The C library's structure of shared rows."""
        if segment not in self.segments:
            keys, values = _rows_at(segment.k), _rows_at(segment.v)
            if keys.shape[2] != len(segment.tokens):
                raise ValueError(f"{len(segment.tokens)} shared tokens have {keys.shape[2]} rows")
            structure = steps.Segment(
                **self._row_addresses(keys, values), start=segment.start, rows=keys.shape[2]
            )
            self.segments[segment] = structure, (keys, values)
        return self.segments[segment][0]

    def _row_addresses(self, keys: torch.Tensor, values: torch.Tensor) -> dict[str, int]:
        """Addresses of the rows of all layers. Raises ValueError for those of another model."""
        return steps.row_fields(keys, values, len(self.layout), self.model.kv_heads, self.width)


def _rows_at(layers: Sequence[torch.Tensor]) -> torch.Tensor:
    """Joins rows (KV, n, D) of every layer into one tensor; a copy where they do not lie evenly."""
    first_layer = layers[0]
    start, storage = (first_layer.data_ptr(), first_layer.untyped_storage().data_ptr())
    distance = layers[1].data_ptr() - start if len(layers) > 1 else 0  # in bytes
    strides = (first_layer.stride(0), first_layer.shape[2], 1)
    for layer, rows in enumerate(layers):
        is_even = rows.data_ptr() == start + layer * distance and rows.stride() == strides
        if distance < 0 or not is_even or rows.untyped_storage().data_ptr() != storage:
            return torch.stack(list(layers))
    shape = (len(layers), *first_layer.shape)
    return first_layer.as_strided(shape, (distance // first_layer.element_size(), *strides))
