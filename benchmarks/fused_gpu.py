"""The fused kernel on one GPU beside the bare GEMMs of the same layer, in one run.

    python benchmarks/fused_gpu.py [--shapes NAME ...] [--floors FLOORS.PY] [--out benchmarks/results/fused_gpu.json]

Per shape and token count: the whole layer (router to combine, one launch), and the floor: PyTorch's two grouped GEMMs
alone, on ready inputs, the same number of rows spread over the experts at random. Both are timed by events, in turn,
with the GPU kept busy before each so that no launch gap is in the figure; medians and spread of --repeats. Prints
ratios, writes JSON.

--floors names the script of the yardstick, which is then run for each shape: the JSON also has the GEMM-only time that
it prints, and what its own timer, which includes the launches, says of layer and floor, in turn.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import pathlib
import runpy
import statistics
import subprocess
import sys
from collections.abc import Sequence

import flashmoe
import torch
from protocol_gpu import head

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
}
DEFAULT = tuple(name for name in SHAPES if name not in ("paper-E16", "paper-E32"))
"""On one GPU: the line over E is a matter of groups."""
BUSY_CYCLES = 1_000_000  # about half a millisecond: longer than it takes to launch any of what is timed
QUERY = "clocks.sm,clocks.mem,power.draw,driver_version"
"""What `nvidia_smi` asks for."""


def milliseconds(call, repeats: int) -> list[float]:
    """Times of single calls, by events."""
    times = []
    for i in range(repeats + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(BUSY_CYCLES)
        start.record()
        call(i)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return times[3:]


def floor_call(rows: int, hidden: int, inner: int, experts: int, w1: torch.Tensor, w2: torch.Tensor):
    """Both grouped GEMMs on ready inputs, their rows spread over the experts at random."""
    counts = torch.bincount(torch.randint(experts, (rows,), device="cuda"), minlength=experts)
    return grouped_gemms(counts, rows, hidden, inner, w1, w2)


def grouped_gemms(counts: torch.Tensor, rows: int, hidden: int, inner: int, w1: torch.Tensor, w2: torch.Tensor):
    """Both grouped GEMMs on ready inputs, with so many of the rows an expert."""
    offsets = counts.cumsum(0).int()
    x = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16)
    h = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16)

    def call(_: int) -> None:
        torch._grouped_mm(x, w1.transpose(1, 2), offs=offsets)
        torch._grouped_mm(h, w2.transpose(1, 2), offs=offsets)

    return call


def gpu_operations(call, calls: int = 10) -> int:
    """What the profiler counts on the GPU in so many calls."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for i in range(calls):
            call(i)
        torch.cuda.synchronize()
    return sum(1 for event in profiled.events() if event.device_type == torch.autograd.DeviceType.CUDA)


def nvidia_smi() -> str:
    """A line of figures for each GPU."""
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def flops(name: str, tokens: int) -> int:
    """Of the experts' GEMMs, for so many tokens."""
    hidden, inner, _, top_k, activation, _ = SHAPES[name]
    return tokens * top_k * (3 if activation == "swiglu" else 2) * 2 * hidden * inner


def yardstick(script: pathlib.Path, name: str, tokens: int):
    """Runs the yardstick on a shape: the GEMM-only milliseconds that it prints, and its timer."""
    hidden, inner, experts, top_k, activation, _ = SHAPES[name]
    sizes = (hidden, inner, experts, top_k, int(activation == "swiglu"), tokens)
    arguments, printed = sys.argv, io.StringIO()
    sys.argv = [str(script), "--config", ":".join([name, *map(str, sizes)])]
    try:
        with contextlib.redirect_stdout(printed):
            timer = runpy.run_path(str(script))["timeit"]
    finally:
        sys.argv = arguments
    row = next(line for line in printed.getvalue().splitlines() if line.startswith(f"| {name} |"))
    return float(row.split("|")[5]), timer


def expert_row(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, gated: bool) -> torch.Tensor:
    """One expert's result [H] for one token [H], in fp64."""
    h = w1.double() @ x.double()
    if gated:
        g, u = h.chunk(2)
        h = torch.nn.functional.silu(g) * u
    else:
        h = torch.nn.functional.gelu(h)
    return w2.double() @ h


def reference(x, router, w1, w2, top_k: int, gated: bool, own: Sequence[int]) -> torch.Tensor:
    """The layer in fp64 on the chosen tokens, routing in fp32 as the kernel's: the terms of the experts `own`, whose
    weights these are."""
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


