"""A decoder whose logits are the same to the last bit in any tree, batch and chunking, on a CPU.

A sum of floating-point numbers depends on its order, and the order on how many rows a product has.
So nothing is summed here whose order could matter:

- Linear layers have weights of 8 bits (int8.py), and sum integers.
- Attention rounds what it sums to whole multiples of a unit that only the node's own path
  determines, so small in number that every sum fits into the 53 bits of a double: exact, whatever
  the order, the padding or the rows behind a mask, which add zeros. What is lost is about 2**-22 of
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
import random
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from foretell.core.cache import Cache
from foretell.core.model import STEP, Model
from foretell.core.tree import TokenTree
from foretell.core.types import Ask
from foretell.errors import Unsupported
from foretell.families.decoder import Decoder
from foretell.families.fused import Fused, blocks
from foretell.families.int8 import Linear8
from foretell.families.loop import Block, Loop
from foretell.memory.buffers import Layout
from foretell.memory.job import Job

PIECE = 16_384  # elements that torch leaves to one thread
SCORES = 131_072  # numbers of attention that are worked on at a time
LENGTH = 131_072  # rows whose weights are summed exactly
VECTOR = 64  # elements: a multiple of what a vectorised loop takes at once, in any number format
ROTARY = 256  # positions whose rotations are computed together
WIDEST = 16_384  # of a norm: longer rows torch sums with several threads
HEAD = 512  # numbers of a key: as many products are summed exactly


def in_pieces(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """An elementwise function of x, with each element's result independent of its place and of the
    others.
    """
    flat = x.reshape(-1)
    if rest := -len(flat) % VECTOR:
        flat = F.pad(flat, (0, rest))
    parts = [function(part) for part in flat.split(PIECE)]
    out = torch.cat(parts) if len(parts) > 1 else parts[0]
    return (out[: x.numel()] if rest else out).view(x.shape)


def exp2(x: torch.Tensor) -> torch.Tensor:
    return in_pieces(torch.exp2, x)


def tanh(x: torch.Tensor) -> torch.Tensor:
    """x float64."""
    return 1 - 2 / (exp2(x * (2 * math.log2(math.e))) + 1)


def grid(x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """x rounded to multiples of half a last place of `shift`, which is at least twice as large.
    Changes x.
    """
    return x.add_(shift).sub_(shift)


class ExactJob(Job):
    """A job whose nodes' results depend on their own paths alone. Rows are those of ExactCache."""

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,  # type: ignore[override]
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
        at: int | None = None,
    ) -> torch.Tensor:
        """q (H, n, D), k, v (KV, n, D) -> (n, H, D); `at`: of the new node `at` only, n is 1."""
        first, new, (heads, width) = self.start + (at or 0), q.shape[1], (len(k), v.shape[-1])
        keys, values = self.cache.k[layer], self.cache.v[layer]
        # Keys and queries become numbers of 22 bits beside their row's largest: products of 44, and
        # sums of 53.
        wide = k.double()
        keys[:, first : first + new] = grid(wide, wide.abs().amax(-1, keepdim=True) * 2.0**32)
        wide = v.double()
        size = wide.abs().amax(-1, keepdim=True).clamp_min_(2.0**-500)
        # Values are stored beside their row's largest, which is the last column: 22 bits too.
        values[:, first : first + new, :width] = (wide / size).add_(1.5 * 2**31).sub_(1.5 * 2**31)
        values[:, first : first + new, width:] = size
        wide = q.double().mul_(scale if softcap is not None else scale * math.log2(math.e))
        wide = grid(wide, wide.abs().amax(-1, keepdim=True) * 2.0**32).view(
            heads, -1, new, q.shape[-1]
        )
        low, mask = self.hidden(window, at)
        end = self.start + len(self.tokens)
        sizes = values[:, : end + -end % VECTOR, width].contiguous()
        few = max(
            1, SCORES // (len(q) * end)
        )  # nodes at a time: as many as the processor's caches hold
        outs = [
            self._attend(
                wide[:, :, i : i + few],
                keys,
                values,
                sizes,
                end,
                low,
                None if mask is None else mask[i : i + few],
                softcap,
                sinks,
            )
            for i in range(0, new, few)
        ]
        out = outs[0] if len(outs) == 1 else torch.cat(outs, 2)
        return out.to(q.dtype).view(-1, new, width).transpose(0, 1)

    @staticmethod
    def _attend(
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        sizes: torch.Tensor,
        end: int,
        low: int,
        mask: torch.Tensor | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """q (KV, G, n, D) over the first `end` rows, of which `mask` (n, end - low) is about those
        from `low` on.

        `sizes` (KV, rows) of the values; -> (KV, G, n, D). Rows from `end` on only make vectors
        whole.
        """
        heads, _, new, size = q.shape
        long, width = sizes.shape[-1], values.shape[-1] - 1
        scores = torch.bmm(q.reshape(heads, -1, size), keys[:, :long].transpose(1, 2))
        if softcap is not None:
            scores = tanh(scores.div_(softcap)).mul_(softcap * math.log2(math.e))
        scores = scores.view(heads, -1, new, long)
        scores[..., end:] = -torch.inf
        if mask is None:
            largest = sizes[:, :end].amax(-1)[:, None]  # (KV, 1)
        else:
            scores[..., low:end] += mask
            largest = (sizes[:, None, low:end] + mask).amax(-1)  # (KV, n)
            if low:
                largest = torch.maximum(largest, sizes[:, :low].amax(-1)[:, None])
        top = scores.amax(-1, keepdim=True)
        if sinks is not None:
            sink = (sinks.double() * math.log2(math.e)).view(heads, -1, 1, 1)
            top = torch.maximum(top, sink)
        scores.sub_(top)
        for part in scores.view(-1).split(PIECE):  # whole vectors, since `long` is
            part.exp2_()
        # Powers in multiples of 2**-36: a row of up to 2**17 of them is summed exactly.
        powers = scores.add_(1.5 * 2**16).sub_(1.5 * 2**16)
        total = powers.sum(-1, keepdim=True)
        if sinks is not None:
            total = total + exp2(sink - top)
        # What all rows can add up to, in 31 bits; with a value's 22 that makes 53.
        weights = powers.mul_(sizes[:, None, None])
        weights = grid(weights, largest[:, None, :, None] * total * 2.0**23)
        out = torch.bmm(weights.view(heads, -1, long), values[:, :long, :width])
        return out.view(heads, -1, new, width).div_(total)

    def hidden(self, window: int | None, at: int | None) -> tuple[int, torch.Tensor | None]:
        """The first row that a node may not see, and from there on 0 or -inf (n, rows); None: each
        sees all.
        """
        if window is not None and self.columns and max(self.columns) < window:
            window = None
        mask = self.mask(window, torch.float64)
        low = 0 if window is not None else self.cache.length
        if mask is not None:
            mask = mask[:, low:] if at is None else mask[at : at + 1, low:]
        return low, mask


class One:
    """One new node of a job, for a forward of one row."""

    def __init__(self, job: ExactJob, at: int):
        self.job, self.at = job, at

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
    ) -> torch.Tensor:
        return self.job.attend(layer, q, k, v, scale, window, softcap, sinks, self.at)


