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
from types import ModuleType
from typing import Any

from foretell import registry


def submodules(package: str) -> Callable[[str], Any]:
    """A module `__getattr__` that imports `package.name` when `name` is asked for, and a method's
    file wherever it lies below the package's folder.
    """

    def find(name: str) -> Any:
        try:
            return importlib.import_module(f"{package}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{package}.{name}":
                raise
        module = method_of(package, name)
        if module is None:
            raise AttributeError(f"{package} has no file {name}.py")
        return module

    return find


def method_of(package: str, name: str) -> ModuleType | None:
    """The module of a method, by its file's name and the package of its kind; None: no such one."""
    folder = package.partition(".")[2]
    for kind, folders in registry.FOLDERS.items():
        path = registry.files().get((kind, name.replace("_", "-")))
        if folder in folders and path is not None:
            return registry.module_of(path, kind)
    return None


class RenamedModules(MetaPathFinder, Loader):
    """Imports a module by a name that it had before, `{old: new}`, and says so once."""

    def __init__(self, names: Mapping[str, str]):
        self.names = names

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name in self.names:
            return ModuleSpec(name, self)
        holds_some = any(old.startswith(f"{name}.") for old in self.names)
        return ModuleSpec(name, self, is_package=True) if holds_some else None

    def exec_module(self, module: ModuleType) -> None:
        old = module.__name__
        if old not in self.names:
            return  # a folder that is no more, which holds some of them
        new = self.names[old]
        warnings.warn(f"{old} is {new} now", DeprecationWarning, stacklevel=2)
        sys.modules[old] = importlib.import_module(new)  # the import takes what stands here


def keep_old_names(names: Mapping[str, str]) -> None:
    """Lets modules be imported by names that they had before, `{old: new}`."""
    sys.meta_path.append(RenamedModules(names))
