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
        method_module = find_method(package, name)
        if method_module is None:
            raise AttributeError(f"{package} has no file {name}.py")
        return method_module

    return find


def find_method(package: str, name: str) -> ModuleType | None:
    """The module of a method, by its file's name and the package of its kind; None: no such
    method.
    """
    folder = package.partition(".")[2]
    for kind, folders in registry.FOLDERS.items():
        method_path = registry.method_files().get((kind, name.replace("_", "-")))
        if folder in folders and method_path is not None:
            return registry.module_of(method_path, kind)
    return None


class RenamedModules(MetaPathFinder, Loader):
    """Imports a module by a name that it had before, `{old: new}`, and says so once; a method by
    its kind's folder and its own name, wherever it lies below.
    """

    def __init__(self, new_names: Mapping[str, str]):
        self.new_names = new_names

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name in self.new_names or is_shipped_method(name):
            return ModuleSpec(name, self)
        is_package = any(old_name.startswith(f"{name}.") for old_name in self.new_names)
        return ModuleSpec(name, self, is_package=True) if is_package else None

    def exec_module(self, module: ModuleType) -> None:
        old_name = module.__name__
        if is_shipped_method(old_name):
            package, _, method = old_name.rpartition(".")
            found = find_method(package, method)
            assert found is not None
            sys.modules[old_name] = found  # the import takes what stands here
            return
        if old_name not in self.new_names:
            return  # a folder that is no more, which holds some of them
        new_name = self.new_names[old_name]
        warnings.warn(f"{old_name} is {new_name} now", DeprecationWarning, stacklevel=2)
        sys.modules[old_name] = importlib.import_module(new_name)


def is_shipped_method(module_name: str) -> bool:
    """Whether a module's name is that of one of our methods below its kind's folder, as in
    `foretell.drafters.ngram`.
    """
    package, _, name = module_name.rpartition(".")
    folder, key = package.partition(".")[2], name.replace("_", "-")
    kinds = [kind for kind, folders in registry.FOLDERS.items() if folder in folders]
    paths = [registry.method_files().get((kind, key)) for kind in kinds]
    return any(path is not None and path.is_relative_to(registry.PACKAGE) for path in paths)


def keep_old_names(new_names: Mapping[str, str]) -> None:
    """Lets modules be imported by names that they had before, `{old: new}`."""
    sys.meta_path.append(RenamedModules(new_names))
