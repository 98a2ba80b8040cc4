"""Each call is one operation of the GPU: one kernel, whatever the call computes."""

from __future__ import annotations

import flashmoe
import pytest
import torch
from layers import Observed, call, context_of, gpu_operations, random_problem

pytestmark = [pytest.mark.gpu, pytest.mark.undisturbed]

CALLS = 10


@pytest.mark.parametrize("tokens", [1, 100, 5000])
@pytest.mark.parametrize("ids", [None, "int32", "int64"], ids=["router", "int32", "int64"])
@pytest.mark.parametrize("observed", [False, True], ids=["", "load and logits"])
def test_one_operation_per_call(observed, tokens, ids):
    """A call is one operation even if it also counts choices and writes logits."""
    problem = random_problem(1, tokens, hidden=512, intermediate=256, experts=32, top_k=4, ids=ids, biases=True)
    arguments = problem.arguments() | (Observed.of(problem).arguments() if observed else {})
    ones = torch.ones(8, device="cuda")
    with context_of(problem) as context:
        call(context, problem)
        gpu_operations(lambda: ones + 1)  # not counted: in its first run the profiler may do operations of its own
        assert len(gpu_operations(lambda: ones + 1)) == 1, "the profiler does not see a kernel of PyTorch's"
        seen = gpu_operations(lambda: [flashmoe.moe(context, **arguments) for _ in range(CALLS)])
    assert len(seen) == CALLS, seen
    few = tokens <= 256 and tokens * problem.top_k <= 16 * problem.experts  # sm90/decode/alone.cuh
    kernel = "flashmoe_few" if few else "flashmoe_moe"
    assert all(kernel in name for name in seen), seen
