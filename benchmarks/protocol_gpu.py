"""The protocol alone on one GPU: tasks per microsecond, and the gap between two tasks of a busy processor.

    python benchmarks/protocol_gpu.py [--out benchmarks/results/protocol_gpu/h100x1.json]

Builds benchmarks/protocol.cu with nvcc, runs it, adds what is needed to reproduce the figures, prints a
table.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

from flashmoe.bench.origin import ROOT, as_typed, commit_option, nvidia_smi, result_path, write

SOURCE = ROOT / "benchmarks" / "protocol.cu"
NVCC = ["nvcc", "-gencode", "arch=compute_90a,code=sm_90a", "-std=c++20", "-O3", f"-I{ROOT / 'include'}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path)
    commit_option(parser)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        binary = f"{folder}/protocol_bench"
        subprocess.run([*NVCC, str(SOURCE), "-o", binary], check=True)
        result = json.loads(subprocess.run([binary], check=True, capture_output=True, text=True).stdout)
    clocks = "clocks.sm,clocks.mem,clocks.max.sm,driver_version"
    result |= {
        "commit": args.commit,
        "command": as_typed("python", sys.argv),
        "nvidia_smi": {clocks: nvidia_smi(clocks)},
    }
    write(args.out or result_path("protocol_gpu", result["device"], 1), result)
    print(f"{result['device']}, {result['sms']} SMs")
    print(f"{'shape':>20} {'tasks':>7} {'tasks/us':>9} {'kernel us':>10} {'gap ns p50':>11} {'p99':>6}")
    for row in result["shapes"]:
        gap = row["busy_gap_ns"]
        print(
            f"{row['shape']:>20} {row['tasks']:>7} {row['tasks_per_us']['median']:>9} {row['kernel_us']:>10}"
            f" {gap['median']:>11} {gap['p99']:>6}"
        )


if __name__ == "__main__":
    main()
