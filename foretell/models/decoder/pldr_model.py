"""PLDR-LLM as a transformers model: power law graph attention, with the names of published weights.

    config.json     model_type "pldrllm"; custom_G_type says where the metric G comes from:
      null          a net in every layer infers it of a text (ops/power_law.py)
      identity      I: ordinary attention
      random        drawn before the training; it lies in the weights
      external      put into the weights by somebody, such as the metric a net once inferred

Blocks are normed after their sums, the embedding is scaled by the root of the width and normed,
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
        """Reads settings without `rope_scaling`, which `check_settings` wants to be null."""
        settings = {
            setting: value for setting, value in config_dict.items() if setting != "rope_scaling"
        }
        return super().from_dict(settings, **kwargs)


def check_settings(raw_settings: Mapping[str, Any]) -> None:
    """Raises BadModel for settings that this file does not compute."""
    computed_values: dict[str, tuple[Any, ...]] = {
        "hidden_act": ("silu",),
        "rope_scaling": (None,),
        "reference_rope": (True,),
        "tie_word_embeddings": (False,),
        "custom_G_type": (None, *PREDEFINED),
    }
    for setting, allowed_values in computed_values.items():
        value = raw_settings.get(setting, allowed_values[0])
        if value not in allowed_values:
            allowed_text = ", ".join(map(repr, allowed_values))
            raise BadModel(
                f"config.json: {setting}={value!r} is not computed for a PLDR-LLM; it must be "
                f"{allowed_text}"
            )
    hidden_size, head_count, head_width = (
        raw_settings.get(setting, getattr(PldrConfig, setting))
        for setting in ("hidden_size", "num_attention_heads", "head_dim")
    )
    if hidden_size != head_count * head_width:
        raise BadModel(
            f"config.json: hidden_size={hidden_size} must be num_attention_heads={head_count} "
            "times "
            f"head_dim={head_width} in a PLDR-LLM"
        )


def apply_rotary_pos_emb(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """q, k (B, H, n, D) rotated by cos, sin (B, n, D): adjacent channels are a pair."""

    def rotate(x: torch.Tensor) -> torch.Tensor:
        wide_rows = x.to(torch.promote_types(x.dtype, torch.float32))
        even, odd = wide_rows[..., ::2], wide_rows[..., 1::2]
        crossed = torch.stack([-odd, even], -1).flatten(-2)
        return (wide_rows * cos[:, None] + crossed * sin[:, None]).to(x.dtype)

    return rotate(q), rotate(k)


class Rotary(nn.Module):
    """(hidden, positions (B, n)) -> cos, sin (B, n, D), each number for two adjacent channels."""

    def __init__(self, config: Any):
        super().__init__()
        self.width, self.theta = int(config.head_dim), float(config.rope_theta)

    def forward(
        self, hidden_states: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wide_dtype = torch.promote_types(hidden_states.dtype, torch.float32)
        channels = torch.arange(0, self.width, 2, device=hidden_states.device, dtype=wide_dtype)
        angles = positions[..., None].to(wide_dtype) * self.theta ** (-channels / self.width)
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
        output: torch.Tensor = self.gluw3(F.silu(self.gluw1(x)) * self.gluw2(x))
        return output


class Unit(nn.Module):
    """A residual unit of the net: gated linear layers in a chain, normed after the sum."""

    def __init__(self, config: Any):
        super().__init__()
        width = config.head_dim
        layers = [Gated(width, config.A_dff, config.glu_bias) for _ in range(config.num_denseA)]
        self.denseAs = nn.ModuleList(layers)
        self.layernormA = nn.LayerNorm(width, eps=config.layer_norm_eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        residual = x
        for layer in self.denseAs:
            x = layer(x)
        output: torch.Tensor = self.layernormA(x + residual)
        return output


class PowerLaw(nn.Module):
    """The last part of the net, where there is one: see ops/power_law.py."""

    def __init__(self, config: Any):
        super().__init__()
        shape = (config.num_attention_heads, config.head_dim, config.head_dim)
        for parameter_name in ("Wlst", "blst", "pwlst", "alst", "balst"):
            self.register_parameter(parameter_name, nn.Parameter(torch.empty(shape)))

    def forward(self, a_matrix: torch.Tensor) -> torch.Tensor:
        parameters: Any = (self.Wlst, self.blst, self.pwlst, self.alst, self.balst)
        return curvature(a_matrix, *parameters)


class Attention(nn.Module):
    """Queries are multiplied by the metric after their rotation; the rest is as usual."""

    is_causal = True
    num_key_value_groups = 1

    def __init__(self, config: Any, layer_index: int, body: Any):
        super().__init__()
        self.config, self.layer_idx = config, layer_index
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

    def infer_metric(self, q: torch.Tensor) -> torch.Tensor:
        """Infers the metric (B, H, D, D) of rotated queries (B, H, n, D), of all n together."""
        wide_queries = q.to(torch.promote_types(q.dtype, torch.float32))
        norm = self.layernorm1
        products = F.layer_norm(wide_queries.mT @ wide_queries, (self.head_dim,), eps=norm.eps).to(
            q.dtype
        )
        a_matrix = products * norm.weight + norm.bias
        for unit in self.reslayerAs:
            a_matrix = unit(a_matrix)
        metric: torch.Tensor = self.plgatt_layer(a_matrix).to(q.dtype)
        return metric

    def apply_metric(self, q: torch.Tensor) -> torch.Tensor:
        """Multiplies queries (B, H, n, D) by the metric: one that lies in the weights, one that
        somebody gives, that of the cache of each job of the running step, or else their own.
        """
        if not self.infers:
            return q @ self.body[0].past_G_values[self.layer_idx, 2].to(q.dtype)
        given_metrics = GIVEN.get()
        if given_metrics is not None:
            return q @ given_metrics(self.layer_idx, lambda: self.infer_metric(q)).to(q.dtype)
        jobs = STEP.get(())
        if not jobs:
            return q @ self.infer_metric(q)
        query_parts = q.split([len(job.tokens) for job in jobs], 2)
        metrics = [getattr(job.cache, "metric", None) for job in jobs]
        if any(metric is None for metric in metrics):
            raise Unsupported.missing_capability(
                "what computes this",
                "a PLDR-LLM that infers the metric of a text",
                "caches that keep it",
                "freeze the metric (foretell train pldr, OUT/frozen)",
            )
        turned_parts = [
            part @ metric[self.layer_idx].to(q.dtype)
            for part, metric in zip(query_parts, metrics, strict=True)
            if metric is not None
        ]
        return torch.cat(turned_parts, 2)

    def forward(
        self, hidden_states: torch.Tensor, rotary: Any, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attends: hidden_states (B, n, E) -> (B, n, E)."""
        shape = (*hidden_states.shape[:-1], self.heads, self.head_dim)
        q, k, v = (
            part(hidden_states).view(shape).transpose(1, 2) for part in (self.wq, self.wk, self.wv)
        )
        q, k = apply_rotary_pos_emb(q, k, *rotary)
        attention_kind = self.config._attn_implementation
        attend_function: Any = ALL_ATTENTION_FUNCTIONS.get_interface(
            attention_kind, ALL_ATTENTION_FUNCTIONS["sdpa"]
        )
        scaling = self.head_dim**-0.5
        output, _ = attend_function(self, self.apply_metric(q), k, v, mask, scaling=scaling)
        projected: torch.Tensor = self.dense(output.reshape(*hidden_states.shape[:-1], -1))
        return projected


