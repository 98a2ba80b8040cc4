"""Times by the number of a GPU's thread blocks that send, and by the number of clusters that stop early to reduce.
COMET divides thread blocks between communication and computation in this way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..layer import Layer, Sizes
from ..plan import Machine, Point, Suite
from ..run import Run
from .latency import small

SENDERS = (4, 8, 16, 24, 32, 48, 64)
LINK_CLUSTERS = (0, 2, 4, 8, 16)
LAGS = (66, 132, 264, 528, 1056)
"""How many tasks GEMM 1 stays behind GEMM 0. This is measured on one GPU, where no blocks send or reduce."""


def points(machine: Machine) -> Iterator[Point]:
    for ranks in machine.groups:
        if machine.small:
            yield from (Point(f"processors {n} x{ranks}", ranks, small(processors=n)) for n in (1, 2))
            continue
        knob, values = ("senders", SENDERS) if ranks > 1 else ("gemm1_lag", LAGS)
        for in_all in (4096, 16384) if ranks > 1 else (8192,):
            for value in values:
                sizes = {"shape": "mixtral", "tokens": in_all // ranks, "profile": {knob: value}}
                yield Point(f"{in_all // ranks} {knob} {value} x{ranks}", ranks, sizes)
        if ranks > 1:
            sizes = {"shape": "qwen3-30b", "tokens": 8192}
            yield Point(f"8192 direct x{ranks}", ranks, {**sizes, "return_mode": "direct"})
            for value in LINK_CLUSTERS:
                reduced = {"return_mode": "reduced", "profile": {"link_clusters": value}}
                yield Point(f"8192 reduced, link_clusters {value} x{ranks}", ranks, sizes | reduced)


def measure(
    run: Run,
    profile: dict[str, int] | None = None,
    processors: int | None = None,
    return_mode: str | None = None,
    **sizes: Any,
) -> dict[str, Any]:
    of = Sizes.of(**sizes)
    asked = {"processors": processors, "return_mode": return_mode}
    further = {name: value for name, value in asked.items() if value is not None}
    with Layer(run, of, profile, **further) as layer:
        check = layer.checked()
        samples = run.samples({"flashmoe": layer})
    return {"check": check, "samples": samples, "values": {"profile": profile or {}}}


SUITE = Suite("split", "thread blocks that send, of those that there are", ("COMET, figure 8",), points, measure)
