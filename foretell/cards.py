"""What a method says of itself: its file's docstring, read without importing it.

The prose comes first, then labelled lines of fixed names. Tests, documentation and the command line
read them.
"""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path
from typing import Any

from foretell import registry
from foretell.errors import BadConfig

LABELS = ("Paper", "Guarantee", "Cost", "Needs", "Trains", "Differs")


@dataclasses.dataclass(frozen=True)
class Card:
    """What a method says of itself. `defaults`: its hyper-parameters; `prose`: the text before the
    labels.
    """

    name: str
    kind: str
    summary: str
    prose: str
    guarantee: str
    paper: str
    cost: str
    needs: str
    trains: str
    differs: tuple[str, ...]  # every departure from the paper
    defaults: dict[str, Any]
    file: Path


def card(name: str, kind: str | None = None) -> Card:
    """Reads the card; only `defaults` are read from the class by its text. Raises UnknownMethod."""
    kind = kind or registry.kind_of(name)
    path = registry.files()[kind, name]
    module = ast.parse(path.read_text("utf-8"))
    lines = (ast.get_docstring(module) or "").splitlines()
    labels: dict[str, str] = {}
    items: list[str] = []  # of the list behind the label Differs
    prose = []
    current = ""
    for line in lines:
        label, colon, rest = line.partition(":")
        if colon and label in LABELS:
            current = label.lower()
            labels[current] = rest.strip()
        elif not current:
            prose.append(line)
        elif line.startswith("- "):
            items.append(line[2:])
        elif items:
            items[-1] += " " + line.strip()
        else:
            labels[current] = f"{labels[current]} {line.strip()}".strip()
    missing = [label for label in LABELS if label.lower() not in labels]
    if missing:
        raise BadConfig(f"the card of {name!r} lacks {', '.join(missing)}: {path}")
    body = next(
        n.body
        for n in module.body
        if isinstance(n, ast.ClassDef) and n.name == registry.class_name(name)
    )
    fields = {}
    for node in body:
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and node.value is not None
        ):
            fields[node.target.id] = ast.literal_eval(node.value)
    return Card(
        name,
        kind,
        prose[0],
        "\n".join(prose[1:]).strip(),
        differs=tuple(items) or (labels.pop("differs"),),
        defaults=fields,
        file=path,
        **{label: text for label, text in labels.items() if label != "differs"},
    )


def guarantee(name: str) -> str:
    """The guarantee of a method, or the weakest among those of `a+b`."""
    order = ("exact", "greedy", "bounded", "lossy")
    return max(
        (card(part).guarantee for part in name.split("+")),
        key=lambda g: order.index(g.split(":")[0]),
    )
