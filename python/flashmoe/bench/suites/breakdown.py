"""How much of a layer's time is communication, and how much of the communication is hidden behind computation."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from .. import baselines
from ..layer import Layer, Sizes
from ..plan import Machine, Point, Suite
from ..run import Run
from .latency import small


def points(machine: Machine) -> Iterator[Point]:
    for ranks in machine.groups:
        if machine.small:
            yield Point(f"small 128 x{ranks}", ranks, small())
            continue
        of_figure = ("mixtral", 16384 // ranks)
        for name, tokens in dict.fromkeys((of_figure, ("mixtral", 8192), ("qwen3-30b", 8192), ("paper-E64", 8192))):
            yield Point(f"{name} {tokens} x{ranks}", ranks, {"shape": name, "tokens": tokens})


def measure(run: Run, **sizes: Any) -> dict[str, Any]:
    """Measures the layer beside PyTorch's layer, the GEMMs alone and the exchange alone. ``hidden`` (several GPUs): the
    time that sending rows adds to a call, absolute and as a share of the collectives' time, by `overlap.py`.
    ``phases``: the share of the processors' time that each of their activities took."""
    of = Sizes.of(**sizes)
    with Layer(run, of) as layer:
        check = layer.checked()
        calls, absent = baselines.of_layer(layer, ("pytorch",))
        samples = run.samples({"flashmoe": layer, **calls, **baselines.floors(layer)})
        layer(0, trace=True)
        layer.context.synchronize()
        phases = layer.context.last_call.phase_ns
    in_all = sum(phases.values())
    values: dict[str, Any] = {"phases": {name: each / in_all for name, each in phases.items()}}
    if run.ranks > 1 and "pytorch" in samples:
        timer = "plain"
        whole, exchanges = (statistics.median(samples[name][timer]) for name in ("pytorch", "exchange"))
        values["communication_of_pytorch"] = exchanges / whole
    if run.ranks > 1 and run.engine == "cuda" and of.tokens % of.experts == 0:
        from .. import overlap

        hidden = overlap.hidden(sizes["shape"], of.tokens, max(4, run.repeats // 8))
        values |= {"hidden": hidden, "figures": {name: hidden[name] for name in ("exposed", "exposed_of_link")}}
    return {"check": check, "samples": samples, "absent": absent, "values": values}


SUITE = Suite(
    "breakdown",
    "communication's part of a layer, and how much of it is hidden",
    ("COMET, figure 1", "COMET, figure 11"),
    points,
    measure,
    variants=({}, {"trace": True}),
    seconds=120.0,
)
