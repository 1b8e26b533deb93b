"""Codes and blocks outside a model's memory: what is read is what was written, or an error, and
nothing is left behind.
"""

from __future__ import annotations

import gc
import os
import random
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from foretell.core.request import Request
from foretell.core.types import Sampling
from foretell.engine.engine import Engine
from foretell.errors import BadConfig, BadFile, RequestFailed
from foretell.kv.store.base import Stored
from foretell.kv.store.spilling import (
    MINE,
    ROW,
    BlockStore,
    DiskBlocks,
    Files,
    NearBlocks,
    RamBlocks,
    Spill,
    blocks_in,
    word_checksums,
    writable_folder,
)
from foretell.strategies.plain import Plain
from tests.kv.policies import PROMPT, run, target

CODES = {
    layer: {
        "a": torch.arange(7 + layer, dtype=torch.uint8),
        "b": torch.randn(3, 5).bfloat16(),
        "none": torch.zeros(2, 0, 4),
        "c": torch.randn(2, 3, 4),
        "d": torch.arange(3),
    }
    for layer in (0, 2)
}


def files(folder: Path) -> Files:
    return Files(folder, "name another")


def test_tensors_come_back(tmp_path: Path) -> None:
    shelf = files(tmp_path / "made").open_shelf()
    opened = [shelf.put_codes(CODES), shelf.put_codes({5: {"a": torch.ones(1)}})]
    assert [*opened[0]] == [0, 2] and len(opened[0]) == 2
    for layer, code in CODES.items():
        read = opened[0][layer]
        assert read.keys() == code.keys()
        for name, tensor in code.items():
            assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor)
    assert torch.equal(opened[1][5]["a"], torch.ones(1))
    shelf.remove_user()
    assert not any((tmp_path / "made").iterdir())


def test_every_byte_is_checked(tmp_path: Path) -> None:
    shelf = files(tmp_path).open_shelf()
    opened: Any = shelf.put_codes(CODES)
    path = opened.spill.path
    whole = path.read_bytes()
    ends = [piece.start + piece.size for piece, _ in opened.filed.values()]
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with pytest.raises(BadFile, match=r"damaged \(other bytes .*send the request again$"):
            opened[0 if place < ends[0] else 2]
    path.write_bytes(whole[:-1])
    with pytest.raises(BadFile, match="too short"):
        opened[2]
    assert opened[0].keys() == CODES[0].keys()
    path.unlink()
    with pytest.raises(BadFile, match="No such file"):
        opened[0]


def test_words_that_change_places_are_noticed() -> None:
    """Sums alone would not tell them from what was written."""
    draw = np.random.default_rng(1)
    words = draw.integers(0, 1 << 62, 5 * ROW + 9).astype(np.uint64)
    want = word_checksums(words.view(np.uint8))
    for first, second, size in (
        (0, 1, 1),
        (3, 3 + ROW, 1),
        (0, ROW, ROW),
        (5 * ROW, 5 * ROW + 4, 2),
    ):
        other = words.copy()
        one, two = slice(first, first + size), slice(second, second + size)
        other[one], other[two] = words[two], words[one]
        assert word_checksums(other.view(np.uint8)) != want
    assert word_checksums(words.copy().view(np.uint8)) == want


def test_the_last_fork_removes_the_folder(tmp_path: Path) -> None:
    engine = Engine({"target": target()})
    policy = Stored(0, 0, 4, shelf=files(tmp_path))
    sampling = Sampling(temperature=0.0, max_new_tokens=9)
    lives = [engine.add(Request(list(PROMPT), Plain(), sampling, policy=policy)) for _ in range(2)]
    while not all(("target", 0) in live.caches and live.ctx.output for live in lives):
        engine.step()
    engine.step()
    folders = [*tmp_path.iterdir()]
    assert len(folders) == 2 and all([*folder.iterdir()] for folder in folders)
    fork = lives[0].caches["target", 0].fork()
    engine.end(lives[0])
    assert len([*tmp_path.iterdir()]) == 2
    assert fork.policy.decode_held(0)[0].shape[1] == fork.policy.rows > 0
    fork.drop()
    assert len([*tmp_path.iterdir()]) == 1
    engine.end(lives[1])
    assert not [*tmp_path.iterdir()]


