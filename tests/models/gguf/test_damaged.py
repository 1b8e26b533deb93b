"""Wrong .gguf files of every kind: each ends in one line, and takes no more memory than a file of
its size may.
"""

from __future__ import annotations

import resource
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

import foretell
from foretell.errors import BadModel, Unsupported
from foretell.native import library
from tests.models.gguf import damaged

pytestmark = pytest.mark.skipif(not library.is_available(), reason="the C library is not built")

ROOM = 1 << 27  # bytes of addresses that reading may take beyond what the process has
LARGE = 1 << 17  # bytes of a file from which on Python's own memory is watched, which takes time
TIMES = 8  # the size of such a file that reading may take
WRONG = dict(damaged.wrong_files())


@pytest.fixture(scope="module", autouse=True)
def little_memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What asks for more memory than ROOM fails, once all that reading imports is there."""
    path = tmp_path_factory.mktemp("right") / "right.gguf"
    path.write_bytes(damaged.right_file().encode())
    for backend in ("native", "torch"):
        assert foretell.load(path, backend=backend).encode("the end")
    taken = int(Path("/proc/self/statm").read_text("ascii").split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (taken + ROOM, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_there_are_enough() -> None:
    assert len(WRONG) >= 300
    assert len(set(WRONG.values())) == len(WRONG), "no two are alike"


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_is_refused_in_a_line(name: str, tmp_path: Path) -> None:
    path, data = tmp_path / "wrong.gguf", WRONG[name]
    path.write_bytes(data)
    # Unpacking a file goes the same way as far as its numbers.
    for backend in ("native", "torch") if name.startswith("tensors") else ("native",):
        if len(data) > LARGE:
            tracemalloc.start()
        try:
            with pytest.raises((BadModel, Unsupported)) as refused:
                foretell.load(path, backend=backend)
            assert not tracemalloc.is_tracing() or (
                tracemalloc.get_traced_memory()[1] < TIMES * len(data)
            )
        finally:
            tracemalloc.stop()
        said = str(refused.value)
        assert len(said.splitlines()) == 1 and len(said) < 1000, said
        assert "memory" not in said.lower() and "alloc" not in said.lower(), said
