"""Rewards, one a file: what tells good texts from bad ones."""

from foretell.lazy import submodules

__getattr__ = submodules(__name__)
