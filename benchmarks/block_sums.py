"""How fast thread blocks that do nothing else sum a call's staged rows (benchmarks/block_sums.cu), on one GPU.

    python benchmarks/block_sums.py [--out benchmarks/results/block_sums/h200x1.json]

Builds the program with nvcc, runs it, adds what is needed to reproduce the figures, prints a table.
"""

from __future__ import annotations

from harness import result_of_program


def main() -> None:
    result = result_of_program("block_sums.cu", "block_sums", __doc__)
    print(f"{result['device']}, {result['tokens']} tokens; GB/s of rows read, by blocks")
    for row in result["layers"]:
        rates = "  ".join(f"{blocks}: {rate:.0f}" for blocks, rate in row["gb_s"].items())
        print(f"{row['layer']:>12} x{row['ranks']}  {row['rows_of_a_token']:.2f} rows a token  {rates}")


if __name__ == "__main__":
    main()
