"""A shared expert whose gate and up are two matrices, on a GPU: the bits are those of one matrix with both."""

from __future__ import annotations

from typing import Any

import flashmoe
import pytest
import torch
from flashmoe.contexts.context import context_id
from flashmoe.pytorch.operator import by_operator
from flashmoe.spec import Options
from flashmoe.spec.tensors import Tensors
from layers import ARITHMETIC, Problem, context_of, gpu_operations, poisoned_outputs, random_problem
from leaves import poisoned
from torch import Tensor

pytestmark = pytest.mark.gpu

USUAL = {"hidden": 256, "intermediate": 192, "experts": 16, "top_k": 4}
TOKENS = (1, 8, 64, 300)
"""The kernel for a few tokens computes calls of 1 and 8 tokens, and of 64 if the shared expert is one slice."""
LAYERS: dict[str, dict[str, Any]] = {
    "one slice": {"shared": 1},
    "three slices, a gate": {"shared": 3, "shared_gate": True},
    "odd sizes": {"shared": 3, "hidden": 136, "intermediate": 72, "experts": 13, "top_k": 5},
    "just above a tile's": {"shared": 2, "hidden": 264, "intermediate": 264, "activation": "geglu"},
    "given routing, weights on the input": {"shared": 1, "ids": "int64", "weights_on_input": True},
}
PLACES = ("behind", "before", "in turn", "far behind", "further apart")
"""Where the up's rows lie in memory, seen from the gate's rows."""
COPIED = ("before", "further apart")
"""The places for which each call first copies gate and up into one matrix."""
HALVES = ("shared_gate_up", "shared_up")


def apart(both: Tensor, place: str) -> dict[str, Tensor]:
    """The operands of gate and up as two matrices, with the rows of `both` and with the up at `place`."""
    rows, hidden = len(both) // 2, both.shape[1]

    def memory(*shape: int) -> Tensor:
        return torch.full(shape, torch.nan, dtype=both.dtype, device="cuda")

    if place == "in turn":
        gate, up = memory(rows, 2, hidden).unbind(1)
    elif place == "further apart":
        gate, up = memory(rows, hidden), memory(rows, hidden + 8)[:, :hidden]
    else:
        between = 3 if place != "far behind" else (5 << 30) // (hidden * both.element_size())
        held = memory(2 * rows + between, hidden)
        gate, up = held[:rows], held[rows + between :]
        if place == "before":
            gate, up = up, gate
    gate.copy_(both[:rows])
    up.copy_(both[rows:])
    return dict(zip(HALVES, (gate, up), strict=True))


def in_two(problem: Problem, place: str) -> dict[str, Any]:
    return problem.arguments() | apart(problem.shared_gate_up, place)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("place", PLACES)
def test_results(place: str, layer: dict[str, Any], tokens: int):
    problem = random_problem(3, tokens, **USUAL | layer)
    with context_of(problem) as context, poisoned_outputs():
        expected = flashmoe.moe(context, **problem.arguments())
        told = in_two(problem, place)
        for _ in range(2):
            assert torch.equal(flashmoe.moe(context, **told), expected)


@pytest.mark.parametrize("tokens", [5, 300])
@pytest.mark.parametrize("arithmetic", ARITHMETIC)
@pytest.mark.parametrize("place", PLACES)
def test_types(place: str, arithmetic: str, tokens: int):
    problem = random_problem(4, tokens, shared=3, shared_gate=True, **ARITHMETIC[arithmetic], **USUAL)
    with context_of(problem) as context, poisoned_outputs():
        expected = flashmoe.moe(context, **problem.arguments())
        assert torch.equal(flashmoe.moe(context, **in_two(problem, place)), expected)


@pytest.mark.parametrize("tokens", [5, 300])
@pytest.mark.parametrize("place", PLACES)
def test_a_call_is_one_kernel_where_nothing_is_copied(place: str, tokens: int):
    problem = random_problem(5, tokens, shared=2, **USUAL)
    with context_of(problem) as context:
        told = in_two(problem, place)
        flashmoe.moe(context, **told)
        gpu_operations(lambda: told["x"] + 1)  # the profiler may do something of its own in its first run
        seen = gpu_operations(lambda: flashmoe.moe(context, **told))
    others = [name for name in seen if "flashmoe_" not in name]
    assert len(seen) - len(others) == 1 and bool(others) == (place in COPIED), seen


