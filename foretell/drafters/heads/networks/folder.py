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
from foretell.drafters.heads.networks.ranks import smoothed
from foretell.errors import BadConfig, BadModel, ForetellWarning, Unsupported, first_line
from foretell.models.decoder.head_merging import FIELD
from foretell.ops.files import whole, write_text
from foretell.ops.fingerprint import fingerprint
from foretell.ops.parsing import json_of

SCHEMA = "foretell.head/1"
WEIGHTS = "model.safetensors"
MAKE = "make one with `foretell train head`"


@cache
def kinds() -> dict[str, type[Head]]:
    """All heads by their kind; a new one is a class of this package, and on no list."""
    package = importlib.import_module("foretell.drafters.heads.networks")
    found = {}
    for module in pkgutil.iter_modules(package.__path__):
        for value in vars(
            importlib.import_module(f"foretell.drafters.heads.networks.{module.name}")
        ).values():
            if isinstance(value, type) and issubclass(value, Head) and "kind" in vars(value):
                found[value.kind] = value
    return found


def build(kind: str, target: TargetShape, options: dict[str, Any] | None = None) -> Head:
    """A head with random weights. Raises BadConfig."""
    if kind not in kinds():
        raise BadConfig.field("kind", kind, f"one of {', '.join(sorted(kinds()))}")
    made = kinds()[kind]
    given = dict(options or {})
    made.check(given)
    return made(HeadConfig(kind, target, given))


def target_shape(model: Any, method: str = "a head") -> TargetShape:
    """What heads need to know of a decoder. Raises Unsupported, for this method."""
    if getattr(model, "loop", None) is None or "taps" not in model.caps:
        need = "hidden states, which come of layers that can be run one by one"
        raise Unsupported.missing(method, model.name, need, "use a method without a head")
    config = model.config
    if getattr(config, FIELD, None) is not None:  # heads begin as copies of its layers
        need = "keys that are not projected behind their rotation"
        raise Unsupported.missing(method, model.name, need, "merge them with basis=folded")
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


def save(
    head: Head, kept: torch.Tensor | None, folder: Path, target: Any, about: dict[str, Any]
) -> None:
    """Writes the folder; `about`: what else its configuration is to say. Raises BadFile."""
    tensors = {
        name: value.detach().to("cpu", torch.bfloat16).contiguous()
        for name, value in head.state_dict().items()
    }
    if kept is not None:
        tensors["kept"] = kept.int().contiguous()
    config = {
        "schema": SCHEMA,
        **head.config.to_json(),
        "fingerprint": fingerprint(target),
        **about,
    }
    with whole(folder / WEIGHTS) as part:
        save_file(tensors, part)
    write_text(folder / "config.json", json.dumps(config, indent=1))


