"""Weights and rows in FP8 on the CPU engine: the quantiser's bits, x that comes quantised, bytes sent. The tests of
layers in every format are in test_quantised.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import flashmoe
import ml_dtypes
import numpy as np
import pytest
from flashmoe import _ffi
from flashmoe.contexts.memory import plan_memory
from flashmoe.quantize import dequantize, quantize_rows, quantize_weights
from flashmoe.reference import dequantised, moe_reference, rounded, row_scales, scaled_rows
from flashmoe.spec import FP8, row_bytes
from problems import Outcome, Ranks, check, quantised, random_problem
from test_quantised import FORMATS, TOKENS, check_refused

F8 = ml_dtypes.float8_e4m3fn
SIZES = FORMATS[FP8].sizes


# ---- The quantiser -------------------------------------------------------------------------------------------


def by_engine(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows quantised by the CPU engine: their elements as bytes, and their scales."""
    values = np.ascontiguousarray(rows, np.float32)
    elements = np.empty(values.shape, np.uint8)
    scales = np.empty((len(values), -(-values.shape[1] // 128)), np.float32)
    from tvm_ffi import from_dlpack

    _ffi.library().quantise_rows(*map(from_dlpack, (values, elements, scales)))
    return elements, scales


def by_torch(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What `by_engine` returns, for rows of 128 elements, computed with PyTorch's conversion to e4m3."""
    torch = pytest.importorskip("torch")
    values = torch.from_numpy(np.ascontiguousarray(rows, np.float32))
    largest = values.nan_to_num(nan=0.0, posinf=float("inf"), neginf=-float("inf")).abs().amax(dim=1, keepdim=True)
    scale = torch.clamp(largest / 448.0, min=2.0**-126)
    elements = (values * (1.0 / scale)).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return elements.view(torch.uint8).numpy(), scale.numpy()


ALL_BF16 = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16)


def test_every_bf16_value_has_the_bits_that_torch_gives_it():
    """Values up to 448, in rows that have a 448, so that the scale is 1. Then all values, in rows with other scales."""
    small = ALL_BF16[np.abs(ALL_BF16.astype(np.float32)) <= 448.0]
    small = np.concatenate([small, np.zeros(-len(small) % 127, small.dtype)]).reshape(-1, 127)
    for rows in (np.hstack([small, np.full((len(small), 1), 448.0, small.dtype)]), ALL_BF16.reshape(-1, 128)):
        (elements, scales), (expected, expected_scales) = by_engine(rows), by_torch(rows)
        np.testing.assert_array_equal(scales, expected_scales)
        nan = np.isnan(expected.view(F8).astype(np.float32))
        np.testing.assert_array_equal(elements[~nan], expected[~nan])
        assert (elements[nan] == 0x7F).all()  # a NaN loses its sign


@pytest.mark.parametrize("width", [1, 128, 200, 512])
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30, 2.0**-140])
def test_engine_package_and_reference_quantise_alike(width: int, scale: float):
    rows = (scale * np.random.default_rng(width).standard_normal((64, width))).astype(np.float32)
    rows[3] = 0.0
    (elements, scales), (numbers, package_scales) = by_engine(rows), quantize_rows(rows)
    np.testing.assert_array_equal(elements, numbers.view(np.uint8))
    np.testing.assert_array_equal(scales, package_scales)
    np.testing.assert_array_equal(scales, row_scales(rows))
    each = np.repeat(np.float32(1.0) / scales, 128, axis=1)[:, :width]
    np.testing.assert_array_equal(elements.view(F8).astype(np.float64), rounded(rows * each))


def test_what_is_no_number_stays_none_and_zeros_stay_zeros():
    rows = np.ones((3, 256), np.float32)
    rows[0, 5], rows[1, 7], rows[2, :128] = np.nan, -np.inf, 0.0
    elements, scales = by_engine(rows)
    numbers = elements.view(F8).astype(np.float32)
    assert np.isnan(numbers[0]).nonzero()[0].tolist() == [5]
    assert (numbers[0, :5] == 448.0).all()  # the scale is that of the other elements
    assert np.isnan(numbers[1]).nonzero()[0].tolist() == [7]
    assert np.isinf(scales[1, 0])
    assert (numbers[1, :7] == 0.0).all()  # multiplied by the scale, which is infinite, they are NaN
    assert (numbers[2, :128] == 0.0).all()
    assert scales[2].tolist() == [2.0**-126, np.float32(1.0) / np.float32(448.0)]


def test_the_references_e4m3_is_that_of_ml_dtypes():
    numbers = np.arange(256, dtype=np.uint8).view(F8).astype(np.float64)
    np.testing.assert_array_equal(rounded(numbers), numbers)
    values = np.random.default_rng(1).uniform(-500.0, 500.0, 100_000).astype(np.float32)
    np.testing.assert_array_equal(rounded(values), np.clip(values, -448, 448).astype(F8).astype(np.float64))


@pytest.mark.parametrize("halves", [1, 2])
@pytest.mark.parametrize("scales", ["block", "row", "tensor"])
def test_weights_are_within_half_a_step_of_what_they_were(scales: str, halves: int):
    weights = np.random.default_rng(2).standard_normal((3, 2 * 136, 200)).astype(np.float32)
    elements, scale = quantize_weights(weights, scales, halves)
    numbers = dequantize(elements, scale, halves)
    np.testing.assert_array_equal(numbers, dequantised(elements, scale, halves))
    assert (
        scale.shape
        == {"block": (3, halves * -(-272 // halves // 128), 2), "row": (3, 272, 1), "tensor": (3, 1, 1)}[scales]
    )
    # Half a step of e4m3 is at most 1/16 of a number, or 2^-10 for numbers near 0. Scales make the largest one 448.
    largest = np.abs(weights).max()
    assert (np.abs(numbers - weights) <= np.maximum(np.abs(weights) / 16.0, largest * 2.0**-10 / 448.0) * 1.0001).all()


# ---- Layers --------------------------------------------------------------------------------------------------


def test_x_may_come_quantised_which_changes_no_bit(ranks: Ranks):
    problem = random_problem(5, TOKENS, **SIZES, fused=False)
    of_x, given = ranks.call(quantised(problem)), ranks.call(quantised(problem, x=True))
    check(quantised(problem, x=True), given)
    for ours, theirs in zip(of_x, given, strict=True):
        assert theirs.y.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(ours.y, theirs.y)


@pytest.mark.parametrize("return_mode", ["direct", "reduced"])
def test_half_the_bytes_travel(ranks: Ranks, return_mode: str):
    """A dispatched row has H bytes and H / 32 bytes of scales, instead of 2 H bytes. Return rows stay as they are."""
    sizes = SIZES | {"hidden": 512, "return_mode": return_mode}
    plain = random_problem(7, TOKENS, **sizes, fused=False)
    pairs = zip(ranks.call(plain), ranks.call(quantised(plain)), strict=True)
    for each, of_fp8 in ((a.report, b.report) for a, b in pairs):
        assert (of_fp8.rows_sent, of_fp8.return_rows_sent) == (each.rows_sent, each.return_rows_sent)
        assert each.bytes_sent - of_fp8.bytes_sent == each.rows_sent * (2 * 512 - (512 + 16))
    assert row_bytes(512, FP8) == 528
    assert row_bytes(200, FP8) == 208 + 16


def test_rows_take_half_the_memory():
    sizes = {"ranks": 4, "max_tokens": 64, "hidden": 7168, "intermediate": 2048, "experts": 256, "top_k": 8}

    def bytes_of(name: str, **options: Any) -> int:
        return sum(term.bytes for term in plan_memory(**sizes, **options).terms if term.name == name)

    for engine in ("cpu", "cuda"):
        rows = bytes_of("rows", engine=engine)
        assert bytes_of("rows", engine=engine, weight_dtype=FP8) == rows * 7392 // 14336
        assert bytes_of("return_rows", engine=engine, weight_dtype=FP8) == bytes_of("return_rows", engine=engine)
        assert bytes_of("out_rows", engine=engine, weight_dtype=FP8) == 64 * 7392
        assert bytes_of("out_rows", engine=engine) == 0


def test_the_bound_is_no_wider_than_it_must_be():
    """The error is over half of the bound. Wrong scales, or unquantised intermediate rows, exceed the bound."""
    problem = quantised(random_problem(9, [512], **SIZES | {"hidden": 512, "intermediate": 256}, fused=False))
    with flashmoe.Context(processors=2, **problem.limits()) as context:
        y = flashmoe.moe(context, **problem.arguments(0))
        outcome = Outcome(y, context.last_call)
        check(problem, [outcome])
        expected, bound = outcome.reference.y, outcome.allowed.bound
        assert 0.5 * bound < np.linalg.norm(y.astype(np.float64) - expected) < bound
        spoiled = problem.down_scale[:, :, ::-1].copy()
        other = flashmoe.moe(context, **problem.arguments(0) | {"down_scale": spoiled})
        assert np.linalg.norm(other.astype(np.float64) - expected) > 5 * bound
    x = scaled_rows(*quantize_rows(problem.x[0]))
    matrices = [
        dequantised(getattr(problem, f"{name}_proj"), getattr(problem, f"{name}_scale"), halves)
        for name, halves in (("gate_up", 2), ("down", 1))
    ]
    routing = {"topk_ids": problem.topk_ids[0], "topk_weights": problem.topk_weights[0]}
    unquantised = moe_reference(x, *matrices, **routing)  # x and the weights are quantised, intermediate rows are not
    assert np.linalg.norm(unquantised.y - expected) > 5 * bound


# ---- What is refused -----------------------------------------------------------------------------------------


REFUSED = {
    "blocks of another size": (
        {"gate_up_scale": np.ones((12, 3, 2), np.float32)},
        r"gate_up_scale: expected \[12, 4, 2\] \(a scale for each 128 x 128\), \[12, 272, 1\] \(for each row\) or "
        r"\[12, 1, 1\] \(for each matrix\), got \[12, 3, 2\]",
    ),
    "scales of two kinds": (
        {"down_scale": np.ones((12, 200, 1), np.float32)},
        r"down_scale: expected a scale for each block, as gate_up_scale has, got \[12, 200, 1\]",
    ),
    "a bias in FP8": (
        {"gate_up_bias": np.ones((12, 272), F8)},
        r"gate_up_bias: expected bfloat16, the type of x, got \[12, 272\] float8_e4m3fn",
    ),
    "x without scales": (
        {"x": np.ones((3, 200), F8)},
        "x_scale: expected a tensor with x of float8_e4m3fn, got None",
    ),
    "scales of x that is not quantised": (
        {"x_scale": np.ones((3, 2), np.float32)},
        "x_scale: expected x of float8_e4m3fn with it, got bfloat16",
    ),
    "scales of x for other tokens": (
        {"x": np.ones((3, 200), F8), "x_scale": np.ones((4, 2), np.float32)},
        r"x_scale: expected \[T=3, H/128=2\] float32, got \[4, 2\] float32",
    ),
    "a router with x in FP8": (
        {"x": np.ones((3, 200), F8), "x_scale": np.ones((3, 2), np.float32), "topk_ids": None, "topk_weights": None}
        | {"router": np.ones((12, 200), ml_dtypes.bfloat16), "top_k": 4},
        "router: expected none with x of float8_e4m3fn, since it would read the rounded x, got one",
    ),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_layer_is_refused_by_name(change: dict[str, Any], message: str):
    check_refused(quantised(random_problem(10, [3], **SIZES, fused=False, shared=1)), change, message)


def test_scales_of_weights_that_are_not_quantised_are_refused():
    change = {"down_scale": np.ones((12, 2, 2), np.float32)}
    message = "down_scale: expected down_proj of float8_e4m3fn or mxfp4 with"
    check_refused(random_problem(11, [3], **SIZES), change, message)


def test_a_slice_that_cuts_a_block_is_refused(ranks: Ranks):
    problem = quantised(random_problem(12, [3, 3], **SIZES))
    placement = [n % 2 for n in range(12)]
    limits = problem.limits() | {"experts": 6, "slices": 2, "placement": placement, "top_k": 2}
    sliced = replace(problem, options={"slices": 2}, router=problem.router[:6], top_k=2, placement=placement)
    with pytest.raises(Exception, match="slices: expected slices of a multiple of 128 columns with weights of float8"):
        ranks.call(sliced, limits)
    wide = quantised(random_problem(13, [3], **SIZES, shared=2))
    with (
        flashmoe.Context(processors=1, **wide.limits()) as context,
        pytest.raises(flashmoe.InvalidArgument, match=r"^shared_down: expected slices of a multiple of 128 columns"),
    ):
        flashmoe.moe(context, **wide.arguments(0))
