"""The forward in the C library: a whole step in one call, each row by itself to the last bit.

It takes the llama family with weights of bfloat16, 8 or 4 bits (models/decoder/packed.py): any
number of requests, trees, windows, parts of the layers. Caches are the ordinary ones, in bfloat16.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn
from transformers.activations import ACT2FN

from foretell.cache.buffers import Layout
from foretell.cache.cache import Cache
from foretell.cache.job import Job, RowMemory, entering
from foretell.cache.policy import Segment
from foretell.core.model import Computed
from foretell.models.decoder.fields import unread
from foretell.models.decoder.fused import Fused, fits
from foretell.models.decoder.loop import Loop
from foretell.models.decoder.packed import PackedEmbedding, PackedLinear, pack, settle
from foretell.models.executor import Executor, interleave
from foretell.native import library, steps
from foretell.native.packing import FORMATS, GROUP
from foretell.ops.attention import Attention
from foretell.ops.threads import torch_threads

DEVICE = "cpu"
PRIORITY = 3
DTYPE = None
WHOLE = True
HEAD_MULTIPLE = 32  # of which the width of a head must be a multiple
WIDEST_GROUP = 40  # query heads that share a key head
MUCH = 1 << 18  # scores of a head from which on torch is asked for with all threads


def suits(hf: Any, named: bool = False) -> bool:
    """Whether a model is of a build and of number formats that the library computes.

    So it is where the library is not built, too: then `make` says so, as nobody should have the
    slower steps without a word. Who has switched it off knows.
    """
    layers = getattr(hf.get_decoder(), "layers", ())
    packed = isinstance(hf.get_output_embeddings(), PackedLinear)
    return (
        not library.switched_off()
        and (packed or hf.dtype == torch.bfloat16)
        and len(layers) > 0
        and all(map(fits, layers))
        and unread(hf.config.get_text_config(), layers) is None
    )


def prepare(hf: Any) -> None:
    """Packs the weights of a model of bfloat16, where there is a library to read them."""
    packed = isinstance(hf.get_output_embeddings(), PackedLinear)
    if library.available() and not packed and hf.dtype == torch.bfloat16:
        pack(hf, "bfloat16")


def make(
    loop: Loop,
    layout: Layout,
    dtype: torch.dtype,
    vocab: int,
    fallback: Executor | None = None,
) -> Executor:
    """The executor of a model. It leaves nothing to a fallback."""
    return NativeExecutor(loop, layout, dtype, vocab)


class NativeExecutor(Executor):
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
    fallback: Executor | None = None

    def __init__(self, loop: Loop, layout: Layout, dtype: torch.dtype, vocab: int):
        self.library = steps.opened()
        self.loop = loop
        self.layout = layout
        self.dtype = dtype
        self.vocab = vocab
        self.size = 0
        self._check()
        self.width = layout[0][1]
        self.hidden = int(loop.config.hidden_size)
        self.windows = [window or 0 for window in loop.windows]
        self.least_window = min((w for w in self.windows if w), default=0)
        self.cosines = torch.empty(0, self.width // 2)
        self.sines = torch.empty(0, self.width // 2)
        self._rotations(1)
        self.all_layers = np.arange(len(layout), dtype=np.int32)
        self.kept: list[torch.Tensor] = []  # numbers that the library reads where they lie
        # Of shared rows their structure, and the tensors that it points into.
        self.segments: WeakKeyDictionary[Segment, tuple[steps.Segment, Any]] = WeakKeyDictionary()
        self._settle()
        self.model = self._model()

    def _check(self) -> None:
        loop = self.loop
        if not all(type(block) is Fused for block in loop.blocks):
            other = "its layers are of another build than the llama family's"
            raise LookupError(loop.refused or other)
        if any(block.basis is not None for block in loop.blocks):  # type: ignore[attr-defined]
            raise LookupError("its rotated keys are projected to fewer heads")
        if not isinstance(loop.head, PackedLinear):
            raise LookupError(
                "it computes weights of bfloat16, int8 and int4: load it with one of these as dtype"
            )
        if len(set(self.layout)) > 1 or self.layout[0][1] != self.layout[0][2]:
            raise LookupError("its layers have heads of several shapes")
        blocks: Any = loop.blocks
        block = blocks[0]
        if self.layout[0][1] % HEAD_MULTIPLE or block.queries // block.keys > WIDEST_GROUP:
            raise LookupError(f"its heads are no multiple of {HEAD_MULTIPLE} wide, or too many")
        inner = blocks[0].down
        if loop.config.hidden_size % GROUP or inner.in_features % GROUP:
            raise LookupError(f"its layers are no multiple of {GROUP} wide")
        for block in blocks:
            parts = (block.qkv, block.out, block.gate_up, block.down)
            if not all(isinstance(part, PackedLinear) for part in parts):
                raise LookupError("its layers are no multiple of 16 wide")
        if loop.head.packed.outputs != self.vocab:
            raise LookupError(f"its head has {loop.head.packed.outputs} rows, not {self.vocab}")
        if loop.kinds or loop.logit_cap:
            raise LookupError("it caps its logits, or has several rotations")
        _activation(blocks[0].act)

    def _settle(self) -> None:
        """Puts the weights beside each other, in the order in which a step reads them."""
        blocks: Any = self.loop.blocks
        read = [part for b in blocks for part in (b.qkv, b.out, b.gate_up, b.down)]
        shares = [m for layer in self.loop.layers for m in layer.modules()]
        settle(m for m in (*read, self.loop.head, *shares) if isinstance(m, PackedLinear))

    def _model(self) -> steps.Model:
        blocks: Any = self.loop.blocks
        layers = (steps.Layer * len(blocks))()
        for layer, block, window in zip(layers, blocks, self.windows, strict=True):
            layer.before = self._keep(block.before.weight, self.hidden)
            layer.after = self._keep(block.after.weight, self.hidden)
            layer.before_eps = block.before.variance_epsilon
            layer.after_eps = block.after.variance_epsilon
            if block.norms:
                layer.query_norm, layer.key_norm = (
                    self._keep(norm.weight, self.width) for norm in block.norms
                )
                layer.head_eps = block.norms[0].variance_epsilon
            layer.window = window
            layer.qkv = block.qkv.matrix
            layer.out = block.out.matrix
            layer.gate_up = block.gate_up.matrix
            layer.down = block.down.matrix
        first = blocks[0]
        scale = float(self.loop.logit_factor or 1) / float(self.loop.logit_divisor or 1)
        model = steps.Model(
            layers=len(blocks),
            hidden=self.hidden,
            heads=first.queries,
            kv_heads=first.keys,
            width=self.width,
            inner=first.down.in_features,
            activation=_activation(first.act),
            format=FORMATS.index(first.qkv.packed.format),
            scale=first.scale,
            norm_eps=self.loop.norm.variance_epsilon,
            logit_scale=scale,
            norm=self._keep(self.loop.norm.weight, self.hidden),
            layer=layers,
            head=self.loop.head.matrix,
        )
        self.layers = layers  # lives as long as the model that points to it
        return model

    def _keep(self, tensor: torch.Tensor, size: int) -> int:
        wide = tensor.detach().float().contiguous()
        self.kept.append(wide)
        return library.placed(wide, (size,), torch.float32)

    def _rotations(self, needed: int) -> None:
        """Makes the cosines and sines (P, D / 2) reach so many positions."""
        if len(self.cosines) >= needed:
            return
        size = max(needed, min(2 * needed + 256, self.loop.context))
        made = self.loop.rotary(torch.empty(0), torch.arange(size)[None])
        if not isinstance(made, tuple) or any(part.shape != (1, size, self.width) for part in made):
            raise LookupError("its rotation is no table of cosines and sines")
        halves = [part[0].float().chunk(2, -1) for part in made]
        if not all(torch.equal(first, second) for first, second in halves):
            raise LookupError("its rotation differs between the halves of a head")
        self.cosines, self.sines = (first.contiguous() for first, _ in halves)

    def cache(self) -> Cache:
        return Cache(self.layout, torch.bfloat16, torch.device("cpu"))

    def release(self) -> None:
        """Holds nothing but the weights."""

    def __call__(
        self, jobs: Sequence[Job], threads: int, taps: Sequence[int] = ()
    ) -> Computed | None:
        watched = [job for job in jobs if job.watched]
        if watched and len(watched) < len(jobs):
            plain = [job for job in jobs if job not in watched]
            parts = [(group, self._forward(group, threads, taps)) for group in (plain, watched)]
            self.size = sum(computed.width for _, computed in parts)
            whole = interleave(jobs, *parts)
            whole.computed_by = self.name
            return whole
        return self._forward(jobs, threads, taps)

    def _forward(self, jobs: Sequence[Job], threads: int, taps: Sequence[int]) -> Computed:
        """Of jobs all of which a policy watches, or none."""
        nodes = sum(len(job.tokens) for job in jobs)
        rows = []
        first = 0
        for job in jobs:
            rows += [first + row for row in job.rows]
            first += len(job.tokens)
        self._rotations(max(max(job.positions) for job in jobs) + 1)
        states = self._states(jobs)
        wanted = np.array(rows, np.int32)
        tapped = np.array(taps, np.int32)
        layers = self.all_layers
        if jobs[0].layers is not None:
            layers = np.array(jobs[0].layers, np.int32)
        logits = torch.empty(len(rows), self.vocab)
        hidden = torch.empty(len(taps), nodes, self.hidden)
        stored = [job.lay_out() for job in jobs]
        described = [self._describe(job, to) for job, to in zip(jobs, stored, strict=True)]
        step = steps.Step(
            jobs=(steps.Job * len(jobs))(*(part for part, _ in described)),
            job_count=len(jobs),
            nodes=nodes,
            states=library.placed(states, (nodes, self.hidden), torch.float32),
            cosines=self.cosines.data_ptr(),
            sines=self.sines.data_ptr(),
            positions=len(self.cosines),
            layers=layers.ctypes.data,
            layer_count=len(layers),
            rows=wanted.ctypes.data,
            row_count=len(rows),
            logits=logits.data_ptr(),
            taps=tapped.ctypes.data,
            tap_count=len(taps),
            tapped=hidden.data_ptr(),
        )
        count = 0 if jobs[0].watched else self._follows(jobs)
        followed = []
        if count:
            followed = self._follow(step, count, threads)
        elif jobs[0].watched:
            self._watched(step, jobs, states, dict(zip(taps, hidden, strict=True)), threads)
        else:
            self.library.ft_forward(self.model, step, threads)
        for job, to in zip(jobs, stored, strict=True):
            job.take_back(to)
        self.size = nodes
        # Where a part of the layers ran, others are entered with these, and lose no bit by it.
        if jobs[0].layers is None:
            hidden = hidden.to(self.dtype)
        found = dict(zip(taps, hidden, strict=True))
        return Computed(logits, found, width=nodes, followed=followed, forwards=max(1, count))

    def _watched(
        self,
        step: steps.Step,
        jobs: Sequence[Job],
        states: torch.Tensor,
        taps: Mapping[int, torch.Tensor],
        threads: int,
    ) -> None:
        """Computes a step whose attention the policies of the jobs' caches compute; `taps`: where
        tapped states go (nodes, E).
        """
        nodes, heads, width = step.nodes, self.model.heads, self.width
        hidden = states.clone()
        qkv = torch.empty(nodes, (heads + 2 * self.model.kv_heads) * width)
        attended = torch.empty(nodes, heads, width)
        queries = qkv[:, : heads * width].view(nodes, heads, width).transpose(0, 1)
        between = steps.Between(
            hidden=hidden.data_ptr(), qkv=qkv.data_ptr(), attended=attended.data_ptr()
        )
        last = -1  # the layer that ran before
        layers = range(len(self.layout)) if jobs[0].layers is None else jobs[0].layers
        with library.running(threads):
            for layer in (*layers, -1):
                between.after, between.before = last, layer
                self.library.ft_go_between(self.model, step, between, threads)
                entered = len(self.layout) if layer < 0 else layer
                for tap in range(last + 1, entered + 1) if taps else ():
                    if tap in taps:
                        taps[tap][:] = hidden
                if layer >= 0:
                    self._ask(jobs, layer, queries, attended, threads)
                last = layer

    def _ask(
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
        first = 0
        for job in jobs:
            end = first + len(job.tokens)
            rows = job.start + len(job.tokens)
            keys, values = job.cache.k[layer][:, :rows], job.cache.v[layer][:, :rows]
            mask = job.mask(window, torch.bfloat16)
            asked = Attention(layer, q[:, first:end], keys, values, mask, self.model.scale)
            with torch_threads(threads if rows * len(job.tokens) >= MUCH else 1):
                attended[first:end] = job.by_policy(asked)
            first = end

    def _follows(self, jobs: Sequence[Job]) -> int:
        """How many tokens the jobs go on by in the same call."""
        count = min(job.follow for job in jobs)
        embed = self.loop.embed
        if not count or not isinstance(embed, PackedEmbedding):
            return 0
        end = max(max(job.positions) for job in jobs) + count
        padded = embed.head[0].packed.inputs != self.hidden
        if padded or 0 < self.least_window < end or end > self.loop.context:
            return 0
        self._rotations(end)
        return count

    def _follow(
        self, step: steps.Step, count: int, threads: int
    ) -> list[list[tuple[int, float, int]]]:
        """Computes a step and what follows it; returns of each job its Reply's `followed`."""
        jobs = step.job_count
        tokens = torch.empty(count, jobs, dtype=torch.long)
        chances = torch.empty(count, jobs)
        matrix = self.loop.embed.head[0].matrix
        following = steps.Following(
            embeddings=ctypes.pointer(matrix),
            scale=self.loop.scale,
            names=steps.names(self.loop.kept, self.model.head),
            count=count,
            tokens=tokens.data_ptr(),
            chances=chances.data_ptr(),
        )
        step.cosines, step.sines = self.cosines.data_ptr(), self.sines.data_ptr()
        step.positions = len(self.cosines)
        self.library.ft_follow(self.model, step, following, threads)
        pairs = zip(tokens.T.tolist(), chances.T.tolist(), strict=True)
        return [list(zip(*pair, range(-1, count - 1), strict=True)) for pair in pairs]

    def _states(self, jobs: Sequence[Job]) -> torch.Tensor:
        """What enters the first layer (T, E), float32."""
        given = entering(jobs, self._embedded)
        if given is not None:
            return given.float().contiguous()
        return self._embedded([token for job in jobs for token in job.tokens])

    def _embedded(self, tokens: Sequence[int]) -> torch.Tensor:
        ids = torch.tensor(tokens)
        embed = self.loop.embed
        if not isinstance(embed, PackedEmbedding):
            return self.loop.embedded(ids).float().contiguous()
        rows = embed.rows(ids)
        return rows if self.loop.scale == 1 else rows * self.loop.scale

    def _describe(self, job: Job, to: RowMemory) -> tuple[steps.Job, Any]:
        """The library's structure of a job, and what it points to."""
        cache = job.cache
        numbers = job.positions
        new, rows = len(job.tokens), to.start + len(job.tokens)
        windowed = 0 < self.least_window <= max(numbers) and to.common <= to.start
        if windowed:
            numbers = [*numbers, *cache.row_positions(), *job.scratch_positions]
        held = np.array(numbers, np.int32)
        if len(held) != new + windowed * rows:
            raise ValueError(f"{len(held)} positions are not of {new} nodes and {rows} rows")
        seen = None if job.seen is None else job.seen.contiguous()
        segments = (steps.Segment * len(cache.segments))(*map(self._segment, cache.segments))
        part = steps.Job(
            nodes=new,
            start=to.start,
            base=to.common,
            positions=held.ctypes.data,
            seen=steps.seen(seen, new, rows - to.common),
            row_positions=held[new:].ctypes.data if windowed else None,
            **self._stored(to.keys, to.values),
            room=to.keys.shape[2],
            segments=len(segments),
            segment=segments,
        )
        return part, (held, seen, segments)

    def _segment(self, segment: Segment) -> steps.Segment:
        """The library's structure of shared rows."""
        if segment not in self.segments:
            keys, values = _rows_at(segment.k), _rows_at(segment.v)
            if keys.shape[2] != len(segment.tokens):
                raise ValueError(f"{len(segment.tokens)} shared tokens have {keys.shape[2]} rows")
            part = steps.Segment(
                **self._stored(keys, values), start=segment.start, rows=keys.shape[2]
            )
            self.segments[segment] = part, (keys, values)
        return self.segments[segment][0]

    def _stored(self, keys: torch.Tensor, values: torch.Tensor) -> dict[str, int]:
        """Where rows of all layers lie. Raises ValueError where they are not of this model."""
        return steps.stored(keys, values, len(self.layout), self.model.kv_heads, self.width)


def _rows_at(layers: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows (KV, n, D) of every layer as one tensor; a copy where they do not lie evenly."""
    first = layers[0]
    start, storage = first.data_ptr(), first.untyped_storage().data_ptr()
    apart = layers[1].data_ptr() - start if len(layers) > 1 else 0  # in bytes
    strides = (first.stride(0), first.shape[2], 1)
    for layer, rows in enumerate(layers):
        evenly = rows.data_ptr() == start + layer * apart and rows.stride() == strides
        if apart < 0 or not evenly or rows.untyped_storage().data_ptr() != storage:
            return torch.stack(list(layers))
    shape = (len(layers), *first.shape)
    return first.as_strided(shape, (apart // first.element_size(), *strides))


def _activation(act: Any) -> int:
    """The library's number of an activation. Raises LookupError."""
    if isinstance(act, (nn.SiLU, type(ACT2FN["silu"]))):
        return steps.ACTIVATIONS.index("silu")
    if isinstance(act, type(ACT2FN["gelu_pytorch_tanh"])):
        return steps.ACTIVATIONS.index("gelu_tanh")
    raise LookupError(f"it has no activation {type(act).__name__}")
