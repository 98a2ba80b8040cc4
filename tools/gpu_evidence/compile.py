"""Compiles kernels by their names in records: ``python -m gpu_evidence.compile "bfloat16 swiglu few" ...``"""

from __future__ import annotations

import contextlib
import os
import sys
from concurrent.futures import ThreadPoolExecutor

from flashmoe import jit
from flashmoe.errors import FlashMoEError

from .digests import variant_named


def compile_one(name: str) -> None:
    """Compiles one kernel. An error is ignored: it will come again in the test that loads the kernel."""
    with contextlib.suppress(FlashMoEError):
        jit.compile_kernel(variant_named(name))


def main() -> None:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, sys.argv[1:]))


if __name__ == "__main__":
    main()
