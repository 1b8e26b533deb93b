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
# where they are one, and the matrix after them.
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
    weight = next(source.parameters(), norm.weight)
    probe = torch.ones(1, len(norm.weight), dtype=weight.dtype, device=weight.device)
    probe[:, 1::2] = -1
    norm.weight.copy_(((source(probe) - source(-probe)) * probe / 2)[0])


@torch.no_grad()
def take_layer(layer: Layer, source: Any, kept_share: float = 0.0) -> None:
    """Gives a layer what a decoder layer of the target has of its build.

    `kept_share`: of a layer whose attention reads other numbers before those of the stream, the
    factor that their random weights keep.
    """
    matrix_pairs = [
        *pair_matrices(layer.self_attn, getattr(source, "self_attn", None), *ATTENTION),
        *pair_matrices(layer.mlp, getattr(source, "mlp", None), *FEED_FORWARD),
    ]
    for head_matrix, weight in matrix_pairs:
        extra_inputs = head_matrix.in_features - weight.shape[1]
        head_matrix.weight[:, :extra_inputs] *= kept_share
        head_matrix.weight[:, extra_inputs:] = weight
    first_norm = getattr(source, "input_layernorm", None)
    if first_norm is None:  # its norms follow its parts
        return
    if layer.input_layernorm is not None:
        take_norm(layer.input_layernorm, first_norm)
    names = ("pre_feedforward_layernorm", "post_attention_layernorm")
    second_norm = next((getattr(source, name) for name in names if hasattr(source, name)), None)
    if second_norm is not None:
        take_norm(layer.post_attention_layernorm, second_norm)


def pair_matrices(
    part: Any, source: Any, names: tuple[str, ...], joined_name: str, last_name: str
) -> list[tuple[nn.Linear, torch.Tensor]]:
    """The matrices of a part, each with that of the target's in its place; none where the target's
    part has another build.
    """
    head_matrices = [getattr(part, name) for name in (*names, last_name)]
    row_counts = [linear.out_features for linear in head_matrices[:-1]]
    joined_source = getattr(source, joined_name, None)
    source_matrices = (
        [joined_source]
        if joined_source is not None
        else [getattr(source, name, None) for name in names]
    )
    source_matrices.append(getattr(source, last_name, None))
    if not all(isinstance(linear, nn.Linear | PackedLinear) for linear in source_matrices):
        return []
    *inputs, last_weight = (weight_of(linear) for linear in source_matrices)
    if joined_source is not None and len(inputs[0]) == sum(row_counts):
        inputs = [*inputs[0].split(row_counts)]
    stream_width = head_matrices[-1].out_features  # of the stream
    expected_shapes = [
        *((count, stream_width) for count in row_counts),
        tuple(head_matrices[-1].weight.shape),
    ]
    weights = [*inputs, last_weight]
    same_shapes = [tuple(weight.shape) for weight in weights] == expected_shapes
    return list(zip(head_matrices, weights, strict=True)) if same_shapes else []
