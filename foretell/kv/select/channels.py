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

from foretell.core.tree import TokenTree
from foretell.core.types import Ask
from foretell.errors import Unsupported
from foretell.kv.base import CachePolicy
from foretell.kv.select.marked import Kind
from foretell.ops.attention import Attention

if TYPE_CHECKING:
    from foretell.core.model import Model


def _find_fault(channels: torch.Tensor) -> str:
    has_shape = channels.dim() == 3 and channels.numel() > 0
    channel_numbers = torch.arange(channels.shape[-1])
    if has_shape and bool((channels.sort(-1).values == channel_numbers).all()):
        return ""
    return "a head's channels are not all there once"


CHANNELS = Kind(
    "channels",
    "a table of its key channels",
    "make one with `foretell train channels --model MODEL --text TEXTS --out FILE`",
    "calibration",
    _find_fault,
)


@dataclass(eq=False)
class Observed(CachePolicy):
    """Adds up |q_d k_d| of all nodes, for all caches that are forked from it: of each layer
    (KV, D), in float64.
    """

    sums: dict[int, torch.Tensor] = field(default_factory=dict)

    plain = False

    def attend_job(self, job: Any, attention: Attention) -> torch.Tensor:
        q, keys = attention.q, attention.keys[:, job.start :]
        wide_type = torch.promote_types(q.dtype, torch.float32)
        channel_products = q.unflatten(0, (len(keys), -1)).to(wide_type) * keys[:, None].to(
            wide_type
        )
        channel_sums = channel_products.abs().mean(1).sum(1).cpu().double()
        self.sums[attention.layer] = self.sums.get(attention.layer, 0) + channel_sums
        return attention.full_output()


@torch.inference_mode()
def measure_channels(model: Model, texts: Iterable[Sequence[int]]) -> tuple[torch.Tensor, int]:
    """The importance (L, KV, D) of a model's key channels on these texts, and how many tokens they
    have; without any it is empty.

    Raises Unsupported where its keys are not alike in all layers.
    """
    if not model.layout or len({*model.layout}) != 1 or None in model.layout:
        missing_need = "keys of one shape in every layer"
        raise Unsupported.missing_capability(
            "train channels", model.name, missing_need, "use another policy"
        )
    observer = Observed()
    token_count = read_under(model, observer, texts)
    if not token_count:
        return torch.zeros(0), 0
    return torch.stack(
        [observer.sums[layer].cpu() for layer in range(len(model.layout))]
    ) / token_count, token_count


def read_under(model: Model, policy: CachePolicy, texts: Iterable[Sequence[int]]) -> int:
    """Has a model read texts of one or more tokens, each by itself, on caches under a policy that
    watches; returns how many tokens that were.
    """
    token_count = 0
    for text in texts:
        cache = model.cache()
        cache.use(policy)
        tree = TokenTree(text[0]).chain(text[1:])
        job, _ = cache.prepare(Ask(tree, rows=()), text[:1], 1)
        model.forward([job])
        cache.drop()
        token_count += len(text)
    return token_count


def save_channels(importance: torch.Tensor, path: Path, model: Model, token_count: int) -> None:
    """Writes the table, whole or not at all. Raises BadFile."""
    channel_order = importance.argsort(dim=-1, descending=True, stable=True).to(torch.int16)
    CHANNELS.save_table(channel_order, path, model, tokens=str(token_count))


def table_for(model: Model, calibration: str, method: str) -> torch.Tensor:
    """The table (L, KV, D) in a file or a folder; without one that which ships for this model.

    Raises BadFile where it is another model's, Unsupported where none ships.
    """
    layer_shapes = [shape for shape in model.layout if shape is not None]
    return CHANNELS.find_table(
        model, calibration, method, (len(layer_shapes), *layer_shapes[0][:2])
    ).long()
