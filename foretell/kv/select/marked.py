"""Small tables that are made for one model: kept with the mark of its last norm, found by it.

A table is a safetensors file with one tensor. Some ship with the package; users make others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from foretell.errors import BadFile, Unsupported, first_line
from foretell.ops.assets import ASSETS
from foretell.ops.files import whole
from foretell.ops.fingerprint import norm_mark

if TYPE_CHECKING:
    from foretell.core.model import Model


@dataclass(frozen=True)
class Kind:
    """What tables of one kind are called, where they lie, and how they are made."""

    name: str  # of the tensor, of the folder of assets, and of the file in a user's folder
    what: str  # it is in words
    made: str  # how, a command
    option: str  # of a policy, that names a file
    wrong: Callable[[torch.Tensor], str]  # what is wrong with a tensor; empty: nothing

    @property
    def schema(self) -> str:
        return f"foretell {self.name} 1"

    def save(self, table: torch.Tensor, path: Path, model: Model, **about: str) -> None:
        """Writes a table, whole or not at all. Raises BadFile."""
        told = {"schema": self.schema, "norm": norm_mark(model), **about}
        with whole(path) as part:
            save_file({self.name: table.contiguous()}, part, told)

    def read(self, path: Path) -> tuple[torch.Tensor, str]:
        """A file's table, and the mark of the model that it was made for. Raises BadFile."""
        try:
            with safe_open(path, "pt") as opened:
                about = opened.metadata() or {}
                if about.get("schema") != self.schema or [*opened.keys()] != [self.name]:
                    raise BadFile(f"{path}: is no table of {self.name}; {self.made}")
                table = opened.get_tensor(self.name)
        except (OSError, SafetensorError) as error:
            reason = first_line(error)
            raise BadFile(f"{path}: cannot be read ({reason}); {self.made}") from error
        if wrong := self.wrong(table):
            raise BadFile(f"{path}: is damaged ({wrong}); {self.made}")
        return table, about.get("norm", "")

    def find(self, model: Model, given: str, method: str, sizes: Sequence[int]) -> torch.Tensor:
        """The table in a file, or in a folder; without one that which ships for this model.

        `sizes`: of the table's first dimensions. Raises BadFile where it is another model's,
        Unsupported where none ships.
        """
        mark = norm_mark(model)
        if not given:
            for path in sorted((ASSETS / self.name).glob("*.safetensors")):
                table, norm = self.read(path)
                if mark and norm == mark:
                    return table
            need = f"{self.what}, and none ships for it"
            cure = f"{self.made} and give it as {self.option}=FILE"
            raise Unsupported.missing(method, model.name, need, cure)
        path = Path(given)
        if path.is_dir():
            path = path / f"{self.name}.safetensors"
        table, norm = self.read(path)
        if norm != mark or [*table.shape[: len(sizes)]] != [*sizes]:
            raise BadFile(f"{path}: was made for another model than {model.name}; {self.made}")
        return table
