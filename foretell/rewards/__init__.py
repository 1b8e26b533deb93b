"""Rewards, one a file: what tells good texts from bad ones."""

from foretell.lazy import lazy_submodules

__getattr__ = lazy_submodules(__name__)
