"""What heads begin with of their target's weights, whatever family it is of.

A layer of a head is built as llama's are. It begins with those parts of a target's layer that have
that build, be their matrices separate or joined. What the target builds otherwise (experts, a
feed-forward block without a gate, keys made of a latent) begins at random.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from foretell.drafters.heads.networks.layers import Layer, Norm
from foretell.models.decoder.packed import PackedLinear

# Of a part that several targets build alike: matrices with the same input, how they are called
# where they are one, and the matrix behind them.
ATTENTION = (("q_proj", "k_proj", "v_proj"), "qkv_proj", "o_proj")
FEED_FORWARD = (("gate_proj", "up_proj"), "gate_up_proj", "down_proj")


def weight_of(linear: Any) -> torch.Tensor:
    """The weight (out, in) of a layer of the target, packed or not, in float32."""
    plain = linear.plain() if isinstance(linear, PackedLinear) else linear
    weight: torch.Tensor = plain.weight.detach().float()
    return weight


@torch.no_grad()
def take_norm(norm: Norm, source: Any) -> None:
    """Gives a norm what one of the target multiplies with, which some keep less 1.

    That one is asked with numbers of mean 0 and length 1 and with their opposites: a bias leaves no
    trace.
    """
    weight = next(source.parameters())
    probe = torch.ones(1, len(norm.weight), dtype=weight.dtype, device=weight.device)
    probe[:, 1::2] = -1
    norm.weight.copy_(((source(probe) - source(-probe)) * probe / 2)[0])


@torch.no_grad()
def take_layer(layer: Layer, source: Any, beside: float = 0.0) -> None:
    """Gives a layer what a decoder layer of the target has of its build.

    `beside`: of a layer whose attention reads other numbers before those of the stream, the factor
    that their random weights keep.
    """
    pairs = [
        *fitting(layer.self_attn, getattr(source, "self_attn", None), *ATTENTION),
        *fitting(layer.mlp, getattr(source, "mlp", None), *FEED_FORWARD),
    ]
    for own, weight in pairs:
        before = own.in_features - weight.shape[1]
        own.weight[:, :before] *= beside
        own.weight[:, before:] = weight
    first = getattr(source, "input_layernorm", None)
    if first is None:  # its norms stand behind its parts
        return
    if layer.input_layernorm is not None:
        take_norm(layer.input_layernorm, first)
    names = ("pre_feedforward_layernorm", "post_attention_layernorm")
    second = next((getattr(source, name) for name in names if hasattr(source, name)), None)
    if second is not None:
        take_norm(layer.post_attention_layernorm, second)


def fitting(
    part: Any, source: Any, names: tuple[str, ...], joined: str, last: str
) -> list[tuple[nn.Linear, torch.Tensor]]:
    """The matrices of a part, each with that of the target's in its place; none where the target's
    part has another build.
    """
    own = [getattr(part, name) for name in (*names, last)]
    rows = [linear.out_features for linear in own[:-1]]
    whole = getattr(source, joined, None)
    given = [whole] if whole is not None else [getattr(source, name, None) for name in names]
    given.append(getattr(source, last, None))
    if not all(isinstance(linear, nn.Linear | PackedLinear) for linear in given):
        return []
    *inputs, behind = (weight_of(linear) for linear in given)
    if whole is not None and len(inputs[0]) == sum(rows):
        inputs = [*inputs[0].split(rows)]
    width = own[-1].out_features  # of the stream
    wanted = [*((count, width) for count in rows), tuple(own[-1].weight.shape)]
    weights = [*inputs, behind]
    same = [tuple(weight.shape) for weight in weights] == wanted
    return list(zip(own, weights, strict=True)) if same else []
