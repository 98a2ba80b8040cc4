"""Whether two versions of the package give the same bits, layer by layer.

    python benchmarks/same_bits.py --trees OLD NEW [--suites cpu gpu group] [--commits OLD NEW] --out FILE.json

A tree is a folder that holds an importable `flashmoe` and the packages that it was installed with: the site-packages of
an environment, or what `pip install --target FOLDER .` makes. Each tree computes the layers of bits_layers.py in
processes of its own. There are three suites. "cpu": groups of 1 to 8 ranks of the CPU engine. "gpu": one GPU. "group":
four ranks that share a GPU; the ranks' kernels run at the same time if NVIDIA's MPS can be started, otherwise in turns.
Outputs and reported routing are hashed and compared. Exits with 1 if a hash differs between the trees, or between a
tree's first and second call.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from bits_layers import GPU_VARIANTS, PUT, SHARING
from flashmoe.bench.origin import as_typed, cpu_model, nvidia_smi, write
from harness import Tree, compile_kernels

WORKER = pathlib.Path(__file__).with_name("bits.py")
SUITES = ("cpu", "gpu", "group")


class Failed(Exception):
    """A suite that could not be hashed, and why."""


def hashes(tree: Tree, suite: str, extra: dict[str, str] | None = None) -> dict:
    """What bits.py writes about one suite, run with this tree. Raises `Failed`."""
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "hashes.json"
        command = [sys.executable, str(WORKER), suite, str(out)]
        done = subprocess.run(command, env={**tree.environment(), **(extra or {})}, cwd=folder)
        if done.returncode != 0:
            raise Failed(f"with {tree.folder} its process ended with status {done.returncode}")
        found = json.loads(out.read_text())
    if not pathlib.Path(found["package"]).resolve().is_relative_to(tree.folder):
        raise Failed(f"expected the package in {tree.folder}, got {found['package']}")
    return found


def compile_all(trees: list[Tree], suites: list[str]) -> None:
    """Compiles all kernels that the suites need, many at once."""
    if not {"gpu", "group"} & set(suites):
        return
    rdma = [f"rdma-{dtype}" for dtype in PUT] if "group" in suites else []
    with ThreadPoolExecutor(1 + len(trees) * len(rdma)) as pool:
        started = [pool.submit(compile_kernels, trees, GPU_VARIANTS)]
        started += [pool.submit(hashes, tree, suite, sharing()) for tree in trees for suite in rdma]
        for each in started:
            try:
                each.result()
            except (Failed, SystemExit) as error:  # the suite that needs the kernel will fail too, but others may not
                print(f"kernels: {error}", flush=True)


@contextlib.contextmanager
def mps(wanted: bool) -> Iterator[dict[str, str]]:
    """Starts NVIDIA's MPS if it is `wanted`, and yields the environment variables by which processes use it. If there
    is no daemon, or it does not start, they are empty."""
    folders = [os.environ.get("PATH", ""), "/usr/local/nvidia/bin", "/usr/bin"]
    daemon = shutil.which("nvidia-cuda-mps-control", path=os.pathsep.join(folders))
    if not wanted or daemon is None:
        yield {}
        return
    with tempfile.TemporaryDirectory() as folder:
        told = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
        for path in told.values():
            os.mkdir(path)
        environment = {**os.environ, **told}
        started = subprocess.run([daemon, "-d"], env=environment, timeout=60).returncode == 0
        try:
            yield told if started else {}
        finally:
            subprocess.run([daemon], input="quit\n", text=True, env=environment, timeout=120)


def hash_suite(suite: str, trees: list[Tree]) -> dict:
    """Hashes a suite with both trees, and compares the hashes. A suite that fails with a tree counts as different."""
    start = time.monotonic()
    try:
        with mps(suite == "group") as told:
            extra = {**sharing(), **told} if suite == "group" else {}
            old, new = (hashes(tree, suite, extra) for tree in trees)
    except (Failed, OSError, subprocess.SubprocessError) as error:
        return {"layers": 0, "equal": 0, "different": [f"{suite} could not be hashed: {error}"], "unsteady": []}
    row = compare(old["layers"], new["layers"])
    row |= {"torch": new["torch"], "seconds": round(time.monotonic() - start, 1)}
    return row | ({"under_mps": bool(told)} if suite == "group" else {})


def sharing() -> dict[str, str]:
    """The environment variable that lets ranks share the GPU."""
    return {"FLASHMOE_SHARE_GPUS": str(SHARING)}


def compare(old: dict[str, dict], new: dict[str, dict]) -> dict:
    """How many layers are equal, and the names of those that are not, or whose calls differ within a tree."""
    names = sorted(old.keys() | new.keys())
    different = []
    for name in names:
        if name not in old or name not in new:
            different.append(f"{name} (in one tree only)")
        elif parts := [part for part in ("inputs", "y", "routing") if old[name][part] != new[name][part]]:
            different.append(f"{name} ({', '.join(parts)})")
    unsteady = [f"{name} ({who})" for who, of in (("old", old), ("new", new)) for name in of if not of[name]["steady"]]
    return {
        "layers": len(names),
        "equal": len(names) - len(different),
        "different": different,
        "unsteady": unsteady,
        "digest_old": digest(old),
        "digest_new": digest(new),
    }


def digest(layers: dict[str, dict]) -> str:
    """A digest of all hashes of a suite."""
    return hashlib.sha256(json.dumps(layers, sort_keys=True).encode()).hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trees", nargs=2, type=pathlib.Path, required=True, metavar=("OLD", "NEW"))
    parser.add_argument("--suites", nargs="+", choices=SUITES, default=list(SUITES))
    parser.add_argument("--commits", nargs=2, default=("", ""), metavar=("OLD", "NEW"), help="of the trees")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    args = parser.parse_args()
    trees = [Tree.at(folder, commit) for folder, commit in zip(args.trees, args.commits, strict=True)]
    compile_all(trees, args.suites)
    suites = {}
    for suite in args.suites:
        row = suites[suite] = hash_suite(suite, trees)
        differ = len(row["different"])
        print(f"{suite:>6}: {row['layers']} layers, {row['equal']} equal, {differ} different", flush=True)
        for name in row["different"]:
            print(f"        differs: {name}")
        for name in row["unsteady"]:
            print(f"        its second call differs: {name}")
    same = not any(row["different"] or row["unsteady"] for row in suites.values())
    layers = sum(row["layers"] for row in suites.values())
    result = {
        "device": nvidia_smi("name") or cpu_model(),
        "commit": trees[1].commit,
        "cpu": cpu_model(),
        "driver": nvidia_smi("driver_version"),
        "python": platform.python_version(),
        "command": as_typed("python", sys.argv),
        "trees": {name: tree.described() for name, tree in zip(("old", "new"), trees, strict=True)},
        "same_bits": same,
        "layers": layers,
        "suites": suites,
    }
    for who in ("old", "new"):
        digests = [row.get(f"digest_{who}", "") for row in suites.values()]
        result[f"digest_{who}"] = hashlib.sha256("".join(digests).encode()).hexdigest()
    write(args.out, result)
    print(f"   all: {layers} layers, {'the same bits' if same else 'NOT the same bits'}", flush=True)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
