"""What pyproject.toml cannot say: the C library is built where a compiler is found, but not on
Windows, whose threads it does not use yet.
"""

import sys

from setuptools import Distribution, Extension, setup

KERNELS = ("portable", "avx2", "avx512", "avx512_bf16", "neon")
PARTS = ("module", "pool", "step", "grow", "matrix", "pack", "listed", "best", "checks")
SOURCES = (*PARTS, *(f"kernels_{kind}" for kind in KERNELS))
HEADERS = ("foretell_native", "kernels", "listed", "pool", "simd", "simd_neon")
# Sums must round as written: no product and sum in one where the code has two.
FLAGS = ["-std=c11", "-O2", "-ffp-contract=off", "-fvisibility=hidden"]


class OfOneSystem(Distribution):
    """What is built for one system. A wheel without the C library is, too: others can build it, and
    must not take that wheel instead.
    """

    def has_ext_modules(self) -> bool:
        return True


setup(
    distclass=OfOneSystem,
    ext_modules=[]
    if sys.platform == "win32"
    else [
        Extension(
            "foretell.native._library",
            [f"foretell/native/src/{name}.c" for name in SOURCES],
            depends=[f"foretell/native/src/{name}.h" for name in HEADERS],
            extra_compile_args=FLAGS,
            libraries=["m", "pthread"],
            optional=True,
        )
    ],
)
