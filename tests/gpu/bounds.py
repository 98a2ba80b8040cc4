"""The float64 reference, computed on the device, and how far the CUDA engine may be from it.

The reference uses no code of the engine: it widens operands to float64 and recomputes the routing from them. The bound
is that of `flashmoe.tolerance` (its text derives the bound from the variances of independent roundings, which are
computed from the values of the call, and from a tail bound), with what tensor cores add:

**TF32** (float32 tensors). The tensor cores ignore the 13 low bits of an operand's 23: they truncate an operand of
binade 2^e to a multiple of 2^(e-10), always towards zero, and by 2^(e-11) in the mean. If mantissas spread over the
binade, a product shrinks by 2 * 0.72 * 2^-11 of its value in the mean. Since all products shrink, these errors do not
average out as roundings do, so they cannot be counted as variances. For x and the weights, the truncated bits are
known: a second reference computes the result exactly from truncated operands, and the bound grows by the norm of the
difference between the two references. For the activated intermediate a, the truncated bits depend on earlier float32
roundings: the second reference shrinks a by the mean error, half a step (a step is 2^(e-10)), and step^2 / 12 is added
to the variance of a.

**Accumulation.** One instruction aligns its products and the sum so far to the largest of them, and truncates each of
them towards zero, by at most 2^-23 of that largest. n products in steps of at least 8 add at most n/8 such errors, and
half of that in the mean: (n/16) 2^-23 of a partial sum. The root mean square of the partial sums is below
sqrt(sum p^2 + (sum p)^2). The square of this error is added to the variance of an exact float32 sum.

**Functions.** The engine uses the SM's approximations of exp and the reciprocal: SiLU has a relative error of 2^-20.
GELU is max(z, 0) less its tail |z| erfc(|z| / sqrt 2) / 2. The polynomial for the tail has a relative error of 3.1e-4
for bfloat16, and of 5.4e-6 otherwise; exact float32 has another one, whose error is 1.5e-7 of z
(include/flashmoe/gpu/activate.cuh). GELU by tanh is z times the sigmoid of a y, as SiLU is z times the sigmoid of z. It
has the same relative error as SiLU, and as for SiLU, four float32 roundings of the sigmoid's argument are allowed for.

**A shared expert** is one further choice of every token, and its row is one dot product over all of Is. The kernel for
a few tokens instead has one choice for each slice of I columns, and rounds each slice's row. The bound does not ask
which kernel computed a call: it takes the larger of the two variances of rounding.

**Exact** calls of float32 tensors do not use tensor cores, so the paragraphs on TF32 and accumulation do not apply to
them: their sums round as `flashmoe.tolerance` assumes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from flashmoe.spec import GATED, PLAIN
from flashmoe.tolerance import UNIT_ROUNDOFF
from torch import Tensor

_SMALLEST_NORMAL = {"float32": 2.0**-126, "bfloat16": 2.0**-126, "float16": 2.0**-14}
_VARIANCE32 = UNIT_ROUNDOFF["float32"] ** 2 / 3.0
_TF32_STEP = 2.0**-10  # relative to the binade
_SILU_ERROR, _ERFC_ERROR = 2.0**-20, 1.5e-7
_GELU_TAIL_ERROR = {"bfloat16": 3.1e-4, "float16": 5.4e-6, "float32": 5.4e-6}
_TAIL = 23.0  # exp(-23) = 1e-10


@dataclass(frozen=True)
class Weights:
    """The weights of the experts, in the layout that a call takes."""

    gate_up_proj: Tensor
    down_proj: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    activation: str
    shape: dict[str, Any] = field(default_factory=dict)
    """Options of `flashmoe.moe`, as far as given: interleaved, limit, alpha, up_offset, weights_on_input."""
    shared_gate_up: Tensor | None = None
    shared_down: Tensor | None = None
    shared_gate: Tensor | None = None

    def matrices(self, expert: int) -> tuple[Tensor, Tensor, Tensor | float, Tensor | float]:
        """Both matrices and both biases of an expert. Number E, one above the last expert's, is the shared expert."""
        if expert == len(self.down_proj):
            return self.shared_gate_up, self.shared_down, 0.0, 0.0
        b1, b2 = (0.0 if bias is None else bias[expert].double() for bias in (self.gate_up_bias, self.down_bias))
        return self.gate_up_proj[expert], self.down_proj[expert], b1, b2

    @property
    def width(self) -> int:
        """The experts' I, which is also the width of the shared expert's slices."""
        return self.down_proj.shape[2]


