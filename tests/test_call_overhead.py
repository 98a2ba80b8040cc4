"""The benchmark of a call's cost on the host: which calls it times, and how it sums up its rounds."""

from __future__ import annotations

import call_overhead
import flashmoe
import host_calls
import pytest
from harness import Tree


def test_a_call_is_timed(monkeypatch):
    """The calls after the warm-up are timed. The calling thread cannot be busy for longer than a call takes."""
    monkeypatch.setattr(host_calls, "WARM_UP", 2)
    monkeypatch.setattr(host_calls, "CALLS", 5)
    calls = []
    moe = flashmoe.moe
    monkeypatch.setattr(flashmoe, "moe", lambda *args, **kinds: calls.append(args) or moe(*args, **kinds))
    figures = host_calls.timed(host_calls.function_case("cpu", "numpy", host_calls.tensors()))
    assert len(calls) == 7
    assert 0 < figures["host_us"] <= figures["call_us"] < 1e7


def test_blocks_of_transformers_are_timed():
    """Each case calls a module of Transformers once, with the sizes that the cases of `flashmoe.moe` have."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    with torch.no_grad():
        found = {case.tensors: case.call() for case in host_calls.block_cases("cpu")}
    assert list(found) == ["torch, experts", "torch, fused", "torch, fused, shared"]
    shapes = [tuple(y.shape) for y in found.values()]
    assert shapes == [(1, 64), (1, 1, 64), (1, 1, 64)]


def test_rounds_are_summed_up_by_case():
    def told(*values: float) -> list[dict]:
        return [{"engine": "cpu", "tensors": f"t{i}", "call_us": v, "host_us": v / 2} for i, v in enumerate(values)]

    first, second = call_overhead.over_rounds([told(10, 1), told(30, 3), told(20, 8)])
    assert (first["tensors"], first["call_us"], first["call_us_min_max"]) == ("t0", 20, [10, 30])
    assert (second["tensors"], second["host_us"], second["host_us_min_max"]) == ("t1", 1.5, [0.5, 4])


def test_cases_that_differ_are_an_error():
    """If one round lacks a case, no figures are computed."""
    row = {"engine": "cpu", "tensors": "numpy", "call_us": 1.0, "host_us": 1.0}
    assert len(call_overhead.over_rounds([[row]])) == 1
    with pytest.raises(ValueError, match="zip"):
        call_overhead.over_rounds([[row], []])


def test_the_installed_package_is_a_tree():
    assert (Tree.at(call_overhead.installed()).folder / "flashmoe" / "calls" / "moe.py").is_file()
