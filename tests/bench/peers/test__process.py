"""The process that a peer runs in starts in an environment that has none of our packages."""

from __future__ import annotations

import subprocess
import sys

import pytest

from foretell.bench import peers
from foretell.bench.peers._environment import PEERS_FOLDER

OWN = [path.stem for path in sorted(PEERS_FOLDER.glob("*.txt"))]  # who has an environment


@pytest.mark.parametrize("stem", OWN)
def test_it_starts_without_our_packages(stem: str) -> None:
    assert stem.replace("_", ".") in peers.peer_names()
    script = str(PEERS_FOLDER / "_process.py")
    # -S: the standard library alone.
    command = [sys.executable, "-P", "-S", script, stem, "start", "{}"]
    finished = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert (finished.returncode, finished.stderr, finished.stdout) == (0, "", "")
