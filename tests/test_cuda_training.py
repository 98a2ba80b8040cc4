"""The gradients that PyTorch's operators compute outside of a GPU's kernels if a layer has biases, here on host
tensors; and the size of what a call on a GPU keeps."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import flashmoe.pytorch.operator  # noqa: E402, F401
from flashmoe import _ffi  # noqa: E402
from flashmoe.engines import cuda_training  # noqa: E402
from flashmoe.spec import Options  # noqa: E402
from flashmoe.spec.tensors import Tensors  # noqa: E402

T, H, E, K = 37, 24, 5, 2


def tensors_of(**more: Any) -> Tensors:
    numbers = torch.Generator().manual_seed(7)
    made = {"x": torch.randn(T, H, generator=numbers), "down_bias": torch.randn(E, H, generator=numbers)}
    made = {name: each.bfloat16() for name, each in made.items()} | more
    return Tensors(**{name: made.get(name) for name in Tensors._fields})


@pytest.mark.parametrize("accumulates", [False, True])
def test_the_gradient_of_a_routers_bias(accumulates):
    assert _ffi.library().cuda_logit_pitch(E) == 8
    of_logits = torch.randn(T, 8, generator=torch.Generator().manual_seed(8)).bfloat16()
    before = torch.randn(E, generator=torch.Generator().manual_seed(9))
    found = before.clone()
    cuda_training.bias_gradient(of_logits[:, :E], found, accumulates)
    exact = of_logits[:, :E].double().sum(0) + (before.double() if accumulates else 0.0)
    assert torch.equal(found, exact.float())


def test_what_biases_owe_to_combine_weights():
    tensors = tensors_of()
    ids = torch.stack([torch.arange(T) % E, (torch.arange(T) + 2) % E], 1).int()
    dropped = torch.rand(T, K, generator=torch.Generator().manual_seed(3)) < 0.3
    dy = torch.randn(T, H, generator=torch.Generator().manual_seed(4)).bfloat16()
    by_bias = cuda_training.weights_by_bias(tensors, {"y": dy}, ids.where(~dropped, ~ids))
    expected = torch.einsum("th,tkh->tk", dy.double(), tensors.down_bias.double()[ids.long()]).where(~dropped, 0.0)
    assert torch.allclose(by_bias, expected, rtol=1e-12, atol=1e-12)
    assert cuda_training.weights_by_bias(tensors_of(down_bias=None), {"y": dy}, ids) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_a_traced_call_keeps_has_its_size(dtype):
    """A call with a router on one GPU keeps pre-activations, ids and weights, and logits (docs/training.md, "What is
    kept"). PyTorch traces the call with fake tensors, which need no GPU."""
    tokens, hidden, inner, experts, top_k = 5, 64, 96, 8, 2
    with torch._subclasses.FakeTensorMode():
        shapes = ((tokens, hidden), (experts, 2 * inner, hidden), (experts, hidden, inner), (experts, hidden))
        x, up, down, router = (torch.empty(shape, device="cuda", dtype=dtype) for shape in shapes)
        *_, kept, counted = torch.ops.flashmoe.moe_kept(-1, x, up, down, router=router, top_k=top_k)
    assert kept.shape == (tokens * (top_k * 2 * inner * dtype.itemsize + top_k * 8 + experts * 4),)
    assert counted.shape == (0,)


@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize("shared", [0, 3])
def test_a_token_is_kept_in_as_many_bytes_as_its_rows_choices_and_logits_have(slices, shared):
    width = 16
    shapes = {"x": (T, H), "gate_up_proj": (E * slices, 2 * width, H), "down_proj": (E * slices, H, width)}
    shapes["router"] = (E, H)
    if shared:
        shapes |= {"shared_gate_up": (2 * shared * width, H), "shared_down": (H, shared * width)}
    made = {name: torch.empty(shape, dtype=torch.bfloat16, device="meta") for name, shape in shapes.items()}
    tensors = Tensors(**{name: made.get(name) for name in Tensors._fields})
    kept = cuda_training.kept_token_bytes(tensors, Options(activation="swiglu", top_k=K, slices=slices))
    rows, choices = K * slices + shared, K * slices + bool(shared)
    assert kept == rows * 2 * width * 2 + choices * (4 + 4) + E * 4
