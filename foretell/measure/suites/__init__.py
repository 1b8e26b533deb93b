"""Suites of `foretell bench --suite`: tasks with answers that can be judged, one a file."""

from foretell.lazy import submodules

__getattr__ = submodules(__name__)
