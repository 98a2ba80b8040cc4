"""Calls of a group of ranks for the tests: their inputs, the ranks that make them, and the check of their results."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import flashmoe
import ml_dtypes
import numpy as np
from flashmoe.launch import RankPool
from flashmoe.quantize import quantize_mxfp4, quantize_rows, quantize_weights
from flashmoe.reference import (
    ReferenceResult,
    check_topk,
    choice_values,
    choose,
    moe_reference,
    router_logits,
    weigh,
)
from flashmoe.report import CallReport
from flashmoe.spec import ENCODINGS, GATED, STORED_AS
from flashmoe.tolerance import CallError, call_error, router_error

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
ACTIVATIONS = ("relu", "gelu", "silu", "swiglu")
ROUTER_OPTIONS = ("renormalize", "score", "routed_scale", "round_logits", "groups", "top_groups")
SHAPE_OPTIONS = ("activation", "interleaved", "limit", "alpha", "up_offset", "transposed", "weights_on_input")
"""The options of experts that `reference` and `tolerance` take."""
DEFAULT_TILE = (128, 256)
"""The CPU engine's rows and columns of a tile."""
PATIENCE = 20.0
"""Seconds without progress after which a rank gives up."""


@dataclass(eq=False)
class Problem:
    """One call of a group: each rank's tokens and routing, the weights of all experts, the options."""

    x: list[np.ndarray]
    gate_up_proj: np.ndarray
    down_proj: np.ndarray
    router: np.ndarray | None = None
    router_bias: np.ndarray | None = None
    choice_bias: np.ndarray | None = None
    top_k: int | None = None
    topk_ids: list[np.ndarray] | None = None
    topk_weights: list[np.ndarray] | None = None
    gate_up_bias: np.ndarray | None = None
    down_bias: np.ndarray | None = None
    shared_gate_up: np.ndarray | None = None
    shared_down: np.ndarray | None = None
    shared_gate: np.ndarray | None = None
    gate_up_scale: np.ndarray | None = None
    down_scale: np.ndarray | None = None
    shared_gate_up_scale: np.ndarray | None = None
    shared_down_scale: np.ndarray | None = None
    x_scale: list[np.ndarray] | None = None
    placement: list[int | list[int]] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    """Further options of `flashmoe.moe`, such as activation, renormalize, capacity_factor, return_mode."""

    @property
    def ranks(self) -> int:
        return len(self.x)

    @property
    def dtype(self) -> str:
        """The element type of y."""
        return "bfloat16" if self.x_scale is not None else self.x[0].dtype.name

    @property
    def shared(self) -> dict[str, np.ndarray | None]:
        """The shared expert's tensors."""
        names = ("shared_gate_up", "shared_down", "shared_gate", "shared_gate_up_scale", "shared_down_scale")
        return {name: getattr(self, name) for name in names}

    def owners(self) -> list[int | list[int]]:
        """The rank or ranks of each expert; by default contiguous shares, the first ones larger by one."""
        if self.placement is not None:
            return self.placement
        share, rest = divmod(len(self.down_proj), self.ranks)
        return [rank for rank in range(self.ranks) for _ in range(share + (rank < rest))]

    def held_by(self, rank: int) -> list[int]:
        """The experts whose weights the rank has."""
        return [expert for expert, entry in enumerate(self.owners()) if rank in _several(entry)]

    def destinations(self, rank: int) -> list[int]:
        """For each expert, the rank that computes it for the tokens of `rank`: `rank` itself if it has the expert.
        Otherwise, the ranks that lack the expert are assigned in turn to the ranks that have it."""
        chosen = []
        for holders in map(_several, self.owners()):
            without = [q for q in range(self.ranks) if q not in holders]
            chosen.append(rank if rank in holders else holders[without.index(rank) % len(holders)])
        return chosen

    @property
    def weight_dtype(self) -> str:
        """The element type of the experts' matrices."""
        return self.dtype if self.gate_up_scale is None else STORED_AS[self.down_proj.dtype.name]

    def numbers(self, name: str) -> tuple[int, ...]:
        """The shape of the matrices of that name, in numbers. (A stored element may hold two numbers.)"""
        encoding, shape = ENCODINGS.get(self.weight_dtype), getattr(self, name).shape
        return shape if encoding is None else encoding.numbers(shape)

    def limits(self) -> dict[str, Any]:
        """A context's sizes, as small as this call allows."""
        experts, hidden, intermediate = self.numbers("down_proj")
        if self.options.get("transposed"):
            hidden, intermediate = intermediate, hidden
        width = 0
        if self.shared_down is not None:
            width = self.numbers("shared_down")[0 if self.options.get("transposed") else 1]
        return {
            "max_tokens": max(1, *(len(x) for x in self.x)),
            "hidden": hidden,
            "intermediate": intermediate,
            "experts": experts,
            "top_k": self.topk_ids[0].shape[1] if self.topk_ids else self.top_k,
            "dtype": self.dtype,
            "weight_dtype": self.weight_dtype,
            "placement": self.owners(),
            "timeout": PATIENCE,
            "shared_intermediate": width,
        }

    def arguments(self, rank: int) -> dict[str, Any]:
        """Rank's arguments of `flashmoe.moe`."""
        mine = self.held_by(rank)
        arguments = {"x": self.x[rank], **self.options, **self.shared}
        arguments["x_scale"] = None if self.x_scale is None else self.x_scale[rank]
        for name in ("gate_up_proj", "down_proj", "gate_up_bias", "down_bias", "gate_up_scale", "down_scale"):
            array = getattr(self, name)
            arguments[name] = None if array is None else array[mine]
        if self.topk_ids is None:
            arguments |= {"router": self.router, "router_bias": self.router_bias, "top_k": self.top_k}
            arguments["choice_bias"] = self.choice_bias
            arguments["placement"] = self.placement
        else:
            arguments |= {"topk_ids": self.topk_ids[rank], "topk_weights": self.topk_weights[rank]}
            arguments["placement"] = self.owners()  # the call learns from it how many experts there are
        return arguments


