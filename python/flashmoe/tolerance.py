"""How far an engine's result may be from the reference, derived from the roundings the operator prescribes.

The operator rounds to its dtype (unit roundoff u) in four places, and computes in float32 (unit roundoff 2^-24) between
them:

1. the activated intermediate, once per element;
2. each weighted expert row, ``w * (down @ a + bias)``;
3. ``reduced`` only: the sum of a token's rows on one rank, where it is the sum of at least two;
4. the output, where it is the sum of at least two terms.

A shared expert is one further choice of every token: one row, rounded once, whose dot products are over all of its
width Is. The GPU's kernel for few tokens has one choice for each of the Is / I slices instead: as many rows, each
rounded. Neither of these two ways always has the larger error. If the rows of slices cancel one another, rounding each
row errs by more than rounding their sum. If the rows of n slices are equal, each rounding is of a share of 1/n, and all
n together have 1/n of the variance of rounding the whole row. So the bound depends on which kernel computed the call.

**One rounding.** Round-to-nearest errs by a value uniform on +-ulp/2: variance ulp^2 / 12. Relative to the squared
value, this is at most u^2 / 3, whatever the mantissa.

**One float32 dot product** of n products p_j adds them to a running sum s_j and rounds n times: its variance is u32^2 /
3 times the sum of the s_j^2. Averaged over the orders in which the products may come,

    sum_j E[s_j^2] = (n + 1) (sum p^2 / 6 + (sum p)^2 / 3),

which is n/2 squared results for products of random signs (a random walk, error ~ sqrt(n)) and n/3 for products of one
sign. Engines that block or vectorise the sum have a smaller variance.

**A call** (`call_error`). Roundings of different elements are independent, so variances add, each carried to the output
by the square of its derivative. The variances are computed from the values of the call itself. So they include what
cancellation does, in a dot product, in an activation or in the sum over experts, and what subnormal float16 does; there
is no extra allowance for these. With v_t the variance of token t's error, v their sum and m the largest,

    P[ |error|^2 > v + 2 sqrt(s sum v_t^2) + 2 s m ] <= exp(-s)

is the tail bound of Hsu, Kakade and Zhang (2012) for quadratic forms of sub-Gaussian variables (a uniform variable is
strictly sub-Gaussian). It assumes nothing about correlation inside a token. With s = 23, one false alarm in 10^10
checks, the bound is 7.5 rms for one token, 1.5 for 128 equal ones and 1.1 for 2048: tight enough to notice one more
rounding of the pre-activations to bfloat16.

**FP8** (`docs/fp8.md`). The reference computes with the dequantised weights and with quantised rows, so quantising is
no error as long as engine and reference quantise alike. They quantise x alike: both start from the same numbers, and
every step is an IEEE operation. An intermediate row differs by roundings between the two, before they quantise it. So
rounding 1 is replaced by three errors:

- The scale of 128 elements is the largest of them / 448. The largest has a variance, so all 128 are off by one factor.
  Their contribution to a result, a part of the dot product, is off by the same factor.
- An element p, in units of its scale, is known within 8 standard deviations d. If no midpoint between two numbers of
  e4m3 lies in this range, engine and reference round p alike. Otherwise they may differ by the step between these two
  numbers, with a probability q of at most exp(-z^2 / 2) / 2 for a midpoint z d away. A deviation of one step with
  probability q is sub-Gaussian about its mean. Its variance is (1 - 2q) / (2 log((1 - q) / q)) squared steps (Kearns
  and Saul, 1998), to which the mean's q^2 are added. A midpoint seldom lies in the range, since p is known to some
  1e-6 of its value, and steps are 6 to 12 % of it. If two midpoints lie in the range, the deviation is taken to be d
  plus the larger step there, since both roundings err by half a step at most.
- A dot product of 128 elements is multiplied by two scales before it is added: two more roundings of float32.

The error of quantising itself is not in the bound: it is a property of the format, and the same in the reference.

**MXFP4** (`docs/mxfp4.md`). The numbers that its elements stand for have at most two bits of mantissa, so the engine
represents them exactly; rows are not quantised. So the bound is the one for the dequantised weights, without what FP8
adds.

**FP8 on tensor cores** (`tensor_cores`). Hopper's tensor cores add up products of e4m3 in steps of 32 products, each
step together with the sum so far. All 33 terms are aligned to the largest of them and truncated, towards zero, at 13
bits behind its leading one (DeepSeek-V3, section 3.3.2; SageAttention2, section 3.2). With G the largest, a term loses
at most g = 2^-13 G, in the mean g / 2, with a variance of g^2 / 12. So the error of a step has a variance of
33 g^2 / 12. Its mean is g / 2 times the number of positive terms less that of negative ones. G is the sum so far or the
largest product, which is at most (sum p^4)^(1/4). Together this is a relative error of some 5e-4 of a product's norm.
With this error, about one in a hundred elements of an intermediate row is rounded to another number of e4m3 than in the
reference; the text on FP8 above says what follows from that.

**Domain.** Nothing may overflow; for float16 the limit is 65504, for the activated intermediate too. Values below the
smallest normal number are in the domain of float16 (their ulp is fixed), but not of bfloat16 and float32, where engines
may flush them to zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Unpack

import numpy as np

from .reference import (
    activate,
    dequantised,
    quantised_rows,
    rounded,
    row_scales,
    rows_are_quantised,
    scaled_rows,
    scores,
)
from .reference.quantised import BLOCK
from .spec import GATED, PLAIN, LayerOptions, Options, halves_of

UNIT_ROUNDOFF = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
_SMALLEST_NORMAL = {"float32": 2.0**-126, "bfloat16": 2.0**-126, "float16": 2.0**-14}
_VARIANCE32 = UNIT_ROUNDOFF["float32"] ** 2 / 3.0  # of one float32 rounding, relative to the squared value
_FUNCTION_ROUNDINGS = 4.0  # the error of exp or erf, and of what is computed around it, in float32 roundings
_STEP, _TRUNCATED = 32, 2.0**-13  # Hopper's tensor cores: products of e4m3 in a step; a term's error / the largest term
_TAIL = 23.0  # exp(-23) = 1e-10


@dataclass(frozen=True)
class CallError:
    """The rounding error that one call's y may have: absolute Frobenius norms."""

    rms: float
    """Root mean square."""
    bound: float
    """Exceeded with a probability below 1e-10."""


