"""How far an engine's gradients may be from the reference's, derived as `flashmoe.tolerance` derives it for y.

The gradients are computed in float32 from what the forward pass has kept (pre-activations, weights) and dY, and rounded
to their tensors' types in these places alone:

1. the pre-activations, when they are kept;
2. a row's part of a token's dX, ``dz @ gate_up``, before it travels home;
3. ``reduced`` only: the sum of a token's rows on one rank, where it is the sum of at least two;
4. every result, once;
5. on a GPU besides: dz, ``w a`` and the gradients of logits, since tensor cores multiply by them; and what the experts
   owe to dX, and the router, before they are added.

**A row of an expert.** ``z = gate_up @ x + b`` has the forward pass's error and, unless it is in float32, that of place
1, ``g = dY @ down`` that of a dot product over H. The gradient of z is made of both: of ``w g act'(z)`` the variance is
the sum of what each factor's variance leads to, that of act' by the second derivative. Where act' jumps (relu at 0, the
limits of a clamp) and z is within 8 standard deviations of that place, engine and reference may be on different sides:
the jump is the deviation. The gradient of w is ``a . g + b . dY``, added up in float64.

**The router.** The gradients of logits are computed in float64 from the logits and the gradients of weights, and
rounded to float32, or as place 5 says. What they owe to the errors of either is carried by the Jacobian and its
derivatives, by differences.

**Gradients of weights** are sums over rows, added up in float32, of the outer product of two rows, each with its
variance. What one row has wrong is wrong in a whole matrix, but rows err independently of one another: so the tail
bound takes a row for what a token is in the bound of y, and besides each element of the sum, for the roundings of the
sum itself. Biases are added up in float64.

Domain: as there; nothing may overflow or be subnormal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .reference import activate, activate_backward
from .reference.backward import of_logits
from .spec import GATED
from .tolerance import (
    _FUNCTION_ROUNDINGS,
    _VARIANCE32,
    CallError,
    _activated,
    _gate,
    _linear,
    _rounding,
    _scaled_linear,
    _tail_bound,
)

_FLOAT64 = 16.0 * 2.0**-53  # a few roundings of float64


@dataclass(frozen=True, eq=False)
class RankCall:
    """One rank's part of a call, in the reference's numbers."""

    x: np.ndarray
    """[T, H], of the layer's type."""
    grad: np.ndarray
    """[T, H]: dY."""
    ids: np.ndarray
    """[T, K]: the experts chosen, dropped ones too."""
    kept: np.ndarray
    """[T, K]: the same, -1 where dropped."""
    weights: np.ndarray
    """[T, K]."""
    owners: Sequence[int]
    """For each expert the rank that computes it for these tokens."""
    weight_variance: np.ndarray | float = 0.0
    """[T, K]: that of weights which the engine computes (`flashmoe.tolerance.router_error`)."""
    logits: np.ndarray | None = None
    """[T, E], of a router."""
    rank: int = 0


@dataclass
class _Sum:
    """What is known of a gradient that is a sum over rows: its terms' sums, and each row's variance."""

    total: np.ndarray
    squares: np.ndarray
    rows: list[np.ndarray] = field(default_factory=list)
    count: int = 0

    @classmethod
    def of(cls, *shape: int) -> _Sum:
        return cls(np.zeros(shape), np.zeros(shape))

    def add(self, left: np.ndarray, left_variance: np.ndarray, right: np.ndarray, right_variance: np.ndarray) -> None:
        """The outer products of rows [n, a] and [n, b], of these variances."""
        self.total += left.T @ right
        self.squares += (left**2).T @ right**2
        of_left, of_right = (np.square(each).sum(axis=1) for each in (left, right))
        self.rows.append(left_variance.sum(axis=1) * of_right + of_left * right_variance.sum(axis=1))
        self.count += len(left)

    def error(self, dtype: str, in_float32: bool = True) -> CallError:
        return _tail_bound(self.variances(dtype, in_float32))

    def variances(self, dtype: str, in_float32: bool = True) -> np.ndarray:
        """Of what is independent of one another."""
        own = _rounding(self.total, dtype)
        if in_float32:  # of the running sum; what is added is exact in a fused multiply-add, else rounded
            own = own + _VARIANCE32 * ((self.count + 2) * (self.squares / 6.0 + self.total**2 / 3.0) + self.squares)
        return np.concatenate([*self.rows, own.ravel()])


