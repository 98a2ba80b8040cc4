"""How far an engine's gradients may be from the reference's, derived as `flashmoe.tolerance` derives it for y.

The gradients are computed in float32 from what the forward pass has kept (pre-activations, weights) and from dY.
Numbers are rounded to the types of their tensors in these places alone:

1. the pre-activations z, when they are kept;
2. a row's part of a token's dX, ``dz @ gate_up`` (dz is the gradient of z), before it travels home;
3. ``reduced`` only: the sum of a token's rows on one rank, where it is the sum of at least two;
4. every result, once;
5. on a GPU also: dz, ``w a`` (the combine weight times the activated row) and the gradients of logits, since tensor
   cores multiply by them; and the experts' part of dX and the router's part, before they are added.

**A row of an expert.** ``z = gate_up @ x + b`` has the forward pass's error and, unless it is in float32, the error of
place 1. ``g = dY @ down`` has the error of a dot product over H. The gradient of z is ``dz = w g act'(z)``. Its
variance is the sum of three parts, one from the variance of each factor; the part of act'(z) is found with the second
derivative. Where act' jumps (relu at 0, the limits of a clamp) and z is within 8 standard deviations of the jump,
engine and reference may be on different sides: the deviation is then the jump. The gradient of w is
``a . g + b . dY``, where b is `down_bias`, added up in float64.

**The router.** The gradients of logits are computed in float64 from the logits and the gradients of combine weights,
and rounded to float32, or as place 5 says. They get errors from the logits and from the gradients of combine weights:
these errors times the derivatives of the gradients of logits, which for the logits are computed from differences.

**Gradients of experts' weights** are sums over rows, added up in float32, of the outer product of two rows, each with
its variance. An error in one row is an error in a whole matrix, but the errors of different rows are independent. So
the tail bound gets one variance for each row, as the bound of y gets one for each token. For the roundings of the sum
itself it also gets one variance for each element of the sum. Biases are added up in float64.

**float32 on a GPU.** The tensor cores take TF32: they ignore the low 13 of the 23 bits of an operand's mantissa, which
rounds towards zero. So all products shrink, and this does not average out. For tensors of the call, the effect can be
computed. So everything is computed a second time, with truncated operands wherever tensor cores multiply. The
derivation above holds for these numbers, and the norm of the difference between each gradient and the true one is added
to its bound. dz, ``w a`` and the gradients of logits are truncated, too, but their low bits depend on earlier
roundings. A step is 2^-10 of the binade. For these operands the mean error, half a step towards zero, goes into the
second computation, and step^2 / 12 is added to the variances. (Operands rounded to nearest would stay below half of
this bound.)

Tensor cores align the products of an instruction, and the sum so far, to the largest of them, and cut off below 2^-23
of it, towards zero. mma.sync adds at least 4 products at a time. So a sum of n products has n/4 such errors, each in
the mean half of 2^-23 of the partial sum: together (n/8) 2^-23. As in tests/gpu/bounds.py, the square of this is taken
as a variance. exp and the reciprocal are within 2^-20 of their values, which counts as 28 roundings of float32. In
calls with TF32, the polynomial for gelu's tail is within 5.4e-6, of which at most half counts: 80 roundings.

`exact` calls have no error of TF32 and of alignment: products are fused multiply-adds one by one, gelu's tail is within
1.5e-7, and 28 roundings cover it.

Domain: as in `flashmoe.tolerance`; nothing may overflow or be subnormal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Unpack

import numpy as np

from .reference import activate, activate_backward
from .reference.backward import of_logits
from .spec import GATED, PLAIN, LayerOptions, Options
from .tolerance import (
    _FUNCTION_ROUNDINGS,
    _VARIANCE32,
    CallError,
    _activated,
    _gate,
    _linear,
    _of_sigmoid,
    _rounding,
    _scaled_linear,
    _tail_bound,
)

_FLOAT64 = 16.0 * 2.0**-53  # a few roundings of float64
_TF32_STEP = 2.0**-10  # of an operand, relative to its binade
_OF_EXP, _OF_TAIL = 28.0, 80.0  # errors of a GPU's functions of float32, counted in roundings: see above


@dataclass(frozen=True, eq=False)
class RankCall:
    """One rank's part of a call, in the numbers of the reference."""

    x: np.ndarray
    """[T, H], of the layer's type."""
    grad: np.ndarray
    """[T, H]: dY, the gradient of y."""
    ids: np.ndarray
    """[T, K]: the experts chosen, dropped ones included."""
    computed: np.ndarray
    """[T, K]: the experts chosen, -1 where dropped."""
    weights: np.ndarray
    """[T, K]: the combine weights."""
    owners: Sequence[int]
    """For each expert, the rank that computes it for these tokens."""
    weight_variance: np.ndarray | float = 0.0
    """[T, K]: the variance of the combine weights, if the engine computes them (`flashmoe.tolerance.router_error`)."""
    logits: np.ndarray | None = None
    """[T, E], if there is a router."""
    rank: int = 0


