"""Evens out the inputs of linear layers before they are rounded to 8 bits.

Some channels of a model's states are many times larger than the others, and a group of 32 numbers
that holds one of them has few steps left for the rest. So these channels are divided by a factor in
the layer before, and the weights that read them are multiplied by it, which changes nothing but the
rounding (SmoothQuant, arXiv:2211.10438, section 4). Factors are powers of two, so that bfloat16
holds the new weights as exactly as the old ones; how large a channel is shows on random tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from foretell.models.decoder.fused import find_descriptions
from foretell.models.decoder.packed import pack_layers
from foretell.models.decoder.packed_experts import pack_experts
from foretell.ops.memory import release_pages
from foretell.ops.threads import library_alone

TOKENS = 256  # that the model reads
STRENGTH = 0.5  # of a channel's size that moves into the weights, as an exponent
READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}


def round_layers(hf_model: Any, dtype: str) -> int:
    """Rounds the linear layers to int8 or int4; returns how many. In 8 bits their inputs are evened
    out before, which would move weights of 4 bits farther apart than these can be.
    """
    factors = _shrink_norms(hf_model) if dtype == "int8" else {}
    with library_alone():
        return pack_layers(hf_model, dtype, factors) + pack_experts(hf_model, dtype)


@torch.no_grad()
def smooth_layers(hf_model: Any) -> bool:
    """Moves the factors of the channels of every layer's norms.

    False, and nothing is changed, for models of another build than the llama family's. The model's
    weights must be as they were read: pages of its files that hold the old ones leave the memory.
    """
    factors = _shrink_norms(hf_model)
    old_weights = []
    for linear, input_factors in factors.items():
        weight = linear.weight
        old_weights.append(weight.data)
        weight.data = weight.data * input_factors.to(weight.dtype)
    release_pages(old_weights)
    return bool(factors)


@torch.no_grad()
def _shrink_norms(hf_model: Any) -> dict[Any, torch.Tensor]:
    """Divides norms by factors (in,), and returns by what the weights of each layer that reads them
    are to be multiplied; nothing for models of another build.
    """
    layers = getattr(hf_model.get_decoder(), "layers", ())
    descriptions = find_descriptions(hf_model)
    if not descriptions or not all(description.is_plain for description in descriptions):
        return {}
    channel_sizes: dict[nn.Module, torch.Tensor] = {}
    hooks = []
    for layer in layers:
        modules = dict(layer.named_modules())
        for readers in READERS.values():
            hooks.append(modules[readers[0]].register_forward_pre_hook(_note_sizes(channel_sizes)))
    config = hf_model.config.get_text_config()
    token_count = min(TOKENS, int(getattr(config, "max_position_embeddings", None) or TOKENS))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(int(config.vocab_size), (1, token_count), generator=generator)
    try:
        with _WideProducts():
            hf_model.get_decoder()(tokens, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    module_names = {module: name for name, module in hf_model.named_modules()}
    hf_model.smoothed = {}  # by name of a layer, what its input was divided by (in,)
    input_factors: dict[Any, torch.Tensor] = {}
    for layer in layers:
        modules = dict(layer.named_modules())
        for norm, readers in READERS.items():
            factors = _smoothing_factors(channel_sizes[modules[readers[0]]])
            weight = modules[norm].weight
            weight.data = weight.data / factors.to(weight.dtype)
            for reader in readers:
                input_factors[modules[reader]] = factors
                hf_model.smoothed[module_names[modules[reader]]] = factors
    return input_factors


class _WideProducts(TorchFunctionMode):
    """Inside, products of bfloat16 are computed in float32: torch's own take eight times as long on
    processors that have none.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is F.linear and args[0].dtype is torch.bfloat16:
            x, weight, bias = (*args, *(kwargs or {}).values(), None)[:3]
            wide_bias = None if bias is None else bias.float()
            return F.linear(x.float(), weight.float(), wide_bias).to(x.dtype)
        return function(*args, **(kwargs or {}))


def _note_sizes(channel_sizes: dict[nn.Module, torch.Tensor]) -> Callable[[nn.Module, Any], None]:
    """Keeps how large each channel of a layer's inputs is, (in,): the root of the mean square.

    The first token is left out: many models give it states unlike all others.
    """

    def hook(module: nn.Module, inputs: Any) -> None:
        input_states = inputs[0].reshape(-1, inputs[0].shape[-1]).float()
        channel_sizes[module] = input_states[1:].square().mean(0).sqrt()

    return hook


def _smoothing_factors(channel_size: torch.Tensor) -> torch.Tensor:
    """Powers of two near size ** STRENGTH, 1 where nothing is seen."""
    exponents = torch.log2(channel_size.clamp_min(1e-6)).mul_(STRENGTH).round_().clamp_(-8, 8)
    return torch.where(channel_size > 0, torch.exp2(exponents), torch.ones_like(channel_size))
