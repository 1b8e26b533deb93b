"""The tensors of a folder of .safetensors files, read from their places when they are asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from foretell.ops.memory import release_pages


class Tensors:
    """Tensors by name. `unused` holds the names that nobody has asked for.

    Raises LookupError where two files have a tensor of one name.
    """

    def __init__(self, folder: Path):
        self._files: dict[str, Any] = {}
        self._read: list[torch.Tensor] = []  # mapped numbers, until `release`
        for file_path in sorted(folder.glob("*.safetensors")):
            open_file = safe_open(file_path, "pt")
            for name in open_file.keys():  # noqa: SIM118 (it is no mapping)
                if name in self._files:
                    raise LookupError(f"{file_path.name} has {name}, which another file has too")
                self._files[name] = open_file
        self.unused = set(self._files)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def names(self) -> set[str]:
        """The names of all tensors."""
        return set(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """The sizes of a tensor that there is."""
        return tuple(self._files[name].get_slice(name).get_shape())

    def take(self, name: str) -> torch.Tensor:
        """Reads a tensor, which stays mapped. Raises LookupError where there is none."""
        if name not in self._files:
            raise LookupError(f"it lacks {name}")
        self.unused.discard(name)
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        self._read.append(tensor)
        return tensor

    def take_sized(self, name: str, shape: tuple[int, ...], *dtypes: torch.dtype) -> torch.Tensor:
        """Reads a tensor. Raises LookupError where it has other sizes, or none of these formats."""
        tensor = self.take(name)
        if tuple(tensor.shape) != shape or (dtypes and tensor.dtype not in dtypes):
            formats = " or ".join(name_of(dtype) for dtype in dtypes)
            raise LookupError(
                f"{name} is {tuple(tensor.shape)} of {name_of(tensor.dtype)}, and config.json asks "
                f"for {shape}{' of ' if formats else ''}{formats}"
            )
        return tensor

    def skip(self, name: str) -> None:
        """Notes that nothing depends on a tensor, if there is one of this name."""
        self.unused.discard(name)

    def release(self) -> None:
        """Lets the pages of all that was read leave the memory: nobody needs it again."""
        release_pages(self._read)
        self._read.clear()


def name_of(dtype: torch.dtype) -> str:
    """A format's name, without its library's."""
    return str(dtype).removeprefix("torch.")