def test_a_cache_that_forgets_begins_a_folder_anew(tmp_path: Path) -> None:
    (want,) = run(target(), [PROMPT], None)
    engine = Engine({"target": target()})
    policy = Stored(0, 0, 4, shelf=files(tmp_path))
    sampling = Sampling(temperature=0.0, max_new_tokens=24)
    live = engine.add(Request(list(PROMPT), Plain(), sampling, policy=policy))
    while engine.live:
        engine.step()
        assert len([*tmp_path.iterdir()]) <= 1
        if engine.live and len(live.ctx.output) in (5, 14):
            live.caches["target", 0].forget()
            assert not [*tmp_path.iterdir()]
    assert live.ctx.output == want.ctx.output
    assert not [*tmp_path.iterdir()]


def test_what_nobody_drops_goes_with_its_last_user(tmp_path: Path) -> None:
    shelf = files(tmp_path).open_shelf()
    opened = shelf.put_codes(CODES)
    assert [*tmp_path.iterdir()]
    del shelf
    gc.collect()
    assert [*opened[2]] == [*CODES[2]]
    del opened
    gc.collect()
    assert not [*tmp_path.iterdir()]


def together(policy: Stored, spoil: Any) -> list[Any]:
    """A request under a policy beside one without, after `spoil` of a running engine."""
    engine = Engine({"target": target()})
    sampling = Sampling(temperature=0.0, max_new_tokens=24)
    lives = [
        engine.add(Request(list(PROMPT), Plain(), sampling, policy=one)) for one in (policy, None)
    ]
    while engine.live:
        engine.step()
        spoil(lives[0])
    return lives


def test_a_full_folder_ends_its_request_alone(tmp_path: Path) -> None:
    (want,) = run(target(), [PROMPT], None)
    most, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    limits: list[int] = []

    def spoil(live: Any) -> None:
        if len(live.ctx.output) == 9 and not limits:  # something is stored already
            assert [*tmp_path.iterdir()]
            limits.append(64)
            resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))

    try:
        ended, other = together(Stored(0, 0, 4, shelf=files(tmp_path)), spoil)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    assert isinstance(ended.error, RequestFailed) and ended.reason == "error"
    assert str(ended.error) == (
        f"{tmp_path}: rows cannot be written (File too large); name another"
    )
    assert other.ctx.output == want.ctx.output
    assert not [*tmp_path.iterdir()]


def test_a_damaged_block_ends_its_request_alone(tmp_path: Path) -> None:
    (want,) = run(target(), [PROMPT], None)

    def spoil(live: Any) -> None:
        if len(live.ctx.output) == 9:
            path = max(tmp_path.glob("*/*"))
            path.write_bytes(bytes(path.stat().st_size))

    ended, other = together(Stored(0, 0, 4, shelf=files(tmp_path)), spoil)
    assert isinstance(ended.error, BadFile) and "\n" not in str(ended.error)
    assert other.ctx.output == want.ctx.output
    assert not [*tmp_path.iterdir()]


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a")
    with pytest.raises(BadConfig, match=r"^dir='.*file': rows cannot be written there .* name"):
        writable_folder(tmp_path / "file", "dir")
    assert writable_folder(tmp_path / "new", "dir").is_dir()
    assert not [*(tmp_path / "new").iterdir()]


# --- blocks that are known by their slots


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
        slots = store.add_blocks(keys, values)
        assert not {*slots} & {*known}
        for at, slot in enumerate(slots):
            known[slot] = [(k[:, at], v[:, at]) for k, v in zip(keys, values, strict=True)]
        for count in (1, 3, 4, 7):
            asked = draw.sample([*known], min(count, len(known)))
            layer = draw.randrange(len(SHAPES))
            got = store.read_blocks(layer, torch.tensor(asked))
            for part, rows in enumerate(got):
                want = torch.stack([known[slot][layer][part] for slot in asked], 1)
                assert torch.equal(rows, want)


