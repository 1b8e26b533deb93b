"""The published rules by which rows of a canvas are kept, written down plainly over llama's layers:
one list of rows a layer, no planner, no cache of ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.functional import silu

MASK = 95  # of the models that it is asked about
Rule = Iterator[tuple[list[int], list[int] | None, list[int]]]


class Rows:
    """A llama of float64 whose keys and values of each position are those computed last."""

    def __init__(self, hf: Any, length: int):
        self.hf, self.c = hf, hf.config
        shape = (self.c.num_key_value_heads, length, self.c.head_dim)
        layers = range(self.c.num_hidden_layers)
        self.keys = [torch.full(shape, math.nan, dtype=torch.float64) for _ in layers]
        self.values = [part.clone() for part in self.keys]

    def turned(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        steps = torch.arange(half, dtype=torch.float64) / half
        angles = places[:, None] * self.c.rope_parameters["rope_theta"] ** -steps
        a, b = x[..., :half], x[..., half:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def logits(
        self, canvas: Sequence[int], computed: Sequence[int], read: Sequence[int] | None
    ) -> dict[int, torch.Tensor]:
        places, width = torch.tensor(computed), self.c.head_dim
        seen = torch.arange(len(canvas)) if read is None else torch.tensor(read)
        h = self.hf.model.embed_tokens.weight[torch.tensor([canvas[place] for place in computed])]
        for number, layer in enumerate(self.hf.model.layers):
            x, own = layer.input_layernorm(h), layer.self_attn
            q, k, v = (
                part(x).view(len(computed), -1, width).transpose(0, 1)
                for part in (own.q_proj, own.k_proj, own.v_proj)
            )
            self.keys[number][:, places] = self.turned(k, places)
            self.values[number][:, places] = v
            times = len(q) // len(k)
            keys, values = (
                part[number][:, seen].repeat_interleave(times, 0)
                for part in (self.keys, self.values)
            )
            scores = self.turned(q, places) @ keys.transpose(1, 2) / math.sqrt(width)
            out = (scores.softmax(-1) @ values).transpose(0, 1).reshape(len(computed), -1)
            h = h + own.o_proj(out)
            x, own = layer.post_attention_layernorm(h), layer.mlp
            h = h + own.down_proj(silu(own.gate_proj(x)) * own.up_proj(x))
        rows = self.hf.lm_head(self.hf.model.norm(h))
        rows[:, MASK] = -torch.inf
        return dict(zip(computed, rows, strict=True))


class Canvas(list[int]):
    """Tokens and masks after a prompt."""

    def __init__(self, prompt: Sequence[int], masks: int):
        super().__init__([*prompt, *[MASK] * masks])
        self.first = len(prompt)

    @property
    def masked(self) -> list[int]:
        return [place for place, token in enumerate(self) if token == MASK]


def dkv(canvas: Canvas, start: int, end: int, every: int) -> Rule:
    """dKV-Cache-Decode, of a block (its generate function's loop over steps)."""
    before: set[int] = set()
    now: set[int] = set()
    step = 0
    while wanted := [place for place in canvas.masked if start <= place < end]:
        kept: set[int] = set() if step <= 1 or step % every == 0 else before
        yield [place for place in range(len(canvas)) if place not in kept], None, wanted
        before, now = now, set(range(len(canvas))) - set(canvas.masked)
        step += 1


def fast(canvas: Canvas, start: int, end: int, whole: bool) -> Rule:
    """Fast-dLLM, of a block, which is computed with what follows it (`whole`) or alone."""
    last = len(canvas) if whole else end
    computed = range(len(canvas))
    while wanted := [place for place in canvas.masked if start <= place < end]:
        yield [*computed], None, wanted
        computed = range(start, last)


def window(canvas: Canvas, start: int, end: int, active: int, window: int, refresh: int) -> Rule:
    """Window-Diffusion, of LLaDA's kind of model; the block is the whole canvas."""
    while began := canvas.masked:
        yield [*range(len(canvas))], None, began
        far = set(canvas.masked[window:])
        read = [place for place in range(len(canvas)) if place not in far]
        for _ in range(refresh - 1):
            near = [place for place in canvas.masked if place not in far][:active]
            if not near:
                break
            committed = {*began} - {*canvas.masked}
            yield sorted({*near, *committed}), read, near


@torch.inference_mode()
def filled(
    hf: Any, prompt: Sequence[int], masks: int, block: int, rule: Callable[..., Rule], **given: Any
) -> list[int]:
    """The tokens after a prompt; one is committed a forward, the surest."""
    canvas = Canvas(prompt, masks)
    rows = Rows(hf, len(canvas))
    for start in range(canvas.first, len(canvas), block):
        end = min(start + block, len(canvas))
        for computed, read, wanted in rule(canvas, start, end, **given):
            found = rows.logits(canvas, computed, read)
            chances = {place: float(found[place].softmax(-1).max()) for place in wanted}
            best = max(wanted, key=lambda place: (chances[place], -place))
            canvas[best] = int(found[best].argmax())
    return canvas[canvas.first :]