@dataclass(frozen=True, eq=False)
class _Found:
    """A gradient, and its error."""

    values: np.ndarray
    error: CallError

    def widened(self, true: _Found) -> CallError:
        """The error relative to `true`. These values were computed from truncated operands, so their difference from
        the true ones is added."""
        shift = float(np.linalg.norm(self.values - true.values))
        return CallError(self.error.rms + shift, self.error.bound + shift)


@dataclass
class _Sum:
    """What is known of a gradient that is a sum over rows: the sums of its terms and of their squares, and each row's
    variance."""

    total: np.ndarray
    squares: np.ndarray
    rows: list[np.ndarray] = field(default_factory=list)
    count: int = 0

    @classmethod
    def of(cls, *shape: int) -> _Sum:
        return cls(np.zeros(shape), np.zeros(shape))

    def add(self, left: np.ndarray, left_variance: np.ndarray, right: np.ndarray, right_variance: np.ndarray) -> None:
        """Adds the outer products of rows [n, a] and [n, b], which have these variances."""
        self.total += left.T @ right
        self.squares += (left**2).T @ right**2
        of_left, of_right = (np.square(each).sum(axis=1) for each in (left, right))
        self.rows.append(left_variance.sum(axis=1) * of_right + of_left * right_variance.sum(axis=1))
        self.count += len(left)

    def found(self, layer: _Layer, in_float32: bool = True) -> _Found:
        return _Found(self.total, _tail_bound(self.variances(layer, in_float32)))

    def variances(self, layer: _Layer, in_float32: bool = True) -> np.ndarray:
        """The variances of independent errors: one of each row, then one of each element of the sum."""
        own = _rounding(self.total, layer.dtype)
        if in_float32 and layer.tf32:
            own = own + _cut_off(self.count) * (self.squares + self.total**2)
        if in_float32:  # roundings of the running sum, and of each term, if it is rounded by itself
            own = own + _VARIANCE32 * ((self.count + 2) * (self.squares / 6.0 + self.total**2 / 3.0) + self.squares)
        return np.concatenate([*self.rows, own.ravel()])


def gradient_errors(
    calls: Sequence[RankCall],
    gate_up_proj: np.ndarray,
    down_proj: np.ndarray,
    *,
    return_mode: str,
    engine: str = "cpu",
    exact: bool = False,
    router: np.ndarray | None = None,
    router_bias: np.ndarray | None = None,
    gate_up_bias: np.ndarray | None = None,
    down_bias: np.ndarray | None = None,
    shared_gate_up: np.ndarray | None = None,
    shared_down: np.ndarray | None = None,
    shared_gate: np.ndarray | None = None,
    **options: Unpack[LayerOptions],
) -> dict[str, Any]:
    """The error of each gradient of a call of several ranks, by the names of `flashmoe.moe`.

    A tensor of the E experts has one `CallError`. A tensor that each rank has for itself (x, topk_weights, those of the
    router and of the shared expert) has a list with one for each rank. `engine`: ``"cpu"`` or ``"cuda"``. `exact`: the
    option of the call. `options`: those of the layer. With `slices`, the experts here, and the ids, weights and owners
    of `calls`, are those of slices; the router, and the gradients of combine weights, are those of whole experts. All
    else is as in `flashmoe.tolerance.call_error`.
    """
    given = {"return_mode": return_mode, "router": router, "router_bias": router_bias}
    given |= {"gate_up_bias": gate_up_bias, "down_bias": down_bias}
    given |= {"shared_gate_up": shared_gate_up, "shared_down": shared_down, "shared_gate": shared_gate}
    layer = _Layer(calls[0].x.dtype.name, Options(**options), engine == "cuda")
    if layer.dtype != "float32" or engine != "cuda" or exact:
        found = _found(layer, calls, gate_up_proj, down_proj, **given)
        return {name: _each(lambda one: one.error, each) for name, each in found.items()}
    true, truncated = (
        _found(each, calls, gate_up_proj, down_proj, **given) for each in (layer, replace(layer, tf32=True))
    )
    return {name: _each(_Found.widened, each, true[name]) for name, each in truncated.items()}


