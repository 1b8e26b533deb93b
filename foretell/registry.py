"""A method is found by its file's name: `drafters/lookup/token_recycling.py` is the drafter
`token-recycling`.

Listing reads file names only, so a missing optional dependency cannot break it, and adding a method
edits no list. Other packages add methods through the entry-point group `foretell.methods`: each
entry names a package with folders like ours.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from foretell.errors import BadConfig, UnknownMethod

PACKAGE = Path(__file__).parent
# The folder of each kind, and of `kv` two: policies of masked models read what `diffusion`
# computes.
FOLDERS = {
    "drafter": ("drafters",),
    "strategy": ("strategies",),
    "diffusion": ("diffusion",),
    "kv": ("kv", "diffusion/cache"),
    "rule": ("verification",),
    "rows": ("guidance",),
    "warp": ("processors",),
    "reward": ("rewards",),
    "constraint": ("constraints",),
}
BESIDE = (
    "kv",
    "rule",
    "rows",
    "warp",
    "reward",
    "constraint",
)  # kinds that go with a method, and have arguments of their own
WORDS = {
    "kv": "cache policy",
    "rows": "source of rows",
    "warp": "warper",
}  # not as kinds are called


@cache
def files() -> dict[tuple[str, str], Path]:
    """(kind, name) -> file, of this package and of those that join it. Raises BadConfig where two
    claim one name.
    """
    roots = [PACKAGE]
    for entry in entry_points(group="foretell.methods"):
        spec = importlib.util.find_spec(entry.value)
        if spec and spec.submodule_search_locations:
            roots += [Path(folder) for folder in spec.submodule_search_locations]
    claimed: dict[tuple[str, str], Path] = {}
    for kind, path in (found for root in roots for found in methods_below(root)):
        key = (kind, path.stem.replace("_", "-"))
        if key in claimed:
            raise BadConfig(f"two files claim the {kind} {key[1]!r}: {claimed[key]} and {path}")
        claimed[key] = path
    return claimed


def methods_below(root: Path) -> Iterator[tuple[str, Path]]:
    """(kind, file) of every method of a package: the files below its folders that have a card.

    A folder within another one's, such as `diffusion/cache`, has the kind of the nearer name.
    """
    kinds = {root / folder: kind for kind, folders in FOLDERS.items() for folder in folders}
    for folder, kind in kinds.items():
        for path in sorted(folder.rglob("[!_]*.py")):
            nearest = next(parent for parent in path.parents if parent in kinds)
            if nearest == folder and has_card(path):
                yield kind, path


def has_card(path: Path) -> bool:
    """Whether a file's docstring says what its method guarantees."""
    return "\nGuarantee:" in path.read_text("utf-8").partition('"""')[2].partition('"""')[0]


def names(*kinds: str) -> list[str]:
    """The names of all methods of these kinds."""
    return sorted(name for k, name in files() if k in kinds)


def methods() -> list[str]:
    """What `method=` takes."""
    return names(*(kind for kind in FOLDERS if kind not in BESIDE))


def kind_of(name: str) -> str:
    """The kind of the method of this name. Raises UnknownMethod."""
    for kind, known in files():
        if known == name and kind not in BESIDE:
            return kind
    raise unknown("method", name)


def unknown(kind: str, name: str) -> UnknownMethod:
    """That there is none of this name, which is near others or is of another kind. `kind` may be
    "method".
    """
    for other, known in files():
        if known == name:
            is_one = WORDS.get(other, other) if other in BESIDE else "method"
            what = f"{name!r} is a {is_one}, no {WORDS.get(kind, kind)}"
            return UnknownMethod(f"{what}; give it as {written(other, name)}")
    return UnknownMethod.near(kind, name, methods() if kind == "method" else names(kind))


def written(kind: str, name: str) -> str:
    """How a method of this kind is asked for, in Python and on the command line."""
    if kind == "rule":
        return f"the rule of a drafter, as in draft:rule={name}"
    argument = kind if kind in BESIDE else "method"
    return f"{argument}={name!r}, --{argument} {name}"


def load(name: str, kind: str) -> type[Any]:
    """Imports the method's file and returns its one dataclass. Raises UnknownMethod."""
    if (kind, name) not in files():
        raise unknown(kind, name)
    method: type[Any] = getattr(module_of(files()[kind, name], kind), class_name(name))
    return method


def module_of(path: Path, kind: str) -> ModuleType:
    """The module of a method's file, imported; another package's is imported as one of ours."""
    if path.is_relative_to(PACKAGE):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        return importlib.import_module(".".join(parts))
    name = f"foretell.{FOLDERS[kind][0]}.{path.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec and spec.loader
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def class_name(name: str) -> str:
    """token-recycling -> TokenRecycling."""
    return name.replace("-", " ").title().replace(" ", "")
