"""Calls of a group of ranks that train, for the tests: how ranks make them, and the check of their gradients."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Any

import flashmoe
import ml_dtypes
import numpy as np
import torch
from flashmoe.gradient_tolerance import RankCall, gradient_errors
from flashmoe.launch import RankPool
from flashmoe.reference import moe_gradients, moe_reference
from flashmoe.slices import cut
from problems import DEFAULT_TILE, Problem, is_certain, random_problem, routed

EXPERTS = ("gate_up_proj", "down_proj", "gate_up_bias", "down_bias")
OWN = ("router", "router_bias", "shared_gate_up", "shared_down", "shared_gate")
CONSTANT = ("topk_ids", "choice_bias")
OF_THE_ENGINE = ("return_mode", "exact")
"""Options that the reference does not have."""
Gradients = list[dict[str, np.ndarray]]


def trainable(seed: int, tokens: list[int], **sizes: Any) -> tuple[Problem, list[np.ndarray]]:
    """A random problem, and dY for each rank. It has no tokens for which rounding in float32 may change the choice of
    experts."""
    problem = random_problem(seed, tokens, **sizes)
    if problem.router is not None:
        problem = replace(problem, x=[each[is_certain(problem, each)] for each in problem.x])
    rng = np.random.default_rng(seed + 1)
    return problem, [rng.standard_normal(each.shape).astype(each.dtype) for each in problem.x]


def as_tensor(array: np.ndarray) -> torch.Tensor:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.uint16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def as_array(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def gradients_of(context: flashmoe.Context, arguments: dict[str, Any], grad: np.ndarray) -> dict[str, np.ndarray]:
    """The gradients of one call by the tensor's name, where `grad` is the gradient of y; and y."""
    tensors = {name: as_tensor(each) if isinstance(each, np.ndarray) else each for name, each in arguments.items()}
    leaves = {name: each for name, each in tensors.items() if torch.is_tensor(each) and name not in CONSTANT}
    for each in leaves.values():
        each.requires_grad_()
    y = flashmoe.moe(context, **tensors)
    y.backward(as_tensor(grad))
    return {name: as_array(each.grad) for name, each in leaves.items()} | {"y": as_array(y.detach())}


def kept_bytes(y: torch.Tensor) -> int:
    """The bytes that a call has kept, as the engine counts them. y is the call's result."""
    node = y.grad_fn
    while not hasattr(node, "saved_tensors"):
        node = node.next_functions[0][0]
    return int(node.saved_tensors[0][1])


def _as_rank(
    rank: int, ranks: int, _: str, name: str, limits: dict[str, Any], calls: list[tuple], how: dict[str, Any]
) -> Gradients:
    with flashmoe.Context(rank=rank, ranks=ranks, name=name, **limits) as context:
        if "tile" in how:
            context._engine.set_tile(*how["tile"])
        found = []
        for index, (arguments, grad) in enumerate(calls):
            seeds, options = how.get("perturb", (0,)), how.get("options", ({},))
            context._engine.perturb(seeds[index % len(seeds)])
            found.append(gradients_of(context, arguments | options[index % len(options)], grad))
        return found


def train(
    pool: RankPool,
    problem: Problem,
    grads: list[np.ndarray],
    *,
    times: int = 1,
    limits: dict[str, Any] | None = None,
    **how: Any,
) -> list[Gradients]:
    """The gradients of `times` equal calls, by call and rank. If `how` has `perturb` (seeds of random delays) or
    `options`, calls take their values in turn."""
    limits = problem.limits() if limits is None else limits
    name = f"train-{secrets.token_hex(6)}"
    arguments = [(name, limits, [(problem.arguments(rank), grads[rank])] * times, how) for rank in range(problem.ranks)]
    by_rank = pool.call(_as_rank, arguments, ranks=problem.ranks, timeout=120.0)
    return [list(each) for each in zip(*by_rank, strict=True)]


