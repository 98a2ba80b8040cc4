"""`flashmoe.nn.MoE` reads parameters of submodules that it does not call: it refuses hooks there that would not run."""

from __future__ import annotations

import copy

import flashmoe
import flashmoe.nn
import pytest
import torch
from torch.nn.utils import parametrize

READ = ("gate", "shared_expert", "shared_expert_gate")


@pytest.fixture(scope="module")
def ctx():
    with flashmoe.Context(
        max_tokens=16, hidden=32, intermediate=24, experts=4, top_k=2, dtype="float32", shared_intermediate=24
    ) as made:
        yield made


@pytest.fixture
def layer(ctx):
    torch.manual_seed(0)
    return flashmoe.nn.MoE(ctx, 32, 24, 4, 2, shared_intermediate=24, shared_gate=True)


def wrapped(layer, name):
    setattr(layer, name, torch.nn.Sequential(getattr(layer, name)))


def subclassed(layer, name):
    module = getattr(layer, name)
    module.__class__ = type("Adapted", (type(module),), {"forward": lambda self, *_: None})


CHANGES = {
    "a forward hook, ": lambda layer, name: getattr(layer, name).register_forward_hook(lambda *_: None),
    "a forward pre-hook, ": lambda layer, name: getattr(layer, name).register_forward_pre_hook(lambda *_: None),
    "a backward hook, ": lambda layer, name: getattr(layer, name).register_full_backward_hook(lambda *_: None),
    "a backward pre-hook, ": lambda layer, name: getattr(layer, name).register_full_backward_pre_hook(lambda *_: None),
    "a forward of its own, ": lambda layer, name: setattr(getattr(layer, name), "forward", lambda *_: None),
    "a Sequential": wrapped,
    "a Adapted": subclassed,
}


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("change", CHANGES)
def test_what_would_not_run_is_refused(layer, name, change):
    x = torch.randn(3, 32)
    layer(x)
    CHANGES[change](layer, name)
    with pytest.raises(flashmoe.InvalidArgument, match=rf"^{name}: expected a .* does not call it, got {change}"):
        layer(x)


def test_a_hook_that_is_gone_does_not_matter(layer):
    x = torch.randn(3, 32)
    expected = layer(x)
    layer.gate.register_forward_hook(lambda *_: None).remove()
    assert torch.equal(layer(x), expected)


@pytest.mark.parametrize(
    ("module", "name"), [("gate", "weight"), ("shared_expert", "down_proj"), ("shared_expert_gate", "weight")]
)
def test_a_parametrization_is_computed(layer, module, name):
    class Doubled(torch.nn.Module):
        def forward(self, weight):
            return weight * 2.0

    plain, x = copy.deepcopy(layer), torch.randn(3, 32)
    with torch.no_grad():
        getattr(getattr(plain, module), name).mul_(2.0)
    parametrize.register_parametrization(getattr(layer, module), name, Doubled())
    assert torch.equal(layer(x), plain(x))
    layer(x).sum().backward(), plain(x).sum().backward()
    original = getattr(getattr(layer, module).parametrizations, name).original
    assert torch.equal(original.grad, 2.0 * getattr(getattr(plain, module), name).grad)


def test_hooks_on_the_experts_run(layer):
    x = torch.randn(3, 32)
    layer.experts.register_forward_hook(lambda module, args, output: output * 0)
    assert layer(x).abs().max() == 0


def test_adapted_experts_are_not_moved(layer):
    parametrize.register_parametrization(layer.experts, "down_proj", torch.nn.Identity())
    with pytest.raises(flashmoe.InvalidArgument, match=r"^experts: expected Experts .* got ParametrizedExperts"):
        layer.move(None)
    layer.experts = torch.nn.Sequential(layer.experts)
    with pytest.raises(flashmoe.InvalidArgument, match=r"^experts: expected Experts .* got Sequential"):
        layer.move(None)
