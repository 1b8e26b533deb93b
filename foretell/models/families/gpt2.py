"""GPT-2: layer norms with biases, one matrix of queries, keys and values, no gate, and positions
that are learnt: embeddings of their own, added to those of the tokens.
"""

from __future__ import annotations

from foretell.models.families.description import (
    ConfigFields,
    LayerDescription,
    SkeletonDescription,
)

MODEL_TYPES = ("gpt2",)


def describe_skeleton(config: ConfigFields) -> SkeletonDescription:
    return SkeletonDescription(layers="h", norms=("ln_f",), rotary="", positions="wpe")


def describe(config: ConfigFields, layer: int) -> LayerDescription:
    config.note("n_positions", "n_embd", "n_layer", "n_head", "n_inner", "attn_pdrop")
    # Heads that say something of a whole text, and an order of operations that rounds otherwise.
    config.note("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels")
    config.note("summary_first_dropout", "reorder_and_upcast_attn")
    if config.add_cross_attention:
        raise LookupError("its layers read a second text (add_cross_attention)")
    share = 1.0
    if config.scale_attn_by_inverse_layer_idx:
        share = 1.0 / (layer + 1)
    usual_scale = (config.n_embd // config.n_head) ** -0.5
    scale = share * (usual_scale if config.scale_attn_weights else 1.0)
    return LayerDescription(
        norm="layer",
        before_attention="ln_1",
        before_mlp="ln_2",
        attention="attn",
        qkv="attn.c_attn",
        out="attn.c_proj",
        gate="",
        up="mlp.c_fc",
        down="mlp.c_proj",
        activation=config.activation("activation_function"),
        rotation="",
        scale=None if scale == usual_scale else scale,
    )
