"""What the protocol costs on the CPU engine: the shipped layer at R = 1 against the same GEMMs in a plain loop.

    python benchmarks/cpu_overhead.py [--processors 2] [--repeats 101] [--out benchmarks/results/cpu_overhead.json]

`same_gemms_ms` is the floor with BLAS calls of the sizes the engine uses, `gemms_of_128_rows_ms` with free ones: the
difference between the two is what row-independent bits cost (csrc/cpu/gemm.h), not the protocol. The three run in turn;
overheads are medians of the ratios of neighbouring runs.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import subprocess
import sys
import tempfile

import numpy as np
from flashmoe.checkpoint import shipped_layer

ROOT = pathlib.Path(__file__).resolve().parent.parent


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


def cpu_model() -> str:
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processors", type=int, default=os.cpu_count())
    parser.add_argument("--repeats", type=int, default=101)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmarks/results/cpu_overhead.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        program = build(folder)
        write_problem(f"{folder}/problem")
        command = [program, f"{folder}/problem", str(args.processors), str(args.repeats)]
        result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout.strip()
    result |= {
        "device": cpu_model(),
        "load_average": os.getloadavg(),
        "commit": commit,
        "command": "python " + " ".join(sys.argv),
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
