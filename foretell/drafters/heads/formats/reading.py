"""Folders of heads in any layout: ours, and those that others publish.

A published folder is recognised by what it holds. What its file leaves open, how the target's
layers are counted, is measured by `check_taps`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from foretell.core.tree import TokenTree
from foretell.core.types import Ask
from foretell.drafters.heads.formats.base import Format
from foretell.drafters.heads.formats.checkpoint import Checkpoint
from foretell.drafters.heads.networks import folder as own
from foretell.drafters.heads.networks.base import Head, Texts
from foretell.drafters.heads.networks.output import Output
from foretell.errors import BadConfig, BadModel
from foretell.ops.parsing import json_of

OWN = "foretell"  # the name of our own layout
# Hits by which the best way to count layers must be ahead, as a share of all tokens tried.
CLEAR = 0.1


@cache
def formats() -> dict[str, Format]:
    """The layouts of this package by name."""
    package = importlib.import_module("foretell.drafters.heads.formats")
    found = {}
    for module in pkgutil.iter_modules(package.__path__):
        for value in vars(importlib.import_module(f"{package.__name__}.{module.name}")).values():
            if isinstance(value, type) and issubclass(value, Format) and "name" in vars(value):
                found[value.name] = value()
    return found


def load(
    folder: Path, target: Any, kind: str = "", taps: str = ""
) -> tuple[Head, torch.Tensor | None]:
    """The head of a folder in any layout, and the tokens (Vd,) that it may draft, None: all.

    `kind`: which one is wanted; "": any. `taps`: how a published one counts the target's layers,
    see `check_taps`; "": as the folder says. Raises BadModel, BadConfig, Unsupported.
    """
    if is_own(folder):
        if taps:
            raise BadConfig(f"taps={taps!r}: {folder} is foretell's own and says its taps itself")
        return own.load(folder, target, kind)
    own.target_shape(target)
    checkpoint = Checkpoint(folder)
    format = recognised(checkpoint)
    if kind and format.kind != kind:
        found = format.kind
        raise BadModel(f"{folder}: is a head for {found}, not for {kind}; use --method {found}")
    if taps and not format.ways:
        raise BadConfig(
            f"taps={taps!r}: a head for {format.kind} reads the target's last state alone"
        )
    if taps and taps not in format.ways:
        raise BadConfig.field("taps", taps, f"one of {', '.join(format.ways)}")
    head, kept = format.load(checkpoint, target, taps)
    return head.requires_grad_(False).eval(), kept


def is_own(folder: Path) -> bool:
    """Whether a folder is to be read as one of ours: it says so, or is no whole head at all."""
    try:
        config = json_of((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return True
    return not isinstance(config, dict) or "foretell" in str(config.get("schema", ""))


def recognised(checkpoint: Checkpoint) -> Format:
    """The one layout that a folder has. Raises BadModel."""
    known = [format for format in formats().values() if format.matches(checkpoint)]
    if len(known) != 1:
        names = ", ".join(format.name for format in known or formats().values())
        what = "fits several layouts" if known else "has none of the layouts of heads"
        raise checkpoint.bad(f"{what} that this version loads ({names})")
    return known[0]


@torch.inference_mode()
def hits(head: Head, kept: torch.Tensor | None, target: Any, tokens: Sequence[int]) -> float:
    """The share of a text's tokens, from the third on, that the head drafts first."""
    tree = TokenTree(tokens[0]).chain(tokens[1:])
    asked = sorted({*head.taps})
    job, _ = target.cache().prepare(Ask(tree, rows=(), taps=tuple(asked)), tokens[:1], 1)
    (reply,) = target.forward([job])
    job.cache.drop()
    output = Output(target, kept, head.matrix)
    parts = [reply.hidden[tap] for tap in head.taps]
    if head.reads_normed:
        parts = [output.normed(part) for part in parts]
    features = torch.cat([part.float() for part in parts], -1)
    before = len(features) - head.lag
    features = torch.cat([torch.zeros_like(features[: head.lag]), features[:before]])
    ids = torch.tensor(tokens, device=features.device)
    embedded = target.embedded(ids).float()
    first = 0 if head.sees_first else 1
    parts = [part[None, first:] for part in (ids, embedded, features, embedded)]
    texts = Texts(*parts)
    head = head.to(features.device).float()
    drafted = next(iter(head.unroll(texts, 1)))
    best = output.logits(drafted.states[0].to(weight_type(output))).argmax(-1).cpu()
    named = best if kept is None else kept[best]
    wanted = ids.cpu()[2:]
    return float((named[-len(wanted) - 1 : -1] == wanted).float().mean())


def weight_type(output: Output) -> torch.dtype:
    """What rows the matrix reads."""
    weight = getattr(output.matrix, "weight", None)
    return torch.float32 if weight is None else weight.dtype


def check_taps(
    folder: Path, target: Any, tokens: Sequence[int], taps: str = ""
) -> dict[str, float]:
    """How often a published head is right on a text the target wrote, by the ways in which its
    folder may be meant, as the way layers are counted: {"input": share, "output": share}; ways that
    name layers the target lacks are left out.

    `taps`: the way that is to be used; "": the folder's. Raises BadModel, naming the right way,
    where another is clearly better.
    """
    if len(tokens) < 3:
        raise BadConfig(f"check_taps: needs 3 tokens at least, not {len(tokens)}")
    chosen, kept = load(folder, target, taps=taps)
    found: dict[str, float] = {}
    own_share = hits(chosen, kept, target, tokens)
    if is_own(folder):
        return {OWN: own_share}
    format = recognised(Checkpoint(folder))
    if not format.ways:
        return {format.name: own_share}
    for way in format.ways:
        try:
            head, kept = load(folder, target, taps=way)
        except BadModel:
            continue  # it loads the other way: the numbers are of no layers this way
        found[way] = hits(head, kept, target, tokens)
    best = max(found, key=lambda way: found[way])
    if found[best] - own_share >= CLEAR:
        raise BadModel(
            f"{folder}: {format.ways_are} {best} ({found[best]:.0%} of the tokens against "
            f"{own_share:.0%}); convert it with --taps {best}"
        )
    return found