@dataclass(frozen=True)
class RouterRule:
    """How experts and their combine weights follow from logits: these options of `flashmoe.moe`."""

    renormalize: bool = True
    score: str = "softmax"
    routed_scale: float = 1.0
    round_logits: bool = False
    groups: int = 1
    top_groups: int | None = None
    choice_bias: Tensor | None = None

    @property
    def by_scores(self) -> bool:
        """Whether experts are chosen by scores, and not by logits."""
        return self.choice_bias is not None or self.groups > 1


@dataclass(frozen=True)
class Expected:
    """The reference's result, and how much the engine's result may differ from it."""

    y: Tensor
    """float64 [T, H]."""
    topk_ids: Tensor
    """int64 [T, K]; -1: dropped. Where two logits are nearly equal, in the order that the engine reports."""
    weights: Tensor
    """float64 [T, K]: the combine weights."""
    weight_slack: Tensor
    """[T, K]: how much the engine's combine weights may differ from `weights`."""
    routing_is_valid: bool
    scale: float
    """Frobenius norm of the terms that y sums: each is a combine weight times an expert's row."""
    rms: float
    bound: float
    """The most that the Frobenius norm of the error may be."""


def expected_result(
    x: Tensor,
    experts: Weights,
    *,
    top_k: int,
    router: Tensor | None = None,
    router_bias: Tensor | None = None,
    rule: RouterRule = RouterRule(),
    topk_ids: Tensor | None = None,
    topk_weights: Tensor | None = None,
    capacity_factor: float | None = None,
    reported: Tensor | None = None,
    exact: bool = False,
) -> Expected:
    """The reference's result of a call. `reported`: the ids that the engine reports, which the reference takes where
    logits are too close to decide. `exact`: the call's option; without effect for types other than float32."""
    valid = True
    if topk_ids is None:
        logits = logits_of(x, router, router_bias)
        if rule.round_logits:
            logits = logits.to(x.dtype).double()
        values = choice_values(logits, rule)
        ids = choose(values, top_k)
        if reported is not None and capacity_factor is None:
            slack = router_slack(x, router, router_bias, rule)
            valid = are_top_k(values, reported, slack)
            ids = torch.where(((reported >= 0) & (reported < logits.shape[1])).all(dim=1, keepdim=True), reported, ids)
        weights = weigh(logits, ids, rule)
        variance = _weight_variance(x, router, logits, ids, weights, rule)
    else:
        ids, weights = topk_ids.long(), topk_weights.double()
        variance = torch.zeros_like(weights)
    ids = routed_ids = drop(ids, capacity_factor, len(experts.down_proj))
    routed_weights, weight_slack = weights, 8.0 * variance.sqrt()
    if experts.shared_down is not None:
        gate, of_gate = _gate(x, experts.shared_gate)
        ids = torch.cat([ids, torch.full_like(ids[:, :1], len(experts.down_proj))], dim=1)
        weights, variance = torch.cat([weights, gate], dim=1), torch.cat([variance, of_gate], dim=1)
    sums = _Sums.zeros(x)
    for expert in ids[ids >= 0].unique().tolist():
        t, k = (ids == expert).nonzero(as_tuple=True)
        w = weights[t, k, None], variance[t, k, None]
        _add_expert(sums, x[t], t, experts, expert, w, exact and _name(x) == "float32")
    dtype = _name(x)
    several = (ids >= 0).sum(dim=1) > 1
    of_sum = _VARIANCE32 * (ids.shape[1] + 1) * (sums.squares / 6.0 + sums.y**2 / 3.0) + _rounding(sums.y, dtype)
    by_token = (sums.variance + torch.where(several[:, None], of_sum, 0.0)).sum(dim=1)
    rms, tail = _tail_bound(by_token)
    shift = float((sums.engine - sums.y).norm())
    return Expected(
        y=sums.y,
        topk_ids=routed_ids,
        weights=routed_weights,
        weight_slack=weight_slack,
        routing_is_valid=bool(valid),
        scale=math.sqrt(float(sums.squares.sum())),
        rms=rms + shift,
        bound=tail + shift,
    )


