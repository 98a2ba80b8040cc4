"""The CUDA engine's host side on a driver that has no GPU: run by tests/test_cuda_host.py in a process of its own, with
driver.cpp in place of the NVIDIA driver. Tensors are in host memory and only say that they are not."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import logging
import multiprocessing
import os
import re
import signal
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import flashmoe
import numpy as np
import pytest
import torch
from flashmoe import _ffi, jit, launch, models
from flashmoe import context as contexts
from flashmoe import nvshmem as nvshmem_files
from flashmoe.arguments import Options, Tensors
from flashmoe.cli import bench, run, workload
from flashmoe.cli import device as cli_device
from flashmoe.engines import base, cuda
from flashmoe.launch import RankFailed, RankPool
from flashmoe.memory import PUBLISHED, plan_memory
from flashmoe.placement import hybrid, local_experts, owners
from flashmoe.trace import PHASES
from flashmoe.tuning import profiles

E, K, H, I = 16, 4, 256, 64
SIZES = {"max_tokens": 4096, "hidden": H, "intermediate": I, "experts": E, "top_k": K}

# NVSHMEM's state is a process's, so each group has processes of its own. A server that has imported what takes long
# forks them: a second and a half of each rank's time.
FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["torch", "pytest", "tvm_ffi", "flashmoe.cli"])

driver = ctypes.CDLL("libcuda.so.1")
driver.fake_last_launch.restype = ctypes.c_char_p
driver.fake_last_move.restype = ctypes.c_char_p
driver.fake_allocations.restype = driver.fake_allocated_bytes.restype = ctypes.c_size_t
driver.fake_memory.argtypes = [ctypes.c_size_t]
driver.fake_fault.argtypes = [ctypes.c_uint, ctypes.c_uint, ctypes.c_uint64, ctypes.c_uint64]


class OnGpu(torch.Tensor):
    """A tensor that claims to be on the GPU."""

    device = property(lambda self: torch.device("cuda", 0))


def prepared(ctx: flashmoe.Context) -> dict:
    """The layers that are known to the library."""
    return ctx._engine.layers


def on_gpu(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype).as_subclass(OnGpu)


@pytest.fixture(autouse=True)
def device(monkeypatch, tmp_path):
    """What the host side asks PyTorch and nvcc for, and a driver in its first state."""
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(b"a kernel")
    compiled = []
    monkeypatch.setattr(cuda, "current_stream", lambda device: 77)
    monkeypatch.setattr(jit, "kernel", lambda variant: compiled.append(variant) or cubin)
    monkeypatch.setattr(launch, "_SPAWN", FORKED)
    monkeypatch.setenv("FLASHMOE_PROFILES", str(tmp_path / "profiles.json"))
    yield compiled
    driver.fake_capture(0)
    driver.fake_memory(1 << 40)
    driver.fake_compute_capability(9)


@pytest.fixture
def ctx():
    with flashmoe.Context(engine="cuda", **SIZES) as context:
        yield context


def arguments(tokens: int = 100, dtype: torch.dtype = torch.bfloat16, **changes) -> dict:
    made = {
        "x": on_gpu(tokens, H, dtype=dtype),
        "gate_up_proj": on_gpu(E, 2 * I, H, dtype=dtype),
        "down_proj": on_gpu(E, H, I, dtype=dtype),
        "router": on_gpu(E, H, dtype=dtype),
        "top_k": K,
    }
    return {**made, **changes}


def given(tokens: int = 100, ids: torch.dtype = torch.int32, **changes) -> dict:
    routing = {"topk_ids": on_gpu(tokens, K, dtype=ids), "topk_weights": on_gpu(tokens, K, dtype=torch.float32)}
    return {**arguments(tokens), "router": None, "top_k": None, **routing, **changes}


def sparse(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16).to_sparse()


def launched() -> dict:
    return json.loads(driver.fake_last_launch())


def test_context(ctx):
    assert (ctx.engine, ctx.device, ctx.processors, ctx.return_mode) == ("cuda", 0, 132, "direct")
    assert ctx.heap_bytes > 0 and ctx.workspace_bytes > 0
    assert flashmoe.Context(device=1, **SIZES).engine == "cuda"
    assert flashmoe.Context(**SIZES).engine == "cpu"


def test_memory_is_given_back():
    before = driver.fake_allocations()
    context = flashmoe.Context(engine="cuda", **SIZES)
    flashmoe.moe(context, **arguments())
    assert driver.fake_allocations() > before
    gc.disable()  # nothing may hold the context in a cycle
    try:
        del context
        assert driver.fake_allocations() == before
    finally:
        gc.enable()


def test_an_interrupted_context_gives_its_memory_back(monkeypatch):
    """One that the library has made, and Python not yet noted down."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    before = driver.fake_allocations()
    monkeypatch.setattr(base.weakref, "finalize", interrupted)
    try:
        flashmoe.Context(engine="cuda", **SIZES)
    except KeyboardInterrupt:
        pass
    else:
        pytest.fail("expected the interrupt")
    monkeypatch.undo()
    gc.collect()
    assert driver.fake_allocations() == before


POINTER = 8
"""Bytes of device memory that a context takes for each rank beside what its plan counts: where its heap is."""


def sizes_of(shape: models.ModelShape) -> dict:
    """The sizes of a context for the shape, at 8192 tokens a rank."""
    names = ("hidden", "intermediate", "experts", "top_k")
    return {"max_tokens": 8192, **{name: getattr(shape, name) for name in names}}


@pytest.mark.parametrize("shape", models.MODELS, ids=lambda shape: shape.name)
@pytest.mark.parametrize("changes", [{}, {"dtype": "float32", "processors": 64}, {"capacity_factor": 1.0}])
def test_memory_is_what_the_plan_says(shape, changes):
    before = driver.fake_allocated_bytes()
    with flashmoe.Context(engine="cuda", **sizes_of(shape), **changes) as context:
        plan = plan_memory(engine="cuda", ranks=1, **sizes_of(shape), **changes)
        assert (context.heap_bytes, context.workspace_bytes) == (plan.heap_bytes, plan.workspace_bytes)
        asked = driver.fake_allocated_bytes() - before
    assert asked == plan.heap_bytes + plan.workspace_bytes + POINTER


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


def test_too_little_memory():
    driver.fake_memory(1000)
    before = driver.fake_allocations()
    with pytest.raises(flashmoe.HeapError, match=r"workspace: expected .* got 1000 free of 1000"):
        flashmoe.Context(engine="cuda", **SIZES)
    assert driver.fake_allocations() == before


