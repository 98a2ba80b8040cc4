"""The order in which a call's tasks run: the built-in order, or that of a profile, which is given with the context or
was stored by `flashmoe tune`."""

from __future__ import annotations

import logging

import flashmoe
import pytest
import torch
from fake_gpu import SIZES, E, H, I, K, arguments, launched
from fake_group import put_by
from flashmoe.cli import bench
from flashmoe.tuning import profiles

ALWAYS_HELD = 2**32 - 1


# With short tasks, 4 tasks per cluster are published ahead, otherwise 1. With narrow experts the link is slower than
# GEMM1, so GEMM1 begins early, with two lists, and half of the experts wait for other ranks' packets. With wide experts
# the link keeps up, so GEMM1 follows all of GEMM0, with one list, and no expert waits.
@pytest.mark.parametrize(
    ("hidden", "inner", "order"),
    [
        (H, I, [132, 4 * 66, 2, 2, 16]),
        (H, 1072, [ALWAYS_HELD, 4 * 66, 1, 1, 16]),
        (2048, 2048, [ALWAYS_HELD, 66, 1, 1, 16]),
    ],
)
def test_order_of_several_ranks(cubin, hidden, inner, order):
    changes = {"hidden": hidden, "intermediate": inner, "return_mode": "direct"}
    for seen in put_by(2, changes, cubin=cubin):
        assert seen.launch["link_clusters"] == 0  # only the reduced return has clusters that stop early
        names = ("gemm1_lag", "window", "gemm1_lists", "own_first", "senders")
        assert [seen.launch[name] for name in names] == order


# At most 65 clusters stop early, because at least one of the 66 must go on to the end.
@pytest.mark.parametrize(("asked", "made"), [({}, 4), ({"link_clusters": 0}, 0), ({"link_clusters": 200}, 65)])
def test_clusters_that_stop_early(cubin, asked, made):
    for seen in put_by(2, {"return_mode": "reduced", "profile": asked}, cubin=cubin):
        assert seen.launch["link_clusters"] == made


def test_profiles():
    with pytest.raises(flashmoe.InvalidArgument, match=r"profile: expected names among gemm1_lag, .* got \['lag'\]"):
        flashmoe.Context(engine="cuda", profile={"lag": 1}, **SIZES)
    with pytest.raises(flashmoe.InvalidArgument, match=r"profile\[raster\]: expected an integer in \[1, 32\], got 33"):
        flashmoe.Context(engine="cuda", profile={"raster": 33}, **SIZES)
    profile = {"gemm1_lag": 7, "raster": 3, "window": 9, "gemm1_lists": 2, "own_first": 3, "senders": 2}
    profile["link_clusters"] = 8
    with flashmoe.Context(engine="cuda", profile=profile, **SIZES) as made:
        flashmoe.moe(made, **arguments())
    # A rank alone sends and returns nothing, so it has no senders, and no clusters that stop early.
    assert [launched()[name] for name in profile] == [7, 3, 9, 2, 3, 0, 0]


def store(profile, **changes):
    """Stores a profile as `flashmoe tune` does, for contexts of SIZES on the fake GPU."""
    sizes = {"hidden": H, "intermediate": I, "experts": E, "top_k": K, "tokens": 4096, **changes}
    setting = profiles.Setting(device="Fake", ranks=1, dtype="bfloat16", **sizes)
    profiles.store(profiles.Record(setting, "swiglu", profile, 1.0, 2.0))


def order_of(**changes):
    """The profile, and a call's order of tasks, in a context with these parameters besides SIZES."""
    with flashmoe.Context(engine="cuda", **{**SIZES, **changes}) as made:
        flashmoe.moe(made, **arguments())
        return made.profile, [launched()[name] for name in ("gemm1_lag", "raster", "window")]


BUILT_IN = [ALWAYS_HELD, 16, 528]


def test_stored_profiles():
    assert order_of() == ({}, BUILT_IN)
    store({"gemm1_lag": 7, "raster": 4, "return_mode": "direct"})
    stored = ({"gemm1_lag": 7, "raster": 4}, [7, 4, 528])
    assert order_of() == order_of(device=0) == stored
    assert order_of(max_tokens=500) == stored  # that of the nearest number of tokens
    assert order_of(profile={}) == ({}, BUILT_IN)
    assert order_of(profile={"window": 9}) == ({"window": 9}, [ALWAYS_HELD, 16, 9])
    assert order_of(dtype="float32") == order_of(experts=E + 1) == ({}, BUILT_IN)
    store({}, tokens=512)
    assert order_of(max_tokens=500) == ({}, BUILT_IN)


@pytest.mark.parametrize(
    ("profile", "reason"),
    [
        ({"raster": 33}, "profile[raster]: expected an integer in [1, 32], got 33"),
        ({"colour": 1}, "profile: expected names among gemm1_lag, "),
        ({"return_mode": "both"}, "return_mode: expected one of direct"),
        ({"return_mode": "reduced"}, "return_mode: expected 'direct' or 'auto' with one GPU"),
        (None, "profiles: cannot read "),
    ],
)
def test_a_stored_profile_that_cannot_be_used(caplog, monkeypatch, profile, reason):
    """Contexts are made all the same. Only the first one warns, and says why the order is the built-in one."""
    monkeypatch.setattr(profiles, "_noticed", set())
    if profile is None:
        profiles.path().write_text("{")
    else:
        store(profile)
    for _ in range(2):
        assert order_of() == ({}, BUILT_IN)
    ((name, level, message),) = caplog.record_tuples
    assert (name, level) == ("flashmoe", logging.WARNING)
    assert message.startswith("profile: what is stored is not used: ") and reason in message


def test_candidates_take_turns(monkeypatch):
    """`flashmoe tune` times its candidates in turn. Each call has its candidate's profile, whatever is stored."""
    marked = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            marked.append(launched()["raster"])
            self.number = len(marked)

        def elapsed_time(self, end):
            return float(end.number - self.number)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(bench, "_random_layer", lambda setting, activation, rank: arguments())
    store({"raster": 2})
    setting = profiles.Setting("Fake", 1, "bfloat16", H, I, E, K, 100)
    candidates = [{}, {"raster": 4, "return_mode": "direct"}]
    times = bench.time_candidates(0, 1, "group", setting, "swiglu", candidates)
    assert times == [[1.0] * bench.ROUNDS * bench.CALLS] * 2
    marks = bench.CALLS + 1
    assert marked == ([16] * marks + [4] * marks) * bench.ROUNDS
