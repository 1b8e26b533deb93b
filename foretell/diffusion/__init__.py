"""Methods that fill canvases, one a file."""

from foretell.lazy import submodules

__getattr__ = submodules(__name__)
