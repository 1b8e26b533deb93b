"""Packed weights that are kept: a second load has the same model, and damage costs a line."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import foretell
from foretell.loading import packed_files, packed_models
from foretell.models.decoder.packed import PackedLinear
from foretell.models.gguf import gguf
from foretell.native import library
from tests import tiny
from tests.models.gguf.cases import CASES, model_of
from tests.models.gguf.files import write_file

pytestmark = pytest.mark.skipif(not library.is_available(), reason="the C library is not built")
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of kept weights, which takes models of any size."""
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(packed_models, "LEAST_ROUNDED", 0)
    monkeypatch.setattr(packed_models, "LEAST_PACKED", 0)
    return packed_files.packed_folder()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny.save(tiny.llama(**SIZES).to(torch.bfloat16), tmp_path / "model")


def rows(lm: Any) -> torch.Tensor:
    hf = lm.models["target"].hf
    with torch.inference_mode():
        logits: torch.Tensor = hf(torch.tensor([[5, 17, 3, 9]]), use_cache=False).logits
    return logits


def text(lm: Any) -> str:
    return str(lm.generate("def f(x):", max_new_tokens=8).text)


def refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on nothing may be packed."""

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("it is packed again")

    monkeypatch.setattr(PackedLinear, "of", fail)
    monkeypatch.setattr(gguf, "pack_blocks", fail)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_folder_is_rounded_once(
    dtype: str, folder: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(packed_files.VARIABLE, "0")
    alone = foretell.load(folder, dtype=dtype)
    assert not kept.exists()
    monkeypatch.delenv(packed_files.VARIABLE)
    first = foretell.load(folder, dtype=dtype)
    (path,) = kept.iterdir()
    assert f"-{dtype}-v" in path.name and library.kernel_kind() in path.name
    refuse(monkeypatch)
    second = foretell.load(folder, dtype=dtype)
    assert torch.equal(rows(alone), rows(first)) and torch.equal(rows(first), rows(second))
    assert text(alone) == text(second)
    assert second.models["target"].backend.name == "native"
    ours, theirs = second.models["target"].hf, alone.models["target"].hf
    assert ours.generation_config.to_dict() == theirs.generation_config.to_dict()
    assert ours.config.to_dict() == theirs.config.to_dict()
    assert getattr(ours, "smoothed", {}).keys() == getattr(theirs, "smoothed", {}).keys()


def test_a_file_is_packed_once(tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny.gguf(tiny.llama(**SIZES), tmp_path / "model.gguf", kind="Q8_0")
    first = foretell.load(path)
    assert len([*kept.iterdir()]) == 1
    refuse(monkeypatch)
    second = foretell.load(path)
    assert torch.equal(rows(first), rows(second)) and text(first) == text(second)


# Tied and not, with biases, experts, one matrix for several, a latent, convolutions.
FAMILIES = ("llama", "gemma3", "gpt2", "gpt-oss", "qwen2moe", "hunyuan-moe", "deepseek 2", "lfm2")


@pytest.mark.parametrize("name", FAMILIES)
def test_models_of_many_builds_are_put_together_again(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    path = write_file(case, model_of(case), tmp_path / "model.gguf")
    packed: Any = gguf.read_packed(path)
    model, tensors = packed_models.describe_model(packed)
    packed_files.write("a.packed", json.loads(json.dumps(model)), tensors)
    place = packed_models.Place("a.packed", lambda: gguf.build_empty(path), 0)
    found = place.find()
    assert found is not None
    same, ours = packed_models.describe_model(found)
    assert same == model and ours.keys() == tensors.keys()
    assert all(torch.equal(ours[key].cpu(), tensors[key]) for key in tensors)
    kinds, theirs = ([type(module) for module in each.modules()] for each in (found, packed))
    assert kinds == theirs and found.config.to_dict() == packed.config.to_dict()


def test_matrices_that_a_step_joins_stay_where_they_are(folder: Path) -> None:
    foretell.load(folder, dtype="int8")
    hf: Any = foretell.load(folder, dtype="int8").models["target"].hf
    attention = hf.model.layers[0].self_attn
    assert attention.q_proj.settled and attention.v_proj.settled
    query = attention.q_proj.packed
    assert query.weights.data_ptr() + len(query.weights) == (
        attention.k_proj.packed.weights.data_ptr()
    )


def test_another_source_is_another_model(folder: Path, kept: Path) -> None:
    first = rows(foretell.load(folder, dtype="int8"))
    tiny.llama(seed=1, **SIZES).to(torch.bfloat16).save_pretrained(folder)
    assert not torch.equal(rows(foretell.load(folder, dtype="int8")), first)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}), "utf-8")
    foretell.load(folder, dtype="int8")
    assert len([*kept.iterdir()]) == 3


@pytest.mark.parametrize("damage", ["cut", "header", "numbers", "foreign"])
def test_a_damaged_file_costs_a_line(
    damage: str, folder: Path, kept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = rows(foretell.load(folder, dtype="int8"))
    (path,) = kept.iterdir()
    contents = bytearray(path.read_bytes())
    if damage == "cut":
        contents = contents[: len(contents) // 2]
    elif damage == "foreign":
        contents = bytearray(b"GGUF" * 1000)
    else:
        contents[100 if damage == "header" else 4096 * 8] ^= 0xFF
        if damage == "numbers":
            contents[-4096:] = bytes(4096)
    path.write_bytes(contents)
    capsys.readouterr()
    assert torch.equal(rows(foretell.load(folder, dtype="int8")), wanted)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "packed again" in line]
    assert line.startswith(str(path)) and "damaged (" in line
    assert packed_files.read(path.name) is not None  # whole again


def test_a_file_of_another_model_costs_a_line(
    folder: Path, kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = rows(foretell.load(folder, dtype="int8"))
    (path,) = kept.iterdir()
    other: Any = tiny.llama(**(SIZES | {"intermediate_size": 64})).to(torch.bfloat16)
    from foretell.models.decoder.packed import pack_layers

    pack_layers(other, "int8")
    packed_files.write(path.name, *packed_models.describe_model(other))
    assert torch.equal(rows(foretell.load(folder, dtype="int8")), wanted)
    assert "damaged (it is of another model)" in capsys.readouterr().err


def test_a_place_that_cannot_be_written_costs_a_line(
    folder: Path, kept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept.parent.mkdir(parents=True)
    kept.write_text("no folder")
    wanted = rows(foretell.load(folder, dtype="int8"))
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "not kept" in line]
    assert "cannot be written" in line and packed_files.VARIABLE in line
    kept.unlink()
    assert torch.equal(rows(foretell.load(folder, dtype="int8")), wanted)


def test_more_than_the_limit_is_not_kept(
    folder: Path, kept: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(packed_files.VARIABLE, "0.00001")
    foretell.load(folder, dtype="int8")
    assert "more than the limit of 0.0 GB" in capsys.readouterr().err and not kept.exists()


def test_small_models_and_other_numbers_are_not_kept(
    folder: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    foretell.load(folder)
    foretell.load(folder, dtype="float32")
    monkeypatch.setattr(packed_models, "LEAST_ROUNDED", 32_000_000)
    foretell.load(folder, dtype="int8")
    assert not kept.exists()


def _load(folder: Path, cache: str, results: Any) -> None:
    os.environ["FORETELL_CACHE"] = cache
    packed_models.LEAST_ROUNDED = 0
    results.put(rows(foretell.load(folder, dtype="int8")).float().tolist())


def test_two_processes_at_once(folder: Path, kept: Path) -> None:
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    loads = [
        context.Process(target=_load, args=(folder, str(kept.parent), results)) for _ in range(2)
    ]
    for process in loads:
        process.start()
    found = [results.get() for _ in loads]
    for process in loads:
        process.join()
    assert [process.exitcode for process in loads] == [0, 0]
    assert found[0] == found[1] == rows(foretell.load(folder, dtype="int8")).float().tolist()
    assert [path.suffix for path in kept.iterdir()] == [".packed"]


def test_a_folder_that_moves_is_packed_again_and_its_model_is_the_same(
    folder: Path, tmp_path: Path
) -> None:
    wanted = rows(foretell.load(folder, dtype="int8"))
    shutil.copytree(folder, tmp_path / "copy")
    assert torch.equal(rows(foretell.load(tmp_path / "copy", dtype="int8")), wanted)
