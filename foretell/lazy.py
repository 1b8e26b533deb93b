"""Names of a package that are imported when they are first used, so that listing methods does not
import torch; and the names that modules had before, which lead to where they are now.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from foretell import registry


def lazy_submodules(package: str) -> Callable[[str], Any]:
    """A module `__getattr__` that imports `package.name` when `name` is asked for, and a method's
    file wherever it lies below the package's folder.
    """

    def find(name: str) -> Any:
        try:
            return importlib.import_module(f"{package}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{package}.{name}":
                raise
        found = find_method(f"{package}.{name}")  # another package's
        if found is None:
            raise AttributeError(f"{package} has no file {name}.py")
        return registry.module_of(*found)

    return find


def find_method(module_name: str) -> tuple[Path, str] | None:
    """The file and the kind of a method, by its module's name below the package of its kind, as in
    `foretell.drafters.ngram`; None: there is no such method.
    """
    package, _, name = module_name.rpartition(".")
    folder = package.partition(".")[2]
    for kind, folders in registry.FOLDERS.items():
        path = registry.method_files().get((kind, name.replace("_", "-")))
        if folder in folders and path is not None:
            return path, kind
    return None


def find_shipped_method(module_name: str) -> tuple[Path, str] | None:
    """The file and the kind of a method of ours; None: it is none, or another package's."""
    found = find_method(module_name)
    return found if found and found[0].is_relative_to(registry.PACKAGE) else None


class RenamedModules(MetaPathFinder, Loader):
    """Imports a module by a name that it had before, `{old: new}`, and says so once; a method by
    its kind's folder and its own name, wherever it lies below.
    """

    def __init__(self, new_names: Mapping[str, str]):
        self.new_names = new_names

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name in self.new_names or find_shipped_method(name):
            return ModuleSpec(name, self)
        is_package = any(old_name.startswith(f"{name}.") for old_name in self.new_names)
        return ModuleSpec(name, self, is_package=True) if is_package else None

    def exec_module(self, module: ModuleType) -> None:
        old_name = module.__name__
        if method := find_shipped_method(old_name):
            sys.modules[old_name] = registry.module_of(*method)  # the import takes what stands here
        elif old_name in self.new_names:
            new_name = self.new_names[old_name]
            warnings.warn(f"{old_name} is {new_name} now", DeprecationWarning, stacklevel=2)
            sys.modules[old_name] = importlib.import_module(new_name)


def keep_old_names(new_names: Mapping[str, str]) -> None:
    """Lets modules be imported by names that they had before, `{old: new}`."""
    sys.meta_path.append(RenamedModules(new_names))
