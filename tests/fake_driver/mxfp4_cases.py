"""Weights in MXFP4: two elements per byte, and a scale for every 32 elements."""

from __future__ import annotations

import flashmoe
import pytest
import torch
from fake_gpu import SIZES, E, H, I, arguments, launched, on_gpu
from flashmoe import jit

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
    """The tensor maps are of bytes: a row has half as many bytes as columns."""
    wide = on_gpu(E, 2 * I + 3, H // 32, 16, dtype=torch.uint8)[:, : 2 * I]
    args = in_mxfp4(gate_up_proj=wide)
    with flashmoe.Context(engine="cuda", **MXFP4_SIZES) as ctx:
        y = flashmoe.moe(ctx, **args)
    assert (y.shape, y.dtype) == ((3, H), torch.bfloat16)
    assert device == [jit.Variant(mxfp4=True, few=True)] == jit.variants_alone(mxfp4=True)
    seen, row = launched(), H // 2
    assert (seen["few"], seen["geometry"], seen["token_rows"], seen["scales_by_row"]) == (1, 1, None, 0)
    assert seen["threads"] == 416
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


def test_a_recorded_call_of_the_kernel_for_a_few_tokens_alone(device):
    """The cubin of this kernel also has the kernel that tells the time, so the trace knows the device's clock."""
    with flashmoe.Context(engine="cuda", **MXFP4_SIZES) as ctx:
        [trace] = ctx.trace(lambda: flashmoe.moe(ctx, **in_mxfp4()))
    assert device == [jit.Variant(mxfp4=True, few=True, trace=True)]
    assert abs(trace.offset_ns + 10**9) < 10**8 and 0 < trace.error_ns < 10**8


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
        flashmoe.moe(made, **in_mxfp4(64))  # the most: 16 rows per expert on average
        for tokens in (65, 4096):
            expected = (
                "^x: expected at most 64 tokens with weights of mxfp4 on the CUDA engine, which has no kernel for more"
                f", got {tokens}$"
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
