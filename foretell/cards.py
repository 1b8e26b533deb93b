"""What a method says of itself: its file's docstring, read without importing it.

The prose comes first, then labelled lines of fixed names. Tests, documentation and the command line
read them.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import threading
from pathlib import Path
from typing import Any

from foretell import registry
from foretell.errors import BadConfig

LABELS = ("Paper", "Guarantee", "Cost", "Needs", "Trains", "Differs")
TRIAL = "Try"  # a label that a card may lack
GUARANTEE = re.compile(r"(exact|greedy)\Z|(bounded|lossy): \S")
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
    card_path = registry.method_files()[kind, name]
    with _parsing:
        module = ast.parse(card_path.read_text("utf-8"))
    prose_lines, label_texts, differs_items = _split_docstring(ast.get_docstring(module) or "")
    missing_labels = [label for label in LABELS if label.lower() not in label_texts]
    if missing_labels:
        raise BadConfig(f"the card of {name!r} lacks {', '.join(missing_labels)}: {card_path}")
    if not GUARANTEE.match(label_texts["guarantee"]):
        raise BadConfig(
            f"the card of {name!r}: Guarantee: {label_texts['guarantee']!r} must be exact, greedy, "
            f"`bounded: ...` or `lossy: ...`: {card_path}"
        )
    class_node = _find_class(module, registry.class_name(name))
    if class_node is None:
        raise BadConfig(f"{card_path}: lacks the class {registry.class_name(name)}")
    differs_text = label_texts.pop("differs")
    trial_options = label_texts.pop(TRIAL.lower(), "")
    return Card(
        name=name,
        kind=kind,
        summary=prose_lines[0],
        prose="\n".join(prose_lines[1:]).strip(),
        differs=tuple(differs_items) or (differs_text,),
        trial=trial_options,
        defaults=_read_fields(class_node),
        temperature=_read_constant(class_node, "drawn_at", 0.0),
        file=card_path,
        **label_texts,
    )


def _split_docstring(docstring: str) -> tuple[list[str], dict[str, str], list[str]]:
    """Returns (lines before the labels, text after each label, items of the list after
    Differs).
    """
    prose_lines: list[str] = []
    label_texts: dict[str, str] = {}
    list_items: list[str] = []
    current_label = ""
    for line in docstring.splitlines():
        label, colon, label_text = line.partition(":")
        if colon and label in (*LABELS, TRIAL):
            current_label = label.lower()
            label_texts[current_label] = label_text.strip()
        elif not current_label:
            prose_lines.append(line)
        elif line.startswith("- "):
            list_items.append(line[2:])
        elif list_items:
            list_items[-1] += " " + line.strip()
        else:
            label_texts[current_label] = f"{label_texts[current_label]} {line.strip()}".strip()
    return prose_lines, label_texts, list_items


def _find_class(module: ast.Module, name: str) -> ast.ClassDef | None:
    """The class of this name; None: there is none."""
    for statement in module.body:
        if isinstance(statement, ast.ClassDef) and statement.name == name:
            return statement
    return None


def _read_constant(class_node: ast.ClassDef, name: str, default_value: Any) -> Any:
    """The value that a class gives to a name that is none of its fields, else the default."""
    for statement in class_node.body:
        if isinstance(statement, ast.Assign) and [
            ast.unparse(target) for target in statement.targets
        ] == [name]:
            return ast.literal_eval(statement.value)
    return default_value


def _read_fields(class_node: ast.ClassDef) -> dict[str, Any]:
    """The fields of a class that have a value, read from its source."""
    field_values = {}
    for statement in class_node.body:
        if not isinstance(statement, ast.AnnAssign) or statement.value is None:
            continue
        if isinstance(statement.target, ast.Name):
            field_values[statement.target.id] = ast.literal_eval(statement.value)
    return field_values


def weakest_guarantee(spec: str) -> str:
    """The guarantee of a method, or the weakest among those of `a+b`."""
    strongest_first = ("exact", "greedy", "bounded", "lossy")
    claims = [card(part).guarantee for part in spec.split("+")]
    return max(claims, key=lambda claim: strongest_first.index(claim.split(":")[0]))
