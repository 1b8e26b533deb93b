"""A method is found by its file's name; its card is read from the file's docstring without importing it.

`drafters/token_recycling.py` is the method `token-recycling`: listing is reading file names, and a missing optional
dependency cannot break it. A spec string sets fields: `ngram:n=3,k=10`, and for a drafter also the rule and the number
of nodes: `token-recycling:nodes=16,rule=coin`. Other packages add methods by the entry-point group `foretell.methods`,
each naming a folder of such files.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import sys
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from foretell.errors import BadConfig, UnknownMethod

if TYPE_CHECKING:
    from foretell.drafter import Drafter
    from foretell.strategy import Strategy

FOLDERS = {"drafter": "drafters", "strategy": "strategies", "diffusion": "diffusion", "kv": "kv", "rule": "rules"}
LABELS = ("Paper", "Guarantee", "Cost", "Needs", "Trains", "Differs")


@dataclasses.dataclass(frozen=True)
class Card:
    """What a method says of itself. `defaults`: its hyper-parameters; `prose`: the text before the labels."""

    name: str
    kind: str
    summary: str
    prose: str
    guarantee: str
    paper: str
    cost: str
    needs: str
    trains: str
    differs: str
    defaults: dict[str, Any]
    file: Path


@cache
def files() -> dict[tuple[str, str], Path]:
    """(kind, name) -> file, of this package and of those that join it. Raises BadConfig where two claim one name."""
    roots = [Path(__file__).parent]
    for entry in entry_points(group="foretell.methods"):
        spec = importlib.util.find_spec(entry.value)
        roots += [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
    found: dict[tuple[str, str], Path] = {}
    for root in roots:
        for kind, folder in FOLDERS.items():
            for path in sorted((root / folder).glob("[!_]*.py")):
                key = (kind, path.stem.replace("_", "-"))
                if key in found:
                    raise BadConfig(f"two files claim the {kind} {key[1]!r}: {found[key]} and {path}")
                found[key] = path
    return found


def names(kind: str) -> list[str]:
    return sorted(name for k, name in files() if k == kind)


def methods() -> list[str]:
    """What `method=` takes: drafters and strategies."""
    return sorted(name for kind, name in files() if kind != "rule")


def card(name: str, kind: str | None = None) -> Card:
    """Reads the card; only `defaults` are read from the class by its text. Raises UnknownMethod."""
    kind = kind or kind_of(name)
    path = files()[kind, name]
    module = ast.parse(path.read_text("utf-8"))
    lines = (ast.get_docstring(module) or "").splitlines()
    labels: dict[str, str] = {}
    prose = []
    for line in lines:
        label, colon, rest = line.partition(":")
        if colon and label in LABELS:
            labels[label.lower()] = rest.strip()
        elif not labels:
            prose.append(line)
    missing = [label for label in LABELS if label.lower() not in labels]
    if missing:
        raise BadConfig(f"the card of {name!r} lacks {', '.join(missing)}: {path}")
    body = next(n.body for n in module.body if isinstance(n, ast.ClassDef) and n.name == class_name(name))
    fields = {}
    for node in body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            fields[node.target.id] = ast.literal_eval(node.value)
    return Card(name, kind, prose[0], "\n".join(prose[1:]).strip(), defaults=fields, file=path, **labels)


def kind_of(name: str) -> str:
    kind = next((k for k, n in files() if n == name and k != "rule"), None)
    if kind is None:
        raise UnknownMethod.near("method", name, methods())
    return kind


def load(name: str, kind: str) -> type[Any]:
    """Imports the method's file and returns its one dataclass."""
    if (kind, name) not in files():
        raise UnknownMethod.near(kind, name, names(kind))
    path = files()[kind, name]
    module_name = f"foretell.{FOLDERS[kind]}.{path.stem}"
    if module_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(module_name, path)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        spec.loader.exec_module(module)
    return getattr(sys.modules[module_name], class_name(name))  # type: ignore[no-any-return]


def class_name(name: str) -> str:
    """The dataclass of `token-recycling` is TokenRecycling."""
    return name.replace("-", " ").title().replace(" ", "")


def build(name: str, kind: str, options: dict[str, str]) -> Any:
    """The dataclass with these fields. Raises BadConfig for a field it lacks or a value that is none of its type."""
    cls = load(name, kind)
    hints = get_type_hints(cls)
    known = {f.name: hints[f.name] for f in dataclasses.fields(cls)}
    values: dict[str, Any] = {}
    for key, text in options.items():
        if key not in known:
            raise UnknownMethod.near(f"field of {name}", key, [*known, "rule", "nodes"] if kind == "drafter" else known)
        try:
            values[key] = text.lower() in ("1", "true", "yes") if known[key] is bool else known[key](text)
        except ValueError:
            raise BadConfig.field(f"{name}:{key}", text, f"a value of type {known[key].__name__}") from None
    return cls(**values)


def resolve(spec: str | Drafter | Strategy) -> tuple[str, Strategy]:
    """(name, strategy) of a spec string or a config object. Imports torch, which listing methods does not."""
    from foretell.drafter import Drafter
    from foretell.strategy import Speculative

    if not isinstance(spec, str):
        name = type(spec).__module__.rpartition(".")[2].replace("_", "-")
        return name, Speculative(spec) if isinstance(spec, Drafter) else spec
    name, _, rest = spec.partition(":")
    kind = kind_of(name)
    options: dict[str, str] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise BadConfig(f"{spec!r}: write fields as name=value, as in ngram:n=3,k=10")
        options[key.strip()] = value.strip()
    if kind != "drafter":
        return name, build(name, kind, options)
    rule, nodes = options.pop("rule", "default"), options.pop("nodes", "0")
    if not nodes.isdigit():
        raise BadConfig.field(f"{name}:nodes", nodes, "a whole number")
    chosen = None if rule == "default" else build(rule, "rule", {})
    return name, Speculative(build(name, kind, options), chosen, int(nodes))
