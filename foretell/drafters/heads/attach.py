"""A trained head as the model that a drafter brings: the one in a folder, else the one that ships
for the target.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from foretell.core.model import Model
from foretell.drafters.heads.formats.reading import load_any_head
from foretell.drafters.heads.networks.anchored import Anchored, Rows
from foretell.drafters.heads.networks.folder import head_kinds, target_shape
from foretell.drafters.heads.networks.model import HeadModel
from foretell.drafters.heads.networks.tree_shape import TreeShape
from foretell.errors import Unsupported
from foretell.ops.assets import hint_if_missing, shipped_files
from foretell.ops.fingerprint import norm_mark


def attach_head(
    target: Any, method: str, kind: str, folder: str, shape: TreeShape | None = None
) -> dict[str, Model]:
    """The model that a drafter of a head of this kind brings, under the name that it asks for it.

    `shape`: of trees that it may grow in one call. Raises Unsupported, BadModel.
    """
    make_headed = getattr(target, "build_head", None)  # as toys of the tests do
    return {"head": (make_headed or partial(head_model, target))(method, kind, folder, shape)}


def head_model(
    target: Any, method: str, kind: str, folder: str, shape: TreeShape | None
) -> HeadModel | Rows:
    """A head of this kind for a decoder: the one in `folder`; "": the one that ships for it.

    Raises Unsupported where there is none for `method`, or the target shows no hidden states;
    BadModel where the folder's is damaged, or made for another target.
    """
    target_shape(target, method)
    head_folder = Path(folder) if folder else shipped_head(target, kind)
    if head_folder is None:
        need = f"a head of kind {kind}, and none ships for this model"
        trainer = kind if head_kinds()[kind].bound else "head"
        cure = f"give {method}:head=FOLDER; `foretell train {trainer}` makes one{hint_if_missing()}"
        raise Unsupported.missing_capability(method, target.name, need, cure)
    head, kept_tokens = load_any_head(head_folder, target, kind)
    if isinstance(head, Anchored):
        return Rows(head, target)
    return HeadModel(head, kept_tokens, target, shape)


def shipped_head(target: Any, kind: str) -> Path | None:
    """The folder of the head of this kind that ships for a target, if there is one."""
    if getattr(target, "loop", None) is None or "taps" not in target.caps:
        return None
    target_norm, key_heads = norm_mark(target), target.layout[0][0]
    for config_path in shipped_files("*/config.json"):
        config = json.loads(config_path.read_text("utf-8"))
        if config.get("kind") != kind or config["fingerprint"]["norm"] != target_norm:
            continue
        if config["target"]["kv_heads"] == key_heads:  # merged heads leave the norm as it was
            return config_path.parent
    return None
