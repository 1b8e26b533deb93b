"""Stores on disk: what every drafter that learns across requests must be able to do, and what is
refused.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from foretell.core.request import Request
from foretell.core.types import Sampling
from foretell.engine import saved_stores as stores
from foretell.engine.engine import Engine
from foretell.errors import BadFile
from foretell.speculation.strategy import Speculative
from foretell.testing.toy import Toy
from tests import laws


def engine(vocab: int = 8) -> Engine:
    return Engine(
        laws.world(laws.build("token-recycling"), vocab, copy=1.5)
        | {"draft": Toy(vocab, 3, noise=0.5)}
    )


def teach(own: Engine, spec: str, count: int = 3) -> list[tuple[int, int]]:
    """Runs some requests; returns what was drafted and accepted in each."""
    found = []
    for seed in range(count):
        sampling = Sampling(max_new_tokens=24, temperature=0.7, seed=seed)
        live = own.add(Request([1, 2, 3, 1, 2, seed], laws.build(spec), sampling, tenant="one"))
        laws.finish(own, live)
        found.append((live.ctx.stats.drafted, live.ctx.stats.accepted))
    return found


def learners() -> list[str]:
    """Specs of the drafters that leave something after for later requests."""
    found = []
    for spec in laws.claiming("exact", kind="drafter"):
        strategy = laws.build(spec)
        own = Engine(laws.world(strategy, 8, copy=1.5))
        assert isinstance(strategy, Speculative)
        laws.finish(
            own, own.add(Request([1, 2, 3, 1, 2, 3], strategy, Sampling(max_new_tokens=12)))
        )
        if next(stores.iterate_stores(own), None):
            found.append(spec)
    return found


LEARNERS = learners()


def test_the_status_tells_how_much_is_kept() -> None:
    own = engine()
    assert own.status()["learnt_bytes"] == 0
    teach(own, "token-recycling")
    sizes = [store.nbytes for *_, store in stores.iterate_stores(own)]
    assert own.status()["learnt_bytes"] == sum(sizes) > 0


def test_somebody_learns() -> None:
    assert "token-recycling" in LEARNERS


@pytest.mark.parametrize("spec", LEARNERS)
def test_what_was_learnt_is_kept(spec: str, tmp_path: Path) -> None:
    first = engine()
    teach(first, spec)
    paths = stores.save_stores(first, tmp_path)
    assert len(paths) == 1 and sorted(tmp_path.iterdir()) == paths, (
        "a part file is left, or a store is not"
    )
    second = engine()
    assert stores.load_stores(second, tmp_path) == paths
    ((_, owner, name, old),) = stores.iterate_stores(first)
    new = second.stores["one", owner, name]
    for key, value in old.tensors().items():
        assert torch.equal(value, new.tensors()[key]), f"{key} changed on the way"
    assert new.nbytes > 0
    assert teach(second, spec, 2) == teach(first, spec, 2), "with what was read it drafts otherwise"


@pytest.mark.parametrize("spec", LEARNERS)
def test_a_store_keeps_its_bound(spec: str) -> None:
    own = engine(16)
    for seed in range(20):
        prompt = torch.randint(0, 16, (60,), generator=torch.Generator().manual_seed(seed)).tolist()
        laws.finish(
            own,
            own.add(
                Request(prompt, laws.build(spec), Sampling(max_new_tokens=40, temperature=2.0))
            ),
        )
    ((_, owner, _, store),) = stores.iterate_stores(own)
    assert 0 < store.nbytes <= getattr(owner, "megabytes", 1) * 2**20


def damage(path: Path, **about: str) -> dict[str, Any]:
    with safe_open(path, "pt") as opened:
        return {
            "tensors": {k: opened.get_tensor(k) for k in opened.keys()},  # noqa: SIM118
            "about": {**opened.metadata(), **about},
        }


def test_damage_is_refused_and_nothing_is_taken_in(tmp_path: Path) -> None:
    own = engine()
    teach(own, "token-recycling")
    (path,) = stores.save_stores(own, tmp_path / "good")
    bad = tmp_path / "bad"
    shutil.copytree(tmp_path / "good", bad)
    target, fresh = bad / path.name, engine()
    whole = path.read_bytes()

    def refused(message: str) -> None:
        with pytest.raises(BadFile, match=message) as caught:
            stores.load_stores(fresh, bad)
        assert (
            "\n" not in str(caught.value) and target.name in str(caught.value) and not fresh.stores
        )

    target.write_bytes(whole[: len(whole) // 2])
    refused("damaged or cut off")
    flipped = bytearray(whole)
    flipped[-3] ^= 1
    target.write_bytes(bytes(flipped))
    refused("checksum")
    for change, message in (
        ({"schema": "other"}, "no store"),
        ({"vocab": "9"}, "this one has 8"),
        ({"method": "unheard-of"}, "version"),
        ({"fields": "{"}, "version"),
        ({"fields": '{"k": 0, "depth": 6}'}, "version"),
        ({"name": "what"}, "version"),
    ):
        parts = damage(path, **change)
        save_file(parts["tensors"], target, parts["about"])
        refused(message)
    parts = damage(path)
    parts["tensors"]["rows"] = parts["tensors"]["rows"][:-1].contiguous()
    save_file(
        parts["tensors"],
        target,
        parts["about"] | {"sha256": stores._digest_tensors(parts["tensors"])},
    )
    refused("do not fit")
    with pytest.raises(BadFile, match="no such folder"):
        stores.load_stores(fresh, tmp_path / "nowhere")


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = engine()
    teach(own, "token-recycling")
    (path,) = stores.save_stores(own, tmp_path)
    before = path.read_bytes()
    teach(own, "token-recycling", 5)
    teach(own, "token-recycling:k=3")
    count = 0

    def save(tensors: Any, file: Path, about: Any) -> None:
        nonlocal count
        count += 1
        if count == 2:
            file.write_bytes(b"a part of it")
            raise SafetensorError("Error while serializing: I/O error: No space left on device")
        save_file(tensors, file, about)

    monkeypatch.setattr(stores, "save_file", save)
    with pytest.raises(BadFile, match=r"cannot be written there .*No space left.*; make room"):
        stores.save_stores(own, tmp_path)
    assert count == 2 and list(tmp_path.iterdir()) == [path] and path.read_bytes() == before


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    own = engine()
    teach(own, "token-recycling")
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "inside"):
        with pytest.raises(BadFile, match=f"{place}: what drafters learnt cannot be") as caught:
            stores.save_stores(own, place)
        assert "\n" not in str(caught.value)


def test_a_damaged_file_leaves_what_was_known(tmp_path: Path) -> None:
    own = engine()
    teach(own, "token-recycling")
    (path,) = stores.save_stores(own, tmp_path)
    path.write_bytes(b"nothing")
    before = dict(own.stores)
    with pytest.raises(BadFile):
        stores.load_stores(own, tmp_path)
    assert own.stores == before
