"""A llama that reads one token at a time, with its rows in lists, and evicts as it is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from foretell.core.request import Request
from foretell.core.types import Sampling
from foretell.engine.engine import Engine
from foretell.kv.base import KV
from foretell.strategies.plain import Plain
from tests.kv.policies import target


@dataclass
class Row:
    """Of one key head. What it got of each token is the mean over the heads that share it."""

    place: int  # in the text
    key: torch.Tensor  # (D,), not turned
    value: torch.Tensor  # (D,)
    newest: float = 0.0  # what it got of the newest token
    got: float = 0.0  # of all that were watched
    seen: int = 0  # how many that were


class LoopLlama:
    """`slots`: rows stand at their places in the list, else at their tokens' in the text."""

    def __init__(self, hf: PreTrainedModel, slots: bool):
        self.hf: Any = hf
        self.slots = slots
        self.length = 0
        self.heads = hf.config.num_key_value_heads
        self.rows: list[list[list[Row]]] = [
            [[] for _ in range(self.heads)] for _ in self.hf.model.layers
        ]

    def turned(self, x: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
        """(n, D)."""
        cosines, sines = self.hf.model.rotary_emb(x, torch.tensor([list(positions)]))
        low, high = x.chunk(2, -1)
        return x * cosines[0] + torch.cat([-high, low], -1) * sines[0]

    def positions(self, rows: Sequence[Row]) -> list[int]:
        return [*range(len(rows))] if self.slots else [row.place for row in rows]

    def keys(self, layer: int, head: int) -> torch.Tensor:
        """As a cache has them (n, D)."""
        rows = self.rows[layer][head]
        return self.turned(torch.stack([row.key for row in rows]), self.positions(rows))

    def read(self, token: int, watched: bool = True) -> int:
        """Takes a token in; the one that is likeliest to follow."""
        h = self.hf.model.embed_tokens(torch.tensor([token]))
        for number, layer in enumerate(self.hf.model.layers):
            h = h + self._attention(number, layer.input_layernorm(h), layer.self_attn, watched)
            h = h + layer.mlp(layer.post_attention_layernorm(h))
        self.length += 1
        return int(self.hf.lm_head(self.hf.model.norm(h)).argmax())

    def _attention(self, number: int, x: torch.Tensor, part: Any, watched: bool) -> torch.Tensor:
        shares = part.num_key_value_groups
        queries = part.q_proj(x).view(self.heads, shares, -1)
        new_keys, new_values = (f(x).view(self.heads, -1) for f in (part.k_proj, part.v_proj))
        mixed = []
        for head, rows in enumerate(self.rows[number]):
            rows.append(Row(self.length, new_keys[head], new_values[head]))
            here = self.positions(rows)[-1]
            scores = self.turned(queries[head], [here] * shares) @ self.keys(number, head).T
            weights = (scores * part.head_dim**-0.5).softmax(-1)  # (heads that share, n)
            mixed.append((weights @ torch.stack([row.value for row in rows])).flatten())
            for row, weight in zip(rows, weights.mean(0).tolist(), strict=True):
                row.newest = weight
                if watched:
                    row.got += weight
                    row.seen += 1
        return part.o_proj(torch.cat(mixed)[None])  # type: ignore[no-any-return]


Evict = Callable[[LoopLlama], None]  # takes rows away where there are too many


@torch.inference_mode()
def greedy(
    loop: LoopLlama, prompt: Sequence[int], new: int, evict: Evict, watch: int = 0
) -> list[int]:
    """A text of so many tokens; the last one is not read.

    It may evict from after the prompt on. Tokens before place `watch` are not watched.
    """
    text = list(prompt)
    while True:
        following = loop.read(text[loop.length], loop.length >= watch)
        if loop.length < len(prompt):
            continue
        text.append(following)
        if len(text) == len(prompt) + new:
            return text[len(prompt) :]
        evict(loop)


def check(
    kv: KV, slots: bool, evict: Evict, prompt: Sequence[int], new: int, watch: int = 0
) -> LoopLlama:
    """The policy writes the loop's text, and holds the loop's rows in the end.

    In float64, but for the angles, which the family has in float32.
    """
    model = target("llama", torch.float64)
    loop = LoopLlama(model.hf, slots)
    expected = greedy(loop, prompt, new, evict, watch)
    engine = Engine({"target": model})
    sampling = Sampling(temperature=0.0, max_new_tokens=new)
    live = engine.add(Request(list(prompt), Plain(), sampling, policy=kv.build_policy(model)))
    held: list[Any] = []
    while engine.live:
        engine.step()
        if ("target", 0) in live.caches and live.caches["target", 0].length:
            cache = live.caches["target", 0]
            held = [part[:, : cache.base].clone() for part in (*cache.k, *cache.v)]
    assert live.error is None and live.ctx.output == expected
    for layer, heads in enumerate(loop.rows):
        for head, rows in enumerate(heads):
            # A cache lacks the last token that was read.
            keys, values = held[layer][head], held[len(loop.rows) + layer][head]
            want = torch.stack([row.value for row in rows])
            assert torch.allclose(values, want[: len(values)], atol=1e-4)
            assert torch.allclose(keys, loop.keys(layer, head)[: len(keys)], atol=1e-4)
            assert len(rows) - 1 == len(values)
    return loop
