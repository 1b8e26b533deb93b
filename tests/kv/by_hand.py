"""A llama whose layers are called one by one, on any rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from tests.models.decoder.families import tiny


class ByHand:
    """Positions are given with the tokens; what sees what is given as bool (n, rows)."""

    def __init__(self, hf: PreTrainedModel | None = None):
        self.hf: Any = hf or tiny("llama", dtype=torch.float64)
        self.layers = len(self.hf.model.layers)

    def embed(self, tokens: Sequence[int]) -> torch.Tensor:
        embedded: torch.Tensor = self.hf.model.embed_tokens(torch.tensor(tokens))
        return embedded

    def rows(
        self, layer: int, h: torch.Tensor, places: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries (H, n, D), keys and values (KV, n, D) of states (n, E)."""
        module = self.hf.model.layers[layer]
        part = module.self_attn
        x = module.input_layernorm(h)
        q, k, v = (
            project(x).unflatten(-1, (-1, part.head_dim)).transpose(0, 1)
            for project in (part.q_proj, part.k_proj, part.v_proj)
        )
        cosines, sines = self.hf.model.rotary_emb(x, torch.tensor([list(places)]))
        q, k = (
            part * cosines[0]
            + torch.cat([-part.chunk(2, -1)[1], part.chunk(2, -1)[0]], -1) * sines[0]
            for part in (q, k)
        )
        return q, k, v

    def through(
        self,
        layer: int,
        h: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        seen: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """States (n, E) after a layer, and the weights (H, n, rows) that queries gave to keys."""
        module = self.hf.model.layers[layer]
        times = len(q) // len(k)
        keys, values = k.repeat_interleave(times, 0), v.repeat_interleave(times, 0)
        scores = q @ keys.transpose(1, 2) * module.self_attn.head_dim**-0.5
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        mixed = (weights @ values).transpose(0, 1).flatten(1)
        h = h + module.self_attn.o_proj(mixed)
        return h + module.mlp(module.post_attention_layernorm(h)), weights

    def likeliest(self, h: torch.Tensor) -> int:
        """The token that follows a state (E,)."""
        return int(self.hf.lm_head(self.hf.model.norm(h)).argmax())


def before(count: int) -> torch.Tensor:
    """A chain: each sees itself and what is before it."""
    return torch.ones(count, count, dtype=torch.bool).tril()
