"""A Ray cluster for one test: two CPUs, little memory, nobody told."""

from __future__ import annotations

import gc
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator

import pytest

TOKEN = secrets.token_hex(32)  # of all clusters of this process, since Ray remembers it


@pytest.fixture
def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@pytest.fixture
def two_cpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from foretell.cluster.cluster import ray_cluster

    folder = tempfile.mkdtemp(prefix="ray-")  # sockets lie in it, whose names may not be long
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)  # else Ray writes one into the home folder
    monkeypatch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    try:
        with ray_cluster(num_cpus=2, object_store_memory=100_000_000, _temp_dir=folder):
            yield
    finally:
        # Ray does not wait for the processes that it has ended, of which Python would complain.
        for thing in gc.get_objects():
            if issubclass(type(thing), subprocess.Popen):
                thing.wait(10)
        shutil.rmtree(folder, ignore_errors=True)