def gradient_errors(
    calls: Sequence[RankCall],
    gate_up_proj: np.ndarray,
    down_proj: np.ndarray,
    *,
    return_mode: str,
    engine: str = "cpu",
    router: np.ndarray | None = None,
    router_bias: np.ndarray | None = None,
    rule: Mapping[str, Any] | None = None,
    gate_up_bias: np.ndarray | None = None,
    down_bias: np.ndarray | None = None,
    activation: str = "swiglu",
    transposed: bool = False,
    weights_on_input: bool = False,
    shared_gate_up: np.ndarray | None = None,
    shared_down: np.ndarray | None = None,
    shared_gate: np.ndarray | None = None,
    slices: int = 1,
    **shape: Any,
) -> dict[str, Any]:
    """The error of each gradient of a call of several ranks, by the names of `flashmoe.moe`: of the experts' tensors,
    all E of them, one `CallError`, of what each rank has for itself (x, topk_weights, the router's and the shared
    expert's tensors) a list of them. `engine`: ``"cpu"`` or ``"cuda"``. `rule`: `renormalize`, `score` and
    `routed_scale`. `slices`: the experts, and with them ids, weights and owners of the calls, are of slices; the router
    and the gradients of weights are of whole experts. The rest as in `flashmoe.tolerance.call_error`.
    """
    dtype = calls[0].x.dtype.name
    matrices = [None if m is None else np.asarray(m, np.float64) for m in (gate_up_proj, down_proj)]
    up, down = (each.swapaxes(1, 2) if transposed else each for each in matrices)
    layer = _Layer(dtype, activation, shape, weights_on_input, engine == "cuda")
    errors: dict[str, Any] = {name: [] for name in ("x", "topk_weights", "router", "router_bias", "shared_gate_up")}
    errors |= {name: [] for name in ("shared_down", "shared_gate")}
    homes = [_Home(call, return_mode, len(calls), layer.on_gpu) for call in calls]
    of_experts = []
    for expert in range(len(up)):
        sums = _Sums.of(up[expert], down[expert])
        biases = (None if b is None else np.asarray(b[expert], np.float64) for b in (gate_up_bias, down_bias))
        part = _Expert(layer, up[expert], down[expert], *biases)
        for home in homes:
            t, k = np.nonzero(home.call.kept == expert)
            variance = np.broadcast_to(home.call.weight_variance, home.call.ids.shape)[t, k, None]
            of_weight = part.rows(home, t, home.call.weights[t, k, None], variance, home.call.owners[expert], sums)
            home.of_weights[t, k], home.of_weights_variance[t, k] = of_weight
        of_experts.append(sums)
    for name in _Sums.NAMES:
        errors[name] = _tail_bound(np.concatenate([sums.variances(name, dtype) for sums in of_experts]))
    for home in homes:
        if shared_down is not None:
            gate = None if shared_gate is None else np.asarray(shared_gate, np.float64)
            pair = (np.asarray(each, np.float64) for each in (shared_gate_up, shared_down))
            pair = (each.T if transposed else each for each in pair)
            for name, error in _of_shared(layer, home, *pair, gate).items():
                errors[name].append(error)
        if router is not None:
            of_router = home.of_router(np.asarray(router, np.float64), router_bias, rule or {}, dtype, slices)
            for name, error in of_router.items():
                errors[name].append(error)
        else:
            variance = home.of_weights_variance + _rounding(home.of_weights, "float32")
            errors["topk_weights"].append(_tail_bound(variance.sum(axis=1)))
        errors["x"].append(home.of_x(dtype))
    return errors


@dataclass
class _Sums:
    """Those of an expert's tensors."""

    NAMES = ("gate_up_proj", "down_proj", "gate_up_bias", "down_bias")
    of_up: _Sum
    of_down: _Sum
    up_bias: _Sum
    down_bias: _Sum

    @classmethod
    def of(cls, up: np.ndarray, down: np.ndarray) -> _Sums:
        return cls(_Sum.of(*up.shape), _Sum.of(*down.shape), _Sum.of(1, len(up)), _Sum.of(1, len(down)))

    def variances(self, name: str, dtype: str) -> np.ndarray:
        each = (self.of_up, self.of_down, self.up_bias, self.down_bias)[self.NAMES.index(name)]
        return each.variances(dtype, not name.endswith("_bias"))


