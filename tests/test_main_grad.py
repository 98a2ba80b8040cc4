"""Gradients that are added to the caller's float32 buffers, `main_grad`, compared with those that PyTorch adds up."""

from __future__ import annotations

from typing import Any

import flashmoe
import flashmoe.nn
import pytest
import torch
from torch.utils.checkpoint import checkpoint

SIZES = {"hidden": 40, "intermediate": 24, "experts": 8, "top_k": 3}
BIASED = {"router_bias": True, "expert_bias": True}
SHARED = {"shared_intermediate": 48, "shared_gate": True}
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "biased": BIASED,
    "transposed, interleaved": BIASED | {"transposed": True, "interleaved": True},
    "shared": SHARED,
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def layer_of(dtype: str, **options: Any) -> flashmoe.nn.MoE:
    """A layer that keeps a context of its own."""
    ctx = flashmoe.Context(
        max_tokens=64, dtype=dtype, shared_intermediate=options.get("shared_intermediate", 0), **SIZES
    )
    torch.manual_seed(5)
    layer = flashmoe.nn.MoE(ctx, **SIZES, **options)
    with torch.no_grad():
        for name, each in layer.named_parameters():
            if name.endswith("bias"):
                each.uniform_(-0.5, 0.5)
    return layer


def inputs(dtype: str, count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(9 + 10 * n, 40, generator=generator).to(DTYPES[dtype]) for n in range(count)]


def step(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Makes a forward and a backward pass. Returns x's gradient; parameters' gradients go to their `grad` or buffer."""
    x = x.clone().requires_grad_()
    layer(x).float().square().sum().backward()
    assert x.grad is not None
    return x.grad


def give_buffers(layer: flashmoe.nn.MoE, fill: Any = torch.zeros_like) -> dict[str, torch.Tensor]:
    layer.main_grad = True
    for each in layer.parameters():
        each.main_grad = fill(each.detach(), dtype=torch.float32)
    return {name: each.main_grad for name, each in layer.named_parameters()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_one_pass_adds_what_would_be_rounded(options: dict[str, Any], dtype: str):
    """A gradient in `grad` is that in the buffer, rounded once to the parameter's type."""
    layer, (x,) = layer_of(dtype, **options), inputs(dtype, 1)
    of_x = step(layer, x)
    plain = {name: each.grad for name, each in layer.named_parameters()}
    layer.zero_grad()
    sums = give_buffers(layer)
    assert torch.equal(step(layer, x), of_x)
    for name, each in layer.named_parameters():
        assert each.grad is None, name
        assert sums[name].any() and torch.equal(sums[name].to(each.dtype), plain[name]), name
    matrix = sums["experts.gate_up_proj"]
    assert (dtype == "float32") == torch.equal(matrix.to(DTYPES[dtype]).float(), matrix)


@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_passes_add_up(options: dict[str, Any]):
    """In float32, buffers have the bits of PyTorch's own sums. Both sums begin with the same random numbers."""
    layer, microbatches = layer_of("float32", **options), inputs("float32", 3)
    generator = torch.Generator().manual_seed(8)
    begin = {name: torch.randn(each.shape, generator=generator) for name, each in layer.named_parameters()}
    for name, each in layer.named_parameters():
        each.grad = begin[name].clone()
    for x in microbatches:
        step(layer, x)
    plain = {name: each.grad for name, each in layer.named_parameters()}
    layer.zero_grad()
    sums = give_buffers(layer)
    for name, each in sums.items():
        each.copy_(begin[name])
    versions = {name: each._version for name, each in sums.items()}
    for x in microbatches:
        step(layer, x)
    for name, each in sums.items():
        assert torch.equal(each, plain[name]), name
        assert each._version == versions[name] + 3, name


@pytest.mark.parametrize("how", [{}, {"context_fn": flashmoe.nn.saving_contexts}], ids=["computed again", "saved"])
def test_of_a_checkpointed_layer(how: dict[str, Any]):
    layer, (x,) = layer_of("bfloat16"), inputs("bfloat16", 1)
    plain = give_buffers(layer)
    step(layer, x)
    sums = give_buffers(layer)
    step(lambda x: checkpoint(layer, x, use_reentrant=False, **how), x)
    assert all(torch.equal(each, plain[name]) for name, each in sums.items())


def test_frozen_parameters_need_no_buffer():
    layer, (x,) = layer_of("float32"), inputs("float32", 1)
    sums = give_buffers(layer)
    layer.gate.weight.requires_grad_(False)
    del layer.gate.weight.main_grad
    step(layer, x)
    assert not sums["gate.weight"].any() and sums["experts.down_proj"].any()


BAD = {
    "none": (None, "got none"),
    "a list": ([0.0], "got list"),
    "another type": (torch.zeros(8, 40, 24, dtype=torch.bfloat16), "got .* bfloat16 on cpu"),
    "another shape": (torch.zeros(8, 24, 40), r"got \[8, 24, 40\] float32"),
    "strides": (
        torch.zeros(8, 24, 40).transpose(1, 2),
        r"got \[8, 40, 24\] float32 on cpu with strides \[960, 1, 40\]",
    ),
    "another device": (torch.zeros(8, 40, 24, device="meta"), "got .* on meta"),
}


@pytest.mark.parametrize("buffer", BAD)
def test_a_buffer_that_does_not_fit_is_refused(buffer: str):
    """A wrong buffer is refused before the call. If it replaces a right one later, the backward pass refuses it."""
    layer, (x,) = layer_of("float32"), inputs("float32", 1)
    give_buffers(layer)
    right = layer.experts.down_proj.main_grad
    wrong, said = BAD[buffer]
    expected = r"down_proj.main_grad: expected \[8, 40, 24\] float32 on cpu, contiguous, " + said
    layer.experts.down_proj.main_grad = wrong
    with pytest.raises(flashmoe.InvalidArgument, match=expected):
        layer(x)
    layer.experts.down_proj.main_grad = right
    y = layer(x)
    layer.experts.down_proj.main_grad = wrong
    with pytest.raises(flashmoe.InvalidArgument, match=expected):
        y.sum().backward()
    layer.experts.down_proj.main_grad = right
    step(layer, x)
    assert right.any()


@pytest.mark.filterwarnings("ignore")
def test_under_a_compiler_it_is_refused():
    layer, (x,) = layer_of("float32"), inputs("float32", 1)
    give_buffers(layer)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="main_grad"):
        torch.compile(layer, fullgraph=True, backend="aot_eager")(x)


def test_without_gradients_no_buffer_is_asked_for():
    layer, (x,) = layer_of("float32"), inputs("float32", 1)
    expected = layer(x)
    layer.main_grad = True
    with torch.no_grad():
        assert torch.equal(layer(x), expected)
