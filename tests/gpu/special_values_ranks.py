"""Functions that tests/gpu/test_special_values_gpu.py runs in the processes of a group, one rank in each process."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import flashmoe
import torch
from few_ranks import own_problem, sizes_of
from layers import Problem, call
from ranks import joined, with_experts

ROWS = (0, 5, 11)
"""Which of rank 1's tokens are spoiled."""


def spoiled(problem: Problem, how: str, experts: int) -> Problem:
    """The problem with special values in ROWS. how: "logits": x has NaN or infinity; "none": all ids are -1, and their
    weights NaN; "range": one id is too large; otherwise, one id occurs twice. experts: the number of all ranks'
    experts."""
    rows = list(ROWS)
    if how == "logits":
        x = problem.x.clone()
        x[rows, 3] = torch.tensor([math.nan, math.inf, -math.inf], dtype=x.dtype, device=x.device)
        return replace(problem, x=x)
    ids, weights = problem.topk_ids.clone(), problem.topk_weights.clone()
    if how == "none":
        ids[rows] = -1
        weights[rows] = math.nan
    elif how == "range":
        ids[rows, 1] = experts
    else:
        ids[rows, 1] = ids[rows, 0]
    return replace(problem, topk_ids=ids, topk_weights=weights)


def after_special_rows(
    rank: int, ranks: int, name: str, spec: dict[str, Any], tokens: int, mode: str, how: str, strict: bool, owners: Any
) -> tuple[str, int, int, list[str]]:
    """Makes a call, then one in which rank 1 has spoiled rows, then the first once more. owners: the placement, or
    None for the usual one. Returns the error of the second call ("": none), how many rows of its result are NaN, how
    many are zeros, and what was not as it must be."""
    own = own_problem(rank, ranks, spec | ({} if how == "logits" else {"ids": "int32"}), tokens, 71)
    own = replace(own, options=own.options | ({"strict": True} if strict else {}))
    off = []
    limits = sizes_of(spec, tokens, return_mode=mode, placement=owners)
    with joined(rank, ranks, f"{name}-{mode}-{how}", **limits) as context:
        local = with_experts(own, context.local_experts())
        before, _ = call(context, local)
        bad = spoiled(local, how, spec["experts"]) if rank == 1 else local
        y = torch.full_like(before, 7.0)
        told = ""
        y = flashmoe.moe(context, **bad.arguments())
        try:
            context.synchronize()
        except flashmoe.FlashMoEError as error:
            told = f"{type(error).__name__}: {error}"
        report = context.last_call  # raises nothing, because an error is raised only once
        nan, zeros = y.isnan().all(dim=1), (y == 0).all(dim=1)
        others = ~(nan | zeros)
        if not torch.equal(y[others], before[others]):
            off.append("other rows")
        expected = [] if rank != 1 else list(ROWS)
        if (nan | zeros).nonzero().ravel().tolist() != expected:
            off.append(f"rows {(nan | zeros).nonzero().ravel().tolist()}")
        if report.bad_rows != int(nan.sum()) or (report.topk_ids[expected] != -1).any():
            off.append(f"report: {report.bad_rows} bad rows")
        again, _ = call(context, local)
        if not torch.equal(again, before):
            off.append("the next call")
    return told, int(nan.sum()), int(zeros.sum()), off


def gradients(rank: int, ranks: int, name: str, spec: dict[str, Any], tokens: int, redispatch: bool) -> list[str]:
    """Checks the gradients of a call in which rank 1 has rows with NaN and infinities. Returns the names of those that
    are not as they must be."""
    own = own_problem(rank, ranks, spec, tokens, 72)
    limits = sizes_of(spec, tokens, return_mode="reduced", redispatch=redispatch)
    off = []
    with joined(rank, ranks, f"{name}-{redispatch}", **limits) as context:
        local = with_experts(own, context.local_experts())
        bad = spoiled(local, "logits", spec["experts"]) if rank == 1 else local
        leaves = {
            each: getattr(bad, each).detach().clone().requires_grad_()
            for each in ("x", "router", "gate_up_proj", "down_proj")
        }
        flashmoe.moe(context, **replace(bad, **leaves).arguments()).sum().backward()
        context.synchronize()
        nan = leaves["x"].grad.isnan().all(dim=1).nonzero().ravel().tolist()
        if nan != (list(ROWS) if rank == 1 else []) or leaves["x"].grad.isnan().any(dim=1).sum() != len(nan):
            off.append(f"dX: rows {nan}")
        if bool(leaves["router"].grad.isnan().all()) != (rank == 1):
            off.append("router")
        off += [each for each in ("gate_up_proj", "down_proj") if not leaves[each].grad.isfinite().all()]
    return off
