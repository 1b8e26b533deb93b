"""Stand-ins for libraries that are not installed, and the check of a real one where there is an
environment for it.

Environments of the user's are not looked for: FORETELL_TEST_PEERS names the cache folder in which
they were set up.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import foretell
from foretell.bench import peers
from foretell.bench.peers import Peer, Place
from foretell.bench.peers._environment import peer_folder, pinned_packages
from foretell.bench.peers._worker import Worker
from tests import tiny

REAL = os.environ.get("FORETELL_TEST_PEERS")
PROMPT = "def add(a, b):\n    return a + b\n\n\ndef add(a, b):"


def install(folder: Path, files: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes these modules importable, here and in the processes that are started, and gives them an
    empty cache.
    """
    for name, text in files.items():
        (folder / "packages" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "packages" / name).write_text(text)
    monkeypatch.syspath_prepend(folder / "packages")
    monkeypatch.setenv("PYTHONPATH", str(folder / "packages"))
    monkeypatch.setenv("FORETELL_CACHE", str(folder / "cache"))
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")


def close(found: list[Peer]) -> None:
    for peer in found:
        assert isinstance(peer, Worker)
        peer.close()


def same_as_ours(
    name: str, draft: bool, folder: Path, monkeypatch: pytest.MonkeyPatch, **more: Any
) -> None:
    """A real library, in every way it has, gives the tokens of plain decoding in the same number
    format. `more`: of the tiny model's shape.
    """
    if REAL is None:
        pytest.skip("FORETELL_TEST_PEERS does not name a cache folder with environments of peers")
    monkeypatch.setenv("FORETELL_CACHE", REAL)
    ready = peer_folder(name) / "ready"
    if not ready.is_file() or ready.read_text() != pinned_packages(name):
        pytest.skip(f"no environment: python -m foretell.bench.peers setup {name}")
    tiny.save(tiny.llama(**more), folder / "model")
    tiny.save(tiny.relative(tiny.llama(**more)), folder / "draft")
    ids = tiny.lm().encode(PROMPT)
    ours = foretell.wrap(tiny.llama(**more), tiny.tokenizer(), name="tiny")
    expected = ours.generate(ids, "plain", max_new_tokens=12).tokens
    place = Place(
        str(folder / "model"), str(folder / "draft") if draft else None, "float32", "cpu", 1, (0,)
    )
    before = {path.name for path in (peer_folder(name) / "models").glob("*")}
    found = peers.contenders(name, place)
    for peer in found:
        run = peer.run(ids, 12, 0.0, 0)
        assert run.tokens == expected, peer.name
        assert run.times == sorted(run.times)
        assert run.times[0] > 0
        assert len(peer.run(ids, 5, 1.0, 3).tokens) <= 5
    close(found)
    for path in (peer_folder(name) / "models").iterdir():
        if path.name not in before:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
