"""How many bytes cross between two hosts in a second, with one version of the package, or with several in turn.

    python benchmarks/network.py --pythons OLD=PATH NEW=.venv/bin/python [--out FILE.json]
    python benchmarks/network.py --wires OLD=PROGRAM:LIBRARY NEW=PROGRAM:LIBRARY [--out FILE.json]

The hosts are network namespaces of this machine, joined by a veth pair, so root is needed. Each host has one rank of a
group on the CPU engine. All tokens of a rank choose the other rank's expert, so that T rows of 8 KiB go there and T
rows come back. The expert is tiny, so that a call takes little longer than its rows need on the network. "one": only
rank 0 has tokens, so that one direction is used at a time; "both": both ranks have T tokens. Each round measures the
versions in turn, each with a new group. Prints the median of each version's rounds, in MB/s of what both ranks have
sent together, and its ratio to the first version's. With `--wires`, no calls are made: one side of a wire (wire.cpp)
sends messages of 512, 64 and 8 KiB to the other side.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TOKENS = {1: 400, 8: 400, 64: 200, 4096: 8}
"""How many calls a round measures, by T."""
H, ADDRESSES, PORT = 2048, ("10.77.1.1", "10.77.1.2"), 7799


def rank_of_a_round(rank: int) -> None:
    """Makes the calls of one rank in a round. Prints as JSON the mean seconds and bytes of a call, by directions ("one"
    or "both") and T."""
    import flashmoe
    import numpy as np

    rng = np.random.default_rng(rank)
    router = np.zeros((2, H), np.float32)
    router[1 - rank, 0] = router[rank, 1] = 1.0
    up, down = (rng.standard_normal((1, *shape)).astype(np.float32) for shape in ((2, H), (H, 1)))
    where = f"{ADDRESSES[0]}:{PORT}"
    sizes = {
        "max_tokens": max(TOKENS),
        "hidden": H,
        "intermediate": 1,
        "experts": 2,
        "top_k": 1,
        "dtype": "float32",
        "processors": 1,
    }
    measured = {}
    with flashmoe.Context(rank=rank, ranks=2, name="network", rendezvous=where, return_mode="direct", **sizes) as ctx:
        for most, calls, ways in [(*each, ways) for ways in ("one", "both") for each in TOKENS.items()]:
            tokens = 0 if rank == 1 and ways == "one" else most
            x = rng.standard_normal((tokens, H)).astype(np.float32)
            x[:, 0], x[:, 1] = 9.0, -9.0
            ids = np.full((tokens, 1), 1 - rank, np.int64)
            weights = np.ones((tokens, 1), np.float32)
            for call in range(calls + 2):
                if call == 2:
                    since, before = time.perf_counter(), ctx._engine.crossed().bytes
                flashmoe.moe(ctx, x, up, down, topk_ids=ids, topk_weights=weights)
            seconds, crossed = time.perf_counter() - since, ctx._engine.crossed().bytes - before
            measured[f"{ways} {most}"] = {"seconds": seconds / calls, "bytes": crossed / calls}
    print(json.dumps(measured), flush=True)


class Hosts:
    """Two hosts: network namespaces, each kept open by a process."""

    def __init__(self) -> None:
        keep = "mount -t tmpfs none /dev/shm && hostname host$0 && echo && exec sleep infinity"
        self._keepers = [
            subprocess.Popen(
                ["unshare", "--net", "--mount", "--uts", "sh", "-c", keep, str(number)], stdout=subprocess.PIPE
            )
            for number in (0, 1)
        ]
        for keeper in self._keepers:
            assert keeper.stdout is not None and keeper.stdout.read(1) == b"\n"
        peer = ["type", "veth", "peer", "eth0", "netns", str(self._keepers[1].pid)]
        self._run(0, "ip", "link", "add", "eth0", *peer)
        for number, address in enumerate(ADDRESSES):
            for command in (["link", "set", "lo", "up"], ["address", "add", f"{address}/24", "dev", "eth0"]):
                self._run(number, "ip", *command)
            self._run(number, "ip", "link", "set", "eth0", "up")
        time.sleep(2)  # until the kernel counts the link as up

    def inside(self, number: int, *command: str) -> list[str]:
        return ["nsenter", "--target", str(self._keepers[number].pid), "--net", "--mount", "--uts", *command]

    def _run(self, number: int, *command: str) -> None:
        subprocess.run(self.inside(number, *command), check=True)

    def close(self) -> None:
        for keeper in self._keepers:
            keeper.kill()
            keeper.wait()


def round_of(hosts: Hosts, python: str) -> dict[str, float]:
    """The MB/s of one round of calls, by directions and T."""
    environment = {**os.environ, "FLASHMOE_SECRET": "a secret of this benchmark", "OPENBLAS_NUM_THREADS": "1"}
    commands = [hosts.inside(rank, python, __file__, "--rank", str(rank)) for rank in (0, 1)]
    ranks = [subprocess.Popen(each, env=environment, stdout=subprocess.PIPE, text=True) for each in commands]
    told = [json.loads(rank.communicate(timeout=300)[0]) for rank in ranks]
    return {
        tokens: sum(each[tokens]["bytes"] for each in told) / max(each[tokens]["seconds"] for each in told) / 1e6
        for tokens in told[0]
    }


def round_of_wires(hosts: Hosts, program: str) -> dict[str, float]:
    """The MB/s of one round of messages over the wire alone, by the size of a message in KiB."""
    path, _, library = program.partition(":")
    with tempfile.TemporaryDirectory() as folder:
        commands = [hosts.inside(side, path, str(side), folder, library, ADDRESSES[side]) for side in (0, 1)]
        sides = [subprocess.Popen(each, stdout=subprocess.PIPE, text=True) for each in commands]
        said = [side.communicate(timeout=60)[0] for side in sides]
    return {f"{size} KiB": float(rate) for size, rate in map(str.split, said[0].splitlines())}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pythons", nargs="+", metavar="NAME=PYTHON", default=[f"this={sys.executable}"])
    parser.add_argument("--wires", nargs="+", metavar="NAME=PROGRAM:LIBRARY", default=[])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        rank_of_a_round(given.rank)
        return 0
    versions = dict(each.split("=", 1) for each in given.wires or given.pythons)
    measure = round_of_wires if given.wires else round_of
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in versions}
    hosts = Hosts()
    try:
        for _ in range(given.rounds):
            for name, version in versions.items():
                rounds[name].append(measure(hosts, version))
    finally:
        hosts.close()
    first = next(iter(versions))
    table = {
        name: {tokens: statistics.median(each[tokens] for each in told) for tokens in told[0]}
        for name, told in rounds.items()
    }
    for name, row in table.items():
        said = [f"{what}: {rate:.0f} ({rate / table[first][what]:.2f})" for what, rate in row.items()]
        print(f"{name:>10}  " + "  ".join(said))
    if given.out:
        from harness import as_typed, cpu_model, head, write

        shown = [f"{each.partition('=')[0]}=..." if "=" in each else each for each in sys.argv]
        command = as_typed("python", shown)
        cores = len(os.sched_getaffinity(0))
        found = {"device": f"{cpu_model()} x0", "cores": cores, "commit": head(), "command": command}
        write(given.out, {**found, "row_bytes": 4 * H, "mb_per_s": table, "rounds": rounds})
    return 0


if __name__ == "__main__":
    sys.exit(main())