def _several(entry: int | list[int]) -> list[int]:
    return [entry] if isinstance(entry, int) else entry


@dataclass(eq=False)
class Outcome:
    """What one rank got from one call."""

    y: np.ndarray
    report: CallReport
    reference: ReferenceResult | None = None
    """`check` sets this and `allowed`."""
    allowed: CallError | None = None


def random_problem(
    seed: int,
    tokens: list[int],
    *,
    hidden: int,
    intermediate: int,
    experts: int,
    top_k: int,
    dtype: str = "float32",
    fused: bool = True,
    skew: float = 0.0,
    scale: float = 1.0,
    biases: tuple[bool, bool, bool] = (False, False, False),
    choice_bias: bool = False,
    placement: list[int | list[int]] | None = None,
    shared: int = 0,
    shared_gate: bool = False,
    **options: Any,
) -> Problem:
    """Normally distributed inputs, with results about as large as `scale`. `biases`: whether there are biases of the
    router, of gate_up_proj and of down_proj.

    `shared`: how many times as wide as an expert the shared expert is (0: there is none); `shared_gate`: whether the
    shared expert has a gate.

    `skew` spreads the experts' mean logits: with 0, all experts are equally likely; with 50, nearly all tokens choose
    the same experts. With a capacity, tokens are left out if float32 cannot decide which experts are their top-k,
    because their choice would decide which other tokens are dropped.
    """
    rng = np.random.default_rng(seed)
    kind = DTYPES[dtype]

    def normal(*shape: int, size: float = 1.0) -> np.ndarray:
        return (size * rng.standard_normal(shape)).astype(kind)

    rows = intermediate * (2 if options.get("activation", "swiglu") in GATED else 1)
    # Matrices are drawn untransposed, so that a layer has the same weights with `transposed` as without it.
    as_stored = (lambda matrices: matrices.swapaxes(1, 2).copy()) if options.get("transposed") else np.asarray
    preference = skew * rng.permutation(np.linspace(0.0, 1.0, experts))
    x = [normal(count, hidden, size=scale) for count in tokens]
    problem = Problem(
        x=x,
        gate_up_proj=as_stored(normal(experts, rows, hidden, size=hidden**-0.5)),
        down_proj=as_stored(normal(experts, hidden, intermediate, size=intermediate**-0.5)),
        gate_up_bias=normal(experts, rows, size=scale) if biases[1] else None,
        down_bias=normal(experts, hidden, size=scale) if biases[2] else None,
        placement=placement,
        options=options,
    )
    if shared:
        width = shared * intermediate
        step = -1 if options.get("transposed") else 1
        problem.shared_gate_up = normal(*(shared * rows, hidden)[::step], size=hidden**-0.5)
        problem.shared_down = normal(*(hidden, width)[::step], size=width**-0.5)
    if shared_gate:
        problem.shared_gate = normal(1, hidden, size=1.0 / (scale * hidden**0.5))
    if fused:
        problem.top_k = top_k
        problem.router = normal(experts, hidden, size=2.0 / (scale * hidden**0.5))
        if biases[0]:
            problem.router_bias = (preference + 0.5 * rng.standard_normal(experts)).astype(kind)
        elif skew:
            for tokens_of_rank in x:
                tokens_of_rank[:, 0] = np.abs(tokens_of_rank[:, 0]) + kind(scale)
            problem.router[:, 0] += (preference / scale).astype(kind)
        if choice_bias:
            problem.choice_bias = rng.uniform(0.0, 0.3, experts).astype(np.float32)
        if options.get("capacity_factor") is not None:
            problem.x = [tokens_of_rank[is_certain(problem, tokens_of_rank)] for tokens_of_rank in x]
    else:
        logits = [preference + rng.gumbel(size=(count, experts)) for count in tokens]
        problem.topk_ids = [choose(of_rank, top_k).astype(np.int32) for of_rank in logits]
        problem.topk_weights = [rng.uniform(-1.0, 2.0, (count, top_k)).astype(np.float32) for count in tokens]
    return problem


