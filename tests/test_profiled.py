"""PyTorch's profiler shows calls by name, and changes no bit of their results."""

from __future__ import annotations

from typing import Any

import flashmoe
import pytest

torch = pytest.importorskip("torch")


def tensors() -> dict[str, Any]:
    torch.manual_seed(0)
    shapes = {"x": (4, 16), "gate_up_proj": (4, 16, 16), "down_proj": (4, 16, 8), "router": (4, 16)}
    return {name: torch.randn(shape, requires_grad=True) for name, shape in shapes.items()}


def results() -> list[Any]:
    given = tensors()
    y = flashmoe.moe(**given, top_k=2)
    y.square().sum().backward()
    with torch.no_grad():
        again = flashmoe.moe(**given, top_k=2)
    return [y.detach(), again, *(each.grad for each in given.values())]


def test_ranges_of_calls():
    expected = results()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        found = results()
    counts = {each.key: each.count for each in profile.key_averages()}
    assert counts["flashmoe.moe"] == 2 and counts["flashmoe.moe.backward"] == 1
    assert all(torch.equal(*each) for each in zip(expected, found, strict=True))


def test_no_range_without_a_profiler(monkeypatch):
    def refused(*_: Any) -> None:
        raise AssertionError("a range was made")

    monkeypatch.setattr(torch.autograd.profiler, "record_function", refused)
    results()