def load(folder: Path, target: Any, kind: str = "") -> tuple[Head, torch.Tensor | None]:
    """The head of a folder, and the tokens (Vd,) that it may draft, None: all.

    `kind`: which one is wanted; "": any. Raises BadModel where files are missing, damaged or of a
    target of another shape; warns where they are of another model of this shape.
    """
    config = read_config(folder)
    found = config.get("kind")
    if not isinstance(found, str):
        raise BadModel(f"{folder / 'config.json'}: kind={found!r} must name a kind; {MAKE}")
    if kind and found != kind:
        raise BadModel(f"{folder}: is a head for {found}, not for {kind}; use --method {found}")
    if found not in kinds():
        allowed = ", ".join(sorted(kinds()))
        raise BadModel(f"{folder / 'config.json'}: kind={found!r} is none of {allowed}; {MAKE}")
    try:
        made = HeadConfig.from_json(config)
        check_target(folder, made.target, target)
        with torch.device("meta"):  # no memory is taken for what the file has not
            own = build(found, target_shape(target), made.options).state_dict()
    except BadConfig as error:
        raise BadModel(f"{folder / 'config.json'}: {error}; {MAKE}") from error
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        what = f"target or options are damaged ({first_line(error)}); {MAKE}"
        raise BadModel(f"{folder / 'config.json'}: {what}") from error
    tensors = read_tensors(folder / WEIGHTS)
    kept = tensors.pop("kept", None)
    missing, unknown = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
    if missing or unknown:
        what = f"lacks {missing[0]}" if missing else f"has {unknown[0]}, which {found} has not"
        raise BadModel(f"{folder / WEIGHTS}: {what}; it does not belong to its config.json")
    for name, value in tensors.items():
        if value.shape != own[name].shape:
            shapes = f"{tuple(value.shape)}, and {found} has {tuple(own[name].shape)}"
            raise BadModel(f"{folder / WEIGHTS}: {name} is {shapes}")
        if not value.isfinite().all():
            what = f"{name} is damaged (a weight is not a finite number)"
            raise BadModel(f"{folder / WEIGHTS}: {what}; {MAKE}")
    head = build(found, target_shape(target), made.options)
    head.load_state_dict(tensors)
    try:
        check_tokens(kept, head.matrix, target.vocab)
    except BadConfig as error:
        raise BadModel(f"{folder / WEIGHTS}: {error}; {MAKE}") from error
    head.requires_grad_(False).eval()
    head.ranks = ranks_of(folder, config.get("ranks", []))
    told = config.get("fingerprint", {})
    if not isinstance(told, dict):
        raise BadModel(f"{folder / 'config.json'}: fingerprint={told!r} must be a table; {MAKE}")
    warn_of_another(folder, told, target, head.bound)
    return head, None if kept is None else kept.long()


def read_config(folder: Path) -> dict[str, Any]:
    """Raises BadModel."""
    path = folder / "config.json"
    try:
        config = json_of(path.read_text("utf-8"))
        schema = config.get("schema")
    except (OSError, ValueError, AttributeError) as error:
        raise BadModel(f"{path}: is no head's ({first_line(error)}); {MAKE}") from error
    if schema != SCHEMA:
        raise BadModel(f"{path}: is of schema {schema!r}, not {SCHEMA}; {MAKE}")
    return dict(config)


def ranks_of(folder: Path, told: Any) -> list[list[float]]:
    """The shares of right ranks that a configuration tells, by depth. Raises BadModel."""
    try:
        shares = [[float(share) for share in row] for row in told]
    except (TypeError, ValueError):
        shares = [[-1.0]]
    if not all(row and all(0 <= share <= 1 for share in row) for row in shares):
        raise BadModel(f"{folder / 'config.json'}: ranks must be shares from 0 to 1; {MAKE}")
    return smoothed(shares)


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """All of a file, in float32; whole numbers stay. Raises BadModel."""
    try:
        with safe_open(path, "pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise BadModel(f"{path}: cannot be read ({first_line(error)}); {MAKE}") from error
    return {name: t.float() if t.is_floating_point() else t for name, t in tensors.items()}


def check_target(folder: Path, shape: TargetShape, target: Any) -> None:
    """Raises BadModel for a head of a target of another shape, naming the first field."""
    ours = target_shape(target)
    for part in fields(TargetShape):
        wanted, found = getattr(shape, part.name), getattr(ours, part.name)
        if wanted != found:
            raise BadModel(
                f"{folder}: was made for a target of {part.name}={wanted}, and {target.name} has "
                f"{found}; {MAKE} for it"
            )


def warn_of_another(folder: Path, told: dict[str, str], target: Any, bound: bool = False) -> None:
    """Warns where the target's weights, tokens or template are not those it was made for.

    `bound`: what it says enters texts unverified. Then raises BadModel for other weights or tokens.
    """
    ours = fingerprint(target)
    meanings = {"norm": "weights", "tokens": "a tokenizer", "template": "a chat template"}
    other = [meanings[name] for name in meanings if told.get(name, "") != ours.get(name, "")]
    if bound and other and other != [meanings["template"]]:
        what = f"was made for {' and '.join(other)} other than those of {target.name}"
        raise BadModel(f"{folder}: {what}, and what it says is not verified; load its own model")
    if other:
        warnings.warn(
            f"{folder}: was made for {' and '.join(other)} other than those of {target.name}; "
            "it drafts worse, and never changes the answers",
            ForetellWarning,
            stacklevel=2,
        )
