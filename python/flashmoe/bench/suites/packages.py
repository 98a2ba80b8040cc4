"""The layer beside each installed baseline, one at a time, so that a baseline that fails does not stop another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .. import baselines
from ..layer import Sizes
from ..plan import Machine, Point, Suite, Voided
from ..run import Run
from .latency import measure as measure_layer
from .latency import small

LAYERS = (("qwen3-30b", 8192), ("qwen3-30b", 32), ("mixtral", 8192), ("paper-E64", 8192))


def points(machine: Machine) -> Iterator[Point]:
    """Points of the baselines that can run here. If another package is installed later, its points are added."""
    layers = [small()] if machine.small else [{"shape": shape, "tokens": tokens} for shape, tokens in LAYERS]
    for name in baselines.MODULES:
        needs = baselines.module(name).NEEDS
        for ranks in machine.groups:
            for sizes in layers:
                if needs.lacks(Run(machine.engine, 0, ranks, 0), Sizes.of(**sizes)) is None:
                    of = f"{sizes.get('shape', 'small')} {sizes['tokens']}"
                    yield Point(f"{of}, {name} x{ranks}", ranks, {"baseline": name, **sizes})


def measure(run: Run, baseline: str, **sizes: Any) -> dict[str, Any]:
    measured = measure_layer(run, names=(baseline,), **sizes)
    if reason := measured["absent"].get(baseline):
        raise Voided(reason)
    measured["values"]["versions"] = baselines.module(baseline).NEEDS.versions()
    return measured


SUITE = Suite("baselines", "beside each package that is installed, one at a time", (), points, measure)
