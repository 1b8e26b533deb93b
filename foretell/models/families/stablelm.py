"""StableLM: layer norms with biases and a part of each head turned; StableLM 2's larger ones have
both halves beside each other.
"""

from __future__ import annotations

from foretell.models.families.description import ConfigFields, LayerDescription

MODEL_TYPES = ("stablelm",)


def describe(config: ConfigFields, layer: int) -> LayerDescription:
    if config.qk_layernorm:
        raise LookupError("its heads have norms of their own, which are not described")
    is_parallel = bool(config.use_parallel_residual)
    return LayerDescription(
        norm="layer",
        before_mlp="input_layernorm" if is_parallel else "post_attention_layernorm",
        activation=config.activation(),
        parallel=is_parallel,
    )
