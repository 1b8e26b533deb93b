"""PLDR-LLM as a transformers model: power law graph attention, with the names of published weights.

    config.json     model_type "pldrllm"; custom_G_type says where the metric G comes from:
      null          a net in every layer infers it of a text (ops/power_law.py)
      identity      I: ordinary attention
      random        drawn before the training; it lies in the weights
      external      put into the weights by somebody, such as the metric a net once inferred

Blocks are normed behind their sums, the embedding is scaled by the root of the width and normed,
nothing is normed before the head, and rotations pair adjacent channels. Q^T Q is of the whole text,
so a row of a net's model depends on later tokens too, in training as well, until G is cached.

Source: Gokden (arXiv 2502.13502) and the code published with it; the settings and names of weights
are those of the folders on the hub.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from foretell.core.model import STEP
from foretell.errors import BadModel, Unsupported
from foretell.ops.power_law import curvature

MODEL_TYPE = "pldrllm"
PREDEFINED = ("identity", "random", "external")
# Who gives a layer's metric in place of the layer itself: (layer, how to infer it) -> (B, H, D, D).
Given = Callable[[int, Callable[[], torch.Tensor]], torch.Tensor]
GIVEN: ContextVar[Given | None] = ContextVar("foretell_metric", default=None)


class PldrConfig(PreTrainedConfig):
    """The settings of a published folder, with its defaults."""

    model_type = MODEL_TYPE

    vocab_size: int = 32000
    hidden_size: int = 896
    intermediate_size: int = 2389
    num_hidden_layers: int = 5
    num_attention_heads: int = 14
    head_dim: int = 64
    hidden_act: str = "silu"
    max_position_embeddings: int = 1024
    layer_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    reference_rope: bool = True
    attention_bias: bool = True
    glu_bias: bool = True
    final_bias: bool = True
    num_reslayerA: int = 8  # noqa: N815  # residual units of the net
    num_denseA: int = 2  # noqa: N815  # gated linear layers of each
    A_dff: int = 170  # width inside of one
    custom_G_type: str | None = None  # noqa: N815
    pad_token_id: int | None = 0
    bos_token_id: int | None = 2
    eos_token_id: int | list[int] | None = 3
    tie_word_embeddings: bool = False

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Without the setting `rope_scaling`, which `check_settings` wants to be null."""
        known = {name: value for name, value in config_dict.items() if name != "rope_scaling"}
        return super().from_dict(known, **kwargs)


def check_settings(raw: Mapping[str, Any]) -> None:
    """Raises BadModel for settings that this file does not compute."""
    wanted: dict[str, tuple[Any, ...]] = {
        "hidden_act": ("silu",),
        "rope_scaling": (None,),
        "reference_rope": (True,),
        "tie_word_embeddings": (False,),
        "custom_G_type": (None, *PREDEFINED),
    }
    for name, allowed in wanted.items():
        value = raw.get(name, allowed[0])
        if value not in allowed:
            known = ", ".join(map(repr, allowed))
            raise BadModel(
                f"config.json: {name}={value!r} is not computed for a PLDR-LLM; it must be {known}"
            )
    width, heads, own = (
        raw.get(name, getattr(PldrConfig, name))
        for name in ("hidden_size", "num_attention_heads", "head_dim")
    )
    if width != heads * own:
        raise BadModel(
            f"config.json: hidden_size={width} must be num_attention_heads={heads} times "
            f"head_dim={own} in a PLDR-LLM"
        )


