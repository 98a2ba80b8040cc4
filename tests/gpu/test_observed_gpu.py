"""`load`, to which a call adds, and `router_logits`, which it writes, on a GPU, in both kernels."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import flashmoe
import pytest
import torch
from bounds import choice_values, choose, logits_of, router_slack
from layers import (
    ARITHMETIC,
    Observed,
    Problem,
    call,
    check,
    compiled,
    context_of,
    is_certain,
    module_of,
    random_problem,
)
from test_options_gpu import ROUTERS
from torch import Tensor

pytestmark = pytest.mark.gpu

USUAL = {"hidden": 256, "intermediate": 192, "experts": 24, "top_k": 5, "skew": 3.0}
TOKENS = (1, 2, 8, 9, 64, 1000)
"""Calls of up to 64 tokens use the kernel for a few tokens. With up to 8 tokens, it sums logits in another order."""
EITHER = (5, 333)


def certain(seed: int, tokens: int, **how: Any) -> Problem:
    """A problem in which no token's choice of experts depends on the engine's roundings."""
    problem = random_problem(seed, 4 * tokens + 64, **USUAL | how)
    if problem.topk_ids is not None:
        rows = {name: getattr(problem, name)[:tokens] for name in ("x", "topk_ids", "topk_weights")}
        return replace(problem, **rows)
    problem.x = problem.x[is_certain(problem)][:tokens].contiguous()
    assert len(problem.x) == tokens
    return problem


def chosen(problem: Problem) -> Tensor:
    """int64 [E]: how often the tokens choose each expert, by the reference."""
    ids = problem.topk_ids
    if ids is None:
        values = choice_values(logits_of(problem.x, problem.router, problem.router_bias), problem.rule())
        ids = choose(values, problem.top_k)
    return torch.bincount(ids.flatten().long(), minlength=problem.experts)


# ---- load -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ids", [None, "int32", "int64"], ids=["router", "int32", "int64"])
@pytest.mark.parametrize("tokens", TOKENS)
def test_choices_are_counted_in_all_calls(tokens: int, ids: str | None):
    problem = certain(1, tokens, ids=ids)
    seen = Observed.of(problem)
    with context_of(problem) as context:
        expected, report = call(context, problem)
        check(problem, expected, report)
        for calls in (1, 2, 3):
            y, _ = call(context, problem, **seen.arguments())
            assert torch.equal(y, expected)
            assert torch.equal(seen.load, calls * chosen(problem))


COUNTED: dict[str, dict[str, Any]] = {
    "one choice": {"top_k": 1},
    "rows that are joined": {"top_k": 2},
    "all tokens to the same experts": {"skew": 50.0},
    "8 experts": {"experts": 8, "top_k": 2},
    "300 experts": {"experts": 300, "top_k": 8},
    "K 32 of E 1024": {"experts": 1024, "top_k": 32, "skew": 0.0, "ids": "int32"},
    "drops": {"capacity_factor": 0.3},
    "drops of given choices": {"capacity_factor": 0.3, "ids": "int64"},
    "shared expert": {"shared": 3, "shared_gate": True},
    "shared expert, given choices": {"shared": 2, "ids": "int32"},
    "transposed": {"transposed": True},
    "float32": {"dtype": "float32"},
    "exact": {"dtype": "float32", "exact": True},
    "DeepSeek-V3": ROUTERS["DeepSeek-V3"] | {"skew": 0.0},
}


@pytest.mark.parametrize("tokens", EITHER)
@pytest.mark.parametrize("layer", COUNTED.values(), ids=COUNTED)
def test_choices_of(layer: dict[str, Any], tokens: int):
    """Choices that a capacity drops are counted. A shared expert is not counted."""
    problem = certain(2, tokens, **layer)
    seen = Observed.of(problem)
    with context_of(problem) as context:
        y, report = call(context, problem, **seen.arguments())
        check(problem, y, report)
        assert torch.equal(seen.load, chosen(problem))
    assert seen.load.sum() == problem.top_k * tokens
    if tokens > 8 and "capacity_factor" in layer:
        assert report.dropped > 0


@pytest.mark.parametrize("tokens", EITHER)
def test_ids_that_are_no_experts_are_told(tokens: int):
    problem = random_problem(3, tokens, ids="int64", **USUAL)
    problem.topk_ids[tokens - 1, 2] = -2
    with context_of(problem) as context:
        flashmoe.moe(context, **problem.arguments(), **Observed.of(problem).arguments())
        with pytest.raises(flashmoe.BadRow, match=rf"got -2 for token {tokens - 1} "):
            context.synchronize()


# ---- logits ---------------------------------------------------------------------------------------------------------


def off_by_at_most(problem: Problem) -> Tensor:
    """[T, 1]: 8 standard deviations of the token's least certain logit."""
    slack = router_slack(problem.x, problem.router, problem.router_bias)  # of the difference of two logits
    return slack.unsqueeze(1) / math.sqrt(2.0)