# ---- Routing ------------------------------------------------------------------------------------------


def logits_of(x: Tensor, router: Tensor, bias: Tensor | None) -> Tensor:
    """float64 [T, E]: the router's logits. (The engine's router does not truncate operands, not even in float32.)"""
    logits = x.double() @ router.double().T
    return logits if bias is None else logits + bias.double()


def _relative(x: Tensor, router: Tensor, logits: Tensor, score: str) -> Tensor:
    """[T, E]: relative variance of the scores; for a softmax, of the exponentials before they are divided by their
    sum."""
    variance = _dot_variance(x.double(), router.double(), logits)
    if score == "sigmoid":
        of_exp = variance + _VARIANCE32 * (logits**2 + 16.0)
        return torch.sigmoid(-logits) ** 2 * of_exp + 2.0 * _VARIANCE32
    return variance + _VARIANCE32 * ((logits - logits.amax(dim=1, keepdim=True)) ** 2 + 16.0)


def scores_of(logits: Tensor, score: str) -> Tensor:
    return torch.sigmoid(logits) if score == "sigmoid" else torch.softmax(logits, dim=1)


def choice_values(logits: Tensor, rule: RouterRule) -> Tensor:
    """float64 [T, E]: the values by which experts are chosen; the largest of a token's are taken."""
    if not rule.by_scores:
        return logits
    values = scores_of(logits, rule.score) + (0.0 if rule.choice_bias is None else rule.choice_bias.double())
    by_group = values.unflatten(1, (rule.groups, -1))
    best = by_group.topk(min(2, by_group.shape[2]), dim=2).values.sum(dim=2)
    kept = torch.zeros_like(best, dtype=torch.bool)
    kept.scatter_(1, choose(best, rule.top_groups or rule.groups), True)
    return torch.where(kept[:, :, None], by_group, -math.inf).flatten(1)


def router_slack(x: Tensor, router: Tensor, bias: Tensor | None, rule: RouterRule = RouterRule()) -> Tensor:
    """[T]: the largest difference between two of a token's `choice_values` at which the engine may take the two experts
    in either order. It is 8 standard deviations of a difference, computed as if both values had the largest variance of
    the token's values."""
    logits = logits_of(x, router, bias)
    variance = _dot_variance(x.double(), router.double(), logits)
    if rule.by_scores:
        g, relative = scores_of(logits, rule.score), _relative(x, router, logits, rule.score)
        of_sum = (relative * g**2).sum(dim=1, keepdim=True) if rule.score == "softmax" else 0.0
        variance = (relative + of_sum) * g**2
        if rule.choice_bias is not None:
            variance = variance + _VARIANCE32 * (g + rule.choice_bias.double()) ** 2
    return 8.0 * (2.0 * variance.amax(dim=1)).sqrt()


def choose(logits: Tensor, top_k: int) -> Tensor:
    """ids [T, K] of the largest logits; of equal logits, those with the lower ids."""
    return logits.sort(dim=1, descending=True, stable=True).indices[:, :top_k].contiguous()


