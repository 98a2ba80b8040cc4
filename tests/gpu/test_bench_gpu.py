"""Suites of `flashmoe bench` whose usual points take long on a GPU: here with small sizes, on one rank and on two.

Each suite compares results with float64 before it times anything, and raises `Voided` if they are wrong."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from flashmoe.bench import runner
from flashmoe.bench.group import Group
from flashmoe.bench.plan import Point
from flashmoe.bench.run import Run
from flashmoe.bench.suites import SUITES

pytestmark = [pytest.mark.gpu, pytest.mark.undisturbed]

LAYER = {"hidden": 1024, "intermediate": 512, "experts": 32, "top_k": 4, "activation": "swiglu"}
POINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "step": ("step", {"layers": 3, "tokens": 1024, **LAYER}),
    "decode": ("decode", {"weights": "bf16", "layers": 3, "tokens": 64, **LAYER}),
    "decode in FP8": ("decode", {"weights": "fp8", "layers": 3, "tokens": 64, **LAYER}),
    "fp8": ("fp8", {"tokens": 256, **LAYER}),
    "shared": ("shared", {"width": 2048, "tokens": 512, **LAYER}),
    "soak": ("soak", {"calls": 1000, "tokens": 128, **LAYER}),
    "imbalance": ("imbalance", {"shape": "paper-E8", "tokens": 512, "spread": 0.03}),
    "parallelism": ("parallelism", {"shape": "paper-E8", "tokens": 512}),
    "models": ("models", {"layers": 2, "cases": ["prefill 64", "decode 1", "decode 1, graph"]}),
}
ALONE = ("step", "fp8", "shared", "soak", "models")
SHARING = int(os.environ.get("FLASHMOE_SHARE_GPUS") or 1)
REPEATS, SECONDS = 4, 60.0


class Ranks:
    """A group of ranks that measures points. After a failure, the next measurement starts a new group."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self._group = ranks, None

    def measure(self, suite: str, point: Point) -> dict[str, Any]:
        self._group = self._group or Group("cuda", self.ranks)
        try:
            return self._group.measure(suite, point, REPEATS, SECONDS)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group = None


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.group)], ids="{}ranks".format)
def ranks(request) -> Iterator[Ranks]:
    number = request.param
    if number > torch.cuda.device_count() * SHARING:
        pytest.skip(f"{number} ranks need {number} GPUs, or FLASHMOE_SHARE_GPUS")
    runner.compile_kernels([(SUITES[suite], Point(name, number, sizes)) for name, (suite, sizes) in POINTS.items()])
    started = Ranks(number)
    yield started
    started.close()


def has_gpus(ranks: int) -> bool:
    """Whether each of the ranks has a GPU of its own."""
    return ranks <= torch.cuda.device_count()


@pytest.mark.parametrize("name", POINTS)
def test_a_small_point(ranks, name):
    if ranks.ranks == 1 and name not in ALONE:
        pytest.skip("it is of several ranks")
    if name == "models" and not has_gpus(ranks.ranks):
        pytest.skip("Transformers gives each rank a GPU of its own")
    suite, sizes = POINTS[name]
    measured = ranks.measure(suite, Point(name, ranks.ranks, sizes))
    assert measured["check"]["error"] <= measured["check"]["bound"]
    times = [ms for timers in measured.get("samples", {}).values() for each in timers.values() for ms in each]
    assert all(ms > 0 for ms in times) and (times or name == "soak")
    if name == "step":
        assert ("pytorch" in measured["samples"]) == has_gpus(ranks.ranks), measured["absent"]
    if name in ("step", "shared", "fp8"):
        assert any(call.startswith("gemms") for call in measured["samples"])


@pytest.mark.own_gpus
def test_a_rank_that_is_killed():
    if torch.cuda.device_count() < 2:
        pytest.skip("ranks share a GPU: under MPS a client that is killed can take all others with it")
    sizes = {"ranks": 2, "timeout": 3.0, "tokens": 128, **LAYER}
    assert SUITES["faults"].measure(Run("cuda", 0, 1, REPEATS), **sizes)["check"]["error"] < 6.0
