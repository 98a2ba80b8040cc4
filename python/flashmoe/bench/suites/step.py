"""A training step of a model's experts, forward and backward, beside the same step in PyTorch and NCCL."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from ..baselines import pytorch, tried
from ..expected import reference
from ..layer import Layer, Sizes
from ..measure import AUTOGRAD_CYCLES
from ..plan import Machine, Point, Suite
from ..run import Call, Run, apart, median
from .latency import small
from .training import PASSES, SAMPLE

LAYERS = 12
"""The number of layers; Qwen3-30B-A3B has 48. Two GPUs have room for the weights and gradients of so many layers,
beside what PyTorch keeps of a step."""


def points(machine: Machine) -> Iterator[Point]:
    for ranks in machine.groups:
        if machine.small:
            yield Point(f"small, 2 layers x{ranks}", ranks, {"layers": 2, **small(tokens=64)})
        else:
            sizes = {"layers": LAYERS, "shape": "qwen3-30b", "tokens": 8192}
            yield Point(f"qwen3-30b 8192, {LAYERS} layers x{ranks}", ranks, sizes)


def measure(run: Run, layers: int, **sizes: Any) -> dict[str, Any]:
    """Each layer's result is added to the layer's input, as in a model. Gradients are those of x, of all routers and of
    all matrices. ``gemms``: the six grouped GEMMs of a layer on ready rows, once for each layer."""
    of = Sizes.of(**sizes)
    with Layer(run, of) as first:
        model = [first, *(Layer(run, of, like=first, number=number) for number in range(1, layers))]
        for layer in model:
            for each in (layer.router, layer.w1, layer.w2):
                each.requires_grad_()
        check = run.check(
            max(error(layer) for layer in (model[0], model[-1])),
            4 * first.bound,
            "gradients of x of sampled tokens, and of an expert's matrices, beside float64's",
        )
        calls = {"flashmoe": step(model, Layer.of), "gemms": bare(first, layers)}
        absent = {}
        theirs = step(model, pytorch.forward)
        refused = "NCCL refuses two ranks on one GPU" if run.engine == "cuda" and run.ranks_a_gpu > 1 else ""
        if reason := refused or pytorch.NEEDS.lacks(run, of) or voided(first, pytorch.forward, theirs):
            absent["pytorch"] = reason
        else:
            calls["pytorch"] = theirs
        # A step takes as long as dozens of calls, so it is repeated less often.
        fewer = replace(run, repeats=max(4, run.repeats // 2))
        samples = fewer.samples(calls, cycles=AUTOGRAD_CYCLES)
        first.context.synchronize()
    flops = 3 * layers * of.flops
    figures = {f"TFLOP/s a rank, {name}": flops / median(samples[name]) * 1e-9 for name in calls}
    return {"check": check, "samples": samples, "absent": absent, "values": {"flops": flops, "figures": figures}}


Forward = Callable[[Layer, Any], Any]


def step(model: list[Layer], forward: Forward) -> Call:
    import torch

    x = model[0].xs[0].detach().requires_grad_()
    dy = random_like(x)
    leaves = [x, *(each for layer in model for each in (layer.router, layer.w1, layer.w2))]

    def call(_: int) -> Any:
        y = x
        for layer in model:
            y = y + forward(layer, y)
        return torch.autograd.grad(y, leaves, dy)

    return call


def bare(layer: Layer, layers: int) -> Call:
    from ..floors import backward_floor_call, floor_call

    of = layer.sizes
    sizes = (of.tokens * of.top_k, of.hidden, of.intermediate, len(layer.own), layer.w1.detach(), layer.w2.detach())
    passes = floor_call(*sizes), backward_floor_call(*sizes)
    return lambda i: [each(i) for _ in range(layers) for each in passes]


def random_like(x: Any) -> Any:
    import torch

    generator = torch.Generator(x.device).manual_seed(7)
    return torch.randn(x.shape, generator=generator, device=x.device, dtype=x.dtype)


# ---- gradients in float64 --------------------------------------------------------------------------------------------


def error(layer: Layer) -> float:
    """The error of the gradients of x, and of the matrices of this rank's first expert, to which all ranks' tokens
    contribute."""
    import torch

    x = layer.xs[0].detach().requires_grad_()
    dy = random_like(x)
    ours = torch.autograd.grad(layer.of(x), [x, layer.w1, layer.w2], dy)
    expected = of_expert(layer, x.detach(), dy)
    of_matrices = [apart(mine[0], each) for mine, each in zip(ours[1:], expected, strict=True) if each.norm() > 0]
    return max([apart(ours[0][:SAMPLE], of_tokens(layer, x.detach(), dy)), *of_matrices])


def voided(layer: Layer, forward: Forward, whole: Call) -> str:
    """Why another implementation's step is not timed: a layer's gradients of x fail or are wrong, or the step of all
    layers fails, for example for lack of memory. Empty if it is timed."""
    import torch

    x = layer.xs[0].detach().requires_grad_()
    dy = random_like(x)
    theirs, reason = tried(layer.run, lambda: torch.autograd.grad(forward(layer, x), [x], dy))
    if theirs is None:
        return reason
    error = layer.run.worst(apart(theirs[0][:SAMPLE], of_tokens(layer, x.detach(), dy)))
    bound = 8 * layer.bound  # twice the bound of FlashMoE's gradients, because it rounds after every operation
    if not error <= bound:
        return f"voided: expected an error of at most {bound:g}, got {error:g}"
    return tried(layer.run, lambda: whole(0))[1]


def of_tokens(layer: Layer, x: Any, dy: Any) -> Any:
    """The gradients [S, H] of this rank's first tokens. Every rank computes the terms of its own experts for the first
    tokens of all ranks, and an all-reduce adds the terms up."""
    import torch

    gathered = [gather(layer, each[:SAMPLE]) for each in (x, dy)]
    rows = gathered[0].double().requires_grad_()
    router, w1, w2 = (each.detach() for each in (layer.router, layer.w1, layer.w2))
    y = reference(rows, router, w1, w2, layer.top_k, layer.sizes.gated, list(layer.own))
    (terms,) = torch.autograd.grad(y, [rows], gathered[1].double())
    if layer.run.ranks > 1:
        torch.distributed.all_reduce(terms)
    return terms.view(layer.run.ranks, SAMPLE, -1)[layer.run.rank]


def of_expert(layer: Layer, x: Any, dy: Any) -> list[Any]:
    """The gradients of the matrices of this rank's first expert."""
    import torch

    x, dy = gather(layer, x), gather(layer, dy)
    weights, ids = pytorch.route(layer, x)
    tokens, places = (ids.detach() == layer.own[0]).nonzero(as_tuple=True)
    matrices = [each[0].detach().double().requires_grad_() for each in (layer.w1, layer.w2)]
    gate_up, down = matrices
    h = x[tokens].double() @ gate_up.t()
    if layer.sizes.gated:
        gate, up = h.chunk(2, -1)
        h = torch.nn.functional.silu(gate) * up
    else:
        h = torch.nn.functional.gelu(h)
    y = weights.detach()[tokens, places].double().unsqueeze(1) * (h @ down.t())
    return list(torch.autograd.grad(y, matrices, dy[tokens].double()))


def gather(layer: Layer, rows: Any) -> Any:
    """The rows of all ranks, one rank's after the other's."""
    import torch

    if layer.run.ranks == 1:
        return rows.clone()
    parts = [torch.empty_like(rows, memory_format=torch.contiguous_format) for _ in range(layer.run.ranks)]
    torch.distributed.all_gather(parts, rows.contiguous())
    return torch.cat(parts)


SUITE = Suite(
    "step",
    "a training step of twelve layers' experts, beside PyTorch and NCCL",
    (),
    points,
    measure,
    variants=PASSES[1:],
    seconds=150.0,
)