def weigh(logits: Tensor, ids: Tensor, rule: RouterRule) -> Tensor:
    """The combine weights [T, K]: the scores of the chosen experts, divided by the sum of the token's chosen scores if
    the rule renormalises, and multiplied by `routed_scale`."""
    shares = scores_of(logits, rule.score).gather(1, ids)
    if rule.renormalize:
        shares = shares / (shares.sum(dim=1, keepdim=True) + (1e-20 if rule.score == "sigmoid" else 0.0))
    return rule.routed_scale * shares


def are_top_k(logits: Tensor, ids: Tensor, slack: Tensor) -> bool:
    """Whether every row's ids are distinct experts in descending order of their logits, and no other expert has a
    larger logit. A logit may exceed one that should be larger by up to `slack`."""
    if not ((ids >= 0) & (ids < logits.shape[1])).all():
        return False
    times = torch.zeros_like(logits).scatter_add_(1, ids, torch.ones_like(ids, dtype=logits.dtype))
    if (times > 1).any():
        return False
    values = logits.gather(1, ids)
    left_out = torch.where(times > 0, -math.inf, logits).amax(dim=1, keepdim=True)
    following = torch.cat([values, left_out], dim=1).flip(1).cummax(dim=1).values.flip(1)[:, 1:]
    return bool((values >= following - slack[:, None]).all())


def drop(ids: Tensor, capacity_factor: float | None, experts: int) -> Tensor:
    """The ids, with -1 for each choice beyond its expert's capacity; experts take choices in the order of tokens."""
    if capacity_factor is None:
        return ids
    capacity = math.ceil(capacity_factor * ids.numel() / experts)
    kept = ids.clone()
    for expert in range(experts):
        t, k = (ids == expert).nonzero(as_tuple=True)
        kept[t[capacity:], k[capacity:]] = -1
    return kept


def _weight_variance(
    x: Tensor, router: Tensor, logits: Tensor, ids: Tensor, weights: Tensor, rule: RouterRule
) -> Tensor:
    """The variance of the combine weights, as `flashmoe.tolerance.router_error` derives it."""
    relative, shares = _relative(x, router, logits, rule.score), scores_of(logits, rule.score)
    if rule.renormalize:
        shares = torch.zeros_like(shares).scatter_(1, ids, shares.gather(1, ids))
    elif rule.score == "sigmoid":
        shares = torch.zeros_like(shares)
    shares = shares / shares.sum(dim=1, keepdim=True).clamp(min=1e-300)
    of_weight = (relative * (1.0 - 2.0 * shares)).gather(1, ids)
    of_weight = of_weight + (relative * shares**2).sum(dim=1, keepdim=True)
    of_weight = of_weight + _VARIANCE32 * (3.0 + shares.shape[1] / 3.0)
    return weights**2 * of_weight + _SMALLEST_NORMAL["float32"] ** 2


def _gate(x: Tensor, gate: Tensor | None) -> tuple[Tensor, Tensor]:
    """The shared expert's combine weights [T, 1], and their variances."""
    if gate is None:
        return torch.ones(len(x), 1, device=x.device).double(), torch.zeros(len(x), 1, device=x.device).double()
    logits = logits_of(x, gate, None)
    g = torch.sigmoid(logits)
    return g, _relative(x, gate, logits, "sigmoid") * g**2


# ---- Experts ------------------------------------------------------------------------------------------


@dataclass
class _Sums:
    """Sums over the experts' rows, each [T, H]."""

    y: Tensor
    engine: Tensor
    """The second reference: y computed from truncated operands."""
    variance: Tensor
    squares: Tensor

    @classmethod
    def zeros(cls, x: Tensor) -> _Sums:
        return cls(*(torch.zeros(x.shape, dtype=torch.float64, device=x.device) for _ in range(4)))


