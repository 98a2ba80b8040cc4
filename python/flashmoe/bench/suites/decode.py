"""Calls of few tokens: how long they take, and how fast experts' weights are read. `decoding.py` measures the calls on
one GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..baselines.pytorch import route
from ..expected import reference
from ..layer import BOUNDS, Layer, Quantised, Sizes
from ..plan import Machine, Point, Suite
from ..run import Call, Run, apart, median
from . import latency

TOKENS = (1, 8, 64)
"""Tokens of each rank of a group."""
GROUPS = (("qwen3-30b", "bf16", 8), ("deepseek-v3", "fp8", 4), ("qwen3-30b", "fp8", 8))
"""Shape, type of weights, and the number of layers that take turns, so that no layer is in the L2. DeepSeek has fewer
layers here, because each has gigabytes of weights."""
SUSTAINED, APART_US = 0.86, 25.0
"""Two bounds for a layer's time. The first is the time to read its weights at `SUSTAINED` times the measured speed of
reading. The second adds `APART_US` microseconds, because ranks must meet twice in each layer."""


def points(machine: Machine) -> Iterator[Point]:
    if machine.small:
        yield from (Point(f"small {n} x1", 1, latency.small(tokens=n)) for n in (1, 8))
        sizes = latency.small(hidden=128, intermediate=128, dtype="bfloat16", tokens=8)
        yield from (Point(f"small {how} x2", 2, {"weights": how, "layers": 2, **sizes}) for how in ("bf16", "fp8"))
        return
    for ranks in machine.groups[1:]:
        for name, how, layers in GROUPS:
            sizes = {"shape": name, "weights": how, "layers": layers, "tokens": max(TOKENS)}
            yield Point(f"{name} {how} x{ranks}", ranks, sizes)
    for name in ("qwen3-30b", "mixtral"):
        yield from (Point(f"{name} {how} x1", 1, {"shape": name, "weights": how}) for how in ("bf16", "fp8"))


def measure(run: Run, shape: str | None = None, weights: str = "bf16", **sizes: Any) -> dict[str, Any]:
    if run.ranks > 1:
        return measure_group(run, weights=weights, **({"shape": shape} if shape else {}), **sizes)
    if run.small:
        return latency.measure(run, **sizes)
    from .. import decoding

    layers = decoding.Layers(shape, max(decoding.TOKENS), weights)
    read = decoding.read_speed()
    check = run.check(*error(layers, weights), "rows of four tokens, beside float64's")
    rows = [layers.measure(tokens, run.repeats, read) for tokens in decoding.TOKENS]
    layers.context.close()
    samples = {f"{row['tokens']} tokens": {"busy": [us / 1e3 for us in row.pop("samples")]} for row in rows}
    return {"check": check, "samples": samples, "values": {"read_tb_s": read / 1e12, "rows": rows}}


def error(layers: Any, weights: str) -> tuple[float, float]:
    """The error of the first layer's first tokens, and its bound. If weights are in FP8, the rows of both products are
    rounded to FP8, too: with four significant bits, they are off by up to 2^-4 each time."""
    tensors = layers.weights[0]
    w1, w2 = (tensors[f"{name}_proj"].float() for name in ("gate_up", "down"))
    if weights == "fp8":
        scales = [tensors[f"{name}_scale"] for name in ("gate_up", "down")]
        for matrices, scale in zip((w1, w2), scales, strict=True):
            matrices *= scale.repeat_interleave(128, 1).repeat_interleave(128, 2)
    y = layers.call(4, 0)
    layers.context.synchronize()
    gated = layers.options["activation"] == "swiglu"
    expected = reference(layers.x[:4], layers.routers[0], w1, w2, layers.top_k, gated, range(layers.experts))
    return apart(y, expected), 2.0**-3 if weights == "fp8" else BOUNDS["bfloat16"]


def measure_group(run: Run, weights: str, layers: int, **sizes: Any) -> dict[str, Any]:
    """Measures ranks with their own tokens: one CUDA graph calls `layers` layers with different weights. ``read``: a
    sum over a large tensor, timed in the same run, gives the speed of reading. A layer's bound is the time to read the
    experts that its tokens choose, on the rank that has the most of them, at `SUSTAINED` times that speed."""
    of = Sizes.of(**sizes)
    kind = Quantised if weights == "fp8" else Layer
    with kind(run, of) as first:
        check = first.checked()
        model = [first, *(kind(run, of, like=first, number=number) for number in range(1, layers))]
        calls: dict[str, Call] = {}
        for tokens in (each for each in TOKENS if each <= of.tokens):
            calls[f"{tokens} tokens"] = of_all(run, model, tokens)
        data = run_data(run)
        samples = run.samples({**calls, "read": lambda _: data.sum()})
        first.context.synchronize()
        moved = {tokens: read_bytes(model, tokens) / layers for tokens in TOKENS if tokens <= of.tokens}
    speed = data.nbytes / median(samples.pop("read")) * 1e3
    rows, figures = [], {}
    for tokens, of_layer in moved.items():
        us = median(samples[f"{tokens} tokens"]) / layers * 1e3
        at_best = of_layer / (SUSTAINED * speed) * 1e6
        row = {"tokens": tokens, "us": us, "weights_tb_s": of_layer / us / 1e6, "of_read": of_layer / us * 1e6 / speed}
        rows.append(row | {"bound_us": at_best})
        figures |= {
            f"{tokens} tokens, us a layer": us,
            f"{tokens} tokens, of the bound": us / at_best,
            f"{tokens} tokens, of the bound and {APART_US:g} us": us / (at_best + APART_US),
        }
    values = {"layers": layers, "read_tb_s": speed / 1e12, "rows": rows, "figures": figures}
    return {"check": check, "samples": samples, "values": values}


def of_all(run: Run, model: list[Layer], tokens: int) -> Call:
    """Calls all layers once, one after the other, on the first `tokens` tokens of a batch."""

    def call(number: int) -> Any:
        return model[number].of(model[number].xs[0][:tokens])

    if run.engine == "cpu":
        return lambda _: [call(number) for number in range(len(model))]
    from ..decoding import captured

    graph = captured(call, len(model))
    return lambda _: graph.replay()


def run_data(run: Run) -> Any:
    """The tensor whose sum gives the speed of reading; on a GPU it is much larger than the L2."""
    import torch

    from ..decoding import READ_BYTES

    return torch.zeros(READ_BYTES // (4 if run.engine == "cuda" else 256), device=run.device)


def read_bytes(model: list[Layer], tokens: int) -> float:
    """Bytes (with scales) of the experts that any rank's tokens choose: for each layer those on the rank that has the
    most of them, summed over the layers."""
    import torch
    import torch.distributed as dist

    total = 0.0
    for layer in model:
        chosen = torch.zeros(layer.experts, device=layer.router.device)
        chosen[route(layer, layer.xs[0][:tokens])[1].flatten()] = 1.0
        dist.all_reduce(chosen, op=dist.ReduceOp.MAX)
        expert_bytes = sum(each.nbytes for each in layer.tensors.values()) / len(layer.own)
        total += layer.run.worst(float(chosen[list(layer.own)].sum()) * expert_bytes)
    return total


SUITE = Suite(
    "decode",
    "calls of 1 to 256 tokens, and how fast weights are read",
    (),
    points,
    measure,
    variants=({}, {"quantised": True}),
)
