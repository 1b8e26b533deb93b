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

from foretell.errors import BadFile, Unsupported, first_message_line
from foretell.ops.assets import hint_if_missing, shipped_files
from foretell.ops.files import replace_file
from foretell.ops.fingerprint import norm_mark

if TYPE_CHECKING:
    from foretell.core.model import Model


@dataclass(frozen=True)
class Kind:
    """The name of tables of one kind, where they lie, and how they are made."""

    name: str  # of the tensor, of the folder of assets, and of the file in a user's folder
    description: str  # it is in words
    recipe: str  # how, a command
    option: str  # of a policy, that names a file
    find_fault: Callable[[torch.Tensor], str]  # what is wrong with a tensor; empty: nothing

    @property
    def schema(self) -> str:
        return f"foretell {self.name} 1"

    def save_table(self, table: torch.Tensor, path: Path, model: Model, **metadata: str) -> None:
        """Writes a table, whole or not at all. Raises BadFile."""
        file_metadata = {"schema": self.schema, "norm": norm_mark(model), **metadata}
        with replace_file(path) as partial_path:
            save_file({self.name: table.contiguous()}, partial_path, file_metadata)

    def read_table(self, path: Path) -> tuple[torch.Tensor, str]:
        """A file's table, and the mark of the model that it was made for. Raises BadFile."""
        try:
            with safe_open(path, "pt") as table_file:
                metadata = table_file.metadata() or {}
                if metadata.get("schema") != self.schema or [*table_file.keys()] != [self.name]:
                    raise BadFile(f"{path}: is no table of {self.name}; {self.recipe}")
                table = table_file.get_tensor(self.name)
        except (OSError, SafetensorError) as error:
            reason = first_message_line(error)
            raise BadFile(f"{path}: cannot be read ({reason}); {self.recipe}") from error
        if table_fault := self.find_fault(table):
            raise BadFile(f"{path}: is damaged ({table_fault}); {self.recipe}")
        return table, metadata.get("norm", "")

    def find_table(
        self, model: Model, table_path: str, method: str, sizes: Sequence[int]
    ) -> torch.Tensor:
        """The table in a file, or in a folder; without one that which ships for this model.

        `sizes`: of the table's first dimensions. Raises BadFile where it is another model's,
        Unsupported where none ships.
        """
        model_mark = norm_mark(model)
        if not table_path:
            for path in shipped_files(f"{self.name}/*.safetensors"):
                table, norm = self.read_table(path)
                if model_mark and norm == model_mark:
                    return table
            missing_need = f"{self.description}, and none ships for it"
            cure = f"{self.recipe} and give it as {self.option}=FILE{hint_if_missing()}"
            raise Unsupported.missing_capability(method, model.name, missing_need, cure)
        path = Path(table_path)
        if path.is_dir():
            path = path / f"{self.name}.safetensors"
        table, norm = self.read_table(path)
        if norm != model_mark or [*table.shape[: len(sizes)]] != [*sizes]:
            raise BadFile(f"{path}: was made for another model than {model.name}; {self.recipe}")
        return table
