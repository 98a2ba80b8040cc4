"""`load` and `router_logits` in PyTorch: by the operator, in the module, compiled, and where gradients are recorded."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import flashmoe
import numpy as np
import pytest
import torch
from flashmoe import InvalidArgument
from flashmoe.checkpoint import shipped_layer
from flashmoe.nn import MoE
from flashmoe.pytorch.operator import context_id
from problems import Problem, random_problem
from test_torch import as_tensors, bits, block_state, compiled, tensor
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

SIZES = {"hidden": 40, "intermediate": 24, "experts": 8, "top_k": 3}
E = SIZES["experts"]
BACKENDS = ("eager", "aot_eager", "inductor")


@pytest.fixture
def problem() -> Problem:
    return random_problem(1, [17], **SIZES)


@pytest.fixture
def ctx() -> Iterator[flashmoe.Context]:
    with flashmoe.Context(max_tokens=64, dtype="float32", **SIZES) as ctx:
        yield ctx


@pytest.fixture
def layer(ctx, problem) -> MoE:
    layer = MoE(ctx, **SIZES, count_load=True)
    layer.load_state_dict(block_state(problem))
    return layer


def observed(ctx: flashmoe.Context, arguments: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor | None]:
    """y, load and, if there is a router, logits of a call that does not go through PyTorch's operator."""
    load = torch.zeros(E, dtype=torch.int64)
    logits = torch.empty(len(arguments["x"]), E) if arguments.get("router") is not None else None
    with torch.no_grad():
        y = flashmoe.moe(ctx, **arguments, load=load, router_logits=logits)
    return y, load, logits


# The operator


@pytest.mark.parametrize("asked", [{"load_size": E}, {"with_logits": True}, {"load_size": E, "with_logits": True}, {}])
@pytest.mark.parametrize("fused", [True, False], ids=["router", "given"])
def test_operator_passes_opcheck(ctx, fused, asked):
    arguments = as_tensors(random_problem(2, [17], fused=fused, **SIZES).arguments(0))
    if fused or "with_logits" not in asked:
        torch.library.opcheck(torch.ops.flashmoe.moe_observed.default, (context_id(ctx),), arguments | asked)


def test_operator_passes_opcheck_with_gradients(ctx, problem):
    arguments = as_tensors(problem.arguments(0)) | {"load_size": E, "with_logits": True}
    for name in ("x", "gate_up_proj", "down_proj", "router"):
        arguments[name].requires_grad_()
    # Not test_aot_dispatch_dynamic: it runs the backward pass.
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.flashmoe.moe_observed.default, (context_id(ctx),), arguments, test_utils=tests)


@pytest.mark.parametrize("fused", [True, False], ids=["router", "given"])
def test_operator_returns_what_the_function_writes(ctx, fused):
    arguments = as_tensors(random_problem(3, [17], fused=fused, **SIZES).arguments(0))
    y, load, logits = observed(ctx, arguments)
    results = torch.ops.flashmoe.moe_observed(context_id(ctx), **arguments, load_size=E, with_logits=fused)
    assert (bits(results[0]), bits(results[1])) == (bits(y), bits(load))
    assert results[2].shape == (0, 0) if logits is None else bits(results[2]) == bits(logits)
    assert load.sum() == 17 * SIZES["top_k"]


def test_without_values(ctx, problem):
    arguments = as_tensors(problem.arguments(0))
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(each) if torch.is_tensor(each) else each for name, each in arguments.items()}
        asked = {"load": torch.zeros(E, dtype=torch.int64), "router_logits": torch.empty(17, E)}
        y = flashmoe.moe(ctx, **fake, **asked)
    assert y.shape == (17, SIZES["hidden"]) and type(y) is type(fake["x"])


# Gradients


