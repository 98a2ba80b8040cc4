"""Ranks of one machine that are told that they are on several machines."""

from __future__ import annotations

import pytest
from fake_gpu import SIZES
from fake_group import put_by
from flashmoe import jit
from flashmoe.contexts.memory import plan_memory


@pytest.mark.parametrize("mode", ["direct", "reduced"])
def test_ranks_that_are_told_to_be_of_several_machines(cubin, mode):
    spread = (0, 0, 1)
    plan = plan_memory(engine="cuda", ranks=3, machines=spread, return_mode=mode, **SIZES)
    plain = plan_memory(engine="cuda", ranks=3, return_mode=mode, **SIZES)
    assert plan.heap_bytes > plain.heap_bytes and plan.workspace_bytes == plain.workspace_bytes
    told = put_by(3, {"machines": spread, "return_mode": mode}, cubin=cubin)
    for rank, seen in enumerate(told):
        assert (seen.heap_bytes, seen.workspace_bytes) == (plan.heap_bytes, plan.workspace_bytes)
        assert seen.variants == [jit.Variant("bfloat16", "swiglu", machines=True)]
        sources = {0: [2], 1: [], 2: [0, 1]}[rank]
        assert seen.launch["machines"] == {
            "of": [0, 0, 1],
            "place": [0, 1, 0],
            "ranks": [0, 1, 2],
            "first": [0, 2, 3],
            "sources": sources,
            "passed": [0, 0] * len(sources),
            "counted": 0,
            "sums": int(mode == "reduced"),
            "behind": plain.heap_bytes - 3 * 512,  # less reasons of refused calls: several machines have none
        }
    for seen in put_by(3, {"machines": (4, 4, 4)}, cubin=cubin):  # all ranks on one machine
        assert seen.variants == [jit.Variant("bfloat16", "swiglu")] and seen.launch["machines"] is None


def test_machines_that_cannot_be(cubin):
    reduced = {"return_mode": "reduced"}
    first, *_ = put_by(3, *({"machines": each} for each in ((0, 0, 1), (0, 1, 1), (0, 1, 1))), cubin=cubin)
    assert first.startswith("GroupError: ") and "which ranks share a machine" in first
    for told in put_by(2, {**reduced, "machines": (0, 1), "transport": "rdma"}, cubin=cubin):
        assert told == "InvalidArgument: machines: expected one with transport 'rdma', got (0, 1)"
    for told in put_by(2, {"machines": (0, 1, 1)}, cubin=cubin):
        assert told == "InvalidArgument: machines: expected one for each of 2 ranks, got 3"
    unmapped = {"FAKE_NVSHMEM_UNMAPPED": "1"}
    for told in put_by(3, {**reduced, "machines": (0, 0, 1)}, cubin=cubin, environment=unmapped):
        assert told.startswith("GroupError: machines: expected mapped memory among all ranks with (0, 0, 1)")