def _add_expert(
    sums: _Sums, x: Tensor, t: Tensor, experts: Weights, expert: int, w: tuple[Tensor, Tensor], exact: bool
) -> None:
    """Adds the terms of one expert to `sums`, for the tokens t, whose rows are x. `w`: the combine weights of these
    tokens for the expert, and the variances of these weights."""
    dtype, activation = _name(x), experts.activation
    w1, w2, b1, b2 = experts.matrices(expert)
    weight, weight_variance = w
    on_input = experts.shape.get("weights_on_input", False)
    shape = {name: value for name, value in experts.shape.items() if name != "weights_on_input"}
    scale = weight if on_input else torch.ones_like(weight)  # of the first product
    product = x.double() @ w1.double().T
    z = scale * product + b1
    z_variance = scale**2 * _dot_variance(x.double(), w1.double(), product + b1, exact)
    if on_input:
        z_variance = z_variance + weight_variance * product**2 + 2.0 * _VARIANCE32 * (product**2 * scale**2 + z**2)
        weight, weight_variance = torch.ones_like(weight), torch.zeros_like(weight_variance)
    a, a_variance = _activated(z, z_variance, activation, dtype, exact, **shape)
    a_variance = a_variance + _rounding(a, dtype)
    f = a @ w2.double().T + b2
    f_engine = f
    if dtype == "float32" and not exact:
        z_engine = scale * (round_operand(x) @ round_operand(w1).T) + b1
        a_engine, _ = _activated(z_engine, None, activation, dtype, **shape)
        step = _TF32_STEP * _binade(a_engine, dtype)
        a_engine = torch.where(a_engine.abs() > step, a_engine - a_engine.sign() * step / 2.0, a_engine)
        a_variance = a_variance + step**2 / 12.0
        f_engine = a_engine @ round_operand(w2).T + b2
    f_variance = _dot_variance(a, w2.double(), f, exact) + a_variance @ (w2.double() ** 2).T
    row = weight * f
    rounding = _rounding(row, dtype)
    if w2.shape[1] > experts.width:
        slices = zip(a.split(experts.width, dim=1), w2.double().split(experts.width, dim=1), strict=True)
        rounding = torch.maximum(rounding, sum(_rounding(weight * (each @ w.T), dtype) for each, w in slices))
    variance = weight**2 * f_variance + weight_variance * f**2 + rounding
    if dtype != "float32":
        variance = variance + _VARIANCE32 * row**2  # weight * f is rounded to float32 before it is rounded to dtype
    # A token chooses an expert at most once, so no token occurs twice in t, and the indexed += below adds every row.
    sums.y[t] += row
    sums.engine[t] += weight * f_engine
    sums.variance[t] += variance
    sums.squares[t] += row**2


def round_operand(v: Tensor) -> Tensor:
    """v as the tensor cores read it, in float64: float32 without its 13 low bits, other types unchanged."""
    if v.dtype != torch.float32:
        return v.double()
    return (v.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32).double()


def _dot_variance(x: Tensor, matrix: Tensor, values: Tensor, exact: bool = False) -> Tensor:
    """The variance of ``matrix @ x[t] + bias``, whose result is `values`, if it is summed in float32: by tensor cores,
    or without them (`exact`)."""
    n = x.shape[1] + 2
    squares = (x**2) @ (matrix**2).T
    truncation = 0.0 if exact else (n / 16.0 * 2.0**-23) ** 2
    return _VARIANCE32 * n * (squares / 6.0 + values**2 / 3.0) + truncation * (squares + values**2)