def _each(fn: Callable[..., CallError], *found: Any) -> Any:
    """`fn` of the arguments `found`; if these are lists, a list of `fn` of their elements."""
    return [fn(*each) for each in zip(*found, strict=True)] if isinstance(found[0], list) else fn(*found)


def _found(
    layer: _Layer,
    calls: Sequence[RankCall],
    gate_up_proj: np.ndarray,
    down_proj: np.ndarray,
    *,
    return_mode: str,
    router: np.ndarray | None,
    router_bias: np.ndarray | None,
    gate_up_bias: np.ndarray | None,
    down_bias: np.ndarray | None,
    shared_gate_up: np.ndarray | None,
    shared_down: np.ndarray | None,
    shared_gate: np.ndarray | None,
) -> dict[str, Any]:
    """As `gradient_errors`, with a `_Found` for each `CallError`."""
    matrices = [None if m is None else np.asarray(m, np.float64) for m in (gate_up_proj, down_proj)]
    transposed, slices = layer.how.transposed, layer.how.slices
    up, down = (each.swapaxes(1, 2) if transposed else each for each in matrices)
    found: dict[str, Any] = {name: [] for name in ("x", "topk_weights", "router", "router_bias", "shared_gate_up")}
    found |= {name: [] for name in ("shared_down", "shared_gate")}
    homes = [_Home(call, return_mode, len(calls), layer) for call in calls]
    of_experts = []
    for expert in range(len(up)):
        sums = _Sums.of(up[expert], down[expert])
        biases = (None if b is None else np.asarray(b[expert], np.float64) for b in (gate_up_bias, down_bias))
        part = _Expert(layer, up[expert], down[expert], *biases)
        for home in homes:
            t, k = np.nonzero(home.call.computed == expert)
            variance = np.broadcast_to(home.call.weight_variance, home.call.ids.shape)[t, k, None]
            of_weight = part.rows(home, t, home.call.weights[t, k, None], variance, home.call.owners[expert], sums)
            home.of_weights[t, k], home.of_weights_variance[t, k] = of_weight
        of_experts.append(sums)
    for name in _Sums.NAMES:
        error = _tail_bound(np.concatenate([sums.variances(name, layer) for sums in of_experts]))
        found[name] = _Found(np.stack([sums.named(name).total for sums in of_experts]), error)
    for home in homes:
        if shared_down is not None:
            gate = None if shared_gate is None else np.asarray(shared_gate, np.float64)
            pair = (np.asarray(each, np.float64) for each in (shared_gate_up, shared_down))
            pair = (each.T if transposed else each for each in pair)
            for name, each in _of_shared(layer, home, *pair, gate).items():
                found[name].append(each)
        if router is not None:
            of_router = home.of_router(np.asarray(router, np.float64), router_bias)
            for name, each in of_router.items():
                found[name].append(each)
        else:
            of_weights, variance = home.whole_weights(slices)
            variance = variance + _rounding(of_weights, "float32")
            found["topk_weights"].append(_Found(of_weights, _tail_bound(variance.sum(axis=1))))
        found["x"].append(home.of_x())
    return found


@dataclass
class _Sums:
    """The gradients of an expert's tensors, which are sums over rows."""

    NAMES = ("gate_up_proj", "down_proj", "gate_up_bias", "down_bias")
    of_up: _Sum
    of_down: _Sum
    up_bias: _Sum
    down_bias: _Sum

    @classmethod
    def of(cls, up: np.ndarray, down: np.ndarray) -> _Sums:
        return cls(_Sum.of(*up.shape), _Sum.of(*down.shape), _Sum.of(1, len(up)), _Sum.of(1, len(down)))

    def named(self, name: str) -> _Sum:
        return (self.of_up, self.of_down, self.up_bias, self.down_bias)[self.NAMES.index(name)]

    def variances(self, name: str, layer: _Layer) -> np.ndarray:
        return self.named(name).variances(layer, not name.endswith("_bias"))


