"""The layout of EAGLE-3 as its authors, SpecForge and vLLM have it.

`fc`, `midlayer` or `layers.0`, `norm` and `lm_head`, with `d2t` from draft tokens to the target's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from foretell.drafters.heads.formats.base import CONVENTIONS, Format
from foretell.drafters.heads.formats.checkpoint import Checkpoint, layer_names, layer_options
from foretell.drafters.heads.networks.base import Head
from foretell.drafters.heads.networks.folder import build_head, target_shape
from foretell.errors import BadConfig


class Eagle3Format(Format):
    """EAGLE-3's."""

    name = "eagle3"
    kind = "eagle3"

    def matches_folder(self, checkpoint: Checkpoint) -> bool:
        names_library = "speculators_model_type" in checkpoint.config
        return (
            "fc.weight" in checkpoint and layer_prefix(checkpoint) is not None and not names_library
        )

    def load_head(
        self, checkpoint: Checkpoint, target: Any, taps: str = ""
    ) -> tuple[Head, torch.Tensor | None]:
        config = checkpoint.config
        inner_config = config.get("eagle_config")
        fields = {**config, **(inner_config if isinstance(inner_config, dict) else {})}
        options = {
            "stream_normed": bool(fields.get("norm_before_residual", False)),
            # SpecForge's word for the norm before the output matrix.
            "last_norm": bool(fields.get("norm_output", True)),
        }
        layers = target_shape(target).layers
        ids = read_ids(checkpoint, fields)
        if not taps:
            # SpecForge counts what leaves a layer, the others what enters it; its own three are
            # known at sight.
            taps = "output" if ids == (1, layers // 2 - 1, layers - 4) else "input"
        return load_eagle3(checkpoint, target, config, options, ids, taps)


def layer_prefix(checkpoint: Checkpoint) -> str | None:
    """The prefix of the one layer, which has a norm of the state."""
    prefixes = ("midlayer.", "layers.0.")
    matching_prefixes = [
        prefix for prefix in prefixes if f"{prefix}hidden_norm.weight" in checkpoint
    ]
    return matching_prefixes[0] if matching_prefixes else None


def read_ids(checkpoint: Checkpoint, config: Mapping[str, Any]) -> tuple[int, ...]:
    """The numbers of the layers whose states the head reads; (): it says none. Raises BadModel."""
    for name in ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids"):
        ids = config.get(name)
        if ids:
            if not isinstance(ids, list) or not all(type(i) is int for i in ids):
                raise checkpoint.bad_model(f"{name}={ids!r}: must be numbers of layers")
            return tuple(ids)
    return ()


def load_eagle3(
    checkpoint: Checkpoint,
    target: Any,
    config: Mapping[str, Any],
    options: dict[str, Any],
    ids: tuple[int, ...],
    convention: str,
) -> tuple[Head, torch.Tensor | None]:
    """A head of EAGLE-3's build. `config`: of its layer, as llama's. Raises BadModel."""
    shape = target_shape(target)
    if convention not in CONVENTIONS:
        raise BadConfig.field("taps", convention, f"one of {', '.join(CONVENTIONS)}")
    taps = tuple(layer_number + (convention == "output") for layer_number in ids)
    missing_layers = [
        layer_number for layer_number in taps if not 0 <= layer_number <= shape.layers
    ]
    if missing_layers:
        complaint = f"eagle_aux_hidden_state_layer_ids={list(ids)}"
        raise checkpoint.bad_model(f"{complaint}, and {target.name} has {shape.layers} layers")
    if not taps and shape.layers < 3:
        complaint = "names no eagle_aux_hidden_state_layer_ids, and the usual ones need 3 layers"
        raise checkpoint.bad_model(f"{complaint}; {target.name} has {shape.layers}")
    target_width = checkpoint.config.get("target_hidden_size")
    if target_width not in (None, shape.hidden):
        raise checkpoint.bad_model(
            f"target_hidden_size={target_width}, and {target.name} has {shape.hidden}"
        )
    kept_tokens, row_order = read_kept_tokens(checkpoint, target.vocab)
    matrix_shape = checkpoint.shapes.get("lm_head.weight")
    if matrix_shape is None and kept_tokens is not None:
        raise checkpoint.bad_model("lacks lm_head.weight; fetch it again")
    options |= {
        "taps": list(taps),
        "layer": layer_options(checkpoint, config, shape),
        "own_matrix": 0 if matrix_shape is None else matrix_shape[0],
    }
    if "fc_norm.0.weight" in checkpoint:
        options["tap_norms"] = "each"
    elif "input_norm.weight" in checkpoint:
        options["tap_norms"] = "all"
    rows = target.vocab if kept_tokens is None else len(kept_tokens)
    if matrix_shape is not None and matrix_shape[0] != rows:
        raise checkpoint.bad_model(
            f"lm_head.weight has {matrix_shape[0]} rows, and {rows} tokens are drafted"
        )
    head: Any = build_head("eagle3", shape, options)
    layer = layer_prefix(checkpoint)
    assert layer is not None
    checkpoint.check_tokens(target)
    used = {"d2t", "t2d", "embed_tokens.weight", *([] if head.norm else ["norm.weight"])}
    checkpoint.fill_head(head, eagle3_names(head, layer), used)
    if matrix_shape is not None and row_order is not None:
        head.matrix.weight.data = head.matrix.weight.data[row_order]
    return head, kept_tokens


def eagle3_names(head: Any, layer: str) -> dict[str, str]:
    """The names in files of a head's tensors -> ours."""
    names = {
        "fc.weight": "fc.weight",
        f"{layer}input_layernorm.weight": "token_norm.weight",
        f"{layer}hidden_norm.weight": "state_norm.weight",
        **layer_names(layer),
    }
    if head.norm is not None:
        names["norm.weight"] = "norm.weight"
    if head.matrix is not None:
        names["lm_head.weight"] = "matrix.weight"
    if head.option("tap_norms") == "all":
        names["input_norm.weight"] = "tap_norms.0.weight"
    else:
        norm_numbers = range(len(head.tap_norms))
        names |= {f"fc_norm.{i}.weight": f"tap_norms.{i}.weight" for i in norm_numbers}
    return names


def read_kept_tokens(
    checkpoint: Checkpoint, vocab: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The tokens (Vd,) that are drafted, ascending, and the rows (Vd,) of the file's matrix that
    stand for them; None: all, as they are. Raises BadModel.
    """
    if "t2d" in checkpoint and checkpoint.shapes["t2d"] != (vocab,):
        complaint = (
            f"t2d has {checkpoint.shapes['t2d'][0]} tokens, and the target's vocabulary {vocab}"
        )
        raise checkpoint.bad_model(f"{complaint}; give the model it is for")
    vocab_size = checkpoint.config.get("draft_vocab_size")
    if "d2t" not in checkpoint:
        if vocab_size not in (None, vocab):
            raise checkpoint.bad_model("lacks d2t; fetch it again")
        return None, None
    offsets = checkpoint.read_tensor("d2t").long()
    if offsets.ndim != 1 or vocab_size not in (None, len(offsets)):
        raise checkpoint.bad_model(
            f"d2t is {tuple(offsets.shape)}, and draft_vocab_size={vocab_size}"
        )
    kept_tokens, row_order = (offsets + torch.arange(len(offsets))).sort()
    if (
        int(kept_tokens[0]) < 0
        or int(kept_tokens[-1]) >= vocab
        or bool((kept_tokens[1:] == kept_tokens[:-1]).any())
    ):
        raise checkpoint.bad_model(f"d2t: must lead to tokens below {vocab}, to each once")
    if "t2d" in checkpoint:
        marked_tokens = checkpoint.read_tensor("t2d").bool().nonzero().flatten()
        if not torch.equal(marked_tokens, kept_tokens):
            raise checkpoint.bad_model("t2d and d2t name different tokens; fetch it again")
    return kept_tokens, row_order
