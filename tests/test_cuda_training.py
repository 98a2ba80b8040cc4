"""What PyTorch's operators add to the kernels of a backward pass on a GPU, on tensors of the host."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from flashmoe.arguments import Tensors  # noqa: E402
from flashmoe.engines import cuda_training  # noqa: E402

T, H, E, K = 37, 24, 5, 2


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch):
    """PyTorch has products of bfloat16 in float32 on GPUs alone."""

    def product(left: Any, right: Any) -> Any:
        assert left.dtype == right.dtype == torch.bfloat16
        return (left.double() @ right.double()).float()

    monkeypatch.setattr(cuda_training, "_product", product)


def tensors_of(dtype: torch.dtype, **more: Any) -> Tensors:
    numbers = torch.Generator().manual_seed(7)
    given = {"x": (T, H), "router": (E, H), "down_bias": (E, H)}
    made = {name: torch.randn(shape, generator=numbers).to(dtype) for name, shape in given.items()} | more
    return Tensors(**{name: made.get(name) for name in Tensors._fields})


def parts_of(values: torch.Tensor) -> torch.Tensor:
    """[T, E] float32 as the kernel stores them, [T, LOGIT_PARTS, E] bfloat16."""
    parts, rest = [], values
    for _ in range(cuda_training.LOGIT_PARTS):
        parts.append(rest.bfloat16())
        rest = rest - parts[-1].float()
    assert not rest.any()  # they are all of it
    return torch.stack(parts, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_comes_through_the_router(dtype):
    tensors, logits = tensors_of(dtype), torch.randn(T, E, generator=torch.Generator().manual_seed(8)) * 1e-3
    x = torch.randn(T, H, generator=torch.Generator().manual_seed(9)).to(dtype)
    bias = torch.zeros(E)
    wanted = {"x": x.clone(), "router": torch.zeros(E, H), "router_bias": bias}
    computed = cuda_training.Computed(wanted["x"], torch.zeros(T, K), None, parts_of(logits))
    cuda_training.finish(tensors, wanted, computed)
    exact = logits.double()
    by_router = x.double() + exact @ tensors.router.double()
    unit = torch.finfo(dtype).eps  # x is rounded once more
    assert ((wanted["x"].double() - by_router).abs() <= unit * by_router.abs()).all()
    of_router = exact.T @ tensors.x.double()
    size = exact.T.abs() @ tensors.x.double().abs()
    assert ((wanted["router"].double() - of_router).abs() <= 4 * 2.0**-24 * size).all()
    assert ((bias.double() - exact.sum(0)).abs() <= 2.0**-24 * exact.sum(0).abs() + 1e-15).all()


def test_what_biases_owe_to_combine_weights():
    tensors = tensors_of(torch.bfloat16, router=None)
    ids = torch.stack([torch.arange(T) % E, (torch.arange(T) + 2) % E], 1).int()
    dropped = torch.rand(T, K, generator=torch.Generator().manual_seed(3)) < 0.3
    dy = torch.randn(T, H, generator=torch.Generator().manual_seed(4)).bfloat16()
    by_bias = cuda_training.weights_by_bias(tensors, {"y": dy}, ids.where(~dropped, ~ids))
    expected = torch.einsum("th,tkh->tk", dy.double(), tensors.down_bias.double()[ids.long()]).where(~dropped, 0.0)
    assert torch.allclose(by_bias, expected, rtol=1e-12, atol=1e-12)
    kernels = torch.randn(T, K, generator=torch.Generator().manual_seed(5))
    wanted = {"topk_weights": torch.zeros(T, K)}
    cuda_training.finish(tensors, wanted, cuda_training.Computed(dy, kernels, by_bias, None))
    assert torch.equal(wanted["topk_weights"], (kernels + by_bias).float())
    assert cuda_training.weights_by_bias(tensors_of(torch.bfloat16, down_bias=None), {"y": dy}, ids) is None


def test_rows_that_were_counted():
    """Three ranks, two experts: sizes of what is kept, and where each expert's rows begin."""
    tokens, received = [5, 0, 9], [4, 0, 0]  # this is the last rank
    rows = 3, 2, 0, 0, 1, 7
    counts = torch.tensor([*tokens, *received, *rows], dtype=torch.int32)
    kept, first = cuda_training.counted_rows(counts, 3, 17)
    assert kept == cuda_training.KeptRows(rows=13, received=4, pitch=9, call=17)
    assert first.tolist() == [0, 4, 13] and first.dtype == torch.int32


def test_a_rank_without_experts_has_no_rows():
    kept, first = cuda_training.counted_rows(torch.tensor([7, 3, 0, 0], dtype=torch.int32), 2, 1)
    assert kept == cuda_training.KeptRows(0, 0, 7, 1) and first.tolist() == [0]
