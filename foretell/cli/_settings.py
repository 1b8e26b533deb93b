"""Options made of a trainer's settings."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

TRAINERS = Path(__file__).parents[1] / "train"


def settings_of(trainer: str, name: str) -> Any:
    """A dataclass with the fields of the one of this name in the module `foretell.train.TRAINER`,
    read from its text: importing it would import torch. The comment after a field becomes the
    option's help.
    """
    text = TRAINERS.joinpath(*trainer.split(".")).with_suffix(".py").read_text("utf-8")
    lines = text.splitlines()
    (body,) = (
        node.body
        for node in ast.parse(text).body
        if isinstance(node, ast.ClassDef) and node.name == name
    )
    fields = []
    for node in body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        assert node.value is not None, f"{name}.{node.target.id} needs a default"
        default = ast.literal_eval(node.value)
        comment = lines[(node.end_lineno or 1) - 1].partition("#")[2].strip()
        kind: Any = type(default)
        option: Any = Annotated[kind, typer.Option(help=comment)]
        fields.append((node.target.id, option, dataclasses.field(default=default)))
    return dataclasses.make_dataclass(name, fields, frozen=True)
