"""Compiles kernels by their names in records: ``python -m gpu_evidence.compile "bfloat16 swiglu few" ...``"""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor

from flashmoe import jit

from .digests import variant_named


def main() -> None:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(jit.compile_kernel, map(variant_named, sys.argv[1:])))


if __name__ == "__main__":
    main()
