"""Codes in files: what is read is what was written, or an error, and nothing is left behind."""

from __future__ import annotations

import gc
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from foretell.core.engine import Engine
from foretell.core.request import Request
from foretell.core.types import Sampling
from foretell.errors import BadConfig, BadFile, RequestFailed
from foretell.ops.spilling import Files, checked
from foretell.ops.storing import Stored
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
    shelf = files(tmp_path / "made").opened()
    opened = [shelf.put(CODES), shelf.put({5: {"a": torch.ones(1)}})]
    assert [*opened[0]] == [0, 2] and len(opened[0]) == 2
    for layer, code in CODES.items():
        read = opened[0][layer]
        assert read.keys() == code.keys()
        for name, tensor in code.items():
            assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor)
    assert torch.equal(opened[1][5]["a"], torch.ones(1))
    shelf.leave()
    assert not any((tmp_path / "made").iterdir())


def test_every_byte_is_checked(tmp_path: Path) -> None:
    shelf = files(tmp_path).opened()
    opened: Any = shelf.put(CODES)
    path = opened.filed[0].path
    whole = path.read_bytes()
    ends = [filed.start + filed.size for filed in opened.filed.values()]
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with pytest.raises(BadFile, match=r"damaged \(other bytes .*\); send the request again$"):
            opened[0 if place < ends[0] else 2]
    path.write_bytes(whole[:-1])
    with pytest.raises(BadFile, match="too short"):
        opened[2]
    assert opened[0].keys() == CODES[0].keys()
    path.unlink()
    with pytest.raises(BadFile, match="No such file"):
        opened[0]


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
    assert fork.policy.decoded(0)[0].shape[1] == fork.policy.rows > 0
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
    shelf = files(tmp_path).opened()
    opened = shelf.put(CODES)
    assert [*tmp_path.iterdir()]
    del shelf
    gc.collect()
    assert not [*tmp_path.iterdir()] and len(opened) == 2


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
        checked(tmp_path / "file", "dir")
    assert checked(tmp_path / "new", "dir").is_dir()
    assert not [*(tmp_path / "new").iterdir()]
