"""A backward pass beside its GEMMs alone, and the cost of a forward pass that keeps what the backward pass needs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..expected import reference
from ..layer import Layer, Sizes
from ..measure import AUTOGRAD_CYCLES, passes
from ..plan import Machine, Point, Suite
from ..run import Run, apart
from ..shapes import SHAPES, TRAINED
from .latency import small

SAMPLE = 4
"""Tokens whose gradients are checked."""


def points(machine: Machine) -> Iterator[Point]:
    if machine.small:
        yield Point("small x1", 1, small(tokens=64))
        return
    for name in TRAINED:
        tokens = SHAPES[name][-1][0]
        yield Point(f"{name} {tokens} x1", 1, {"shape": name, "tokens": tokens})


def measure(run: Run, **sizes: Any) -> dict[str, Any]:
    from ..floors import backward_floor_call

    of = Sizes.of(**sizes)
    with Layer(run, of, return_mode="direct") as layer:
        layer.checked()
        calls = passes(layer)
        check = run.check(error(layer), 4 * layer.bound, "gradients of x of sampled tokens, beside float64's")
        calls["gemms"] = backward_floor_call(
            of.tokens * of.top_k, of.hidden, of.intermediate, of.experts, layer.w1.detach(), layer.w2.detach()
        )
        # Autograd takes the host longer than a launch does, so the work that occupies the GPU meanwhile is longer, too.
        samples = run.samples(calls, cycles=AUTOGRAD_CYCLES)
    return {"check": check, "samples": samples, "values": {"flops": 2 * of.flops}}


def error(layer: Layer) -> float:
    """The error of the gradients of x for the first tokens. The float64 reference needs only these tokens, because a
    token's gradient depends on no other token. Gradients go through twice as many roundings as a forward pass's result.
    """
    import torch

    x = layer.xs[0]
    generator = torch.Generator(x.device).manual_seed(7)
    dy = torch.randn(x.shape, generator=generator, device=x.device, dtype=x.dtype)
    (ours,) = torch.autograd.grad(layer(0), [x], dy)
    rows = x[:SAMPLE].detach().requires_grad_()
    router, w1, w2 = (each.detach() for each in (layer.router, layer.w1, layer.w2))
    y = reference(rows, router, w1, w2, layer.top_k, layer.sizes.gated, range(layer.experts))
    (expected,) = torch.autograd.grad(y, [rows], dy[:SAMPLE].double())
    return apart(ours[:SAMPLE], expected)


PASSES: tuple[dict[str, bool], ...] = ({}, {"keeps": True}, {"backward": True})
"""The kernels of a forward pass for inference, of a forward pass that keeps, and of a backward pass."""

SUITE = Suite("training", "a backward pass, and a forward pass that keeps for it", (), points, measure, variants=PASSES)
