"""The suites by name, in the order in which they take turns. Suites that most figures need come first."""

from __future__ import annotations

from ..plan import Suite
from . import (
    breakdown,
    decode,
    faults,
    fp8,
    host,
    latency,
    memory,
    metrics,
    models,
    packages,
    parallelism,
    shared,
    soak,
    split,
    step,
    stragglers,
    training,
    utilization,
)

SUITES: dict[str, Suite] = {
    suite.name: suite
    for suite in (
        memory.SUITE,
        metrics.METRICS,
        *latency.SUITES,
        packages.SUITE,
        host.LAUNCHES,
        host.TRACE_API,
        utilization.UTILIZATION,
        metrics.SHARED_MEMORY,
        stragglers.SUITE,
        breakdown.SUITE,
        *parallelism.SUITES,
        split.SUITE,
        decode.SUITE,
        training.SUITE,
        step.SUITE,
        fp8.SUITE,
        shared.SUITE,
        models.SUITE,
        soak.SUITE,
        faults.SUITE,
    )
}