def relative_error(y: np.ndarray, expected: np.ndarray, scale: float) -> float:
    """Frobenius norm of ``y - expected`` over `scale`, which is `ReferenceResult.scale`; 0 if both are 0.

    `scale` is the norm of the terms, not of their sum: where terms cancel, nothing that rounds each of them could be
    accurate relative to what is left.
    """
    error = float(np.linalg.norm(np.asarray(y, np.float64) - expected))
    return error / scale if scale > 0.0 else (0.0 if error == 0.0 else math.inf)


def call_error(
    x: np.ndarray,
    gate_up_proj: np.ndarray,
    down_proj: np.ndarray,
    topk_ids: np.ndarray,
    topk_weights: np.ndarray,
    *,
    return_mode: str,
    placement: Sequence[int],
    gate_up_bias: np.ndarray | None = None,
    down_bias: np.ndarray | None = None,
    weight_variance: np.ndarray | float = 0.0,
    shared_gate_up: np.ndarray | None = None,
    shared_down: np.ndarray | None = None,
    shared_gate: np.ndarray | None = None,
    shared_in_slices: bool = False,
    tensor_cores: bool = False,
    rank: int = 0,
    gate_up_scale: np.ndarray | None = None,
    down_scale: np.ndarray | None = None,
    shared_gate_up_scale: np.ndarray | None = None,
    shared_down_scale: np.ndarray | None = None,
    x_scale: np.ndarray | None = None,
    **options: Unpack[LayerOptions],
) -> CallError:
    """The error of one rank's y, from the values of the call, as the module's text derives it.

    The dtype is that of `x`, or with `x_scale` bfloat16. `topk_ids` and `topk_weights` [T, K] are the reference's (-1:
    a dropped pair). `weight_variance` [T, K] is the variance of weights that the engine computes (`router_error`).
    `placement` maps each expert to the rank that computes it for these tokens. `rank` is the call's own rank, which
    computes the shared expert: as one choice or, with `shared_in_slices`, as one choice for each of its slices, like
    the GPU's kernel for few tokens. `tensor_cores`: whether Hopper's tensor cores add up products in FP8. Of `options`,
    only those count that say what experts compute.
    """
    how = Options(**options)
    dtype = "bfloat16" if x_scale is not None else x.dtype.name
    quantised = gate_up_scale is not None and rows_are_quantised(gate_up_proj)
    given, x = x, np.asarray(x, np.float64)
    rows = x
    if gate_up_scale is not None:
        halves = halves_of(how.activation, how.interleaved)
        gate_up_proj, down_proj = dequantised(gate_up_proj, gate_up_scale, halves), dequantised(down_proj, down_scale)
        if shared_down is not None:
            shared_gate_up = dequantised(shared_gate_up, shared_gate_up_scale, halves)
            shared_down = dequantised(shared_down, shared_down_scale)
    gate_up_proj, down_proj = (np.asarray(array, np.float64) for array in (gate_up_proj, down_proj))
    if how.transposed:
        gate_up_proj, down_proj = gate_up_proj.swapaxes(1, 2), down_proj.swapaxes(1, 2)
    if quantised:
        rows = quantised_rows(given.astype(np.float32)) if x_scale is None else scaled_rows(given, x_scale)
    biases = [None if bias is None else np.asarray(bias, np.float64) for bias in (gate_up_bias, down_bias)]
    weight_variance = np.broadcast_to(weight_variance, topk_ids.shape)
    matrices = [*zip(gate_up_proj, down_proj, strict=True)]
    if shared_down is not None:  # the shared expert is a further choice of every token
        up, down = (np.asarray(each, np.float64) for each in (shared_gate_up, shared_down))
        up, down = (up.T, down.T) if how.transposed else (up, down)
        apart = shared_in_slices or (quantised and down_proj.shape[2] % BLOCK)  # scales' blocks end with each slice
        width = down_proj.shape[2] if apart else down.shape[1]
        shared = [*zip(*_slices(up, down, width, how), strict=True)]
        further = len(matrices) + np.arange(len(shared))
        routed = topk_ids, topk_weights, weight_variance
        topk_ids, topk_weights, weight_variance = _chosen_besides(routed, further, *_gate(x, shared_gate))
        matrices += shared
        placement = [*placement, *[rank] * len(shared)]
    owners = np.where(topk_ids >= 0, np.asarray(placement)[topk_ids], -1)
    variance = np.zeros(x.shape)
    squares = np.zeros(x.shape)
    partial_sums = np.zeros((max(placement) + 1, *x.shape))  # by rank

    for expert in np.unique(topk_ids[topk_ids >= 0]):
        t, k = np.nonzero(topk_ids == expert)
        up, down = matrices[expert]
        b0, b1 = (0.0 if bias is None else bias[expert] for bias in biases)
        w, w_variance = topk_weights[t, k, None], weight_variance[t, k, None]
        on_input = (w, w_variance) if how.weights_on_input else None
        products = _Products(dtype, quantised, tensor_cores)
        f, f_variance = _expert(rows[t], up, down, (b0, b1), on_input, products, how)
        if how.weights_on_input:
            w, w_variance = np.ones_like(w), np.zeros_like(w)
        row = w * f
        variance[t] += w**2 * f_variance + w_variance * f**2 + _rounding(row, dtype)
        if dtype != "float32":
            variance[t] += _VARIANCE32 * row**2  # rounding the product, before rounding to dtype
        squares[t] += row**2
        partial_sums[owners[t, k], t] += row

    variance += _summed(partial_sums, squares, owners, dtype, return_mode)
    return _tail_bound(variance.sum(axis=1))


