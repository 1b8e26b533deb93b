"""A Ray cluster for one test: two CPUs, little memory, nobody told."""

from __future__ import annotations

import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator

import pytest


@pytest.fixture
def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@pytest.fixture
def two_cpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from foretell.scaling.cluster import cluster

    folder = tempfile.mkdtemp(prefix="ray-")  # sockets lie in it, whose names may not be long
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))  # else it is kept in the home folder
    monkeypatch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    try:
        with cluster(num_cpus=2, object_store_memory=100_000_000, _temp_dir=folder):
            yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)
