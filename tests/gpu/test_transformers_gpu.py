"""Blocks of Transformers on a GPU: a call is one kernel, the host does not wait for it, and nothing is copied back."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

import pytest
import torch
from layers import compiled, gpu_operations
from torch import Tensor

pytestmark = pytest.mark.gpu

CALLS = 10
SIZES = {"hidden_size": 512, "moe_intermediate_size": 256, "num_experts_per_tok": 4}
GROUPED = {"n_routed_experts": 32, "n_shared_experts": 1, "n_group": 4, "topk_group": 2}
LONG = 1_000_000_000
"""Clock cycles for which the GPU is kept busy: about half a second."""

Made = tuple[torch.nn.Module, Callable[[Tensor], Tensor]]
"""A block, and the function that calls it, or its experts, with tokens [T, H]."""


@pytest.fixture
def transformers(exact_references: None) -> Any:
    """The package. A fixture imports it, so that without it each test is reported as skipped."""
    found = pytest.importorskip("transformers")
    pytest.importorskip("flashmoe.integrations.transformers", exc_type=ImportError)
    return found


def block_of(transformers: Any, folder: str, block: str, **sizes: Any) -> torch.nn.Module:
    """A block with random weights in bfloat16 and buffers in float32."""
    prefix = block.removesuffix("SparseMoeBlock").removesuffix("MoE")
    config = getattr(transformers, f"{prefix}Config")(**SIZES, **sizes)
    config._experts_implementation = "flashmoe"
    modules = __import__(f"transformers.models.{folder}.modeling_{folder}", fromlist=[block])
    torch.manual_seed(1)
    with torch.device("cuda"):
        made = getattr(modules, block)(config).eval()
    for parameter in made.parameters():
        parameter.data = torch.randn_like(parameter).mul_(parameter.shape[-1] ** -0.5).bfloat16()
    if (shared := shared_of(made)) is not None:
        place(shared, ("gate_proj", "up_proj"))
    return made


def shared_of(block: torch.nn.Module) -> torch.nn.Module | None:
    return getattr(block, "shared_expert", None) or getattr(block, "shared_experts", None)


def place(shared: torch.nn.Module, order: tuple[str, ...]) -> None:
    """Moves the weights of the named modules, all of one shape, to one piece of memory, in this order."""
    weights = [getattr(shared, name).weight for name in order]
    for weight, part in zip(weights, torch.stack([each.data for each in weights]), strict=True):
        weight.data = part


def fused(transformers: Any, *names: str, **sizes: Any) -> Made:
    from flashmoe.integrations.transformers import fuse

    block = fuse(block_of(transformers, *names, **sizes))
    return block, lambda x: block(x[None])[0]


def experts(transformers: Any) -> Made:
    """A block whose experts module is called by itself, with ids and weights as a router gives them."""
    block = block_of(transformers, "qwen3_moe", "Qwen3MoeSparseMoeBlock", num_experts=32)
    index = torch.arange(4, device="cuda").repeat(200, 1)
    weights = torch.full((200, 4), 0.25, device="cuda", dtype=torch.bfloat16)
    return block, lambda x: block.experts(x, index[: len(x)], weights[: len(x)])


MODULES: dict[str, Callable[[Any], Made]] = {
    "experts": experts,
    "fused": lambda t: fused(t, "qwen3_moe", "Qwen3MoeSparseMoeBlock", num_experts=32),
    "fused, shared expert with a gate": lambda t: fused(
        t, "qwen2_moe", "Qwen2MoeSparseMoeBlock", num_experts=32, shared_expert_intermediate_size=512
    ),
    "fused, groups and a shared expert": lambda t: fused(t, "deepseek_v3", "DeepseekV3MoE", **GROUPED),
}


@pytest.fixture(params=MODULES)
def made(request: pytest.FixtureRequest, transformers: Any) -> Made:
    """A block that has been called already, so that its kernels are loaded and its contexts made."""
    block, call = MODULES[request.param](transformers)
    with torch.no_grad():
        for tokens in (100, 1):
            call(tokens_of(tokens))
    torch.cuda.synchronize()
    return block, call


def tokens_of(count: int) -> Tensor:
    return torch.randn(count, SIZES["hidden_size"], device="cuda", dtype=torch.bfloat16)


@contextmanager
def no_waiting() -> Iterator[None]:
    """In this context, PyTorch raises an error where it would wait for the GPU, for example to copy from it."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@torch.no_grad()
@pytest.mark.parametrize("tokens", [1, 100])
@pytest.mark.parametrize("up", ["behind its gate", "before its gate"])
def test_a_block_is_one_kernel(made, tokens, up):
    """There is no copy and no fill beside the kernel, with one exception: if the up of a fused block's shared expert
    lies before its gate in memory, each call first copies the two into one matrix."""
    block, call = made
    x, copies = tokens_of(tokens), 0
    if (shared := shared_of(block)) is not None and up == "before its gate":
        place(shared, ("up_proj", "gate_proj"))
        copies = CALLS
        call(x)
    gpu_operations(lambda: x + 1)  # the profiler may do something of its own in its first run
    assert len(gpu_operations(lambda: x + 1)) == 1, "the profiler does not see a kernel of PyTorch's"
    seen = gpu_operations(lambda: [call(x) for _ in range(CALLS)])
    others = [name for name in seen if "flashmoe_" not in name]
    assert len(seen) == CALLS + copies and len(others) == copies, seen
    assert all("CatArrayBatchedCopy" in name for name in others), seen


@torch.no_grad()
@pytest.mark.parametrize("tokens", [1, 100])
def test_the_host_does_not_wait(made, tokens):
    """Neither PyTorch (it would raise an error) nor this package waits: calls return while earlier work still runs."""
    call, x = made[1], tokens_of(tokens)
    expected = call(x)
    torch.cuda.synchronize()
    with no_waiting():
        with pytest.raises(RuntimeError, match="synchroniz"):
            expected.sum().item()
        torch.cuda._sleep(LONG)
        before = torch.cuda.Event()
        before.record()
        results = [call(x) for _ in range(CALLS)]
        waited = before.query()
    torch.cuda.synchronize()
    assert not waited
    assert all(torch.equal(y, expected) for y in results)


@torch.no_grad()
def test_what_is_compiled_has_no_break(made):
    block, call = made
    x = tokens_of(100)
    expected = call(x)
    torch._dynamo.reset()
    explained = torch._dynamo.explain(call)(x)
    assert (explained.graph_break_count, explained.graph_count) == (0, 1), explained
    got = compiled(call, "aot_eager")(x)
    if shared_of(block) is None:
        assert torch.equal(got, expected)
    else:  # a compiled block computes the shared expert by its own module, which rounds three times more
        off = (got - expected).float().norm() / expected.float().norm()
        assert float(off) < 4 * 2.0**-8
