"""Weights [E, H, 2I] and [E, I, H] (`transposed`): their tensor maps, and the layers for which there is no kernel."""

from __future__ import annotations

import flashmoe
import pytest
import torch
from fake_gpu import SIZES, E, H, I, arguments, launched, on_gpu
from flashmoe import jit


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
    with flashmoe.Context(engine="cuda", **{**SIZES, "dtype": "float32"}) as ctx:  # wider elements than the call's
        flashmoe.moe(ctx, **args, transposed=True, **options)
    name = str(dtype).removeprefix("torch.")
    assert device == [jit.Variant(name, options["activation"], transposed=True)]
    assert device == jit.variants_alone(name, options["activation"], transposed=True)
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
        if axis == 1:  # a further row behind each expert's does no harm
            flashmoe.moe(ctx, **arguments(**matrices), transposed=True)
            continue
        with pytest.raises(flashmoe.InvalidArgument, match=rf"^{name}: expected rows that begin at multiples of 16"):
            flashmoe.moe(ctx, **arguments(**matrices), transposed=True)
