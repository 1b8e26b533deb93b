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
from foretell.errors import BadConfig, first_line
from foretell.models.decoder.loop import attending

ATTENTION = "foretell-head"
ATTEND: ContextVar[Attend] = ContextVar("foretell_head_attend")  # of the layer that runs


def _attend(
    module: nn.Module,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """q (B, H, n, D), k and v (B, KV, n, D) -> (B, n, H, D)."""
    for name in ("sliding_window", "softcap", "s_aux"):
        if more.get(name) is not None:
            raise LookupError(f"its layer attends with {name}")
    if scaling is not None:  # heads divide by the root of the width themselves
        q = q * (scaling * q.shape[-1] ** 0.5)
    return ATTEND.get()(q, k, v), None


AttentionInterface.register(ATTENTION, _attend)
AttentionMaskInterface.register(ATTENTION, lambda *args, **kwargs: None)


class Found(Exception):
    """Ends a layer's run where it attends, with the shape of what it stores."""

    def __init__(self, shape: Shape):
        self.shape = shape


class Family:
    """What is built as a family builds it. `fields`: of its configuration, with `model_type`.

    The layer is of the kind of the family's last one that attends to all of the text. Raises
    BadConfig where this version of transformers does not know the family, or the layer attends in
    another way than heads can.
    """

    def __init__(self, fields: Mapping[str, Any]):
        kind = fields.get("model_type")
        try:
            self.config: Any = CONFIG_MAPPING[kind].from_dict(dict(fields))
            with torch.device("meta"):
                made: Any = AutoModelForCausalLM.from_config(copy.deepcopy(self.config))
            body = made.get_decoder()
            self.config._experts_implementation = body.config._experts_implementation
            kinds = getattr(self.config, "layer_types", None) or []
            full = [i for i, name in enumerate(kinds) if name == "full_attention"]
            self.index = full[-1] if full else len(body.layers) - 1
            self.classes = type(body.layers[self.index]), type(body.norm), type(body.rotary_emb)
            self.stored = self._stored(body)
        except (LookupError, AttributeError, TypeError, ValueError) as error:
            what = f"mtp:family={kind!r}: its layers cannot be used as a head"
            raise BadConfig(f"{what} ({first_line(error)})") from error

    def _stored(self, body: Any) -> Shape:
        """What the layer stores a row, told without weights."""
        h = torch.empty(1, 2, self.config.hidden_size, device="meta")
        rotation = self.rotation()(torch.arange(2))

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            raise Found((k.shape[1], k.shape[-1], v.shape[-1]))

        try:
            layer = FamilyLayer(body.layers[self.index], body.config)
            layer(h, tuple(part.to("meta") for part in rotation), attend)
        except Found as found:
            return found.shape
        raise LookupError("its layer does not attend through transformers' interface")

    def layer(self) -> FamilyLayer:
        """Its weights are of no meaning yet."""
        return FamilyLayer(self.classes[0](self.config, self.index), self.config)

    def norm(self) -> nn.Module:
        made: nn.Module = self.classes[1](self.config.hidden_size, eps=self.config.rms_norm_eps)
        return made

    def rotation(self) -> FamilyRotation:
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
        """h (n, E) or (B, n, E), the stream -> the same behind the layer."""
        assert read is None, "the family's layer reads the stream"
        alone = h.ndim == 2

        def one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return attend(q[0], k[0], v[0])[None]

        token = ATTEND.set(one if alone else attend)
        try:
            with attending(self.config, ATTENTION):
                out = self.block(
                    h[None] if alone else h,
                    attention_mask=None,
                    position_embeddings=tuple(part.to(h.dtype) for part in rotation),
                    use_cache=False,
                )
        finally:
            ATTEND.reset(token)
        left: torch.Tensor = out[0] if isinstance(out, tuple) else out
        return left[0] if alone else left