class ExactCache(Cache):
    """Keys, and values beside each row's largest, which is one more column; float64, so four times
    as large as bf16.
    """

    def __init__(
        self, layout: Layout, dtype: torch.dtype, device: torch.device, capacity: int = 256
    ):
        wider = tuple((heads, key, value + 1) for heads, key, value in layout)
        super().__init__(wider, torch.float64, device, -(-capacity // VECTOR) * VECTOR)

    def prepare(self, ask: Ask, tokens: Sequence[int], chunk: int) -> tuple[Job, bool]:
        job, done = super().prepare(ask, tokens, chunk)
        return ExactJob(*(getattr(job, f.name) for f in fields(Job))), done


class ExactFused(Fused):
    """A layer of the llama family: the fused one, with operations that do not look at the number of
    rows.
    """

    fills = False

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


def _single(block: Block) -> Block:
    """The block row by row. Each row is memory of its own, since some products look at where it
    begins.
    """

    def rows(h: torch.Tensor, rotary: Any, positions: torch.Tensor) -> torch.Tensor:
        outs, i = [], 0
        jobs: Any = STEP.get()
        for job in jobs:
            nodes = (
                [job] if isinstance(job, One) else [One(job, at) for at in range(len(job.tokens))]
            )
            for node in nodes:
                token = STEP.set([node])  # type: ignore[list-item]
                try:
                    part = slice(i, i + 1)
                    outs.append(
                        block(
                            h[:, part].clone(),
                            tuple(r[:, part].clone() for r in rotary),
                            positions[:, part].clone(),
                        )
                    )
                finally:
                    STEP.reset(token)
                i += 1
        return torch.cat(outs, 1)

    return rows


class ExactDecoder(Decoder):
    """A Decoder on which logits are equal to the last bit. Linear layers must be quantized. Raises
    Unsupported.
    """

    exact_bits = True

    def __init__(self, hf: PreTrainedModel, name: str = "model"):
        if hf.device.type != "cpu":
            raise Unsupported.missing("exact_bits=True", name, "a CPU", "use device='cpu'")
        super().__init__(hf, name, self._replace)
        self.context = min(self.context, LENGTH)
        if self.loop is None:
            raise Unsupported.missing(
                "exact_bits=True",
                self.name,
                f"layers whose loop is ours, and those of family "
                f"{self.config.model_type} run whole",
                "leave exact_bits out",
            )
        if not self.fused:
            self.loop.blocks = [_single(block) for block in self.loop.blocks]
            norm = self.loop.norm
            self.loop.norm = lambda h: torch.cat([norm(row.clone()) for row in h.split(1)])

    def _replace(self, loop: Loop) -> list[Block] | None:
        if not isinstance(loop.head, Linear8):
            raise Unsupported.missing(
                "exact_bits=True",
                self.name,
                "linear layers of 8 bits",
                "load it with foretell.load",
            )
        cap, tables = loop.cap, loop.tables

        def table(h: torch.Tensor, needed: int, *kind: str) -> tuple[torch.Tensor, ...]:
            """As Loop.table; computed in parts of one size, so that it does not depend on when it
            was needed.
            """
            known = tables[kind][0].shape[1] if kind in tables else 0
            while known < needed:
                # Never beyond the context, where some kinds of rotation change for all positions.
                part = torch.arange(known, known + ROTARY).clamp_(max=self.context - 1)
                made = loop.rotary(h, part[None], *kind)
                if not (
                    isinstance(made, tuple)
                    and all(m.ndim == 3 and m.shape[1] == ROTARY for m in made)
                ):
                    raise Unsupported.missing(
                        "exact_bits=True",
                        self.name,
                        "rotations as cosines and sines",
                        "leave exact_bits out",
                    )
                tables[kind] = (
                    tuple(torch.cat(p, 1) for p in zip(tables[kind], made, strict=True))
                    if known
                    else made
                )
                known += ROTARY
            return tables[kind]

        def logits(h: torch.Tensor) -> torch.Tensor:
            loop.cap = None
            try:
                out = Loop.logits(loop, h)
            finally:
                loop.cap = cap
            return out if not cap else tanh(out.double() / cap).mul_(cap).to(out.dtype)

        tables.clear()
        loop.table, loop.logits = table, logits  # type: ignore[method-assign]
        if max(s[1] for s in self.layout) > HEAD:
            raise Unsupported.missing(
                "exact_bits=True", self.name, f"heads of at most {HEAD}", "leave exact_bits out"
            )
        if self.config.hidden_size > WIDEST:
            return None
        fused = blocks(loop, ExactFused)
        if fused is not None:
            norm = loop.norm
            loop.norm = lambda h: ExactFused.norm(norm, h)
        return fused

    def cache(self) -> Cache:
        return ExactCache(self.layout, self.dtype, self.device)


@torch.inference_mode()
def compare(model: Model, steps: int, seed: int = 0, longest: int = 160) -> tuple[int, str]:
    """How many random steps give plain steps' logits to the last bit, and in words the first
    difference.

    Plain steps, one token a forward, write down a random text. A random step takes a part of it in
    by chunks, puts a tree behind it with the text's own continuation somewhere among random
    branches, alone or beside a step of another text, sometimes on a fork; the rows of the
    continuation and of one random branch are compared with plain steps'.
    """
    rng, same, first = random.Random(seed), 0, ""
    longest = min(longest, model.context - 16)

    def one(cache: Cache, tokens: Sequence[int]) -> torch.Tensor:
        job, done = cache.prepare(Ask(TokenTree(tokens[-1])), tokens, 1)
        while not done:
            model.forward([job])
            job, done = cache.prepare(Ask(TokenTree(tokens[-1])), tokens, 1)
        return model.forward([job])[0].logits[0]

    for step in range(steps):
        if step % 25 == 0:  # two texts at a time
            texts, plain, caches = [], [], []
            for _ in range(2):
                text = [
                    rng.randrange(model.vocab) for _ in range(rng.randint(longest // 2, longest))
                ]
                cache = model.cache()
                texts.append(text)
                plain.append([one(cache, text[: i + 1]) for i in range(len(text))])
            caches = [model.cache(), model.cache()]
        jobs, checks, batch = [], [], rng.sample(range(2), rng.randint(1, 2))
        for which in batch:
            text, chunk = texts[which], rng.choice((1, 3, 7, 16, 50, 512))
            cut = rng.randint(2, len(text) - 10)
            # A cache that has taken in less goes on from there; one that has more starts afresh.
            cache = (
                caches[which]
                if caches[which].length < cut and rng.random() < 0.7
                else model.cache()
            )
            if rng.random() < 0.3:
                cache = cache.fork()
            caches[which] = cache
            tree = TokenTree(text[cut - 1])
            parent, path = 0, [0]
            for token in text[cut : cut + rng.randint(0, 8)]:
                for _ in range(rng.randint(0, 3)):  # branches before and between
                    tree.add(rng.randrange(len(tree)), rng.randrange(model.vocab))
                parent = tree.add(parent, token)
                path.append(parent)
            ask = Ask(tree)
            job, done = cache.prepare(ask, text[:cut], chunk)
            while not done:
                model.forward([job])
                job, done = cache.prepare(ask, text[:cut], chunk)
            jobs.append(job)
            checks.append((which, cut, tree, path))
        good = True
        for reply, (which, cut, tree, path) in zip(model.forward(jobs), checks, strict=True):
            # Nodes that were there already are not computed again.
            wanted = [
                (n, plain[which][cut - 1 + depth])
                for depth, n in enumerate(path)
                if n in reply.nodes
            ]
            other = rng.choice(reply.nodes)
            cache = model.cache()
            job, _ = cache.prepare(Ask(TokenTree(texts[which][cut - 1])), texts[which][:cut], 512)
            model.forward([job])
            wanted.append((other, one(cache, [*texts[which][:cut], *tree.tokens_to(other)])))
            for node, row in wanted:
                mine = reply.logits[reply.nodes.index(node)]
                if not torch.equal(mine, row):
                    good = False
                    first = first or (
                        f"step {step}, node {node} of {len(tree)} behind {cut} tokens: "
                        f"{int((mine != row).sum())} of {len(row)} logits differ, by at most "
                        f"{float((mine - row).abs().max()):.2g}"
                    )
        same += good
    return same, first
