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
from foretell.models.decoder.packed import PackedEmbedding, PackedLinear, pack, settle, weight_bytes
from foretell.native import library, steps
from foretell.native.packing import FORMATS
from foretell.ops.threads import torch_threads

if TYPE_CHECKING:
    from foretell.core.request import Request

STATE = 0  # the tap under which it gives what nodes below it are to be given as features


class HeadModel(Model):
    """A head on the decoder `target`, for the tokens `kept` (Vd,); None: all.

    `shape`: of trees that it grows by itself; None: it grows none.
    """

    caps = Model.caps | {"taps"}

    def __init__(
        self,
        head: Head,
        kept: torch.Tensor | None,
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
        packed = isinstance(target.head, PackedLinear)
        # The products of a target's packed weights read float32, and its caches are bfloat16.
        self.dtype = torch.bfloat16 if packed else target.dtype
        self.stream = torch.float32 if packed else target.dtype
        head.to(self.device, self.stream)
        if packed:
            pack(head, target.head.packed.format)
        self.output = Output(target, kept, head.matrix)
        self.tokens = self.output.tokens
        if packed and NativeLayer.suits(self):
            self.native = NativeLayer(self)
            self.usual_executor = "native"
            # The library hands states on below the root without a norm in front of the stream.
            grows = shape is not None and not head.stream_normed
            self.caps = HeadModel.caps | ({"grows"} if grows else set())

    def cache(self, request: Request | None = None, beside: Cache | None = None) -> Cache:
        rows = self.head.cache(self.layout, self.dtype, self.device)
        if isinstance(rows, KnownTokens):
            rows.reach = self.head.reach
        if self.head.remembers:
            rows.states = TappedStates((STATE,))
        cache = self.prepared(rows, request, beside)
        cache.breadth = self.shape.breadth
        if self.reads and request is not None:
            # It holds no rows of the tokens before these, as if they had been evicted.
            cache.length = max(0, len(request.prompt) - 1 - self.reads)
        return cache

    @property
    def ranks(self) -> Sequence[Sequence[float]]:
        """By depth and rank, how often its token was the target's; empty: not measured."""
        return self.head.ranks

    @property
    def weight_bytes(self) -> int:  # type: ignore[override]
        """Of its own weights and its part of the output matrix."""
        own = weight_bytes(self.head)
        if self.output.kept is None or self.head.matrix is not None:
            return own
        return own + weight_bytes(self.output.matrix)

    @property
    def fed_bytes(self) -> int:  # type: ignore[override]
        return len(self.feeds) * int(self.target.tap_bytes)

    def compute(self, jobs: Sequence[Job], taps: Sequence[int]) -> Computed:
        with torch_threads(self.threads):
            if self.native is not None and all(plain(job) for job in jobs):
                return self.native.compute(jobs, taps)
            return super().compute(jobs, taps)

    @property
    def threads(self) -> int:
        return self.threads_wanted or self.target.threads_wanted or torch.get_num_threads()

    def nodes_of(self, jobs: Sequence[Job], ids: torch.Tensor, positions: torch.Tensor) -> Nodes:
        """What the head reads of the jobs' new nodes; ids and positions (T,)."""
        given = torch.cat([job.features for job in jobs if job.features is not None])
        # Nodes below the root of a tree are given what the head left itself, and so is the root
        # where it would read its own state.
        drafted = [job.first + i >= self.lag for job in jobs for i in range(len(job.tokens))]
        marks = torch.tensor(drafted, device=self.device)
        features = given.to(self.stream)
        if self.head.reads_normed and not all(drafted):
            # Each tap apart: the norm is of one state.
            parts = features.chunk(len(self.feeds), -1)
            normed = torch.cat([self.output.normed(part) for part in parts], -1)
            features = torch.where(marks[:, None], features, normed)
        embedded = self.target.embedded(ids.clamp(min=0)).to(self.stream)
        if self.head.blank is not None:
            embedded = torch.where((ids < 0)[:, None], self.head.blank, embedded)
        nodes = Nodes(embedded, features, marks, positions, ids=ids)
        self._add_surroundings(nodes, jobs)
        return nodes

    def _add_surroundings(self, nodes: Nodes, jobs: Sequence[Job]) -> None:
        """Gives nodes what is known of their places, as far as the head reads it."""
        if self.head.by_depth:
            roots = [root_position(job) for job in jobs for _ in job.tokens]
            below = nodes.positions - torch.tensor(roots, device=self.device)
            nodes.depths = below.clamp(min=0)
        if self.head.reach:
            tokens = [row for job in jobs for row in job.cache.earlier(job)]
            flat = torch.tensor(tokens, device=self.device).flatten()
            nodes.earlier = self.target.embedded(flat).to(self.stream)
            nodes.earlier = nodes.earlier.unflatten(0, (-1, self.head.reach))
        if self.head.remembers:
            nodes.runs = self._runs(nodes, jobs)

    def _runs(self, nodes: Nodes, jobs: Sequence[Job]) -> list[tuple[slice, torch.Tensor]]:
        found = []
        start = 0
        for job in jobs:
            end = start + min(len(job.tokens), max(0, self.lag - job.first))
            if end > start:
                before = torch.zeros_like(nodes.features[0])
                if job.positions[0]:
                    at = job.positions[0] - 1
                    before = job.cache.states.read((STATE,), at, at + 1)[0].to(before)
                found.append((slice(start, end), before))
            start += len(job.tokens)
        return found

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
            own: tuple[torch.Tensor, torch.Tensor] | None = None,
        ) -> torch.Tensor:
            q, k, v = (part.to(self.dtype) for part in (q, k, v))
            if own is not None:
                return with_own(next(layer), q, k, v, own).to(self.stream)
            hidden = None if self.head.sees_first else without_first
            return forest_attention(next(layer), q, k, v, bias=hidden).to(self.stream)

        states, handed_on = self.head.step(nodes, attend)
        depths = self.head.depths_of(nodes)[rows]
        logits = self.output.logits(states[rows], depths)
        return logits.flatten(1), dict.fromkeys(taps, handed_on)


