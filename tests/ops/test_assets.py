"""What ships with foretell is found in the checkout, and is what its digests say."""

from __future__ import annotations

import hashlib
import tomllib
from pathlib import Path

import pytest

from foretell.loading.names import EMBEDDED, shipped_models
from foretell.ops import assets

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "models" / "foretell_models"


def test_a_checkout_finds_its_models_in_place() -> None:
    assert assets.model_folders() == [FOLDER]
    assert all(assets.shipped_folder(name) == FOLDER / name for name in EMBEDDED)
    assert assets.shipped_folder("none") is None
    assert FOLDER / "demo" / "config.json" in assets.shipped_files("*/config.json")


def test_digests_are_those_of_the_files_that_ship() -> None:
    files = [p for kind in ("safetensors", "json", "jinja") for p in FOLDER.glob(f"*/*.{kind}")]
    digests = {
        path.relative_to(FOLDER).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }
    assert shipped_models().digests == digests


def test_versions_agree() -> None:
    ours = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    theirs = tomllib.loads((ROOT / "models" / "pyproject.toml").read_text("utf-8"))["project"]
    version = shipped_models().version
    assert theirs["version"] == version
    assert ours["optional-dependencies"]["models"] == [f"{assets.DISTRIBUTION}=={version}"]


def test_every_folder_that_ships_has_a_card_or_a_description() -> None:
    described = (ROOT / "models" / "README.md").read_text("utf-8")
    folders = [path.name for path in FOLDER.iterdir() if path.is_dir() and path.name[0] != "_"]
    assert [name for name in folders if f"`{name}`" not in described] == []
    assert [name for name in folders if not (FOLDER / name / "README.md").is_file()] == []


def test_without_models_nothing_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assets, "__file__", str(tmp_path / "foretell" / "ops" / "assets.py"))
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path / "cache"))
    assert assets.model_folders() == [] and assets.shipped_files("*/*") == []
    assert assets.INSTALL in assets.hint_if_missing()
    assert assets.shipped_folder("demo") is None
    assets.fetched_models().joinpath("demo").mkdir(parents=True)
    assert assets.shipped_folder("demo") == assets.fetched_models() / "demo"
    assert assets.hint_if_missing() == ""