def test_where_gradients_are_recorded(ctx, problem):
    """Load and logits are written all the same, and a loss may be made of y and of logits: both have gradients."""
    arguments = as_tensors(problem.arguments(0))
    expected = observed(ctx, arguments)
    arguments["router"].requires_grad_()
    load, logits = torch.full((E,), 5), torch.empty(17, E)
    y = flashmoe.moe(ctx, **arguments, load=load, router_logits=logits)
    assert bits(y) == bits(expected[0])
    assert torch.equal(load, 5 + expected[1]) and not load.requires_grad
    assert bits(logits) == bits(expected[2])
    by_result = [torch.autograd.grad(result.sum(), arguments["router"], retain_graph=True)[0] for result in (y, logits)]
    torch.testing.assert_close(by_result[1], arguments["x"].sum(0).expand(E, -1))
    both = torch.autograd.grad((y.sum() + logits.sum()), arguments["router"])[0]
    torch.testing.assert_close(both, by_result[0] + by_result[1])


WRONG = {
    "load": [
        (torch.zeros(E, dtype=torch.int32), r"expected \[E\] int64 on cpu, contiguous, got \[8\] int32 on cpu"),
        (torch.zeros(1, E, dtype=torch.int64), r"expected \[E\] int64 on cpu, contiguous, got \[1, 8\] int64"),
        (torch.zeros(16, dtype=torch.int64)[::2], r"expected \[E\] int64 .* with strides \[2\]"),
        (torch.zeros(E + 1, dtype=torch.int64), r"expected \[E=8\] int64, got \[9\] int64"),
        (torch.zeros(E, dtype=torch.int64, device="meta"), r"expected \[E\] int64 on cpu, .* got \[8\] int64 on meta"),
        ([0] * E, "expected a PyTorch tensor, as operators take, got list"),
    ],
    "router_logits": [
        (torch.zeros(17, E, dtype=torch.float64), r"expected \[T, E\] float32 on cpu, .* got \[17, 8\] float64"),
        (torch.zeros(1, E), r"expected \[T, E\] float32 on cpu, contiguous, got \[1, 8\] float32"),
        (torch.zeros(17, E + 1), r"expected \[T, E\] float32 on cpu, contiguous, got \[17, 9\] float32"),
        (torch.zeros(E, 17).T, r"expected \[T, E\] float32 .* with strides \[1, 17\]"),
    ],
}


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [pytest.param(name, *case, id=f"{name}-{at}") for name in WRONG for at, case in enumerate(WRONG[name])],
)
def test_wrong_tensors_are_refused_there_too(ctx, problem, name, wrong, message):
    arguments = as_tensors(problem.arguments(0))
    arguments["x"].requires_grad_()
    with pytest.raises(InvalidArgument, match=f"^{name}: {message}"):
        flashmoe.moe(ctx, **arguments, **{name: wrong})


@pytest.mark.parametrize("recorded", [True, False])
def test_there_are_no_logits_of_given_routing(ctx, recorded):
    arguments = as_tensors(random_problem(4, [17], fused=False, **SIZES).arguments(0))
    arguments["x"].requires_grad_(recorded)
    with pytest.raises(InvalidArgument, match=r"^router_logits: expected router with it, got None"):
        flashmoe.moe(ctx, **arguments, router_logits=torch.empty(17, E))


def test_a_view_that_negates_is_refused(ctx, problem):
    wrong = torch._neg_view(torch.zeros(17, E))
    with pytest.raises(InvalidArgument, match=r"^router_logits: expected a tensor that can be written to, got a view"):
        flashmoe.moe(ctx, **as_tensors(problem.arguments(0)), router_logits=wrong)


# Compiled


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fused", [True, False], ids=["router", "given"])
def test_the_function_compiles(ctx, fused, backend):
    arguments = as_tensors(random_problem(5, [17], fused=fused, **SIZES).arguments(0))
    y, expected, expected_logits = observed(ctx, arguments)
    x = arguments.pop("x")
    load, logits = torch.zeros(E, dtype=torch.int64), torch.zeros(17, E) if fused else None

    def call(x: Tensor, load: Tensor, logits: Tensor | None) -> Tensor:
        return flashmoe.moe(ctx, x, **arguments, load=load, router_logits=logits)

    fast = compiled(call, backend)
    with torch.no_grad():
        for calls in (1, 2, 3):
            assert bits(fast(x, load, logits)) == bits(y)
            assert torch.equal(load, calls * expected)
    assert logits is None or bits(logits) == bits(expected_logits)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("recorded", [False, True], ids=["inference", "gradients recorded"])
