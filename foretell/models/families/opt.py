"""OPT: layer norms and matrices with biases, no gate, and positions that are learnt, of which the
first one is row 2 of their embeddings. The one of 350 million weights, whose norms stand behind
each sum, is left to torch.
"""

from __future__ import annotations

from foretell.models.families.description import (
    ConfigFields,
    LayerDescription,
    SkeletonDescription,
)

MODEL_TYPES = ("opt",)


def describe_skeleton(config: ConfigFields) -> SkeletonDescription:
    if not config.do_layer_norm_before:
        raise LookupError("its norms stand behind each sum (do_layer_norm_before)")
    if config._remove_final_layer_norm:
        raise LookupError("it has no norm before its head (_remove_final_layer_norm)")
    if config.word_embed_proj_dim != config.hidden_size:
        raise LookupError("its embeddings are projected (word_embed_proj_dim)")
    return SkeletonDescription(rotary="", positions="embed_positions", first_position=2)


def describe(config: ConfigFields, layer: int) -> LayerDescription:
    describe_skeleton(config)
    config.note("ffn_dim", "enable_bias", "dropout", "layerdrop", "init_std")
    if not config.layer_norm_elementwise_affine:
        raise LookupError("its norms have no weights (layer_norm_elementwise_affine)")
    return LayerDescription(
        norm="layer",
        before_attention="self_attn_layer_norm",
        before_mlp="final_layer_norm",
        out="self_attn.out_proj",
        gate="",
        up="fc1",
        down="fc2",
        activation=config.activation("activation_function"),
        rotation="",
    )
