"""The buffers of `MoE`, `choice_bias` and `load`: their types and values, whatever is done with the module."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import flashmoe
import pytest

torch = pytest.importorskip("torch")
from flashmoe.nn import MoE, saving_contexts  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

SIZES = {"hidden": 16, "intermediate": 12, "experts": 4, "top_k": 2}
E, T = 4, 10


@pytest.fixture
def ctx() -> Iterator[flashmoe.Context]:
    with flashmoe.Context(max_tokens=32, dtype="float32", **SIZES, count_load=True) as ctx:
        yield ctx


@pytest.fixture
def make(ctx) -> Callable[[str], MoE]:
    def made(device: str = "cpu") -> MoE:
        with torch.device(device):
            return MoE(ctx, **SIZES, choice_bias=True, count_load=True)

    return made


BIAS = torch.tensor([0.1, -0.3, 1e-7, 1.0 + 2**-20])
"""Values that a type of 16 bits cannot all hold exactly."""


@pytest.mark.parametrize(
    "cast",
    [
        lambda module: module.bfloat16(),
        lambda module: module.half(),
        lambda module: module.double(),
        lambda module: module.to(torch.bfloat16),
        lambda module: module.to("cpu", torch.bfloat16),
        lambda module: module.to(torch.zeros(1, dtype=torch.float16)),
        lambda module: module.bfloat16().float(),
        lambda module: module.type(torch.bfloat16),
        lambda module: torch.nn.Sequential(module).bfloat16()[0],
    ],
)
def test_the_bias_of_the_choice_keeps_its_bits(make, cast):
    module = make()
    module.gate.choice_bias.copy_(BIAS)
    module.load.fill_(3)
    cast(module)
    assert module.gate.choice_bias.dtype == torch.float32 and torch.equal(module.gate.choice_bias, BIAS)
    assert "choice_bias" in dict(module.gate.named_buffers())
    assert module.load.dtype == torch.int64 and module.load.sum() == 3 * E
    assert "load" not in module.state_dict()


def test_a_module_that_was_cast_computes(ctx, make):
    module = make()
    module.gate.choice_bias.copy_(BIAS)
    module.bfloat16()
    assert module(torch.randn(T, 16).bfloat16()).dtype == torch.bfloat16
    assert module.gate.weight.dtype == torch.bfloat16 and module.load.sum() == 2 * T


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_memory_of_no_values_then_defined(make, dtype):
    """As frameworks make large models: the module is made on device meta, moved without values, then reset."""
    module = make("meta")
    if dtype is not None:
        module.to(dtype)
    module.to_empty(device="cpu")
    for buffer, garbage in ((module.gate.choice_bias, float("nan")), (module.load, 77)):
        buffer.fill_(garbage)
    module.reset_parameters()
    assert module.gate.choice_bias.dtype == torch.float32 and (module.gate.choice_bias == 0).all()
    assert module.load.dtype == torch.int64 and (module.load == 0).all()
    assert all(each.isfinite().all() and each.std() > 0 for each in module.parameters())
    assert module(torch.randn(T, 16, dtype=dtype)).isfinite().all() and module.load.sum() == 2 * T


def test_each_module_reset_by_itself(make):
    module = make("meta").to_empty(device="cpu")
    module.gate.choice_bias.fill_(float("nan"))
    for each in module.modules():
        if hasattr(each, "reset_parameters"):
            each.reset_parameters()
    assert (module.gate.choice_bias == 0).all() and (module.load == 0).all()


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_is_loaded(make, assign, dtype):
    source = make()
    source.gate.choice_bias.copy_(BIAS)
    state = source.state_dict() | {"gate.choice_bias": BIAS.to(dtype)}
    module = make("meta" if assign else "cpu")
    module.load_state_dict(state, assign=assign)
    assert module.gate.choice_bias.dtype == torch.float32
    assert torch.equal(module.gate.choice_bias, BIAS.to(dtype).float())
    assert module.load.dtype == torch.int64 and not module.load.is_meta and (module.load == 0).all()
    x = torch.randn(T, 16)
    y = module(x)
    if dtype is torch.float32:
        assert torch.equal(y, source(x))
    assert module.load.sum() == 2 * T


@pytest.mark.parametrize(
    "how",
    [{"use_reentrant": False}, {"use_reentrant": True}, {"use_reentrant": False, "context_fn": saving_contexts}],
    ids=["again", "reentrant", "saved"],
)
def test_a_call_that_is_made_again_counts_once(ctx, make, how):
    module, x = make(), torch.randn(T, 16, requires_grad=True)
    with torch.no_grad():
        module(x)
    once = module.load.clone()
    module.load.zero_()
    for _ in range(2):
        checkpoint(module, x, **how).sum().backward()
    assert torch.equal(module.load, 2 * once)

    def counted_by_the_context(rows):
        experts = module.experts
        return flashmoe.moe(ctx, rows, experts.gate_up_proj, experts.down_proj, router=module.gate.weight, top_k=2)

    ctx.load(clear=True)
    counted_by_the_context(x.detach())
    once = ctx.load(clear=True)
    checkpoint(counted_by_the_context, x, **how).sum().backward()
    assert (ctx.load() == once).all()
