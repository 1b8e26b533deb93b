"""How foretell is built for each system, and what the targets for other processors say where their
tools are not there.
"""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import setuptools

ROOT = Path(__file__).resolve().parent.parent
MAKE_SAYS = re.compile(r"make(\[\d+\])?: \*\*\*")
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def told(platform: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What setup.py says on a system."""
    made: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", made.update)
    monkeypatch.setattr(sys, "platform", platform)
    runpy.run_path(str(ROOT / "setup.py"))
    return made


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_the_library_is_built_of_all_its_sources(
    platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (library,) = told(platform, monkeypatch)["ext_modules"]
    sources = (ROOT / "foretell" / "native" / "src").glob("*.c")
    assert {Path(source).name for source in library.sources} == {path.name for path in sources}
    assert library.optional, "where it cannot be built, foretell is installed without it"


def test_windows_has_a_wheel_of_its_own_without_the_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = told("win32", monkeypatch)
    assert made["ext_modules"] == []
    assert made["distclass"]().has_ext_modules(), "it would be taken by other systems, too"


def test_a_release_has_wheels_of_every_python_and_tests_the_library_in_them() -> None:
    release, project = SETTINGS["tool"]["cibuildwheel"], SETTINGS["project"]
    prefix = "Programming Language :: Python :: 3."
    minors = [c.removeprefix(prefix) for c in project["classifiers"] if c.startswith(prefix)]
    assert release["build"].split() == [f"cp3{minor}-*" for minor in minors]
    assert any("load_kernels" in command for command in release["test-command"])
    assert not any("load_kernels" in command for command in release["windows"]["test-command"])


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not there")
@pytest.mark.parametrize(
    ("target", "tool", "package"),
    [
        ("test-arm", "ARM_CC", "gcc-aarch64-linux-gnu"),
        ("test-arm", "ARM_QEMU", "qemu-user"),
        ("test-x86", "X86_QEMU", "qemu-user"),
    ],
)
def test_a_tool_that_is_missing_is_one_line(target: str, tool: str, package: str) -> None:
    present = {"ARM_CC": "true", "ARM_QEMU": "true", "X86_QEMU": "true", tool: "no-such-tool"}
    chosen = [f"{name}={value}" for name, value in present.items()]
    done = subprocess.run(
        ["make", "-s", target, *chosen],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "MAKEFLAGS": ""},
    )
    first, *rest = done.stderr.splitlines()
    assert done.returncode == 2 and not done.stdout
    assert first.startswith("error: no-such-tool is not there: apt-get install")
    assert package in first and all(MAKE_SAYS.match(line) for line in rest)