def _activated(
    z: Tensor,
    variance: Tensor | None,
    activation: str,
    dtype: str,
    exact: bool = False,
    *,
    interleaved: bool = False,
    limit: float | None = None,
    alpha: float = 1.0,
    up_offset: float = 0.0,
) -> tuple[Tensor, Tensor | None]:
    """The activated z, and its variance if z has the given `variance`; the second result is None if `variance` is."""
    if activation in GATED:
        gate, up = (z[:, ::2], z[:, 1::2]) if interleaved else z.chunk(2, dim=1)
        of_gate = of_up = None
        if variance is not None:
            of_gate, of_up = (variance[:, ::2], variance[:, 1::2]) if interleaved else variance.chunk(2, dim=1)
        most = math.inf if limit is None else limit
        if activation == "clamped_swiglu":
            up = up.clamp(-most, most) + up_offset
            scaled = None if of_gate is None else alpha**2 * of_gate
            act, act_variance = _activated(alpha * gate.clamp(max=most), scaled, "silu", dtype)
            act = act / alpha
            if variance is not None:
                act_variance = act_variance / alpha**2 + 2.0 * _VARIANCE32 * act**2
                of_up = of_up + _VARIANCE32 * up**2
        else:
            act, act_variance = _activated(gate, of_gate, PLAIN[activation], dtype, exact)
        return act * up, None if variance is None else act_variance * up**2 + act**2 * of_up
    if activation == "relu2":
        a = z.clamp(min=0.0)
        return a**2, None if variance is None else 4.0 * a**2 * variance + _VARIANCE32 * a**4
    a = _activate(z, activation)
    if variance is None:
        return a, None
    step = 1e-6 * (1.0 + z.abs())
    slope = (_activate(z + step, activation) - a) / step
    tail_error = 0.0 if exact else _GELU_TAIL_ERROR[dtype]
    of_function = {
        "relu": torch.zeros_like(z),
        "gelu": _ERFC_ERROR * z + tail_error * (z.clamp(min=0.0) - _activate(z, "gelu")),
        # The argument of exp is rounded, so exp(-y) has a relative error that grows with |y|.
        "silu": a * (_SILU_ERROR + 4.0 * UNIT_ROUNDOFF["float32"] * (-z).clamp(min=0.0)),
        "gelu_tanh": a * (_SILU_ERROR + 4.0 * UNIT_ROUNDOFF["float32"] * (-_of_tanh(z)).clamp(min=0.0)),
    }[activation]
    return a, variance * slope**2 + of_function**2


def _activate(z: Tensor, activation: str) -> Tensor:
    if activation == "relu":
        return z.clamp(min=0.0)
    if activation == "gelu":
        return 0.5 * z * torch.special.erfc(-z / math.sqrt(2.0))
    return z * torch.sigmoid(z if activation == "silu" else _of_tanh(z))


def _of_tanh(z: Tensor) -> Tensor:
    """The y for which z times the sigmoid of y, which is ``z (1 + tanh(y / 2)) / 2``, is the GELU by tanh of z."""
    return math.sqrt(8.0 / math.pi) * (z + 0.044715 * z**3)


def _binade(value: Tensor, dtype: str) -> Tensor:
    exponent = torch.frexp(value.abs().clamp(min=_SMALLEST_NORMAL[dtype])).exponent
    return torch.exp2((exponent - 1).double())


def _rounding(value: Tensor, dtype: str) -> Tensor:
    """The variance of rounding `value` to `dtype`: ulp^2 / 12, or 0 if the value is 0."""
    ulp = 2.0 * UNIT_ROUNDOFF[dtype] * _binade(value, dtype)
    return torch.where(value != 0.0, ulp**2 / 12.0, 0.0)


def _tail_bound(by_token: Tensor) -> tuple[float, float]:
    """Two numbers for the norm of an error: its root mean square, and a bound that it exceeds with a probability below
    1e-10 (see `flashmoe.tolerance`). `by_token`: the variances of the tokens' errors."""
    if len(by_token) == 0:
        return 0.0, 0.0
    v, largest = float(by_token.sum()), float(by_token.max())
    excess = 2.0 * math.sqrt(_TAIL * float((by_token**2).sum())) + 2.0 * _TAIL * largest
    return math.sqrt(v), math.sqrt(v + excess)


def _name(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")
