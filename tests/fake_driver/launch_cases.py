"""What a launch tells the kernel: a call's sizes, the addresses of its tensors, and the tensor maps with which the copy
engine reads them."""

from __future__ import annotations

from functools import partial

import flashmoe
import pytest
import torch
from fake_gpu import SIZES, E, H, I, K, arguments, given, launched, of_both, on_gpu
from flashmoe import _ffi, jit


def test_the_launch(ctx, device):
    args = arguments(200, router_bias=on_gpu(E), gate_up_bias=on_gpu(E, 2 * I), down_bias=on_gpu(E, H))
    y = flashmoe.moe(ctx, **args, capacity_factor=1.5, renormalize=False)
    assert (y.shape, y.dtype) == ((200, H), torch.bfloat16)
    assert set(device) == of_both() == set(jit.variants_alone()) and len(device) == 2
    seen = launched()
    expected = {
        "grid": 132,
        "few": 0,
        "geometry": 1,
        "stream": 77,
        "cooperative": 1,
        "tokens": 200,
        "hidden": H,
        "intermediate": I,
        "experts": E,
        "top_k": K,
        "local_experts": E,
        "block": 8,
        "capacity": 75,  # ceil(1.5 * 200 * 4 / 16)
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
    args = arguments(200, dtype, gate_up_proj=on_gpu(E, rows, H, dtype=dtype), activation=activation)
    size = args["x"].element_size()
    with flashmoe.Context(engine="cuda", **{**SIZES, "dtype": "float32"}) as ctx:  # no call has wider elements
        flashmoe.moe(ctx, **args)
    assert set(device) == of_both(str(dtype).removeprefix("torch."), activation)
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
        "dims": [H, 200],
        "strides": [row],
        "box": [span, 32],
    }


@pytest.mark.parametrize(("experts", "rows"), [(32, 32), (33, 64), (64, 64), (65, 128)])
def test_the_routers_box(experts, rows):
    """With few experts, the boxes of the router's map have fewer rows, so that the gate's stages hold more tokens."""
    weights = {
        "gate_up_proj": on_gpu(experts, 2 * I, H),
        "down_proj": on_gpu(experts, H, I),
        "router": on_gpu(experts, H),
    }
    with flashmoe.Context(engine="cuda", **{**SIZES, "experts": experts}) as ctx:
        flashmoe.moe(ctx, **arguments(200, **weights))
    seen = launched()["router"]
    assert seen["dims"] == [H, experts, 1, 1, 1] and seen["box"] == [64, rows, 1, 1, 1]


def test_strided_tensors(ctx):
    x = on_gpu(200, 3 * H)[:, H : 2 * H]
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


def test_exact(ctx, device):
    flashmoe.moe(ctx, **arguments(), exact=True)
    assert set(device) == of_both()  # `exact` changes nothing in bfloat16
    with flashmoe.Context(engine="cuda", **{**SIZES, "dtype": "float32"}) as wide:
        flashmoe.moe(wide, **arguments(dtype=torch.float32), exact=True)
    assert set(device[2:]) == of_both("float32", exact=True)


def test_operator_and_module(ctx):
    from flashmoe import nn
    from flashmoe.pytorch import operator

    module = nn.MoE(ctx, H, I, E, K)
    assert module.exact is False
    args = arguments()
    floats = [args[name] for name in ("x", "gate_up_proj", "down_proj", "router")]
    y = operator._moe(operator.context_id(ctx), *floats, top_k=K, exact=True)
    assert y.shape == (100, H) and launched()["tokens"] == 100


def test_token_block(ctx):
    block = partial(_ffi.library().cuda_token_block, ctx._engine.checked_handle())
    assert [block(tokens, 128, 8) for tokens in (1, 1056, 1057, 8192, 65536)] == [8, 8, 16, 64, 128]
    assert block(65536, 1024, 8) == 16  # the most, since a block may have 16384 logits
    assert block(65536, 8, 32) == 64  # the most, since a block may have 2048 choices
