"""What a layout of published heads is to foretell."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch

from foretell.errors import BadConfig
from foretell.heads.base import Head
from foretell.heads.formats.checkpoint import Checkpoint

# How a file counts the states that a head reads: i is what enters layer i, or what leaves it.
CONVENTIONS = ("input", "output")


class Format:
    """A layout: one class in a file of this package, and on no list."""

    name: ClassVar[str]  # as messages and `foretell convert head --to` have it
    kind: ClassVar[str]  # of heads in it
    writes: ClassVar[bool] = False  # whether `write` can
    counts: ClassVar[bool] = True  # whether it names layers of the target by numbers

    def matches(self, checkpoint: Checkpoint) -> bool:
        """Whether a folder has this layout, told by its configuration and its tensors' names."""
        raise NotImplementedError

    def load(
        self, checkpoint: Checkpoint, target: Any, taps: str = ""
    ) -> tuple[Head, torch.Tensor | None]:
        """The head, and the tokens (Vd,) that it may draft, None: all.

        `taps`: one of CONVENTIONS; "": what the folder says. Raises BadModel.
        """
        raise NotImplementedError

    def write(self, head: Head, kept: torch.Tensor | None, target: Any, folder: Path) -> None:
        """Writes a head in this layout. Raises BadConfig where it cannot hold it."""
        raise BadConfig(f"{self.name}: cannot be written; write speculators")
