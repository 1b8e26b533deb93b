"""What the tests of commands share."""

from __future__ import annotations

import json
from pathlib import Path
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
def prompts(tmp_path: Path) -> Path:
    """A file of prompts, of which a random model's answers do not end at once."""
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"def sub_{i}(a, b):"}) for i in range(3)))
    return path


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*args: str) -> tuple[int, str, str]:
        code = cli.run(args)
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return code, out, err

    return call
