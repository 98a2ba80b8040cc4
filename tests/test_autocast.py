"""Calls within torch.autocast: what is cast, what is not, and that training is about as exact as with linear layers."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import flashmoe
import numpy as np
import pytest

torch = pytest.importorskip("torch")
from flashmoe.nn import MoE  # noqa: E402
from loss_noise import Run, check_within_noise, parameters_of, run_of  # noqa: E402

T, H, I, E, K = 33, 32, 24, 6, 2
SIZES = {"hidden": H, "intermediate": I, "experts": E, "top_k": K}
DTYPES = [torch.bfloat16, torch.float16]
STEPS = 30


@pytest.fixture(scope="module")
def ctx():
    with flashmoe.Context(max_tokens=64, dtype="float32", shared_intermediate=I, **SIZES) as context:
        yield context


def within(dtype: torch.dtype) -> torch.autocast:
    return torch.autocast("cpu", dtype)


def tensors(**more: torch.Tensor) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(3)
    shapes = {"x": (T, H), "gate_up_proj": (E, 2 * I, H), "down_proj": (E, H, I), "router": (E, H)}
    shapes |= {"router_bias": (E,), "gate_up_bias": (E, 2 * I), "down_bias": (E, H)}
    return {name: torch.randn(shape, generator=made) / 4 for name, shape in shapes.items()} | more


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_call_is_that_of_cast_tensors_with_a_linear_layers_logits(ctx, dtype):
    """Results and gradients are equal bit for bit. Gradients have the types that their tensors had before the cast."""
    given, choice_bias = tensors(), torch.linspace(-1, 1, E)
    for each in given.values():
        each.requires_grad_()
    by_hand = {name: each.detach().to(dtype).requires_grad_() for name, each in given.items()}
    with within(dtype):
        y = flashmoe.moe(ctx, **given, choice_bias=choice_bias, top_k=K)
    expected = flashmoe.moe(ctx, **by_hand, choice_bias=choice_bias, top_k=K, round_logits=True)
    assert y.dtype is dtype and torch.equal(y, expected)
    y.float().square().sum().backward()
    expected.float().square().sum().backward()
    for name, each in given.items():
        assert each.grad.dtype is torch.float32
        assert torch.equal(each.grad, by_hand[name].grad.float()), name


def test_given_weights_stay_float32(ctx):
    given = {name: each for name, each in tensors().items() if not name.startswith("router")}
    weights, ids = torch.rand(T, K).softmax(1), torch.stack([torch.arange(T) % E, (torch.arange(T) + 1) % E], 1)
    with within(torch.bfloat16):
        y = flashmoe.moe(ctx, **given, topk_ids=ids, topk_weights=weights)
        halves = flashmoe.moe(ctx, **given, topk_ids=ids, topk_weights=weights.half())
    cast = {name: each.bfloat16() for name, each in given.items()}
    assert torch.equal(y, flashmoe.moe(ctx, **cast, topk_ids=ids, topk_weights=weights))
    assert torch.equal(halves, flashmoe.moe(ctx, **cast, topk_ids=ids, topk_weights=weights.half().float()))


def test_arrays_and_disabled_autocast_are_not_touched(ctx):
    given = tensors()
    expected = flashmoe.moe(ctx, **given, top_k=K)
    with within(torch.bfloat16):
        of_numpy = flashmoe.moe(ctx, **{name: each.numpy() for name, each in given.items()}, top_k=K)
        with torch.autocast("cpu", enabled=False):
            disabled = flashmoe.moe(ctx, **given, top_k=K)
    assert np.array_equal(of_numpy, expected.numpy())
    assert torch.equal(disabled, expected)


def test_quantised_experts_are_not_touched():
    with flashmoe.Context(max_tokens=64, weight_dtype="float8_e4m3fn", **SIZES) as context:
        layer = MoE(context, *SIZES.values())
        x = torch.randn(T, H).bfloat16()
        with torch.no_grad():
            expected = layer(x)
            with within(torch.float16):
                assert torch.equal(layer(x), expected)
            layer.gate.float()
            of_float32 = layer(x)
            with within(torch.bfloat16):
                assert torch.equal(layer(x), of_float32)


@pytest.mark.parametrize("of_x", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_module_of_float32_in_bfloat16(ctx, of_x, compiled):
    """x is in bfloat16, as after a layer that autocast casts, or in float32, as after one that it does not cast. The
    logits are those of a linear layer within autocast."""
    torch.manual_seed(0)
    layer = MoE(ctx, *SIZES.values(), shared_intermediate=I, shared_gate=True)
    x = torch.randn(T, H).bfloat16().to(of_x)
    run = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    with within(torch.bfloat16):
        y, logits = run(x, return_router_logits=True)
        assert torch.equal(logits, torch.nn.functional.linear(x, layer.gate.weight).float())
    narrow = copy.deepcopy(layer).bfloat16()
    narrow._options = narrow._options._replace(round_logits=True)
    assert y.dtype is torch.bfloat16 and torch.equal(y, narrow(x.bfloat16()))
    y.float().sum().backward()
    assert all(each.grad.dtype is torch.float32 for each in layer.parameters())


def test_main_grad_of_another_type_is_refused(ctx):
    layer = MoE(ctx, *SIZES.values())
    layer.main_grad = True
    for each in layer.parameters():
        each.main_grad = torch.zeros_like(each)
    with (
        within(torch.bfloat16),
        pytest.raises(flashmoe.InvalidArgument, match=r"^main_grad: expected False within autocast, which casts"),
    ):
        layer(torch.randn(T, H))


def test_no_cast_outlives_its_use(ctx):
    """Outside of autograd, neither the layer nor autocast's own cache keeps a cast: the next call sees weights that
    have changed in place."""
    layer, x = MoE(ctx, *SIZES.values()), torch.randn(T, H)
    with torch.no_grad(), within(torch.bfloat16):
        first = layer(x)
        layer.experts.down_proj.mul_(2.0)
        assert torch.equal(layer(x), 2.0 * first)


# Training


class Model(torch.nn.Module):
    """A model with the layer between an embedding and a head, and with a residual stream."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.embed, self.layer, self.head = torch.nn.Embedding(17, H), layer, torch.nn.Linear(H, 17)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        return self.head(x + self.layer(x))


