"""Weights, and tokens, of float8_e4m3fn with scales beside them."""

from __future__ import annotations

import flashmoe
import pytest
import torch
from fake_gpu import SIZES, E, H, I, arguments, given, launched, of_both, on_gpu
from flashmoe.engines.base import Gradients
from flashmoe.spec import Options
from flashmoe.spec.tensors import Tensors

F8 = torch.float8_e4m3fn
FP8_SIZES = {**SIZES, "weight_dtype": "float8_e4m3fn"}


def in_fp8(tokens: int = 100, scales: str = "block", **changes) -> dict:
    """Arguments of a layer in FP8. With H = 256 and I = 64, gate_up_proj has 2 by 2 blocks with a scale each (the first
    row of blocks is the gates'), and down_proj has 2 by 1."""
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
        seen = launched()
        assert (seen["few"], seen["geometry"], seen["threads"], seen["token_rows"]) == (1, 1, 416, None)
        y = flashmoe.moe(ctx, **args)
    assert y.dtype == torch.bfloat16
    assert set(device) == of_both(quantised=True) and len(device) == 2
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


def test_layers_without_gradients_are_named():
    """The forward pass succeeds and keeps nothing. The backward pass raises an error that names the layer's types."""
    arguments_of = dict.fromkeys(Tensors._fields) | in_fp8(8)
    options = Options(top_k=arguments_of.pop("top_k"))
    tensors = Tensors(**arguments_of)
    given = {name: each for name, each in tensors._asdict().items() if each is not None}
    with flashmoe.Context(engine="cuda", **FP8_SIZES) as ctx:
        _, kept, counted = ctx._engine.call_and_keep(tensors, options)
        assert kept.numel() == launched()["kept"] == 0
        with pytest.raises(NotImplementedError, match="no backward pass of x of bfloat16 with weights of"):
            ctx._engine.backward(kept, counted, options, Gradients(given | {"y": tensors.x}, {}, False))
