"""NaN, infinities and ids of no expert on GPUs: which rows they spoil, their errors, and the calls after them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import flashmoe
import pytest
import special_values_ranks as on_rank
import torch
from flashmoe.launch import RankPool
from layers import Problem, call, capture, context_of, random_problem
from ranks import everywhere, pool_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

USUAL = {"hidden": 128, "intermediate": 64, "experts": 24, "top_k": 3}
ROUTED: dict[str, dict[str, Any]] = {
    "usual": {},
    "eight experts": {"experts": 8, "top_k": 2},  # a call of 1700 tokens is joined
    "one expert a token": {"experts": 8, "top_k": 1},
    "200 experts": {"experts": 200, "top_k": 8},
    "not renormalised": {"renormalize": False},
    "float32": {"dtype": "float32"},
    "DeepSeek-V3's router": {"score": "sigmoid", "groups": 4, "top_groups": 2, "choice_bias": True},
    "weights on the input": {"weights_on_input": True},
    "a shared expert": {"shared": 1},
}
GIVEN = {name: ROUTED[name] for name in ("usual", "eight experts", "one expert a token", "float32", "a shared expert")}
TOKENS = (5, 200, 1700)
"""The kernel for a few tokens computes 5 tokens, and 200 with 200 experts. The general kernel computes the others."""


def rows_of(problem: Problem) -> list[int]:
    return [0, 2, len(problem.x) - 1]


def others_of(problem: Problem) -> torch.Tensor:
    others = torch.ones(len(problem.x), dtype=torch.bool, device=problem.x.device)
    others[rows_of(problem)] = False
    return others


def with_bad_logits(problem: Problem) -> Problem:
    x = problem.x.clone()
    x[rows_of(problem), 77] = torch.tensor([math.nan, math.inf, -math.inf], dtype=x.dtype, device=x.device)
    return replace(problem, x=x)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("name", ROUTED)
def test_rows_of_which_no_choice_can_be_made(name, tokens):
    problem = random_problem(1, tokens, **USUAL | ROUTED[name])
    bad, rows, others = with_bad_logits(problem), rows_of(problem), others_of(problem)
    with context_of(problem) as context:
        y, before = call(context, problem)
        found, report = call(context, bad)
        assert found[rows].isnan().all() and torch.equal(found[others], y[others])
        assert (before.bad_rows, report.bad_rows) == (0, 3)
        assert (report.topk_ids[rows] == -1).all() and report.dropped == 0
        assert torch.equal(call(context, problem)[0], y)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("ids", ["int32", "int64"])
@pytest.mark.parametrize("name", GIVEN)
def test_ids_of_no_expert(name, ids, tokens):
    problem = random_problem(2, tokens, ids=ids, **USUAL | GIVEN[name])
    rows, others = rows_of(problem), others_of(problem)
    nothing = problem.topk_weights.clone()
    nothing[rows] = 0.0
    nothing[1, -1] = 0.0
    changed, unread = problem.topk_ids.clone(), problem.topk_weights.clone()
    changed[rows], unread[rows] = -1, math.nan
    changed[1, -1], unread[1, -1] = -1, math.nan
    none = replace(problem, topk_ids=changed, topk_weights=unread)
    with context_of(problem) as context:
        y, _ = call(context, replace(problem, topk_weights=nothing))
        found, report = call(context, none)
    assert torch.equal(found, y)  # 0.0 and -0.0 count as equal
    assert (report.bad_rows, report.dropped) == (0, 0) and (report.topk_ids[rows] == -1).all()
    assert problem.shared_down is not None or (found[rows] == 0).all()
    assert others.sum() == tokens - 3


@pytest.mark.parametrize("tokens", TOKENS[1:])  # with 5 tokens, it may be that no choice is dropped
def test_rows_take_no_expert_s_capacity(tokens):
    problem = random_problem(3, tokens, capacity_factor=0.5, **USUAL)
    with context_of(problem) as context:
        found, report = call(context, with_bad_logits(problem))
        assert found[rows_of(problem)].isnan().all() and found[others_of(problem)].isfinite().all()
        assert report.bad_rows == 3 and report.dropped > 0
        most = math.ceil(0.5 * tokens * problem.top_k / problem.experts)
        for expert in range(problem.experts):
            assert (report.topk_ids == expert).sum() <= most


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(
    "options", [{}, {"score": "sigmoid", "choice_bias": True}, {"experts": 8, "top_k": 2}], ids=str
)
def test_experts_that_are_ruled_out(options, tokens):
    """An expert with a router bias of -inf is chosen only if fewer than K other experts are left: the lowest such id is
    chosen then, with weight 0. If no expert is left, every row is bad."""
    problem = random_problem(4, tokens, biases=True, **USUAL | options)
    experts, top_k = problem.experts, problem.top_k
    with context_of(problem) as context:
        for ruled_out in ([1, 5], list(range(experts - top_k + 1)), list(range(experts))):
            bias = problem.router_bias.clone()
            bias[ruled_out] = -math.inf
            y, report = call(context, replace(problem, router_bias=bias))
            if len(ruled_out) == experts:
                assert y.isnan().all() and report.bad_rows == tokens
            else:
                chosen = torch.from_numpy(report.topk_ids)
                last = torch.isin(chosen, torch.tensor(ruled_out))
                assert y.isfinite().all() and report.bad_rows == 0
                expected = 1 if experts - len(ruled_out) < top_k else 0
                assert (last.sum(dim=1) == expected).all()
                assert (chosen[last] == 0).all() and (torch.from_numpy(report.topk_weights)[last] == 0).all()


WRONG = {
    "E": (24, r"ids in \[0, E=24\), or -1 for none, got 24"),
    "-2": (-2, r"ids in \[0, E=24\), or -1 for none, got -2"),
    "of 64 bits": (2**40 + 3, r"ids in \[0, E=24\), or -1 for none, got 2147483647"),
    "the same twice": (None, "distinct experts per token, got expert"),
}


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("what", WRONG)
def test_wrong_ids_are_raised_once(what, tokens):
    problem = random_problem(5, tokens, ids="int64", **USUAL)
    value, message = WRONG[what]
    ids = problem.topk_ids.clone()
    ids[3, 2] = ids[3, 0] if value is None else value
    wrong = replace(problem, topk_ids=ids)
    with context_of(problem) as context:
        y, _ = call(context, problem)
        for where in (context.synchronize, lambda: context.last_call, lambda: call(context, problem)):
            flashmoe.moe(context, **wrong.arguments())  # raises nothing yet, because it does not wait for the GPU
            torch.cuda.synchronize()
            with pytest.raises(flashmoe.BadRow, match=f"topk_ids: expected {message}.* for token 3 of rank 0"):
                where()
            found, report = call(context, problem)
            assert torch.equal(found, y) and report.bad_rows == 0


@pytest.mark.parametrize("tokens", TOKENS)
def test_strict(tokens):
    problem = random_problem(6, tokens, **USUAL)
    bad = with_bad_logits(problem)
    strict = replace(bad, options=bad.options | {"strict": True})
    with context_of(problem) as context:
        y, _ = call(context, problem)
        flashmoe.moe(context, **strict.arguments())
        with pytest.raises(flashmoe.BadRow, match="NaN or infinity for token 0 of rank 0"):
            context.synchronize()
        assert torch.equal(call(context, problem)[0], y)
        call(context, bad)  # raises nothing, because it is not strict


@pytest.mark.parametrize("tokens", TOKENS)
def test_every_row(tokens):
    problem = random_problem(7, tokens, **USUAL)
    with context_of(problem) as context:
        y, _ = call(context, problem)
        found, report = call(context, replace(problem, router=torch.full_like(problem.router, math.nan)))
        assert found.isnan().all() and report.bad_rows == tokens
        assert torch.equal(call(context, problem)[0], y)


@pytest.mark.parametrize("tokens", TOKENS)
def test_replayed_graphs(tokens):
    problem = random_problem(8, tokens, **USUAL)
    bad, x = with_bad_logits(problem), problem.x.clone()
    with context_of(problem) as context:
        y, _ = call(context, problem)
        graph, captured = capture(context, replace(problem, x=x))
        for now in (bad.x, problem.x, bad.x):
            x.copy_(now)
            captured.fill_(7.0)
            graph.replay()
            torch.cuda.synchronize()
            others = others_of(problem)
            assert torch.equal(captured[others], y[others])
            assert captured[rows_of(problem)].isnan().all() == (now is bad.x)


@pytest.mark.parametrize("options", [{}, {"score": "sigmoid"}, {"renormalize": False}, {"shared": 1}], ids=str)
def test_gradients(options):
    """Gradients of the experts' weights leave bad rows out; the gradient of the router becomes NaN."""
    problem = random_problem(9, 700, **USUAL | options)
    rows, others = rows_of(problem), others_of(problem)
    names = [name for name in ("x", "router", "gate_up_proj", "down_proj") if getattr(problem, name) is not None]

    def gradients(of: Problem) -> dict[str, torch.Tensor]:
        leaves = {name: getattr(of, name).detach().clone().requires_grad_() for name in names}
        flashmoe.moe(context, **replace(of, **leaves).arguments()).sum().backward()
        return {name: each.grad for name, each in leaves.items()}

    with context_of(problem) as context:
        found = gradients(with_bad_logits(problem))
        alone = gradients(replace(problem, x=problem.x[others]))
        context.synchronize()
    assert found["x"][rows].isnan().all() and torch.equal(found["x"][others], alone["x"])
    assert found["router"].isnan().all()
    for name in ("gate_up_proj", "down_proj"):  # sums over rows are split at other rows, so bits differ
        error = (found[name] - alone[name]).float().norm()
        assert error <= 2.0**-8 * alone[name].float().norm(), name


