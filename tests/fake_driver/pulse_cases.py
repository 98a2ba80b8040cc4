"""A rank that compiles a kernel inside a call shows the other ranks its progress meanwhile."""

from __future__ import annotations

import time

import flashmoe
import pytest
from fake_gpu import SIZES, E, H, I, arguments, compiler_of, driver, on_gpu
from fake_group import on_ranks, pretend, weights_of
from flashmoe import jit


def calls_of(rank, ranks, name, environment, cubin, timeout):
    """The driver's log of the first call, whose kernel takes a second to compile, and of the next call."""
    pretend([rank], cubin, environment)
    jit.kernel = lambda variant: time.sleep(1.0) or compiler_of([], cubin)(variant)
    settings = {**SIZES, "timeout": timeout, "name": name, "rank": rank, "ranks": ranks}
    with flashmoe.Context(engine="cuda", device=rank, **settings) as made:
        given = arguments(10, x=on_gpu(10, H), router=on_gpu(E, H), **weights_of(len(made.local_experts()), H, I))
        told = []
        for _ in range(2):
            driver.fake_log()
            flashmoe.moe(made, **given)
            told.append(driver.fake_log().decode().split())
        return told


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rank_that_compiles_says_so(cubin, ranks):
    """It writes its progress word every eighth of its timeout (2 s). A rank alone writes nothing."""
    for first, second in on_ranks(calls_of, [(cubin, 2.0)] * ranks):
        assert second == ["call"]
        assert first[-1] == "call" and set(first[:-1]) <= {"write"}
        assert first.count("write") in (range(2, 5) if ranks == 2 else [0])


def test_without_a_timeout_nobody_need_hear(cubin):
    assert [told[0] for told in on_ranks(calls_of, [(cubin, 0)] * 2)] == [["call"]] * 2