@dataclass
class _Layer:
    dtype: str
    how: Options
    on_gpu: bool = False
    tf32: bool = False
    """Whether tensor cores multiply truncated operands; see the module's text."""

    @property
    def roundings(self) -> float:
        """The error of a function such as exp, counted in roundings of float32."""
        if not self.on_gpu or self.dtype != "float32":
            return _FUNCTION_ROUNDINGS
        return _OF_TAIL if PLAIN[self.how.activation] == "gelu" and self.tf32 else _OF_EXP

    def operand(self, v: np.ndarray) -> np.ndarray:
        """A tensor of the call, as its products read it."""
        if not self.tf32:
            return v
        return (v.astype(np.float32).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)

    def inner(self, v: np.ndarray, variance: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """A tensor that was computed before, as products read it: its mean, and its variance."""
        if not self.tf32:
            return v, variance
        step = _TF32_STEP * np.exp2(np.frexp(v)[1] - 1.0)
        return v - np.sign(v) * step / 2.0, variance + np.where(v != 0.0, step**2 / 12.0, 0.0)

    def linear(
        self, x: np.ndarray, variance: np.ndarray | float, matrix: np.ndarray, bias: np.ndarray | float
    ) -> tuple[np.ndarray, np.ndarray]:
        """As the function `_linear`, for operands that are already truncated. Adds what tensor cores cut off."""
        values, of_values = _linear(x, variance, matrix, bias)
        if self.tf32:
            of_values = of_values + _cut_off(x.shape[1]) * (x**2 @ (matrix**2).T + values**2)
        return values, of_values


def _cut_off(products: int) -> float:
    """What tensor cores cut off from a sum of so many products: a variance, relative to the square of the sum."""
    return (products / 8.0 * 2.0**-23) ** 2


@dataclass
class _Expert:
    """The rows of one expert, or of the shared expert."""

    layer: _Layer
    up: np.ndarray
    down: np.ndarray
    up_bias: np.ndarray | None = None
    down_bias: np.ndarray | None = None

    def rows(
        self, home: _Home, t: np.ndarray, w: np.ndarray, w_variance: np.ndarray, owner: int, sums: _Sums
    ) -> tuple[np.ndarray, np.ndarray]:
        """Adds what the rows of tokens t contribute to the sums and to the tokens' dX. Returns the gradients of w [n],
        and their variances."""
        layer, x, dy = self.layer, home.x[t], home.grad[t]
        exact = np.zeros_like
        on_input, bias = layer.how.weights_on_input, 0.0 if self.up_bias is None else self.up_bias
        up, down = layer.operand(self.up), layer.operand(self.down)
        of_x, of_dy = layer.operand(x), layer.operand(dy)
        on_gpu_input = on_input and layer.on_gpu
        if on_gpu_input:  # a GPU keeps u, before the weight multiplies it
            u, u_variance = layer.linear(of_x, 0.0, up, 0.0)
            if layer.dtype != "float32":
                u_variance = u_variance + _rounding(u, layer.dtype)
            z = w * u + bias
            z_variance = w**2 * u_variance + w_variance * u**2 + 2.0 * _VARIANCE32 * ((w * u) ** 2 + z**2)
        elif on_input:
            z, z_variance = _scaled_linear(x, w, w_variance, up, bias)
        else:
            z, z_variance = layer.linear(of_x, 0.0, up, bias)
        if layer.dtype != "float32" and not on_gpu_input:
            z_variance = z_variance + _rounding(z, layer.dtype)
        a, a_variance = _activated(z, z_variance, layer.how, layer.roundings)
        g, g_variance = layer.linear(of_dy, 0.0, down.T, 0.0)
        scaled = (w * x, w_variance * x**2 + _VARIANCE32 * (w * x) ** 2), (w * dy, w_variance * dy**2)
        rows, df = ((scaled[0]), (dy, exact(dy))) if on_input else ((of_x, exact(x)), scaled[1])
        if not on_input:
            df = df[0], df[1] + _VARIANCE32 * df[0] ** 2
        weight, weight_variance = (np.ones_like(w), np.zeros_like(w)) if on_input else (w, w_variance)
        dz, dz_variance = _backward(layer, z, z_variance, g, g_variance, weight, weight_variance)
        plain, plain_variance = of_plain, of_plain_variance = dz, dz_variance
        if layer.on_gpu:
            if on_input:  # in products dz is multiplied by w, in the gradients of biases it is not
                rows = of_x, exact(x)
                dz, dz_variance = w * dz, w**2 * dz_variance + w_variance * dz**2 + _VARIANCE32 * (w * dz) ** 2
            plain_variance = plain_variance + _rounding(plain, layer.dtype)
            dz_variance = dz_variance + _rounding(dz, layer.dtype)
        factor, factor_variance = layer.inner(dz, dz_variance)
        sums.of_up.add(factor, factor_variance, *rows)
        if layer.on_gpu:
            weighted = weight * a
            variance = weight**2 * a_variance + weight_variance * a**2 + _VARIANCE32 * weighted**2
            variance = variance + _rounding(weighted, layer.dtype)
            sums.of_down.add(of_dy, exact(dy), *layer.inner(weighted, variance))
        else:
            sums.of_down.add(*df, a, a_variance)
        one = np.ones((len(t), 1))
        sums.up_bias.add(one, exact(one), plain, plain_variance)
        sums.down_bias.add(one, exact(one), *df)
        dx, dx_variance = layer.linear(factor, factor_variance, up.T, 0.0)
        if on_gpu_input:
            of_weight = (of_plain * u).sum(axis=1)
            # An error of u is also an error of z and of dz. So the two factors' errors are not independent, and the
            # sum of their variances is doubled.
            variance = 2.0 * (of_plain_variance * u**2 + of_plain**2 * u_variance).sum(axis=1) + _of_sum(of_plain * u)
        elif on_input:
            of_weight, variance = (dx * x).sum(axis=1), (dx_variance * x**2).sum(axis=1)
            dx, dx_variance = w * dx, w**2 * dx_variance + w_variance * dx**2 + _VARIANCE32 * (w * dx) ** 2
        else:
            of_weight = (a * g).sum(axis=1) + (0.0 if self.down_bias is None else dy @ self.down_bias)
            variance = (a_variance * g**2 + a**2 * g_variance).sum(axis=1)
            if layer.on_gpu:
                variance = variance + _of_sum(a * g)
        home.add(t, dx, dx_variance + _rounding(dx, layer.dtype), owner)
        return of_weight, variance + _VARIANCE32 * of_weight**2


def _of_sum(terms: np.ndarray) -> np.ndarray:
    """The variance of adding up each row of terms in float32."""
    squares = (terms**2).sum(axis=1) / 6.0 + terms.sum(axis=1) ** 2 / 3.0
    return _VARIANCE32 * (terms.shape[1] + 2) * squares


def _backward(
    layer: _Layer,
    z: np.ndarray,
    z_variance: np.ndarray,
    g: np.ndarray,
    g_variance: np.ndarray,
    w: np.ndarray,
    w_variance: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """``w g act'(z)`` and its variance."""
    how = layer.how.of_layer()
    slope = activate_backward(z, np.ones_like(g), **how)  # act'(z), for each pre-activation
    pairs = _pairs(g, layer)
    dz = w * pairs * slope
    of_slope = np.zeros(z.shape)
    for part in _parts(z, layer):  # for each of the two pre-activations of a column
        step = np.where(part, 1e-6 * (1.0 + np.abs(z)), 0.0)
        width = 8.0 * np.sqrt(np.where(part, z_variance, 0.0))
        near, far = (
            (activate_backward(z + s, np.ones_like(g), **how), activate_backward(z - s, np.ones_like(g), **how))
            for s in (step, width)
        )
        per_unit = (near[0] - near[1]) / np.where(_pair_sum(step, layer) > 0.0, 2.0 * _pair_sum(step, layer), 1.0)
        smooth = per_unit**2 * _pair_sum(np.where(part, z_variance, 0.0), layer)
        jump = np.maximum(np.abs(far[0] - far[1]) - 2.0 * 8.0 * np.sqrt(smooth), 0.0)
        of_slope += smooth + jump**2
    # The terms that make up a slope may cancel one another. Together they are at most about this large.
    size = np.abs(slope) + _parts_of_slope(z, layer)
    of_slope += _VARIANCE32 * (layer.roundings * size) ** 2
    of_g = _pairs(g_variance, layer)
    variance = (w * slope) ** 2 * of_g + (w * pairs) ** 2 * of_slope + w_variance * (pairs * slope) ** 2
    return dz, variance + 2.0 * _VARIANCE32 * dz**2


def _pairs(each: np.ndarray, layer: _Layer) -> np.ndarray:
    """A number of each column, repeated for each of the column's pre-activations."""
    if layer.how.activation not in GATED:
        return each
    return np.repeat(each, 2, axis=1) if layer.how.interleaved else np.concatenate([each, each], axis=1)


def _pair_sum(each: np.ndarray, layer: _Layer) -> np.ndarray:
    """For each pre-activation, the sum of the numbers of both pre-activations of its column."""
    if layer.how.activation not in GATED:
        return each
    if layer.how.interleaved:
        return _pairs(each[:, ::2] + each[:, 1::2], layer)
    return _pairs(sum(np.split(each, 2, axis=1)), layer)


def _parts(z: np.ndarray, layer: _Layer) -> list[np.ndarray]:
    """Two masks of z: which pre-activations are gates, and which are ups. Without a gate, one mask of all."""
    if layer.how.activation not in GATED:
        return [np.ones(z.shape, bool)]
    columns = np.zeros(z.shape, bool)
    if layer.how.interleaved:
        columns[:, ::2] = True
    else:
        columns[:, : z.shape[1] // 2] = True
    return [columns, ~columns]


def _parts_of_slope(z: np.ndarray, layer: _Layer) -> np.ndarray:
    """The size of the terms that are added up, and may cancel one another, in a slope of silu or of a gelu: z times the
    slope of the sigmoid, or of Phi."""
    plain = PLAIN[layer.how.activation]
    if plain in ("relu", "relu2"):
        return np.zeros(z.shape)
    alpha = layer.how.alpha
    gate = z
    other = np.ones(z.shape)
    if layer.how.activation in GATED:
        gates = _parts(z, layer)[0]
        gate = _pair_sum(np.where(gates, z, 0.0), layer)
        other = np.where(gates, np.abs(_pair_sum(np.where(gates, 0.0, z), layer)) + layer.how.up_offset, 0.0)
    y, steepness = _of_sigmoid(alpha * np.abs(gate), plain)
    s = np.abs(gate) * steepness * (1.0 + y) * np.exp(-np.minimum(y, 80.0))
    if plain == "gelu":
        s = np.abs(gate) * np.exp(-0.5 * np.minimum(gate**2, 80.0))
    return s * other + np.abs(activate(gate, plain))


class _Home:
    """A rank's tokens, the parts of their dX that are added up, and the gradients of their combine weights."""

    def __init__(self, call: RankCall, return_mode: str, ranks: int, layer: _Layer) -> None:
        self.call, self.reduced, self.layer = call, return_mode == "reduced", layer
        self.x, self.grad = (np.asarray(each, np.float64) for each in (call.x, call.grad))
        self.by_rank = np.zeros((ranks, *self.x.shape))
        self.terms = np.zeros((ranks, len(self.x)))
        self.squares, self.variance = np.zeros(self.x.shape), np.zeros(self.x.shape)
        self.of_weights, self.of_weights_variance = (np.zeros(call.ids.shape) for _ in range(2))
        self.further = 0  # terms of dX that are computed at home

    def add(self, t: np.ndarray, rows: np.ndarray, variance: np.ndarray, owner: int) -> None:
        self.by_rank[owner, t] += rows
        self.terms[owner, t] += 1
        self.squares[t] += rows**2
        self.variance[t] += variance

    def add_term(self, values: np.ndarray, variance: np.ndarray) -> None:
        """Adds a term of dX that is computed at home: that of the router, or of the shared expert's gate."""
        if self.layer.on_gpu:
            for each in (self.by_rank[self.call.rank], values):
                self.variance += _rounding(each, self.call.x.dtype.name)
        self.by_rank[self.call.rank] += values
        self.squares += values**2
        self.variance += variance
        self.further += 1

    def of_x(self) -> _Found:
        total, dtype = self.by_rank.sum(axis=0), self.layer.dtype
        terms = self.terms.sum(axis=0) + self.further
        variance = self.variance + _VARIANCE32 * (terms + 1)[:, None] * (self.squares / 6.0 + total**2 / 3.0)
        if self.reduced:
            several = self.terms[..., None] > 1
            variance += np.where(several, _rounding(self.by_rank, dtype), 0.0).sum(axis=0)
        return _Found(total, _tail_bound((variance + _rounding(total, dtype)).sum(axis=1)))

    def whole_weights(self, slices: int) -> tuple[np.ndarray, np.ndarray]:
        """The gradients of the combine weights of whole experts, each the sum over the slices, and their variances."""
        shape = len(self.x), self.call.ids.shape[1] // slices, slices
        values, variance = (each.reshape(shape).sum(axis=2) for each in (self.of_weights, self.of_weights_variance))
        return values, variance

    def of_router(self, router: np.ndarray, bias: np.ndarray | None) -> dict[str, _Found]:
        """Adds the router's part to dX. Returns the router's own gradients and their errors."""
        slices, rule = self.layer.how.slices, self.layer.how.of_layer()
        logits, ids = self.call.logits, self.call.ids[:, ::slices] // slices
        of_weights, of_weights_variance = self.whole_weights(slices)
        _, variance = _linear(self.x, 0.0, router, 0.0 if bias is None else np.asarray(bias, np.float64))
        grad = of_logits(logits, ids, of_weights, **rule)
        # The second term: the reference computes in float64, too, and if everything cancels, its error is left.
        largest = np.abs(of_weights).sum(axis=1, keepdims=True)
        total = _VARIANCE32 * grad**2 + (_FLOAT64 * abs(self.layer.how.routed_scale) * largest) ** 2
        for k in range(ids.shape[1]):
            unit = np.zeros(ids.shape)
            unit[:, k] = 1.0
            total += of_logits(logits, ids, unit, **rule) ** 2 * of_weights_variance[:, k, None]
        for e in range(logits.shape[1]):
            step = np.zeros(logits.shape[1])
            step[e] = 1e-6
            moved = [of_logits(logits + side * step, ids, of_weights, **rule) for side in (1.0, -1.0)]
            total += ((moved[0] - moved[1]) / 2e-6) ** 2 * variance[:, e, None]
        layer = self.layer
        if layer.on_gpu:
            total = total + _rounding(grad, layer.dtype)
        factor = layer.inner(grad, total)
        self.add_term(*layer.linear(*factor, layer.operand(router).T, 0.0))
        of_router, of_bias = _Sum.of(*router.shape), _Sum.of(1, len(router))
        of_router.add(*factor, layer.operand(self.x), np.zeros_like(self.x))
        one = np.ones((len(grad), 1))
        of_bias.add(one, np.zeros_like(one), grad, total)
        return {"router": of_router.found(layer), "router_bias": of_bias.found(layer, False)}


def _of_shared(
    layer: _Layer, home: _Home, up: np.ndarray, down: np.ndarray, gate: np.ndarray | None
) -> dict[str, _Found]:
    w, w_variance = _gate(home.x, gate)
    sums = _Sums.of(up, down)
    part = _Expert(layer, up, down)
    of_w, variance = part.rows(home, np.arange(len(home.x)), w, w_variance, home.call.rank, sums)
    found = {"shared_gate_up": sums.of_up.found(layer), "shared_down": sums.of_down.found(layer)}
    if gate is None:
        return found
    slope = w * (1.0 - w)
    of_logit = of_w[:, None] * slope
    total = variance[:, None] * slope**2 + w_variance * (of_w[:, None] * (1.0 - 2.0 * w)) ** 2
    total = total + _VARIANCE32 * (3.0 * of_logit**2 + (of_w[:, None] * w) ** 2)
    home.add_term(of_logit * gate, total * gate**2)
    of_gate = _Sum.of(*gate.shape)
    of_gate.add(of_logit, total, home.x, np.zeros_like(home.x))
    return found | {"shared_gate": of_gate.found(layer)}
