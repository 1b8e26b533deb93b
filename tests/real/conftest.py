"""What the tests with real models share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import foretell
from foretell.loading.fetch import fetch, fetched_path
from foretell.loading.names import find_alias
from tests.conftest import USERS


@pytest.fixture(scope="session")
def users_models() -> Iterator[None]:
    """Names are found where the user's models are, which are large, beside the tests' own profiles
    and costs.
    """
    models = Path(os.environ["FORETELL_CACHE"]) / "models"
    models.symlink_to(USERS / "models")
    yield
    models.unlink()


def fetched(name: str) -> Path:
    """The folder or file of a model that was fetched before; else the test is skipped."""
    path = fetched_path(find_alias(name))
    if path is None:
        pytest.skip(f"{name} is not here: `foretell fetch {name}`")
    return path


@pytest.fixture(scope="session")
def folder(users_models: None) -> Path:
    """The folder of smollm2."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORETELL_CACHE", str(USERS))
        return fetch("smollm2")


@pytest.fixture(scope="session")
def lm(folder: Path) -> foretell.LM:
    """float32 by torch, so that two tokens are never equally likely up to rounding."""
    return foretell.load("smollm2", dtype="float32", backend="torch")


@pytest.fixture(scope="session")
def gemma(users_models: None) -> foretell.LM:
    """The .gguf file in its own formats, whose logits are equal to the last bit in any batch."""
    fetched("gemma3-270m")
    return foretell.load("gemma3-270m", exact_bits=True)
