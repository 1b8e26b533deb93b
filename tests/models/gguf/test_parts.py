"""Values and tensors read from their places, and models that lie in several files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import gguf as lib
import numpy as np
import pytest
import torch

from foretell.errors import BadModel
from foretell.models.gguf import gguf
from foretell.models.gguf.header import read_header
from foretell.models.gguf.parts import open_parts
from tests import tiny
from tests.models.gguf.cases import CASES, model_of
from tests.models.gguf.files import write_file

FORMATS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q5_1")
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
IDS = torch.tensor([list(range(1, 40))])


def written(folder: Path, form: str) -> Path:
    return tiny.gguf(tiny.llama(**SIZES), folder / "m.gguf", kind=form)


@pytest.mark.parametrize("form", FORMATS)
def test_what_is_read_is_what_the_package_reads(form: str, tmp_path: Path) -> None:
    path = written(tmp_path, form)
    values, tensors = open_parts(path)
    reader = lib.GGUFReader(path)
    stated = {key: part for key, part in reader.fields.items() if not key.startswith("GGUF.")}
    assert set(values) == set(stated) and len(values) == len(stated)
    for key, part in stated.items():
        assert values[key] == part.contents(), key
    assert set(tensors) == {tensor.name for tensor in reader.tensors}
    for theirs in reader.tensors:
        ours = tensors[theirs.name]
        assert ours.tensor_type == theirs.tensor_type and ours.n_elements == theirs.n_elements
        assert ours.shape == tuple(map(int, theirs.shape))
        assert ours.data.dtype == theirs.data.dtype and np.array_equal(ours.data, theirs.data)


def test_numbers_of_three_sizes_and_of_whole_kinds_are_read(tmp_path: Path) -> None:
    writer = lib.GGUFWriter(tmp_path / "m.gguf", "llama")
    kinds = (np.float32, np.float16, np.float64, np.int8, np.int16, np.int32, np.int64)
    wanted = {kind.__name__: np.arange(24).reshape(2, 3, 4).astype(kind) for kind in kinds}
    blocks = np.random.default_rng(0).standard_normal((2, 3, 64), np.float32)
    wanted["blocks"] = lib.quantize(blocks, lib.GGMLQuantizationType.Q8_0)
    for name, data in wanted.items():
        is_packed = name == "blocks"
        raw = lib.GGMLQuantizationType.Q8_0 if is_packed else None
        writer.add_tensor(name, data, raw_dtype=raw)
    writer.add_array("llama.numbers", [1.5, 2.5])
    writer.add_array("llama.flags", [True, False])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    values, tensors = open_parts(tmp_path / "m.gguf")
    for name, data in wanted.items():
        assert np.array_equal(tensors[name].data, data) and tensors[name].data.dtype == data.dtype
    assert values["llama.numbers"] == [1.5, 2.5] and values["llama.flags"] == [True, False]
    with pytest.raises(KeyError):
        values["llama.nothing"]


@torch.inference_mode()
def rows(hf: Any) -> torch.Tensor:
    found: torch.Tensor = hf(IDS).logits[0]
    return found


def parts_of(folder: Path, name: str = "gemma3", part_length: int = 30) -> tuple[Any, list[Path]]:
    """A model and the parts that it is written in."""
    hf = model_of(CASES[name])
    write_file(CASES[name], hf, folder / "m.gguf", part_length=part_length)
    return hf, sorted(folder.glob("*.gguf"))


def test_a_model_in_parts_is_read_from_the_first(tmp_path: Path) -> None:
    hf, paths = parts_of(tmp_path)
    assert len(paths) == 4 and paths[0].name == "m-00001-of-00004.gguf"
    assert rows(gguf.read_unpacked(paths[0], torch.float32)).allclose(rows(hf), atol=1e-4)
    whole = write_file(CASES["gemma3"], hf, tmp_path / "whole.gguf")
    tensors = read_header(whole).tensors
    assert set(read_header(paths[0]).tensors) == set(tensors)


def refusal(path: Path) -> str:
    with pytest.raises((LookupError, BadModel)) as refused:
        gguf.read_unpacked(path, torch.float32)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_parts_that_are_missing_are_named(tmp_path: Path) -> None:
    _, paths = parts_of(tmp_path, "olmo2", 10)
    assert "give the first, m-00001-of-00003.gguf" in refusal(paths[1])
    paths[2].unlink()
    assert "the first of 3 parts, and m-00003-of-00003.gguf of them are missing" in refusal(
        paths[0]
    )
    paths[1].unlink()
    assert "m-00002-of-00003.gguf, m-00003-of-00003.gguf of them" in refusal(paths[0])


def test_parts_of_other_models_are_refused(tmp_path: Path) -> None:
    _, paths = parts_of(tmp_path, "olmo2", 10)
    renamed = shutil.copy(paths[0], tmp_path / "model.gguf")
    assert "its name does not end with -00001-of-00003.gguf" in refusal(Path(renamed))
    second, third = (path.read_bytes() for path in paths[1:])
    paths[1].write_bytes(third)
    assert "m-00002-of-00003.gguf has split.no=2 and split.count=3, where 1" in refusal(paths[0])
    paths[1].write_bytes(second[: len(second) // 2])
    assert "m-00002-of-00003.gguf" in refusal(paths[0])
    paths[1].write_bytes(second)
    rewritten(paths[2], tensors={"token_embd.weight": np.ones(32, np.float32)})
    assert "token_embd.weight, which another part has too" in refusal(paths[0])
    rewritten(paths[2], tensors={})
    assert "split.tensors.count=25, and its parts have 20" in refusal(paths[0])
    rewritten(paths[2], tensors={}, keys={"olmo2.block_count": 3})
    assert "has olmo2.block_count, which belongs into the first part" in refusal(paths[0])


def rewritten(path: Path, tensors: dict[str, Any], keys: dict[str, int] | None = None) -> None:
    """The third of three parts with other contents."""
    writer = lib.GGUFWriter(path, "olmo2")
    writer.kv_data[0].clear()
    writer.add_uint16("split.no", 2)
    writer.add_uint16("split.count", 3)
    for key, value in (keys or {}).items():
        writer.add_uint32(key, value)
    for name, data in tensors.items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
