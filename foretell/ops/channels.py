"""The key channels by which rows are found: which matter, told by queries and keys of texts.

A table is a safetensors file with one tensor, `channels` (L, KV, D): of each layer and key head
its channels, the most important first. A channel is as important as its part of the products of
queries and keys, the mean over tokens and the query heads of |q_d k_d|.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from foretell.core.tree import TokenTree
from foretell.core.types import Ask
from foretell.errors import BadFile, Unsupported, first_line
from foretell.ops.attention import Attention
from foretell.ops.files import whole
from foretell.ops.fingerprint import norm_mark
from foretell.ops.keeping import CachePolicy

if TYPE_CHECKING:
    from foretell.core.model import Model

SCHEMA = "foretell channels 1"
MAKE = "make one with `foretell train channels --model MODEL --text TEXTS --out FILE`"
NAME = "channels.safetensors"  # in a folder
SHIPPED = Path(__file__).parents[1] / "assets" / "channels"


@dataclass(eq=False)
class Observed(CachePolicy):
    """Adds up |q_d k_d| of all nodes, for all caches that are forked from it: of each layer
    (KV, D), in float64.
    """

    sums: dict[int, torch.Tensor] = field(default_factory=dict)

    plain = False

    def attend(self, job: Any, asked: Attention) -> torch.Tensor:
        q, keys = asked.q, asked.keys[:, job.start :]
        wide = torch.promote_types(q.dtype, torch.float32)
        products = q.unflatten(0, (len(keys), -1)).to(wide) * keys[:, None].to(wide)
        given = products.abs().mean(1).sum(1).cpu().double()
        self.sums[asked.layer] = self.sums.get(asked.layer, 0) + given
        return asked.whole()


@torch.inference_mode()
def measured(model: Model, texts: Iterable[Sequence[int]]) -> tuple[torch.Tensor, int]:
    """The importance (L, KV, D) of a model's key channels on these texts, and how many tokens they
    have; without any it is empty.

    Raises Unsupported where its keys are not alike in all layers.
    """
    if not model.layout or len({*model.layout}) != 1 or None in model.layout:
        need = "keys of one shape in every layer"
        raise Unsupported.missing("train channels", model.name, need, "use another policy")
    seen = Observed()
    tokens = read_under(model, seen, texts)
    if not tokens:
        return torch.zeros(0), 0
    return torch.stack(
        [seen.sums[layer].cpu() for layer in range(len(model.layout))]
    ) / tokens, tokens


def read_under(model: Model, policy: CachePolicy, texts: Iterable[Sequence[int]]) -> int:
    """Has a model read texts of one or more tokens, each by itself, on caches under a policy that
    watches; returns how many tokens that were.
    """
    tokens = 0
    for text in texts:
        cache = model.cache()
        cache.use(policy)
        tree = TokenTree(text[0]).chain(text[1:])
        job, _ = cache.prepare(Ask(tree, rows=()), text[:1], 1)
        model.forward([job])
        cache.drop()
        tokens += len(text)
    return tokens


def save(importance: torch.Tensor, path: Path, model: Model, tokens: int) -> None:
    """Writes the table, whole or not at all. Raises BadFile."""
    order = importance.argsort(dim=-1, descending=True, stable=True).to(torch.int16)
    about = {"schema": SCHEMA, "norm": norm_mark(model), "tokens": str(tokens)}
    with whole(path) as part:
        save_file({"channels": order.contiguous()}, part, about)


def read(path: Path) -> tuple[torch.Tensor, str]:
    """A file's table (L, KV, D), and the mark of the model that it was made for. Raises BadFile."""
    try:
        with safe_open(path, "pt") as opened:
            about = opened.metadata() or {}
            if about.get("schema") != SCHEMA or [*opened.keys()] != ["channels"]:
                raise BadFile(f"{path}: is no table of channels; {MAKE}")
            channels = opened.get_tensor("channels").long()
    except (OSError, SafetensorError) as error:
        raise BadFile(f"{path}: cannot be read ({first_line(error)}); {MAKE}") from error
    whole_rows = channels.dim() == 3 and channels.numel() > 0
    if not whole_rows or not bool(
        (channels.sort(-1).values == torch.arange(channels.shape[-1])).all()
    ):
        raise BadFile(f"{path}: is damaged (a head's channels are not all there once); {MAKE}")
    return channels, about.get("norm", "")


def table_for(model: Model, calibration: str, method: str) -> torch.Tensor:
    """The table (L, KV, D) in a file, or in a folder under NAME; without one that which ships for
    this model. Raises BadFile where it is another model's, Unsupported where none ships.
    """
    mark = norm_mark(model)
    shapes = [shape[:2] for shape in model.layout if shape is not None]
    if not calibration:
        for path in sorted(SHIPPED.glob("*.safetensors")):
            channels, norm = read(path)
            if mark and norm == mark:
                return channels
        need = "a table of its key channels, and none ships for it"
        cure = f"{MAKE} and give it as calibration=FILE"
        raise Unsupported.missing(method, model.name, need, cure)
    path = Path(calibration)
    if path.is_dir():
        path = path / NAME
    channels, norm = read(path)
    if norm != mark or [tuple(channels.shape[1:])] * len(channels) != shapes:
        raise BadFile(f"{path}: was made for another model than {model.name}; {MAKE}")
    return channels
