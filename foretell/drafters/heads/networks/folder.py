"""A head on disk: config.json and model.safetensors in a folder.

The weights are the head's own alone; embeddings, last norm and output matrix are the target's. The
configuration says what target it was made for: its shape, a fingerprint of its last norm, and of
its tokens and its chat template.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import warnings
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from foretell.drafters.heads.networks.base import Head, HeadConfig, TargetShape
from foretell.drafters.heads.networks.output import check_tokens
from foretell.drafters.heads.networks.ranks import smooth_table
from foretell.errors import BadConfig, BadModel, ForetellWarning, Unsupported, first_message_line
from foretell.models.decoder.head_merging import FIELD
from foretell.ops.files import replace_file, write_text
from foretell.ops.fingerprint import fingerprint
from foretell.ops.parsing import parse_json

SCHEMA = "foretell.head/1"
WEIGHTS = "model.safetensors"
MAKE = "make one with `foretell train head`"


@cache
def head_kinds() -> dict[str, type[Head]]:
    """All heads by their kind; a new one is a class of this package, and on no list."""
    package = importlib.import_module("foretell.drafters.heads.networks")
    kind_classes = {}
    for module in pkgutil.iter_modules(package.__path__):
        for value in vars(
            importlib.import_module(f"foretell.drafters.heads.networks.{module.name}")
        ).values():
            if isinstance(value, type) and issubclass(value, Head) and "kind" in vars(value):
                kind_classes[value.kind] = value
    return kind_classes


def build_head(kind: str, target: TargetShape, options: dict[str, Any] | None = None) -> Head:
    """A head with random weights. Raises BadConfig."""
    if kind not in head_kinds():
        raise BadConfig.field("kind", kind, f"one of {', '.join(sorted(head_kinds()))}")
    head_class = head_kinds()[kind]
    head_options = dict(options or {})
    head_class.check_options(head_options)
    return head_class(HeadConfig(kind, target, head_options))


def target_shape(model: Any, method: str = "a head") -> TargetShape:
    """Sizes of a decoder that heads need to know. Raises Unsupported, for this method."""
    if getattr(model, "loop", None) is None or "taps" not in model.caps:
        need = "hidden states, which come of layers that can be run one by one"
        raise Unsupported.missing_capability(
            method, model.name, need, "use a method without a head"
        )
    config = model.config
    if getattr(config, FIELD, None) is not None:  # heads begin as copies of its layers
        need = "keys that are not projected after their rotation"
        raise Unsupported.missing_capability(
            method, model.name, need, "merge them with basis=folded"
        )
    if getattr(config, "intermediate_size", None) is None:
        need = "the width of its MLPs in config.json (intermediate_size)"
        raise Unsupported.missing_capability(
            method, model.name, need, "use a method without a head"
        )
    keys, width, _ = model.layout[0]
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    return TargetShape(
        hidden=int(config.hidden_size),
        layers=len(model.layout),
        vocab=int(model.vocab),
        heads=int(config.num_attention_heads),
        kv_heads=int(keys),
        width=int(width),
        intermediate=int(config.intermediate_size),
        theta=float(rope.get("rope_theta") or 10_000.0),
        eps=float(getattr(config, "rms_norm_eps", 1e-5)),
    )


def save_head(
    head: Head,
    kept_tokens: torch.Tensor | None,
    folder: Path,
    target: Any,
    extra_fields: dict[str, Any],
) -> None:
    """Writes the folder; `extra_fields`: what else its configuration is to say. Raises BadFile."""
    tensors = {
        name: value.detach().to("cpu", torch.bfloat16).contiguous()
        for name, value in head.state_dict().items()
    }
    if kept_tokens is not None:
        tensors["kept"] = kept_tokens.int().contiguous()
    config = {
        "schema": SCHEMA,
        **head.config.to_json(),
        "fingerprint": fingerprint(target),
        **extra_fields,
    }
    with replace_file(folder / WEIGHTS) as partial_path:
        save_file(tensors, partial_path)
    write_text(folder / "config.json", json.dumps(config, indent=1))


def load_head(folder: Path, target: Any, kind: str = "") -> tuple[Head, torch.Tensor | None]:
    """The head of a folder, and the tokens (Vd,) that it may draft, None: all.

    `kind`: which one is wanted; "": any. Raises BadModel where files are missing, damaged or of a
    target of another shape; warns where they are of another model of this shape.
    """
    config = read_config(folder)
    kind_name = config.get("kind")
    if not isinstance(kind_name, str):
        raise BadModel(f"{folder / 'config.json'}: kind={kind_name!r} must name a kind; {MAKE}")
    if kind and kind_name != kind:
        raise BadModel(
            f"{folder}: is a head for {kind_name}, not for {kind}; use --method {kind_name}"
        )
    if kind_name not in head_kinds():
        kind_names = ", ".join(sorted(head_kinds()))
        raise BadModel(
            f"{folder / 'config.json'}: kind={kind_name!r} is none of {kind_names}; {MAKE}"
        )
    try:
        head_config = HeadConfig.from_json(config)
        check_target(folder, head_config.target, target)
        with torch.device("meta"):  # no memory is taken for what the file has not
            expected_state = build_head(
                kind_name, target_shape(target), head_config.options
            ).state_dict()
    except BadConfig as error:
        raise BadModel(f"{folder / 'config.json'}: {error}; {MAKE}") from error
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        complaint = f"target or options are damaged ({first_message_line(error)}); {MAKE}"
        raise BadModel(f"{folder / 'config.json'}: {complaint}") from error
    tensors = read_tensors(folder / WEIGHTS)
    kept_tokens = tensors.pop("kept", None)
    missing, unknown = (
        sorted(expected_state.keys() - tensors.keys()),
        sorted(tensors.keys() - expected_state.keys()),
    )
    if missing or unknown:
        complaint = (
            f"lacks {missing[0]}" if missing else f"has {unknown[0]}, which {kind_name} has not"
        )
        raise BadModel(f"{folder / WEIGHTS}: {complaint}; it does not belong to its config.json")
    for name, value in tensors.items():
        if value.shape != expected_state[name].shape:
            shapes = (
                f"{tuple(value.shape)}, and {kind_name} has {tuple(expected_state[name].shape)}"
            )
            raise BadModel(f"{folder / WEIGHTS}: {name} is {shapes}")
        if not value.isfinite().all():
            complaint = f"{name} is damaged (a weight is not a finite number)"
            raise BadModel(f"{folder / WEIGHTS}: {complaint}; {MAKE}")
    head = build_head(kind_name, target_shape(target), head_config.options)
    head.load_state_dict(tensors)
    try:
        check_tokens(kept_tokens, head.matrix, target.vocab)
    except BadConfig as error:
        raise BadModel(f"{folder / WEIGHTS}: {error}; {MAKE}") from error
    head.requires_grad_(False).eval()
    head.ranks = read_ranks(folder, config.get("ranks", []))
    recorded_marks = config.get("fingerprint", {})
    if not isinstance(recorded_marks, dict):
        raise BadModel(
            f"{folder / 'config.json'}: fingerprint={recorded_marks!r} must be a table; {MAKE}"
        )
    warn_of_another(folder, recorded_marks, target, head.bound)
    return head, None if kept_tokens is None else kept_tokens.long()


def read_config(folder: Path) -> dict[str, Any]:
    """Raises BadModel."""
    path = folder / "config.json"
    try:
        config = parse_json(path.read_text("utf-8"))
        schema = config.get("schema")
    except (OSError, ValueError, AttributeError) as error:
        raise BadModel(f"{path}: is no head's ({first_message_line(error)}); {MAKE}") from error
    if schema != SCHEMA:
        raise BadModel(f"{path}: is of schema {schema!r}, not {SCHEMA}; {MAKE}")
    return dict(config)


def read_ranks(folder: Path, rank_table: Any) -> list[list[float]]:
    """The shares of right ranks that a configuration tells, by depth. Raises BadModel."""
    try:
        shares = [[float(share) for share in row] for row in rank_table]
    except (TypeError, ValueError):
        shares = [[-1.0]]
    if not all(row and all(0 <= share <= 1 for share in row) for row in shares):
        raise BadModel(f"{folder / 'config.json'}: ranks must be shares from 0 to 1; {MAKE}")
    return smooth_table(shares)


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """All of a file, in float32; whole numbers stay. Raises BadModel."""
    try:
        with safe_open(path, "pt") as tensor_file:
            names = tensor_file.keys()
            tensors = {name: tensor_file.get_tensor(name) for name in names}
    except (OSError, SafetensorError) as error:
        raise BadModel(f"{path}: cannot be read ({first_message_line(error)}); {MAKE}") from error
    return {
        name: tensor.float() if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }


def check_target(folder: Path, shape: TargetShape, target: Any) -> None:
    """Raises BadModel for a head of a target of another shape, naming the first field."""
    target_fields = target_shape(target)
    for part in fields(TargetShape):
        expected, actual = getattr(shape, part.name), getattr(target_fields, part.name)
        if expected != actual:
            raise BadModel(
                f"{folder}: was made for a target of {part.name}={expected}, and {target.name} has "
                f"{actual}; {MAKE} for it"
            )


def warn_of_another(
    folder: Path, recorded_marks: dict[str, str], target: Any, bound: bool = False
) -> None:
    """Warns where the target's weights, tokens or template are not those it was made for.

    `bound`: what it says enters texts unverified. Then raises BadModel for other weights or tokens.
    """
    target_marks = fingerprint(target)
    meanings = {"norm": "weights", "tokens": "a tokenizer", "template": "a chat template"}
    differences = [
        meanings[name]
        for name in meanings
        if recorded_marks.get(name, "") != target_marks.get(name, "")
    ]
    if bound and differences and differences != [meanings["template"]]:
        complaint = f"was made for {' and '.join(differences)} other than those of {target.name}"
        raise BadModel(
            f"{folder}: {complaint}, and what it says is not verified; load its own model"
        )
    if differences:
        warnings.warn(
            f"{folder}: was made for {' and '.join(differences)} other than those of "
            f"{target.name}; it drafts worse, and never changes the answers",
            ForetellWarning,
            stacklevel=2,
        )
