"""Constraints that know the text they are to hold for, one a file."""

from foretell.lazy import submodules

__getattr__ = submodules(__name__)
