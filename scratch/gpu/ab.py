"""ab.py OUT TREE... -- SHAPE:TOKENS...: times N trees in turn, prints ratios to the first, busy and plain."""
import sys, statistics, pathlib, json
sys.path.insert(0, "benchmarks")
import old_new as o
from harness import Tree, compile_kernels, nvidia_smi
cut = sys.argv.index("--")
import os
names = sys.argv[1:cut]
trees = [Tree.at(pathlib.Path(t.split("@")[0])) for t in names]
layers = [(a.split(":")[0], int(a.split(":")[1])) for a in sys.argv[cut + 1:]]
acts = {"paper-E64": "gelu"}
variants = [["--activation", "swiglu"]] + ([["--activation", "gelu"]] if any(n.startswith("paper") for n, _ in layers) else [])
compile_kernels(trees, variants)
players = []
for n, t in zip(names, trees):
    os.environ.pop("FLASHMOE_ENDS", None)
    if "@" in n: os.environ["FLASHMOE_ENDS"] = n.split("@")[1]
    players.append(o.Player(t))
print([p.hello()["device"] for p in players][0], nvidia_smi())
for shape, tokens in layers:
    hashes = [t["y"][:6] for t in o.everyone(players, "make", shape=shape, tokens=tokens)]
    for p in players: p.rounds.clear()
    n = len(players)
    for i in range(9):
        for p in players[i % n:] + players[: i % n]:
            for busy in (True, False): p.time(busy, 24 if tokens <= 64 else 6)
    o.everyone(players, "drop")
    base = players[0]
    line = f"{shape:>18} {tokens:>6}"
    for name, busy in (("busy", True), ("plain", False)):
        line += f" | {name} {base.median(busy)*1e3:8.1f}us" + "".join(f" {p.median(busy)/base.median(busy):.3f}" for p in players[1:])
    print(line, "same" if len(set(hashes)) == 1 else hashes, flush=True)
