"""A decoder layer as transformers computes it for a family, in the place of `Layer`: for heads that
were made together with their target.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
)

from foretell.cache.buffers import Shape
from foretell.drafters.heads.networks.layers import Attend
from foretell.errors import BadConfig, first_message_line
from foretell.models.decoder.loop import use_attention

ATTENTION = "foretell-head"
ATTEND: ContextVar[Attend] = ContextVar("foretell_head_attend")  # of the layer that runs


def _attend_in_head(
    module: nn.Module,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """q (B, H, n, D), k and v (B, KV, n, D) -> (B, n, H, D)."""
    for name in ("sliding_window", "softcap", "s_aux"):
        if options.get(name) is not None:
            raise LookupError(f"its layer attends with {name}")
    if scaling is not None:  # heads divide by the root of the width themselves
        q = q * (scaling * q.shape[-1] ** 0.5)
    return ATTEND.get()(q, k, v), None


AttentionInterface.register(ATTENTION, _attend_in_head)
AttentionMaskInterface.register(ATTENTION, lambda *args, **kwargs: None)


class Found(Exception):
    """Ends a layer's run where it attends, with the shape of what it stores."""

    def __init__(self, shape: Shape):
        self.shape = shape


class Family:
    """Parts that are built as a family builds them. `fields`: of its configuration, with
    `model_type`.

    The layer is of the kind of the family's last one that attends to all of the text. Raises
    BadConfig where this version of transformers does not know the family, or the layer attends in
    another way than heads can.
    """

    def __init__(self, fields: Mapping[str, Any]):
        kind = fields.get("model_type")
        try:
            self.config: Any = CONFIG_MAPPING[kind].from_dict(dict(fields))
            with torch.device("meta"):
                meta_model: Any = AutoModelForCausalLM.from_config(copy.deepcopy(self.config))
            body = meta_model.get_decoder()
            self.config._experts_implementation = body.config._experts_implementation
            layer_kinds = getattr(self.config, "layer_types", None) or []
            full_layers = [i for i, name in enumerate(layer_kinds) if name == "full_attention"]
            self.index = full_layers[-1] if full_layers else len(body.layers) - 1
            self.classes = type(body.layers[self.index]), type(body.norm), type(body.rotary_emb)
            self.stored = self._stored_shape(body)
        except (LookupError, AttributeError, TypeError, ValueError) as error:
            complaint = f"mtp:family={kind!r}: its layers cannot be used as a head"
            raise BadConfig(f"{complaint} ({first_message_line(error)})") from error

    def _stored_shape(self, body: Any) -> Shape:
        """The shape of what the layer stores a row, found without weights."""
        h = torch.empty(1, 2, self.config.hidden_size, device="meta")
        rotation = self.build_rotation()(torch.arange(2))

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            raise Found((k.shape[1], k.shape[-1], v.shape[-1]))

        try:
            layer = FamilyLayer(body.layers[self.index], body.config)
            layer(h, tuple(part.to("meta") for part in rotation), attend)
        except Found as found:
            return found.shape
        raise LookupError("its layer does not attend through transformers' interface")

    def build_layer(self) -> FamilyLayer:
        """A new layer, whose weights mean nothing yet."""
        return FamilyLayer(self.classes[0](self.config, self.index), self.config)

    def build_norm(self) -> nn.Module:
        norm_module: nn.Module = self.classes[1](
            self.config.hidden_size, eps=self.config.rms_norm_eps
        )
        return norm_module

    def build_rotation(self) -> FamilyRotation:
        return FamilyRotation(self.classes[2](config=self.config))


class FamilyRotation(nn.Module):
    """The family's own, asked as `Rotation` is."""

    def __init__(self, rotary: nn.Module):
        super().__init__()
        self.rotary = rotary

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions (n,) -> cosines and sines (1, n, D), float32."""
        like = torch.empty(1, device=positions.device)
        cosines, sines = self.rotary(like, positions[None])
        return cosines, sines


class FamilyLayer(nn.Module):
    """The family's module, asked as `Layer` is."""

    def __init__(self, block: nn.Module, config: Any):
        super().__init__()
        self.block = block
        self.config = config

    def forward(
        self,
        h: torch.Tensor,
        rotation: tuple[torch.Tensor, ...],
        attend: Attend,
        read: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """h (n, E) or (B, n, E), the stream -> the same after the layer."""
        assert read is None, "the family's layer reads the stream"
        is_single = h.ndim == 2

        def attend_one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return attend(q[0], k[0], v[0])[None]

        token = ATTEND.set(attend_one if is_single else attend)
        try:
            with use_attention(self.config, ATTENTION):
                out = self.block(
                    h[None] if is_single else h,
                    attention_mask=None,
                    position_embeddings=tuple(part.to(h.dtype) for part in rotation),
                    use_cache=False,
                )
        finally:
            ATTEND.reset(token)
        layer_output: torch.Tensor = out[0] if isinstance(out, tuple) else out
        return layer_output[0] if is_single else layer_output
