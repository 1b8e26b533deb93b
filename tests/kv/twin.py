"""Cache policies by plain loops over a model of transformers, one token at a time.

Beside each: the rows that the engine holds of the same text.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from foretell.core.request import Request
from foretell.core.types import Sampling
from foretell.engine.engine import Engine
from foretell.kv.base import KV
from foretell.strategies.plain import Plain
from tests.kv.policies import target
from tests.models.decoder.families import tiny

# Of each layer keys and values (KV, rows, D), and the weights (H, new nodes, rows) of a forward.
Rows = list[list[torch.Tensor]]
Held = dict[int, Rows]  # by the number of tokens taken in


class Twin:
    """The rule of a policy. `change` may replace the rows of each layer after each forward."""

    def change(self, length: int, prompt: int, rows: Rows, weights: list[torch.Tensor]) -> None:
        raise NotImplementedError


@cache
def plain_model() -> PreTrainedModel:
    """The target of these tests as transformers runs it, in float64 but for its softmax."""
    model = tiny("llama", dtype=torch.float64)
    model.set_attn_implementation("eager")
    return model


def by_loops(twin: Twin, prompt: Sequence[int], output: Sequence[int]) -> Held:
    """The rows that a policy leaves of the prompt and of every longer part of the text."""
    cache = DynamicCache()
    held: Held = {}
    length = 0
    for piece in (list(prompt), *([token] for token in output)):
        places = torch.arange(length, length + len(piece))[None]
        with torch.inference_mode():
            answer = plain_model()(
                torch.tensor([piece]),
                past_key_values=cache,
                position_ids=places,
                output_attentions=True,
            )
        length += len(piece)
        rows = [[layer.keys[0], layer.values[0]] for layer in cache.layers]
        twin.change(length, len(prompt), rows, [weights[0] for weights in answer.attentions])
        for layer, (keys, values) in zip(cache.layers, rows, strict=True):
            layer.keys, layer.values = keys[None], values[None]
        held[length] = [list(pair) for pair in rows]
    return held


def by_engine(
    kv: KV | None, prompt: Sequence[int], tokens: int, policies: list[Any] | None = None
) -> tuple[list[int], Held]:
    """The greedy text, and the rows held of it; of each such length also a copy of its policy."""
    model = target(dtype=torch.float64)
    engine = Engine({"target": model})
    policy = None if kv is None else kv.build_policy(model)
    sampling = Sampling(temperature=0.0, max_new_tokens=tokens)
    live = engine.add(Request(list(prompt), Plain(), sampling, policy=policy))
    held: Held = {}
    while engine.live:
        engine.step()
        cache = live.caches.get(("target", 0))
        if cache is None or cache.length < len(prompt):
            continue
        held[cache.length] = [
            [part[layer][:, : cache.base].clone() for part in (cache.k, cache.v)]
            for layer in range(len(cache.layout))
        ]
        if policies is not None and cache.policy is not None:
            policies.append((cache.length, cache.policy.fork()))
    return live.ctx.output, held


def same(ours: Held, twins: Held) -> bool:
    """Whether the rows are the same at every length that both know, nine of them at least."""
    lengths = sorted(ours.keys() & twins.keys())
    assert len(lengths) > 8
    return all(
        mine.shape == other.shape and torch.allclose(mine, other, atol=1e-5)
        for length in lengths
        for layer, twin in zip(ours[length], twins[length], strict=True)
        for mine, other in zip(layer, twin, strict=True)
    )


def grouped(weights: torch.Tensor, heads: int) -> torch.Tensor:
    """Weights (H, n, rows) as the means of the query heads that share a key head (KV, n, rows)."""
    times = len(weights) // heads
    return torch.stack([weights[h * times : (h + 1) * times].mean(0) for h in range(heads)])