@pytest.mark.parametrize("tokens", [6, 300])
def test_in_a_graph(tokens: int):
    """A replay of a captured call reads the values that both matrices have then."""
    problem = random_problem(6, tokens, shared=3, **USUAL)
    with context_of(problem) as context:
        told = in_two(problem, "behind")
        flashmoe.moe(context, **told)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = flashmoe.moe(context, **told)
        for name in HALVES:
            told[name].mul_(1.5)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, flashmoe.moe(context, **told))


def gradients(context: flashmoe.Context, told: dict[str, Any], dy: Tensor, frozen: str = "") -> dict[str, Tensor]:
    names = ("x", "gate_up_proj", "down_proj", "router", "shared_gate_up", "shared_up", "shared_down", "shared_gate")
    leaves = {name: told[name].detach() for name in names if told.get(name) is not None and name != frozen}
    for each in leaves.values():
        each.requires_grad_()
    with poisoned():
        y = flashmoe.moe(context, **told | leaves)
        found = torch.autograd.grad(y, list(leaves.values()), dy)
    return dict(zip(leaves, found, strict=True)) | {"y": y.detach()}


def check_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, each in expected.items():
        got = torch.cat([found[half] for half in HALVES]) if name == "shared_gate_up" else found[name]
        assert torch.equal(got, each), name


@pytest.mark.parametrize("tokens", [1, 300, 1500])
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("place", PLACES)
def test_gradients(place: str, layer: dict[str, Any], tokens: int):
    problem = random_problem(7, tokens, **USUAL | layer)
    dy = torch.randn_like(problem.x)
    with context_of(problem) as context:
        expected = gradients(context, problem.arguments(), dy)
        check_same(gradients(context, in_two(problem, place), dy), expected)


@pytest.mark.parametrize("arithmetic", ARITHMETIC)
@pytest.mark.parametrize("place", PLACES)
def test_types_of_gradients(place: str, arithmetic: str):
    problem = random_problem(8, 333, shared=3, shared_gate=True, **ARITHMETIC[arithmetic], **USUAL)
    dy = torch.randn_like(problem.x)
    with context_of(problem) as context:
        expected = gradients(context, problem.arguments(), dy)
        check_same(gradients(context, in_two(problem, place), dy), expected)


@pytest.mark.parametrize("frozen", HALVES)
def test_one_of_the_two_may_be_frozen(frozen: str):
    problem = random_problem(9, 200, shared=2, **USUAL)
    dy = torch.randn_like(problem.x)
    with context_of(problem) as context:
        told = in_two(problem, "behind")
        expected = gradients(context, told, dy)
        for name, each in gradients(context, told, dy, frozen).items():
            assert torch.equal(each, expected[name]), name


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("place", ["behind", "before"])
def test_gradients_are_added_to_buffers(place: str, dtype: str):
    problem = random_problem(10, 200, shared=3, dtype=dtype, **USUAL)
    dy = torch.randn_like(problem.x)
    sums: list[Tensor] = []
    with context_of(problem) as context:
        for told in (problem.arguments(), in_two(problem, place)):
            tensors = Tensors(**{name: each for name, each in told.items() if isinstance(each, Tensor)})
            halves = [getattr(tensors, name) for name in HALVES if name in told]
            for each in halves:
                each.requires_grad_().main_grad = torch.ones(each.shape, device="cuda")
            for _ in range(2):
                y = by_operator(context_id(context), tensors, Options(top_k=problem.top_k), main_grad=True)
                y.backward(dy)
            sums.append(torch.cat([each.main_grad for each in halves]))
            assert all(each.grad is None for each in halves)
    assert torch.equal(*sums) and not torch.equal(sums[0], torch.ones_like(sums[0]))
