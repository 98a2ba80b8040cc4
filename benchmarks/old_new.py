"""Compares the speed of two versions of the package on one GPU, in turn in one run.

    python benchmarks/old_new.py --trees OLD NEW [--commits OLD NEW] [--layers SHAPE:TOKENS ...] [--backward]
                                 [--plain-logits] [--rounds N] [--out FILE.json]

A tree is a folder that holds an importable `flashmoe`, see same_bits.py. The layers are those of the table of one GPU
in docs/measured.md, and Qwen3 with 8 tokens; with --backward, the backward passes of backward.py's layers. There are
three processes, each with a context and the layer's weights of its own: one with the old version, one with the new, and
another one with the old. The times of the two old ones differ only by chance: their ratios, old over old, show how much
this is. The processes are timed in turn, round by round, and each round begins with another process. There are two
timers: "busy" (the GPU is kept busy before a call, so that the launch is not in the time), and "plain" (one call at a
time on an idle GPU). Medians are of all single calls; quartiles are of the rounds' ratios. Exits with 1 if any result
of the new version has other bits than the old version's, or if the new version is slower than the old one by more than
1 %, and by more than both the median and the upper quartile of old over old.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import time
from typing import Any

from flashmoe.bench import measure
from flashmoe.bench.origin import QUERY, as_typed, nvidia_smi, write
from flashmoe.bench.shapes import SHAPES, TRAINED
from harness import Tree, compile_kernels

LAYERS = (
    ("paper-E64", 16384),
    ("paper-E8", 16384),
    ("paper-E128", 16384),
    ("qwen3-30b", 8192),
    ("qwen3-30b", 1024),
    ("qwen3-30b", 64),
    ("qwen3-30b", 8),
    ("qwen3-30b", 1),
    ("mixtral", 8192),
    ("qwen2-moe", 8192),
    ("phi3.5", 8192),
)
BACKWARD_LAYERS = tuple((name, SHAPES[name][-1][0]) for name in TRAINED)
WORKER = pathlib.Path(__file__).with_name("timings.py")
VARIANTS = (["--activation", "swiglu"], ["--activation", "gelu"])
"""The arguments of `flashmoe compile` for the kernels of these layers."""
ROUNDS = 15
REPEATS, REPEATS_OF_FEW = 8, 24
"""How many calls a process times in a turn: more in layers of at most `FEW` tokens, whose calls are short."""
FEW = 64
OCCUPIED = 1.0
"""For so many seconds a process makes calls, while nvidia-smi is asked for the clocks."""
ALLOWED = 1.01


class Player:
    """A process with one version of the package, and the times of the current layer that it has measured."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        command = [sys.executable, str(WORKER), measure.__file__]
        self.process = subprocess.Popen(
            command, env=tree.environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.rounds: dict[bool, list[list[float]]] = {}
        """The milliseconds of each round's calls, by whether the GPU was kept busy."""

    def hello(self) -> dict[str, str]:
        told = self.answer()
        if not pathlib.Path(told["package"]).resolve().is_relative_to(self.tree.folder):
            raise SystemExit(f"expected the package in {self.tree.folder}, got {told['package']}")
        return told

    def tell(self, do: str, **what: Any) -> None:
        self.process.stdin.write(json.dumps({"do": do, **what}) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the process with {self.tree.folder} ended with status {self.process.wait()}")
        return json.loads(line)

    def ask(self, do: str, **what: Any) -> dict[str, Any]:
        self.tell(do, **what)
        return self.answer()

    def time(self, busy: bool, repeats: int) -> None:
        self.rounds.setdefault(busy, []).append(self.ask("time", busy=busy, repeats=repeats)["ms"])

    def median(self, busy: bool) -> float:
        return statistics.median(ms for of_round in self.rounds[busy] for ms in of_round)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def everyone(players: list[Player], do: str, **what: Any) -> list[dict[str, Any]]:
    """Gives all processes the same command at once. Returns their answers."""
    for player in players:
        player.tell(do, **what)
    return [player.answer() for player in players]


def ratios(one: Player, other: Player, busy: bool) -> dict[str, Any]:
    """The times of `one` over those of `other`: the ratio of the medians, and the quartiles of the rounds' ratios."""
    by_round = [
        statistics.median(a) / statistics.median(b) for a, b in zip(one.rounds[busy], other.rounds[busy], strict=True)
    ]
    lower, _, upper = statistics.quantiles(by_round, n=4)
    return {"of_medians": one.median(busy) / other.median(busy), "quartiles": [lower, upper]}


def clocks_of(player: Player) -> str:
    """The clocks and the power that nvidia-smi reports while the player's layer runs."""
    player.tell("occupy", seconds=OCCUPIED)
    time.sleep(OCCUPIED / 5)
    said = nvidia_smi()
    player.answer()
    return said


def measured(
    players: list[Player], shape: str, tokens: int, backward: bool, round_logits: bool, rounds: int
) -> dict[str, Any]:
    old, new, again = players
    layer = {"sizes": SHAPES[shape], "tokens": tokens, "backward": backward, "round_logits": round_logits}
    hashes = [told["hash"] for told in everyone(players, "make", **layer)]
    clocks = clocks_of(old)
    for player in players:
        player.rounds.clear()
    for i in range(rounds):
        for player in players[i % 3 :] + players[: i % 3]:
            for busy in (True, False):
                player.time(busy, REPEATS_OF_FEW if tokens <= FEW else REPEATS)
    everyone(players, "drop")
    row: dict[str, Any] = {
        "shape": shape,
        "tokens": tokens,
        "backward": backward,
        "same_bits": len(set(hashes)) == 1,
        "nvidia_smi": {QUERY: clocks},
    }
    for name, busy in (("busy", True), ("plain", False)):
        new_over_old, old_over_old = ratios(new, old, busy), ratios(again, old, busy)
        limit = max(ALLOWED, old_over_old["of_medians"], old_over_old["quartiles"][1])
        row[name] = {
            "old_us": old.median(busy) * 1e3,
            "new_us": new.median(busy) * 1e3,
            "old_again_us": again.median(busy) * 1e3,
            "new_over_old": new_over_old,
            "old_over_old": old_over_old,
            "slower": new_over_old["of_medians"] > limit,
        }
    return row


def shown(row: dict[str, Any]) -> str:
    columns = [f"{row['shape']:>10} {row['tokens']:>6}"]
    for name in ("busy", "plain"):
        part = row[name]
        lower, upper = part["old_over_old"]["quartiles"]
        columns.append(
            f"{part['old_us']:9.1f} {part['new_us']:9.1f} {part['new_over_old']['of_medians']:7.4f} "
            f"{part['old_over_old']['of_medians']:7.4f} ({lower:.3f} {upper:.3f})" + " slower" * part["slower"]
        )
    return " | ".join(columns) + ("" if row["same_bits"] else " | OTHER BITS")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trees", nargs=2, type=pathlib.Path, required=True, metavar=("OLD", "NEW"))
    parser.add_argument("--commits", nargs=2, default=("", ""), metavar=("OLD", "NEW"), help="of the trees")
    parser.add_argument("--layers", nargs="+", metavar="SHAPE:TOKENS", help="others than those above")
    parser.add_argument("--backward", action="store_true", help="the backward pass in place of the forward")
    parser.add_argument("--plain-logits", action="store_true", help="routers do not round their logits")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    named = [layer.rsplit(":", 1) for layer in args.layers or ()]
    layers = [(shape, int(tokens)) for shape, tokens in named] or (BACKWARD_LAYERS if args.backward else LAYERS)
    old, new = (Tree.at(folder, commit) for folder, commit in zip(args.trees, args.commits, strict=True))
    compile_kernels([old, new], VARIANTS)
    start = time.monotonic()
    players = [Player(tree) for tree in (old, new, old)]
    told = [player.hello() for player in players]
    result = {
        "device": told[0]["device"],
        "commit": new.commit,
        "torch": told[0]["torch"],
        "driver": nvidia_smi("driver_version"),
        "command": as_typed("python", sys.argv),
        "trees": {"old": old.described(), "new": new.described()},
        "round_logits": not args.plain_logits,
        "rounds": args.rounds,
        "shapes": [],
    }
    columns = f"{'old us':>9} {'new us':>9} new/old old/old (quartiles) "
    print(f"{result['device']}, {result['torch']}, driver {result['driver']}")
    print(f"{'':>17} | busy: {columns}| plain: {columns}")
    for shape, tokens in layers:
        row = measured(players, shape, tokens, args.backward, not args.plain_logits, args.rounds)
        result["shapes"].append(row)
        print(shown(row), flush=True)
    for player in players:
        player.close()
    result["seconds"] = round(time.monotonic() - start, 1)
    print(f"{result['seconds']} s")
    if args.out:
        write(args.out, result)
    return int(any(not r["same_bits"] or r["busy"]["slower"] or r["plain"]["slower"] for r in result["shapes"]))


if __name__ == "__main__":
    sys.exit(main())
