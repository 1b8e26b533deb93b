"""Blocks in RAM, in a file and near the model are those that were put there."""

from __future__ import annotations

import gc
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from foretell.errors import BadFile
from foretell.ops.block_store import BlockStore, DiskBlocks, NearBlocks, RamBlocks, blocks_in

CPU = torch.device("cpu")
SHAPES = [(2, 4, 3), (1, 2, 5)]  # of a layer: heads, widths of a key and of a value
BLOCK = 3


def some(blocks: int, dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    keys = [torch.randn(heads, blocks, BLOCK, width).to(dtype) for heads, width, _ in SHAPES]
    values = [torch.randn(heads, blocks, BLOCK, width).to(dtype) for heads, _, width in SHAPES]
    return keys, values


@pytest.mark.parametrize("kind", ["ram", "disk", "near ram", "near disk"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_what_is_read_is_what_was_put_there(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    store: BlockStore = DiskBlocks(str(tmp_path)) if "disk" in kind else RamBlocks()
    if "near" in kind:
        store = NearBlocks(store, 4, CPU)
    draw = random.Random(3)
    known: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for _ in range(12):
        keys, values = some(draw.randint(1, 9), dtype)
        slots = store.add(keys, values)
        assert not {*slots} & {*known}
        for at, slot in enumerate(slots):
            known[slot] = [(k[:, at], v[:, at]) for k, v in zip(keys, values, strict=True)]
        for count in (1, 3, 4, 7):
            asked = draw.sample([*known], min(count, len(known)))
            layer = draw.randrange(len(SHAPES))
            got = store.read(layer, torch.tensor(asked))
            for part, rows in enumerate(got):
                want = torch.stack([known[slot][layer][part] for slot in asked], 1)
                assert torch.equal(rows, want)


class Counting:
    """A store that knows how many blocks were read of it."""

    def __init__(self, store: BlockStore):
        self.store, self.count = store, 0

    def add(self, *rows: Any) -> list[int]:
        return self.store.add(*rows)

    def read(self, layer: int, slots: torch.Tensor) -> Any:
        self.count += len(slots)
        return self.store.read(layer, slots)


def test_blocks_read_last_are_near() -> None:
    far = Counting(RamBlocks())
    near = NearBlocks(far, 4, CPU)
    near.add(*some(10, torch.float32))
    near.read(0, torch.tensor([0]))
    begun = far.count

    def more(*slots: int) -> int:
        before = far.count
        near.read(0, torch.tensor(slots))
        return far.count - before

    assert more(1, 2, 3) == 3 and far.count == begun + 3
    assert more(3, 0) == 0
    assert more(4) == 1  # in the place of 1 or 2
    assert more(0, 3, 4) == 0
    assert more(5, 6, 7, 8, 9) == 5 and more(0, 3, 4) == 0  # too many to be near
    assert more(5, 6, 7, 8) == 4 and more(0, 3, 4) == 3


def test_a_folder_goes_with_its_store(tmp_path: Path) -> None:
    store = blocks_in(str(tmp_path), 4, CPU)
    store.add(*some(2, torch.float32))
    (folder,) = tmp_path.iterdir()
    assert [path.name for path in folder.iterdir()] == ["blocks"]
    del store
    gc.collect()
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("harm", ["a bit", "the end", "a failing disk"])
def test_damage_is_an_error_and_leaves_nothing(
    harm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DiskBlocks(str(tmp_path))
    store.add(*some(5, torch.float32))
    data = bytearray(store.path.read_bytes())
    data[4 * store.size + store.starts[1] + 7] ^= 4
    if harm == "a failing disk":

        def fail(*_: Any) -> int:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(os, "preadv", fail)
    else:
        store.path.write_bytes(data if harm == "a bit" else data[: 4 * store.size + 9])
        store.read(0, torch.tensor([3, 0]))
    with pytest.raises(BadFile) as raised:
        store.read(1, torch.tensor([2, 4]))
    said = str(raised.value)
    assert str(store.path) in said and "block" in said and "\n" not in said
    assert ("damaged" in said) == (harm != "a failing disk")
    assert not [*tmp_path.iterdir()]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="nowhere: cannot be written"):
        DiskBlocks(str(tmp_path / "nowhere"))


def test_a_full_disk_is_an_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    store = DiskBlocks(str(tmp_path))
    store.add(*some(2, torch.float32))
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(BadFile, match="No space left on device"):
        store.add(*some(1, torch.float32))
    assert not [*tmp_path.iterdir()]
