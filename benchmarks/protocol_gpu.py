"""The protocol alone on one GPU: tasks per microsecond, and how long a busy processor pauses between two tasks.

    python benchmarks/protocol_gpu.py [--out benchmarks/results/protocol_gpu/h100x1.json]

Builds benchmarks/protocol.cu with nvcc, runs it, adds what is needed to reproduce the figures, prints a
table.
"""

from __future__ import annotations

from harness import result_of_program


def main() -> None:
    result = result_of_program("protocol.cu", "protocol_gpu", __doc__)
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
