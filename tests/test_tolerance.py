"""The error bounds hold, are not loose, and notice an implementation that rounds once too often.

The implementation in this file is plain NumPy, and rounds where the operator's definition says.
tests/test_properties.py holds the engine to the same bounds.
"""

import ml_dtypes
import numpy as np
import pytest
from flashmoe.reference import (
    ReferenceResult,
    activate,
    check_topk,
    choose,
    moe_reference,
    router_logits,
    weigh,
)
from flashmoe.tolerance import CallError, call_error, relative_error, router_error
from size_bound import error_bound

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
T, H, I, E, K, RANKS = 2048, 48, 40, 6, 3, 2
PLACEMENT = [e % RANKS for e in range(E)]


def rounded(values, dtype):
    return values.astype(np.float32).astype(dtype).astype(np.float32)


def serial_dot(a, b):
    """a @ b.T in float32, one product after the other: the order with the largest error."""
    total = np.zeros((len(a), len(b)), np.float32)
    for j in range(a.shape[1]):
        total += a[:, j, None] * b[None, :, j]
    return total


def rounding_moe(x, gate_up, down, ids, weights, activation, return_mode, dtype, spoil=None):
    """The operator with its roundings. `spoil` is a dtype to which the results of GEMM0 are rounded in addition. The
    experts are arrays, or lists of matrices of any width."""
    x = x.astype(np.float32)
    gate_up, down = ([each.astype(np.float32) for each in matrices] for matrices in (gate_up, down))
    weights = weights.astype(np.float32)
    rows = np.zeros((len(x), ids.shape[1], x.shape[1]), np.float32)
    for expert in range(len(gate_up)):
        t, k = np.nonzero(ids == expert)
        z = serial_dot(x[t], gate_up[expert])
        if spoil is not None:
            z = rounded(z, spoil)
        a = rounded(activate(z, activation), dtype)
        rows[t, k] = rounded(weights[t, k, None] * serial_dot(a, down[expert]), dtype)
    if return_mode == "reduced":
        owners = np.array(PLACEMENT)[ids][..., None]
        rows = np.stack([rounded((rows * (owners == r)).sum(axis=1), dtype) for r in range(RANKS)], axis=1)
    return rows.sum(axis=1, dtype=np.float32).astype(dtype)


def example(dtype, activation, tokens):
    rng = np.random.default_rng(7)
    factors = 2 if activation == "swiglu" else 1
    x = rng.standard_normal((tokens, H)).astype(DTYPES[dtype])
    gate_up = (rng.standard_normal((E, factors * I, H)) / np.sqrt(H)).astype(DTYPES[dtype])
    down = (rng.standard_normal((E, H, I)) / np.sqrt(I)).astype(DTYPES[dtype])
    logits = rng.standard_normal((tokens, E))
    ids = choose(logits, K)
    return x, gate_up, down, ids, weigh(logits, ids).astype(np.float32)


def measure(dtype, activation, return_mode, spoil=None, tokens=T) -> tuple[float, CallError, ReferenceResult]:
    inputs = example(dtype, activation, tokens)
    *arrays, ids, weights = inputs
    reference = moe_reference(*arrays, topk_ids=ids, topk_weights=weights, activation=activation)
    expected = call_error(*inputs, return_mode=return_mode, placement=PLACEMENT, activation=activation)
    y = rounding_moe(*inputs, activation, return_mode, DTYPES[dtype], spoil)
    return float(np.linalg.norm(y.astype(np.float64) - reference.y)), expected, reference


@pytest.mark.parametrize("return_mode", ["direct", "reduced"])
@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu", "swiglu"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bounds_hold_and_are_tight(dtype, activation, return_mode):
    error, expected, reference = measure(dtype, activation, return_mode)
    assert expected.bound < 1.4 * expected.rms
    if dtype == "float32":  # here the error model assumes the mantissas with the largest rounding errors
        assert 0.5 * expected.rms < error < expected.rms
    else:
        assert 0.95 * expected.rms < error < 1.05 * expected.rms
    bound = error_bound(dtype, H, I, K, return_mode, activation=activation)
    assert bound / 2.0 < error / reference.scale < bound


