"""A head as a model that drafters ask: nodes read their tokens and the target's states.

Its rows have as many numbers as it has tokens to draft, `tokens` says which. Where the C library
computes the target, a head of one layer is computed by it too, and grows whole trees in one call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from foretell.cache.cache import Cache
from foretell.cache.job import Job
from foretell.cache.states import TappedStates
from foretell.core.model import STEP, Computed, Model, forest_attention
from foretell.drafters.heads.networks.base import Head, Nodes
from foretell.drafters.heads.networks.caches import KnownTokens
from foretell.drafters.heads.networks.eagle import OneLayer
from foretell.drafters.heads.networks.layers import Layer
from foretell.drafters.heads.networks.output import Output
from foretell.drafters.heads.networks.tree_shape import TreeShape
from foretell.models.decoder.packed import (
    PackedEmbedding,
    PackedLinear,
    pack_layers,
    settle_weights,
    weight_bytes,
)
from foretell.native import library, steps
from foretell.ops.attention import LayerQuery
from foretell.ops.threads import torch_threads

if TYPE_CHECKING:
    from foretell.core.request import Request

STATE = 0  # the tap under which it gives what nodes below it are to be given as features


class HeadModel(Model):
    """A head on the decoder `target`, for the tokens `kept_tokens` (Vd,); None: all.

    `shape`: of trees that it grows by itself; None: it grows none.
    """

    caps = Model.caps | {"taps"}

    def __init__(
        self,
        head: Head,
        kept_tokens: torch.Tensor | None,
        target: Any,
        shape: TreeShape | None = None,
    ):
        self.head = head.eval().requires_grad_(False)
        self.target = target
        self.name = f"{target.name} ({head.kind} head)"
        self.vocab = target.vocab
        self.context = target.context
        self.device = target.device
        self.tokenizer = target.tokenizer
        self.feeds, self.lag, self.block = head.taps, head.lag, head.block
        self.deepest = head.deepest
        self.shape = shape or TreeShape()
        self.reads = self.shape.reads
        self.layout = head.layout
        self.native: NativeLayer | None = None
        is_packed = isinstance(target.head, PackedLinear)
        # The products of a target's packed weights read float32, and its caches are bfloat16.
        self.dtype = torch.bfloat16 if is_packed else target.dtype
        self.stream = torch.float32 if is_packed else target.dtype
        head.to(self.device, self.stream)
        if is_packed:
            pack_layers(head, target.head.packed.rounding)
        self.output = Output(target, kept_tokens, head.matrix)
        self.tokens = self.output.tokens
        if is_packed and NativeLayer.suits_head(self):
            self.native = NativeLayer(self)
            self.usual_backend = "native"
            # The library hands states on below the root without a norm in front of the stream.
            grows = shape is not None and not head.stream_normed
            self.caps = HeadModel.caps | ({"grows"} if grows else set())

    def cache(self, request: Request | None = None, beside: Cache | None = None) -> Cache:
        cache_rows = self.head.cache(self.layout, self.dtype, self.device)
        if isinstance(cache_rows, KnownTokens):
            cache_rows.reach = self.head.reach
        if self.head.remembers:
            cache_rows.states = TappedStates((STATE,))
        cache = self.prepare_cache(cache_rows, request, beside)
        cache.breadth = self.shape.breadth
        if self.reads and request is not None:
            # It holds no rows of the tokens before these, as if they had been evicted.
            cache.length = max(0, len(request.prompt) - 1 - self.reads)
        return cache

    @property
    def ranks(self) -> Sequence[Sequence[float]]:
        """Shares, by depth and rank, of its tokens that were the target's; empty: not measured."""
        return self.head.ranks

    @property
    def weight_bytes(self) -> int:  # type: ignore[override]
        """Bytes of its own weights and its part of the output matrix."""
        head_bytes = weight_bytes(self.head)
        if self.output.kept is None or self.head.matrix is not None:
            return head_bytes
        return head_bytes + weight_bytes(self.output.matrix)

    @property
    def fed_bytes(self) -> int:  # type: ignore[override]
        return len(self.feeds) * int(self.target.tap_bytes)

    def compute(self, jobs: Sequence[Job], taps: Sequence[int]) -> Computed:
        with torch_threads(self.threads):
            if self.native is not None and all(is_plain_job(job) for job in jobs):
                return self.native.compute(jobs, taps)
            return super().compute(jobs, taps)

    @property
    def threads(self) -> int:
        return self.threads_wanted or self.target.threads_wanted or torch.get_num_threads()

    def nodes_of(self, jobs: Sequence[Job], ids: torch.Tensor, positions: torch.Tensor) -> Nodes:
        """Nodes that the head reads, of the jobs' new ones; ids and positions (T,)."""
        job_features = torch.cat([job.features for job in jobs if job.features is not None])
        # Nodes below the root of a tree are given what the head left itself, and so is the root
        # where it would read its own state.
        drafted_flags = [job.first + i >= self.lag for job in jobs for i in range(len(job.tokens))]
        is_drafted = torch.tensor(drafted_flags, device=self.device)
        features = job_features.to(self.stream)
        if self.head.reads_normed and not all(drafted_flags):
            # Each tap apart: the norm is of one state.
            tap_parts = features.chunk(len(self.feeds), -1)
            normed_features = torch.cat(
                [self.output.norm_states(tap_part) for tap_part in tap_parts], -1
            )
            features = torch.where(is_drafted[:, None], features, normed_features)
        embedded = self.target.embedded(ids.clamp(min=0)).to(self.stream)
        if self.head.blank is not None:
            embedded = torch.where((ids < 0)[:, None], self.head.blank, embedded)
        nodes = Nodes(embedded, features, is_drafted, positions, ids=ids)
        self._add_surroundings(nodes, jobs)
        return nodes

    def _add_surroundings(self, nodes: Nodes, jobs: Sequence[Job]) -> None:
        """Gives nodes what is known of their places, as far as the head reads it."""
        if self.head.by_depth:
            root_positions = [root_position(job) for job in jobs for _ in job.tokens]
            depths_below = nodes.positions - torch.tensor(root_positions, device=self.device)
            nodes.depths = depths_below.clamp(min=0)
        if self.head.reach:
            earlier_tokens = [row for job in jobs for row in job.cache.tokens_above(job)]
            flat_tokens = torch.tensor(earlier_tokens, device=self.device).flatten()
            nodes.earlier = self.target.embedded(flat_tokens).to(self.stream)
            nodes.earlier = nodes.earlier.unflatten(0, (-1, self.head.reach))
        if self.head.remembers:
            nodes.runs = self._text_runs(nodes, jobs)

    def _text_runs(self, nodes: Nodes, jobs: Sequence[Job]) -> list[tuple[slice, torch.Tensor]]:
        text_runs = []
        first_node = 0
        for job in jobs:
            last_node = first_node + min(len(job.tokens), max(0, self.lag - job.first))
            if last_node > first_node:
                handed_on = torch.zeros_like(nodes.features[0])
                if job.positions[0]:
                    position = job.positions[0] - 1
                    handed_on = job.cache.states.read_states((STATE,), position, position + 1)[
                        0
                    ].to(handed_on)
                text_runs.append((slice(first_node, last_node), handed_on))
            first_node += len(job.tokens)
        return text_runs

    def run(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        first: Job,
        taps: Sequence[int],
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        nodes = self.nodes_of(STEP.get(), ids[0], positions[0])
        layer = iter(range(len(self.layout)))

        def attend(
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            row_pair: tuple[torch.Tensor, torch.Tensor] | None = None,
        ) -> torch.Tensor:
            q, k, v = (part.to(self.dtype) for part in (q, k, v))
            if row_pair is not None:
                return attend_with_own(next(layer), q, k, v, row_pair).to(self.stream)
            hidden = None if self.head.sees_first else without_first
            return forest_attention(next(layer), q, k, v, bias=hidden).to(self.stream)

        states, handed_on = self.head.step(nodes, attend)
        depths = self.head.depths_of(nodes)[rows]
        logits = self.output.logits(states[rows], depths)
        return logits.flatten(1), dict.fromkeys(taps, handed_on)


def without_first(here: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
    """The bias (1, n, rows) that hides the row of position 0 from all others."""
    is_hidden = (there == 0) & (here[:, None] > 0)
    return torch.zeros(is_hidden.shape, device=here.device).masked_fill(is_hidden, -torch.inf)[None]


def attend_with_own(
    layer: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    row_pairs: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """`forest_attention` of nodes that see a key and a value of their own beside the rows."""
    query = LayerQuery(layer, q, k, v, q.shape[-1] ** -0.5)
    outputs = []
    start = 0
    for job in STEP.get():
        end = start + len(job.tokens)
        own_key, own_value = (rows[:, start:end].to(q.dtype) for rows in row_pairs)
        outputs.append(job.attend_with(query.part(start, end), (own_key, own_value)))
        start = end
    return torch.cat(outputs)


def root_position(job: Job) -> int:
    """The text's last token stands there, the root of a tree; later, if the job is a part."""
    pending = len(job.scratch_positions) - len(job.tokens) - job.first
    return int(job.cache.length) + pending


def is_plain_job(job: Job) -> bool:
    """Whether its cache holds ordinary rows and nothing else."""
    return bool(job.cache.plain) and job.layers is None and job.states is None


class NativeLayer:
    """A head of one layer in the C library."""

    def __init__(self, model: HeadModel):
        head: Any = model.head
        layer: Layer = head.layer
        self.model = model
        self.head: OneLayer = head
        self.library = steps.open_library()
        self.kept: list[torch.Tensor] = []
        attention, mlp = layer.self_attn, layer.mlp
        self.qkv = join_matrices([attention.q_proj, attention.k_proj, attention.v_proj])
        self.gate_up = join_matrices([mlp.gate_proj, mlp.up_proj])
        packed_matrices = (
            self.qkv,
            attention.o_proj,
            self.gate_up,
            mlp.down_proj,
            model.output.matrix,
        )
        settle_weights(
            m for m in (*packed_matrices, *head.modules()) if isinstance(m, PackedLinear)
        )
        shape = layer.self_attn.shape
        reads_beside = head.enter is None
        front_norm = head.state_norm if reads_beside else layer.input_layernorm
        if head.stream_normed:
            front_norm = None  # `entering` has it after it
        layer_struct = steps.Layer(
            before_attention=self._describe_norm(front_norm),
            before_mlp=self._describe_norm(layer.post_attention_layernorm),
            token_norm=self._describe_norm(head.token_norm if reads_beside else None),
            rotation=0,
            activation=steps.ACTIVATIONS.index("silu"),
            scale=shape.width**-0.5,
            residual=1.0,
            query=attention.q_proj.matrix,
            key=attention.k_proj.matrix,
            value=attention.v_proj.matrix,
            out=attention.o_proj.matrix,
            gate=mlp.gate_proj.matrix,
            up=mlp.up_proj.matrix,
            down=mlp.down_proj.matrix,
        )
        self.layers = (steps.Layer * 1)(layer_struct)
        self.described = steps.Model(
            layers=1,
            hidden=shape.hidden,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            width=shape.width,
            logit_scale=model.output.scale,
            norm=self._describe_norm(head.norm),
            layer=self.layers,
            head=model.output.matrix.matrix,
        )
        has_enter = head.enter is not None
        self.token_norm = self._describe_norm(head.token_norm if has_enter else None)
        self.state_norm = self._describe_norm(head.state_norm if has_enter else None)
        self.rotations = steps.Rotations([False])
        self.hidden = shape.hidden
        kept_tokens = model.output.kept
        self.names = None if kept_tokens is None else kept_tokens.long().contiguous()

    @staticmethod
    def suits_head(model: HeadModel) -> bool:
        """Whether the library computes a head of this build."""
        head = model.head
        if not isinstance(head, OneLayer) or not head.by_library:
            return False
        shape = head.shape
        fits_width = (
            shape.hidden % 32 == 0 and shape.intermediate % 32 == 0 and shape.width % 32 == 0
        )
        has_packed_table = isinstance(model.target.loop.embed, PackedEmbedding)
        return library.is_available() and fits_width and has_packed_table and not model.output.cap

    def _describe_norm(self, norm: nn.Module | None) -> steps.Norm:
        if norm is None:
            return steps.Norm()
        weight: Any = norm.weight
        self.kept.append(weight.detach().float().contiguous())
        shape = self.model.head.shape
        address = library.checked_address(self.kept[-1], (shape.hidden,), torch.float32)
        return steps.Norm(weight=address, eps=shape.eps)

    def _rotate_to(self, row_count: int) -> None:
        if self.rotations.positions < row_count:
            cosines, sines = self.head.rotation(torch.arange(2 * row_count + 256))
            half = cosines.shape[1] // 2
            self.rotations.replace([(cosines[:, :half].float(), sines[:, :half].float())])

    def compute(self, jobs: Sequence[Job], taps: Sequence[int]) -> Computed:
        model = self.model
        ids = torch.tensor([token for job in jobs for token in job.tokens])
        positions = torch.tensor([position for job in jobs for position in job.positions])
        nodes = model.nodes_of(jobs, ids, positions)
        states = self.head.node_states(nodes)
        entering = self.head.enter_layer(nodes.embedded, states).float().contiguous()
        embedded = nodes.embedded.float().contiguous()
        rows, first_node = [], 0
        for job in jobs:
            rows += [first_node + row for row in job.rows]
            first_node += len(job.tokens)
        level_count = min(job.follow for job in jobs)
        self._rotate_to(int(positions.max()) + level_count + 1)
        row_numbers = np.array(rows, np.int32)
        tap_numbers = np.array([len(self.layers)] * bool(taps), np.int32)
        tapped_states = torch.empty(len(tap_numbers), len(ids), self.hidden)
        logits = torch.empty(len(rows), model.output.size)
        job_structs = [describe_job(job, self.described) for job in jobs]
        layers = np.zeros(1, np.int32)
        step = steps.Step(
            jobs=(steps.Job * len(jobs))(*(part for part, _ in job_structs)),
            job_count=len(jobs),
            nodes=len(ids),
            states=library.checked_address(entering, (len(ids), self.hidden), torch.float32),
            tokens=library.checked_address(embedded, (len(ids), self.hidden), torch.float32),
            **self.rotations.fields(),
            layers=layers.ctypes.data,
            layer_count=1,
            rows=row_numbers.ctypes.data,
            row_count=len(rows),
            logits=logits.data_ptr(),
            taps=tap_numbers.ctypes.data,
            tap_count=len(tap_numbers),
            tapped=tapped_states.data_ptr(),
        )
        if level_count > 0:
            followed, forwards = self._grow_trees(step, level_count)
            return Computed(logits, {}, "native", len(ids), followed, forwards)
        self.library.ft_forward(self.described, step, model.threads)
        handed_on = {}
        if taps:
            _, state = self.head.leave_layer(tapped_states[0])
            missing_width = nodes.features.shape[1] - self.hidden
            handed_on = dict.fromkeys(taps, torch.nn.functional.pad(state, (0, missing_width)))
        return Computed(logits, handed_on, "native", len(ids))

    def _grow_trees(
        self, step: Any, level_count: int
    ) -> tuple[list[list[tuple[int, float, int]]], int]:
        """Computes a step and the trees below it; returns of each job its Reply's `followed`, and
        how many forwards it took.
        """
        model, head, job_count = self.model, self.head, step.job_count
        max_nodes = model.shape.total
        tokens = torch.empty(job_count, max_nodes, dtype=torch.long)
        parents = torch.empty(job_count, max_nodes, dtype=torch.int32)
        counts = torch.empty(job_count, dtype=torch.int32)
        chances = torch.empty(job_count, max_nodes)
        embed: Any = model.target.loop.embed
        matrix = embed.head[0].matrix
        no_matrix = library.Matrix()
        enter_matrix: Any = head.enter
        growth = steps.Growth(
            embeddings=ctypes.pointer(matrix),
            scale=model.target.loop.scale,
            names=steps.names_address(self.names, self.described.head),
            enter=no_matrix if enter_matrix is None else enter_matrix.matrix,
            token_norm=self.token_norm,
            state_norm=self.state_norm,
            hands_on_normed=int(head.hands_on_normed),
            depth=level_count,
            breadth=model.shape.breadth,
            chosen=max_nodes,
            least=model.shape.least,
            tokens=tokens.data_ptr(),
            parents=parents.data_ptr(),
            counts=counts.data_ptr(),
            chances=chances.data_ptr(),
        )
        forwards = self.library.ft_grow(self.described, step, growth, model.threads)
        grown_trees = []
        for job, count in enumerate(counts.tolist()):
            parts = (part[job, :count].tolist() for part in (tokens, chances, parents))
            grown_trees.append(list(zip(*parts, strict=True)))
        return grown_trees, forwards


def join_matrices(parts: Sequence[Any]) -> PackedLinear:
    """Joins matrices with the same input to one."""
    joined_matrix = PackedLinear.join(list(parts))
    assert joined_matrix is not None, "outputs are multiples of 16"
    return joined_matrix


def describe_job(job: Job, model: steps.Model) -> tuple[steps.Job, Any]:
    """The library's structure of a job on plain rows, and what it points to."""
    cache: Cache = job.cache
    keys, values = cache.keys[0], cache.values[0]
    held_positions = np.array(job.positions, np.int32)
    seen_rows = None if job.seen is None else job.seen.contiguous()
    rows = job.start + len(held_positions)
    job_struct = steps.Job(
        nodes=len(job.tokens),
        start=job.start,
        base=cache.base,
        positions=held_positions.ctypes.data,
        seen=steps.seen_address(seen_rows, len(held_positions), rows - cache.base),
        **steps.row_fields(keys, values, 1, model.kv_heads, model.width),
        room=keys.shape[2],
        segments=0,
    )
    return job_struct, (held_positions, seen_rows)
