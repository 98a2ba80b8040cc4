"""Contexts on one GPU: their properties, and the settings that they refuse."""

from __future__ import annotations

import flashmoe
import pytest
from fake_gpu import SIZES, E, I, arguments, driver, launched, prepared


def test_context(ctx):
    assert (ctx.engine, ctx.device, ctx.processors, ctx.return_mode) == ("cuda", 0, 132, "direct")
    assert ctx.heap_bytes > 0 and ctx.workspace_bytes > 0
    assert flashmoe.Context(device=1, **SIZES).engine == "cuda"
    assert flashmoe.Context(**SIZES).engine == "cpu"


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"engine": "tpu"}, flashmoe.InvalidArgument, "engine: expected one of cpu, cuda, got 'tpu'"),
        ({"engine": "cpu", "device": 0}, flashmoe.InvalidArgument, "device: expected none"),
        ({"device": 4}, flashmoe.InvalidArgument, "device: expected one of the 4 that the driver shows, got 4"),
        ({"device": -1}, flashmoe.InvalidArgument, "device: expected an integer"),
        ({"ranks": 33, "name": "g"}, flashmoe.InvalidArgument, "ranks: expected at most 32 with the CUDA engine"),
        ({"return_mode": "reduced"}, flashmoe.InvalidArgument, "return_mode: expected 'direct' or 'auto' with one GPU"),
        ({"transport": "nvlink"}, flashmoe.InvalidArgument, "transport: expected one of auto, rdma, got 'nvlink'"),
        ({"transport": "rdma"}, flashmoe.InvalidArgument, "transport: expected 'auto' with one GPU, got 'rdma'"),
        (
            {"transport": "rdma", "engine": "cpu", "ranks": 2, "name": "g"},
            flashmoe.InvalidArgument,
            "transport: expected 'auto' with the CPU engine, got 'rdma'",
        ),
        (
            {"transport": "rdma", "return_mode": "direct", "ranks": 2, "name": "g"},
            flashmoe.InvalidArgument,
            "return_mode: expected 'reduced' or 'auto' with transport 'rdma', got 'direct'",
        ),
        (
            {"processors": 133},
            flashmoe.InvalidArgument,
            r"processors: expected an even number from 2 \(for R=1 and El=16\) to 132, .* got 133",
        ),
        (
            {"processors": 2, "experts": 17},
            flashmoe.InvalidArgument,
            r"processors: expected an even number from 4 \(for R=1 and El=17\)",
        ),
        ({"processors": 5}, flashmoe.InvalidArgument, r"processors: expected an even number .* got 5"),
        (
            {"max_tokens": 65536, "top_k": 16, "hidden": 20480, "dtype": "float32"},
            flashmoe.InvalidArgument,
            "max_tokens: expected rows of results to sum within 64 GiB, got 85899345920 bytes for R=1, T=65536, K=16",
        ),
        (
            {"ranks": 8, "name": "g", "max_tokens": 65536, "top_k": 1, "hidden": 40960},
            flashmoe.InvalidArgument,
            "max_tokens: expected rows of other ranks' tokens within 32 GiB, got 37580963840 bytes for R=8, T=65536",
        ),
        (
            {
                "ranks": 2,
                "name": "g",
                "max_tokens": 65536,
                "top_k": 32,
                "experts": 64,
                "hidden": 8256,
                "dtype": "float32",
                "return_mode": "reduced",
            },
            flashmoe.InvalidArgument,
            "max_tokens: expected rows of results to reduce within 64 GiB, got 69256347648 bytes for R=2, T=65536",
        ),
        ({"max_tokens": 65537}, flashmoe.InvalidArgument, "max_tokens: expected"),
        ({"experts": 1025}, flashmoe.InvalidArgument, "experts: expected"),
        ({"experts": 64, "top_k": 33}, flashmoe.InvalidArgument, "top_k: expected"),
    ],
)
def test_contexts_that_cannot_be(changes, error, message):
    with pytest.raises(error, match=message):
        flashmoe.Context(**{"engine": "cuda", **SIZES, **changes})


def test_a_gpu_of_another_generation():
    driver.fake_compute_capability(10)
    with pytest.raises(flashmoe.InvalidArgument, match=r"compute capability 9\.0 .*got 10\.0 \(Fake\)"):
        flashmoe.Context(engine="cuda", **SIZES)


def test_a_context_with_a_capacity_factor():
    with flashmoe.Context(engine="cuda", **SIZES, capacity_factor=0.5) as bounded:
        flashmoe.moe(bounded, **arguments(), capacity_factor=0.5)
        assert launched()["capacity"] == 13  # ceil(0.5 * 100 * 4 / 16)
        # Of 4096 tokens an expert takes at most 512 rows, so 16 experts have 32 full tiles of 256 rows, and a partial
        # tile each.
        assert launched()["intermediate_rows"]["dims"] == [I, (32 + E) * 256]
        for factor in (None, 0.6):
            with pytest.raises(flashmoe.InvalidArgument, match=r"capacity_factor: expected a number in \(0, 0\.5\]"):
                flashmoe.moe(bounded, **arguments(), capacity_factor=factor)
        assert len(prepared(bounded)) == 1


def test_closed(ctx):
    flashmoe.moe(ctx, **arguments())
    ctx.close()
    for use in (lambda: flashmoe.moe(ctx, **arguments()), ctx.synchronize, lambda: ctx.last_call):
        with pytest.raises(flashmoe.FlashMoEError, match="context: expected an open one, got one that is closed"):
            use()
