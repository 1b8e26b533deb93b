"""Warpers, which change a row by the text before it, one a file."""

from foretell.lazy import submodules

__getattr__ = submodules(__name__)
