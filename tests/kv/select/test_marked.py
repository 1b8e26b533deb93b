"""Tables that are made for one model: which are read, and which are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from foretell.errors import BadFile, Unsupported
from foretell.kv.select.marked import Kind
from foretell.models.decoder.decoder import Decoder
from foretell.ops import assets
from tests.models.decoder.families import tiny

KIND = Kind(
    "weights",
    "a table of its weights",
    "make one with `make`",
    "table",
    lambda table: "" if bool((table >= 0).all()) else "some are below 0",
)


def other() -> Decoder:
    model = Decoder(tiny("llama"), "other")
    assert model.loop is not None
    with torch.no_grad():
        model.loop.norm.weight.mul_(2)
    return model


def test_a_table_is_found_in_a_file_a_folder_and_by_its_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Decoder(tiny("llama"), "llama")
    table = torch.rand(3, 2)
    folder = tmp_path / "weights"
    folder.mkdir()
    KIND.save_table(torch.rand(3, 2), folder / "a.safetensors", other())
    KIND.save_table(table, folder / "weights.safetensors", model, steps="3")
    monkeypatch.setattr(assets, "model_folders", lambda: [tmp_path])
    for given in (folder / "weights.safetensors", folder, ""):
        assert torch.equal(KIND.find_table(model, str(given), "kv=x", (3, 2)), table)


def test_none_ships(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assets, "model_folders", lambda: [tmp_path])
    with pytest.raises(Unsupported, match=r"kv=x.*none ships.*`make` and give it as table=FILE"):
        KIND.find_table(Decoder(tiny("llama"), "llama"), "", "kv=x", (3, 2))


def test_a_table_of_another_model_is_refused(tmp_path: Path) -> None:
    path, model = tmp_path / "t", Decoder(tiny("llama"), "llama")
    for table, of in ((torch.rand(3, 2), other()), (torch.rand(3, 4), model)):
        KIND.save_table(table, path, of)
        with pytest.raises(BadFile, match=r"t: was made for another model than llama; make one"):
            KIND.find_table(model, str(path), "kv=x", (3, 2))


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no table")
    save_file({"weights": torch.ones(2)}, tmp_path / "schema", {"schema": "other"})
    save_file({"others": torch.ones(2)}, tmp_path / "tensor", {"schema": KIND.schema})
    save_file({"weights": -torch.ones(2)}, tmp_path / "below", {"schema": KIND.schema})
    said = {
        "text": "cannot be read",
        "none": "cannot be read",
        "schema": "is no table of weights",
        "tensor": "is no table of weights",
        "below": r"is damaged \(some are below 0\)",
    }
    for name, words in said.items():
        with pytest.raises(BadFile, match=f"{name}: {words}.*make one with"):
            KIND.read_table(tmp_path / name)
