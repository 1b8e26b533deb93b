"""What all tests of benches share."""

from __future__ import annotations

import pytest

from foretell.bench import runner


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory's speed is measured in test_hardware.py alone."""
    monkeypatch.setattr(runner, "measure_bandwidth", lambda device: 1e9)
