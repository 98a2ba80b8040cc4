"""A context takes the device memory that its plan says."""

from __future__ import annotations

import flashmoe
import pytest
import torch
from flashmoe import models
from flashmoe.contexts.memory import plan_memory

pytestmark = [pytest.mark.gpu, pytest.mark.undisturbed]

GRANULE = 2 << 20
"""The driver rounds the size of an allocation up to a multiple of this number of bytes. A context has three
allocations: the heap, the workspace, and a word with the address of the heap."""


@pytest.mark.parametrize("model", ["flashmoe-paper", "qwen3-30b-a3b", "deepseek-v3"])
def test_memory_is_what_the_plan_says(model):
    shape = models.find(model)
    sizes = {name: getattr(shape, name) for name in ("hidden", "intermediate", "experts", "top_k")}
    sizes["max_tokens"] = 8192
    torch.cuda.synchronize()
    with flashmoe.Context(engine="cuda", **{**sizes, "max_tokens": 8}) as first:  # the driver loads some things once
        processors = first.processors
    plan = plan_memory(engine="cuda", ranks=1, processors=processors, **sizes)
    before, _ = torch.cuda.mem_get_info()
    with flashmoe.Context(engine="cuda", **sizes) as context:
        taken = before - torch.cuda.mem_get_info()[0]
        assert (context.heap_bytes, context.workspace_bytes) == (plan.heap_bytes, plan.workspace_bytes)
    planned = plan.heap_bytes + plan.workspace_bytes
    assert planned <= taken <= planned + 3 * GRANULE