def test_the_launch(ctx, device):
    args = arguments(100, router_bias=on_gpu(E), gate_up_bias=on_gpu(E, 2 * I), down_bias=on_gpu(E, H))
    y = flashmoe.moe(ctx, **args, capacity_factor=1.5, renormalize=False)
    assert (y.shape, y.dtype) == ((100, H), torch.bfloat16)
    assert device == [jit.Variant("bfloat16", "swiglu")]
    seen = launched()
    expected = {
        "grid": 132,
        "few": 0,
        "geometry": 1,
        "stream": 77,
        "cooperative": 1,
        "tokens": 100,
        "hidden": H,
        "intermediate": I,
        "experts": E,
        "top_k": K,
        "local_experts": E,
        "block": 8,
        "capacity": 38,  # ceil(1.5 * 100 * 4 / 16)
        "tile_rows": 256,
        "gemm0_columns": 1,
        "gemm1_columns": 1,
        "window": 528,
        "raster": 16,
        "epoch": 0,
        "token_row_bytes": 2 * H,
        "intermediate_row_bytes": 2 * I,
        "return_row_bytes": 2 * H,
        "own_heap": 1,
        "x": args["x"].data_ptr(),
        "x_row_bytes": 2 * H,
        "out": y.data_ptr(),
        "topk_ids": 0,
        "topk_weights": 0,
        "topk_ids_64": 0,
        "renormalize": 0,
        "gate_up_bias": args["gate_up_bias"].data_ptr(),
        "down_bias": args["down_bias"].data_ptr(),
        "router_bias": args["router_bias"].data_ptr(),
        "traced": 0,
        "groups": [0, 1],
        "owner": [0] * E,
        "by_owner": list(range(E)),
        "owner_base": [0, E],
    }
    assert seen["router_rows"][::2] == [args["router"].data_ptr(), H * 2]
    assert {name: seen[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("dtype", "code", "span"), [(torch.bfloat16, 9, 64), (torch.float16, 6, 64), (torch.float32, 7, 32)]
)
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_tensor_maps(device, dtype, code, span, activation):
    rows = 2 * I if activation == "swiglu" else I
    halves = rows // I
    args = arguments(100, dtype, gate_up_proj=on_gpu(E, rows, H, dtype=dtype), activation=activation)
    size = args["x"].element_size()
    with flashmoe.Context(engine="cuda", **{**SIZES, "dtype": "float32"}) as ctx:  # wider than the call
        flashmoe.moe(ctx, **args)
    assert device == [jit.Variant(str(dtype).removeprefix("torch."), activation)]
    seen = launched()
    row = H * size
    assert seen["gate_up"] == {
        "base": args["gate_up_proj"].data_ptr(),
        "type": code,
        "dims": [H, 8, halves, I // 8, E],
        "strides": [row, I * row, 8 * row, rows * row],
        "box": [span, 8, halves, 16 // halves, 1],
    }
    assert seen["down"] == {
        "base": args["down_proj"].data_ptr(),
        "type": code,
        "dims": [I, 8, 1, H // 8, E],
        "strides": [I * size, H * I * size, 8 * I * size, H * I * size],
        "box": [span, 8, 1, 16, 1],
    }
    assert seen["router"]["dims"] == [H, E, 1, 1, 1] and seen["router"]["box"] == [span, 32, 1, 1, 1]
    assert seen["router"]["base"] == args["router"].data_ptr() and seen["router"]["strides"][0] == row
    assert seen["intermediate_rows"]["dims"][0] == I and seen["intermediate_rows"]["dims"][1] % 256 == 0
    assert seen["intermediate_rows"]["strides"] == [I * 4] and seen["intermediate_rows"]["box"] == [span, 32]
    assert seen["token_rows"] == {
        "base": args["x"].data_ptr(),
        "type": code,
        "dims": [H, 100],
        "strides": [row],
        "box": [span, 32],
    }


@pytest.mark.parametrize(("dtype", "code"), [(torch.bfloat16, 9), (torch.float16, 6)])
@pytest.mark.parametrize(
    ("options", "columns", "halves"),
    [
        ({"activation": "relu"}, I, 1),
        ({"activation": "swiglu"}, I, 2),
        ({"activation": "swiglu", "interleaved": True}, 2 * I, 1),
    ],
)
def test_tensor_maps_of_transposed_weights(device, dtype, code, options, columns, halves):
    wide = columns * halves
    gate_up = on_gpu(E, H + 1, wide + 8, dtype=dtype)[:, :H, :wide]
    args = arguments(9, dtype, gate_up_proj=gate_up, down_proj=on_gpu(E, I, H, dtype=dtype))
    with flashmoe.Context(engine="cuda", **{**SIZES, "dtype": "float32"}) as ctx:  # wider than the call
        flashmoe.moe(ctx, **args, transposed=True, **options)
    name = str(dtype).removeprefix("torch.")
    assert device == [jit.Variant(name, options["activation"], transposed=True)]
    seen, row = launched(), 2 * (wide + 8)
    assert seen["gate_up"] == {
        "base": gate_up.data_ptr(),
        "type": code,
        "dims": [columns, H, halves, 1, E],
        "strides": [row, 2 * columns, H * row, (H + 1) * row],
        "box": [64, 64, 1, 1, 1],
    }
    assert seen["down"] == {
        "base": args["down_proj"].data_ptr(),
        "type": code,
        "dims": [H, I, 1, 1, E],
        "strides": [2 * H, 2 * H, I * 2 * H, I * 2 * H],
        "box": [64, 64, 1, 1, 1],
    }


def test_few_tokens_of_a_transposed_layer_go_the_general_way(ctx):
    weights = {"gate_up_proj": on_gpu(E, H, 2 * I), "down_proj": on_gpu(E, I, H), "transposed": True}
    for tokens in (1, 8, 9):
        flashmoe.moe(ctx, **arguments(tokens, **weights))
        assert (launched()["few"], launched()["geometry"]) == (0, 1)
        assert launched()["token_rows"]["dims"] == [H, tokens]


@pytest.mark.parametrize("exact", [False, True])
def test_transposed_float32_is_refused(exact):
    weights = {"gate_up_proj": (E, H, 2 * I), "down_proj": (E, I, H)}
    made = {name: on_gpu(*shape, dtype=torch.float32) for name, shape in weights.items()}
    expected = "transposed: expected bfloat16 or float16 weights with it on the CUDA engine, got float32"
    with (
        flashmoe.Context(engine="cuda", **{**SIZES, "dtype": "float32"}) as wide,
        pytest.raises(flashmoe.InvalidArgument, match=expected),
    ):
        flashmoe.moe(wide, **arguments(dtype=torch.float32, **made), transposed=True, exact=exact)


@pytest.mark.parametrize("axis", [1, 2])
def test_a_transposed_matrix_whose_rows_begin_anywhere_is_refused(ctx, axis):
    wide = {"gate_up_proj": [E, H, 2 * I], "down_proj": [E, I, H]}
    for name, shape in wide.items():
        larger = [*shape]
        larger[axis] += 1
        part = on_gpu(*larger)[:, : shape[1], : shape[2]]
        matrices = {each: on_gpu(*sizes) for each, sizes in wide.items()} | {name: part}
        if axis == 1:  # further rows do no harm
            flashmoe.moe(ctx, **arguments(**matrices), transposed=True)
            continue
        with pytest.raises(flashmoe.InvalidArgument, match=rf"^{name}: expected rows that begin at multiples of 16"):
            flashmoe.moe(ctx, **arguments(**matrices), transposed=True)


F8 = torch.float8_e4m3fn
FP8_SIZES = {**SIZES, "weight_dtype": "float8_e4m3fn"}


def in_fp8(tokens: int = 100, scales: str = "block", **changes) -> dict:
    """H = 256 and I = 64: 2 by 2 blocks of gate_up_proj, one row of them the gates', and 2 by 1 of down_proj."""
    up, down = {"block": ((2, 2), (2, 1)), "row": ((2 * I, 1), (H, 1)), "tensor": ((1, 1), (1, 1))}[scales]
    made = {
        "gate_up_proj": on_gpu(E, 2 * I, H, dtype=F8),
        "down_proj": on_gpu(E, H, I, dtype=F8),
        "gate_up_scale": on_gpu(E, *up, dtype=torch.float32),
        "down_scale": on_gpu(E, *down, dtype=torch.float32),
    }
    return arguments(tokens, **made | changes)


@pytest.mark.parametrize(
    ("scales", "of_up", "of_down"),
    [
        ("block", [4, 2, 1, 1, 2], [2, 1, 1, 2, 2]),
        ("row", [2 * I, 0, 0, 0, 0], [H, 0, 0, 0, 0]),
        ("tensor", [1, 0, 0, 0, 0], [1, 0, 0, 0, 0]),
    ],
)
def test_experts_in_fp8(device, scales, of_up, of_down):
    args = in_fp8(100, scales)
    with flashmoe.Context(engine="cuda", **FP8_SIZES) as ctx:
        flashmoe.moe(ctx, **args | {"x": args["x"][:3]})
        assert (launched()["few"], launched()["geometry"], launched()["token_rows"]) == (1, 1, None)
        y = flashmoe.moe(ctx, **args)
    assert y.dtype == torch.bfloat16
    assert device == [jit.Variant("bfloat16", "swiglu", quantised=True)]
    seen = launched()
    assert (seen["few"], seen["scales_by_row"], seen["x_scale"]) == (0, scales == "row", 0)
    assert (seen["token_row_bytes"], seen["return_row_bytes"]) == (H + 16, 2 * H)
    assert seen["gate_up"] == {
        "base": args["gate_up_proj"].data_ptr(),
        "type": 0,
        "dims": [H, 8, 2, I // 8, E],
        "strides": [H, I * H, 8 * H, 2 * I * H],
        "box": [128, 8, 2, 8, 1],
    }
    assert (seen["down"]["type"], seen["down"]["box"]) == (0, [128, 8, 1, 16, 1])
    assert (seen["router"]["type"], seen["router"]["box"]) == (9, [64, 32, 1, 1, 1])
    assert (seen["token_rows"]["type"], seen["token_rows"]["dims"]) == (9, [H, 100])
    rows = seen["intermediate_rows"]
    assert (rows["type"], rows["dims"][:2], rows["box"]) == (0, [I, 256], [128, 32, 1])
    assert rows["strides"] == [I, 256 * (I + 16)]
    assert seen["gate_up_scale"] == [args["gate_up_scale"].data_ptr(), *of_up]
    assert seen["down_scale"] == [args["down_scale"].data_ptr(), *of_down]


@pytest.mark.parametrize(
    ("options", "of_up"),
    [
        ({}, [2, 2, 1, 1, 6]),  # gates of three slices, then their ups
        ({"interleaved": True}, [4, 2, 1, 2, 12]),
        ({"activation": "silu"}, [2, 2, 1, 1, 6]),
    ],
)
def test_slices_of_a_shared_expert_in_fp8(device, options, of_up):
    inner, shared = 128, 3
    halves = 1 if options else 2
    rows = inner if "activation" in options else 2 * inner
    blocks = shared * rows // halves // 128 * halves
    more = {
        "gate_up_proj": on_gpu(E, rows, H, dtype=F8),
        "down_proj": on_gpu(E, H, inner, dtype=F8),
        "gate_up_scale": on_gpu(E, rows // 128, 2, dtype=torch.float32),
        "down_scale": on_gpu(E, 2, 1, dtype=torch.float32),
        "shared_gate_up": on_gpu(shared * rows, H, dtype=F8),
        "shared_down": on_gpu(H, shared * inner, dtype=F8),
        "shared_gate_up_scale": on_gpu(blocks, 2, dtype=torch.float32),
        "shared_down_scale": on_gpu(2, shared, dtype=torch.float32),
    }
    sizes = {**FP8_SIZES, "intermediate": inner, "shared_intermediate": shared * inner}
    with flashmoe.Context(engine="cuda", **sizes) as ctx:
        flashmoe.moe(ctx, **in_fp8(**more), **options)
    seen = launched()
    assert seen["shared_gate_up_scale"] == [more["shared_gate_up_scale"].data_ptr(), *of_up]
    assert seen["shared_down_scale"] == [more["shared_down_scale"].data_ptr(), 2 * shared, shared, 1, 2, 2 * shared]


def test_x_in_fp8(device):
    x, scale = on_gpu(100, H, dtype=F8), on_gpu(100, 2, dtype=torch.float32)
    routing = {name: given()[name] for name in ("topk_ids", "topk_weights", "router", "top_k")}
    with flashmoe.Context(engine="cuda", **FP8_SIZES) as ctx:
        y = flashmoe.moe(ctx, **in_fp8(**routing, x=x, x_scale=scale))
        assert (y.dtype, y.shape) == (torch.bfloat16, (100, H))
        seen = launched()
        assert (seen["x"], seen["x_row_bytes"], seen["x_scale"]) == (x.data_ptr(), H, scale.data_ptr())
        wide = on_gpu(100, 4, dtype=torch.float32)[:, ::2]
        with pytest.raises(flashmoe.InvalidArgument, match="x_scale: expected"):
            flashmoe.moe(ctx, **in_fp8(**routing, x=x, x_scale=wide))


def test_what_there_is_no_kernel_of_beside_fp8_is_refused(ctx):
    expected = (
        r"^CUDA engine: x: expected bfloat16, float16 or float8_e4m3fn with weights of float8_e4m3fn, got float32$"
    )
    with pytest.raises(flashmoe.InvalidArgument, match=expected):
        flashmoe.Context(engine="cuda", **FP8_SIZES | {"dtype": "float32"})
    by_puts = {"ranks": 2, "rank": 0, "name": "fp8", "transport": "rdma"}
    with pytest.raises(
        flashmoe.InvalidArgument, match="transport: expected mapped memory with weights of float8_e4m3fn"
    ):
        flashmoe.Context(engine="cuda", **FP8_SIZES | by_puts)
    with pytest.raises(flashmoe.HeapError, match=r"gate_up_proj: expected .*, which the context's memory is made for"):
        flashmoe.moe(ctx, **in_fp8())
    with flashmoe.Context(engine="cuda", **FP8_SIZES | {"hidden": 264}) as odd:
        made = {"x": on_gpu(9, 264), "router": on_gpu(E, 264)}
        made |= {"gate_up_proj": on_gpu(E, 2 * I, 264, dtype=F8), "down_proj": on_gpu(E, 264, I, dtype=F8)}
        for name, blocks in (("gate_up_scale", (2, 3)), ("down_scale", (3, 1))):
            made[name] = on_gpu(E, *blocks, dtype=torch.float32)
        with pytest.raises(flashmoe.InvalidArgument, match=r"x: expected H a multiple of 16 .*, got 264"):
            flashmoe.moe(odd, **in_fp8(9, **made))


MXFP4_SIZES = {**SIZES, "weight_dtype": "mxfp4"}


def in_mxfp4(tokens: int = 3, **changes) -> dict:
    made = {
        "gate_up_proj": on_gpu(E, 2 * I, H // 32, 16, dtype=torch.uint8),
        "down_proj": on_gpu(E, H, I // 32, 16, dtype=torch.uint8),
        "gate_up_scale": on_gpu(E, 2 * I, H // 32, dtype=torch.uint8),
        "down_scale": on_gpu(E, H, I // 32, dtype=torch.uint8),
    }
    return arguments(tokens, **made | changes)


def test_experts_in_mxfp4(device):
    """The copy engine sees bytes: half as many as a row has columns."""
    wide = on_gpu(E, 2 * I + 3, H // 32, 16, dtype=torch.uint8)[:, : 2 * I]
    args = in_mxfp4(gate_up_proj=wide)
    with flashmoe.Context(engine="cuda", **MXFP4_SIZES) as ctx:
        y = flashmoe.moe(ctx, **args)
    assert (y.shape, y.dtype) == ((3, H), torch.bfloat16)
    assert device == [jit.Variant("bfloat16", "swiglu", mxfp4=True)]
    seen, row = launched(), H // 2
    assert (seen["few"], seen["geometry"], seen["token_rows"], seen["scales_by_row"]) == (1, 1, None, 0)
    assert (seen["token_row_bytes"], seen["intermediate_row_bytes"], seen["return_row_bytes"]) == (2 * H, 2 * I, 2 * H)
    assert seen["gate_up"] == {
        "base": wide.data_ptr(),
        "type": 0,
        "dims": [row, 8, 2, I // 8, E],
        "strides": [row, I * row, 8 * row, (2 * I + 3) * row],
        "box": [128, 8, 2, 8, 1],
    }
    assert seen["down"] == {
        "base": args["down_proj"].data_ptr(),
        "type": 0,
        "dims": [I // 2, 8, 1, H // 8, E],
        "strides": [I // 2, H * I // 2, 8 * I // 2, H * I // 2],
        "box": [128, 8, 1, 16, 1],
    }
    assert seen["gate_up_scale"] == [args["gate_up_scale"].data_ptr(), 2 * I * 8, 8, 1, I, I * 8]
    assert seen["down_scale"] == [args["down_scale"].data_ptr(), H * 2, 2, 1, H, H * 2]


@pytest.mark.parametrize(
    ("options", "of_up"),
    [
        ({}, [I * 8, 8, 1, I, 3 * I * 8]),  # gates of three slices, then their ups
        ({"activation": "clamped_swiglu", "interleaved": True}, [2 * I * 8, 8, 1, 2 * I, 6 * I * 8]),
    ],
)
def test_slices_of_a_shared_expert_in_mxfp4(device, options, of_up):
    shared = 3
    more = {
        "shared_gate_up": on_gpu(shared * 2 * I, H // 32, 16, dtype=torch.uint8),
        "shared_down": on_gpu(H, shared * I // 32, 16, dtype=torch.uint8),
        "shared_gate_up_scale": on_gpu(shared * 2 * I, H // 32, dtype=torch.uint8),
        "shared_down_scale": on_gpu(H, shared * I // 32, dtype=torch.uint8),
    }
    with flashmoe.Context(engine="cuda", **MXFP4_SIZES, shared_intermediate=shared * I) as ctx:
        flashmoe.moe(ctx, **in_mxfp4(**more), **options)
        with pytest.raises(flashmoe.InvalidArgument, match=r"^x: expected at most 8 tokens .*, got 9$"):
            flashmoe.moe(ctx, **in_mxfp4(9, **more), **options)
    seen, rows = launched(), shared * I // 32
    assert seen["shared_gate_up_scale"] == [more["shared_gate_up_scale"].data_ptr(), *of_up]
    assert seen["shared_down_scale"] == [more["shared_down_scale"].data_ptr(), H * rows, rows, 1, H, H * rows]


def test_what_there_is_no_kernel_of_beside_mxfp4_is_refused(ctx):
    with flashmoe.Context(engine="cuda", **MXFP4_SIZES) as made:
        flashmoe.moe(made, **in_mxfp4(64))  # 16 rows an expert
        for tokens in (65, 4096):
            expected = (
                "^x: expected at most 64 tokens with weights of mxfp4 on the CUDA engine, which has no kernel of more, "
                f"got {tokens}$"
            )
            with pytest.raises(flashmoe.InvalidArgument, match=expected):
                flashmoe.moe(made, **in_mxfp4(tokens))
        assert flashmoe.moe(made, **in_mxfp4(0)).shape == (0, H)
        apart = on_gpu(E, H, 2 * I // 32, 16, dtype=torch.uint8)[:, :, ::2]
        with pytest.raises(flashmoe.InvalidArgument, match=r"^down_proj: expected rows without gaps"):
            flashmoe.moe(made, **in_mxfp4(down_proj=apart))
    with pytest.raises(
        flashmoe.InvalidArgument,
        match=r"^CUDA engine: x: expected bfloat16, float16 with weights of mxfp4, got float32$",
    ):
        flashmoe.Context(engine="cuda", **MXFP4_SIZES | {"dtype": "float32"})
    with pytest.raises(
        flashmoe.InvalidArgument, match=r"^CUDA engine: ranks: expected 1 with weights of mxfp4, got 2$"
    ):
        flashmoe.Context(engine="cuda", **MXFP4_SIZES, ranks=2, rank=0, name="mxfp4")
    with pytest.raises(flashmoe.HeapError, match=r"gate_up_proj: expected .*, which the context's memory is made for"):
        flashmoe.moe(ctx, **in_mxfp4())


@pytest.mark.parametrize(("experts", "rows"), [(32, 32), (33, 64), (64, 64), (65, 128)])
def test_the_routers_box(experts, rows):
    """Few experts come by small boxes, so that the gate's stages hold more of the tokens."""
    weights = {
        "gate_up_proj": on_gpu(experts, 2 * I, H),
        "down_proj": on_gpu(experts, H, I),
        "router": on_gpu(experts, H),
    }
    with flashmoe.Context(engine="cuda", **{**SIZES, "experts": experts}) as ctx:
        flashmoe.moe(ctx, **arguments(100, **weights))
    seen = launched()["router"]
    assert seen["dims"] == [H, experts, 1, 1, 1] and seen["box"] == [64, rows, 1, 1, 1]


def test_strided_tensors(ctx):
    x = on_gpu(100, 3 * H)[:, H : 2 * H]
    gate_up = on_gpu(E, 2 * I + 8, H + 16)[:, : 2 * I, :H]
    down = on_gpu(2 * E, H, I)[::2]
    router = on_gpu(E, H + 8)[:, 8:]
    y = flashmoe.moe(ctx, x, gate_up, down, router=router, top_k=K)
    assert y.is_contiguous()
    seen = launched()
    assert (seen["x"], seen["x_row_bytes"]) == (x.data_ptr(), 6 * H)
    assert (seen["token_rows"]["base"], seen["token_rows"]["strides"]) == (x.data_ptr(), [6 * H])
    row = 2 * (H + 16)
    assert seen["gate_up"]["strides"] == [row, I * row, 8 * row, (2 * I + 8) * row]
    assert seen["down"]["strides"][3] == 2 * H * I * 2
    assert (seen["router"]["base"], seen["router"]["strides"][0]) == (router.data_ptr(), 2 * (H + 8))


def test_given_routing(ctx):
    for ids in (torch.int32, torch.int64):
        args = given(ids=ids)
        flashmoe.moe(ctx, **args)
        seen = launched()
        assert seen["router"] is seen["token_rows"] is None and seen["topk_ids_64"] == (ids == torch.int64)
        assert seen["topk_ids"] == args["topk_ids"].data_ptr()
        assert seen["topk_weights"] == args["topk_weights"].data_ptr()


@pytest.mark.parametrize("tokens", [3, 100], ids=["few tokens", "many"])
def test_what_a_call_writes_to(ctx, tokens):
    """It changes from call to call, and is asked of that call alone."""
    args = arguments(tokens)
    for _ in range(2):
        load, logits = on_gpu(E, dtype=torch.int64), on_gpu(tokens, E, dtype=torch.float32)
        for asked in ({"load": load}, {"router_logits": logits}, {"load": load, "router_logits": logits}, {}):
            flashmoe.moe(ctx, **args, **asked)
            written = {name: asked[name].data_ptr() if name in asked else 0 for name in ("load", "router_logits")}
            seen = launched()
            assert {name: seen[name] for name in written} == written
    flashmoe.moe(ctx, **given(tokens), load=load)
    assert launched()["load"] == load.data_ptr()
    flashmoe.moe(ctx, **arguments(tokens + 1), router_logits=on_gpu(tokens + 1, E, dtype=torch.float32))


@pytest.mark.parametrize("tokens", [3, 100], ids=["few tokens", "many"])
@pytest.mark.parametrize(("activation", "columns"), [("swiglu", 2 * I), ("gelu", I)])
def test_what_a_call_keeps(ctx, device, tokens, activation, columns):
    """It is a tensor of the call's own; the kernel is another one, whatever the number of tokens is."""
    weights = {"gate_up_proj": on_gpu(E, columns, H), "down_proj": on_gpu(E, H, I), "router": on_gpu(E, H)}
    tensors, options = Tensors(x=on_gpu(tokens, H), **weights), Options(top_k=K, activation=activation)
    ctx._engine.call(tensors, options, False)
    assert launched()["kept"] == 0 and launched()["few"] == (tokens == 3)
    kept = [ctx._engine.call_and_keep(tensors, options)[1] for _ in range(2)]
    assert device == [jit.Variant("bfloat16", activation, keeps=keeps) for keeps in (False, True)]
    seen, (first, second) = launched(), kept
    rows = tokens * K
    assert first.shape == second.shape == (rows * (2 * columns + 4 + 4) + 4 * tokens * E,)
    assert first.data_ptr() != second.data_ptr()
    at = second.data_ptr()
    assert [seen["kept"], seen["kept_ids"], seen["kept_weights"]] == [
        at,
        at + 2 * rows * columns,
        at + 2 * rows * columns + 4 * rows,
    ]
    assert seen["few"] == 0 and seen["router_logits"] == at + rows * (2 * columns + 4 + 4)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("activation", "columns"), [("swiglu", 2 * I), ("gelu", I)])
def test_a_backward_pass(ctx, device, activation, columns, transposed):
    """It reads both matrices along the other axis, rows of dZ by two maps, and has memory for every tile."""
    tokens = 100
    step = -1 if transposed else 1
    tensors = Tensors(
        x=on_gpu(tokens, 2 * H)[:, :H],
        gate_up_proj=on_gpu(E, *(columns, H)[::step]),
        down_proj=on_gpu(E, *(H, I)[::step]),
        topk_ids=on_gpu(tokens, K, dtype=torch.int32),
        topk_weights=on_gpu(tokens, K, dtype=torch.float32),
    )
    options = Options(activation=activation, transposed=transposed)
    _, kept, counted = ctx._engine.call_and_keep(tensors, options)
    named = {name: each for name, each in tensors._asdict().items() if each is not None}
    names = ("x", "gate_up_proj", "down_proj", "topk_weights")
    wanted = {name: torch.empty(named[name].shape, dtype=named[name].dtype).as_subclass(OnGpu) for name in names}
    dy = on_gpu(tokens, H)
    ctx._engine.backward(kept, counted, options, named | {"y": dy}, wanted, False)
    assert device[-1] == jit.Variant("bfloat16", activation, transposed=transposed, backward=True)
    seen, of = launched(), launched()["backward"]
    tiles = tokens * K // 256 + E
    assert (seen["few"], seen["x"], seen["x_row_bytes"], of["x"], of["x_row_bytes"]) == (
        0, dy.data_ptr(), 2 * H, tensors.x.data_ptr(), 4 * H,
    )  # fmt: skip
    assert (of["kept"], of["kept_ids"]) == (kept.data_ptr(), kept.data_ptr() + 2 * tokens * K * columns)
    assert (of["gate_up"], of["down"]) == (wanted["gate_up_proj"].data_ptr(), wanted["down_proj"].data_ptr())
    assert (of["gate_up_bias"], of["down_bias"], of["z_columns"]) == (0, 0, columns)
    assert (seen["gemm0_columns"], seen["gemm1_columns"]) == (1, 1)
    assert seen["intermediate_row_bytes"] == 2 * columns
    first = of["z_gradients"]
    assert of["weighted"] == first + tiles * 256 * 2 * columns
    assert of["weight_parts"] == of["weighted"] + tiles * 256 * 2 * I
    rows, z, weighted = seen["intermediate_rows"], of["z_columns_map"], of["weighted_columns"]
    assert (rows["base"], rows["dims"], rows["box"]) == (first, [columns, tiles * 256], [64, 32])
    assert (z["base"], z["dims"], z["box"]) == (first, [columns, tiles * 256, 1, 1, 1], [64, 64, 1, 1, 1])
    assert (weighted["dims"], weighted["strides"][0]) == ([I, tiles * 256, 1, 1, 1], 2 * I)
    along = [64, 8, 1, 16, 1] if transposed else [64, 64, 1, 1, 1]
    assert seen["gate_up"]["box"] == seen["down"]["box"] == along
    by_rows = [columns, 8, 1, H // 8, E], [H, 8, 1, I // 8, E]
    by_columns = [H, columns, 1, 1, E], [I, H, 1, 1, E]
    assert (seen["gate_up"]["dims"], seen["down"]["dims"]) == (by_rows if transposed else by_columns)


def test_a_backward_pass_with_weights_on_the_input(ctx, device):
    """Its kernels are others. Rows of dZ without the weight have memory of their own where the bias has a gradient."""
    tokens = 100
    tensors = Tensors(
        x=on_gpu(tokens, H),
        gate_up_proj=on_gpu(E, 2 * I, H),
        down_proj=on_gpu(E, H, I),
        topk_ids=on_gpu(tokens, K, dtype=torch.int32),
        topk_weights=on_gpu(tokens, K, dtype=torch.float32),
    )
    options, rows = Options(weights_on_input=True), (tokens * K // 256 + E) * 256
    behind = []
    for biases in ({}, {"gate_up_bias": on_gpu(E, 2 * I)}):
        given = tensors._replace(**biases)
        _, kept, counted = ctx._engine.call_and_keep(given, options)
        named = {name: each for name, each in given._asdict().items() if each is not None} | {"y": on_gpu(tokens, H)}
        ctx._engine.backward(kept, counted, options, named, {"x": on_gpu(tokens, H)}, False)
        of = launched()["backward"]
        behind.append((launched()["options"][0], of["weight_parts"] - of["weighted"]))
    assert behind == [(0, rows * 2 * I), (rows * 6 * I, rows * 6 * I)]
    assert device[-2:] == [jit.Variant(keeps=True, on_input=True), jit.Variant(backward=True, on_input=True)]


@pytest.mark.parametrize(
    ("options", "dtype", "of_up", "up_strides", "of_down", "down_stride"),
    [
        # gates of three slices, then their ups, each along K
        ({}, torch.bfloat16, [H, I, 1, 1, 6], [H, I * H], [I, H, 1, 1, 3], I),
        ({}, torch.float32, [H, I, 1, 1, 6], [H, I * H], [I, H, 1, 1, 3], I),
        ({"interleaved": True}, torch.bfloat16, [H, 2 * I, 1, 1, 3], [H, 2 * I * H], [I, H, 1, 1, 3], I),
        ({"transposed": True}, torch.bfloat16, [I, 8, 1, H // 8, 6], [6 * I, I], [H, 8, 1, I // 8, 3], I * H),
    ],
    ids=["plain", "float32", "interleaved", "transposed"],
)
def test_a_backward_pass_of_a_shared_expert(device, options, dtype, of_up, up_strides, of_down, down_stride):
    """Three slices, each an expert to dA, and to dX its gates one, and its ups. Tiles of the later slices lie behind
    all others. Strides in elements."""
    tokens, shared, step, size = 300, 3, -1 if "transposed" in options else 1, dtype.itemsize
    tensors = Tensors(
        x=on_gpu(tokens, H, dtype=dtype),
        gate_up_proj=on_gpu(E, *(2 * I, H)[::step], dtype=dtype),
        down_proj=on_gpu(E, *(H, I)[::step], dtype=dtype),
        router=on_gpu(E, H, dtype=dtype),
        shared_gate_up=on_gpu(*(shared * 2 * I, H)[::step], dtype=dtype),
        shared_down=on_gpu(*(H, shared * I)[::step], dtype=dtype),
        shared_gate=on_gpu(1, H, dtype=dtype),
    )
    told, name = Options(top_k=K, **options), str(dtype).removeprefix("torch.")
    sizes = SIZES | {"shared_intermediate": shared * I, "dtype": name}
    with flashmoe.Context(engine="cuda", **sizes) as ctx:
        _, kept, counted = ctx._engine.call_and_keep(tensors, told)
        assert kept.numel() == tokens * ((K + shared) * 2 * I * size + 8 * (K + 1) + 4 * E)
        given = {name: each for name, each in tensors._asdict().items() if each is not None}
        given["y"] = on_gpu(tokens, H, dtype=dtype)
        written = ("shared_gate_up", "shared_down", "shared_gate")
        wanted = {each: torch.empty(given[each].shape, dtype=dtype).as_subclass(OnGpu) for each in written}
        ctx._engine.backward(kept, counted, told, given, wanted, False)
    seen, of = launched(), launched()["backward"]
    assert device[-1] == jit.Variant(name, transposed="transposed" in options, backward=True, sliced=True)
    tiles = tokens * (K + 1) // 256 + E + 1
    rows = (tiles + 2 * 2) * 256
    assert seen["slice_tiles"] == tiles and of["weighted"] == of["z_gradients"] + rows * 2 * I * size
    assert seen["intermediate_rows"]["dims"] == [2 * I, rows] and of["weighted_columns"]["dims"][1] == rows
    assert of["kept_ids"] == kept.data_ptr() + tokens * (K + shared) * 2 * I * size
    assert seen["options"][:3] == [0, wanted["shared_gate_up"].data_ptr(), wanted["shared_down"].data_ptr()]
    assert seen["options"][3] != 0 and seen["shared_gate"] == tensors.shared_gate.data_ptr()
    up, down = seen["shared_gate_up"], seen["shared_down"]
    assert (up["dims"], [up["strides"][0] // size, up["strides"][3] // size]) == (of_up, up_strides)
    assert (down["dims"], down["strides"][3] // size) == (of_down, down_stride)


def test_layers_without_gradients_are_named():
    """When the backward pass comes: their forward pass keeps nothing."""
    arguments_of = dict.fromkeys(Tensors._fields) | in_fp8(8)
    options = Options(top_k=arguments_of.pop("top_k"))
    tensors = Tensors(**arguments_of)
    given = {name: each for name, each in tensors._asdict().items() if each is not None}
    with flashmoe.Context(engine="cuda", **FP8_SIZES) as ctx:
        _, kept, counted = ctx._engine.call_and_keep(tensors, options)
        assert kept.numel() == launched()["kept"] == 0
        with pytest.raises(NotImplementedError, match="no backward pass of x of bfloat16 with weights of"):
            ctx._engine.backward(kept, counted, options, given | {"y": tensors.x}, {}, False)


@pytest.mark.parametrize("tokens", [3, 100], ids=["few tokens", "many"])
def test_calls_write_to_the_load_of_their_context(monkeypatch, tokens):
    """Unless they have one of their own; nobody waits for it to be read."""
    made = on_gpu(E, dtype=torch.int64)
    monkeypatch.setattr(contexts, "_zeros", lambda experts, device: made if (experts, device) == (E, 0) else None)
    monkeypatch.setattr(cuda.CudaEngine, "synchronize", None)
    with flashmoe.Context(engine="cuda", **SIZES, count_load=True) as ctx:
        for args in (arguments(tokens), given(tokens)):
            flashmoe.moe(ctx, **args)
            assert launched()["load"] == made.data_ptr()
        own = on_gpu(E, dtype=torch.int64)
        flashmoe.moe(ctx, **arguments(tokens), load=own)
        assert launched()["load"] == own.data_ptr()
        made[:] = 3
        load = ctx.load(clear=True)
        assert load.data_ptr() != made.data_ptr() and (load == 3).all() and not made.any()


WRONG_TO_WRITE_TO = [
    (lambda: {"load": on_gpu(E, dtype=torch.int32)}, r"load: expected \[E\] int64, got \[16\] int32"),
    (lambda: {"load": on_gpu(E + 1, dtype=torch.int64)}, r"load: expected \[E=16\].*, got \[17\]"),
    (lambda: {"load": on_gpu(2 * E, dtype=torch.int64)[::2]}, "load: expected .*contiguous.*, got .*strides"),
    (lambda: {"load": torch.zeros(E, dtype=torch.int64)}, "load: expected a tensor of cuda:0, .* got cpu"),
    (lambda: {"load": np.zeros(E, np.int64)}, r"load: expected \[E\] int64, a PyTorch one, got ndarray"),
    (lambda: {"router_logits": on_gpu(100, E)}, r"router_logits: expected \[T, E\] float32, got \[100, 16\] bfloat16"),
    (
        lambda: {"router_logits": on_gpu(99, E, dtype=torch.float32)},
        r"router_logits: expected \[T=100, E=16\].*, got \[99, 16\]",
    ),
    (
        lambda: {"router_logits": on_gpu(E, 100, dtype=torch.float32).T},
        "router_logits: expected .*contiguous.*, got .*strides",
    ),
    (lambda: {"router_logits": sparse(100, E)}, "router_logits: expected a dense tensor, got one of layout"),
]


@pytest.mark.parametrize("known", [False, True], ids=["another layer", "a known layer"])
@pytest.mark.parametrize(("wrong", "message"), WRONG_TO_WRITE_TO)
def test_what_cannot_be_written_to_is_refused_before_the_launch(ctx, wrong, message, known):
    args, asked = arguments(100), wrong()
    if known:
        good = {"load": on_gpu(E, dtype=torch.int64), "router_logits": on_gpu(100, E, dtype=torch.float32)}
        flashmoe.moe(ctx, **args, **{name: good[name] for name in asked})
    before = driver.fake_last_launch()
    with pytest.raises(flashmoe.InvalidArgument, match=message):
        flashmoe.moe(ctx, **args, **asked)
    assert driver.fake_last_launch() == before


def test_given_routing_has_no_logits(ctx):
    with pytest.raises(flashmoe.InvalidArgument, match="router_logits: expected router with it, got None"):
        flashmoe.moe(ctx, **given(100), router_logits=on_gpu(100, E, dtype=torch.float32))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: arguments(x=torch.zeros(9, H, dtype=torch.bfloat16)), "x: expected a tensor of cuda:0, .* got cpu"),
        (lambda: arguments(x=np.zeros((9, H), np.float32)), "x: expected .* a PyTorch one, got ndarray"),
        (lambda: arguments(down_proj=None), "down_proj: expected .* got NoneType"),
        (lambda: arguments(router=on_gpu(E, H, dtype=torch.float16)), "router: expected bfloat16, the type of x"),
        (lambda: arguments(x=on_gpu(9, H + 1)[:, 1:]), "x: expected rows that begin at multiples of 16 bytes"),
        (lambda: arguments(x=on_gpu(H, 16).T), "x: expected rows without gaps"),
        (lambda: arguments(router=on_gpu(E, 2 * H)[:, ::2]), "router: expected rows without gaps"),
        (
            lambda: arguments(x=torch._neg_view(on_gpu(16, H))),
            "x: expected values in memory, got a view that negates them",
        ),
        (lambda: arguments(x=sparse(16, H)), "x: expected a dense tensor, got one of layout torch.sparse_coo"),
        (lambda: arguments(router=sparse(E, H)), "router: expected a dense tensor, got one of layout"),
        (lambda: arguments(router_bias=on_gpu(2 * E)[::2]), "router_bias: expected a contiguous tensor"),
        (lambda: arguments(router=None), "topk_ids: expected a tensor"),
        (lambda: arguments(activation="tanh"), "activation: expected one of"),
        (lambda: arguments(activation=["relu"]), "activation: expected one of"),
        (lambda: arguments(return_mode="reduced"), "return_mode: expected 'direct', the context's"),
        (lambda: arguments(capacity_factor=-1), "capacity_factor: expected"),
        (lambda: given(topk_ids=on_gpu(100, K, dtype=torch.int16)), "topk_ids: expected .* int32 or int64"),
        (lambda: given(topk_weights=on_gpu(99, K, dtype=torch.float32)), "topk_weights: expected"),
        (
            lambda: arguments(gate_up_proj=on_gpu(E, 108, H), down_proj=on_gpu(E, H, 54)),
            r"down_proj: expected I a multiple of 8 \(16-byte rows for the copy engine\), got 54",
        ),
    ],
)
def test_refused_before_the_launch(ctx, make, message):
    with pytest.raises(flashmoe.InvalidArgument, match=message):
        flashmoe.moe(ctx, **make())
    with pytest.raises(flashmoe.InvalidArgument, match=message):  # it is not remembered as a layer
        flashmoe.moe(ctx, **make())


def test_a_context_with_a_capacity_factor():
    with flashmoe.Context(engine="cuda", **SIZES, capacity_factor=0.5) as bounded:
        flashmoe.moe(bounded, **arguments(), capacity_factor=0.5)
        assert launched()["capacity"] == 13  # ceil(0.5 * 100 * 4 / 16)
        # Of 4096 tokens an expert keeps 512: 32 full tiles of 256 for the 16, and a partial one each.
        assert launched()["intermediate_rows"]["dims"] == [I, (32 + E) * 256]
        for factor in (None, 0.6):
            with pytest.raises(flashmoe.InvalidArgument, match=r"capacity_factor: expected a number in \(0, 0\.5\]"):
                flashmoe.moe(bounded, **arguments(), capacity_factor=factor)
        assert len(prepared(bounded)) == 1


def test_every_call_is_checked(ctx):
    """Not only the first of a layer."""
    args, routed = arguments(), given()
    flashmoe.moe(ctx, **args)
    flashmoe.moe(ctx, **routed)
    assert len(prepared(ctx)) == 2
    with pytest.raises(flashmoe.HeapError, match="max_tokens: expected at most 4096"):
        flashmoe.moe(ctx, **{**args, "x": on_gpu(4097, H)})
    with pytest.raises(flashmoe.InvalidArgument, match="x: expected rows that begin"):
        flashmoe.moe(ctx, **{**args, "x": on_gpu(9, H + 1)[:, 1:]})
    with pytest.raises(flashmoe.InvalidArgument, match=r"topk_ids: expected \[T=7, K=4\], contiguous"):
        flashmoe.moe(ctx, **{**routed, "x": on_gpu(7, H)})
    for other in (on_gpu(E, H, dtype=torch.float16), on_gpu(E, H - 8)):
        with pytest.raises(flashmoe.InvalidArgument):
            flashmoe.moe(ctx, **{**args, "router": other})
    with pytest.raises(flashmoe.InvalidArgument, match=r"top_k: expected an integer in \[1, E=16\], got 4\.0"):
        flashmoe.moe(ctx, **{**args, "top_k": float(K)})  # equal to that of a layer that is known
    assert len(prepared(ctx)) == 2


@pytest.mark.parametrize("name", ["x", "topk_ids", "topk_weights"])
def test_a_sparse_tensor_is_no_layer_found_again(name):
    """It has no place in memory, unlike the tensor of a layer that is known."""
    dense = {
        "x": torch.zeros(9, H),
        "topk_ids": torch.zeros(9, K, dtype=torch.int32),
        "topk_weights": torch.zeros(9, K),
    }
    weights = {"gate_up_proj": torch.zeros(E, 2 * I, H), "down_proj": torch.zeros(E, H, I)}
    known = cuda._key(Tensors(**dense, **weights), Options(), False, 0)
    assert known is not None
    assert cuda._key(Tensors(**{**dense, name: dense[name].to_sparse()}, **weights), Options(), False, 0) != known


def test_layers_are_found_again(ctx, device):
    args = arguments()
    for tokens in (1, 8, 9, 64, 65, 4096):
        flashmoe.moe(ctx, **{**args, "x": on_gpu(tokens, H)})
        assert (launched()["tokens"], launched()["block"]) == (tokens, 32 if tokens == 4096 else 8)
        assert (launched()["few"], launched()["geometry"]) == (tokens <= 64, 1)
        assert (launched()["token_rows"] is None) == (tokens <= 64)  # not made for a kernel that does not read it
    assert len(prepared(ctx)) == 1 and len(device) == 1
    flashmoe.moe(ctx, **args, renormalize=False)
    flashmoe.moe(ctx, **{**args, "router": on_gpu(E, H)})
    assert len(prepared(ctx)) == 3


def test_old_layers_are_forgotten(ctx, monkeypatch):
    monkeypatch.setattr(cuda, "_MOST_LAYERS", 2)
    kept = [arguments() for _ in range(5)]
    for args in kept + kept:
        flashmoe.moe(ctx, **args)
        assert launched()["router"]["base"] == args["router"].data_ptr()
        assert len(prepared(ctx)) <= 2


def test_a_rank_alone_has_one_return_group():
    """However large its call is."""
    with flashmoe.Context(engine="cuda", **{**SIZES, "hidden": 2048}) as wide:
        weights = [on_gpu(E, 2 * I, 2048), on_gpu(E, 2048, I)]
        for tokens in (100, 4000):
            flashmoe.moe(wide, on_gpu(tokens, 2048), *weights, router=on_gpu(E, 2048), top_k=K)
            assert launched()["groups"] == [0, 8]


def test_no_tokens(ctx):
    before = launched()
    y = flashmoe.moe(ctx, **arguments(0))
    assert y.shape == (0, H) and launched() == before
    report = ctx.last_call
    assert (report.tokens, report.tiles, report.topk_ids.shape) == (0, 0, (0, K))


def test_report(ctx):
    assert ctx.last_call is None
    with flashmoe.Context(engine="cuda", **{**SIZES, "top_k": 8}) as ctx:  # rows of 8, of which 4 are used
        flashmoe.moe(ctx, **arguments(1000))
        report = ctx.last_call
    assert report is ctx.last_call  # it is read once
    np.testing.assert_array_equal(report.topk_ids, (np.arange(1000)[:, None] + np.arange(K)) % E)
    np.testing.assert_array_equal(report.topk_weights, np.tile(1 / np.arange(1, K + 1, dtype=np.float32), (1000, 1)))
    # 250 rows of each expert, so one tile; 1000 tokens in blocks of 8.
    assert (report.tiles, report.tile_rows, report.dropped) == (E, 4000, 0)
    assert report.tasks == {"gate": 125, "gemm0": E, "gemm1": E, "reduce": 0, "combine": 125}
    assert report.phase_ns == {} and report.idle_share == 0.0 and report.events == []
    assert flashmoe.CallReport.from_dict(report.to_dict()).tasks == report.tasks


def test_trace(ctx, device):
    flashmoe.moe(ctx, **arguments(), trace=True)
    assert device == [jit.Variant("bfloat16", "swiglu", trace=True)]
    for _ in range(2):  # the second time over the first one's events
        flashmoe.moe(ctx, **arguments(), trace=True)
        report = ctx.last_call
        assert len(report.events) == 132 * len(PHASES)
    assert report.events[0] == ("processor 0", "gate", 1000, 1100, 0, 0, 0, 2)
    assert report.events[len(PHASES) + 2] == ("processor 1", "gemm0", 2200, 2300, 1, 2, 0, 2)
    assert {event.actor for event in report.events if event.kind == "schedule"} == {"os"}
    assert report.wall_ns == 1000 * 131 + 3000 - 900
    assert report.phase_ns["gemm0"] == 132 * 100 and "epilogue" not in report.phase_ns
    assert report.phase_ns["dispatch"] == 132 * 200  # and sends
    assert report.phase_ns["idle"] == 132 * (report.wall_ns - 700)


def test_recorded_calls(ctx, device):
    """Each is read before the next one writes over it, and lies on the host's clock, from which the device's differs by
    a second; calls behind them are not traced, nor is one within which another begins."""
    args = arguments()
    traces = ctx.trace(lambda: [flashmoe.moe(ctx, **args) for _ in range(2)])
    assert device == [jit.Variant("bfloat16", "swiglu", trace=True)]
    for trace in traces:
        assert (trace.rank, trace.backward, trace.processors, trace.left_out) == (0, False, 132, {})
        assert (trace.start_ns, trace.end_ns, len(trace.events)) == (900, 134_000, 132 * len(PHASES))
        assert abs(trace.offset_ns + 10**9) < 10**8 and 0 < trace.error_ns < 10**8
    assert len(traces) == 2
    flashmoe.moe(ctx, **arguments())
    assert ctx.last_call.events == []
    with pytest.raises(flashmoe.InvalidArgument, match="another trace of the same context"):
        ctx.trace(lambda: ctx.trace(lambda: None))
    assert ctx.trace(lambda: flashmoe.moe(ctx, **arguments(0))) == []  # which launches nothing
    assert ctx.trace(lambda: None) == []


def test_exact(ctx, device):
    flashmoe.moe(ctx, **arguments(), exact=True)
    assert device == [jit.Variant("bfloat16", "swiglu")]  # there is nothing to be exact about
    with flashmoe.Context(engine="cuda", **{**SIZES, "dtype": "float32"}) as wide:
        flashmoe.moe(wide, **arguments(dtype=torch.float32), exact=True)
    assert device[1:] == [jit.Variant("float32", "swiglu", exact=True)]


def test_capture(ctx):
    """Calls like one before are captured; whatever would need the device is refused in words."""
    args = arguments()
    flashmoe.moe(ctx, **args)
    flashmoe.moe(ctx, **arguments(), trace=True)
    driver.fake_capture(1)
    flashmoe.moe(ctx, **{**args, "x": on_gpu(17, H)})
    assert launched()["tokens"] == 17
    flashmoe.moe(ctx, **arguments(18))  # another layer, of the same kind
    assert launched()["tokens"] == 18
    for refused in (
        lambda: flashmoe.moe(ctx, **args, trace=True),
        lambda: flashmoe.moe(ctx, **arguments(router=on_gpu(E - 1, H), placement=[0] * (E - 1))),
        lambda: ctx.last_call,
        ctx.synchronize,
    ):
        with pytest.raises(flashmoe.FlashMoEError, match=r"^capture: |^gate_up_proj: "):
            refused()
    driver.fake_capture(0)
    assert ctx.last_call.tokens == 18


def test_a_kernel_is_not_loaded_during_capture(ctx):
    driver.fake_capture(1)
    with pytest.raises(flashmoe.FlashMoEError, match="capture: loading a kernel"):
        flashmoe.moe(ctx, **arguments())
    driver.fake_capture(0)
    flashmoe.moe(ctx, **arguments())


def test_a_placement_is_not_uploaded_during_capture(ctx):
    flashmoe.moe(ctx, **arguments())
    fewer = arguments(router=on_gpu(E - 1, H), gate_up_proj=on_gpu(E - 1, 2 * I, H), down_proj=on_gpu(E - 1, H, I))
    driver.fake_capture(1)
    with pytest.raises(flashmoe.FlashMoEError, match="capture: uploading a placement"):
        flashmoe.moe(ctx, **fewer)
    driver.fake_capture(0)
    flashmoe.moe(ctx, **fewer)
    assert launched()["owner_base"] == [0, E - 1]


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ((6, 5, 0, 0), flashmoe.InvalidArgument, "router: expected finite logits, .* token 5 of rank 0"),
        ((7, 5, 0, 3), flashmoe.InvalidArgument, "got expert 3 twice for token 5"),
        ((8, 5, E, 2**64 - 1), flashmoe.InvalidArgument, r"ids in \[0, E=16\), got -1 for token 5"),
        ((4, 0, 0, 0), flashmoe.PeerTimeout, "rank 0 holds up call 3: .* waited 30 s"),
    ],
)
@pytest.mark.parametrize("where", ["next call", "synchronize", "last_call", "trace"])
def test_faults(fault, error, message, where):
    with flashmoe.Context(engine="cuda", **SIZES) as ctx:
        driver.fake_fault(*fault)
        if where == "trace":
            with pytest.raises(error, match=message):
                flashmoe.moe(ctx, **arguments(), trace=True)
        else:
            flashmoe.moe(ctx, **arguments())  # does not wait, so does not know
            with pytest.raises(error, match=message):
                if where == "next call":
                    flashmoe.moe(ctx, **arguments())
                elif where == "synchronize":
                    ctx.synchronize()
                else:
                    _ = ctx.last_call
        for again in (lambda: flashmoe.moe(ctx, **arguments()), ctx.synchronize):
            with pytest.raises(flashmoe.GroupError, match="an earlier call failed"):
                again()


def test_closed(ctx):
    flashmoe.moe(ctx, **arguments())
    ctx.close()
    for use in (lambda: flashmoe.moe(ctx, **arguments()), ctx.synchronize, lambda: ctx.last_call):
        with pytest.raises(flashmoe.FlashMoEError, match="context: it is closed"):
            use()


def test_operator_and_module(ctx):
    from flashmoe import nn, torch_op

    module = nn.MoE(ctx, H, I, E, K)
    assert module.exact is False
    args = arguments()
    floats = [args[name] for name in ("x", "gate_up_proj", "down_proj", "router")]
    y = torch_op._moe(torch_op.context_id(ctx), *floats, top_k=K, exact=True)
    assert y.shape == (100, H) and launched()["tokens"] == 100


def test_token_block():
    block = _ffi.library().cuda_token_block
    assert [block(tokens, 128, 8, 132) for tokens in (1, 1056, 1057, 8192, 65536)] == [8, 8, 16, 64, 128]
    assert block(65536, 1024, 8, 132) == 16  # 16384 logits
    assert block(65536, 8, 32, 132) == 64  # 2048 entries
    assert block(65536, 1024, 32, 1) == 16


def test_return_groups():
    groups = _ffi.library().cuda_return_groups
    for columns in (*range(1, 200), 8192):
        for mode in (0, 1):
            assert list(groups(columns, mode, True)) == [0, columns]
            first = list(groups(columns, mode, False))
            sizes = np.diff(first)
            assert first[0] == 0 and first[-1] == columns and (sizes > 0).all()
            if mode == 0:
                assert len(sizes) == min(columns, 2) and sizes[-1] == columns // 2 + (columns == 1)
            elif columns >= 8:  # the last groups are what everybody waits for
                assert len(sizes) == 5 and sizes[-1] <= columns // 8 and sizes[0] >= columns // 4


# ---- several ranks: processes with a fake NVSHMEM beside the fake driver -------------------------------------------


class Joined(NamedTuple):
    """What a rank of a group has."""

    heap_bytes: int
    workspace_bytes: int
    symmetric_blocks: int
    """Of NVSHMEM, in the process."""
    symmetric_bytes: int
    device_bytes: int


def join(rank, ranks, name, groups, devices, environment=()):
    """Joins groups of these sizes one after the other; of each, what was said, or a `Joined`."""
    os.environ.update(environment)
    nvshmem_files.library = lambda: os.environ.get("FAKE_NVSHMEM_PATH", "libnvshmem_host.so.3")
    told = []
    for i, changes in enumerate(groups):
        settings = {"timeout": 20.0, **SIZES, **changes}
        size, number = settings.pop("ranks", ranks), rank
        if settings.pop("swapped", False):
            number = ranks - 1 - rank
        driver.fake_memory(1000 if settings.pop("without_memory", None) == rank else 1 << 40)
        if size == 1:
            number = 0
        try:
            with flashmoe.Context(
                engine="cuda", device=devices[rank], rank=number, ranks=size, name=f"{name}-{i}", **settings
            ) as made:
                nvshmem = ctypes.CDLL("libnvshmem_host.so.3")
                nvshmem.fake_nvshmem_allocated_bytes.restype = ctypes.c_size_t
                asked = nvshmem.fake_nvshmem_allocations(), nvshmem.fake_nvshmem_allocated_bytes()
                told.append(Joined(made.heap_bytes, made.workspace_bytes, *asked, driver.fake_allocated_bytes()))
        except flashmoe.FlashMoEError as error:
            told.append(f"{type(error).__name__}: {error}")
    return told


@contextlib.contextmanager
def fake_world():
    """The name of what a fake NVSHMEM's ranks share."""
    with tempfile.NamedTemporaryFile(prefix="world") as unique:
        world = Path(unique.name).name
        try:
            yield world
        finally:
            for segment in Path("/dev/shm").glob(f"{world}-*"):  # the ranks were killed
                segment.unlink()


def joined(ranks, *groups, devices=(0, 1, 2, 3), environment=()):
    with fake_world() as world, RankPool(ranks) as pool:
        settings = {"FAKE_NVSHMEM_WORLD": world, **dict(environment)}
        return pool.call(join, [(groups, devices, settings)] * ranks, timeout=90)


def test_a_rank_without_memory_is_named_at_once():
    """By all others, who are then free to join again."""
    changes = {"timeout": 0}  # for ever
    for rank, told in enumerate(joined(3, {**changes, "without_memory": 1}, changes)):
        own = r"workspace: expected .* got 1000 free of 1000.*"
        expected = rf"HeapError: {own}" if rank == 1 else rf"GroupError: group '.*': rank 1 did not join: {own}"
        assert re.fullmatch(expected, told[0]) and isinstance(told[1], Joined)


def close_while_joining(rank, ranks, name, world):
    """Joins two groups; while rank 0 waits for the second, a signal handler of its closes the first. Its last words."""
    os.environ["FAKE_NVSHMEM_WORLD"] = world
    nvshmem_files.library = lambda: "libnvshmem_host.so.3"
    settings = {**SIZES, "engine": "cuda", "rank": rank, "ranks": ranks, "device": rank, "timeout": 20.0}
    first = flashmoe.Context(name=f"{name}-1", **settings)
    closed = []

    def close(*_):
        first.close()
        closed.append(True)

    if rank == 0:
        signal.signal(signal.SIGALRM, close)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
    else:
        driver.fake_allocation_ms(1000)  # when all have met
    with flashmoe.Context(name=f"{name}-2", **settings):
        return first.closed, closed


def test_a_context_is_closed_while_another_joins():
    """By what an interrupted wait runs: a handler, or a collection of garbage."""
    with fake_world() as world, RankPool(2) as pool:
        assert pool.call(close_while_joining, [(world,)] * 2, timeout=60) == [(True, [True]), (False, [])]


def test_ranks_join_and_take_the_same_memory_again():
    first, second = joined(2, {}, {}, {"max_tokens": 64}, {})
    assert first == second
    large, again, small, anew = first
    assert large == again == anew and small.heap_bytes < large.heap_bytes
    assert {each.symmetric_blocks for each in first} == {1}


def test_ranks_take_the_memory_that_the_plan_says():
    published = {"hidden": 2048, "intermediate": 2048, "top_k": 1, "return_mode": "direct", "capacity_factor": 1.0}
    sizes = [sizes_of(shape) for shape in models.MODELS]
    sizes += [{**published, "max_tokens": tokens, "experts": experts} for tokens, experts, _ in PUBLISHED]
    for told in joined(4, *sizes):
        for each, seen in zip(sizes, told, strict=True):
            plan = plan_memory(engine="cuda", ranks=4, **each)
            assert (seen.heap_bytes, seen.workspace_bytes) == (plan.heap_bytes, plan.workspace_bytes)
            assert seen.symmetric_bytes == plan.heap_bytes
            assert seen.device_bytes == plan.workspace_bytes + 4 * POINTER


def test_ranks_that_share_a_gpu():
    for (told,) in joined(2, {}, devices=(1, 1)):
        assert told == (
            "InvalidArgument: device: expected a GPU of its own for each rank, got the same for ranks 0 and 1"
        )
    for (made,) in joined(2, {}, devices=(1, 1), environment={"FLASHMOE_SHARE_GPUS": "2"}):
        assert isinstance(made, Joined)


def test_a_second_group_of_other_ranks():
    for _, told in joined(2, {}, {"swapped": True}):
        assert "GroupError" in told and "expected the ranks of this process's first group of several GPUs" in told


def test_a_rank_alone_needs_no_nvshmem():
    for before, alone, after in joined(2, {}, {"ranks": 1}, {}):
        assert alone.symmetric_blocks == 1 and before == after


def test_ranks_that_want_other_sizes():
    with RankPool(2) as pool:
        (first,), (second,) = pool.call(join, [(({"top_k": 2 + rank},), (0, 1)) for rank in range(2)], timeout=90)
    assert "top_k: rank 0 has 2, rank 1 has 3" in first and "top_k: rank 1 has 3, rank 0 has 2" in second


def test_a_rank_that_does_not_come():
    with pytest.raises(flashmoe.PeerTimeout, match=r"rank 1 did not join within 0\.5 s"):
        flashmoe.Context(engine="cuda", ranks=2, name=f"alone-{os.getpid()}", timeout=0.5, **SIZES)


def test_without_nvshmem():
    path = "/nowhere/libnvshmem_host.so.3"
    for (told,) in joined(2, {}, environment={"FAKE_NVSHMEM_PATH": path}):
        assert told.startswith(
            f"FlashMoEError: nvshmem: expected the library {path}, which a group of several GPUs needs "
            f"({nvshmem_files.INSTALL}), got: "
        )


def join_with_libraries(rank, ranks, name, world, libraries):
    return join(rank, ranks, name, [{"timeout": 0}], (0, 1), {"FAKE_NVSHMEM_WORLD": world, **libraries})


def test_one_rank_without_nvshmem_is_named_at_once():
    path = "/nowhere/libnvshmem_host.so.3"
    with fake_world() as world, RankPool(2) as pool:
        libraries = {}, {"FAKE_NVSHMEM_PATH": path}
        (there,), (missing,) = pool.call(join_with_libraries, [(world, each) for each in libraries], timeout=90)
    own = f"nvshmem: expected the library {path}, which a group of several GPUs needs"
    assert missing.startswith(f"FlashMoEError: {own}")
    assert re.match(rf"GroupError: group '.*': rank 1 did not join: {own}", there)


def join_with_an_engine_of_its_own(rank, ranks, name, world):
    os.environ["FAKE_NVSHMEM_WORLD"] = world
    nvshmem_files.library = lambda: "libnvshmem_host.so.3"
    engine = {"engine": "cpu", "processors": 1} if rank == 0 else {"engine": "cuda", "device": 1}
    try:
        flashmoe.Context(rank=rank, ranks=ranks, name=name, timeout=20.0, return_mode="direct", **engine, **SIZES)
    except flashmoe.FlashMoEError as error:
        return f"{type(error).__name__}: {error}"


def test_ranks_of_different_engines():
    with fake_world() as world, RankPool(2) as pool:
        for told in pool.call(join_with_an_engine_of_its_own, [(world,)] * 2, timeout=90):
            assert re.match(r"GroupError: group '.*' disagrees on engine or version, .*: rank \d has \d+, rank", told)


def test_nvshmem_that_hangs():
    for first, second in joined(2, {"timeout": 1.0}, {}, environment={"FAKE_NVSHMEM_HANGS": "1"}):
        assert "PeerTimeout" in first and "NVSHMEM's initialisation did not end within 1 s" in first
        assert "GroupError" in second and "start a new process" in second


class Put(NamedTuple):
    """What a rank of a group that puts has, and a call of it."""

    transport: str
    return_mode: str
    heap_bytes: int
    workspace_bytes: int
    registered_bytes: int
    modules: int
    """That NVSHMEM knows of, after a call."""
    left: tuple[int, int]
    """Bytes registered and modules known, once the context is closed."""
    variants: list
    launch: dict


def pretend(device, cubin, environment):
    """In a rank's process: a GPU, whose number `device` holds, NVSHMEM and kernels. Returns what is compiled."""
    os.environ.update(environment)
    compiled = []
    nvshmem_files.library = lambda: "libnvshmem_host.so.3"
    cuda.current_stream = lambda device: 77
    jit.kernel = lambda variant: compiled.append(variant) or cubin
    OnGpu.device = property(lambda self: torch.device("cuda", *device))
    return compiled


def put(rank, ranks, name, changes, cubin, environment):
    """A call in a new group; what was said, or a `Put`."""
    compiled = pretend([rank], cubin, environment)
    nvshmem = ctypes.CDLL("libnvshmem_host.so.3")
    nvshmem.fake_nvshmem_registered_bytes.restype = ctypes.c_size_t

    def counted():
        return nvshmem.fake_nvshmem_registered_bytes(), nvshmem.fake_nvshmem_modules()

    try:
        settings = {"timeout": 20.0, **SIZES, **changes}
        cuda.machines = settings.pop("machines", ())
        hidden, inner = settings["hidden"], settings["intermediate"]
        tokens, how = settings.pop("tokens", 100), settings.pop("how", {})
        with flashmoe.Context(engine="cuda", device=rank, rank=rank, ranks=ranks, name=name, **settings) as made:
            held = len(made.local_experts())
            local = {"gate_up_proj": on_gpu(held, 2 * inner, hidden), "down_proj": on_gpu(held, hidden, inner)}
            flashmoe.moe(made, **arguments(tokens, x=on_gpu(tokens, hidden), router=on_gpu(E, hidden), **local), **how)
            seen = made.transport, made.return_mode, made.heap_bytes, made.workspace_bytes, *counted()
        return Put(*seen, counted(), compiled, launched())
    except flashmoe.FlashMoEError as error:
        return f"{type(error).__name__}: {error}"


def put_by(ranks, *changes, cubin, environment=()):
    """Of each rank; `changes`: of all ranks, or one for each."""
    cubin.write_bytes(b"a kernel")
    with fake_world() as world, RankPool(ranks) as pool:
        settings = {"FAKE_NVSHMEM_WORLD": world, **dict(environment)}
        each = changes if len(changes) == ranks else changes * ranks
        return pool.call(put, [(mine, cubin, settings) for mine in each], timeout=90)


@pytest.mark.parametrize("mode", ["auto", "reduced"])
def test_puts(tmp_path, mode):
    plan = plan_memory(engine="cuda", ranks=3, transport="rdma", **SIZES)
    mapped = plan_memory(engine="cuda", ranks=3, return_mode="reduced", **SIZES)
    of_weights = 4 * SIZES["max_tokens"] * K  # gradients of combine weights, which ranks return whose memory is mapped
    assert plan.heap_bytes + -(-of_weights // 256) * 256 == mapped.heap_bytes
    words = 2 * 256  # returns_ready and returns_sent, a word a rank, each in a line of its own
    assert plan.workspace_bytes == mapped.workspace_bytes + words + SIZES["max_tokens"] * H * 2
    told = put_by(3, {"transport": "rdma", "return_mode": mode}, cubin=tmp_path / "kernel.cubin")
    for seen in told:
        assert (seen.transport, seen.return_mode) == ("rdma", "reduced")
        assert (seen.heap_bytes, seen.workspace_bytes) == (plan.heap_bytes, plan.workspace_bytes)
        assert (seen.registered_bytes, seen.modules) == (plan.workspace_bytes, 1)
        assert seen.left == (0, 0)
        assert seen.variants == [jit.Variant("bfloat16", "swiglu", rdma=True)]
        assert (seen.launch["mapped"], seen.launch["return_mode"], seen.launch["groups"]) == (1, 1, [0, 1])


ALWAYS_HELD = 2**32 - 1


# Of short tasks more are published ahead.
# What a wide GEMM1 returns the link keeps up with: it then follows all of GEMM0,
# in one list, and no expert waits for other ranks' rows.
@pytest.mark.parametrize(
    ("hidden", "inner", "order"),
    [
        (H, I, [132, 4 * 66, 2, 2, 16]),
        (H, 1072, [ALWAYS_HELD, 4 * 66, 1, 1, 16]),
        (2048, 2048, [ALWAYS_HELD, 66, 1, 1, 16]),
    ],
)
def test_order_of_several_ranks(tmp_path, hidden, inner, order):
    changes = {"hidden": hidden, "intermediate": inner, "return_mode": "direct"}
    for seen in put_by(2, changes, cubin=tmp_path / "kernel.cubin"):
        names = ("gemm1_lag", "window", "gemm1_lists", "own_first", "senders")
        assert [seen.launch[name] for name in names] == order


def test_one_return_group_by_puts(tmp_path):
    sizes = {"max_tokens": 64, "return_mode": "reduced"}
    for transport, several in (("auto", True), ("rdma", False)):
        wide = {**sizes, "transport": transport}
        (seen, _) = wide_groups(wide, tmp_path / "kernel.cubin")
        assert (len(seen) > 2) == several


def wide_groups(changes, cubin):
    """The return groups of a call of many columns, on each of two ranks."""
    cubin.write_bytes(b"a kernel")
    with fake_world() as world, RankPool(2) as pool:
        return pool.call(groups_of, [(changes, cubin, {"FAKE_NVSHMEM_WORLD": world})] * 2, timeout=90)


def groups_of(rank, ranks, name, changes, cubin, environment):
    pretend([rank], cubin, environment)
    settings = {"timeout": 20.0, **SIZES, **changes, "hidden": 2048}
    with flashmoe.Context(engine="cuda", device=rank, rank=rank, ranks=ranks, name=name, **settings) as made:
        weights = [on_gpu(E // ranks, 2 * I, 2048), on_gpu(E // ranks, 2048, I)]
        flashmoe.moe(made, on_gpu(10, 2048), *weights, router=on_gpu(E, 2048), top_k=K)
        return launched()["groups"]


def test_slices_are_experts_behind_the_gate(tmp_path):
    """What the kernel is told of a layer of 16 experts in slices of two ranks, and what it refuses of others."""
    (tmp_path / "kernel.cubin").write_bytes(b"a kernel")
    with fake_world() as world, RankPool(2) as pool:
        each = (tmp_path / "kernel.cubin", {"FAKE_NVSHMEM_WORLD": world})
        for told, mode in pool.call(sliced_launch, [each] * 2, timeout=90):
            assert (told["experts"], told["top_k"], told["local_experts"]) == (2 * E, 2 * K, E)
            assert (told["intermediate"], told["return_mode"], mode) == (I // 2, 1, "reduced")
            assert told["router"] == told["router_of_experts"]
    for changes, message in (
        ({"top_k": 9, "slices": 4}, "slices: expected at most 3 with K=9, got 4"),
        ({"experts": 600}, "slices: expected at most 1 with E=600, got 2"),
        ({"return_mode": "direct"}, "return_mode: expected 'reduced' or 'auto' with slices, got 'direct'"),
    ):
        with pytest.raises(flashmoe.InvalidArgument, match=message):
            flashmoe.Context(engine="cuda", rank=0, ranks=2, name="sliced", **SIZES | {"slices": 2} | changes)


def sliced_launch(rank, ranks, name, cubin, environment):
    """What the kernel is told of a call with slices, and of the router of a call without; the context's mode."""
    pretend([rank], cubin, environment)
    settings = {"timeout": 20.0, **SIZES, "slices": 2}
    with flashmoe.Context(engine="cuda", device=rank, rank=rank, ranks=ranks, name=name, **settings) as made:
        tensors = {"x": on_gpu(10, H), "router": on_gpu(E, H)}
        whole = {"gate_up_proj": on_gpu(E // 2, 2 * I, H), "down_proj": on_gpu(E // 2, H, I)}
        parts = {"gate_up_proj": on_gpu(E, I, H), "down_proj": on_gpu(E, H, I // 2)}
        flashmoe.moe(made, **arguments(**tensors, **whole))
        router = launched()["router"]
        flashmoe.moe(made, **arguments(**tensors, **parts), slices=2, placement=hybrid(E, 2, 2))
        return launched() | {"router_of_experts": router}, made.return_mode


def test_ranks_that_train_a_shared_expert_and_slices(tmp_path):
    """Where rows of the shared expert's two slices are numbered, behind those of the routed experts' slices."""
    (tmp_path / "kernel.cubin").write_bytes(b"a kernel")
    with fake_world() as world, RankPool(2) as pool:
        found = pool.call(train_in_slices, [(tmp_path / "kernel.cubin", {"FAKE_NVSHMEM_WORLD": world})] * 2, timeout=90)
    for compiled, counted, size, backward, ids_at, tokens in found:
        how = {"group": True, "sliced": True}
        assert compiled == [jit.Variant(keeps=True, **how), jit.Variant(backward=True, **how)]
        assert size - ids_at == 8 * tokens * (2 * K + 1)
        tiles = backward["slice_tiles"]
        own_rows = counted[0] - tokens
        assert tiles == own_rows // 256 + E + 1 and own_rows >= tokens
        assert backward["intermediate_rows"]["dims"] == [I, (tiles + -(-tokens // 256)) * 256]


def train_in_slices(rank, ranks, name, cubin, environment):
    """As train_on_rank(), of experts in two slices of I / 2 and a shared expert of two."""
    compiled = pretend([rank], cubin, environment)
    tokens = (100, 300)[rank]
    settings = {**SIZES, "slices": 2, "shared_intermediate": 2 * I, "timeout": 20.0}
    with flashmoe.Context(engine="cuda", device=rank, rank=rank, ranks=ranks, name=name, **settings) as made:
        tensors = Tensors(
            x=on_gpu(tokens, H),
            gate_up_proj=on_gpu(E, I, H),
            down_proj=on_gpu(E, H, I // 2),
            topk_ids=on_gpu(tokens, K, dtype=torch.int32),
            topk_weights=on_gpu(tokens, K, dtype=torch.float32),
            shared_gate_up=on_gpu(2 * I, H),
            shared_down=on_gpu(H, I),
        )
        options = Options(slices=2, placement=hybrid(E, 2, 2))
        _, kept, counted = made._engine.call_and_keep(tensors, options)
        named = {each: tensor for each, tensor in tensors._asdict().items() if tensor is not None}
        made._engine.backward(kept, counted, options, named | {"y": on_gpu(tokens, H)}, {"x": on_gpu(tokens, H)}, False)
        seen = launched()
        at = seen["backward"]["kept_ids"] - kept.data_ptr()
        return compiled, counted.tolist(), kept.numel(), seen, at, tokens


@pytest.mark.parametrize("redispatch", [False, True])
def test_ranks_that_train(tmp_path, redispatch):
    """What each of two ranks keeps, where its rows are moved, and what their backward passes are told; `redispatch`: to
    send x again, of which nothing is kept."""
    (tmp_path / "kernel.cubin").write_bytes(b"a kernel")
    with fake_world() as world, RankPool(2) as pool:
        each = (tmp_path / "kernel.cubin", {"FAKE_NVSHMEM_WORLD": world}, redispatch)
        found = pool.call(train_on_rank, [each] * 2, timeout=90)
    tokens = [100, 37]
    columns = 2 * I
    experts = [{(t + k) % E for k in range(K)} for t in range(max(tokens))]
    for rank, (compiled, counted, size, forward, move, kept, backward) in enumerate(found):
        own = set(range(rank * E // 2, (rank + 1) * E // 2))
        rows = sum(len(experts[t] & own) for count in tokens for t in range(count))
        received = sum(bool(experts[t] & own) for t in range(tokens[1 - rank]))
        assert counted == [rows, received, max(tokens), 1]
        assert compiled == [jit.Variant(keeps=True, group=True), jit.Variant(backward=True, group=True)]
        at_x = 2 * columns * rows
        at_numbers = at_x + 2 * H * received * (not redispatch)
        at_first = -(-(at_numbers + 4 * 2 * max(tokens)) // 16) * 16
        at_ids = -(-(at_first + 4 * (E // 2 + 1)) // 16) * 16
        assert move == [kept, 0 if redispatch else kept + at_x, kept + at_numbers, kept + at_first, max(tokens)]
        assert size == at_ids + 8 * tokens[rank] * K
        assert backward["keepers"] > 0 and forward["keepers"] == (0 if redispatch else backward["keepers"])
        assert (forward["config_groups"] >> 30, backward["config_groups"] >> 30) == (0, 3 if redispatch else 2)
        of, group = backward["backward"], backward["group"]
        assert (of["kept"], of["kept_ids"]) == (kept, kept + at_ids)
        tiles = rows // 256 + min(E // 2, rows)
        at_received = of["weighted"] + tiles * 256 * 2 * I
        at_gather = at_received + 2 * H * received * (1 + redispatch)
        x = at_received + 2 * H * received if redispatch else kept + at_x
        assert group[:8] == [
            at_received, kept + at_numbers, max(tokens), rows, received, x, kept + at_first, at_gather,
        ]  # fmt: skip
        assert of["weight_parts"] == at_gather + 4 * 256 * tiles
        assert group[10] == 4 * K
        assert (group[9] > 2 * H * 100) == redispatch
    first, second = found
    assert first[3]["config"] == second[3]["config"] and first[6]["config"] == second[6]["config"]
    assert first[3]["config"] != first[6]["config"]


def train_on_rank(rank, ranks, name, cubin, environment, redispatch):
    """Of a call that keeps and its backward pass: the kernels, sizes, what the kernels are told."""
    compiled = pretend([rank], cubin, environment)
    tokens = (100, 37)[rank]
    who = {"device": rank, "rank": rank, "ranks": ranks, "name": name, "redispatch": redispatch}
    with flashmoe.Context(engine="cuda", timeout=20.0, **who, **SIZES) as made:
        tensors = Tensors(
            x=on_gpu(tokens, H),
            gate_up_proj=on_gpu(E // ranks, 2 * I, H),
            down_proj=on_gpu(E // ranks, H, I),
            topk_ids=on_gpu(tokens, K, dtype=torch.int32),
            topk_weights=on_gpu(tokens, K, dtype=torch.float32),
        )
        options = Options(placement=made.placement)
        _, kept, counted = made._engine.call_and_keep(tensors, options)
        forward, move = launched(), json.loads(driver.fake_last_move())
        named = {each: tensor for each, tensor in tensors._asdict().items() if tensor is not None}
        wanted = {each: torch.empty(named[each].shape, dtype=named[each].dtype).as_subclass(OnGpu) for each in named}
        del wanted["topk_ids"]
        made._engine.backward(kept, counted, options, named | {"y": on_gpu(tokens, H)}, wanted, False)
        return compiled, counted.tolist(), kept.numel(), forward, move, kept.data_ptr(), launched()


def account(rank, ranks, name, settings, calls, placement, folder, environment):
    """Reports of calls of so many tokens (by call, by rank), each read when all ranks have made it."""
    pretend([rank], folder / "kernel.cubin", environment)
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
def test_reports_of_several_ranks(tmp_path, mode, placement):
    calls = [(2500, 1300, 901), (0, 40, 4096), (64, 64, 64)]
    settings = {"timeout": 20.0, **SIZES, "placement": placement, "return_mode": mode}
    (tmp_path / "kernel.cubin").write_bytes(b"a kernel")
    with fake_world() as world, RankPool(3) as pool:
        each = (settings, calls, placement, tmp_path, {"FAKE_NVSHMEM_WORLD": world})
        told = pool.call(account, [each] * 3, timeout=90)
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
            assert (report.tasks["gemm0"], report.tasks["gemm1"]) == (tiles, tiles)  # of one column each
            back = sum(int(here[p].sum() if mode == "direct" else here[p].any(axis=1).sum()) for p in others)
            assert report.return_rows_sent == back
            to = owners_for[rank][ids[rank]]
            sent = sum(int((to == q).any(axis=1).sum()) for q in others)
            assert report.rows_sent == sent
            pairs, packets = int((to != rank).sum()), 2 * report.tasks["gate"]
            assert report.bytes_sent == (sent + back) * H * 2 + pairs * 12 + packets * 8


def test_where_memory_is_mapped_nothing_is_put(tmp_path):
    for seen in put_by(2, {}, cubin=tmp_path / "kernel.cubin"):
        assert (seen.transport, seen.registered_bytes, seen.modules) == ("mapped", 0, 0)
        assert seen.variants == [jit.Variant("bfloat16", "swiglu")] and seen.launch["mapped"] == 2


FEW = {"max_tokens": 21, "return_mode": "direct", "tokens": 20}
"""Of three ranks: 252 rows in all, 15.75 an expert."""


@pytest.mark.parametrize("tokens", [0, 1, 21])
def test_few_tokens_of_several_ranks(tmp_path, tokens):
    """All calls of a context of so few tokens, also of a rank without, are another kernel's."""
    sizes = {name: FEW[name] for name in ("max_tokens", "return_mode")}
    plan = plan_memory(engine="cuda", ranks=3, **{**SIZES, **sizes})
    for seen in put_by(3, {**FEW, "tokens": tokens}, cubin=tmp_path / "kernel.cubin"):
        assert seen.variants == [jit.Variant("bfloat16", "swiglu", few_group=True)]
        names = ("few", "geometry", "cooperative", "tokens", "mapped", "block", "groups")
        assert [seen.launch[name] for name in names] == [1, 1, 1, tokens, 3, 8, [0, 1]]
        assert seen.launch["token_rows"] is None  # its gate takes no tensor map
        assert (seen.heap_bytes, seen.workspace_bytes) == (plan.heap_bytes, plan.workspace_bytes)


@pytest.mark.parametrize(
    "changes",
    [
        {"max_tokens": 22},
        {"return_mode": "reduced"},
        {"transport": "rdma", "return_mode": "reduced"},
        {"machines": (0, 0, 1)},
        {"how": {"capacity_factor": 2.0}},
    ],
    ids=str,
)
def test_what_the_general_kernel_takes_of_few_tokens(tmp_path, changes):
    for seen in put_by(3, {**FEW, **changes}, cubin=tmp_path / "kernel.cubin"):
        assert not seen.variants[0].few_group and (seen.launch["few"], seen.launch["geometry"]) == (0, 1)


def test_memory_that_one_rank_cannot_map(tmp_path):
    """Then all ranks put."""
    plan = plan_memory(engine="cuda", ranks=3, transport="rdma", **SIZES)
    unmapped = {"FAKE_NVSHMEM_UNMAPPED": "1"}
    for seen in put_by(3, {}, cubin=tmp_path / "kernel.cubin", environment=unmapped):
        assert (seen.transport, seen.return_mode, seen.launch["mapped"]) == ("rdma", "reduced", 1)
        assert (seen.heap_bytes, seen.workspace_bytes) == (plan.heap_bytes, plan.workspace_bytes)
    for told in put_by(3, {"return_mode": "direct"}, cubin=tmp_path / "kernel.cubin", environment=unmapped):
        assert told == (
            "InvalidArgument: return_mode: expected 'reduced' or 'auto' with transport 'rdma', got 'direct'"
        )


@pytest.mark.parametrize("mode", ["direct", "reduced"])
def test_ranks_that_are_told_to_be_of_several_machines(tmp_path, mode):
    spread, cubin = (0, 0, 1), tmp_path / "kernel.cubin"
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
            "behind": plain.heap_bytes,
        }
    for seen in put_by(3, {"machines": (4, 4, 4)}, cubin=cubin):  # all of one
        assert seen.variants == [jit.Variant("bfloat16", "swiglu")] and seen.launch["machines"] is None


def test_machines_that_cannot_be(tmp_path):
    cubin, reduced = tmp_path / "kernel.cubin", {"return_mode": "reduced"}
    first, *_ = put_by(3, *({"machines": each} for each in ((0, 0, 1), (0, 1, 1), (0, 1, 1))), cubin=cubin)
    assert first.startswith("GroupError: ") and "which ranks share a machine" in first
    for told in put_by(2, {**reduced, "machines": (0, 1), "transport": "rdma"}, cubin=cubin):
        assert told == "InvalidArgument: machines: expected one with transport 'rdma', got (0, 1)"
    for told in put_by(2, {"machines": (0, 1, 1)}, cubin=cubin):
        assert told == "InvalidArgument: machines: expected one for each of 2 ranks, got 3"
    unmapped = {"FAKE_NVSHMEM_UNMAPPED": "1"}
    for told in put_by(3, {**reduced, "machines": (0, 0, 1)}, cubin=cubin, environment=unmapped):
        assert told.startswith("GroupError: machines: expected memory that all ranks have mapped with (0, 0, 1)")


def test_ranks_that_want_other_transports(tmp_path):
    reduced = {"return_mode": "reduced"}
    first, second = put_by(2, {**reduced, "transport": "rdma"}, reduced, cubin=tmp_path / "kernel.cubin")
    assert "rdma (transport): rank 0 has 1, rank 1 has 0" in first
    assert "rdma (transport): rank 1 has 0, rank 0 has 1" in second


def test_a_kernel_compiled_with_other_headers_than_the_library_has(tmp_path):
    """Which NVSHMEM itself would let pass: they are older."""
    old = {"FAKE_DRIVER_OLD_HEADERS": "1"}
    for told in put_by(2, {"transport": "rdma"}, cubin=tmp_path / "kernel.cubin", environment=old):
        assert told == (
            "FlashMoEError: nvshmem: expected a kernel compiled with the headers of 3.8.0, the release of "
            "libnvshmem_host.so.3, got one compiled with those of 3.4.5; to have both of one release: "
            f"{nvshmem_files.INSTALL}"
        )


def test_a_module_of_another_nvshmem(tmp_path):
    other = {"FAKE_NVSHMEM_OTHER_VERSION": "1"}
    for told in put_by(2, {"transport": "rdma"}, cubin=tmp_path / "kernel.cubin", environment=other):
        assert told.startswith("FlashMoEError: nvshmem: nvshmemx_cumodule_init failed with status 1")


@pytest.mark.parametrize("name", ["NVSHMEM_IB_ENABLE_IBGDA", "NVSHMEM_GPUNETIO_ENABLE_GDAKI"])
def test_puts_by_the_gpu_itself_are_refused(tmp_path, name):
    for told in put_by(2, {"transport": "rdma"}, cubin=tmp_path / "kernel.cubin", environment={name: "1"}):
        assert told.startswith(f"InvalidArgument: {name}: expected it unset or 0 with transport 'rdma'")


def test_profiles():
    with pytest.raises(flashmoe.InvalidArgument, match=r"profile: expected names among gemm1_lag, .* got \['lag'\]"):
        flashmoe.Context(engine="cuda", profile={"lag": 1}, **SIZES)
    with pytest.raises(flashmoe.InvalidArgument, match=r"profile\[raster\]: expected an integer in \[1, 32\], got 33"):
        flashmoe.Context(engine="cuda", profile={"raster": 33}, **SIZES)
    profile = {"gemm1_lag": 7, "raster": 3, "window": 9, "gemm1_lists": 2, "own_first": 3, "senders": 2}
    with flashmoe.Context(engine="cuda", profile=profile, **SIZES) as made:
        flashmoe.moe(made, **arguments())
    # Alone, a rank sends nothing.
    assert [launched()[name] for name in profile] == [7, 3, 9, 2, 3, 0]


def store(profile, **changes):
    """As `flashmoe tune` does, for contexts of SIZES on the fake GPU."""
    sizes = {"hidden": H, "intermediate": I, "experts": E, "top_k": K, "tokens": 4096, **changes}
    setting = profiles.Setting(device="Fake", ranks=1, dtype="bfloat16", **sizes)
    profiles.store(profiles.Record(setting, "swiglu", profile, 1.0, 2.0))


def order_of(**changes):
    """What a call's order of tasks is, in a context with these parameters besides SIZES."""
    with flashmoe.Context(engine="cuda", **{**SIZES, **changes}) as made:
        flashmoe.moe(made, **arguments())
        return made.profile, [launched()[name] for name in ("gemm1_lag", "raster", "window")]


BUILT_IN = [2**32 - 1, 16, 528]


def test_stored_profiles():
    assert order_of() == ({}, BUILT_IN)
    store({"gemm1_lag": 7, "raster": 4, "return_mode": "direct"})
    stored = ({"gemm1_lag": 7, "raster": 4}, [7, 4, 528])
    assert order_of() == order_of(device=0) == stored
    assert order_of(max_tokens=500) == stored  # the nearest
    assert order_of(profile={}) == ({}, BUILT_IN)
    assert order_of(profile={"window": 9}) == ({"window": 9}, [2**32 - 1, 16, 9])
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
    """A context is made all the same, and says once why it has the built-in order."""
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
    """Of `flashmoe tune`. Each is called in contexts with its profile, whatever is stored."""
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


# ---- flashmoe run --engine cuda: what it does in a rank's process --------------------------------------------------


def run_on_rank(rank, ranks, name, world, cubin, free, *arguments):
    """`run.call_on_rank`; tensors claim to be on the rank's GPU, which has so many bytes free."""
    current = []
    pretend(current, cubin, {"FAKE_NVSHMEM_WORLD": world})
    torch.cuda.set_device = current.append
    torch.cuda.mem_get_info = lambda: (free, free)
    cli_device.to_device = lambda array: torch.zeros(array.shape, dtype=torch.bfloat16).as_subclass(OnGpu)
    return run.call_on_rank(rank, ranks, name, *arguments)


def run_command(monkeypatch, cubin, ranks, free):
    """Results and reports of `flashmoe run` for a small random layer."""
    request = workload.Request(ranks, 40, None, "direct", "cuda")
    work = workload.random_workload(models.scaled(models.find("olmoe"), 0.02), request, 0, 0.0)
    with fake_world() as world, RankPool(ranks) as pool:
        monkeypatch.setattr(
            run, "run_ranks", lambda n, fn, each: pool.call(run_on_rank, [(world, cubin, free, *a) for a in each])
        )
        return run._call(work)


@pytest.mark.parametrize("ranks", [1, 2])
def test_run_command(monkeypatch, tmp_path, ranks):
    results, reports = run_command(monkeypatch, tmp_path / "kernel.cubin", ranks, 1 << 40)
    for y, report in zip(results, reports, strict=True):
        assert y.shape == (40, 40) and y.dtype == "bfloat16"
        assert (report.tokens, report.topk_ids.shape) == (40, (40, 8))
        assert len(report.events) == 132 * len(PHASES)
    assert len(reports) == ranks


def test_run_command_on_a_gpu_without_room(monkeypatch, tmp_path):
    with pytest.raises(RankFailed, match=r"all 2 ranks: HeapError: .* of what is free on the GPU, got .*--scale"):
        run_command(monkeypatch, tmp_path / "kernel.cubin", 2, 1 << 10)