def quantised(problem: Problem, scales: str = "block", x: bool = False) -> Problem:
    """The problem with its experts' matrices in FP8. With `x`, the tokens' rows are in FP8 too."""
    gated = problem.options.get("activation", "swiglu") in GATED and not problem.options.get("interleaved")
    made: dict[str, Any] = {}
    for name, halves in (("gate_up_proj", 2), ("down_proj", 1), ("shared_gate_up", 2), ("shared_down", 1)):
        matrices = getattr(problem, name)
        if matrices is not None:
            scale = f"{name.removesuffix('_proj')}_scale"
            made[name], made[scale] = quantize_weights(matrices, scales, halves if gated else 1)
    if x:
        made["x"], made["x_scale"] = map(list, zip(*map(quantize_rows, problem.x), strict=True))
    return replace(problem, **made)


def in_mxfp4(problem: Problem) -> Problem:
    """The problem with its experts' matrices in MXFP4. Matrices that were transposed no longer are."""
    turned = bool(problem.options.get("transposed"))
    made: dict[str, Any] = {}
    for name in ("gate_up_proj", "down_proj", "shared_gate_up", "shared_down"):
        matrices = getattr(problem, name)
        if matrices is not None:
            scale = f"{name.removesuffix('_proj')}_scale"
            made[name], made[scale] = quantize_mxfp4(matrices.swapaxes(-2, -1) if turned else matrices)
    return replace(problem, **made, options={key: each for key, each in problem.options.items() if key != "transposed"})