def router_error(
    x: np.ndarray,
    router: np.ndarray,
    router_bias: np.ndarray | None,
    topk_ids: np.ndarray,
    topk_weights: np.ndarray,
    *,
    choice_bias: np.ndarray | None = None,
    further: np.ndarray | float = 0.0,
    **options: Unpack[LayerOptions],
) -> tuple[np.ndarray, np.ndarray]:
    """For a router evaluated in float32: slack [T] for `reference.check_topk`, and the variance [T, K] of the
    weights.

    The slack is 8 standard deviations of the difference between the token's two least certain values of
    `reference.choice_values`. The relative error of a weight is that of its score minus that of the sum that divides
    the score. With a softmax, every score is divided by such a sum, so the error of the score's exponential takes the
    place of the error of the score. `further` [T] is an additional error that a logit may have; it widens the slack.

    With `round_logits`, a logit that is rounded to x's type has no error, unless its value before the rounding may have
    been on either side of the boundary between two numbers of that type. Then it may be off by the distance of these
    two numbers, which is taken as its standard deviation.
    """
    rule, bias = Options(**options), 0.0 if router_bias is None else np.asarray(router_bias, np.float64)
    logits, variance = _linear(np.asarray(x, np.float64), 0.0, np.asarray(router, np.float64), bias)
    further = np.broadcast_to(further, len(logits))
    if rounded := rule.round_logits and x.dtype.name != "float32":
        reach = 8.0 * np.sqrt(variance) + further[:, None]
        low, high, logits = (
            each.astype(x.dtype).astype(np.float64) for each in (logits - reach, logits + reach, logits)
        )
        variance, further = (high - low) ** 2, np.zeros(len(logits))
    g = scores(logits, rule.score)
    if rule.score == "sigmoid":  # relative errors: of exp(-l), of the sum and of the quotient
        relative = (1.0 - g) ** 2 * (variance + _VARIANCE32 * (logits**2 + _FUNCTION_ROUNDINGS**2)) + 2.0 * _VARIANCE32
    else:  # the relative error of exp(l - the largest)
        relative = variance + _VARIANCE32 * ((logits - logits.max(axis=1, keepdims=True)) ** 2 + _FUNCTION_ROUNDINGS**2)
    of_choice = variance
    if choice_bias is not None or rule.groups > 1:
        of_sum = (relative * g**2).sum(axis=1, keepdims=True) if rule.score == "softmax" else 0.0
        of_choice = (relative + of_sum) * g**2
        if choice_bias is not None:
            of_choice = of_choice + _VARIANCE32 * (g + np.asarray(choice_bias, np.float64)) ** 2
    # Each of two rounded logits is off by at most one distance, so their difference is off by at most two.
    deviations = 2.0 if rounded and of_choice is variance else 8.0 * math.sqrt(2.0)
    slack = deviations * np.sqrt(of_choice.max(axis=1, initial=0.0)) + 2.0 * further

    shares = g  # each score's share of the sum that divides it
    if rule.renormalize:
        chosen = np.zeros(shares.shape, bool)
        np.put_along_axis(chosen, topk_ids, True, axis=1)
        shares = np.where(chosen, shares, 0.0)
    elif rule.score == "sigmoid":
        shares = np.zeros(g.shape)
    shares = shares / np.maximum(shares.sum(axis=1, keepdims=True), 1e-300)
    of_weight = np.take_along_axis(relative * (1.0 - 2.0 * shares), topk_ids, axis=1)
    of_weight += (relative * shares**2).sum(axis=1, keepdims=True)
    of_weight += _VARIANCE32 * (3.0 + shares.shape[1] / 3.0)  # of the sum itself, up to two quotients, a product
    return slack, topk_weights**2 * of_weight + _SMALLEST_NORMAL["float32"] ** 2