def test_a_compiled_module(layer, problem, backend, recorded):
    """Calls of several numbers of tokens. From the second number on, PyTorch compiles for any number of tokens."""
    x = tensor(problem.x[0])
    fast = compiled(layer, backend)
    with torch.set_grad_enabled(recorded):
        for tokens in (x, x[:5], x[:16].reshape(2, 8, 40), x[:0], x):
            before = layer.load.clone()
            y, logits = layer(tokens, return_router_logits=True)
            counted = layer.load - before
            fast_y, fast_logits = fast(tokens, return_router_logits=True)
            assert (bits(fast_y), bits(fast_logits)) == (bits(y), bits(logits))
            assert torch.equal(layer.load - before, 2 * counted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiler_keeps_every_call(layer, problem, backend):
    """It also keeps the call of a layer whose result is not used, because the call changes the layer's load."""
    twin = copy.deepcopy(layer)
    x = tensor(problem.x[0])

    def forward(x: Tensor) -> Tensor:
        twin(x)
        return layer(x) + layer(x)

    with torch.no_grad():
        expected = 2 * layer(x)
        counted = layer.load.clone()
        assert torch.equal(compiled(forward, backend)(x), expected)
    assert torch.equal(layer.load, 3 * counted)
    assert torch.equal(twin.load, counted)


# The module


def test_a_module_counts_where_it_is_asked_to(ctx, layer, problem):
    x = tensor(problem.x[0])
    y, load, logits = observed(ctx, as_tensors(problem.arguments(0)))
    with torch.no_grad():
        assert bits(layer(x)) == bits(y)
        both = layer(x.reshape(1, 17, 1, 40), return_router_logits=True)
        assert [each.shape for each in both] == [(1, 17, 1, 40), (1, 17, 1, E)]
        assert bits(both[1]) == bits(logits)
    assert torch.equal(layer.load, 2 * load)
    assert "load" not in layer.state_dict()
    layer.load.zero_()
    assert layer(x[0]).shape == (40,) and layer.load.sum() == SIZES["top_k"]
    plain = MoE(ctx, **SIZES)
    assert plain.load is None
    plain.load_state_dict(layer.state_dict())
    with torch.no_grad():
        assert bits(plain(x, return_router_logits=True)[1]) == bits(logits)
        assert isinstance(plain(x), Tensor)


def test_copies_count_for_themselves(layer, problem):
    x = tensor(problem.x[0])
    layer(x)
    twin = copy.deepcopy(layer)
    twin(x)
    assert torch.equal(twin.load, 2 * layer.load)


def test_a_checkpoints_layer_counts():
    layer, hidden_states = shipped_layer()
    x = tensor(hidden_states[:50])
    sizes = {name: getattr(layer, name) for name in SIZES}
    with flashmoe.Context(max_tokens=50, dtype=layer.dtype.name, **sizes) as ctx, torch.no_grad():
        module = MoE.from_layer(ctx, layer, count_load=True)
        y = module(x)
        assert module.load.sum() == 50 * layer.top_k
        plain = MoE.from_layer(ctx, layer)
        assert plain.load is None and bits(plain(x)) == bits(y)


@pytest.mark.parametrize("recorded", [True, False])
def test_a_module_on_meta(layer, problem, recorded):
    x = tensor(problem.x[0]).to("meta")
    with torch.set_grad_enabled(recorded):
        y, logits = layer.to("meta")(x, return_router_logits=True)
    assert (y.device.type, logits.device.type, logits.shape) == ("meta", "meta", (17, E))


def test_a_module_takes_no_array_for_an_option(ctx, layer, problem):
    with pytest.raises(InvalidArgument, match=r"^count_load: expected .*, got array"):
        MoE(ctx, **SIZES, count_load=np.ones(2))
    with pytest.raises(InvalidArgument, match=r"^return_router_logits: expected .*, got array"):
        layer(tensor(problem.x[0]), return_router_logits=np.ones(2))