def without_first(here: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
    """The bias (1, n, rows) that hides the row of position 0 from all others."""
    hidden = (there == 0) & (here[:, None] > 0)
    return torch.zeros(hidden.shape, device=here.device).masked_fill(hidden, -torch.inf)[None]


def with_own(
    layer: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    own: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """`forest_attention` of nodes that see a key and a value of their own beside the rows."""
    outs = []
    start = 0
    for job in STEP.get():
        end = start + len(job.tokens)
        new = slice(start, end)
        beside = (own[0][:, new].to(q.dtype), own[1][:, new].to(q.dtype))
        rows = (q[:, new], k[:, new], v[:, new])
        outs.append(job.attend_with(layer, *rows, beside, q.shape[-1] ** -0.5))
        start = end
    return torch.cat(outs)


def root_position(job: Job) -> int:
    """The text's last token stands there, the root of a tree; later, if the job is a part."""
    pending = len(job.scratch_positions) - len(job.tokens) - job.first
    return int(job.cache.length) + pending


def plain(job: Job) -> bool:
    """Whether its cache holds ordinary rows and nothing else."""
    return bool(job.cache.plain) and job.layers is None and job.states is None


class NativeLayer:
    """A head of one layer in the C library."""

    def __init__(self, model: HeadModel):
        head: Any = model.head
        layer: Layer = head.layer
        self.model = model
        self.head: OneLayer = head
        self.library = steps.opened()
        self.kept: list[torch.Tensor] = []
        attention, mlp = layer.self_attn, layer.mlp
        self.qkv = joined([attention.q_proj, attention.k_proj, attention.v_proj])
        self.gate_up = joined([mlp.gate_proj, mlp.up_proj])
        read = (self.qkv, attention.o_proj, self.gate_up, mlp.down_proj, model.output.matrix)
        settle(m for m in (*read, *head.modules()) if isinstance(m, PackedLinear))
        shape = layer.self_attn.shape
        beside = head.enter is None
        before = head.state_norm if beside else layer.input_layernorm
        if head.stream_normed:
            before = None  # `entering` has it behind it
        part = steps.Layer(
            before=self._weight(before),
            after=self._weight(layer.post_attention_layernorm),
            token_norm=self._weight(head.token_norm) if beside else None,
            before_eps=shape.eps,
            after_eps=shape.eps,
            token_eps=shape.eps,
            qkv=self.qkv.matrix,
            out=attention.o_proj.matrix,
            gate_up=self.gate_up.matrix,
            down=mlp.down_proj.matrix,
        )
        self.layers = (steps.Layer * 1)(part)
        self.described = steps.Model(
            layers=1,
            hidden=shape.hidden,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            width=shape.width,
            inner=shape.intermediate,
            activation=steps.ACTIVATIONS.index("silu"),
            format=FORMATS.index(self.qkv.packed.format),
            scale=shape.width**-0.5,
            norm_eps=shape.eps,
            logit_scale=model.output.scale,
            norm=self._weight(head.norm),
            layer=self.layers,
            head=model.output.matrix.matrix,
        )
        enters = head.enter is not None
        self.token_norm = self._weight(head.token_norm) if enters else None
        self.state_norm = self._weight(head.state_norm) if enters else None
        self.hidden = shape.hidden
        self.cosines = torch.empty(0, shape.width // 2)
        self.sines = self.cosines
        kept = model.output.kept
        self.names = None if kept is None else kept.long().contiguous()

    @staticmethod
    def suits(model: HeadModel) -> bool:
        """Whether the library computes a head of this build."""
        head = model.head
        if not isinstance(head, OneLayer) or not head.by_library:
            return False
        shape = head.shape
        wide = shape.hidden % 32 == 0 and shape.intermediate % 32 == 0 and shape.width % 32 == 0
        embeds = isinstance(model.target.loop.embed, PackedEmbedding)
        return library.available() and wide and embeds and not model.output.cap

    def _weight(self, norm: nn.Module | None) -> int | None:
        if norm is None:
            return None
        weight: Any = norm.weight
        self.kept.append(weight.detach().float().contiguous())
        return library.placed(self.kept[-1], (self.model.head.shape.hidden,), torch.float32)

    def _rotate_to(self, needed: int) -> None:
        if len(self.cosines) < needed:
            both = self.head.rotation(torch.arange(2 * needed + 256))
            halves = [part[:, : part.shape[1] // 2].contiguous() for part in both]
            self.cosines, self.sines = halves

    def compute(self, jobs: Sequence[Job], taps: Sequence[int]) -> Computed:
        model = self.model
        ids = torch.tensor([token for job in jobs for token in job.tokens])
        positions = torch.tensor([position for job in jobs for position in job.positions])
        nodes = model.nodes_of(jobs, ids, positions)
        states = self.head.states(nodes)
        entering = self.head.entering(nodes.embedded, states).float().contiguous()
        embedded = nodes.embedded.float().contiguous()
        rows, first = [], 0
        for job in jobs:
            rows += [first + row for row in job.rows]
            first += len(job.tokens)
        levels = min(job.follow for job in jobs)
        self._rotate_to(int(positions.max()) + levels + 1)
        wanted = np.array(rows, np.int32)
        tapped = np.array([len(self.layers)] * bool(taps), np.int32)
        hidden = torch.empty(len(tapped), len(ids), self.hidden)
        logits = torch.empty(len(rows), model.output.size)
        described = [describe(job, self.described) for job in jobs]
        layers = np.zeros(1, np.int32)
        step = steps.Step(
            jobs=(steps.Job * len(jobs))(*(part for part, _ in described)),
            job_count=len(jobs),
            nodes=len(ids),
            states=library.placed(entering, (len(ids), self.hidden), torch.float32),
            tokens=library.placed(embedded, (len(ids), self.hidden), torch.float32),
            cosines=self.cosines.data_ptr(),
            sines=self.sines.data_ptr(),
            positions=len(self.cosines),
            layers=layers.ctypes.data,
            layer_count=1,
            rows=wanted.ctypes.data,
            row_count=len(rows),
            logits=logits.data_ptr(),
            taps=tapped.ctypes.data,
            tap_count=len(tapped),
            tapped=hidden.data_ptr(),
        )
        if levels > 0:
            followed, forwards = self._grow(step, levels)
            return Computed(logits, {}, "native", len(ids), followed, forwards)
        self.library.ft_forward(self.described, step, model.threads)
        found = {}
        if taps:
            _, state = self.head.leaving(hidden[0])
            missing = nodes.features.shape[1] - self.hidden
            found = dict.fromkeys(taps, torch.nn.functional.pad(state, (0, missing)))
        return Computed(logits, found, "native", len(ids))

    def _grow(self, step: Any, levels: int) -> tuple[list[list[tuple[int, float, int]]], int]:
        """Computes a step and the trees below it; returns of each job its Reply's `followed`, and
        how many forwards it took.
        """
        model, head, jobs = self.model, self.head, step.job_count
        chosen = model.shape.total
        tokens = torch.empty(jobs, chosen, dtype=torch.long)
        parents = torch.empty(jobs, chosen, dtype=torch.int32)
        counts = torch.empty(jobs, dtype=torch.int32)
        chances = torch.empty(jobs, chosen)
        embed: Any = model.target.loop.embed
        matrix = embed.head[0].matrix
        none = library.Matrix()
        entered: Any = head.enter
        growth = steps.Growth(
            embeddings=ctypes.pointer(matrix),
            scale=model.target.loop.scale,
            names=steps.names(self.names, self.described.head),
            enter=none if entered is None else entered.matrix,
            token_norm=self.token_norm,
            state_norm=self.state_norm,
            eps=head.shape.eps,
            hands_on_normed=int(head.hands_on_normed),
            depth=levels,
            breadth=model.shape.breadth,
            chosen=chosen,
            least=model.shape.least,
            tokens=tokens.data_ptr(),
            parents=parents.data_ptr(),
            counts=counts.data_ptr(),
            chances=chances.data_ptr(),
        )
        forwards = self.library.ft_grow(self.described, step, growth, model.threads)
        grown = []
        for job, count in enumerate(counts.tolist()):
            parts = (part[job, :count].tolist() for part in (tokens, chances, parents))
            grown.append(list(zip(*parts, strict=True)))
        return grown, forwards


def joined(parts: Sequence[Any]) -> PackedLinear:
    """One matrix of several with the same input."""
    made = PackedLinear.join(list(parts))
    assert made is not None, "outputs are multiples of 16"
    return made


def describe(job: Job, model: steps.Model) -> tuple[steps.Job, Any]:
    """The library's structure of a job on plain rows, and what it points to."""
    cache: Cache = job.cache
    keys, values = cache.keys[0], cache.values[0]
    held = np.array(job.positions, np.int32)
    seen = None if job.seen is None else job.seen.contiguous()
    rows = job.start + len(held)
    part = steps.Job(
        nodes=len(job.tokens),
        start=job.start,
        base=cache.base,
        positions=held.ctypes.data,
        seen=steps.seen(seen, len(held), rows - cache.base),
        **steps.stored(keys, values, 1, model.kv_heads, model.width),
        room=keys.shape[2],
        segments=0,
    )
    return part, (held, seen)