@pytest.mark.parametrize("return_mode", ["direct", "reduced"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_one_more_rounding_exceeds_the_bound(dtype, return_mode):
    error, expected, _ = measure(dtype, "swiglu", return_mode, spoil=DTYPES[dtype], tokens=4 * T)
    assert error > 1.1 * expected.bound


def shared_of_slices_that_cancel(dtype, slices):
    """The matrices of a shared expert's slices. The slices' results nearly cancel: their sum is small beside each."""
    rng = np.random.default_rng(8)
    up = rng.standard_normal((2 * I, H)) / np.sqrt(H) + rng.standard_normal((slices, 2 * I, H)) / 100.0
    down = rng.standard_normal((H, I)) / np.sqrt(I) * np.resize([4.0, -4.0], slices)[:, None, None]
    return up.astype(DTYPES[dtype]), down.astype(DTYPES[dtype])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_shared_expert_is_rounded_once_or_slice_by_slice(dtype):
    """A shared expert may be rounded once, or slice by slice. The error of either way is close to its own bound, and
    rounding slice by slice exceeds the bound of rounding once."""
    slices, tokens, as_dtype = 4, 4 * T, DTYPES[dtype]
    x, gate_up, down, ids, weights = example(dtype, "swiglu", tokens)
    up_slices, down_slices = shared_of_slices_that_cancel(dtype, slices)
    gates, ups = np.split(up_slices, 2, axis=1)
    shared = {
        "shared_gate_up": np.concatenate([*gates, *ups]),
        "shared_down": np.concatenate(down_slices, axis=1),
    }
    reference = moe_reference(x, gate_up, down, topk_ids=ids, topk_weights=weights, **shared)

    errors, bounds = [], []
    for in_slices in (False, True):
        further = (up_slices, down_slices) if in_slices else [[each] for each in shared.values()]
        count = len(further[1])
        every = np.tile(E + np.arange(count), (tokens, 1)), np.ones((tokens, count), np.float32)
        chosen = [np.hstack(pair) for pair in zip((ids, weights), every, strict=True)]
        experts = [[*matrices, *more] for matrices, more in zip((gate_up, down), further, strict=True)]
        y = rounding_moe(x, *experts, *chosen, "swiglu", "direct", as_dtype)
        errors.append(float(np.linalg.norm(y.astype(np.float64) - reference.y)))
        how = {"return_mode": "direct", "placement": PLACEMENT, "shared_in_slices": in_slices}
        bounds.append(call_error(x, gate_up, down, ids, weights, **how, **shared))
    for error, expected in zip(errors, bounds, strict=True):
        assert 0.9 * expected.rms < error < 1.1 * expected.rms
        assert expected.bound < 1.4 * expected.rms
    assert errors[1] > 1.1 * bounds[0].bound


def test_float32_through_half_precision_exceeds_the_bounds():
    error, expected, reference = measure("float32", "swiglu", "direct", spoil=np.float16)
    assert error > 100 * expected.bound
    assert error / reference.scale > 100 * error_bound("float32", H, I, K, "direct")


def test_relative_error_of_nothing():
    nothing = np.zeros((0, 4))
    assert relative_error(nothing, nothing, 0.0) == 0.0
    assert relative_error(np.ones((1, 4)), np.zeros((1, 4)), 0.0) == np.inf


def test_rounded_logits_are_certain_but_where_two_numbers_meet():
    """Logits computed in float32 differ little from exact logits. Rounded to bfloat16, they are equal to the exact ones
    rounded, or one step apart where an exact logit is about halfway between two bfloat16 numbers."""
    rng = np.random.default_rng(12)
    x, router = (rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for shape in ((T, H), (32, H)))
    logits = router_logits(x, router).astype(ml_dtypes.bfloat16).astype(np.float64)
    ids = choose(logits, K)
    weights = weigh(logits, ids)
    slack, variance = router_error(x, router, None, ids, weights, renormalize=True, round_logits=True)
    assert 0.5 < np.mean(slack == 0.0) < 1.0  # most tokens are judged without any slack
    assert slack.max() <= 2.0 * np.abs(logits).max() * 2.0**-7

    logits32 = serial_dot(x.astype(np.float32), router.astype(np.float32))
    rounded = logits32.astype(ml_dtypes.bfloat16).astype(np.float64)
    assert check_topk(logits, choose(rounded, K), slack).all()
    assert (np.abs(weigh(rounded, ids) - weights) <= 8.0 * np.sqrt(variance)).all()
    assert not check_topk(logits, choose(logits32, K), slack).all()  # choices by logits without rounding are noticed
    wider, _ = router_error(x, router, None, ids, weights, renormalize=True, round_logits=True, further=np.full(T, 1.0))
    assert (wider >= 2.0).all()


@pytest.mark.parametrize("renormalize", [True, False])
def test_router_in_float32_stays_within_its_error(renormalize):
    rng = np.random.default_rng(11)
    x, router = (rng.standard_normal(shape).astype(np.float32) for shape in ((T, H), (32, H)))
    logits = router_logits(x, router)
    ids = choose(logits, K)
    weights = weigh(logits, ids, renormalize=renormalize)
    slack, variance = router_error(x, router, None, ids, weights, renormalize=renormalize)

    logits32 = serial_dot(x, router)
    assert check_topk(logits, choose(logits32, K), slack).all()
    chosen = np.exp(logits32 - logits32.max(axis=1, keepdims=True))
    of_ids = np.take_along_axis(chosen, ids, axis=1)
    weights32 = of_ids / (of_ids if renormalize else chosen).sum(axis=1, keepdims=True)
    error = (weights32 - weights) / np.sqrt(variance)
    assert 0.2 < np.sqrt(np.mean(error**2)) < 1.0
    assert np.abs(error).max() < 8.0