def check(
    problem: Problem, grads: list[np.ndarray], found: Gradients, engine: str = "cpu", sliced: Any = None
) -> dict[str, float]:
    """Checks that every gradient is within its bound. Returns the largest error for each name, as a part of the bound.
    If the gradients are those of slices, `sliced` is the problem whose experts are in slices (`test_slices.Sliced`)."""
    held, slices = (problem, 1) if sliced is None else (sliced, sliced.slices)
    options = {name: each for name, each in problem.options.items() if name not in OF_THE_ENGINE}
    calls, expected = [], []
    for rank, x in enumerate(problem.x):
        call, given = _reference_call(problem, rank, x, grads[rank])
        calls.append(call if sliced is None else _of_slices(call, slices, sliced.destinations(rank)))
        expected.append(moe_gradients(grads[rank], x, **given, **options))
    errors = gradient_errors(
        calls,
        held.gate_up_proj,
        held.down_proj,
        return_mode=_return_mode(held),
        engine=engine,
        exact=problem.options.get("exact", False),
        router=problem.router,
        router_bias=problem.router_bias,
        gate_up_bias=held.gate_up_bias,
        down_bias=held.down_bias,
        shared_gate_up=problem.shared_gate_up,
        shared_down=problem.shared_down,
        shared_gate=problem.shared_gate,
        **{**options, "slices": slices},
    )
    parts: dict[str, float] = {}
    for rank, of_rank in enumerate(found):
        x_type = problem.x[rank].dtype
        for name, each in of_rank.items():
            if name in EXPERTS or name == "y":
                continue
            assert each.dtype == (np.float32 if name == "topk_weights" else x_type), name
            _compare(parts, name, each, expected[rank][name], errors[name][rank].bound)
    of_experts = {name: sum(each[name] for each in expected) for name in EXPERTS if name in found[0]}
    if sliced is not None:
        how = {name: options[name] for name in ("activation", "interleaved", "transposed") if name in options}
        of_experts = cut(slices, **of_experts, **how)
    for name, exact in of_experts.items():
        whole = np.zeros(exact.shape)
        for rank, of_rank in enumerate(found):
            whole[held.held_by(rank)] += of_rank[name].astype(np.float64)
        _compare(parts, name, whole, exact, errors[name].bound)
    return parts


def _of_slices(call: RankCall, slices: int, owners: list[int]) -> RankCall:
    """The same call with experts in slices. `owners` are the ranks that compute the slices."""
    shape = len(call.x), call.ids.shape[1] * slices
    ids, computed = (
        np.where(each[..., None] < 0, -1, each[..., None] * slices + np.arange(slices)).reshape(shape)
        for each in (call.ids, call.computed)
    )
    variance = np.repeat(np.broadcast_to(call.weight_variance, call.ids.shape), slices, axis=1)
    weights = np.repeat(call.weights, slices, axis=1)
    return replace(call, ids=ids, computed=computed, weights=weights, weight_variance=variance, owners=owners)


def _compare(parts: dict[str, float], name: str, found: np.ndarray, expected: np.ndarray, bound: float) -> None:
    assert found.shape == expected.shape, name
    error = float(np.linalg.norm(found.astype(np.float64) - expected))
    assert error <= bound, f"{name}: error {error:.3e}, bound {bound:.3e}, size {np.linalg.norm(expected):.3e}"
    parts[name] = max(parts.get(name, 0.0), error / bound if bound > 0.0 else 0.0)


def _return_mode(problem: Problem) -> str:
    mode = problem.options.get("return_mode")
    if mode not in (None, "auto"):
        return mode
    top_k = problem.top_k or problem.topk_ids[0].shape[1]
    return "reduced" if 1 < problem.ranks < top_k else "direct"


def _reference_call(problem: Problem, rank: int, x: np.ndarray, grad: np.ndarray) -> tuple[RankCall, dict[str, Any]]:
    """A rank's call as the bounds take it, and the arguments that the reference takes."""
    given = {name: getattr(problem, name) for name in (*EXPERTS, *OWN, "choice_bias")}
    if problem.router is not None:
        given["top_k"] = problem.top_k
        logits, _, ids, _, variance = routed(problem, x)
    else:
        logits, ids, variance = None, problem.topk_ids[rank], 0.0
        given |= {"topk_ids": ids, "topk_weights": problem.topk_weights[rank]}
    options = {name: each for name, each in problem.options.items() if name not in OF_THE_ENGINE}
    result = moe_reference(x, **given, **options)
    owners = problem.destinations(rank)
    call = RankCall(x, grad, ids, result.topk_ids, result.topk_weights, owners, variance, logits, rank)
    return call, given


__all__ = ["DEFAULT_TILE", "as_tensor", "check", "gradients_of", "kept_bytes", "train", "trainable"]