def is_certain(problem: Problem, x: np.ndarray) -> np.ndarray:
    """bool [T]: whether the values by which the K-th and the next expert are chosen differ by more than float32's
    error may be."""
    _, values, _, slack, _ = routed(problem, x)
    falling = np.concatenate([-np.sort(-values, axis=1), np.full((len(x), 1), -np.inf)], axis=1)
    return falling[:, problem.top_k - 1] - falling[:, problem.top_k] > 2.0 * slack


def routed(problem: Problem, x: np.ndarray) -> tuple[np.ndarray, ...]:
    """The results of a float64 router: the logits [T, E], the values by which experts are chosen [T, E], the ids
    [T, K]; and for a router in float32, the slack of the choice [T] and the variance of the weights [T, K]."""
    options = {name: problem.options[name] for name in ROUTER_OPTIONS if name in problem.options}
    renormalize = options.pop("renormalize", True)
    scale, rounded = options.pop("routed_scale", 1.0), options.pop("round_logits", False)
    logits = router_logits(x, problem.router, problem.router_bias)
    if rounded:
        logits = logits.astype(x.dtype).astype(np.float64)
    values = choice_values(logits, choice_bias=problem.choice_bias, **options)
    ids = choose(values, problem.top_k)
    score = options.get("score", "softmax")
    weights = weigh(logits, ids, renormalize=renormalize, score=score, routed_scale=scale)
    how = {"score": score, "choice_bias": problem.choice_bias, "groups": options.get("groups", 1)}
    slack, variance = router_error(x, problem.router, problem.router_bias, ids, weights, renormalize=renormalize, **how)
    return logits, values, ids, slack, variance


def check(
    problem: Problem, outcomes: list[Outcome], *, tensor_cores: bool = False, shared_in_slices: bool = False
) -> None:
    """Every rank's y is within the bound of the reference, and its routing and drops are the reference's.
    `tensor_cores`, `shared_in_slices`: see `call_error`."""
    for rank, outcome in enumerate(outcomes):
        x, y, report = problem.x[rank], outcome.y, outcome.report
        assert (y.shape, y.dtype.name) == (x.shape, problem.dtype)
        assert report.tokens == len(x)
        if problem.topk_ids is None:
            ids, weights, variance = _fused_routing(problem, x, report)
        else:
            ids, weights = problem.topk_ids[rank], problem.topk_weights[rank].astype(np.float32)
            variance = 0.0
        experts = {
            **{name: problem.options[name] for name in SHAPE_OPTIONS if name in problem.options},
            "gate_up_bias": problem.gate_up_bias,
            "down_bias": problem.down_bias,
            "gate_up_scale": problem.gate_up_scale,
            "down_scale": problem.down_scale,
            "x_scale": None if problem.x_scale is None else problem.x_scale[rank],
            **problem.shared,
        }
        arrays = x, problem.gate_up_proj, problem.down_proj
        capacity_factor = problem.options.get("capacity_factor")
        expected = moe_reference(
            *arrays, topk_ids=ids, topk_weights=weights, capacity_factor=capacity_factor, **experts
        )
        np.testing.assert_array_equal(report.topk_ids, expected.topk_ids)
        assert report.dropped == expected.dropped
        kept = expected.topk_ids >= 0
        weight_error = np.abs(report.topk_weights - weights)
        assert (weight_error <= 8.0 * np.sqrt(variance))[kept].all()

        allowed = call_error(
            *arrays,
            expected.topk_ids,
            weights,
            weight_variance=variance,
            return_mode=report.return_mode,
            placement=problem.destinations(rank),
            rank=rank,
            tensor_cores=tensor_cores,
            shared_in_slices=shared_in_slices,
            **experts,
        )
        outcome.allowed = allowed
        error = np.linalg.norm(y.astype(np.float64) - expected.y)
        assert error <= allowed.bound, f"rank {rank}: error {error:.3e}, {allowed}, {expected.scale=:.3e}"
        outcome.reference = expected


