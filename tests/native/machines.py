"""The C library with each kind of kernels that this machine runs, and without it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from foretell.native import library

built = pytest.mark.skipif(not library.available(), reason="the C library is not built")


def kinds() -> list[str]:
    """The kinds of kernels that this machine runs; [] where there is no library."""
    if not library.available():
        return []
    usual = library.kind()
    found = [kind for kind in library.KINDS if library.library().ft_choose(kind.encode())]
    library.library().ft_choose(usual.encode())
    return found


@contextmanager
def kernels(kind: str) -> Iterator[None]:
    """Inside, these kernels run."""
    usual = library.kind()
    assert library.library().ft_choose(kind.encode())
    try:
        yield
    finally:
        library.library().ft_choose(usual.encode())


@contextmanager
def no_library() -> Iterator[None]:
    """Inside, torch computes packed layers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(library.VARIABLE, "off")
        library.found.cache_clear()
        try:
            assert not library.available()
            yield
        finally:
            library.found.cache_clear()
