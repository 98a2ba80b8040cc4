"""How much time a call takes on the host: one token of a tiny layer, at R = 1.

    python benchmarks/call_overhead.py [--trees TREE ...] [--rounds 12] [--out FILE.json]

The cases are calls of `flashmoe.moe` with NumPy arrays and with PyTorch tensors. If Transformers is installed, they
are also calls of an experts module with ``experts_implementation="flashmoe"``, and of fused blocks without and with a
shared expert. `call_us` is how long the call takes: with the CPU engine until the layer is computed; with the CUDA
engine, whose GPU is idle before the call, until the kernel is launched. `host_us` is the processor time of the calling
thread alone; it does not include the time of the engine's other threads or of other programs. A tree is a folder that
holds an importable `flashmoe`, see same_bits.py; default: the folder of the installed one. In each round, one process
for each tree measures all cases; the trees take turns. Figures are the medians of the rounds' medians, and the smallest
and largest of the rounds' medians. Cases whose engine or library is missing are left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import pathlib
import statistics
import subprocess
import sys
from typing import Any

from flashmoe.bench.origin import as_typed, commit_option, cpu_model, write
from harness import Tree
from host_calls import CALLS


def measure(tree: Tree) -> list[dict[str, Any]]:
    """One tree's results of one round: a row for each case."""
    command = [sys.executable, str(pathlib.Path(__file__).with_name("host_calls.py"))]
    said = subprocess.run(command, env=tree.environment(), check=True, stdout=subprocess.PIPE, text=True).stdout
    told = json.loads(said.splitlines()[-1])
    if not pathlib.Path(told["package"]).resolve().is_relative_to(tree.folder):
        raise SystemExit(f"expected the package in {tree.folder}, got {told['package']}")
    return told["rows"]


def over_rounds(rounds: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """A row for each case: the median, the smallest and the largest of the rounds' figures."""
    rows = []
    for case in zip(*rounds, strict=True):
        row = {name: case[0][name] for name in ("engine", "tensors")}
        for name in ("call_us", "host_us"):
            values = [each[name] for each in case]
            row[name] = round(statistics.median(values), 2)
            row[f"{name}_min_max"] = [round(min(values), 2), round(max(values), 2)]
        rows.append(row)
    return rows


def installed() -> pathlib.Path:
    """The folder that the installed package lies in."""
    found = importlib.util.find_spec("flashmoe")
    if found is None or found.origin is None:
        raise SystemExit("expected an installed flashmoe, got none; or name --trees")
    return pathlib.Path(found.origin).parents[1]


def show(result: dict[str, Any]) -> None:
    print(result["device"])
    print(f"{'tree':>4} {'engine':>6} {'tensors':>20} {'call us':>8} {'(range)':>17} {'host us':>8} {'(range)':>17}")
    for i, tree in enumerate(result["trees"]):
        for row in tree["rows"]:
            columns: list[str] = []
            for name in ("call_us", "host_us"):
                low, high = row[f"{name}_min_max"]
                columns += [f"{row[name]:8.1f}", f"{f'({low:.1f} to {high:.1f})':>17}"]
            print(f"{i:>4} {row['engine']:>6} {row['tensors']:>20} {' '.join(columns)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trees", nargs="+", type=pathlib.Path, metavar="TREE")
    parser.add_argument("--commits", nargs="*", default=[], metavar="COMMIT", help="of the trees")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", type=pathlib.Path)
    commit_option(parser)
    args = parser.parse_args()
    folders = args.trees or [installed()]
    commits = args.commits or ([args.commit] if args.trees is None else [""] * len(folders))
    trees = [Tree.at(folder, commit) for folder, commit in zip(folders, commits, strict=True)]
    rounds: list[list[list[dict[str, Any]]]] = [[] for _ in trees]
    order = list(range(len(trees)))
    for i in range(args.rounds):
        for t in order[i % len(order) :] + order[: i % len(order)]:
            rounds[t].append(measure(trees[t]))
    result = {
        "device": f"{cpu_model()} x0",
        "load_average": os.getloadavg(),
        "commit": args.commit,
        "command": as_typed("python", sys.argv),
        "rounds": args.rounds,
        "calls": CALLS,
        "trees": [
            {"commit": tree.commit, "package_sha256": tree.digest, "rows": over_rounds(of_tree)}
            for tree, of_tree in zip(trees, rounds, strict=True)
        ],
    }
    show(result)
    if args.out:
        write(args.out, result)


if __name__ == "__main__":
    main()