EXPERTS = {
    "8 experts": {"experts": 8, "top_k": 2},
    "24 experts": {},
    "odd sizes": {"hidden": 136, "experts": 77, "top_k": 3},
    "128 experts": {"experts": 128, "top_k": 8},
    "300 experts": {"experts": 300, "top_k": 8},
    "1024 experts": {"experts": 1024, "top_k": 8},
}


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("biases", [False, True], ids=["plain", "biases"])
@pytest.mark.parametrize("sizes", EXPERTS.values(), ids=EXPERTS)
def test_logits_are_the_references(sizes: dict[str, Any], biases: bool, tokens: int):
    problem = random_problem(4, tokens, biases=biases, **USUAL | sizes)
    first, second = Observed.of(problem), Observed.of(problem)
    with context_of(problem) as context:
        expected, _ = call(context, problem)
        for seen in (first, second):
            y, report = call(context, problem, **seen.arguments())
            assert torch.equal(y, expected)
        check(problem, y, report)
    assert torch.equal(first.logits, second.logits)
    error = (first.logits.double() - logits_of(problem.x, problem.router, problem.router_bias)).abs()
    assert (error <= off_by_at_most(problem)).all()


@pytest.mark.parametrize("tokens", EITHER)
@pytest.mark.parametrize("arithmetic", ARITHMETIC)
def test_types(arithmetic: str, tokens: int):
    problem = random_problem(5, tokens, **ARITHMETIC[arithmetic], **USUAL)
    seen = Observed.of(problem)
    with context_of(problem) as context:
        call(context, problem, **seen.arguments())
    error = (seen.logits.double() - logits_of(problem.x, problem.router, None)).abs()
    assert (error <= off_by_at_most(problem)).all()


@pytest.mark.parametrize("tokens", EITHER)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("rounded", [False, True], ids=["", "rounded"])
@pytest.mark.parametrize("rule", ROUTERS.values(), ids=ROUTERS)
def test_logits_are_those_that_scores_are_made_of(rule: dict[str, Any], rounded: bool, dtype: str, tokens: int):
    """x and the router are integers, so logits are exact unless `rounded` asks for one rounding."""
    sizes = {"hidden": 256, "intermediate": 64, "experts": 64, "top_k": 6}
    problem = random_problem(6, tokens, dtype=dtype, round_logits=rounded, **sizes | rule)
    generator = torch.Generator(device="cuda").manual_seed(6)
    for tensor in (problem.x, problem.router):
        tensor.copy_(torch.randint(-7, 8, tensor.shape, generator=generator, device="cuda"))
    exact = logits_of(problem.x, problem.router, None)
    assert exact.abs().max() > 256  # so that rounding to bfloat16, which has 8 bits, changes some
    seen = Observed.of(problem)
    with context_of(problem) as context:
        call(context, problem, **seen.arguments())
    assert torch.equal(seen.logits.double(), exact.to(problem.x.dtype).double() if rounded else exact)


# ---- graphs, modules, compilers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", EITHER)
def test_replayed_graphs(tokens: int):
    problem = certain(8, tokens)
    seen = Observed.of(problem)
    with context_of(problem) as context:
        call(context, problem, **Observed.of(problem).arguments())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            flashmoe.moe(context, **problem.arguments(), **seen.arguments())
        expected = torch.zeros_like(chosen(problem))
        assert torch.equal(seen.load, expected)
        for turn in range(3):
            problem.x.copy_(certain(9 + turn, tokens).x)
            problem.x[is_certain(problem).logical_not()] = problem.x[is_certain(problem)][:1]
            expected += chosen(problem)
            seen.logits.fill_(math.nan)
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(seen.load, expected)
            again = Observed.of(problem)
            call(context, problem, **again.arguments())
            assert torch.equal(seen.logits, again.logits)


@pytest.mark.parametrize("tokens", EITHER)
@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"], ids=lambda backend: backend or "eager")
def test_a_module(backend: str | None, tokens: int):
    sizes = {"hidden": 256, "intermediate": 192, "experts": 24, "top_k": 5}
    problem = certain(12, tokens, **sizes)
    seen = Observed.of(problem)
    with context_of(problem) as context, torch.no_grad():
        y, _ = call(context, problem, **seen.arguments())
        module = module_of(context, problem, count_load=True)
        run = module if backend is None else compiled(module, backend)
        for calls in (1, 2):
            result, logits = run(problem.x, return_router_logits=True)
            assert torch.equal(result, y) and torch.equal(logits, seen.logits)
            assert torch.equal(module.load, calls * seen.load)
