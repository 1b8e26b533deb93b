"""Tensors that a run goes on from: refused in one line where they are not those that it wrote."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from foretell.errors import BadFile, first_message_line

AGAIN = "delete it, and it is made again"


def damaged_file(path: Path, complaint: str, cure: str = AGAIN) -> BadFile:
    return BadFile(f"{path}: is damaged or of another run ({complaint}); {cure}")


def tensors_of(path: Path, cure: str = AGAIN) -> dict[str, torch.Tensor]:
    """All tensors of a file. Raises BadFile, which ends with the cure."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise damaged_file(path, first_message_line(error), cure) from error


def check_tensors(
    path: Path,
    read_tensors: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    cure: str = AGAIN,
) -> None:
    """Raises BadFile where tensors have other names or shapes than those that they replace, which a
    copy would fill by repeating them, or numbers that are not finite.
    """
    for name in sorted(read_tensors.keys() ^ expected.keys()):
        raise damaged_file(path, f"{'has' if name in read_tensors else 'lacks'} {name}", cure)
    for name, tensor in read_tensors.items():
        shape = tuple(expected[name].shape)
        if (
            tensor.shape != shape
            or tensor.is_floating_point() != expected[name].is_floating_point()
        ):
            raise damaged_file(path, f"{name} is {tuple(tensor.shape)}, not {shape}", cure)
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise damaged_file(path, f"{name} has numbers that are not finite", cure)


def tensors_below(tensors: Mapping[str, torch.Tensor], beginning: str) -> dict[str, torch.Tensor]:
    """Tensors whose names begin so, named without the beginning."""
    size = len(beginning)
    return {name[size:]: t for name, t in tensors.items() if name.startswith(beginning)}


def optimiser_state(
    path: Path, tensors: Mapping[str, torch.Tensor], parameters: Iterable[torch.Tensor]
) -> dict[int, dict[str, torch.Tensor]]:
    """An optimiser's state by its parameters' numbers, of tensors named `number.name`: each is a
    number, or has the shape of its parameter. Raises BadFile.
    """
    parameter_list = list(parameters)
    state: dict[int, dict[str, torch.Tensor]] = {}
    for key, value in tensors.items():
        index, _, name = key.partition(".")
        if not index.isdecimal() or int(index) >= len(parameter_list):
            raise damaged_file(path, f"has a state {key!r} of no parameter")
        shape = tuple(parameter_list[int(index)].shape)
        if value.dim() and value.shape != shape:
            raise damaged_file(path, f"the state {key!r} is {tuple(value.shape)}, not {shape}")
        if not value.isfinite().all():
            raise damaged_file(path, f"the state {key!r} has numbers that are not finite")
        state.setdefault(int(index), {})[name] = value
    kinds = {frozenset(part) for part in state.values()}
    if len(kinds) > 1:
        raise damaged_file(path, "some states lack a part")
    return state
