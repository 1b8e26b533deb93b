"""A method is found by its file's name: `drafters/lookup/token_recycling.py` is the drafter
`token-recycling`, since it lies below the drafters' folder and its docstring is a card.

Listing imports no method, so a missing optional dependency cannot break it, and adding a method
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
    "guidance": ("guidance",),
    "processor": ("processors",),
    "reward": ("rewards",),
    "constraint": ("constraints",),
}
TITLES = {  # of each kind, where methods are listed
    "drafter": "Drafters",
    "strategy": "Strategies",
    "diffusion": "Diffusion",
    "kv": "Cache policies",
    "rule": "Verification rules",
    "guidance": "Guidance",
    "processor": "Logits processors",
    "reward": "Rewards",
    "constraint": "Constraints",
}
# Kinds that go with a method, and have arguments of their own.
BESIDE = ("kv", "rule", "guidance", "processor", "reward", "constraint")
WORDS = {
    "kv": "cache policy",
    "guidance": "kind of guidance",
    "processor": "logits processor",
}  # not as kinds are called


@cache
def method_files() -> dict[tuple[str, str], Path]:
    """Returns (kind, name) -> file, of this package and of those that join it. Raises BadConfig
    where two claim one name.
    """
    roots = [PACKAGE]
    for entry_point in entry_points(group="foretell.methods"):
        package_spec = importlib.util.find_spec(entry_point.value)
        if package_spec and package_spec.submodule_search_locations:
            roots += [Path(folder) for folder in package_spec.submodule_search_locations]
    claimed_files: dict[tuple[str, str], Path] = {}
    for kind, method_path in (
        kind_and_path for root in roots for kind_and_path in methods_below(root)
    ):
        method_key = (kind, method_path.stem.replace("_", "-"))
        if method_key in claimed_files:
            raise BadConfig(
                f"two files claim the {kind} {method_key[1]!r}: "
                f"{claimed_files[method_key]} and {method_path}"
            )
        claimed_files[method_key] = method_path
    return claimed_files


def methods_below(root: Path) -> Iterator[tuple[str, Path]]:
    """Yields (kind, file) of every method of a package: the files below its folders that have a
    card.

    A folder within another one's, such as `diffusion/cache`, has the kind of the nearer name.
    """
    folder_kinds = {root / folder: kind for kind, folders in FOLDERS.items() for folder in folders}
    for folder, kind in folder_kinds.items():
        for method_path in sorted(folder.rglob("[!_]*.py")):
            nearest = next(parent for parent in method_path.parents if parent in folder_kinds)
            if nearest == folder and has_card(method_path):
                yield kind, method_path


def has_card(path: Path) -> bool:
    """Whether a file's docstring says what its method guarantees."""
    return "\nGuarantee:" in path.read_text("utf-8").partition('"""')[2].partition('"""')[0]


def method_names(*kinds: str) -> list[str]:
    """The names of all methods of these kinds."""
    return sorted(name for method_kind, name in method_files() if method_kind in kinds)


def methods() -> list[str]:
    """The names that `method=` takes."""
    return method_names(*(kind for kind in FOLDERS if kind not in BESIDE))


def kind_of(name: str) -> str:
    """The kind of the method of this name. Raises UnknownMethod."""
    for kind, known_name in method_files():
        if known_name == name and kind not in BESIDE:
            return kind
    raise unknown_method("method", name)


def unknown_method(kind: str, name: str) -> UnknownMethod:
    """The error for a name that no method of this kind has: it names near ones, or the kind that
    has it. `kind` may be "method".
    """
    for known_kind, known_name in method_files():
        if known_name == name:
            actual_kind = WORDS.get(known_kind, known_kind) if known_kind in BESIDE else "method"
            mismatch = f"{name!r} is a {actual_kind}, no {WORDS.get(kind, kind)}"
            return UnknownMethod(f"{mismatch}; give it as {option_usage(known_kind, name)}")
    return UnknownMethod.suggest_names(
        kind, name, methods() if kind == "method" else method_names(kind)
    )


def option_usage(kind: str, name: str) -> str:
    """How a method of this kind is asked for, in Python and on the command line."""
    if kind == "rule":
        return f"the rule of a drafter, as in draft:rule={name}"
    argument_name = kind if kind in BESIDE else "method"
    return f"{argument_name}={name!r}, --{argument_name} {name}"


def load_method(name: str, kind: str) -> type[Any]:
    """Imports the method's file and returns its one dataclass. Raises UnknownMethod."""
    if (kind, name) not in method_files():
        raise unknown_method(kind, name)
    method_class: type[Any] = getattr(module_of(method_files()[kind, name], kind), class_name(name))
    return method_class


def module_of(path: Path, kind: str) -> ModuleType:
    """The module of a method's file, imported; another package's is imported as one of ours."""
    if path.is_relative_to(PACKAGE):
        module_parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        return importlib.import_module(".".join(module_parts))
    module_name = f"foretell.{FOLDERS[kind][0]}.{path.stem}"
    if module_name not in sys.modules:
        module_spec = importlib.util.spec_from_file_location(module_name, path)
        assert module_spec and module_spec.loader
        module = sys.modules[module_name] = importlib.util.module_from_spec(module_spec)
        try:
            module_spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[module_name]
            raise
    return sys.modules[module_name]


def class_name(name: str) -> str:
    """Returns the class of a method's name: token-recycling -> TokenRecycling."""
    return name.replace("-", " ").title().replace(" ", "")
