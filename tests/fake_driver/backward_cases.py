"""On a rank alone: what a call keeps for its backward pass, and what the kernel of the backward pass is told."""

from __future__ import annotations

import flashmoe
import pytest
import torch
from fake_gpu import SIZES, E, H, I, K, OnGpu, launched, of_both, on_gpu
from flashmoe import jit
from flashmoe.engines.base import Gradients
from flashmoe.spec import Options
from flashmoe.spec.tensors import Tensors


@pytest.mark.parametrize("tokens", [3, 200], ids=["few tokens", "many"])
@pytest.mark.parametrize(("activation", "columns"), [("swiglu", 2 * I), ("gelu", I)])
def test_what_a_call_keeps(ctx, device, tokens, activation, columns):
    """Each call that keeps has a tensor of its own for it, and runs the kernel that keeps, even with few tokens."""
    weights = {"gate_up_proj": on_gpu(E, columns, H), "down_proj": on_gpu(E, H, I), "router": on_gpu(E, H)}
    tensors, options = Tensors(x=on_gpu(tokens, H), **weights), Options(top_k=K, activation=activation)
    ctx._engine.call(tensors, options, False)
    assert launched()["kept"] == 0 and launched()["few"] == (tokens == 3)
    kept = [ctx._engine.call_and_keep(tensors, options)[1] for _ in range(2)]
    assert set(device[:2]) == of_both(activation=activation)
    assert device[2:] == [jit.Variant(activation=activation, keeps=True)]
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
    """The kernel reads both matrices along the other axis than a forward pass does, and dZ through two tensor maps. It
    has memory for every tile."""
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
    ctx._engine.backward(kept, counted, options, Gradients(named | {"y": dy}, wanted, False))
    assert device[-1] == jit.Variant("bfloat16", activation, transposed=transposed, backward=True)
    seen, of = launched(), launched()["backward"]
    tiles = tokens * K // 256 + E
    assert (seen["few"], seen["x"], seen["x_row_bytes"], of["x"], of["x_row_bytes"]) == (
        0, dy.data_ptr(), 2 * H, tensors.x.data_ptr(), 4 * H,
    )  # fmt: skip
    assert (of["kept"], of["kept_ids"]) == (kept.data_ptr(), kept.data_ptr() + 2 * tokens * K * columns)
    assert (of["gate_up_gradient"], of["down_gradient"]) == (
        wanted["gate_up_proj"].data_ptr(),
        wanted["down_proj"].data_ptr(),
    )
    assert (of["gate_up_bias_gradient"], of["down_bias_gradient"], of["z_columns"]) == (0, 0, columns)
    assert (seen["gemm0_columns"], seen["gemm1_columns"]) == (1, 1)
    assert seen["intermediate_row_bytes"] == 2 * columns
    first = of["dz"]
    assert of["weighted"] == first + tiles * 256 * 2 * columns
    assert of["weight_parts"] == of["weighted"] + tiles * 256 * 2 * I
    rows, z, weighted = seen["intermediate_rows"], of["dz_columns"], of["weighted_columns"]
    assert (rows["base"], rows["dims"], rows["box"]) == (first, [columns, tiles * 256], [64, 32])
    assert (z["base"], z["dims"], z["box"]) == (first, [columns, tiles * 256, 1, 1, 1], [64, 64, 1, 1, 1])
    assert (weighted["dims"], weighted["strides"][0]) == ([I, tiles * 256, 1, 1, 1], 2 * I)
    along = [64, 8, 1, 16, 1] if transposed else [64, 64, 1, 1, 1]
    assert seen["gate_up"]["box"] == seen["down"]["box"] == along
    by_rows = [columns, 8, 1, H // 8, E], [H, 8, 1, I // 8, E]
    by_columns = [H, columns, 1, 1, E], [I, H, 1, 1, E]
    assert (seen["gate_up"]["dims"], seen["down"]["dims"]) == (by_rows if transposed else by_columns)


def test_a_backward_pass_with_weights_on_the_input(ctx, device):
    """Both passes have kernels of their own. With a gate_up_bias, rows of dZ without their weight get memory, too."""
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
        ctx._engine.backward(kept, counted, options, Gradients(named, {"x": on_gpu(tokens, H)}, False))
        of = launched()["backward"]
        behind.append((launched()["options"][0], of["weight_parts"] - of["weighted"]))
    assert behind == [(0, rows * 2 * I), (rows * 6 * I, rows * 6 * I)]
    assert device[-2:] == [jit.Variant(keeps=True, on_input=True), jit.Variant(backward=True, on_input=True)]


@pytest.mark.parametrize(
    ("options", "dtype", "of_up", "up_strides", "of_down", "down_stride"),
    [
        # two halves for each of three slices: I rows of gates, and I rows of ups behind the gates of all slices
        ({}, torch.bfloat16, [H, I, 2, 1, 3], [H, 3 * I * H, I * H], [I, H, 1, 1, 3], I),
        ({}, torch.float32, [H, I, 2, 1, 3], [H, 3 * I * H, I * H], [I, H, 1, 1, 3], I),
        ({"interleaved": True}, torch.bfloat16, [H, 2 * I, 1, 1, 3], [H, H, 2 * I * H], [I, H, 1, 1, 3], I),
        ({"transposed": True}, torch.bfloat16, [I, 8, 2, H // 8, 3], [6 * I, 3 * I, I], [H, 8, 1, I // 8, 3], I * H),
    ],
    ids=["plain", "float32", "interleaved", "transposed"],
)
def test_a_backward_pass_of_a_shared_expert(device, options, dtype, of_up, up_strides, of_down, down_stride):
    """The kernel treats each of three slices as an expert. For dX, a slice's gates and ups are two parts, unless they
    are interleaved. The rows of dZ of the second and third slice lie behind those of all tiles. The parameters give
    strides in elements."""
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
        ctx._engine.backward(kept, counted, told, Gradients(given, wanted, False))
    seen, of = launched(), launched()["backward"]
    assert device[-1] == jit.Variant(name, transposed="transposed" in options, backward=True, sliced=True)
    tiles = tokens * (K + 1) // 256 + E + 1
    rows = (tiles + 2 * 2) * 256
    assert seen["slice_tiles"] == tiles and of["weighted"] == of["dz"] + rows * 2 * I * size
    assert seen["intermediate_rows"]["dims"] == [2 * I, rows] and of["weighted_columns"]["dims"][1] == rows
    assert of["kept_ids"] == kept.data_ptr() + tokens * (K + shared) * 2 * I * size
    assert seen["options"][:3] == [0, wanted["shared_gate_up"].data_ptr(), wanted["shared_down"].data_ptr()]
    assert seen["options"][3] != 0 and seen["shared_gate"] == tensors.shared_gate.data_ptr()
    assert seen["shared_ups_gradient"] == wanted["shared_gate_up"].data_ptr()
    up, down = seen["shared_gate_up"], seen["shared_down"]
    assert (up["dims"], [up["strides"][n] // size for n in (0, 1, 3)]) == (of_up, up_strides)
    assert (down["dims"], down["strides"][3] // size) == (of_down, down_stride)
