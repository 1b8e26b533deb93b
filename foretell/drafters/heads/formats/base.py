"""What a layout of published heads is to foretell."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file

from foretell.drafters.heads.formats.checkpoint import Checkpoint
from foretell.drafters.heads.networks.base import Head
from foretell.errors import BadConfig
from foretell.ops.files import replace_file, write_text

# How a file counts the states that a head reads: i is what enters layer i, or what leaves it.
CONVENTIONS = ("input", "output")


class Format:
    """A layout: one class in a file of this package, and on no list."""

    name: ClassVar[str]  # as messages and `foretell convert head --to` have it
    kind: ClassVar[str]  # of heads in it
    writes: ClassVar[bool] = False  # whether `write_head` can
    # How a folder of this layout may mean what its head reads, where it does not say so itself; ():
    # there is one way alone.
    ways: ClassVar[tuple[str, ...]] = CONVENTIONS
    ways_are: ClassVar[str] = "its taps are numbers of layers by their"  # and then a way

    def matches_folder(self, checkpoint: Checkpoint) -> bool:
        """Whether a folder has this layout, told by its configuration and its tensors' names."""
        raise NotImplementedError

    def load_head(
        self, checkpoint: Checkpoint, target: Any, taps: str = ""
    ) -> tuple[Head, torch.Tensor | None]:
        """The head, and the tokens (Vd,) that it may draft, None: all.

        `taps`: one of `ways`; "": what the folder says. Raises BadModel.
        """
        raise NotImplementedError

    def write_head(
        self, head: Head, kept_tokens: torch.Tensor | None, target: Any, folder: Path
    ) -> None:
        """Writes a head in this layout. Raises BadConfig where it cannot hold it."""
        raise BadConfig(f"{self.name}: cannot be written; write --to foretell")


def write_folder(
    folder: Path, file: str, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]
) -> None:
    """Writes tensors, floating ones in bfloat16, and a configuration. Raises BadFile."""
    stored_tensors = {}
    for name, value in tensors.items():
        plain_value = value.detach().cpu()
        stored_tensors[name] = (
            plain_value.bfloat16() if plain_value.is_floating_point() else plain_value
        ).contiguous()
    with replace_file(folder / file) as partial_path:
        save_file(stored_tensors, partial_path, metadata={"format": "pt"})
    write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")


def target_name(target: Any) -> str:
    """The target's name as configurations have it."""
    return str(getattr(target.config, "_name_or_path", "") or target.name)