class Counting:
    """A store that knows how many blocks were read of it."""

    def __init__(self, store: BlockStore):
        self.store, self.count = store, 0

    def add_blocks(self, *rows: Any) -> list[int]:
        return self.store.add_blocks(*rows)

    def read_blocks(self, layer: int, slots: torch.Tensor) -> Any:
        self.count += len(slots)
        return self.store.read_blocks(layer, slots)


def test_blocks_read_last_are_near() -> None:
    far = Counting(RamBlocks())
    near = NearBlocks(far, 4, CPU)
    near.add_blocks(*some(10, torch.float32))
    near.read_blocks(0, torch.tensor([0]))
    begun = far.count

    def more(*slots: int) -> int:
        before = far.count
        near.read_blocks(0, torch.tensor(slots))
        return far.count - before

    assert more(1, 2, 3) == 3 and far.count == begun + 3
    assert more(3, 0) == 0
    assert more(4) == 1  # in the place of 1 or 2
    assert more(0, 3, 4) == 0
    assert more(5, 6, 7, 8, 9) == 5 and more(0, 3, 4) == 0  # too many to be near
    assert more(5, 6, 7, 8) == 4 and more(0, 3, 4) == 3


def test_a_folder_goes_with_its_store(tmp_path: Path) -> None:
    store = blocks_in(str(tmp_path), 4, CPU)
    store.add_blocks(*some(2, torch.float32))
    (folder,) = tmp_path.iterdir()
    assert [path.name for path in folder.iterdir()] == ["rows"]
    del store
    gc.collect()
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("harm", ["a bit", "the end", "a failing disk"])
def test_damage_is_an_error_and_leaves_nothing(
    harm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DiskBlocks(str(tmp_path))
    store.add_blocks(*some(5, torch.float32))
    path, piece = store.spill.path, store.slots[4][1]
    data = bytearray(path.read_bytes())
    data[piece.start + 7] ^= 4
    if harm == "a failing disk":

        def fail(*_: Any) -> int:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(os, "preadv", fail)
    else:
        path.write_bytes(data if harm == "a bit" else data[: piece.start + 9])
        store.read_blocks(0, torch.tensor([3, 0]))
    with pytest.raises(BadFile) as raised:
        store.read_blocks(1, torch.tensor([2, 4]))
    said = str(raised.value)
    assert str(path) in said and "of layer 1" in said and "block" in said and "\n" not in said
    assert ("damaged" in said) == (harm != "a failing disk")
    assert not [*tmp_path.iterdir()]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a")
    with pytest.raises(RequestFailed, match="file: rows cannot be written"):
        DiskBlocks(str(tmp_path / "file"))


def test_a_full_disk_is_an_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    store = DiskBlocks(str(tmp_path))
    store.add_blocks(*some(2, torch.float32))
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(RequestFailed, match="No space left on device"):
        store.add_blocks(*some(1, torch.float32))
    assert not [*tmp_path.iterdir()]


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path: Path) -> None:
    left = (
        "import sys, time\nfrom pathlib import Path\nfrom foretell.kv.store.spilling import Spill\n"
        "spill = Spill(Path(sys.argv[1]))\nprint(spill.folder, flush=True)\ntime.sleep(60)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", left, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    folder = Path(child.stdout.readline().strip())
    mine = Spill(tmp_path)
    assert folder.is_dir(), "its process runs"
    child.kill()
    child.wait()
    child.stdout.close()
    others = [tmp_path / "foretell-other-1-x", tmp_path / f"{MINE}x-1", tmp_path / "kept"]
    for other in others:
        other.mkdir()
    again = Spill(tmp_path)
    assert not folder.exists() and mine.folder.is_dir() and again.folder.is_dir()
    assert all(other.is_dir() for other in others)
