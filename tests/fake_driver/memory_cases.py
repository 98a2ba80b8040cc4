"""Contexts take as much memory as `plan_memory` says, and give it back."""

from __future__ import annotations

import gc

import flashmoe
import pytest
from fake_gpu import SIZES, arguments, driver
from fake_group import joined
from flashmoe import models
from flashmoe.contexts.memory import PUBLISHED, plan_memory
from flashmoe.engines import base


def test_memory_is_given_back():
    before = driver.fake_allocations()
    context = flashmoe.Context(engine="cuda", **SIZES)
    flashmoe.moe(context, **arguments())
    assert driver.fake_allocations() > before
    gc.disable()  # so that the test fails if a cycle of references holds the context
    try:
        del context
        assert driver.fake_allocations() == before
    finally:
        gc.enable()


def test_an_interrupted_context_gives_its_memory_back(monkeypatch):
    """The interrupt comes when the library has made the context, but Python has not registered its end yet."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    before = driver.fake_allocations()
    monkeypatch.setattr(base.weakref, "finalize", interrupted)
    try:
        flashmoe.Context(engine="cuda", **SIZES)
    except KeyboardInterrupt:
        pass
    else:
        pytest.fail("expected the interrupt")
    monkeypatch.undo()
    gc.collect()
    assert driver.fake_allocations() == before


POINTER = 8
"""Bytes of device memory that a context takes for each rank beside its plan: the address of the rank's heap."""


def sizes_of(shape: models.ModelShape) -> dict:
    """The sizes of a context for the shape, at 8192 tokens a rank."""
    names = ("hidden", "intermediate", "experts", "top_k")
    return {"max_tokens": 8192, **{name: getattr(shape, name) for name in names}}


@pytest.mark.parametrize("shape", models.MODELS, ids=lambda shape: shape.name)
@pytest.mark.parametrize("changes", [{}, {"dtype": "float32", "processors": 64}, {"capacity_factor": 1.0}])
def test_memory_is_what_the_plan_says(shape, changes):
    before = driver.fake_allocated_bytes()
    with flashmoe.Context(engine="cuda", **sizes_of(shape), **changes) as context:
        plan = plan_memory(engine="cuda", ranks=1, **sizes_of(shape), **changes)
        assert (context.heap_bytes, context.workspace_bytes) == (plan.heap_bytes, plan.workspace_bytes)
        asked = driver.fake_allocated_bytes() - before
    assert asked == plan.heap_bytes + plan.workspace_bytes + POINTER


def test_ranks_take_the_memory_that_the_plan_says():
    published = {"hidden": 2048, "intermediate": 2048, "top_k": 1, "return_mode": "direct", "capacity_factor": 1.0}
    sizes = [sizes_of(shape) for shape in models.MODELS]
    sizes += [{**published, "max_tokens": tokens, "experts": experts} for tokens, experts, _ in PUBLISHED]
    for told in joined(4, *sizes):
        for each, seen in zip(sizes, told, strict=True):
            plan = plan_memory(engine="cuda", ranks=4, **each)
            assert (seen.heap_bytes, seen.workspace_bytes) == (plan.heap_bytes, plan.workspace_bytes)
            assert seen.symmetric_bytes == plan.heap_bytes
            assert seen.device_bytes == plan.workspace_bytes + 4 * POINTER


def test_too_little_memory():
    driver.fake_memory(1000)
    before = driver.fake_allocations()
    with pytest.raises(flashmoe.HeapError, match=r"workspace: expected .* got 1000 free of 1000"):
        flashmoe.Context(engine="cuda", **SIZES)
    assert driver.fake_allocations() == before
