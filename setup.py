"""What pyproject.toml cannot say: the C library is built where a compiler is found."""

import sys

from setuptools import Extension, setup

KERNELS = ("portable", "avx2", "avx512", "avx512_bf16", "neon")
PARTS = ("module", "pool", "step", "grow", "matrix", "pack", "listed", "best", "checks")
SOURCES = (*PARTS, *(f"kernels_{kind}" for kind in KERNELS))
HEADERS = ("foretell_native", "kernels", "listed", "pool", "simd", "simd_neon")
# Sums must round as written: no product and sum in one where the code has two.
FLAGS = ["-std=c11", "-O2", "-ffp-contract=off", "-fvisibility=hidden"]

setup(
    ext_modules=[
        Extension(
            "foretell.native._library",
            [f"foretell/native/src/{name}.c" for name in SOURCES],
            depends=[f"foretell/native/src/{name}.h" for name in HEADERS],
            extra_compile_args=FLAGS,
            libraries=[] if sys.platform == "win32" else ["m", "pthread"],
            optional=True,
        )
    ]
)
