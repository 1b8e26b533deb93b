"""Positions of several axes, such as those of Qwen2-VL: a part of a picture has a time, a row and a
column.

To the heart and to caches a token's position is its place in the text, here as in every family. The
axes matter to the rotation of queries and keys alone, which is where they are looked up. Those of a
prompt come from the model's own `get_rope_index`; behind it every axis goes on by one a token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from foretell.errors import BadConfig

Index = Callable[..., tuple[torch.Tensor, torch.Tensor]]
GRID = "image_grid_thw"  # of each picture: how many parts it has in time, height and width


def rope_index(hf: PreTrainedModel) -> Index | None:
    """What finds the axes of a prompt's tokens; None: a position of this model is one number."""
    modules = (hf, hf.base_model)
    found = (getattr(module, "get_rope_index", None) for module in modules)
    return next((index for index in found if index is not None), None)


@contextmanager
def deltas_kept(hf: PreTrainedModel) -> Iterator[None]:
    """Inside, the model may read pictures: what it remembers of their positions, for texts that its
    user goes on with, is put back.
    """
    body: Any = hf.base_model
    before = getattr(body, "rope_deltas", None)
    try:
        yield
    finally:
        if hasattr(body, "rope_deltas"):
            body.rope_deltas = before


class Axes:
    """Of the tokens of one text. `prompt` (A, n): of its first n tokens; `delta`: of all others,
    which have their place in the text plus this number on every axis.
    """

    def __init__(self, prompt: torch.Tensor, delta: int):
        self.prompt = prompt
        self.delta = delta

    def of(self, positions: Sequence[int]) -> torch.Tensor:
        """(A, P) of these places in the text."""
        places = torch.tensor(positions)
        axes, known = self.prompt.shape
        found = (places + self.delta).expand(axes, -1).clone()
        inside = places < known
        found[:, inside] = self.prompt[:, places[inside]]
        return found


def axes_of(
    index: Index, prompt: Sequence[int], places: Sequence[int], given: Mapping[str, Any]
) -> Axes:
    """Those of a prompt whose tokens at `places` are the parts of the pictures.

    Raises BadConfig where the prompt has not the tokens for its pictures.
    """
    ids = torch.tensor([list(prompt)])
    try:
        grid = given[GRID].cpu()
        found, deltas = index(input_ids=ids, mm_token_type_ids=kinds(ids, places), **{GRID: grid})
    except Exception as error:  # each family fails in its own way, and none of them by name
        sizes = given[GRID].tolist() if isinstance(given.get(GRID), torch.Tensor) else None
        raise BadConfig(
            f"the prompt's {len(places)} picture tokens do not fit {GRID}={sizes}: encode both by "
            "the model's processor, and leave some token between two pictures"
        ) from error
    return Axes(found[:, 0], int(deltas))


def kinds(ids: torch.Tensor, places: Sequence[int]) -> torch.Tensor:
    """Of each token of ids (1, n) what it stands for: 0 text, 1 a part of a picture."""
    found = torch.zeros_like(ids)
    found[0, list(places)] = 1
    return found


def drawn(vision: Any) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Two random pictures as a processor gives them, and how many tokens each of them takes.

    `vision`: the configuration of the vision part. They differ in height and width, so that no axis
    can stand for another.
    """
    merged = int(vision.spatial_merge_size)
    grid = torch.tensor([[1, 2 * merged, 3 * merged], [1, 2 * merged, merged]])
    patch, frames = vision.patch_size, vision.temporal_patch_size
    area = patch**2 if isinstance(patch, int) else math.prod(patch)
    frames = frames if isinstance(frames, int) else frames[0]
    patches = grid.prod(1)
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(int(patches.sum()), vision.in_channels * frames * area, generator=generator)
    return {"pixel_values": wide, GRID: grid}, (patches // merged**2).tolist()
