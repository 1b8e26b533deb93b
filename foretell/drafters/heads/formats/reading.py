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
from foretell.ops.parsing import parse_json

OWN = "foretell"  # the name of our own layout
# Hits by which the best way to count layers must be ahead, as a share of all tokens tried.
CLEAR = 0.1


@cache
def list_formats() -> dict[str, Format]:
    """The layouts of this package by name."""
    package = importlib.import_module("foretell.drafters.heads.formats")
    layouts = {}
    for module in pkgutil.iter_modules(package.__path__):
        for value in vars(importlib.import_module(f"{package.__name__}.{module.name}")).values():
            if isinstance(value, type) and issubclass(value, Format) and "name" in vars(value):
                layouts[value.name] = value()
    return layouts


def load_any_head(
    folder: Path, target: Any, kind: str = "", taps: str = ""
) -> tuple[Head, torch.Tensor | None]:
    """The head of a folder in any layout, and the tokens (Vd,) that it may draft, None: all.

    `kind`: which one is wanted; "": any. `taps`: how a published one counts the target's layers,
    see `check_taps`; "": as the folder says. Raises BadModel, BadConfig, Unsupported.
    """
    if is_own(folder):
        if taps:
            raise BadConfig(f"taps={taps!r}: {folder} is foretell's own and says its taps itself")
        return own.load_head(folder, target, kind)
    own.target_shape(target)
    checkpoint = Checkpoint(folder)
    format = recognise_format(checkpoint)
    if kind and format.kind != kind:
        format_kind = format.kind
        raise BadModel(
            f"{folder}: is a head for {format_kind}, not for {kind}; use --method {format_kind}"
        )
    if taps and not format.ways:
        raise BadConfig(
            f"taps={taps!r}: a head for {format.kind} reads the target's last state alone"
        )
    if taps and taps not in format.ways:
        raise BadConfig.field("taps", taps, f"one of {', '.join(format.ways)}")
    head, kept_tokens = format.load_head(checkpoint, target, taps)
    return head.requires_grad_(False).eval(), kept_tokens


def is_own(folder: Path) -> bool:
    """Whether a folder is to be read as one of ours: it says so, or is no whole head at all."""
    try:
        config = parse_json((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return True
    return not isinstance(config, dict) or "foretell" in str(config.get("schema", ""))


def recognise_format(checkpoint: Checkpoint) -> Format:
    """The one layout that a folder has. Raises BadModel."""
    matching_formats = [
        format for format in list_formats().values() if format.matches_folder(checkpoint)
    ]
    if len(matching_formats) != 1:
        names = ", ".join(format.name for format in matching_formats or list_formats().values())
        complaint = (
            "fits several layouts" if matching_formats else "has none of the layouts of heads"
        )
        raise checkpoint.bad_model(f"{complaint} that this version loads ({names})")
    return matching_formats[0]


@torch.inference_mode()
def hit_share(
    head: Head, kept_tokens: torch.Tensor | None, target: Any, tokens: Sequence[int]
) -> float:
    """The share of a text's tokens, from the third on, that the head drafts first."""
    tree = TokenTree(tokens[0]).chain(tokens[1:])
    read_taps = sorted({*head.taps})
    job, _ = target.cache().prepare(Ask(tree, rows=(), taps=tuple(read_taps)), tokens[:1], 1)
    (reply,) = target.forward([job])
    job.cache.drop()
    output = Output(target, kept_tokens, head.matrix)
    text_parts = [reply.hidden[tap] for tap in head.taps]
    if head.reads_normed:
        text_parts = [output.norm_states(part) for part in text_parts]
    features = torch.cat([part.float() for part in text_parts], -1)
    row_count = len(features) - head.lag
    features = torch.cat([torch.zeros_like(features[: head.lag]), features[:row_count]])
    ids = torch.tensor(tokens, device=features.device)
    embedded = target.embedded(ids).float()
    first_row = 0 if head.sees_first else 1
    text_parts = [part[None, first_row:] for part in (ids, embedded, features, embedded)]
    texts = Texts(*text_parts)
    head = head.to(features.device).float()
    drafted = next(iter(head.unroll_depths(texts, 1)))
    best_rows = output.logits(drafted.states[0].to(weight_type(output))).argmax(-1).cpu()
    drafted_tokens = best_rows if kept_tokens is None else kept_tokens[best_rows]
    expected_tokens = ids.cpu()[2:]
    return float((drafted_tokens[-len(expected_tokens) - 1 : -1] == expected_tokens).float().mean())


def weight_type(output: Output) -> torch.dtype:
    """The number format of the rows that the output matrix reads."""
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
    folder_head, kept_tokens = load_any_head(folder, target, taps=taps)
    way_shares: dict[str, float] = {}
    own_share = hit_share(folder_head, kept_tokens, target, tokens)
    if is_own(folder):
        return {OWN: own_share}
    format = recognise_format(Checkpoint(folder))
    if not format.ways:
        return {format.name: own_share}
    for way in format.ways:
        try:
            head, kept_tokens = load_any_head(folder, target, taps=way)
        except BadModel:
            continue  # it loads the other way: the numbers are of no layers this way
        way_shares[way] = hit_share(head, kept_tokens, target, tokens)
    best_way = max(way_shares, key=lambda way: way_shares[way])
    if way_shares[best_way] - own_share >= CLEAR:
        raise BadModel(
            f"{folder}: {format.ways_are} {best_way} ({way_shares[best_way]:.0%} of the tokens "
            f"against {own_share:.0%}); convert it with --taps {best_way}"
        )
    return way_shares
