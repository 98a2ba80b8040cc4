"""Derivatives that FlashMoE does not have: torch.func's gradients, batched gradients, second ones. Errors say so."""

from __future__ import annotations

from collections.abc import Iterator

import flashmoe
import pytest

torch = pytest.importorskip("torch")
from flashmoe.nn import MoE  # noqa: E402

SIZES = {"hidden": 16, "intermediate": 12, "experts": 4, "top_k": 2}


@pytest.fixture
def layer() -> Iterator[MoE]:
    with flashmoe.Context(max_tokens=64, dtype="float32", **SIZES) as ctx:
        yield MoE(ctx, **SIZES)


X = torch.randn(3, 16)


def penalty(layer):
    x = X.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(layer(x).pow(2).sum(), x, create_graph=True)
    gradient.pow(2).sum().backward()


def to_main_grad(layer):
    layer.main_grad = True
    for parameter in layer.parameters():
        parameter.main_grad = torch.zeros_like(parameter)
    layer(X).pow(2).sum().backward(create_graph=True)


def scalar(layer):
    return lambda x: layer(x).pow(2).sum()


SECOND, TRANSFORMS = "FlashMoE has no second derivatives", "FlashMoE has no gradients within transforms of torch.func"


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize(
    ("derive", "message"),
    [
        (penalty, SECOND),
        (to_main_grad, SECOND),
        (lambda layer: torch.autograd.functional.hessian(scalar(layer), X), SECOND),
        (lambda layer: torch.autograd.functional.hvp(scalar(layer), X, X), SECOND),
        (lambda layer: torch.func.grad(scalar(layer))(X), TRANSFORMS),
        (lambda layer: torch.func.vjp(layer, X)[1](X), TRANSFORMS),
        (lambda layer: torch.func.jacrev(layer)(X), TRANSFORMS),
        (lambda layer: torch.vmap(torch.func.grad(scalar(layer)))(X[:, None]), TRANSFORMS),
        (lambda layer: torch.vmap(layer)(X[:, None]), TRANSFORMS),
        (lambda layer: torch.autograd.functional.jacobian(layer, X, vectorize=True), TRANSFORMS),
    ],
)
def test_the_error_says_what_there_is_not(layer, derive, message):
    with pytest.raises(NotImplementedError, match=message):
        derive(layer)
    assert torch.autograd.functional.jacobian(scalar(layer), X).shape == X.shape  # first derivatives still work


def test_a_graph_that_nobody_derives_again(layer):
    """Gradients are the same whether or not autograd makes a graph for second derivatives."""
    found = []
    for create_graph in (False, True):
        x = X.clone().requires_grad_()
        found.append(torch.autograd.grad(layer(x).sum(), x, create_graph=create_graph)[0].detach())
    assert torch.equal(*found)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_without_gradients(layer):
    with torch.no_grad():
        assert torch.equal(torch.vmap(layer)(X[:, None])[:, 0], torch.cat([layer(row[None]) for row in X]))
