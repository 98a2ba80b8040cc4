"""How fast thread blocks that do nothing else sum rows that are to return (benchmarks/block_sums.cu), on one GPU.

    python benchmarks/block_sums.py [--out benchmarks/results/block_sums/h200x1.json]

Builds the program with nvcc, runs it, adds what is needed to reproduce the figures, prints a table.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

from flashmoe.bench.origin import ROOT, as_typed, commit_option, nvidia_smi, result_path, write
from protocol_gpu import NVCC

SOURCE = ROOT / "benchmarks" / "block_sums.cu"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path)
    commit_option(parser)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        binary = f"{folder}/block_sums"
        subprocess.run([*NVCC, str(SOURCE), "-o", binary], check=True)
        result = json.loads(subprocess.run([binary], check=True, capture_output=True, text=True).stdout)
    clocks = "clocks.sm,clocks.mem,clocks.max.sm,driver_version"
    result |= {
        "commit": args.commit,
        "command": as_typed("python", sys.argv),
        "nvidia_smi": {clocks: nvidia_smi(clocks)},
    }
    write(args.out or result_path("block_sums", result["device"], 1), result)
    print(f"{result['device']}, {result['tokens']} tokens; GB/s of rows read, by blocks")
    for row in result["layers"]:
        rates = "  ".join(f"{blocks}: {rate:.0f}" for blocks, rate in row["gb_s"].items())
        print(f"{row['layer']:>12} x{row['ranks']}  {row['rows_of_a_token']:.2f} rows a token  {rates}")


if __name__ == "__main__":
    main()
