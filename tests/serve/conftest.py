"""One server for the tests that change nothing of it."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.serve.live import Live, running


@pytest.fixture(scope="session")
def live() -> Iterator[Live]:
    with running() as server:
        yield server


@pytest.fixture
def client(live: Live) -> Iterator[httpx.Client]:
    with live.client() as client:
        yield client