def test_gradients_of_ids_of_no_expert():
    problem = random_problem(10, 700, ids="int32", **USUAL)
    ids, weights = problem.topk_ids.clone(), problem.topk_weights.clone()
    rows = rows_of(problem)
    ids[rows], weights[rows] = -1, math.nan
    weights.requires_grad_()
    x = problem.x.clone().requires_grad_()
    with context_of(problem) as context:
        y = flashmoe.moe(context, **replace(problem, x=x, topk_ids=ids, topk_weights=weights).arguments())
        y.sum().backward()
        context.synchronize()
    assert (weights.grad[rows] == 0).all() and weights.grad.isfinite().all()
    assert (x.grad[rows] == 0).all() and x.grad.isfinite().all()


# ---- groups ------------------------------------------------------------------------------------------------------

SPEC = {"hidden": 512, "intermediate": 256, "experts": 32, "top_k": 4}
FEW, MANY = 24, 600
"""Tokens of each rank: for the kernel for a few tokens (which needs `direct`), and for the general kernel."""


@pytest.fixture(scope="module", params=(2, 4), ids=["2ranks", "4ranks"])
def pool(request) -> Iterator[RankPool]:
    with pool_of(request.param) as made:
        yield made


@pytest.mark.parametrize(("tokens", "mode"), [(FEW, "direct"), (MANY, "direct"), (MANY, "reduced")])
@pytest.mark.parametrize(
    ("how", "strict", "message"),
    [
        ("logits", False, ""),
        ("logits", True, "BadRow: router: expected .* for token 0 of rank 1"),
        ("none", False, ""),
        ("range", False, r"BadRow: topk_ids: expected ids in \[0, E=32\).*, got 32 for token 0 of rank 1"),
        ("twice", False, "BadRow: topk_ids: expected distinct .* twice for token 0 of rank 1"),
    ],
)
def test_a_rank_s_rows_are_its_own_matter(pool, tokens, mode, how, strict, message):
    import re

    results = everywhere(pool, on_rank.after_special_rows, SPEC, tokens, mode, how, strict, None)
    for rank, (told, nan, zeros, off) in enumerate(results):
        assert off == [], (rank, off)
        assert re.fullmatch(message if rank == 1 else "", told), told
        bad = len(on_rank.ROWS) if rank == 1 else 0
        assert (nan, zeros) == ((0, bad) if how == "none" else (bad, 0))


@pytest.mark.parametrize("mode", ["direct", "reduced"])
def test_rows_of_a_rank_without_experts(pool, mode):
    owners = [0] * SPEC["experts"]
    results = everywhere(pool, on_rank.after_special_rows, SPEC, MANY, mode, "logits", False, owners)
    expected = [("", len(on_rank.ROWS) if rank == 1 else 0, 0, []) for rank in range(len(results))]
    assert results == expected


@pytest.mark.parametrize("redispatch", [False, True])
def test_gradients_of_groups(pool, redispatch):
    assert everywhere(pool, on_rank.gradients, SPEC, MANY, redispatch) == [[]] * pool.ranks