def _fused_routing(problem: Problem, x: np.ndarray, report: CallReport) -> tuple[np.ndarray, ...]:
    """ids, weights and the weights' variance, by a float64 router.

    If two experts are too close for float32 to tell them apart, the ids have the engine's choice and order.
    """
    logits, values, ids, slack, variance = routed(problem, x)
    assert check_topk(values, report.topk_ids, slack).all()
    for t in np.nonzero(((report.topk_ids != ids) & (report.topk_ids >= 0)).any(axis=1))[0]:
        dropped = [expert for expert in ids[t] if expert not in report.topk_ids[t]]
        ids[t] = [dropped.pop(0) if expert < 0 else expert for expert in report.topk_ids[t]]
    of_weight = {
        name: problem.options[name] for name in ("renormalize", "score", "routed_scale") if name in problem.options
    }
    return ids, weigh(logits, ids, **of_weight), variance


class Ranks:
    """Eight processes, which have contexts that many calls of different shapes share."""

    def __init__(self) -> None:
        self._start()

    def call(self, problem: Problem, limits: dict[str, Any] | None = None, **how: Any) -> list[Outcome]:
        """Make one call; see `calls`."""
        return self.calls([problem], limits, **how)[0]

    def calls(
        self, problems: list[Problem], limits: dict[str, Any] | None = None, *, keep: bool = False, **how: Any
    ) -> list[list[Outcome]]:
        """Make several calls, one after the other, in one context; the outcomes of each, by rank.

        The context has these limits (default: as tight as the first problem allows). With `keep`, later calls with the
        same limits and number of ranks use the same context. `how`: see `_in_context`. After a failure, all processes
        and contexts are new.
        """
        ranks = problems[0].ranks
        limits = problems[0].limits() if limits is None else limits
        name = f"test-{secrets.token_hex(6)}"
        if keep:
            name = self._names.setdefault((ranks, str(limits)), name)
        arguments = [
            (name, limits, keep, [problem.arguments(rank) for problem in problems], how) for rank in range(ranks)
        ]
        try:
            by_rank = self._pool.call(_call, arguments, ranks=ranks, timeout=6 * PATIENCE)
        except BaseException:
            self.close()
            self._start()
            raise
        return [list(of_call) for of_call in zip(*by_rank, strict=True)]

    def close(self) -> None:
        self._pool.close()

    def _start(self) -> None:
        self._pool = RankPool(8)
        self._names: dict[tuple, str] = {}


_contexts: dict[str, flashmoe.Context] = {}  # this process's contexts by name, if it is a rank
_tiles: dict[str, tuple[int, int]] = {}  # of these; set only if it changes, which makes a new workspace


def _call(
    rank: int,
    ranks: int,
    _: str,
    name: str,
    limits: dict[str, Any],
    keep: bool,
    calls: list[dict[str, Any]],
    how: dict[str, Any],
) -> list[Outcome]:
    """In a rank: make `calls` in the context `name`."""
    if not keep:
        with flashmoe.Context(rank=rank, ranks=ranks, name=name, **limits) as context:
            return _in_context(context, calls, **how)
    if name not in _contexts:
        _contexts[name] = flashmoe.Context(rank=rank, ranks=ranks, name=name, **limits)
    return _in_context(_contexts[name], calls, **how)


def _in_context(
    context: flashmoe.Context,
    calls: list[dict[str, Any]],
    *,
    perturb: Sequence[int] = (0,),
    tile: tuple[int, int] = DEFAULT_TILE,
) -> list[Outcome]:
    """`perturb`: seeds of random delays in calls, one per call in turn (0: none). `tile`: a tile's rows and columns."""
    outcomes = []
    if _tiles.get(context.name, DEFAULT_TILE) != tile:
        context._engine.set_tile(*tile)
        _tiles[context.name] = tile
    for index, arguments in enumerate(calls):
        context._engine.perturb(perturb[index % len(perturb)])
        outcomes.append(Outcome(flashmoe.moe(context, **arguments), context.last_call))
    return outcomes
