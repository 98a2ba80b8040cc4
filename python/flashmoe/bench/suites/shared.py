"""A layer with a shared expert, beside the GEMMs alone of the routed experts and of the shared expert, and beside the
layer without the shared expert."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..baselines import floors
from ..layer import Layer, Sizes
from ..plan import Machine, Point, Suite
from ..run import Run
from .latency import small

WIDTH = 5632
"""The width of Qwen2-MoE's shared expert, four times an expert's; it has a gate."""


def points(machine: Machine) -> Iterator[Point]:
    for ranks in machine.groups:
        if machine.small:
            yield Point(f"small x{ranks}", ranks, {"width": 128, **small()})
        else:
            yield Point(f"qwen2-moe 8192 x{ranks}", ranks, {"width": WIDTH, "shape": "qwen2-moe", "tokens": 8192})


def measure(run: Run, width: int, **sizes: Any) -> dict[str, Any]:
    """Each rank has the whole shared expert, and computes it for its own tokens. ``gemms``: the GEMMs of the routed
    experts and then those of the shared expert, on ready rows."""
    import torch

    from ..floors import shared_gemms

    of = Sizes.of(**sizes)
    with Layer(run, of, shared_intermediate=width) as layer:
        shared = weights(layer, width)
        y = layer(0, **shared)
        layer.context.synchronize()
        routed = y.double() - shared_rows(layer.xs[0], shared)
        # The error is relative to the norm of the routed part, but the rounding is that of the sum of both parts, which
        # have about the same size.
        check = run.check(layer.error(routed), 2 * layer.bound, "rows of sampled tokens, beside float64's")
        h = torch.randn(of.tokens, width, device=run.device, dtype=layer.router.dtype)
        grouped = floors(layer)["gemms"]
        matrices = shared["shared_gate_up"], shared["shared_down"]

        def bare(i: int) -> None:
            shared_gemms(layer.xs[i % len(layer.xs)], *matrices, h)

        calls = {
            "flashmoe": lambda i: layer(i, **shared),
            "without the shared expert": layer,
            "gemms": lambda i: (grouped(i), bare(i)),
            "gemms of the shared expert": bare,
        }
        samples = run.samples(calls)
        layer.context.synchronize()
    flops = of.flops + 6 * of.tokens * of.hidden * width
    return {"check": check, "samples": samples, "values": {"flops": flops}}


def weights(layer: Layer, width: int) -> dict[str, Any]:
    """The shared expert's weights, the same on all ranks."""
    import torch

    hidden, like = layer.sizes.hidden, layer.router
    generator = torch.Generator(like.device).manual_seed(7)
    shapes = {"shared_gate_up": (2 * width, hidden), "shared_down": (hidden, width), "shared_gate": (1, hidden)}
    return {
        name: torch.randn(shape, generator=generator, device=like.device, dtype=like.dtype) * shape[1] ** -0.5
        for name, shape in shapes.items()
    }


def shared_rows(x: Any, shared: dict[str, Any]) -> Any:
    """The shared expert's results [T, H], in float64."""
    import torch

    gate_up, down, gate = (shared[f"shared_{name}"].double() for name in ("gate_up", "down", "gate"))
    g, u = (x.double() @ gate_up.t()).chunk(2, -1)
    return torch.sigmoid(x.double() @ gate.t()) * ((torch.nn.functional.silu(g) * u) @ down.t())


SUITE = Suite("shared", "a shared expert, beside the bare GEMMs of both parts", (), points, measure, seconds=120.0)
