"""Cache policies, one a file."""

from foretell.lazy import lazy_submodules

__getattr__ = lazy_submodules(__name__)
