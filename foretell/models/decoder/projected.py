"""Models with fewer key heads in their caches than their layers make: rotated keys are projected.

`foretell train kv-heads` writes them. A layer makes keys of all heads, as it did before, and
rotates them; then each group of heads is projected on a basis, its queries as well, and what is
cached is one key for a group (models/decoder/head_merging.py). A basis does not commute with
rotations, so it is no part of a matrix before them, and the projected keys cannot be moved to other
positions. All else is the family's own: values and outputs have the projection in their matrices.

In config.json `num_key_value_heads` is what caches hold, and the field `key_projection` says how
many heads the keys have before.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from foretell.models.decoder.head_merging import FIELD, project_heads


class ProjectedAttention(nn.Module):
    """Attention with projected keys, in the place of a family's own module `stock` of a layer,
    whose parts it takes over.

    `key_basis` (G, t, D, D): see models/decoder/head_merging.py, of `heads` key heads.
    """

    is_causal = True

    def __init__(self, stock: Any, key_heads: int):
        super().__init__()
        self.config, self.layer_idx = stock.config, stock.layer_idx
        self.head_dim, self.scaling = stock.head_dim, stock.scaling
        cached_heads = stock.k_proj.out_features // stock.head_dim
        self.num_key_value_groups = stock.q_proj.out_features // stock.k_proj.out_features
        self.sliding_window = window_of(stock)
        self.q_proj, self.v_proj, self.o_proj = stock.q_proj, stock.v_proj, stock.o_proj
        inputs, has_bias = stock.k_proj.in_features, stock.k_proj.bias is not None
        self.k_proj = nn.Linear(inputs, key_heads * self.head_dim, bias=has_bias)
        if hasattr(stock, "q_norm"):
            self.q_norm, self.k_norm = stock.q_norm, stock.k_norm
        square = (self.head_dim, self.head_dim)
        self.key_basis = nn.Parameter(torch.empty(cached_heads, key_heads // cached_heads, *square))
        family_module: Any = sys.modules[type(stock).__module__]
        self.rotate = family_module.apply_rotary_pos_emb

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        cache: Any = None,  # what transformers calls the same from 5.24 on
        **extra_inputs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Computes as the family's does: hidden (B, n, E) -> (B, n, E), and what attention gives
        besides.
        """
        batch_shape = hidden_states.shape[:-1]
        head_shape = (*batch_shape, -1, self.head_dim)
        q, k, v = (
            linear(hidden_states).view(head_shape)
            for linear in (self.q_proj, self.k_proj, self.v_proj)
        )
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.rotate(q.transpose(1, 2), k.transpose(1, 2), *position_embeddings)
        q, k = project_heads(q, k, self.key_basis)
        v = v.transpose(1, 2)
        key_cache = past_key_values if cache is None else cache
        if key_cache is not None:
            k, v = key_cache.update(k, v, self.layer_idx)
        attention_kind = self.config._attn_implementation
        attend_function: Any = ALL_ATTENTION_FUNCTIONS.get_interface(attention_kind, None)
        output, weights = attend_function(
            self, q, k, v, attention_mask, scaling=self.scaling,
            sliding_window=self.sliding_window, **extra_inputs,
        )  # fmt: skip
        return self.o_proj(output.reshape(*batch_shape, -1)), weights


def window_of(attention: Any) -> int | None:
    """The positions that a family's attention sees back; None: all."""
    if hasattr(attention, "sliding_window"):
        window: int | None = attention.sliding_window
        return window
    return getattr(attention.config, "sliding_window", None)


@cache
def projected_class(model_class: Any) -> Any:
    """Makes the class of transformers' models `model_class` with such attention, by what a
    configuration says.

    Its instances raise ValueError where that does not add up.
    """

    def build(self: Any, config: Any, *extra_args: Any, **named_args: Any) -> None:
        model_class.__init__(self, config, *extra_args, **named_args)
        replace_attention(self)

    return type(
        model_class.__name__,
        (model_class,),
        {"__init__": build, "__module__": model_class.__module__},
    )


def replace_attention(hf_model: Any) -> None:
    """Puts such attention into every layer of a model. Raises ValueError."""
    config = hf_model.config
    projection, cached_heads = getattr(config, FIELD), config.num_key_value_heads
    key_heads = projection.get("heads") if isinstance(projection, dict) else None
    if not isinstance(key_heads, int) or key_heads < cached_heads or key_heads % cached_heads:
        raise ValueError(f"{FIELD} in config.json must give a multiple of {cached_heads} heads")
    for layer in hf_model.get_decoder().layers:
        layer.self_attn = ProjectedAttention(layer.self_attn, key_heads)