class _Products(NamedTuple):
    """How an expert's products are made; see `call_error`."""

    dtype: str
    quantised: bool
    tensor_cores: bool

    def further(self, x: np.ndarray, of_scale: np.ndarray | float, matrix: np.ndarray) -> np.ndarray | float:
        """The variance of ``matrix @ x[t]`` that is added to that of a sum in float32. `of_scale`: the relative
        variance of x's scales."""
        if not self.quantised:
            return 0.0
        of_scales = _promoted(x, of_scale + 2.0 * _VARIANCE32, matrix)
        return of_scales + _truncated(x, matrix) if self.tensor_cores else of_scales


def _expert(
    x: np.ndarray,
    up: np.ndarray,
    down: np.ndarray,
    biases: tuple[np.ndarray | float, np.ndarray | float],
    on_input: tuple[np.ndarray, np.ndarray] | None,
    products: _Products,
    how: Options,
) -> tuple[np.ndarray, np.ndarray]:
    """An expert's results for rows x, before a weight multiplies them, and their variances. `on_input`: weights that
    multiply the rows, and the variances of these weights."""
    if on_input is None:
        z, z_variance = _linear(x, 0.0, up, biases[0])
    else:
        z, z_variance = _scaled_linear(x, *on_input, up, biases[0])
        x = on_input[0] * x
    z_variance = z_variance + products.further(x, 0.0, up)
    a, a_variance = _activated(z, z_variance, how)
    if not products.quantised:
        return _linear(a, a_variance + _rounding(a, products.dtype), down, biases[1])
    a, a_variance, of_scale = _quantised(a, a_variance)
    f, f_variance = _linear(a, a_variance, down, biases[1])
    return f, f_variance + products.further(a, of_scale, down)


