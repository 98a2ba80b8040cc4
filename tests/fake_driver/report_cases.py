"""Reports of calls, and their traces."""

from __future__ import annotations

import time

import flashmoe
import numpy as np
import pytest
from fake_gpu import SIZES, E, H, I, K, arguments, launched, of_both, on_gpu
from fake_group import on_ranks, pretend
from flashmoe.placement import local_experts, owners
from flashmoe.trace import PHASES


def test_no_tokens(ctx):
    before = launched()
    y = flashmoe.moe(ctx, **arguments(0))
    assert y.shape == (0, H) and launched() == before
    report = ctx.last_call
    assert (report.tokens, report.tiles, report.topk_ids.shape) == (0, 0, (0, K))


def test_report(ctx):
    assert ctx.last_call is None
    with flashmoe.Context(engine="cuda", **{**SIZES, "top_k": 8}) as ctx:  # 4 of the 8 places of a token are used
        flashmoe.moe(ctx, **arguments(1000))
        report = ctx.last_call
    assert report is ctx.last_call  # the device is asked once
    np.testing.assert_array_equal(report.topk_ids, (np.arange(1000)[:, None] + np.arange(K)) % E)
    np.testing.assert_array_equal(report.topk_weights, np.tile(1 / np.arange(1, K + 1, dtype=np.float32), (1000, 1)))
    # 250 rows of each expert, so one tile; 1000 tokens in blocks of 8.
    assert (report.tiles, report.tile_rows, report.dropped) == (E, 4000, 0)
    assert report.tasks == {"gate": 125, "gemm0": E, "gemm1": E, "reduce": 0, "combine": 125}
    assert report.phase_ns == {} and report.idle_share == 0.0 and report.events == []
    assert flashmoe.CallReport.from_dict(report.to_dict()).tasks == report.tasks


def test_trace(ctx, device):
    flashmoe.moe(ctx, **arguments(), trace=True)
    assert set(device) == of_both(trace=True) and len(device) == 2
    for _ in range(2):  # the second call writes over the first one's events
        flashmoe.moe(ctx, **arguments(), trace=True)
        report = ctx.last_call
        assert len(report.events) == 132 * len(PHASES)
    assert report.events[0] == ("processor 0", "gate", 1000, 1100, 0, 0, 0, 2)
    assert report.events[len(PHASES) + 2] == ("processor 1", "gemm0", 2200, 2300, 1, 2, 0, 2)
    assert {event.actor for event in report.events if event.kind == "schedule"} == {"os"}
    assert report.wall_ns == 1000 * 131 + 3000 - 900
    assert report.phase_ns["gemm0"] == 132 * 100 and "epilogue" not in report.phase_ns
    assert report.phase_ns["dispatch"] == 132 * 200  # of which half is `send`
    assert report.phase_ns["idle"] == 132 * (report.wall_ns - 700)


def test_recorded_calls(ctx, device):
    """Each call's trace is read before the next call writes over it, and tells how far the device's clock is from the
    host's: a second here. Calls after the recording are not traced. A recording within a recording is refused."""
    args = arguments()
    traces = ctx.trace(lambda: [flashmoe.moe(ctx, **args) for _ in range(2)])
    assert set(device) == of_both(trace=True) and len(device) == 2
    for trace in traces:
        assert (trace.rank, trace.backward, trace.processors, trace.left_out) == (0, False, 132, {})
        assert (trace.start_ns, trace.end_ns, len(trace.events)) == (900, 134_000, 132 * len(PHASES))
        assert abs(trace.offset_ns + 10**9) < 10**8 and 0 < trace.error_ns < 10**8
    assert len(traces) == 2
    flashmoe.moe(ctx, **arguments())
    assert ctx.last_call.events == []
    with pytest.raises(flashmoe.InvalidArgument, match="expected one trace of a context at a time"):
        ctx.trace(lambda: ctx.trace(lambda: None))
    assert ctx.trace(lambda: flashmoe.moe(ctx, **arguments(0))) == []  # nothing is launched
    assert ctx.trace(lambda: None) == []


def account(rank, ranks, name, environment, settings, calls, placement, cubin):
    """Reports of `calls`, which has the tokens of each rank for each call. A call's report is read when all ranks have
    made the call."""
    pretend([rank], cubin, environment)
    folder = cubin.parent
    held = len(local_experts(placement, rank))
    local = {"gate_up_proj": on_gpu(held, 2 * I, H), "down_proj": on_gpu(held, H, I), "placement": placement}
    reports = []
    with flashmoe.Context(engine="cuda", device=rank, rank=rank, ranks=ranks, name=name, **settings) as made:
        for i, tokens in enumerate(calls):
            x, router = on_gpu(tokens[rank], H), on_gpu(E, H)
            flashmoe.moe(made, **arguments(x=x, router=router, **local))
            (folder / f"{i}-{rank}").touch()
            while len(list(folder.glob(f"{i}-*"))) < ranks:
                time.sleep(0.01)
            reports.append(made.last_call.to_dict())
    return reports


@pytest.mark.parametrize("mode", ["direct", "reduced"])
@pytest.mark.parametrize(
    "placement", [[0] * 6 + [1] * 5 + [2] * 5, [2, 0, 0, 1] * 4, [0, 1] * 8, [[2, 1], 0, [1, 0, 2], 2] * 4]
)
def test_reports_of_several_ranks(cubin, mode, placement):
    calls = [(2500, 1300, 901), (0, 40, 4096), (64, 64, 64)]
    settings = {"timeout": 20.0, **SIZES, "placement": placement, "return_mode": mode}
    told = on_ranks(account, [(settings, calls, placement, cubin)] * 3)
    owners_for = [np.array(owners(placement, p)) for p in range(3)]
    for i, tokens in enumerate(calls):
        ids = [(np.arange(n)[:, None] + np.arange(K)) % E for n in tokens]  # as the fake driver routes
        for rank, reports in enumerate(told):
            report, others = flashmoe.CallReport.from_dict(reports[i]), [q for q in range(3) if q != rank]
            np.testing.assert_array_equal(report.topk_ids, ids[rank])
            here = [owners_for[p][each] == rank for p, each in enumerate(ids)]
            mine = np.concatenate([each[where] for each, where in zip(ids, here, strict=True)])
            load = np.bincount(mine, minlength=E)
            tiles = int((-(-load // 256)).sum())
            assert (report.tiles, report.tile_rows) == (tiles, len(mine))
            assert (report.tasks["gemm0"], report.tasks["gemm1"]) == (tiles, tiles)  # of one column block each
            back = sum(int(here[p].sum() if mode == "direct" else here[p].any(axis=1).sum()) for p in others)
            assert report.return_rows_sent == back
            to = owners_for[rank][ids[rank]]
            sent = sum(int((to == q).any(axis=1).sum()) for q in others)
            assert report.rows_sent == sent
            pairs, packets = int((to != rank).sum()), 2 * report.tasks["gate"]
            assert report.bytes_sent == (sent + back) * H * 2 + pairs * 12 + packets * 8