class Layer(nn.Module):
    """A decoder layer, called as transformers calls its own."""

    def __init__(self, config: Any, layer_index: int, body: Any):
        super().__init__()
        width, eps = config.hidden_size, config.layer_norm_eps
        self.mha1 = Attention(config, layer_index, body)
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
        attended = self.mha1(hidden_states, position_embeddings, attention_mask)
        normed = self.layernorm1(attended + hidden_states)
        output: torch.Tensor = self.layernorm2(self.ffn(normed) + normed)
        return output


class Entrance(nn.Module):
    """A module that gives what enters layer 0 for ids, made of modules that belong to the model."""

    def __init__(self, body: Any):
        super().__init__()
        self.body = (body,)

    @property
    def weight(self) -> torch.Tensor:
        """The weight of the embedding alone."""
        weight: torch.Tensor = self.body[0].embedding.weight
        return weight

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        body = self.body[0]
        output: torch.Tensor = body.layernorm1(
            body.embedding(token_ids) * body.config.hidden_size**0.5
        )
        return output


class PldrPreTrained(PreTrainedModel):
    """The base of both models here: what transformers has to know of them."""

    config_class = PldrConfig
    base_model_prefix = "decoder"
    _supports_sdpa = True
    _supports_attention_backend = True
    _no_split_modules = ("Layer",)

    @torch.no_grad()
    def _init_weights(self, module: Any) -> None:
        """Draws weights as the published code does."""
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
            Layer(config, layer_index, self) for layer_index in range(config.num_hidden_layers)
        )
        self.layernorm1 = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.norm = nn.Identity()
        self.rotary_emb = Rotary(config)
        if config.custom_G_type is not None:
            head_count, head_width = config.num_attention_heads, config.head_dim
            is_random = config.custom_G_type == "random"
            metrics = torch.zeros(
                config.num_hidden_layers, 3, 1, head_count, head_width, head_width
            )
            metric_rows = metrics[:, 2]
            metric_rows[:] = torch.randn(metric_rows.shape) if is_random else torch.eye(head_width)
            self.register_buffer("past_G_values", metrics)
            known_layers = torch.ones(config.num_hidden_layers, dtype=torch.bool)
            self.register_buffer("past_G_values_status", known_layers)
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
        hidden_states: torch.Tensor = self.get_input_embeddings()(input_ids)
        if position_ids is None:
            position_ids = torch.arange(hidden_states.shape[1], device=hidden_states.device)[None]
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=hidden_states,
            attention_mask=attention_mask,
            past_key_values=None,
            position_ids=position_ids,
        )
        rotary = self.rotary_emb(hidden_states, position_ids)
        for layer in self.dec_layers:
            hidden_states = layer(hidden_states, position_embeddings=rotary, attention_mask=mask)
        return hidden_states


