"""What a call costs on the host: one token of a tiny layer, at R = 1.

    python benchmarks/call_overhead.py [--trees TREE ...] [--rounds 12] [--out FILE.json]

The call is `flashmoe.moe`'s, of NumPy's and PyTorch's tensors, or where Transformers is, that of an experts module with
``experts_implementation="flashmoe"`` or of a fused block, without and with a shared expert. `call_us` is how long it
takes, with the CPU engine until the layer is computed, and with the CUDA engine, whose GPU is idle before, until it is
launched. `host_us` is the processor time of the calling thread alone: what other
threads, the layer's and other programs', take of the machine is not in it. A tree is a folder that holds an importable
`flashmoe`, see same_bits.py; default: the installed one. Each round a process of each tree's measures every case, in
turn; figures are the medians of the rounds' medians, and the smallest and largest of these. An engine or library that
is not there is left out.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from harness import Tree, as_typed, commit_option, cpu_model, write

SIZES = {"max_tokens": 8, "hidden": 64, "intermediate": 64, "experts": 8, "top_k": 2}
WARM_UP, CALLS = 300, 2000
"""Calls of a case in a round."""


def tensors() -> dict[str, Any]:
    """One token and the layer's weights, as NumPy arrays."""
    import numpy as np

    random = np.random.default_rng(0)
    hidden, inner, experts = (SIZES[name] for name in ("hidden", "intermediate", "experts"))
    shapes = {
        "x": (1, hidden),
        "gate_up_proj": (experts, 2 * inner, hidden),
        "down_proj": (experts, hidden, inner),
        "router": (experts, hidden),
    }
    return {name: random.standard_normal(shape, np.float32) * np.float32(0.1) for name, shape in shapes.items()}


class Case(NamedTuple):
    engine: str
    tensors: str
    """Of which library, and what is called with them."""
    call: Callable[[], Any]
    wait: Callable[[], None]
    """Waits until the call is over."""


def function_case(engine: str, library: str, given: dict[str, Any]) -> Case:
    """`flashmoe.moe`. The context lives as long as the case."""
    import flashmoe

    ctx = flashmoe.Context(engine=engine, dtype="float32", processors=1 if engine == "cpu" else None, **SIZES)
    return Case(engine, library, lambda: flashmoe.moe(ctx, **given, top_k=SIZES["top_k"]), ctx.synchronize)


def block_cases(engine: str) -> Iterator[Case]:
    """Of blocks of Transformers."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import transformers
    from flashmoe.integrations.transformers import fuse
    from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    place = "cuda" if engine == "cuda" else "cpu"
    wait = torch.cuda.synchronize if engine == "cuda" else lambda: None
    sizes = {
        "hidden_size": SIZES["hidden"],
        "moe_intermediate_size": SIZES["intermediate"],
        "num_experts": SIZES["experts"],
        "num_experts_per_tok": SIZES["top_k"],
    }
    qwen3 = transformers.Qwen3MoeConfig(**sizes, experts_implementation="flashmoe")
    qwen2 = transformers.Qwen2MoeConfig(**sizes, shared_expert_intermediate_size=SIZES["intermediate"])
    with torch.device(place):
        plain, with_shared = Qwen3MoeSparseMoeBlock(qwen3).eval(), Qwen2MoeSparseMoeBlock(qwen2).eval()
        x, ids, weights = torch.zeros(1, 1, SIZES["hidden"]), torch.tensor([[0, 1]]), torch.ones(1, SIZES["top_k"])
    for parameter in (*plain.parameters(), *with_shared.parameters()):
        torch.nn.init.normal_(parameter, std=0.1)
    yield Case(engine, "torch, experts", lambda: plain.experts(x[0], ids, weights), wait)
    yield Case(engine, "torch, fused", functools.partial(fuse(plain), x), wait)
    yield Case(engine, "torch, fused, shared", functools.partial(fuse(with_shared), x), wait)


def cases() -> Iterator[Case]:
    """Those that there can be here."""
    arrays = tensors()
    yield function_case("cpu", "numpy", arrays)
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    given = {name: torch.from_numpy(array) for name, array in arrays.items()}
    engines = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    for engine in engines:
        on_device = {name: tensor.cuda() if engine == "cuda" else tensor for name, tensor in given.items()}
        yield function_case(engine, "torch", on_device)
        if importlib.util.find_spec("transformers") is not None:
            with torch.no_grad():
                yield from block_cases(engine)


def timed(case: Case) -> dict[str, float]:
    """Medians of single calls, in microseconds."""
    call_ns, host_ns = [], []
    for _ in range(WARM_UP + CALLS):
        begin, begin_thread = time.perf_counter_ns(), time.thread_time_ns()
        case.call()
        host_ns.append(time.thread_time_ns() - begin_thread)
        call_ns.append(time.perf_counter_ns() - begin)
        case.wait()
    call_ns, host_ns = call_ns[WARM_UP:], host_ns[WARM_UP:]
    return {"call_us": statistics.median(call_ns) / 1e3, "host_us": statistics.median(host_ns) / 1e3}


def work() -> None:
    """A process of one tree's: an object a case."""
    import flashmoe

    rows = [{"engine": case.engine, "tensors": case.tensors, **timed(case)} for case in cases()]
    print(json.dumps({"package": flashmoe.__file__, "rows": rows}))


def measure(tree: Tree) -> list[dict[str, Any]]:
    """A round of one tree's."""
    command = [sys.executable, __file__, "--worker"]
    said = subprocess.run(command, env=tree.environment(), check=True, stdout=subprocess.PIPE, text=True).stdout
    told = json.loads(said.splitlines()[-1])
    if not pathlib.Path(told["package"]).resolve().is_relative_to(tree.folder):
        raise SystemExit(f"expected the package in {tree.folder}, got {told['package']}")
    return told["rows"]


def over_rounds(rounds: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Of each case, the median of the rounds and their smallest and largest."""
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
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    commit_option(parser)
    args = parser.parse_args()
    if args.worker:
        work()
        return
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
