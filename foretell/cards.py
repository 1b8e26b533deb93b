"""What a method says of itself: its file's docstring, read without importing it.

The prose comes first, then labelled lines of fixed names. Tests, documentation and the command line
read them.
"""

from __future__ import annotations

import ast
import dataclasses
import threading
from pathlib import Path
from typing import Any

from foretell import registry
from foretell.errors import BadConfig

LABELS = ("Paper", "Guarantee", "Cost", "Needs", "Trains", "Differs")
TRIAL = "Try"  # a label that a card may lack
_parsing = threading.Lock()  # Python 3.11's parser fails at times where threads use it at once


@dataclasses.dataclass(frozen=True)
class Card:
    """The parts of a method's docstring."""

    name: str
    kind: str
    summary: str  # the first line, one sentence
    prose: str  # the text between it and the labels
    guarantee: str
    paper: str
    cost: str
    needs: str
    trains: str
    differs: tuple[str, ...]  # every departure from the paper
    trial: str  # options of `foretell generate` that try it; "": its name is enough
    defaults: dict[str, Any]  # the hyper-parameters
    temperature: float  # of one that samples, where none is given, and 0 is refused; 0: any will do
    file: Path


def card(name: str, kind: str | None = None) -> Card:
    """Reads a method's card. Raises UnknownMethod, and BadConfig where a label is missing."""
    kind = kind or registry.kind_of(name)
    path = registry.files()[kind, name]
    with _parsing:
        module = ast.parse(path.read_text("utf-8"))
    prose, labels, items = _parts(ast.get_docstring(module) or "")
    missing = [label for label in LABELS if label.lower() not in labels]
    if missing:
        raise BadConfig(f"the card of {name!r} lacks {', '.join(missing)}: {path}")
    node = _class(module, registry.class_name(name))
    if node is None:
        raise BadConfig(f"{path}: lacks the class {registry.class_name(name)}")
    differs = labels.pop("differs")
    trial = labels.pop(TRIAL.lower(), "")
    return Card(
        name=name,
        kind=kind,
        summary=prose[0],
        prose="\n".join(prose[1:]).strip(),
        differs=tuple(items) or (differs,),
        trial=trial,
        defaults=_fields(node),
        temperature=_constant(node, "drawn_at", 0.0),
        file=path,
        **labels,
    )


def _parts(docstring: str) -> tuple[list[str], dict[str, str], list[str]]:
    """(lines before the labels, text behind each label, items of the list behind Differs)."""
    prose: list[str] = []
    labels: dict[str, str] = {}
    items: list[str] = []
    current = ""
    for line in docstring.splitlines():
        label, colon, rest = line.partition(":")
        if colon and label in (*LABELS, TRIAL):
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
    return prose, labels, items


def _class(module: ast.Module, name: str) -> ast.ClassDef | None:
    """The class of this name; None: there is none."""
    for node in module.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
    return None


def _constant(node: ast.ClassDef, name: str, usual: Any) -> Any:
    """What a class sets a name to that is none of its fields."""
    for item in node.body:
        if isinstance(item, ast.Assign) and [ast.unparse(one) for one in item.targets] == [name]:
            return ast.literal_eval(item.value)
    return usual


def _fields(node: ast.ClassDef) -> dict[str, Any]:
    """The fields of a class that have a value, read from its source."""
    fields = {}
    for item in node.body:
        if not isinstance(item, ast.AnnAssign) or item.value is None:
            continue
        if isinstance(item.target, ast.Name):
            fields[item.target.id] = ast.literal_eval(item.value)
    return fields


def guarantee(spec: str) -> str:
    """The guarantee of a method, or the weakest among those of `a+b`."""
    order = ("exact", "greedy", "bounded", "lossy")
    claims = [card(part).guarantee for part in spec.split("+")]
    return max(claims, key=lambda claim: order.index(claim.split(":")[0]))
