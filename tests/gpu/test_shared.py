"""The shared expert on a GPU: an FFN for every token, beside the token's experts and in the same launch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from layer_options import WITH_SHARED
from layers import ARITHMETIC, call, capture, check, context_of, poisoned_outputs, random_problem, run_and_check

pytestmark = pytest.mark.gpu

USUAL = {"hidden": 256, "intermediate": 192, "experts": 16, "top_k": 4}
TOKENS = (1, 7, 64, 333, 3000)
"""The kernel for a few tokens computes calls of 1 and 7 tokens, and of 64 if the shared expert is one slice."""

LAYERS = WITH_SHARED | {
    "one choice": {"shared": 1, "top_k": 1, "experts": 4, "renormalize": False},
    "weights on the input": {"shared": 1, "top_k": 1, "weights_on_input": True, "score": "sigmoid"},
    "given routing": {"shared": 2, "shared_gate": True, "ids": "int64"},
    "transposed": {"shared": 3, "shared_gate": True, "transposed": True},
    "odd sizes": {"shared": 3, "shared_gate": True, "hidden": 136, "intermediate": 72, "experts": 13, "top_k": 5},
    "32 choices": {"shared": 27, "top_k": 5},
}


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_layers(layer: dict[str, Any], tokens: int):
    run_and_check(random_problem(3, tokens, **USUAL | layer))


@pytest.mark.parametrize("tokens", [5, 300])
@pytest.mark.parametrize("arithmetic", ARITHMETIC)
def test_types(arithmetic: str, tokens: int):
    run_and_check(random_problem(4, tokens, shared=3, shared_gate=True, **ARITHMETIC[arithmetic], **USUAL))


@pytest.mark.parametrize("tokens", [4, 500])
def test_rows_may_lie_apart(tokens: int):
    problem = random_problem(5, tokens, shared=2, shared_gate=True, **USUAL)
    expected = run_and_check(problem)
    up, down = problem.shared_gate_up, problem.shared_down
    wide = torch.empty(len(up), up.shape[1] + 24, dtype=up.dtype, device="cuda")
    wide_down = torch.empty(len(down), down.shape[1] + 8, dtype=up.dtype, device="cuda")
    apart = replace(problem, shared_gate_up=wide[:, 16:-8], shared_down=wide_down[:, :-8])
    apart.shared_gate_up.copy_(up)
    apart.shared_down.copy_(down)
    with context_of(problem) as context:
        y, _ = call(context, apart)
    assert torch.equal(y, expected)


def test_a_context_serves_layers_with_and_without():
    problems = [
        random_problem(seed, tokens, shared=seed % 4, shared_gate=seed % 4 > 1, **USUAL)
        for seed, tokens in enumerate((300, 5, 64, 3, 8, 9, 1, 250, 299, 2, 128, 17))
    ]
    with context_of(problems[0], shared_intermediate=3 * USUAL["intermediate"]) as context:
        for _ in range(2):
            for problem in problems:
                y, report = call(context, problem)
                check(problem, y, report)


@pytest.mark.parametrize("tokens", [6, 700])
def test_the_same_bits_call_by_call_and_in_a_graph(tokens: int):
    problem = random_problem(6, tokens, shared=4, shared_gate=True, **USUAL)
    with context_of(problem) as context:
        first, _ = call(context, problem)
        for _ in range(50):
            assert torch.equal(call(context, problem)[0], first)
        graph, y = capture(context, problem)
        with poisoned_outputs():
            y.fill_(float("nan"))
            graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, first)
