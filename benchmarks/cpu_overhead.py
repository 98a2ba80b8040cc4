"""What the protocol costs on the CPU engine: the shipped layer at R = 1 against the same GEMMs in a plain loop.

    python benchmarks/cpu_overhead.py [--processors 2] [--repeats 101] [--out FILE.json]

`same_gemms_ms` is the time of the loop with BLAS calls of as many rows as the engine's calls have;
`gemms_of_128_rows_ms` is its time with BLAS calls of 128 rows. The engine makes smaller calls so that a row's bits do
not depend on its place in a tile (csrc/cpu/gemm.h): the difference between the two loops is the cost of that, and no
cost of the protocol. The layer and the two loops run in turn. An overhead is the median of the ratios of neighbouring
runs, less 1.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
from flashmoe.bench.origin import ROOT, as_typed, cpu_model, head, result_path, write
from flashmoe.checkpoint import shipped_layer


def build(folder: str) -> str:
    """Builds cpu_overhead.cpp in `folder`; returns the program's path."""
    options = ["-DFLASHMOE_BENCHMARKS=ON", "-DFLASHMOE_BINDINGS=OFF", f"-DPython_EXECUTABLE={sys.executable}"]
    subprocess.run(["cmake", "-S", ROOT, "-B", folder, *options], check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", folder, "--target", "cpu_overhead"], check=True, stdout=subprocess.DEVNULL)
    return f"{folder}/cpu_overhead"


def write_problem(path: str) -> None:
    """The shipped layer and its hidden states, in fp32."""
    layer, x = shipped_layer()
    sizes = np.array([len(x), layer.hidden, layer.intermediate, layer.experts, layer.top_k], np.uint32)
    with open(path, "wb") as file:
        file.write(sizes.tobytes())
        for array in (x, layer.router, layer.gate_up_proj, layer.down_proj):
            file.write(array.astype(np.float32).tobytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processors", type=int, default=os.cpu_count())
    parser.add_argument("--repeats", type=int, default=101)
    parser.add_argument("--out", type=pathlib.Path, default=result_path("cpu_overhead", cpu_model(), 0))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        program = build(folder)
        write_problem(f"{folder}/problem")
        command = [program, f"{folder}/problem", str(args.processors), str(args.repeats)]
        result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    result |= {
        "device": cpu_model(),
        "load_average": os.getloadavg(),
        "commit": head(),
        "command": as_typed("python", sys.argv),
    }
    write(args.out, result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
