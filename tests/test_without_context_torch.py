"""Calls of PyTorch's tensors and of `flashmoe.nn.MoE` without a context, with gradients, autocast and compilers."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import flashmoe
import pytest
from flashmoe import InvalidArgument
from flashmoe.checkpoint import shipped_layer
from flashmoe.contexts import kept

torch = pytest.importorskip("torch")
from flashmoe.nn import MoE  # noqa: E402

pytestmark = pytest.mark.usefixtures("released")

H, I, E, K = 64, 32, 8, 2


@pytest.fixture
def ctx() -> Iterator[flashmoe.Context]:
    sizes = {"max_tokens": 64, "hidden": H, "intermediate": I, "experts": E, "top_k": K, "shared_intermediate": I}
    with flashmoe.Context(**sizes, dtype="float32") as ctx:
        yield ctx


def tensors(trains: bool = False) -> dict[str, Any]:
    torch.manual_seed(0)
    shapes = {"x": (12, H), "gate_up_proj": (E, 2 * I, H), "down_proj": (E, H, I), "router": (E, H)}
    return {name: (torch.randn(shape) * 0.1).requires_grad_(trains) for name, shape in shapes.items()}


def modules(ctx: flashmoe.Context, **options: Any) -> tuple[MoE, MoE]:
    """A layer without a context, and a layer with a context and the same weights."""
    alone, of_ctx = MoE(H, I, E, K, **options), MoE(ctx, H, I, E, K, **options)
    of_ctx.load_state_dict(alone.state_dict())
    return alone, of_ctx


def test_a_function_and_its_gradients(ctx):
    """The bits are those of a call with a context, also if calls of so many other shapes come between the forward pass
    and the backward pass that the layer's own context has gone."""
    results = []
    for first, others in (((), False), ((), True), ((ctx,), False)):
        given = tensors(trains=True)
        y = flashmoe.moe(*first, **given, top_k=K)
        if others:
            for experts in range(E + 1, E + 1 + kept.MOST):
                flashmoe.moe(tensors()["x"], **layer_of(experts), top_k=K)
        y.square().sum().backward()
        results.append([y.detach(), *(each.grad for each in given.values())])
    for each in zip(*results, strict=True):
        assert all(torch.equal(each[0], other) for other in each[1:])


def layer_of(experts: int) -> dict[str, Any]:
    """A layer of so many experts, 2 E at most."""
    return {name: torch.cat([each, each])[:experts] for name, each in tensors().items() if name != "x"}


def test_leading_dimensions_and_their_gradients(ctx):
    gradients = []
    for shape in ((12, H), (2, 6, H)):
        given = tensors(trains=True)
        y = flashmoe.moe(**given | {"x": given["x"].reshape(shape)}, top_k=K)
        assert y.shape == shape
        y.square().sum().backward()
        gradients.append([each.grad for each in given.values()])
    assert all(torch.equal(*each) for each in zip(*gradients, strict=True))


@pytest.mark.parametrize("options", [{}, {"shared_intermediate": I, "shared_gate": True}, {"router_bias": True}])
def test_a_module(ctx, options):
    alone, of_ctx = modules(ctx, **options)
    x = torch.randn(3, 4, H)
    assert torch.equal(alone(x), of_ctx(x))
    assert all(torch.equal(*each) for each in zip(alone(x, True), of_ctx(x, True), strict=True))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(alone(x), of_ctx(x))
    many = torch.randn(500, H)
    assert torch.equal(alone(many)[:60], of_ctx(many[:60]))
    for copied in (copy.deepcopy(alone), pickle.loads(pickle.dumps(alone))):
        assert torch.equal(copied(x), of_ctx(x))


def test_a_module_of_another_type(ctx):
    """A module has PyTorch's default type, and may be cast, as any."""
    assert MoE(H, I, E, K).gate.weight.dtype is torch.float32
    alone, of_ctx = (each.bfloat16() for each in modules(ctx))
    x = torch.randn(5, H, dtype=torch.bfloat16)
    assert torch.equal(alone(x), of_ctx(x))


def test_a_module_from_a_layer():
    layer, x = shipped_layer()
    tokens = torch.from_numpy(x[:50].astype("float32")).bfloat16()
    y = MoE.from_layer(layer)(tokens)
    sizes = {"hidden": layer.hidden, "intermediate": layer.intermediate, "experts": layer.experts, "top_k": layer.top_k}
    with flashmoe.Context(max_tokens=50, **sizes) as ctx:
        assert torch.equal(y, MoE.from_layer(ctx, layer)(tokens))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(ctx, dynamic):
    alone, of_ctx = modules(ctx)
    given = tensors()
    x = given.pop("x")

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=dynamic)
    def function(x: torch.Tensor) -> torch.Tensor:
        return flashmoe.moe(x, given["gate_up_proj"], given["down_proj"], router=given["router"], top_k=K) + alone(x)

    for tokens in (12, 7, 9):
        rows = x[:tokens]
        expected = flashmoe.moe(ctx, rows, **given, top_k=K) + of_ctx(rows)
        assert torch.equal(function(rows), expected)


def test_without_values():
    y = MoE(H, I, E, K, dtype="bfloat16").to("meta")(torch.empty(5, H, dtype=torch.bfloat16, device="meta"))
    assert y.is_meta and y.shape == (5, H)


def test_what_a_module_refuses():
    for call, message in (
        (lambda: MoE(H, I, E, 9), r"top_k: expected an integer in \[1, 8\], got 9"),
        (lambda: MoE(H, I, E, K, slices=2), "slices: expected 1 with one rank, got 2"),
        (lambda: MoE(H, I, E, K, placement=[0] * 7 + [1]), "placement: expected "),
        (lambda: MoE("ctx", H, I, E, K), r"ctx: expected a flashmoe\.Context, got str"),
        (lambda: MoE(H, I, E, K)(torch.zeros(2, 32)), r"x: expected \[..., H=64\], got \[2, 32\]"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            call()
