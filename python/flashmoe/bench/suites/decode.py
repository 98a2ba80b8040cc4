"""Calls of few tokens: how long, and how fast experts' weights are read, by benchmarks/decode.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..layer import BOUNDS
from ..plan import Machine, Point, Suite
from ..programs import program
from ..run import Run, apart
from . import latency


def points(machine: Machine) -> Iterator[Point]:
    if machine.small:
        yield from (Point(f"small {n} x1", 1, latency.small(tokens=n)) for n in (1, 8))
        return
    for name in ("qwen3-30b", "mixtral"):
        yield from (Point(f"{name} {how} x1", 1, {"shape": name, "weights": how}) for how in ("bf16", "fp8"))


def measure(run: Run, shape: str | None = None, weights: str = "bf16", **sizes: Any) -> dict[str, Any]:
    if run.small:
        return latency.measure(run, **sizes)
    decode = program("decode")
    layers = decode.Layers(shape, max(decode.TOKENS), weights)
    read = decode.read_speed()
    check = run.check(*error(layers, weights), "rows of four tokens, beside float64's")
    rows = [layers.measure(tokens, run.repeats, read) for tokens in decode.TOKENS]
    layers.context.close()
    samples = {f"{row['tokens']} tokens": {"busy": [us / 1e3 for us in row.pop("samples")]} for row in rows}
    return {"check": check, "samples": samples, "values": {"read_tb_s": read / 1e12, "rows": rows}}


def error(layers: Any, weights: str) -> tuple[float, float]:
    """Of the first layer's first tokens, and its bound: with weights in FP8 its rows are so too, whose four bits are
    off by up to 2^-4, in two products."""
    tensors = layers.weights[0]
    w1, w2 = (tensors[f"{name}_proj"].float() for name in ("gate_up", "down"))
    if weights == "fp8":
        scales = [tensors[f"{name}_scale"] for name in ("gate_up", "down")]
        for matrices, scale in zip((w1, w2), scales, strict=True):
            matrices *= scale.repeat_interleave(128, 1).repeat_interleave(128, 2)
    y = layers.call(4, 0)
    layers.context.synchronize()
    gated = layers.options["activation"] == "swiglu"
    expected = program("harness").reference(
        layers.x[:4], layers.routers[0], w1, w2, layers.top_k, gated, range(layers.experts)
    )
    return apart(y, expected), 2.0**-3 if weights == "fp8" else BOUNDS["bfloat16"]


SUITE = Suite("decode", "calls of 1 to 256 tokens, and how fast weights are read", (), points, measure)
