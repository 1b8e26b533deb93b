"""What pyproject.toml cannot say: the C library is built where a compiler is found."""

import sys

from setuptools import Extension, setup

SOURCES = (
    "module pool step kernels_portable kernels_avx2 kernels_avx512 kernels_avx512_bf16".split()
)
# Sums must round as written: no product and sum in one where the code has two.
FLAGS = ["-std=c11", "-O2", "-ffp-contract=off", "-fvisibility=hidden"]

setup(
    ext_modules=[
        Extension(
            "foretell.native._library",
            [f"foretell/native/src/{name}.c" for name in SOURCES],
            depends=[
                f"foretell/native/src/{name}.h"
                for name in ("foretell_native", "kernels", "pool", "simd")
            ],
            extra_compile_args=FLAGS,
            libraries=[] if sys.platform == "win32" else ["m", "pthread"],
            optional=True,
        )
    ]
)