def _slices(up: np.ndarray, down: np.ndarray, width: int, how: Options) -> tuple[np.ndarray, np.ndarray]:
    """The matrices [n, 2I or I, H] and [n, H, I] of the slices of a shared expert; I is `width`."""
    hidden, n = len(down), down.shape[1] // width
    if halves_of(how.activation, how.interleaved) == 2:  # a slice has some of the gate rows and some of the up rows
        up = up.reshape(2, n, width, hidden).swapaxes(0, 1)
    return up.reshape(n, -1, hidden), down.reshape(hidden, n, width).swapaxes(0, 1)


def _gate(x: np.ndarray, gate: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """A shared expert's weights [T, 1], computed in float32, and their variances."""
    if gate is None:
        return np.ones((len(x), 1)), np.zeros((len(x), 1))
    logits, variance = _linear(x, 0.0, np.asarray(gate, np.float64), 0.0)
    g = scores(logits, "sigmoid")
    relative = (1.0 - g) ** 2 * (variance + _VARIANCE32 * (logits**2 + _FUNCTION_ROUNDINGS**2)) + 2.0 * _VARIANCE32
    return g, relative * g**2


def _summed(
    partial_sums: np.ndarray, squares: np.ndarray, owners: np.ndarray, dtype: str, return_mode: str
) -> np.ndarray:
    """Variance [T, H] of summing up the tokens' rows. `partial_sums`: the sums of each rank's rows. `squares`: the sum
    of the rows' squares. `owners` [T, K]: the rank of each row, -1 where there is no row."""
    y = partial_sums.sum(axis=0)
    rows_by_rank = np.stack([(owners == rank).sum(axis=1) for rank in range(len(partial_sums))])
    several = rows_by_rank.sum(axis=0) > 1
    variance = np.zeros(y.shape)
    variance[several] = _VARIANCE32 * (owners.shape[1] + 1) * (squares / 6.0 + y**2 / 3.0)[several]
    if return_mode == "reduced":
        variance += np.where(rows_by_rank[..., None] > 1, _rounding(partial_sums, dtype), 0.0).sum(axis=0)
        several = (rows_by_rank > 0).sum(axis=0) > 1
    variance[several] += _rounding(y, dtype)[several]
    return variance


def _chosen_besides(
    routed: tuple[np.ndarray, np.ndarray, np.ndarray], further: np.ndarray, weight: np.ndarray, variance: np.ndarray
) -> tuple[np.ndarray, ...]:
    """`routed` (choices [T, K], their weights and the variances of these weights), with n more columns: every token
    also makes the choices `further` [n], all with the same `weight` and `variance`, both [T, 1]."""
    added = [np.broadcast_to(each, (len(weight), len(further))) for each in (further, weight, variance)]
    return tuple(map(np.hstack, zip(routed, added, strict=True)))


def _rounding(value: np.ndarray, dtype: str) -> np.ndarray:
    """Variance of rounding `value` to `dtype`: ulp^2 / 12, and 0 for 0."""
    magnitude = np.abs(value)
    binade = np.exp2(np.floor(np.log2(np.maximum(magnitude, _SMALLEST_NORMAL[dtype]))))
    return np.where(magnitude > 0.0, (2.0 * UNIT_ROUNDOFF[dtype] * binade) ** 2 / 12.0, 0.0)


def _linear(
    x: np.ndarray, variance: np.ndarray | float, matrix: np.ndarray, bias: np.ndarray | float
) -> tuple[np.ndarray, np.ndarray]:
    """``matrix @ x[t] + bias`` in float32, for x of the given variance: values and their variances."""
    values = x @ matrix.T + bias
    of_sum = _VARIANCE32 * (x.shape[1] + 2)  # the bias is one more number to add
    carried = (variance + of_sum / 6.0 * x**2) @ (matrix**2).T
    return values, carried + of_sum / 6.0 * np.square(bias) + of_sum / 3.0 * values**2


def _promoted(x: np.ndarray, relative: np.ndarray | float, matrix: np.ndarray) -> np.ndarray:
    """The variance of ``matrix @ x[t]`` if the contribution of each 128 columns has the relative variance `relative`, a
    number or [T, blocks]."""
    relative = np.broadcast_to(relative, (len(x), -(-x.shape[1] // BLOCK)))
    total = np.zeros((len(x), len(matrix)))
    for block, of_block in enumerate(relative.T):
        columns = slice(block * BLOCK, (block + 1) * BLOCK)
        total += of_block[:, None] * (x[:, columns] @ matrix[:, columns].T) ** 2
    return total


def _truncated(x: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """The variance that tensor cores add to ``matrix @ x[t]`` of e4m3 by truncating, as the module's text derives."""
    variance, mean = np.zeros((len(x), len(matrix))), np.zeros((len(x), len(matrix)))
    for first in range(0, x.shape[1], _STEP):
        if first % BLOCK == 0:
            so_far = np.zeros_like(mean)
        rows, columns = x[:, first : first + _STEP], matrix[:, first : first + _STEP].T
        largest = np.maximum(np.sqrt(rows**4 @ columns**4), so_far**2)
        more = np.sign(rows) @ np.sign(columns) + np.sign(so_far)
        variance += _TRUNCATED**2 * largest * (_STEP + 1) / 12.0
        mean += _TRUNCATED * np.sqrt(largest) * more / 2.0
        so_far += rows @ columns
    return variance + mean**2


def _quantised(a: np.ndarray, variance: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """a [T, n] of the given variance after it is quantised: its values, the variance of each value by itself, and the
    relative variance of each scale, [T, blocks]."""
    scale = row_scales(a)
    each = np.arange(a.shape[1]) // BLOCK
    reach = np.abs(a) + 8.0 * np.sqrt(variance)
    first = np.arange(0, a.shape[1], BLOCK)
    largest = np.maximum.reduceat(np.abs(a), first, axis=1)
    may_be_largest = np.where(reach >= largest[:, each], variance, 0.0)
    of_scale = np.maximum.reduceat(may_be_largest, first, axis=1) / np.maximum(448.0 * scale, 1e-300) ** 2
    of_scale = of_scale + _VARIANCE32
    p = a / scale[:, each]
    reach = 8.0 * np.sqrt(variance / scale[:, each] ** 2 + p**2 * (of_scale[:, each] + 2.0 * _VARIANCE32))
    low, high = rounded(p - reach), rounded(p + reach)
    step, z = high - low, 16.0 * np.abs(p - (low + high) / 2.0) / np.maximum(2.0 * reach, 1e-300)
    q = np.clip(np.exp(-0.5 * z**2) / 2.0, 1e-300, 0.499)
    proxy = (1.0 - 2.0 * q) / (2.0 * np.log((1.0 - q) / q)) + q**2
    one = np.abs(p) + reach
    largest_step = np.exp2(np.maximum(np.floor(np.log2(np.maximum(one, 1e-300))), -6.0) - 3.0)
    several = (reach / 8.0 + largest_step) ** 2
    own = np.where(step <= largest_step, proxy * step**2, several) * scale[:, each] ** 2
    return rounded(p) * scale[:, each], own, of_scale


def _scaled_linear(
    x: np.ndarray, weight: np.ndarray, of_weight: np.ndarray, matrix: np.ndarray, bias: np.ndarray | float
) -> tuple[np.ndarray, np.ndarray]:
    """``matrix @ (weight x[t]) + bias`` in float32, for weights of the given variance: values and their variances."""
    scaled = weight * x  # an engine rounds this, or else the sum of the products; the variances of both are added
    values, variance = _linear(scaled, _VARIANCE32 * scaled**2, matrix, bias)
    return values, variance + of_weight * (x @ matrix.T) ** 2 + _VARIANCE32 * (values - bias) ** 2


def _activated(
    z: np.ndarray, variance: np.ndarray, how: Options, roundings: float = _FUNCTION_ROUNDINGS
) -> tuple[np.ndarray, np.ndarray]:
    """``act(z)`` in float32, for z of the given variance: values and their variances. `roundings`: the error of a
    function such as exp, counted in roundings of float32."""
    activation = how.activation
    if activation in GATED:
        if how.interleaved:
            z, variance = (np.concatenate([each[:, ::2], each[:, 1::2]], axis=1) for each in (z, variance))
        (gate, up), (gate_variance, up_variance) = np.split(z, 2, axis=1), np.split(variance, 2, axis=1)
        gated = "clamped_silu" if activation == "clamped_swiglu" else PLAIN[activation]
        act, act_variance = _activated(gate, gate_variance, how._replace(activation=gated), roundings)
        limit = how.limit or math.inf
        up = np.clip(up, -limit, limit) + how.up_offset
        if how.up_offset:
            up_variance = up_variance + _VARIANCE32 * up**2
        return act * up, act_variance * up**2 + act**2 * up_variance
    if activation == "clamped_silu":  # clamp() has no error of its own, and does not enlarge that of z
        alpha, limit, silu = how.alpha, how.limit or math.inf, how._replace(activation="silu")
        a, a_variance = _activated(alpha * np.minimum(z, limit), alpha**2 * variance, silu, roundings)
        return a / alpha, (a_variance + 2.0 * _VARIANCE32 * a**2) / alpha**2
    if activation == "relu2":
        a = activate(z, "relu")
        return a**2, 4.0 * a**2 * variance + _VARIANCE32 * a**4
    a = activate(z, activation)
    step = 1e-6 * (1.0 + np.abs(z))
    slope = (activate(z + step, activation) - a) / step
    # In gelu, 1 + erf cancels for negative z: the error is relative to z. In z times a sigmoid, exp(-y) has a relative
    # error that grows with |y|, and passes it on unless exp(-y) is small beside 1.
    size = a * (1.0 + np.maximum(-_of_sigmoid(z, activation)[0], 0.0))
    size = {"relu": 0.0, "gelu": z}.get(activation, size)
    return a, variance * slope**2 + _VARIANCE32 * (roundings * size) ** 2


def _of_sigmoid(z: np.ndarray, activation: str) -> tuple[np.ndarray, np.ndarray]:
    """The argument y of the sigmoid by which silu and gelu_tanh multiply z, and the derivative of y."""
    if activation != "gelu_tanh":
        return z, np.ones_like(z)
    factor = math.sqrt(8.0 / math.pi)
    return factor * (z + 0.044715 * z**3), factor * (1.0 + 3.0 * 0.044715 * z**2)


def _tail_bound(variance_by_token: np.ndarray) -> CallError:
    v, largest = float(variance_by_token.sum()), float(variance_by_token.max(initial=0.0))
    excess = 2.0 * math.sqrt(_TAIL * float((variance_by_token**2).sum())) + 2.0 * _TAIL * largest
    return CallError(math.sqrt(v), math.sqrt(v + excess))
