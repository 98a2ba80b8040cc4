"""Experts in e4m3, beside the GEMMs alone in e4m3 and beside the same layer in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..layer import Layer, Quantised, Sizes
from ..plan import Machine, Point, Suite
from ..run import Run
from .latency import small


def points(machine: Machine) -> Iterator[Point]:
    for ranks in machine.groups:
        if machine.small:
            sizes = small(hidden=128, intermediate=128, tokens=64, dtype="bfloat16")
            yield Point(f"small x{ranks}", ranks, sizes)
            continue
        for tokens in (4096, 1024, 64) if ranks > 1 else ():
            sizes = {"shape": "deepseek-v4-flash", "tokens": tokens}
            yield Point(f"deepseek-v4-flash {tokens} x{ranks}", ranks, sizes)
        for name in ("qwen3-30b", "mixtral"):
            yield Point(f"{name} 8192 x{ranks}", ranks, {"shape": name, "tokens": 8192})


def measure(run: Run, **sizes: Any) -> dict[str, Any]:
    """``gemms fp8``: PyTorch's GEMMs, with a scale for each row, on ready rows, one for each (token, k) of a rank."""
    of = Sizes.of(**sizes)
    with Layer(run, of) as plain, Quantised(run, of) as layer:
        check = layer.checked()
        calls = {"flashmoe fp8": layer, "flashmoe bf16": plain}
        if run.engine == "cuda":
            from ..quantised import floor_call

            rows = of.tokens * of.top_k
            calls["gemms fp8"] = floor_call(of.hidden, of.intermediate, len(layer.own), rows)
        samples = run.samples(calls)
        plain.context.synchronize()
    return {"check": check, "samples": samples, "values": {"flops": of.flops}}


SUITE = Suite(
    "fp8", "experts in e4m3, beside bfloat16", (), points, measure, variants=({}, {"quantised": True}), seconds=120.0
)