@dataclass
class _Layer:
    dtype: str
    activation: str
    shape: Mapping[str, Any]
    weights_on_input: bool
    on_gpu: bool = False


@dataclass
class _Expert:
    """The rows of one expert, or of the shared one."""

    layer: _Layer
    up: np.ndarray
    down: np.ndarray
    up_bias: np.ndarray | None = None
    down_bias: np.ndarray | None = None

    def rows(
        self, home: _Home, t: np.ndarray, w: np.ndarray, w_variance: np.ndarray, owner: int, sums: _Sums
    ) -> tuple[np.ndarray, np.ndarray]:
        """Adds to the sums and to the tokens' dX what rows of tokens t have; the gradients of w [n], and variances."""
        layer, x, dy = self.layer, home.x[t], home.grad[t]
        exact = np.zeros_like
        on_input, bias = layer.weights_on_input, 0.0 if self.up_bias is None else self.up_bias
        z, z_variance = _scaled_linear(x, w, w_variance, self.up, bias) if on_input else _linear(x, 0.0, self.up, bias)
        on_gpu_input = on_input and layer.on_gpu
        if layer.dtype != "float32":  # a GPU keeps what weights scale, others the pre-activations
            z_variance = z_variance + _rounding(z - bias if on_gpu_input else z, layer.dtype)
        a, a_variance = _activated(z, z_variance, layer.activation, **layer.shape)
        g, g_variance = _linear(dy, 0.0, self.down.T, 0.0)
        scaled = (w * x, w_variance * x**2 + _VARIANCE32 * (w * x) ** 2), (w * dy, w_variance * dy**2)
        rows, df = ((scaled[0]), (dy, exact(dy))) if on_input else ((x, exact(x)), scaled[1])
        if not on_input:
            df = df[0], df[1] + _VARIANCE32 * df[0] ** 2
        weight, weight_variance = (np.ones_like(w), np.zeros_like(w)) if on_input else (w, w_variance)
        dz, dz_variance = _backward(layer, z, z_variance, g, g_variance, weight, weight_variance)
        plain, plain_variance = of_plain, of_plain_variance = dz, dz_variance
        if layer.on_gpu:
            if on_input:  # what is multiplied has the weight, what biases get has not
                rows = x, exact(x)
                dz, dz_variance = w * dz, w**2 * dz_variance + w_variance * dz**2 + _VARIANCE32 * (w * dz) ** 2
            plain_variance = plain_variance + _rounding(plain, layer.dtype)
            dz_variance = dz_variance + _rounding(dz, layer.dtype)
        sums.of_up.add(dz, dz_variance, *rows)
        if layer.on_gpu:
            weighted = weight * a
            variance = weight**2 * a_variance + weight_variance * a**2 + _VARIANCE32 * weighted**2
            sums.of_down.add(dy, exact(dy), weighted, variance + _rounding(weighted, layer.dtype))
        else:
            sums.of_down.add(*df, a, a_variance)
        one = np.ones((len(t), 1))
        sums.up_bias.add(one, exact(one), plain, plain_variance)
        sums.down_bias.add(one, exact(one), *df)
        dx, dx_variance = _linear(dz, dz_variance, self.up.T, 0.0)
        if on_gpu_input:
            u, u_variance = _linear(x, 0.0, self.up, 0.0)
            of_weight = (of_plain * u).sum(axis=1)
            # An error of u is one of its gradient, too: both add up.
            errors = of_plain_variance * u**2 + of_plain**2 * (u_variance + _rounding(u, layer.dtype))
            variance = 2.0 * errors.sum(axis=1)
        elif on_input:
            of_weight, variance = (dx * x).sum(axis=1), (dx_variance * x**2).sum(axis=1)
            dx, dx_variance = w * dx, w**2 * dx_variance + w_variance * dx**2 + _VARIANCE32 * (w * dx) ** 2
        else:
            of_weight = (a * g).sum(axis=1) + (0.0 if self.down_bias is None else dy @ self.down_bias)
            variance = (a_variance * g**2 + a**2 * g_variance).sum(axis=1)
        home.add(t, dx, dx_variance + _rounding(dx, layer.dtype), owner)
        return of_weight, variance + _VARIANCE32 * of_weight**2


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
    how = {"activation": layer.activation, **layer.shape}
    slope = activate_backward(z, np.ones_like(g), **how)  # of the sum of all activated columns
    pairs = _pairs(g, layer)
    dz = w * pairs * slope
    of_slope = np.zeros(z.shape)
    for part in _parts(z, layer):  # in each of the two pre-activations that a column has
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
    # What makes up a slope may cancel in it; its parts are at most about this.
    size = np.abs(slope) + _parts_of_slope(z, layer)
    of_slope += _VARIANCE32 * (_FUNCTION_ROUNDINGS * size) ** 2
    of_g = _pairs(g_variance, layer)
    variance = (w * slope) ** 2 * of_g + (w * pairs) ** 2 * of_slope + w_variance * (pairs * slope) ** 2
    return dz, variance + 2.0 * _VARIANCE32 * dz**2


