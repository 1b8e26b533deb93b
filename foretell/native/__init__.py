"""The C library: products of a few rows, and whole steps, on a CPU. docs/native.md explains it.

It is built when foretell is installed, where a C compiler is found; without it everything works
on other backends. `packing.py` says how matrices lie in memory, `library.py` calls the library,
and `backends/native.py` is the backend that stands on it.
"""
