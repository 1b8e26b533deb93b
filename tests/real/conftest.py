"""What the tests with a real model share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import foretell
from foretell.loading.fetch import fetch
from tests.conftest import USERS


@pytest.fixture(scope="session")
def folder() -> Iterator[Path]:
    """The folder of smollm2, which is kept where the user's models are: it is large."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORETELL_CACHE", str(USERS))
        found = fetch("smollm2")
    # By its name it is found as well, beside the tests' own profiles and costs.
    models = Path(os.environ["FORETELL_CACHE"]) / "models"
    models.symlink_to(USERS / "models")
    yield found
    models.unlink()


@pytest.fixture(scope="session")
def lm(folder: Path) -> foretell.LM:
    """float32 by torch, so that two tokens are never equally likely up to rounding."""
    return foretell.load("smollm2", dtype="float32", backend="torch")
