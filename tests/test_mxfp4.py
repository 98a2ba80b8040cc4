"""Weights in MXFP4 on the CPU engine: every code and scale, the quantiser's rule, layers against the same numbers in
bfloat16. The tests of layers in every format are in test_quantised.py."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import flashmoe
import ml_dtypes
import numpy as np
import pytest
from flashmoe.checkpoint import shipped_layer
from flashmoe.contexts.memory import plan_memory
from flashmoe.quantize import dequantize_mxfp4, quantize_layer, quantize_mxfp4
from flashmoe.reference import dequantised
from flashmoe.spec import MXFP4
from problems import Problem, Ranks, check, in_mxfp4, random_problem
from test_quantised import FORMATS, check_refused

SIZES, LAYERS = FORMATS[MXFP4].sizes, FORMATS[MXFP4].layers
NUMBERS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
"""The magnitudes of e2m1; a number's index is its code."""


# ---- Codes and scales ----------------------------------------------------------------------------------------


def unpacked(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The numbers that a matrix [rows, n / 32, 16] stands for, computed one by one."""
    made = np.empty((len(blocks), 32 * blocks.shape[1]))
    for row, block, byte in np.ndindex(blocks.shape):
        scale = math.nan if scales[row, block] == 255 else 2.0 ** (int(scales[row, block]) - 127)
        for place, code in enumerate(divmod(int(blocks[row, block, byte]), 16)[::-1]):
            made[row, 32 * block + 2 * byte + place] = (-1.0) ** (code >> 3) * NUMBERS[code & 7] * scale
    return made


def seen_by_engine(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The numbers of a matrix [256, 8, 16] as the engine has them: its products with unit vectors of both signs. Of the
    two products of a number, ReLU keeps the positive one."""
    ones = np.zeros((1, 256, 8, 16), np.uint8)
    for i in range(256):
        ones[0, i, i // 32, i % 32 // 2] = 2 << 4 * (i % 2)
    x = np.concatenate([np.eye(256), -np.eye(256)]).astype(np.float32)
    sizes = {"max_tokens": 512, "hidden": 256, "intermediate": 256, "experts": 1, "top_k": 1, "dtype": "float32"}
    with flashmoe.Context(weight_dtype=MXFP4, processors=2, **sizes) as context:
        y = flashmoe.moe(
            context,
            x,
            blocks[None],
            ones,
            gate_up_scale=scales[None],
            down_scale=np.full((1, 256, 8), 127, np.uint8),
            activation="relu",
            topk_ids=np.zeros((512, 1), np.int32),
            topk_weights=np.ones((512, 1), np.float32),
        )
    return (y[:256] - y[256:]).T.astype(np.float64)


def test_all_codes_with_all_scales():
    """Row e has scale e and, in each block, every code twice. But rows 253 and 254 leave out the codes whose numbers
    would be beyond float32, and row 255, whose scale would be NaN, has zeros with scale 0."""
    codes = np.arange(32, dtype=np.uint8) % 16
    blocks = np.broadcast_to(codes[0::2] | codes[1::2] << 4, (256, 8, 16)).copy()
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 8, axis=1)
    blocks[253] &= 0xDD  # neither 4 nor 6
    blocks[254] &= 0xBB  # no more than 1.5
    blocks[255], scales[255] = 0, 0
    expected = unpacked(blocks, scales)
    assert len(np.unique(expected[100])) == 15  # 16 codes; the two zeros are equal
    np.testing.assert_array_equal(seen_by_engine(blocks, scales), expected)
    np.testing.assert_array_equal(dequantised(blocks, scales), expected)
    np.testing.assert_array_equal(dequantize_mxfp4(blocks, scales), expected)


def test_every_byte_in_every_place():
    """256 bytes, each in 16 places, with a scale of its own for each block."""
    blocks = ((np.arange(256)[:, None, None] + 16 * np.arange(8)[:, None] + 37 * np.arange(16)) % 256).astype(np.uint8)
    scales = np.random.default_rng(1).integers(97, 157, (256, 8)).astype(np.uint8)
    expected = unpacked(blocks, scales)
    np.testing.assert_array_equal(seen_by_engine(blocks, scales), expected)
    np.testing.assert_array_equal(dequantised(blocks, scales), expected)


def test_a_nan_scale_makes_its_experts_tokens_nan_and_no_other():
    problem = in_mxfp4(random_problem(1, [9], **SIZES, fused=False))
    problem.gate_up_scale = problem.gate_up_scale.copy()
    problem.gate_up_scale[3, 17, 2] = 255
    with flashmoe.Context(processors=2, **problem.limits()) as context:
        y = flashmoe.moe(context, **problem.arguments(0)).astype(np.float32)
    of_expert = (problem.topk_ids[0] == 3).any(axis=1)
    assert 0 < of_expert.sum() < 9
    assert np.isnan(y[of_expert]).all()
    assert np.isfinite(y[~of_expert]).all()
    assert np.isnan(dequantised(problem.gate_up_proj, problem.gate_up_scale)[3, 17, 64:96]).all()
    assert np.isnan(dequantize_mxfp4(problem.gate_up_proj, problem.gate_up_scale)).sum() == 32


# ---- The quantiser -------------------------------------------------------------------------------------------


def by_rule(block: np.ndarray) -> tuple[int, list[float]]:
    """A block's scale as an exponent, and its numbers divided by the scale, as `quantize_mxfp4` describes them."""
    largest = max(abs(float(each)) for each in block)
    exponent = -127 if largest == 0.0 else max(math.floor(math.log2(largest)) - 2, -127)
    chosen = []
    for each in block:
        wanted = abs(float(each)) / 2.0**exponent
        distances = [abs(wanted - number) for number in NUMBERS]
        nearest = [code for code, distance in enumerate(distances) if distance == min(distances)]
        code = nearest[0] if len(nearest) == 1 else next(code for code in nearest if code % 2 == 0)
        chosen.append(math.copysign(NUMBERS[code], float(each)))
    return exponent, chosen


@pytest.mark.parametrize("size", [1.0, 3e-5, 1e30, 2.0**-130])
def test_the_rule(size: float):
    random = np.random.default_rng(2)
    matrices = (size * random.standard_normal((3, 20, 96))).astype(np.float32)
    matrices[0, :, :32] = size * np.round(8.0 * matrices[0, :, :32] / size) / 8.0  # many midway between two numbers
    matrices[1, 3] = 0.0
    matrices[1, 4, :8] = size * 2.0 ** np.arange(8)
    blocks, scales = quantize_mxfp4(matrices)
    assert (blocks.shape, blocks.dtype) == ((3, 20, 3, 16), np.uint8)
    assert (scales.shape, scales.dtype) == ((3, 20, 3), np.uint8)
    numbers = dequantize_mxfp4(blocks, scales).reshape(-1, 32).astype(np.float64)
    for block, scale, made in zip(matrices.reshape(-1, 32), scales.flat, numbers, strict=True):
        exponent, expected = by_rule(block)
        assert int(scale) - 127 == exponent
        np.testing.assert_array_equal(made, np.array(expected) * 2.0**exponent)


def test_what_numbers_become():
    """Numbers of 7 scales and more become 6. A number midway between two gets the even code. Zeros keep their signs."""
    block = np.zeros(32, np.float32)
    block[:13] = [7.96875, -7.0, 5.0, 4.99, -3.5, 2.5, 1.75, -1.25, 0.75, 0.25, 0.2500001, -0.25, -0.0]
    blocks, scales = quantize_mxfp4(block)
    assert scales.tolist() == [127]
    numbers = dequantize_mxfp4(blocks, scales)
    assert numbers[:13].tolist() == [6.0, -6.0, 4.0, 4.0, -4.0, 2.0, 2.0, -1.0, 1.0, 0.0, 0.5, -0.0, -0.0]
    assert np.signbit(numbers[[11, 12]]).all()


def test_what_is_in_mxfp4_stays_as_it_is():
    """Bits stay the same if each block has a 6. Without a 6, the rule may choose a smaller scale."""
    random = np.random.default_rng(3)
    blocks = random.integers(0, 256, (50, 4, 16)).astype(np.uint8)
    blocks[..., 0] = 0x77  # a 6, so that the scale is the rule's
    scales = random.integers(0, 253, (50, 4)).astype(np.uint8)
    again, scales_again = quantize_mxfp4(dequantize_mxfp4(blocks, scales))
    np.testing.assert_array_equal(again, blocks)
    np.testing.assert_array_equal(scales_again, scales)


def test_every_bf16_value_is_within_half_a_step_or_a_quarter():
    every = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    every = every[np.isfinite(every.astype(np.float32))].astype(np.float32)
    values = np.zeros((len(every), 32), np.float32)
    values[:, 5] = every
    made = dequantize_mxfp4(*quantize_mxfp4(values))
    assert (made[:, [*range(5), *range(6, 32)]] == 0.0).all()
    exact, least = every.astype(np.float64), 2.0**-129  # half of the smallest number above 0
    assert (np.abs(made[:, 5] - exact) <= np.maximum(np.abs(exact) / 4, least)).all()


@pytest.mark.parametrize(
    ("matrices", "message"),
    [
        (np.ones((4, 48)), r"^matrices: expected a multiple of 32 columns, got \[4, 48\]"),
        (np.array([[np.inf] + [0.0] * 31]), "^matrices: expected finite numbers, got others among them"),
        (np.array([[np.nan] + [0.0] * 31]), "^matrices: expected finite numbers, got others among them"),
    ],
)
def test_what_cannot_be_quantised(matrices: np.ndarray, message: str):
    with pytest.raises(flashmoe.InvalidArgument, match=message):
        quantize_mxfp4(matrices)


def test_a_layer_is_quantised():
    layer, _ = shipped_layer()
    ours = quantize_layer(layer, dtype=MXFP4)
    blocks, scales = quantize_mxfp4(layer.down_proj)
    np.testing.assert_array_equal(ours.down_proj, blocks)
    np.testing.assert_array_equal(ours.down_scale, scales)
    assert ours.with_experts([2, 5]).gate_up_scale.shape == (2, 256, 8)
    with pytest.raises(flashmoe.InvalidArgument, match=r"^scales: expected one of block, got 'row'"):
        quantize_layer(layer, "row", MXFP4)
    with pytest.raises(flashmoe.InvalidArgument, match=r"^dtype: expected one of float8_e4m3fn, mxfp4, got 'int4'"):
        quantize_layer(layer, dtype="int4")
    with pytest.raises(flashmoe.InvalidArgument, match=r"^slices: expected slices of a multiple of 32 columns"):
        quantize_layer(replace(layer, slices=2, down_proj=layer.down_proj[..., :16]), dtype=MXFP4)


# ---- Layers --------------------------------------------------------------------------------------------------


def dequantised_problem(problem: Problem) -> Problem:
    """The same problem with its matrices' numbers in x's type."""
    kind, names = problem.x[0].dtype, ("gate_up_proj", "down_proj", "shared_gate_up", "shared_down")
    made: dict[str, Any] = {}
    for name in names:
        scale = f"{name.removesuffix('_proj')}_scale"
        if getattr(problem, name) is not None:
            made |= {name: dequantize_mxfp4(getattr(problem, name), getattr(problem, scale)).astype(kind), scale: None}
    return replace(problem, **made)


@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_bits_are_those_of_the_same_numbers_in_x_s_type(ranks: Ranks, options: dict[str, Any]):
    """x's type has the numbers exactly, because the scales here are no smaller than 2^-12."""
    problem = in_mxfp4(random_problem(4, [40, 9], **SIZES | options))
    plain = dequantised_problem(problem)
    assert (dequantize_mxfp4(problem.down_proj, problem.down_scale) == plain.down_proj.astype(np.float32)).all()
    for ours, theirs in zip(ranks.call(problem), ranks.call(plain), strict=True):
        np.testing.assert_array_equal(ours.y, theirs.y)
        assert ours.report.bytes_sent == theirs.report.bytes_sent  # rows are not quantised


def test_the_bound_notices_wrong_scales_and_nibbles(ranks: Ranks):
    problem = in_mxfp4(random_problem(8, [256], **SIZES, fused=False))
    with flashmoe.Context(processors=2, **problem.limits()) as context:

        def error(**changed: np.ndarray) -> float:
            y = flashmoe.moe(context, **problem.arguments(0) | changed)
            return float(np.linalg.norm(y.astype(np.float64) - expected))

        (outcome,) = ranks.call(problem)
        check(problem, [outcome])
        expected, bound = outcome.reference.y, outcome.allowed.bound
        assert 0.5 * bound < error() < bound
        swapped = problem.gate_up_proj >> 4 | problem.gate_up_proj << 4
        assert error(gate_up_proj=swapped) > 5 * bound
        assert error(down_scale=problem.down_scale[:, :, ::-1].copy()) > 5 * bound
        assert error(gate_up_scale=np.roll(problem.gate_up_scale, 1, axis=1)) > 5 * bound


def test_memory_is_that_of_x_s_type():
    sizes = {"ranks": 4, "max_tokens": 64, "hidden": 2880, "intermediate": 2880, "experts": 32, "top_k": 4}
    assert plan_memory(**sizes, weight_dtype=MXFP4) == plan_memory(**sizes)


# ---- What is refused -----------------------------------------------------------------------------------------


REFUSED = {
    "blocks of another size": (
        {"gate_up_scale": np.ones((12, 320, 14), np.uint8)},
        r"gate_up_scale: expected \[12, 320, 7\] \(a scale for each 1 x 32\), got \[12, 320, 14\]",
    ),
    "bytes without blocks": (
        {"gate_up_proj": np.ones((12, 320, 112), np.uint8)},
        r"gate_up_proj: expected \[El, rows, columns / 32, 16\] uint8, got \[12, 320, 112\]",
    ),
    "a shared matrix with an axis of experts": (
        {"shared_down": np.ones((1, 224, 5, 16), np.uint8)},
        r"shared_down: expected \[rows, columns / 32, 16\] uint8, got \[1, 224, 5, 16\]",
    ),
    "a matrix in FP8": (
        {"down_proj": np.ones((12, 224, 160), ml_dtypes.float8_e4m3fn)},
        r"down_proj: expected mxfp4, the type of gate_up_proj, got \[12, 224, 160\] float8_e4m3fn",
    ),
    "another intermediate size": (
        {"gate_up_proj": np.ones((12, 256, 7, 16), np.uint8)},
        r"gate_up_proj: expected \[El=12, 2I=320, H=224\] mxfp4, got \[12, 256, 224\] mxfp4",
    ),
    "x of bytes": (
        {"x": np.ones((3, 224), np.uint8)},
        "x: expected a float32, bfloat16, float16, float8_e4m3fn tensor",
    ),
    "x in FP8": (
        {"x": np.ones((3, 224), ml_dtypes.float8_e4m3fn), "x_scale": np.ones((3, 2), np.float32)},
        "x: expected float32, bfloat16, float16 with weights of mxfp4, got float8_e4m3fn",
    ),
    "a bias of bytes": ({"gate_up_bias": np.ones((12, 320), np.uint8)}, "gate_up_bias: expected a float32, bfloat16"),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str):
    check_refused(in_mxfp4(random_problem(9, [3], **SIZES, fused=False, shared=1)), change, message)


@pytest.mark.parametrize("name", ["hidden", "intermediate"])
def test_sizes_that_are_no_blocks_are_refused(name: str):
    """No matrix in MXFP4 can have such a size. A module of such a size is refused before its parameters are made."""
    torch = pytest.importorskip("torch")
    from flashmoe.nn import MoE

    sizes = {"hidden": 64, "intermediate": 64, name: 48}
    with flashmoe.Context(max_tokens=4, experts=4, top_k=2, weight_dtype=MXFP4, **sizes) as context:
        message = f"^{name}: expected a multiple of 32 with weights of mxfp4, got 48"
        with pytest.raises(flashmoe.InvalidArgument, match=message):
            MoE(context, sizes["hidden"], sizes["intermediate"], 4, 2)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"dtype": "float32"}, "x: expected bfloat16, float16 with weights of mxfp4, got float32"),
        ({"dtype": "bfloat16", "rank": 0, "ranks": 2, "name": "x"}, "ranks: expected 1 with weights of mxfp4, got 2"),
    ],
    ids=["float32", "two ranks"],
)
def test_what_a_gpu_has_no_kernel_of_is_refused_by_name(more: dict[str, Any], message: str):
    sizes = {"max_tokens": 4, "hidden": 64, "intermediate": 64, "experts": 4, "top_k": 2}
    with pytest.raises(flashmoe.InvalidArgument, match=f"^CUDA engine: {message}$"):
        flashmoe.Context(engine="cuda", weight_dtype=MXFP4, **sizes, **more)
