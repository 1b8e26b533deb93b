"""Constraints that know the text they are to hold for, one a file."""

from foretell.lazy import lazy_submodules

__getattr__ = lazy_submodules(__name__)
