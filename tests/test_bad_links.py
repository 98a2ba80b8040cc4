"""Groups on a network that is slow, or has long delays and stalls for a second now and then: results have the same bits
as on one rank, and every wait ends."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import pytest
from hosts import Network, network
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from processes import MARGIN, Process, processes
from relay import Cable
from spread_ranks import (
    LONG,
    MakeNetwork,
    all_of,
    check_leaving,
    compute,
    formed,
    one_rank,
    tokens_of,
    told,
)

__all__ = ["network", "processes"]  # fixtures

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # about forks of a process with threads

CALLS = 2000 if LONG else 50
EXAMPLES = 200 if LONG else 10
SEED = int(os.environ.get("FLASHMOE_SEED") or 0)
SPREAD = [0, 1, 1, 0]
TIMEOUT = 10.0
"""Seconds after which a rank's wait expires: more than the longest stall, with room for a busy machine."""
SLOWEST_CALL = 0.4
"""The most seconds that a call may take on average, with its crossings between hosts and a stall now and then."""


def ten_megabits(make: MakeNetwork) -> Network:
    net = make(2)
    for host in (0, 1):
        net.slow(host, "tbf", "rate", "10mbit", "burst", "16kb", "latency", "500ms")
    return net


def far_and_unsteady(make: MakeNetwork) -> Network:
    return make(2, Cable(delay=0.02, stall=1.0, packets=2000, seed=SEED))


def check_calls(ranks: Sequence[Process], alone: Process, counts: Sequence[int], seed: int, calls: int) -> None:
    xs = tokens_of(counts, seed)
    ys = all_of(ranks, compute, [(x, seed, calls) for x in xs], 4 * MARGIN + calls * SLOWEST_CALL)
    for x, y in zip(xs, ys, strict=True):
        assert np.array_equal(y, told(alone, compute, x, seed))


@pytest.mark.timeout(0)
@pytest.mark.parametrize("link", [ten_megabits, far_and_unsteady])
def test_bits_are_those_of_one_rank(network: MakeNetwork, link):
    net = link(network)
    ranks, alone = formed(net, SPREAD, timeout=TIMEOUT), one_rank(net)
    check_calls(ranks, alone, [37, 0, 60, 11], SEED, CALLS)

    @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(
        counts=st.lists(st.integers(0, 60), min_size=len(SPREAD), max_size=len(SPREAD)),
        seed=st.integers(0, 1000),
        calls=st.integers(1, 3),
    )
    def check(counts: list[int], seed: int, calls: int) -> None:
        check_calls(ranks, alone, counts, seed, calls)

    check()
    if link is far_and_unsteady:
        carried = net.carried()
        assert carried.stalls >= CALLS // 50, carried
    check_leaving(ranks, 2 * MARGIN)