class PldrForCausalLM(PldrPreTrained):
    """The language model with its head. It keeps no caches: that is the engine's part."""

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
        hidden_states = self.decoder(input_ids, attention_mask, position_ids)
        row_selection = (
            slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        )
        return CausalLMOutputWithPast(logits=self.final_layer(hidden_states[:, row_selection]))


@contextmanager
def metrics_from(metric_source: Given) -> Iterator[None]:
    """Inside, layers take their metrics from `metric_source`."""
    context_token = GIVEN.set(metric_source)
    try:
        yield
    finally:
        GIVEN.reset(context_token)


@torch.no_grad()
def infer_metrics(hf_model: Any, token_ids: torch.Tensor) -> torch.Tensor:
    """Infers the metrics (L, H, D, D) of the text `token_ids` (n,) by the nets of a model."""
    metrics: list[torch.Tensor] = []

    def note(layer: int, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        metrics.append(compute())
        return metrics[-1]

    with metrics_from(note):
        hf_model.get_decoder()(token_ids[None])
    return torch.cat(metrics)


def fixed_metrics(metrics: torch.Tensor) -> Given:
    """Makes a source for `metrics_from` of metrics (L, H, D, D), in the place of any text's own."""
    return lambda layer, compute: metrics[layer]


@torch.no_grad()
def freeze_metrics(hf_model: Any, metrics: torch.Tensor) -> PldrForCausalLM:
    """Copies the model with these metrics (L, H, D, D) in its weights, and without its nets."""
    settings = {**hf_model.config.to_dict(), "custom_G_type": "external"}
    settings.pop("model_type", None)
    model = PldrForCausalLM(PldrConfig(**settings)).to(hf_model.dtype)
    new_state = model.state_dict()
    weights = {
        weight_name: value
        for weight_name, value in hf_model.state_dict().items()
        if weight_name in new_state
    }
    metric_values = new_state["decoder.past_G_values"].clone()
    metric_values[:, 2, 0] = metrics
    weights["decoder.past_G_values"] = metric_values
    weights["decoder.past_G_values_status"] = new_state["decoder.past_G_values_status"]
    model.load_state_dict(weights)
    return model.to(hf_model.device).eval()