def apply_rotary_pos_emb(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """q, k (B, H, n, D) rotated by cos, sin (B, n, D): adjacent channels are a pair."""

    def turned(x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        even, odd = wide[..., ::2], wide[..., 1::2]
        across = torch.stack([-odd, even], -1).flatten(-2)
        return (wide * cos[:, None] + across * sin[:, None]).to(x.dtype)

    return turned(q), turned(k)


class Rotary(nn.Module):
    """(hidden, positions (B, n)) -> cos, sin (B, n, D), each number for two adjacent channels."""

    def __init__(self, config: Any):
        super().__init__()
        self.width, self.theta = int(config.head_dim), float(config.rope_theta)

    def forward(
        self, h: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wide = torch.promote_types(h.dtype, torch.float32)
        channels = torch.arange(0, self.width, 2, device=h.device, dtype=wide)
        angles = positions[..., None].to(wide) * self.theta ** (-channels / self.width)
        angles = angles.repeat_interleave(2, -1)
        return angles.cos(), angles.sin()


class Gated(nn.Module):
    """SwiGLU with biases: width -> inner -> width."""

    def __init__(self, width: int, inner: int, bias: bool):
        super().__init__()
        self.gluw1 = nn.Linear(width, inner, bias=bias)
        self.gluw2 = nn.Linear(width, inner, bias=bias)
        self.gluw3 = nn.Linear(inner, width, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.gluw3(F.silu(self.gluw1(x)) * self.gluw2(x))
        return out


class Unit(nn.Module):
    """A residual unit of the net: gated linear layers in a chain, normed behind the sum."""

    def __init__(self, config: Any):
        super().__init__()
        width = config.head_dim
        layers = [Gated(width, config.A_dff, config.glu_bias) for _ in range(config.num_denseA)]
        self.denseAs = nn.ModuleList(layers)
        self.layernormA = nn.LayerNorm(width, eps=config.layer_norm_eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = x
        for layer in self.denseAs:
            x = layer(x)
        out: torch.Tensor = self.layernormA(x + before)
        return out


class PowerLaw(nn.Module):
    """The last part of the net, where there is one: see ops/power_law.py."""

    def __init__(self, config: Any):
        super().__init__()
        shape = (config.num_attention_heads, config.head_dim, config.head_dim)
        for name in ("Wlst", "blst", "pwlst", "alst", "balst"):
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))

    def forward(self, a_matrix: torch.Tensor) -> torch.Tensor:
        parts: Any = (self.Wlst, self.blst, self.pwlst, self.alst, self.balst)
        return curvature(a_matrix, *parts)


class Attention(nn.Module):
    """Queries are multiplied by the metric behind their rotation; the rest is as usual."""

    is_causal = True
    num_key_value_groups = 1

    def __init__(self, config: Any, layer: int, body: Any):
        super().__init__()
        self.config, self.layer_idx = config, layer
        self.body = (body,)  # no module of its own: the metrics of all layers lie there
        width, bias = config.hidden_size, config.attention_bias
        self.heads, self.head_dim = config.num_attention_heads, config.head_dim
        self.wq, self.wk, self.wv, self.dense = (
            nn.Linear(width, width, bias=bias) for _ in range(4)
        )
        self.infers = config.custom_G_type is None
        if self.infers:
            self.plgatt_layer = PowerLaw(config)
            self.reslayerAs = nn.ModuleList(Unit(config) for _ in range(config.num_reslayerA))
            self.layernorm1 = nn.LayerNorm(self.head_dim, eps=config.layer_norm_eps)

    def inferred(self, q: torch.Tensor) -> torch.Tensor:
        """The metric (B, H, D, D) of rotated queries (B, H, n, D), of all n together."""
        wide = q.to(torch.promote_types(q.dtype, torch.float32))
        norm = self.layernorm1
        products = F.layer_norm(wide.mT @ wide, (self.head_dim,), eps=norm.eps).to(q.dtype)
        a_matrix = products * norm.weight + norm.bias
        for unit in self.reslayerAs:
            a_matrix = unit(a_matrix)
        out: torch.Tensor = self.plgatt_layer(a_matrix).to(q.dtype)
        return out

    def turned(self, q: torch.Tensor) -> torch.Tensor:
        """Queries (B, H, n, D) times the metric: one that lies in the weights, one that somebody
        gives, that of the cache of each job of the running step, or else their own.
        """
        if not self.infers:
            return q @ self.body[0].past_G_values[self.layer_idx, 2].to(q.dtype)
        given = GIVEN.get()
        if given is not None:
            return q @ given(self.layer_idx, lambda: self.inferred(q)).to(q.dtype)
        jobs = STEP.get(())
        if not jobs:
            return q @ self.inferred(q)
        parts = q.split([len(job.tokens) for job in jobs], 2)
        metrics = [getattr(job.cache, "metric", None) for job in jobs]
        if any(metric is None for metric in metrics):
            raise Unsupported.missing(
                "what computes this",
                "a PLDR-LLM that infers the metric of a text",
                "caches that keep it",
                "freeze the metric (foretell train pldr, OUT/frozen)",
            )
        turned = [
            part @ metric[self.layer_idx].to(q.dtype)
            for part, metric in zip(parts, metrics, strict=True)
            if metric is not None
        ]
        return torch.cat(turned, 2)

    def forward(
        self, h: torch.Tensor, rotary: Any, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """h (B, n, E) -> (B, n, E)."""
        shape = (*h.shape[:-1], self.heads, self.head_dim)
        q, k, v = (part(h).view(shape).transpose(1, 2) for part in (self.wq, self.wk, self.wv))
        q, k = apply_rotary_pos_emb(q, k, *rotary)
        kind = self.config._attn_implementation
        attend: Any = ALL_ATTENTION_FUNCTIONS.get_interface(kind, ALL_ATTENTION_FUNCTIONS["sdpa"])
        scaling = self.head_dim**-0.5
        out, _ = attend(self, self.turned(q), k, v, mask, scaling=scaling)
        dense: torch.Tensor = self.dense(out.reshape(*h.shape[:-1], -1))
        return dense


class Layer(nn.Module):
    """A decoder layer, called as transformers calls its own."""

    def __init__(self, config: Any, layer: int, body: Any):
        super().__init__()
        width, eps = config.hidden_size, config.layer_norm_eps
        self.mha1 = Attention(config, layer, body)
        self.ffn = Gated(width, config.intermediate_size, config.glu_bias)
        self.layernorm1 = nn.LayerNorm(width, eps=eps)
        self.layernorm2 = nn.LayerNorm(width, eps=eps)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Any,
        attention_mask: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        seen = self.mha1(hidden_states, position_embeddings, attention_mask)
        h = self.layernorm1(seen + hidden_states)
        out: torch.Tensor = self.layernorm2(self.ffn(h) + h)
        return out


class Entrance(nn.Module):
    """What enters layer 0 for ids, of modules that belong to the model."""

    def __init__(self, body: Any):
        super().__init__()
        self.body = (body,)

    @property
    def weight(self) -> torch.Tensor:
        """Of the embedding alone."""
        weight: torch.Tensor = self.body[0].embedding.weight
        return weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        body = self.body[0]
        out: torch.Tensor = body.layernorm1(body.embedding(ids) * body.config.hidden_size**0.5)
        return out


class PldrPreTrained(PreTrainedModel):
    """What transformers has to know of both models here."""

    config_class = PldrConfig
    base_model_prefix = "decoder"
    _supports_sdpa = True
    _supports_attention_backend = True
    _no_split_modules = ("Layer",)

    @torch.no_grad()
    def _init_weights(self, module: Any) -> None:
        """As the published code draws them."""
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight)
        elif isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
        elif isinstance(module, PowerLaw):
            for name, weight in module.named_parameters():
                (nn.init.zeros_ if name in ("blst", "balst") else nn.init.xavier_uniform_)(weight)


class PldrModel(PldrPreTrained):
    """Embedding and layers; `layers`, `norm` and `rotary_emb` are what the usual skeleton has."""

    def __init__(self, config: Any):
        super().__init__(config)
        width = config.hidden_size
        self.embedding = nn.Embedding(config.vocab_size, width)
        self.dec_layers = nn.ModuleList(
            Layer(config, i, self) for i in range(config.num_hidden_layers)
        )
        self.layernorm1 = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.norm = nn.Identity()
        self.rotary_emb = Rotary(config)
        if config.custom_G_type is not None:
            heads, own = config.num_attention_heads, config.head_dim
            drawn = config.custom_G_type == "random"
            metrics = torch.zeros(config.num_hidden_layers, 3, 1, heads, own, own)
            like = metrics[:, 2]
            like[:] = torch.randn(like.shape) if drawn else torch.eye(own)
            self.register_buffer("past_G_values", metrics)
            known = torch.ones(config.num_hidden_layers, dtype=torch.bool)
            self.register_buffer("past_G_values_status", known)
        self.entrance = (Entrance(self),)
        self.post_init()

    @property
    def layers(self) -> nn.ModuleList:
        return self.dec_layers

    def get_input_embeddings(self) -> Any:
        return self.entrance[0]

    def forward(
        self, input_ids: torch.Tensor, attention_mask: Any = None, position_ids: Any = None
    ) -> torch.Tensor:
        h: torch.Tensor = self.get_input_embeddings()(input_ids)
        if position_ids is None:
            position_ids = torch.arange(h.shape[1], device=h.device)[None]
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=h,
            attention_mask=attention_mask,
            past_key_values=None,
            position_ids=position_ids,
        )
        rotary = self.rotary_emb(h, position_ids)
        for layer in self.dec_layers:
            h = layer(h, position_embeddings=rotary, attention_mask=mask)
        return h


class PldrForCausalLM(PldrPreTrained):
    """With its head. It keeps no caches: that is the engine's part."""

    generation_config = None

    def __init__(self, config: Any):
        super().__init__(config)
        self.decoder = PldrModel(config)
        self.final_layer = nn.Linear(config.hidden_size, config.vocab_size, bias=config.final_bias)
        self.post_init()

    def get_decoder(self) -> Any:
        return self.decoder

    def get_input_embeddings(self) -> Any:
        return self.decoder.get_input_embeddings()

    def get_output_embeddings(self) -> Any:
        return self.final_layer

    def set_output_embeddings(self, new_embeddings: Any) -> None:
        self.final_layer = new_embeddings

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: Any = None,
        position_ids: Any = None,
        logits_to_keep: int | torch.Tensor = 0,
        **_: Any,
    ) -> CausalLMOutputWithPast:
        h = self.decoder(input_ids, attention_mask, position_ids)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return CausalLMOutputWithPast(logits=self.final_layer(h[:, kept]))


@contextmanager
def metrics_from(given: Given) -> Iterator[None]:
    """Inside, layers take their metrics from there."""
    token = GIVEN.set(given)
    try:
        yield
    finally:
        GIVEN.reset(token)


@torch.no_grad()
def infer(hf: Any, ids: torch.Tensor) -> torch.Tensor:
    """The metrics (L, H, D, D) that the nets of a model infer of the text `ids` (n,)."""
    found: list[torch.Tensor] = []

    def note(layer: int, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        found.append(compute())
        return found[-1]

    with metrics_from(note):
        hf.get_decoder()(ids[None])
    return torch.cat(found)


def fixed(metrics: torch.Tensor) -> Given:
    """Metrics (L, H, D, D) for `metrics_from`, in the place of any text's own."""
    return lambda layer, compute: metrics[layer]


@torch.no_grad()
def frozen(hf: Any, metrics: torch.Tensor) -> PldrForCausalLM:
    """The model with these metrics (L, H, D, D) in its weights, and without its nets."""
    settings = {**hf.config.to_dict(), "custom_G_type": "external"}
    settings.pop("model_type", None)
    model = PldrForCausalLM(PldrConfig(**settings)).to(hf.dtype)
    kept = model.state_dict()
    weights = {name: value for name, value in hf.state_dict().items() if name in kept}
    held = kept["decoder.past_G_values"].clone()
    held[:, 2, 0] = metrics
    weights["decoder.past_G_values"] = held
    weights["decoder.past_G_values_status"] = kept["decoder.past_G_values_status"]
    model.load_state_dict(weights)
    return model.to(hf.device).eval()
