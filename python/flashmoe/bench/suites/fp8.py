"""Experts in e4m3 beside the bare GEMMs in it, and beside the same layer in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..layer import Layer, Sizes
from ..plan import Machine, Point, Suite
from ..programs import program
from ..run import Run
from .latency import small

BOUND = 2.0**-3
"""Rows are in e4m3 too, four bits, off by up to 2^-4, in two products."""


def points(machine: Machine) -> Iterator[Point]:
    for ranks in machine.groups:
        if machine.small:
            sizes = small(hidden=128, intermediate=128, tokens=64, dtype="bfloat16")
            yield Point(f"small x{ranks}", ranks, sizes)
            continue
        for name in ("qwen3-30b", "mixtral"):
            yield Point(f"{name} 8192 x{ranks}", ranks, {"shape": name, "tokens": 8192})


def measure(run: Run, **sizes: Any) -> dict[str, Any]:
    import flashmoe

    of = Sizes.of(**sizes)
    fp8 = program("fp8")
    with Layer(run, of) as plain, Layer(run, of, weight_dtype="float8_e4m3fn") as layer:
        scales = []
        dequantised = []
        for matrices in (layer.w1, layer.w2):
            quantised = [fp8.by_block(each) for each in matrices]
            scales.append(torch_stack([scale for _, scale in quantised]))
            dequantised.append(torch_stack([matrix for matrix, _ in quantised]))
        w1, w2 = dequantised
        for matrices, ours, scale in ((layer.w1, w1, scales[0]), (layer.w2, w2, scales[1])):
            for i in range(len(matrices)):  # what is checked is the layer of these very weights
                wide = scale[i].repeat_interleave(128, 0).repeat_interleave(128, 1)
                matrices[i].copy_(ours[i].float() * wide)

        def call(i: int) -> Any:
            return flashmoe.moe(
                layer.context,
                layer.xs[i % len(layer.xs)],
                w1,
                w2,
                router=layer.router,
                top_k=of.top_k,
                activation=of.activation,
                gate_up_scale=scales[0],
                down_scale=scales[1],
            )

        y = call(0)
        layer.context.synchronize()
        check = run.check(layer.error(y), BOUND, "rows of sampled tokens, beside float64's of the dequantised weights")
        calls = {"flashmoe fp8": call, "flashmoe bf16": plain}
        if run.engine == "cuda":
            rows = of.tokens * of.top_k
            calls["gemms fp8"] = fp8.floor_call(of.hidden, of.intermediate, len(layer.own), rows)
        samples = run.samples(calls)
        plain.context.synchronize()
    return {"check": check, "samples": samples, "values": {"flops": of.flops}}


def torch_stack(tensors: list[Any]) -> Any:
    import torch

    return torch.stack(tensors)


SUITE = Suite("fp8", "experts in e4m3, beside bfloat16", (), points, measure)
