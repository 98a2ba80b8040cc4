"""What the benchmarks share: where a figure comes from, shapes, timers, groups of GPUs, versions of the package.

flashmoe and PyTorch are imported where they are used: a worker measures any version of the package, and what measures
the CPU engine needs no PyTorch. What a run measured goes to `result_path`: a folder for each kind of run, in it a file
for each machine; an earlier run that docs/ cite has its commit behind the name.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import pathlib
import platform
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent

SHAPES = {  # H, I, E, K, activation, token counts
    "paper-E64": (2048, 2048, 64, 2, "gelu", (16384,)),
    "paper-E8": (2048, 2048, 8, 2, "gelu", (16384,)),
    "paper-E16": (2048, 2048, 16, 2, "gelu", (16384,)),
    "paper-E32": (2048, 2048, 32, 2, "gelu", (16384,)),
    "paper-E128": (2048, 2048, 128, 2, "gelu", (16384,)),
    "qwen3-30b": (2048, 768, 128, 8, "swiglu", (8192, 1024, 64, 1)),
    "mixtral": (4096, 14336, 8, 2, "swiglu", (8192,)),
    "qwen2-moe": (2048, 1408, 64, 4, "swiglu", (8192,)),
    "phi3.5": (4096, 6400, 16, 2, "swiglu", (8192,)),
    "deepseek-v3": (7168, 2048, 256, 8, "swiglu", (4096,)),
    "deepseek-v4-flash": (4096, 2048, 256, 6, "swiglu", (4096, 1024, 64)),
    # A rank's part where four have a slice of each expert.
    "qwen3-30b-slice": (2048, 192, 128, 8, "swiglu", (8192,)),
    "mixtral-slice": (4096, 3584, 8, 2, "swiglu", (8192,)),
}
WHOLE = tuple(name for name in SHAPES if not name.endswith("-slice") and not name.startswith("deepseek"))
"""Those that one GPU has room for beside what is compared with them, in bf16: DeepSeek's experts are in FP8."""

TRAINED = ("qwen3-30b", "mixtral", "qwen2-moe", "phi3.5", "paper-E64")
"""Those whose backward passes are measured, with the first of their token counts."""

BUSY_CYCLES = 1_000_000  # about half a millisecond: longer than it takes to launch any of what is timed
WARM_UP = 3
"""Calls that are not timed."""
QUERY = "clocks.sm,clocks.mem,power.draw,driver_version"
"""What `nvidia_smi` asks for."""


def flops(name: str, tokens: int) -> int:
    """Of the experts' GEMMs, for so many tokens."""
    hidden, inner, _, top_k, activation, _ = SHAPES[name]
    return tokens * top_k * (3 if activation == "swiglu" else 2) * 2 * hidden * inner


# ---- where a figure comes from ---------------------------------------------------------------------------------------


def output(*command: str, seconds: float = 30.0) -> str:
    """What a command prints; empty if it fails, is not there or takes longer: a driver may keep nvidia-smi waiting."""
    how: dict[str, Any] = {"capture_output": True, "text": True, "cwd": ROOT, "check": True, "timeout": seconds}
    try:
        return subprocess.run(command, **how).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def head() -> str:
    """The commit that is checked out; empty where git does not know."""
    return output("git", "rev-parse", "HEAD")


