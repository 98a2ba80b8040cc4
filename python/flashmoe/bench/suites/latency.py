"""How long a layer takes, beside its floors and baselines: by tokens, ranks, experts, experts per token, precision."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from .. import baselines
from ..layer import Layer, Sizes
from ..plan import Machine, Point, Suite
from ..run import Run

SMALL = {"hidden": 64, "intermediate": 64, "experts": 8, "top_k": 2, "dtype": "float32"}
"""The CPU engine's layer: a call takes a millisecond."""
MODELS = ("qwen3-30b", "mixtral", "qwen2-moe", "phi3.5")


def measure(run: Run, names: tuple[str, ...] = baselines.MODULES, **sizes: Any) -> dict[str, Any]:
    """Measures a layer, of a shape of `SHAPES` or of sizes alone, beside the baselines of these names."""
    of = Sizes.of(**sizes)
    with Layer(run, of) as layer:
        check = layer.checked()
        calls, absent = baselines.of_layer(layer, names)
        calls = {"flashmoe": layer, **calls, **baselines.floors(layer)}
        samples = run.samples(calls)
        layer.context.synchronize()
        layer(0)
        values = {"flops": of.flops, "tokens": of.tokens, "return_mode": layer.context.last_call.return_mode}
    return {"check": check, "samples": samples, "absent": absent, "values": values}


def small(**changed: Any) -> dict[str, Any]:
    return {**SMALL, "activation": "swiglu", "tokens": 128, **changed}


def tokens(machine: Machine) -> Iterator[Point]:
    for ranks in machine.groups:
        if machine.small:
            for each in (32, 128):
                yield Point(f"small {each} x{ranks}", ranks, small(tokens=each))
            continue
        for each in (4096, 8192, 16384):
            yield Point(f"paper-E64 {each} x{ranks}", ranks, {"shape": "paper-E64", "tokens": each})
        for name in MODELS:
            yield Point(f"{name} 8192 x{ranks}", ranks, {"shape": name, "tokens": 8192})
        for in_all in (2048, 4096, 8192, 16384, 32768):  # COMET's figure has tokens of all ranks together
            if (each := in_all // ranks) != 8192:
                yield Point(f"mixtral {each} x{ranks}", ranks, {"shape": "mixtral", "tokens": each})


def gpus(machine: Machine) -> Iterator[Point]:
    return map(partial(of_paper, machine), machine.groups)


def of_paper(machine: Machine, ranks: int) -> Point:
    """FlashDMoE's layer, for a figure in which the number of GPUs varies."""
    sizes = small() if machine.small else {"shape": "paper-E64", "tokens": 8192}
    return Point(f"{sizes.get('shape', 'small')} {sizes['tokens']} x{ranks}", ranks, sizes)


def experts(machine: Machine) -> Iterator[Point]:
    for ranks in machine.groups:
        for number in (4, 16) if machine.small else (8, 16, 32, 64, 128):
            sizes = small(experts=number) if machine.small else {"shape": f"paper-E{number}", "tokens": 16384}
            yield Point(f"E{number} x{ranks}", ranks, sizes)


def topk(machine: Machine) -> Iterator[Point]:
    """COMET's figure: Mixtral's widths, 8192 tokens of all ranks together."""
    for ranks in machine.groups:
        if machine.small:
            yield from (Point(f"E8 K{k} x{ranks}", ranks, small(top_k=k)) for k in (1, 4))
            continue
        for number in (8, 16):
            for k in (1, 2, 4, 8):
                sizes = {"shape": "mixtral", "experts": number, "top_k": k, "tokens": 8192 // ranks}
                yield Point(f"E{number} K{k} x{ranks}", ranks, sizes)


PRECISIONS = {
    "fp32 as TF32": {"dtype": "float32"},
    "fp32 exact": {"dtype": "float32", "exact": True},
    "fp16": {"dtype": "float16"},
    "bf16": {"dtype": "bfloat16"},
}


def precision(machine: Machine) -> Iterator[Point]:
    for ranks in machine.groups:
        for name, how in PRECISIONS.items():
            if machine.small:
                if name != "fp32 as TF32":  # the CPU engine has no tensor cores
                    yield Point(f"{name} x{ranks}", ranks, small(dtype=how["dtype"]))
                continue
            tokens = 1024 if how.get("exact") else 8192
            yield Point(f"{name} {tokens} x{ranks}", ranks, {"shape": "paper-E64", "tokens": tokens, **how})


SUITES = (
    Suite(
        "tokens",
        "forward latency as tokens a rank grow",
        ("FlashDMoE, figure 6.1", "FlashDMoE, figure 1.4b", "COMET, figure 10"),
        tokens,
        measure,
        seconds=150.0,
    ),
    Suite(
        "gpus",
        "weak scaling, overlap efficiency T(2)/T(N) and throughput as ranks grow",
        ("FlashDMoE, figure 6.3", "FlashDMoE, figure 6.4", "FlashDMoE, figure 1.4c"),
        gpus,
        measure,
        seconds=150.0,
    ),
    Suite(
        "experts",
        "forward latency as experts grow",
        ("FlashDMoE, figure 6.5", "FlashDMoE, figure 1.2", "FlashDMoE, figure 1.4d"),
        experts,
        measure,
    ),
    Suite("topk", "forward latency as experts a token grow", ("COMET, figure 13",), topk, measure),
    Suite(
        "precision", "float32 as TF32 and exact, float16, bfloat16", ("FlashDMoE, section 6.1.1",), precision, measure
    ),
)
