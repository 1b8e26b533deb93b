"""The C library with each kind of kernels that this machine runs, and without it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from foretell.native import library

built = pytest.mark.skipif(not library.is_available(), reason="the C library is not built")


def kinds() -> list[str]:
    """The kinds of kernels that this machine runs; [] where there is no library."""
    if not library.is_available():
        return []
    usual = library.kernel_kind()
    found = [kind for kind in library.KINDS if library.load_kernels().ft_choose(kind.encode())]
    library.load_kernels().ft_choose(usual.encode())
    return found


@contextmanager
def kernels(kind: str) -> Iterator[None]:
    """Inside, these kernels run."""
    usual = library.kernel_kind()
    assert library.load_kernels().ft_choose(kind.encode())
    try:
        yield
    finally:
        library.load_kernels().ft_choose(usual.encode())


@contextmanager
def no_library() -> Iterator[None]:
    """Inside, torch computes packed layers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(library.VARIABLE, "off")
        library.find_library.cache_clear()
        try:
            assert not library.is_available()
            yield
        finally:
            library.find_library.cache_clear()