def digest_of(
    root: pathlib.Path,
    *folders: str,
    without: Sequence[str] = (),
    read: Callable[[pathlib.Path], bytes] = pathlib.Path.read_bytes,
) -> str:
    """Of all files in these folders of `root`, as `read` reads them, and of their names; not of what Python has
    compiled, nor of what is in the folders that it is `without`."""
    digest = hashlib.sha256()
    left_out = {root / folder for folder in without}
    for path in sorted(path for folder in folders for path in (root / folder).rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts and left_out.isdisjoint(path.parents):
            content = read(path)
            digest.update(f"{path.relative_to(root)} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


def nvidia_smi(query: str = QUERY) -> str:
    """A line of figures for each GPU; empty where there is none."""
    return output("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader")


def cpu_model() -> str:
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def without_machine(argument: str) -> str:
    """What was typed, without the folders of this machine: an absolute path below the sources or below the current
    folder is relative to it, one of results is from ``benchmarks/results`` on, and of any other its last part is left.
    Both forms of an option, ``--out PATH`` and ``--out=PATH``."""
    option, equals, path = argument.partition("=") if argument.startswith("-") else ("", "", argument)
    if not path.startswith("/"):
        return argument
    path = os.path.normpath(path)
    for folder in (str(ROOT), os.getcwd()):
        if path.startswith(f"{folder}/"):
            return option + equals + os.path.relpath(path, folder)
    results = re.search(r"(?<=/)benchmarks/results(/.*)?$", path)
    return option + equals + (results[0] if results else os.path.basename(path))


def as_typed(launcher: str, arguments: Sequence[str]) -> str:
    """The line for a result to say that it was made by: `launcher` and what it was given, as anybody may type it."""
    return " ".join([launcher, *map(without_machine, arguments)])


def described(commit: str, ranks: int | None = None) -> dict[str, str]:
    """Where a result comes from; `ranks`: of the group that torchrun has started, None where there is none."""
    import torch

    group, launcher = "", "python"
    if ranks is not None:
        group, launcher = f" x{ranks}", f"torchrun --nproc-per-node {ranks}"
    return {
        "device": torch.cuda.get_device_name() + group,
        "torch": torch.__version__,
        "commit": commit,
        "command": as_typed(launcher, sys.argv),
    }


def described_on_cpu(commit: str) -> dict[str, str]:
    """The same of a result of the CPU engine."""
    import torch

    return {
        "device": f"{cpu_model()} x0",
        "torch": torch.__version__,
        "commit": commit,
        "command": as_typed("python", sys.argv),
    }


def result_path(suite: str, device: str, gpus: int) -> pathlib.Path:
    """Where the results of a suite lie, of so many GPUs of a device: ``NVIDIA H200``, 2 in ``h200x2.json``."""
    name = re.sub(r"^NVIDIA (\w+).*", r"\1", device)
    return ROOT / "benchmarks" / "results" / suite / f"{re.sub(r'[^a-z0-9]+', '-', name.lower())}x{gpus}.json"


def write(path: pathlib.Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def commit_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--commit", default=head(), help="where git is not at hand")


# ---- one GPU ---------------------------------------------------------------------------------------------------------


def milliseconds(call: Callable[[int], Any], repeats: int, busy: bool = True, cycles: int = BUSY_CYCLES) -> list[float]:
    """Times of single calls, by events. With `busy`, behind work of so many cycles that keeps the GPU from waiting for
    the launch; else the launch is in the figure."""
    return [span(call, i, busy, cycles) for i in range(repeats + WARM_UP)][WARM_UP:]


def span(call: Callable[[int], Any], i: int, busy: bool, cycles: int = BUSY_CYCLES) -> float:
    """Milliseconds of `call(i)`, by events."""
    import torch

    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    if busy:
        torch.cuda._sleep(cycles)
    start.record()
    call(i)
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def in_turn(
    timer: Callable[[Callable[[int], Any], int, bool], list[float]],
    calls: dict[str, Callable[[int], Any]],
    repeats: int,
) -> dict[tuple[str, bool], list[float]]:
    """Milliseconds of each call by `timer`, by its name and whether the GPU was kept busy: in four turns, every
    other one backwards, so that all see the same clocks."""
    timed: dict[tuple[str, bool], list[float]] = {(name, busy): [] for name in calls for busy in (True, False)}
    for turn in range(4):
        for busy in (True, False):
            for name, call in list(calls.items())[:: -1 if turn % 2 else 1]:
                timed[name, busy] += timer(call, repeats // 4, busy)
    return timed


def sustained(
    calls: dict[str, Callable[[int], Any]], repeats: int, behind_each_other: int = 8
) -> dict[tuple[str, bool | None], list[float]]:
    """Milliseconds of each call where so many of the same are queued behind each other, by its name and None: at the
    clocks that the GPU keeps under such work, in turn. The first of a queue is not counted."""
    import torch

    timed: dict[tuple[str, bool | None], list[float]] = {(name, None): [] for name in calls}
    for turn in range(repeats):
        for name, call in list(calls.items())[:: -1 if turn % 2 else 1]:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            call(0)
            start.record()
            for i in range(behind_each_other):
                call(i)
            end.record()
            end.synchronize()
            timed[name, None].append(start.elapsed_time(end) / behind_each_other)
    return timed


def medians_and_spread(
    timed: Mapping[tuple[str, bool | None], list[float]], prefixes: Mapping[bool | None, str]
) -> dict[str, Any]:
    """Of each call its median and, but by the plain timer, its least and most, in milliseconds. `prefixes`: how keys
    begin, by whether the GPU was kept busy; None: with calls of the same kind."""
    row: dict[str, Any] = {}
    for (call, busy), times in timed.items():
        row[f"{prefixes[busy]}{call}_ms"] = statistics.median(times)
        if busy is not False:
            row[f"{prefixes[busy]}{call}_min_max"] = [min(times), max(times)]
    return row


def beside_floor(timed: dict[tuple[str, bool], list[float]]) -> dict[str, Any]:
    """The part of a row that says how long a layer, "fused", and its "floor" took `in_turn`."""
    median = {key: statistics.median(times) for key, times in timed.items()}
    row: dict[str, Any] = {}
    for name in ("fused", "floor"):
        row[f"{name}_ms"] = median[name, True]
        row[f"{name}_min_max"] = [min(timed[name, True]), max(timed[name, True])]
    row["ratio"] = median["fused", True] / median["floor", True]
    row |= {f"plain_{name}_ms": median[name, False] for name in ("fused", "floor")}
    row["plain_ratio"] = median["fused", False] / median["floor", False]
    return row


class LoneLayer:
    """A layer of random weights on one GPU, its context, of the built-in order, and its calls by number."""

    def __init__(self, name: str, tokens: int, dtype: str = "bfloat16", exact: bool = False) -> None:
        import flashmoe
        import torch

        hidden, inner, self.experts, self.top_k, self.activation, _ = SHAPES[name]
        torch.manual_seed(tokens)
        make = {"device": "cuda", "dtype": getattr(torch, dtype)}
        self.router = torch.randn(self.experts, hidden, **make) * 0.02
        rows = inner * (2 if self.activation == "swiglu" else 1)
        self.w1 = torch.randn(self.experts, rows, hidden, **make) * 0.02
        self.w2 = torch.randn(self.experts, hidden, inner, **make) * 0.02
        self.xs = [torch.randn(tokens, hidden, **make) for _ in range(4)]
        torch.cuda.empty_cache()  # the context's memory does not come from PyTorch's cache
        self.context = flashmoe.Context(
            engine="cuda",
            max_tokens=tokens,
            hidden=hidden,
            intermediate=inner,
            experts=self.experts,
            top_k=self.top_k,
            dtype=dtype,
            return_mode="direct",
            profile={},
        )
        how = {"top_k": self.top_k, "activation": self.activation, "exact": exact}
        self.moe = functools.partial(flashmoe.moe, self.context, router=self.router, **how)

    def __call__(self, i: int) -> torch.Tensor:
        return self.moe(self.xs[i % 4], self.w1, self.w2)

    def close(self) -> None:
        self.context.synchronize()
        self.context.close()


def gpu_operations(call: Callable[[int], Any], calls: int = 10) -> int:
    """What the profiler counts on the GPU in so many calls."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for i in range(calls):
            call(i)
        torch.cuda.synchronize()
    return sum(1 for event in profiled.events() if event.device_type == torch.autograd.DeviceType.CUDA)


def expert_row(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, gated: bool) -> torch.Tensor:
    """One expert's result [H] for one token [H], in fp64."""
    from torch.nn.functional import gelu, silu

    h = w1.double() @ x.double()
    if gated:
        g, u = h.chunk(2)
        h = silu(g) * u
    else:
        h = gelu(h)
    return w2.double() @ h


def reference(x, router, w1, w2, top_k: int, gated: bool, own: Sequence[int]) -> torch.Tensor:
    """The layer in fp64 on the chosen tokens, routing in fp32 as the kernel's: the terms of the experts `own`, whose
    weights these are."""
    import torch

    p = torch.softmax(x.float() @ router.float().t(), -1)
    weights, ids = p.topk(top_k, -1)
    weights = (weights / weights.sum(-1, keepdim=True)).double()
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for t in range(len(x)):
        for k in range(top_k):
            if (expert := int(ids[t, k])) in own:
                i = own.index(expert)
                out[t] += weights[t, k] * expert_row(x[t], w1[i], w2[i], gated)
    return out


# ---- groups of GPUs --------------------------------------------------------------------------------------------------


def join() -> int:
    """Joins the group that torchrun has started, on a GPU of its own; the rank."""
    import torch
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    return rank


def ranks_a_gpu(ranks: int) -> int:
    """1 unless there are fewer GPUs than ranks (FLASHMOE_SHARE_GPUS)."""
    import torch

    return -(-ranks // torch.cuda.device_count())


def processors(ranks: int) -> int | None:
    """Thread blocks of a context: None, as many as fit; ranks that share a GPU leave each other room."""
    import torch

    sharing = ranks_a_gpu(ranks)
    return None if sharing == 1 else torch.cuda.get_device_properties(0).multi_processor_count // sharing // 2 * 2


def slowest(times: list[float]) -> list[float]:
    """Of each iteration, the slowest rank's."""
    import torch
    import torch.distributed as dist

    all_times = torch.tensor(times, device="cuda")
    dist.all_reduce(all_times, op=dist.ReduceOp.MAX)
    return all_times.tolist()


def group_milliseconds(call: Callable[[int], Any], repeats: int, busy: bool, cycles: int = BUSY_CYCLES) -> list[float]:
    """Of single calls, the slowest rank's times."""
    return slowest(own_milliseconds(call, repeats, busy, cycles))


def own_milliseconds(call: Callable[[int], Any], repeats: int, busy: bool, cycles: int = BUSY_CYCLES) -> list[float]:
    """This rank's times of single calls."""
    return [own_span(call, i, busy, cycles) for i in range(repeats + WARM_UP)][WARM_UP:]


def own_span(call: Callable[[int], Any], i: int, busy: bool, cycles: int = BUSY_CYCLES) -> float:
    """This rank's milliseconds of `call(i)`, by events, all ranks beginning together: at a barrier, and with `busy` in
    an all-reduce behind other work, on which the measured span follows without a gap."""
    import torch
    import torch.distributed as dist

    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    meeting = torch.zeros(1, device="cuda")
    dist.barrier()
    if busy:
        torch.cuda._sleep(cycles)
        dist.all_reduce(meeting)
    start.record()
    call(i)
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def profile_of(settings: list[str]) -> dict[str, int]:
    """What --profile says: name=value each, see flashmoe.Context."""
    return {name: int(value) for name, value in (each.split("=") for each in settings)}


class GroupLayer:
    """One rank's share of a layer of random weights, and its context, of the built-in order but for `profile`."""

    def __init__(self, name: str, tokens: int, profile: dict[str, int] | None = None) -> None:
        import flashmoe
        import torch
        import torch.distributed as dist
        from flashmoe.placement import contiguous, local_experts

        self.hidden, self.inner, self.experts, self.top_k, self.activation, _ = SHAPES[name]
        self.rank, self.ranks, self.tokens = dist.get_rank(), dist.get_world_size(), tokens
        self.owners = contiguous(self.experts, self.ranks)
        self.own = local_experts(self.owners, self.rank)
        make = {"device": "cuda", "dtype": torch.bfloat16}
        rows = self.inner * (2 if self.activation == "swiglu" else 1)
        self.w1 = torch.randn(len(self.own), rows, self.hidden, **make) * 0.02
        self.w2 = torch.randn(len(self.own), self.hidden, self.inner, **make) * 0.02
        torch.manual_seed(self.rank + 1)
        self.x = torch.randn(tokens, self.hidden, **make)
        self.context = flashmoe.Context.from_torch(
            engine="cuda",
            profile=profile or {},
            max_tokens=tokens,
            hidden=self.hidden,
            intermediate=self.inner,
            experts=self.experts,
            top_k=self.top_k,
        )

    def close(self) -> None:
        import torch
        import torch.distributed as dist

        self.context.synchronize()
        dist.barrier()  # a rank that closes its context must not be awaited in another's call
        self.context.close()
        torch.cuda.empty_cache()


# ---- two versions of the package -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tree:
    """A folder that holds an importable `flashmoe`: a site-packages, or what a wheel was unpacked into."""

    folder: pathlib.Path
    commit: str
    """Empty where nobody knows."""
    digest: str
    """Of the package's files: tells trees apart whatever is said of their commits."""

    @classmethod
    def at(cls, folder: pathlib.Path, commit: str = "") -> Tree:
        folder = folder.resolve()
        package = folder / "flashmoe"
        if not (package / "__init__.py").is_file():
            raise SystemExit(f"--trees: expected a folder that holds flashmoe/__init__.py, got {folder}")
        return cls(folder, commit, digest_of(package, "."))

    def environment(self) -> dict[str, str]:
        """For processes that are to import this tree's package, and keep its kernels apart from any other's."""
        caches = pathlib.Path(tempfile.gettempdir()) / f"flashmoe-kernels-{os.getuid()}" / self.digest
        path = os.pathsep.join(filter(None, [str(self.folder), os.environ.get("PYTHONPATH")]))
        return {
            **os.environ,
            "PYTHONPATH": path,
            "PYTHONDONTWRITEBYTECODE": "1",
            "FLASHMOE_CACHE": str(caches),
            "FLASHMOE_PROFILES": str(caches / "none.json"),  # the built-in order, whatever this machine has stored
            "OPENBLAS_NUM_THREADS": "1",
        }

    def described(self) -> dict[str, str]:
        return {"folder": without_machine(str(self.folder)), "commit": self.commit, "package_sha256": self.digest}


def compile_kernels(trees: Sequence[Tree], variants: Sequence[Sequence[str]]) -> None:
    """Runs `flashmoe compile` with each of these arguments for each tree, all at once up to the cores there are."""
    from concurrent.futures import ThreadPoolExecutor

    script = "import sys; from flashmoe.cli import main; sys.exit(main(sys.argv[1:]))"

    def compile_one(job: tuple[Tree, Sequence[str]]) -> None:
        tree, arguments = job
        command = [sys.executable, "-c", script, "compile", *arguments]
        done = subprocess.run(command, env=tree.environment(), capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(f"flashmoe compile {' '.join(arguments)}, {tree.folder}: {done.stdout}{done.stderr}")

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        list(pool.map(compile_one, [(tree, arguments) for tree in trees for arguments in variants]))
