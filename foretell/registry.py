"""A method is found by its file's name: `drafters/token_recycling.py` is the drafter
`token-recycling`.

Listing is reading file names, so a missing optional dependency cannot break it, and adding a method
edits no list. Other packages add methods by the entry-point group `foretell.methods`, each naming a
package with folders like ours.
"""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from foretell.errors import BadConfig, UnknownMethod

FOLDERS = {
    "drafter": "drafters",
    "strategy": "strategies",
    "diffusion": "diffusion",
    "kv": "kv",
    "rule": "rules",
}


@cache
def files() -> dict[tuple[str, str], Path]:
    """(kind, name) -> file, of this package and of those that join it. Raises BadConfig where two
    claim one name.
    """
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
                    raise BadConfig(
                        f"two files claim the {kind} {key[1]!r}: {found[key]} and {path}"
                    )
                found[key] = path
    return found


def names(*kinds: str) -> list[str]:
    return sorted(name for k, name in files() if k in kinds)


def methods() -> list[str]:
    """What `method=` takes."""
    return names(*(kind for kind in FOLDERS if kind != "rule"))


def kind_of(name: str) -> str:
    if not (kind := next((k for k, n in files() if n == name and k != "rule"), None)):
        raise UnknownMethod.near("method", name, methods())
    return kind


def load(name: str, kind: str) -> type[Any]:
    """Imports the method's file and returns its one dataclass."""
    if (kind, name) not in files():
        raise UnknownMethod.near(kind, name, names(kind))
    path = files()[kind, name]
    module_name = f"foretell.{FOLDERS[kind]}.{path.stem}"
    if path.is_relative_to(Path(__file__).parent):
        importlib.import_module(module_name)
    elif module_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(module_name, path)
        assert spec and spec.loader
        module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[module_name]
            raise
    return getattr(sys.modules[module_name], class_name(name))  # type: ignore[no-any-return]


def class_name(name: str) -> str:
    return name.replace("-", " ").title().replace(" ", "")  # token-recycling: TokenRecycling
