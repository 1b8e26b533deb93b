"""What the tests of commands share."""

from __future__ import annotations

from typing import Any

import pytest

from foretell import cli
from tests import tiny


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.save(tiny.llama(), tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.save(tiny.relative(tiny.llama()), tmp_path_factory.mktemp("draft")))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*args: str) -> tuple[int, str, str]:
        code = cli.run(args)
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return code, out, err

    return call