def _pairs(each: np.ndarray, layer: _Layer) -> np.ndarray:
    """A number of each column as that of each of its pre-activations."""
    if layer.activation not in GATED:
        return each
    return np.repeat(each, 2, axis=1) if layer.shape.get("interleaved") else np.concatenate([each, each], axis=1)


def _pair_sum(each: np.ndarray, layer: _Layer) -> np.ndarray:
    """In place of a number of each pre-activation, the sum of the column's two."""
    if layer.activation not in GATED:
        return each
    if layer.shape.get("interleaved"):
        return _pairs(each[:, ::2] + each[:, 1::2], layer)
    return _pairs(sum(np.split(each, 2, axis=1)), layer)


def _parts(z: np.ndarray, layer: _Layer) -> list[np.ndarray]:
    """Which pre-activations are gates, and which ups; or all, without a gate."""
    if layer.activation not in GATED:
        return [np.ones(z.shape, bool)]
    columns = np.zeros(z.shape, bool)
    if layer.shape.get("interleaved"):
        columns[:, ::2] = True
    else:
        columns[:, : z.shape[1] // 2] = True
    return [columns, ~columns]


def _parts_of_slope(z: np.ndarray, layer: _Layer) -> np.ndarray:
    """What is added up and may cancel in a slope of silu or gelu: z times the slope of the sigmoid, or of Phi."""
    plain = {"swiglu": "silu", "geglu": "gelu", "clamped_swiglu": "silu"}.get(layer.activation, layer.activation)
    if plain not in ("silu", "gelu"):
        return np.zeros(z.shape)
    alpha = layer.shape.get("alpha", 1.0)
    gate = z
    other = np.ones(z.shape)
    if layer.activation in GATED:
        gates = _parts(z, layer)[0]
        gate = _pair_sum(np.where(gates, z, 0.0), layer)
        other = np.where(
            gates, np.abs(_pair_sum(np.where(gates, 0.0, z), layer)) + layer.shape.get("up_offset", 0.0), 0.0
        )
    s = np.abs(gate) * (1.0 + alpha * np.abs(gate)) * np.exp(-alpha * np.minimum(np.abs(gate), 80.0))
    if plain == "gelu":
        s = np.abs(gate) * np.exp(-0.5 * np.minimum(gate**2, 80.0))
    return s * other + np.abs(activate(gate, plain))


class _Home:
    """A rank's tokens: what their dX is made of."""

    def __init__(self, call: RankCall, return_mode: str, ranks: int, on_gpu: bool) -> None:
        self.call, self.reduced, self.on_gpu = call, return_mode == "reduced", on_gpu
        self.x, self.grad = (np.asarray(each, np.float64) for each in (call.x, call.grad))
        self.by_rank = np.zeros((ranks, *self.x.shape))
        self.terms = np.zeros((ranks, len(self.x)))
        self.squares, self.variance = np.zeros(self.x.shape), np.zeros(self.x.shape)
        self.of_weights, self.of_weights_variance = (np.zeros(call.ids.shape) for _ in range(2))
        self.further = 0  # terms that do not travel

    def add(self, t: np.ndarray, rows: np.ndarray, variance: np.ndarray, owner: int) -> None:
        self.by_rank[owner, t] += rows
        self.terms[owner, t] += 1
        self.squares[t] += rows**2
        self.variance[t] += variance

    def add_term(self, values: np.ndarray, variance: np.ndarray) -> None:
        """One that does not travel."""
        if self.on_gpu:
            for each in (self.by_rank[self.call.rank], values):
                self.variance += _rounding(each, self.call.x.dtype.name)
        self.by_rank[self.call.rank] += values
        self.squares += values**2
        self.variance += variance
        self.further += 1

    def of_x(self, dtype: str) -> CallError:
        total = self.by_rank.sum(axis=0)
        terms = self.terms.sum(axis=0) + self.further
        variance = self.variance + _VARIANCE32 * (terms + 1)[:, None] * (self.squares / 6.0 + total**2 / 3.0)
        if self.reduced:
            several = self.terms[..., None] > 1
            variance += np.where(several, _rounding(self.by_rank, dtype), 0.0).sum(axis=0)
        return _tail_bound((variance + _rounding(total, dtype)).sum(axis=1))

    def of_router(
        self, router: np.ndarray, bias: np.ndarray | None, rule: Mapping[str, Any], dtype: str, slices: int
    ) -> dict[str, CallError]:
        """What leads to x through the router is added; the errors of the router's own gradients."""
        logits, ids = self.call.logits, self.call.ids[:, ::slices] // slices
        of_weights, of_weights_variance = (
            each.reshape(*ids.shape, slices).sum(axis=2) for each in (self.of_weights, self.of_weights_variance)
        )
        _, variance = _linear(self.x, 0.0, router, 0.0 if bias is None else np.asarray(bias, np.float64))
        grad = of_logits(logits, ids, of_weights, **rule)
        # The reference, too, computes in float64: where all cancels, that is what is left.
        largest = np.abs(of_weights).sum(axis=1, keepdims=True)
        total = _VARIANCE32 * grad**2 + (_FLOAT64 * abs(rule.get("routed_scale", 1.0)) * largest) ** 2
        for k in range(ids.shape[1]):
            unit = np.zeros(ids.shape)
            unit[:, k] = 1.0
            total += of_logits(logits, ids, unit, **rule) ** 2 * of_weights_variance[:, k, None]
        for e in range(logits.shape[1]):
            step = np.zeros(logits.shape[1])
            step[e] = 1e-6
            moved = [of_logits(logits + side * step, ids, of_weights, **rule) for side in (1.0, -1.0)]
            total += ((moved[0] - moved[1]) / 2e-6) ** 2 * variance[:, e, None]
        if self.on_gpu:
            total = total + _rounding(grad, dtype)
        self.add_term(*_linear(grad, total, router.T, 0.0))
        of_router, of_bias = _Sum.of(*router.shape), _Sum.of(1, len(router))
        of_router.add(grad, total, self.x, np.zeros_like(self.x))
        one = np.ones((len(grad), 1))
        of_bias.add(one, np.zeros_like(one), grad, total)
        return {"router": of_router.error(dtype), "router_bias": of_bias.error(dtype, False)}


def _of_shared(
    layer: _Layer, home: _Home, up: np.ndarray, down: np.ndarray, gate: np.ndarray | None
) -> dict[str, CallError]:
    w, w_variance = _gate(home.x, gate)
    sums = _Sums.of(up, down)
    part = _Expert(layer, up, down)
    of_w, variance = part.rows(home, np.arange(len(home.x)), w, w_variance, home.call.rank, sums)
    found = {"shared_gate_up": sums.of_up.error(layer.dtype), "shared_down": sums.of_down.error(layer.dtype)}
    if gate is None:
        return found
    slope = w * (1.0 - w)
    of_logit = of_w[:, None] * slope
    total = variance[:, None] * slope**2 + w_variance * (of_w[:, None] * (1.0 - 2.0 * w)) ** 2
    total = total + _VARIANCE32 * (3.0 * of_logit**2 + (of_w[:, None] * w) ** 2)
    home.add_term(of_logit * gate, total * gate**2)
    of_gate = _Sum.of(*gate.shape)
    of_gate.add(of_logit, total, home.x, np.zeros_like(home.x))
    return found | {"shared_gate": of_gate.error(layer.dtype)}