def measure(name: str, tokens: int, repeats: int, floors: pathlib.Path | None) -> dict:
    hidden, inner, experts, top_k, activation, _ = SHAPES[name]
    gated = activation == "swiglu"
    torch.manual_seed(tokens)
    make = {"device": "cuda", "dtype": torch.bfloat16}
    router = torch.randn(experts, hidden, **make) * 0.02
    w1 = torch.randn(experts, (2 if gated else 1) * inner, hidden, **make) * 0.02
    w2 = torch.randn(experts, hidden, inner, **make) * 0.02
    xs = [torch.randn(tokens, hidden, **make) for _ in range(4)]
    with flashmoe.Context(
        engine="cuda",
        max_tokens=tokens,
        hidden=hidden,
        intermediate=inner,
        experts=experts,
        top_k=top_k,
        dtype="bfloat16",
        return_mode="direct",
        profile={},
    ) as ctx:

        def layer(i: int) -> torch.Tensor:
            return flashmoe.moe(ctx, xs[i % 4], w1, w2, router=router, top_k=top_k, activation=activation)

        y = layer(0)
        ctx.synchronize()
        sample = torch.randperm(tokens, device="cuda")[:8]
        expected = reference(xs[0][sample], router, w1, w2, top_k, gated, range(experts))
        error = ((y[sample].double() - expected).norm() / expected.norm()).item()
        bare = floor_call(tokens * top_k, hidden, inner, experts, w1, w2)
        layer_ms, floor_ms = [], []
        for _ in range(4):  # in turn, so that both see the same clocks
            layer_ms += milliseconds(layer, repeats // 4)
            floor_ms += milliseconds(bare, repeats // 4)
        ctx.synchronize()
        operations = gpu_operations(layer) / 10
        by_yardstick = {}
        if floors is not None:
            printed, timer = yardstick(floors, name, tokens)
            turns = [(timer(lambda i=i: layer(i)), timer(lambda: bare(0))) for i in range(4)]
            timed = [statistics.median(times) for times in zip(*turns, strict=True)]
            by_yardstick = {
                "yardstick_printed_ms": printed,
                "yardstick_timer_fused_ms": timed[0],
                "yardstick_timer_floor_ms": timed[1],
                "yardstick_timer_ratio": timed[0] / timed[1],
            }
    fused, floor = statistics.median(layer_ms), statistics.median(floor_ms)
    touched = min(experts, tokens * top_k)
    if tokens * top_k < 8 * experts:
        touched = experts * (1 - (1 - top_k / experts) ** tokens)
    return {
        "shape": name,
        "tokens": tokens,
        "fused_ms": fused,
        "fused_min_max": [min(layer_ms), max(layer_ms)],
        "floor_ms": floor,
        "floor_min_max": [min(floor_ms), max(floor_ms)],
        "ratio": fused / floor,
        "tflops": flops(name, tokens) / fused * 1e-9,
        "weight_tb_s": touched * (w1[0].numel() + w2[0].numel()) * 2 / fused * 1e-9,
        "gpu_operations_per_call": operations,
        "error": error,
        **by_yardstick,
    }


def ceilings() -> tuple[float, float]:
    """Milliseconds of cuBLAS's 8192^3 product and of a copy of 2 GiB: what this card does today."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    big = torch.empty(2**31, device="cuda", dtype=torch.uint8)
    other = torch.empty_like(big)
    product, copy = milliseconds(lambda _: a @ a, 8), milliseconds(lambda _: other.copy_(big), 8)
    return statistics.median(product), statistics.median(copy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="*", default=DEFAULT)
    parser.add_argument("--tokens", type=int, nargs="*")
    parser.add_argument("--repeats", type=int, default=32)
    parser.add_argument("--floors", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--commit", default=head(), help="where git is not at hand")
    args = parser.parse_args()
    device = torch.cuda.get_device_name()
    product_ms, copy_ms = ceilings()
    result = {
        "device": device,
        "torch": torch.__version__,
        "cublas_8192_tflops": 2 * 8192**3 / product_ms * 1e-9,
        "copy_tb_s": 2 * 2**31 / copy_ms * 1e-9,
        "commit": args.commit,
        "command": "python " + " ".join(sys.argv),
        "shapes": [],
    }
    print(f"{device}: cuBLAS {result['cublas_8192_tflops']:.0f} TFLOP/s, copy {result['copy_tb_s']:.2f} TB/s")
    columns = f"{'fused ms':>9} {'floor ms':>9} {'ratio':>6} {'TFLOP/s':>8} {'w TB/s':>7} ops error"
    print(f"{'shape':>12} {'tokens':>6} {columns}")
    for name in args.shapes:
        for tokens in args.tokens or SHAPES[name][-1]:
            row = measure(name, tokens, args.repeats, args.floors)
            row["nvidia_smi"] = {QUERY: nvidia_smi()}
            result["shapes"].append(row)
            figures = f"{row['fused_ms']:9.4f} {row['floor_ms']:9.4f} {row['ratio']:6.3f} {row['tflops']:8.0f}"
            rest = f"{row['weight_tb_s']:7.2f} {row['gpu_operations_per_call']:3.1f} {row['error']:.1e}"
            if args.floors:
                rest += f" | {row['yardstick_printed_ms']:.3f} {row['yardstick_timer_ratio']:.3f}"
            print(f"{name:>12} {tokens:>6} {figures} {rest}", flush=True)
            torch.cuda.empty_cache()
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
