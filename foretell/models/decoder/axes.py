"""Positions of several axes, such as those of Qwen2-VL: a part of a picture has a time, a row and a
column.

To the heart and to caches a token's position is its place in the text, here as in every family. The
axes matter to the rotation of queries and keys alone, which is where they are looked up. Those of a
prompt come from the model's own `get_rope_index`; after it every axis goes on by one a token.
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


def rope_index(hf_model: PreTrainedModel) -> Index | None:
    """The function that finds the axes of a prompt's tokens; None: a position of this model is one
    number.
    """
    modules = (hf_model, hf_model.base_model)
    candidates = (getattr(module, "get_rope_index", None) for module in modules)
    return next((index for index in candidates if index is not None), None)


@contextmanager
def restore_deltas(hf_model: PreTrainedModel) -> Iterator[None]:
    """Inside, the model may read pictures: what it remembers of their positions, for texts that its
    user goes on with, is put back.
    """
    body: Any = hf_model.base_model
    previous = getattr(body, "rope_deltas", None)
    try:
        yield
    finally:
        if hasattr(body, "rope_deltas"):
            body.rope_deltas = previous


class Axes:
    """Axes of the tokens of one text. `prompt` (A, n): of its first n tokens; `delta`: of all
    others, which have their place in the text plus this number on every axis.
    """

    def __init__(self, prompt_axes: torch.Tensor, delta: int):
        self.prompt = prompt_axes
        self.delta = delta

    def of(self, positions: Sequence[int]) -> torch.Tensor:
        """The axes (A, P) of these places in the text."""
        text_positions = torch.tensor(positions)
        axes, prompt_length = self.prompt.shape
        axis_positions = (text_positions + self.delta).expand(axes, -1).clone()
        in_prompt = text_positions < prompt_length
        axis_positions[:, in_prompt] = self.prompt[:, text_positions[in_prompt]]
        return axis_positions


def axes_of(
    find_axes: Index,
    prompt_ids: Sequence[int],
    positions: Sequence[int],
    picture_inputs: Mapping[str, Any],
) -> Axes:
    """The axes of a prompt whose tokens at `positions` are the parts of the pictures.

    Raises BadConfig where the prompt has not the tokens for its pictures.
    """
    token_ids = torch.tensor([list(prompt_ids)])
    try:
        grid = picture_inputs[GRID].cpu()
        prompt_axes, deltas = find_axes(
            input_ids=token_ids, mm_token_type_ids=token_kinds(token_ids, positions), **{GRID: grid}
        )
    except Exception as error:  # each family fails in its own way, and none of them by name
        grid_sizes = (
            picture_inputs[GRID].tolist()
            if isinstance(picture_inputs.get(GRID), torch.Tensor)
            else None
        )
        raise BadConfig(
            f"the prompt's {len(positions)} picture tokens do not fit {GRID}={grid_sizes}: encode "
            "both by "
            "the model's processor, and leave some token between two pictures"
        ) from error
    return Axes(prompt_axes[:, 0], int(deltas))


def token_kinds(token_ids: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
    """Says for each token of ids (1, n) what it stands for: 0 text, 1 a part of a picture."""
    kind_ids = torch.zeros_like(token_ids)
    kind_ids[0, list(positions)] = 1
    return kind_ids


def draw_pictures(vision_config: Any) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Two random pictures as a processor gives them, and how many tokens each of them takes.

    `vision_config`: the configuration of the vision part. They differ in height and width, so that
    no axis can stand for another.
    """
    merge_size = int(vision_config.spatial_merge_size)
    grid = torch.tensor([[1, 2 * merge_size, 3 * merge_size], [1, 2 * merge_size, merge_size]])
    patch, frames = vision_config.patch_size, vision_config.temporal_patch_size
    area = patch**2 if isinstance(patch, int) else math.prod(patch)
    frames = frames if isinstance(frames, int) else frames[0]
    patches = grid.prod(1)
    generator = torch.Generator().manual_seed(0)
    pixel_values = torch.randn(
        int(patches.sum()), vision_config.in_channels * frames * area, generator=generator
    )
    return {"pixel_values": pixel_values, GRID: grid}, (patches // merge_size**2).tolist()
