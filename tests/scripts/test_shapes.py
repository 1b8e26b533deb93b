"""Files of known shapes with random numbers: their tensors have the types of llama.cpp's recipes,
their numbers the variance that was asked for, and whoever reads such files opens them.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import gguf
import noise_blocks
import numpy as np
import pytest
import shapes
import torch
from noise_blocks import Format

from foretell.models.gguf.gguf import read_unpacked
from foretell.models.gguf.tokenizer import read_tokenizer

TEXT = "Größe, the quick 漢字 🙂\n\tx = 1"
COUNTS = {  # of the tensors of a published file: Gemma 3 270M as Q4_K_M
    "F32": 109, "Q5_0": 81, "Q4_K": 27, "Q8_0": 10, "Q6_K": 9
}  # fmt: skip
SIZES = {  # bytes of published files, in MB, with their own headers of some MB
    ("1b", "Q4_K_M"): 808, ("1b", "Q8_0"): 1321, ("4b", "Q4_K_M"): 2497, ("8b", "Q4_K_M"): 4921,
    ("8b", "Q5_K_M"): 5733, ("8b", "Q6_K"): 6596, ("30b", "Q4_K_M"): 18_557,
}  # fmt: skip


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise_blocks, "TILE", 1 << 15)


def tiny_file(folder: Path, shape: str, recipe: str, *more: str) -> Path:
    assert not shapes.main([shape, recipe, "--tiny", "--to", str(folder), *more])
    (path,) = folder.glob(f"{shape}-tiny-{recipe}-*.gguf")
    return path


@pytest.mark.parametrize("number_format", [
    "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "MXFP4"
])  # fmt: skip
def test_a_tile_holds_the_noise_that_was_rounded(number_format: str) -> None:
    kind = Format[number_format]
    tile = noise_blocks.noise_tile(kind, 0.02, np.random.default_rng(3))
    noise = np.random.default_rng(3).standard_normal(1 << 15, np.float32) * np.float32(0.02)
    stored: Any = {"F32": np.float32, "F16": np.float16}.get(number_format, np.uint8)
    numbers = gguf.dequantize(tile.view(stored), kind).reshape(-1)
    # A number is off by the root of 1/12 of a step, which is less than a third of a deviation in
    # formats of 4 bits, and half of that with each bit more.
    most = {"F32": 0, "F16": 0.001, "BF16": 0.003, "Q8_0": 0.01, "Q6_K": 0.03, "Q5_0": 0.05}
    error = np.sqrt(np.mean((numbers - noise) ** 2)) / 0.02
    assert error <= most.get(number_format, 0.06 if "Q5" in number_format else 0.12)
    assert 0.97 < numbers.std() / 0.02 < 1.03


def test_pieces_of_a_matrix_are_units_of_the_tile_in_another_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(noise_blocks, "TILE", 1 << 12)
    monkeypatch.setattr(noise_blocks, "CHUNK", 1000)
    tile = noise_blocks.noise_tile(Format.Q8_0, 1.0, np.random.default_rng(0))
    pieces = [*noise_blocks.matrix_pieces(tile, 68 * 34, np.random.default_rng(1))]
    assert sum(piece.nbytes for piece in pieces) == 68 * 34
    assert len(pieces) == 3
    units = np.concatenate(pieces).reshape(-1, tile.shape[1])
    assert {unit.tobytes() for unit in units} <= {unit.tobytes() for unit in tile}
    assert len({unit.tobytes() for unit in units}) > 8


@pytest.mark.parametrize("recipe", shapes.RECIPES)
def test_the_files_of_a_recipe_are_as_long_as_they_say_and_have_its_types(
    recipe: str, tmp_path: Path
) -> None:
    for name in ("30b",) if recipe == "MXFP4" else ("270m", "1b"):
        path = tiny_file(tmp_path, name, recipe)
        tensors = shapes.tensors_of(shapes.SHAPES[name].tiny(), recipe)
        reader = gguf.GGUFReader(path)
        assert {t.name: (t.tensor_type, tuple(map(int, t.shape))) for t in reader.tensors} == {
            t.name: (t.number_format, t.sizes[::-1]) for t in tensors
        }
        last = reader.tensors[-1]
        assert path.stat().st_size == int(last.data_offset) + shapes.padded(int(last.n_bytes))
        for tensor in reader.tensors:
            numbers = gguf.dequantize(tensor.data, tensor.tensor_type)
            if len(tensor.shape) > 1:
                assert 0.9 < numbers.std() * np.sqrt(int(tensor.shape[0])) < 1.1, tensor.name
        assert int(reader.fields["general.file_type"].contents()) == shapes.RECIPES[recipe][1]


def test_a_recipe_of_mixed_formats_is_that_of_published_files() -> None:
    tensors = shapes.tensors_of(shapes.SHAPES["270m"], "Q4_K_M")
    assert Counter(tensor.number_format.name for tensor in tensors) == COUNTS
    for (name, recipe), size in SIZES.items():
        tensors = shapes.tensors_of(shapes.SHAPES[name], recipe)
        assert 0 <= size - sum(tensor.byte_count for tensor in tensors) / 1e6 < 9, (name, recipe)
    kinds = {t.name: t.number_format.name for t in shapes.tensors_of(shapes.SHAPES["30b"], "MXFP4")}
    assert kinds["blk.0.ffn_up_exps.weight"] == "MXFP4" and kinds["output.weight"] == "Q8_0"
    assert kinds["blk.0.ffn_gate_inp.weight"] == "F32"


@pytest.mark.parametrize("name", shapes.SHAPES)
def test_every_family_is_opened_and_reads_every_text(name: str, tmp_path: Path) -> None:
    path = tiny_file(tmp_path, name, "Q8_0")
    tokenizer = read_tokenizer(path)
    tokens = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(tokens) == TEXT
    assert len(tokens) < len(TEXT.encode()), "nothing was merged"
    model = read_unpacked(path, torch.float32)
    logits = model(torch.tensor([tokens])).logits
    assert logits.shape == (1, len(tokens), 512) and 0.2 < logits.std() < 5


def test_a_seed_gives_the_same_bytes_and_another_one_others(tmp_path: Path) -> None:
    path = tiny_file(tmp_path / "a", "4b", "Q4_K_M", "--seed", "5")
    written = path.read_bytes()
    assert tiny_file(tmp_path / "b", "4b", "Q4_K_M", "--seed", "5").read_bytes() == written
    assert tiny_file(tmp_path / "c", "4b", "Q4_K_M", "--seed", "6").read_bytes() != written


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.99])
def test_a_run_that_was_broken_off_goes_on(share: float, tmp_path: Path) -> None:
    path = tiny_file(tmp_path, "1b", "Q4_0")
    whole = path.read_bytes()
    begun = path.rename(f"{path}.part")
    cut = int(len(whole) * share)
    begun.write_bytes(whole[:cut])
    assert tiny_file(tmp_path, "1b", "Q4_0").read_bytes() == whole
    assert not begun.exists()


def test_what_another_run_began_is_no_beginning(tmp_path: Path) -> None:
    path = tiny_file(tmp_path, "1b", "Q4_0", "--seed", "1")
    other = path.rename(tmp_path / "1b-tiny-Q4_0-seed0.gguf.part")
    assert not shapes.main(["1b", "Q4_0", "--tiny", "--to", str(tmp_path)])
    assert not other.exists()
    fresh = tiny_file(tmp_path / "fresh", "1b", "Q4_0")
    assert (tmp_path / fresh.name).read_bytes() == fresh.read_bytes()


def test_a_disk_without_room_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shapes, "SPARE", 1 << 60)
    assert shapes.main(["1b", "Q8_0", "--tiny", "--to", str(tmp_path)]) == 1
    said = capsys.readouterr().err.strip()
    assert "GB are free; name another folder" in said and "\n" not in said
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name a shape and at least one type"),
        (["1b"], "name a shape and at least one type"),
        (["7b", "Q8_0"], "invalid choice: '7b'"),
        (["1b", "Q9"], "type 'Q9': must be one of Q8_0"),
        (["1b", "MXFP4"], "the shape must be 30b"),
        (["1b", "Q8_0", "--seed", "-1"], "must be 0 or more"),
    ],
)
def test_wrong_options_are_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        shapes.main(arguments)
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_the_list_names_every_shape(capsys: pytest.CaptureFixture[str]) -> None:
    assert not shapes.main(["--list"])
    said = capsys.readouterr().out
    assert all(f"{name}: {shape.title}" in said for name, shape in shapes.SHAPES.items())
    assert "MXFP4    17.08" in said