class Eager(torch.nn.Module):
    """The layer with the same weights, computed by PyTorch's operations alone."""

    def __init__(self, layer: MoE) -> None:
        super().__init__()
        self.gate, self.experts = copy.deepcopy(layer.gate), copy.deepcopy(layer.experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        linear = torch.nn.functional.linear
        weights, ids = linear(x, self.gate.weight).float().softmax(1).topk(K, 1)
        weights = weights / weights.sum(1, keepdim=True)
        parts = []
        for expert in range(E):
            gate, up = linear(x, self.experts.gate_up_proj[expert]).chunk(2, 1)
            parts.append(linear(torch.nn.functional.silu(gate) * up, self.experts.down_proj[expert]))
        chosen = torch.stack(parts, 1).gather(1, ids[:, :, None].expand(-1, -1, H))
        return (chosen * weights[:, :, None]).sum(1)


def trained(model: torch.nn.Module, dtype: torch.dtype) -> Run:
    """Trains the model for `STEPS` steps: within autocast, in float16 with a scaled loss; in float32 without
    autocast."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16)
    ids, losses, before = torch.arange(64) * 7 % 17, [], parameters_of(model)
    for _ in range(STEPS):
        with within(dtype) if dtype in DTYPES else nullcontext():
            loss = torch.nn.functional.cross_entropy(model(ids).float(), (ids * 5 + 3) % 17)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return run_of(losses, before, parameters_of(model))


@pytest.mark.parametrize("dtype", DTYPES)
def test_training_is_that_of_linear_layers(ctx, dtype):
    torch.manual_seed(1)
    layer = MoE(ctx, *SIZES.values())
    eager = Model(Eager(layer))
    exact, ours = copy.deepcopy(eager), copy.deepcopy(eager)
    ours.layer = layer
    of_float32 = trained(exact, torch.float32)
    assert of_float32.losses[-1] < 0.7 * of_float32.losses[0]
    check_within_noise(trained(ours, dtype), trained(eager, dtype), of_float32)
