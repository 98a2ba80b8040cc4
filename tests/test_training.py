"""Gradients of the CPU engine: against the float64 reference within derived bounds, on one to four ranks."""

from __future__ import annotations

import gc
import os
from dataclasses import replace
from typing import Any

import flashmoe
import flashmoe.nn
import flashmoe.slices
import numpy as np
import pytest
import torch
from flashmoe.contexts import memory
from flashmoe.launch import RankPool
from flashmoe.spec import ACTIVATIONS, GATED
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_options import CLAMPED, WITH_SHARED
from test_slices import Sliced
from torch.utils.checkpoint import checkpoint
from training import EXPERTS, as_tensor, check, gradients_of, kept_bytes, train, trainable

SIZES = {"hidden": 48, "intermediate": 24, "experts": 16, "top_k": 4}
DEEPSEEK = {"score": "sigmoid", "choice_bias": True, "groups": 4, "top_groups": 2, "routed_scale": 2.5}
LAYERS: dict[str, dict[str, Any]] = {
    "swiglu": {},
    "relu": {"activation": "relu"},
    "relu2": {"activation": "relu2"},
    "gelu": {"activation": "gelu"},
    "silu": {"activation": "silu"},
    "geglu": {"activation": "geglu"},
    "gelu_tanh": {"activation": "gelu_tanh"},
    "geglu_tanh": {"activation": "geglu_tanh"},
    "clamped": CLAMPED,
    "not normalised": {"renormalize": False},
    "sigmoid, not normalised": {"score": "sigmoid", "renormalize": False},
    "DeepSeek-V3": DEEPSEEK,
    "gpt-oss": CLAMPED | {"interleaved": True, "transposed": True},
    "interleaved": {"interleaved": True},
    "given": {"fused": False},
    "given, weights on the input": {"fused": False, "weights_on_input": True},
    "a capacity": {"capacity_factor": 0.5, "skew": 3.0},
    "direct": {"return_mode": "direct"},
    "reduced": {"return_mode": "reduced"},
    "one expert a token": {"top_k": 1},
}


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_layers(pool: RankPool, options: dict[str, Any], count: int):
    sizes = {**SIZES, "biases": (True,) * 3} | options
    problem, grads = trainable(3, [37, 0, 5, 64][:count], **sizes)
    check(problem, grads, train(pool, problem, grads)[0])


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("options", WITH_SHARED.values(), ids=WITH_SHARED)
def test_shared_experts(pool: RankPool, options: dict[str, Any], count: int):
    problem, grads = trainable(4, [40, 7][:count], **SIZES | options)
    check(problem, grads, train(pool, problem, grads)[0])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("options", [{}, {"fused": False}, CLAMPED, {"activation": "gelu"}], ids=str)
def test_half_types(pool: RankPool, options: dict[str, Any], dtype: str):
    problem, grads = trainable(5, [65, 7], dtype=dtype, biases=(True,) * 3, **SIZES, **options)
    check(problem, grads, train(pool, problem, grads)[0])


def test_pre_activations_beyond_float16_have_the_slope_of_their_end(pool: RankPool):
    """Pre-activations too large for float16 are kept as its largest number. The activation clamps that number too, so
    its slope is that of the exact value, whereas the slope at an infinity would be NaN."""
    problem, grads = trainable(14, [40], dtype="float16", fused=False, **SIZES, **CLAMPED)
    steep = problem.gate_up_proj.astype(np.float32)
    steep[::2] *= 5e4
    problem = replace(problem, x=[4 * each for each in problem.x], gate_up_proj=steep.astype(np.float16))
    z = np.einsum("th,eih->tei", problem.x[0].astype(np.float32), steep)
    assert 0.3 < (np.abs(z) > 65504.0).mean() < 0.5
    check(problem, grads, train(pool, problem, grads)[0])


def test_a_score_near_one(pool: RankPool):
    """If a score is near 1, the gradient of its logit is a difference of almost equal numbers, in which float32 loses
    half of the digits. The bound must allow for that."""
    sizes = {"hidden": 2, "intermediate": 1, "experts": 4, "top_k": 1}
    problem, grads = trainable(30, [2], **sizes, activation="relu", renormalize=False)
    problem = replace(problem, router=4 * problem.router)
    parts = check(problem, grads, train(pool, problem, grads)[0])
    assert parts["router"] > 0.0


# Bits


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("options", [{}, {"return_mode": "reduced"}, {"shared": 2, "shared_gate": True}], ids=str)
def test_bits_are_those_of_every_run(pool: RankPool, options: dict[str, Any], count: int):
    """Neither random delays (`perturb`) nor another shape of the tiles changes the bits of the gradients."""
    problem, grads = trainable(6, [70, 33, 0, 50][:count], **SIZES, **options)
    runs = train(pool, problem, grads, times=6, perturb=(0, 1, 2, 3, 4, 5))
    runs += train(pool, problem, grads, times=6, tile=(16, 24), perturb=(0, 6, 7, 8, 9, 10))
    for run in runs[1:]:
        for found, expected in zip(run, runs[0], strict=True):
            assert found.keys() == expected.keys()
            for name, each in found.items():
                assert each.tobytes() == expected[name].tobytes(), name


def test_processors_change_no_bit(pool: RankPool):
    problem, grads = trainable(7, [70, 33], **SIZES)
    one, three = (
        train(pool, problem, grads, limits=problem.limits() | {"processors": processors})[0] for processors in (1, 3)
    )
    for found, expected in zip(one, three, strict=True):
        assert all(each.tobytes() == expected[name].tobytes() for name, each in found.items())


# Random layers


@st.composite
def layers(draw: st.DrawFn) -> tuple[int, list[int], dict[str, Any]]:
    ranks = draw(st.sampled_from([1, 1, 2, 4]))
    experts = draw(st.integers(ranks, 12))
    options: dict[str, Any] = {
        "hidden": draw(st.integers(1, 70)),
        "intermediate": draw(st.integers(1, 40)),
        "experts": experts,
        "top_k": draw(st.integers(1, min(experts, 6))),
        "dtype": draw(st.sampled_from(["float32", "float32", "bfloat16"])),
        "activation": draw(st.sampled_from(ACTIVATIONS)),
        "fused": draw(st.booleans()),
        "transposed": draw(st.booleans()),
        "weights_on_input": draw(st.booleans()),
        "skew": draw(st.sampled_from([0.0, 0.0, 5.0])),
        "return_mode": draw(st.sampled_from(["direct", "reduced"])),
    }
    if options["activation"] in GATED:
        options["interleaved"] = draw(st.booleans())
    if options["activation"] == "clamped_swiglu":
        options |= {"limit": 0.75, "alpha": 1.702, "up_offset": 1.0}
    if options["fused"]:
        options |= {"renormalize": draw(st.booleans()), "score": draw(st.sampled_from(["softmax", "sigmoid"]))}
    if draw(st.booleans()):
        options["shared"] = draw(st.integers(1, 3))
        options["shared_gate"] = draw(st.booleans()) and not options["weights_on_input"]
    else:
        options["biases"] = draw(st.tuples(*[st.booleans()] * 3))
    if draw(st.booleans()):
        options["capacity_factor"] = draw(st.sampled_from([0.3, 1.0]))
    if draw(st.booleans()):
        options["placement"] = [*range(ranks), *draw(st.lists(st.integers(0, ranks - 1), min_size=experts - ranks,
                                                             max_size=experts - ranks))]  # fmt: skip
    tokens = draw(st.lists(st.integers(0, 40), min_size=ranks, max_size=ranks))
    return draw(st.integers(0, 2**31)), tokens, options


@settings(max_examples=int(os.environ.get("FLASHMOE_EXAMPLES", "500")) * 3 // 25, deadline=None)
@given(layers())
def test_random_layers(pool: RankPool, layer: tuple[int, list[int], dict[str, Any]]):
    seed, tokens, options = layer
    problem, grads = trainable(seed, tokens, **options)
    check(problem, grads, train(pool, problem, grads)[0])


# Where experts are


def test_copies_have_gradients_of_their_own_tokens(pool: RankPool):
    """A copy's gradients are those of the tokens that are sent to it. The gradients of all copies of an expert add up
    to the expert's gradient."""
    placement: list[int | list[int]] = [[0, 1], 0, [1, 0], 1]
    problem, grads = trainable(8, [20, 30], **SIZES | {"experts": 4, "top_k": 2}, placement=placement)
    check(problem, grads, train(pool, problem, grads)[0])


@pytest.mark.parametrize("biases", [(False, False, False), (True, True, True)], ids=["plain", "biased"])
def test_slices(pool: RankPool, biases: tuple[bool, bool, bool]):
    """The slices' gradients are the gradients of the whole experts, cut into slices. Those of `down_bias` are 0 except
    for the first slice of an expert, because the other slices' `down_bias` must stay 0."""
    problem, grads = trainable(9, [20, 30], **SIZES | {"experts": 4, "top_k": 2}, biases=biases)
    whole = train(pool, problem, grads)[0]
    sliced = Sliced.of(problem, 2, [0, 1, 1, 0, 0, 1, 1, 0])
    found = train(pool, sliced, grads)[0]
    names = [name for name in EXPERTS if name in whole[0]]
    of_whole = {name: np.concatenate([of_rank[name] for of_rank in whole]) for name in names}
    expected = flashmoe.slices.cut(2, **of_whole)
    for rank, of_rank in enumerate(found):
        for name in names:
            part = expected[name][sliced.held_by(rank)]
            np.testing.assert_allclose(of_rank[name], part, rtol=1e-4, atol=1e-4, err_msg=name)
        for name in set(of_rank) - set(names) - {"y"}:
            np.testing.assert_allclose(of_rank[name], whole[rank][name], rtol=1e-4, atol=1e-4, err_msg=name)
    check(problem, grads, found, sliced=sliced)


# What training code does


def one_rank(seed: int = 10, tokens: int = 33, **options: Any) -> tuple[Any, list[np.ndarray], flashmoe.Context]:
    problem, grads = trainable(seed, [tokens], **SIZES | options)
    return problem, grads, flashmoe.Context(**problem.limits() | {"max_tokens": 64})


def kept_objects() -> int:
    return flashmoe._ffi.library().kept_calls()


def test_an_expert_without_rows_gets_zeros():
    problem, grads, ctx = one_rank(fused=False, biases=(False, True, True))
    problem.topk_ids[0][:] = [3, 1, 5, 9]
    found = gradients_of(ctx, problem.arguments(0), grads[0])
    for name in ("gate_up_proj", "down_proj", "gate_up_bias", "down_bias"):
        rows = found[name].reshape(16, -1)
        assert rows[[1, 3, 5, 9]].any(axis=1).all() and not np.delete(rows, [1, 3, 5, 9], axis=0).any()


def test_without_gradients_nothing_is_kept():
    problem, _, ctx = one_rank()
    tensors = {name: as_tensor(each) if isinstance(each, np.ndarray) else each
               for name, each in problem.arguments(0).items()}  # fmt: skip
    before = kept_objects()
    plain = flashmoe.moe(ctx, **tensors)
    tensors["x"].requires_grad_()
    y = flashmoe.moe(ctx, **tensors)
    assert kept_objects() == before + 1 and torch.equal(y, plain)
    with torch.no_grad():
        flashmoe.moe(ctx, **tensors)
    assert kept_objects() == before + 1
    y.sum().backward()
    del y
    assert kept_objects() == before


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", [{}, {"activation": "relu2"}, {"shared": 2}], ids=str)
def test_what_is_kept_is_what_is_planned(options: dict[str, Any], dtype: str):
    problem, _, ctx = one_rank(dtype=dtype, **options)
    tensors = {name: as_tensor(each) if isinstance(each, np.ndarray) else each
               for name, each in problem.arguments(0).items()}  # fmt: skip
    tensors["x"].requires_grad_()
    limits = {name: each for name, each in problem.limits().items() if name not in ("timeout", "return_mode")}
    activation = options.get("activation", "swiglu")
    plan = memory.plan_memory(ranks=1, training=True, activation=activation, **limits)
    assert kept_bytes(flashmoe.moe(ctx, **tensors)) == plan.kept_bytes
    rows = {term.name: term.elem_bytes for term in plan.terms if term.region == "kept"}["kept_rows"]
    width = 24 if "activation" in options else 48
    assert rows == width * (2 if dtype == "bfloat16" else 4) + 32


def _kept_on(rank: int, ranks: int, name: str) -> int:
    limits = {"max_tokens": 64, "dtype": "bfloat16"}
    with flashmoe.Context(rank=rank, ranks=ranks, name=name, **limits, **SIZES) as ctx:
        return kept_bytes(module_of(ctx)(torch.randn(64, 48).bfloat16()))


def test_ranks_keep_at_most_what_is_planned_of_even_loads(pool: RankPool):
    """The ranks together keep at most what is planned. They keep less if some tokens have no expert on some rank."""
    plan = memory.plan_memory(ranks=4, training=True, max_tokens=64, **SIZES)
    received = next(term.bytes for term in plan.terms if term.name == "kept_tokens")
    kept = sum(pool.call(_kept_on, [()] * 4))
    assert 4 * (plan.kept_bytes - received // 2) < kept <= 4 * plan.kept_bytes


def test_passes_in_any_order():
    """Any number of calls may lie between a forward pass and its backward pass, of any size."""
    problem, grads, ctx = one_rank()
    other, more, _ = one_rank(11, 64)
    expected = [gradients_of(ctx, each.arguments(0), grad[0]) for each, grad in ((problem, grads), (other, more))]
    leaves, results = [], []
    for each in (problem, other):
        tensors = {name: as_tensor(t) if isinstance(t, np.ndarray) else t for name, t in each.arguments(0).items()}
        leaves.append({name: t.requires_grad_() for name, t in tensors.items() if torch.is_tensor(t)})
        results.append(flashmoe.moe(ctx, **tensors))
    results[0].backward(as_tensor(grads[0]), retain_graph=True)
    results[1].backward(as_tensor(more[0]))
    for of_call, wanted in zip(leaves, expected, strict=True):
        assert all(np.array_equal(each.grad.numpy(), wanted[name]) for name, each in of_call.items())
    results[0].backward(as_tensor(grads[0]))  # the same backward pass again, whose gradients are added
    for name, each in leaves[0].items():
        assert np.array_equal(each.grad.numpy(), 2.0 * expected[0][name])


def module_of(ctx: flashmoe.Context, **options: Any) -> flashmoe.nn.MoE:
    torch.manual_seed(5)
    return flashmoe.nn.MoE(ctx, **SIZES, **options)


CHECKPOINTS = {"computed again": {}, "saved": {"context_fn": flashmoe.nn.saving_contexts}}


@pytest.mark.parametrize("how", CHECKPOINTS.values(), ids=CHECKPOINTS)
def test_a_checkpointed_layer_has_the_same_gradients(how: dict[str, Any]):
    _, _, ctx = one_rank()
    layer, x = module_of(ctx), torch.randn(20, 48, requires_grad=True)
    leaves = [x, *layer.parameters()]
    expected = torch.autograd.grad(layer(x).square().sum(), leaves)
    before = kept_objects()
    y = checkpoint(layer, x, use_reentrant=False, **how)
    assert kept_objects() - before == len(how)
    found = torch.autograd.grad(y.square().sum(), leaves)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.filterwarnings("ignore")
def test_a_checkpointed_block_compiles(backend: str):
    """What calls keep is saved (`saving_contexts`), because PyTorch 2.13 cannot compile code that computes an operator
    with effects again."""
    _, _, ctx = one_rank()
    layer, x = module_of(ctx), torch.randn(20, 48, requires_grad=True)

    def block(x: torch.Tensor) -> torch.Tensor:
        return x + checkpoint(layer, 2.0 * x, use_reentrant=False, context_fn=flashmoe.nn.saving_contexts)

    leaves = [x, *layer.parameters()]
    expected = torch.autograd.grad(block(x).square().sum(), leaves)
    torch._dynamo.reset()
    y = torch.compile(block, fullgraph=True, backend=backend)(x)
    found = torch.autograd.grad(y.square().sum(), leaves)
    for each, of_block in zip(found, expected, strict=True):
        torch.testing.assert_close(each, of_block)


def test_losses_of_router_logits():
    _, _, ctx = one_rank()
    layer, x = module_of(ctx), torch.randn(20, 48)
    y, logits = layer(x, return_router_logits=True)
    z_loss = torch.logsumexp(logits, -1).square().mean()
    (of_weight,) = torch.autograd.grad(z_loss, layer.gate.weight, retain_graph=True)
    plain = torch.nn.functional.linear(x, layer.gate.weight)
    (expected,) = torch.autograd.grad(torch.logsumexp(plain, -1).square().mean(), layer.gate.weight)
    torch.testing.assert_close(of_weight, expected)
    both = torch.autograd.grad(z_loss + y.sum(), layer.gate.weight, retain_graph=True)[0]
    alone = torch.autograd.grad(y.sum(), layer.gate.weight)[0]
    torch.testing.assert_close(both, of_weight + alone)


def test_frozen_weights_get_none():
    _, _, ctx = one_rank()
    layer = module_of(ctx).requires_grad_(False)
    x = torch.randn(20, 48, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad.any() and all(each.grad is None for each in layer.parameters())


def test_weights_that_have_changed_are_refused():
    _, _, ctx = one_rank()
    layer = module_of(ctx)
    y = layer(torch.randn(20, 48))
    with torch.no_grad():
        layer.experts.down_proj.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_what_is_kept_must_be_there():
    """A hook that copies saved tensors loses what the forward pass kept, because only the original tensor owns that."""
    _, _, ctx = one_rank()
    layer = module_of(ctx)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved):
        y = layer(torch.randn(20, 48))
    gc.collect()
    with pytest.raises(flashmoe.FlashMoEError, match="what the forward pass kept is gone"):
        y.sum().backward()


def test_a_hundred_steps_of_changing_size():
    """The loss falls, nothing is left behind, and the second and the hundredth step are as exact as the first."""
    _, _, ctx = one_rank()
    layer = module_of(ctx)
    before = kept_objects()
    target = torch.nn.Linear(48, 48).requires_grad_(False)
    optimizer = torch.optim.Adam(layer.parameters(), lr=3e-3)
    losses = []
    for step in range(100):
        x = torch.randn(1 + (7 * step) % 64, 48)
        loss = (layer(x) - target(x)).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step in (1, 99):
            _check_module(ctx, layer)
    del loss
    assert kept_objects() == before
    assert np.mean(losses[-20:]) < 0.9 * np.mean(losses[:20])


def _check_module(ctx: flashmoe.Context, layer: flashmoe.nn.MoE) -> None:
    """Checks gradients of a call with the layer's present weights against the reference."""
    problem, grads = trainable(12, [30], **SIZES)
    state = {name: each.detach().numpy() for name, each in layer.state_dict().items()}
    problem = replace(
        problem,
        router=state["gate.weight"],
        gate_up_proj=state["experts.gate_up_proj"],
        down_proj=state["experts.down_proj"],
    )
    check(problem, grads, [gradients_of(ctx, problem.arguments(0), grads[0])])


# Ranks that do not make the same passes


def _disagree(rank: int, ranks: int, name: str, how: str) -> str:
    limits = {"max_tokens": 32, "dtype": "float32", "timeout": 20.0}
    with flashmoe.Context(rank=rank, ranks=ranks, name=name, **limits, **SIZES) as ctx:
        layer = module_of(ctx)
        results = [layer(torch.randn(9, 48)) for _ in range(2)]
        try:
            if how == "another call":
                results[rank].sum().backward()
            elif rank == 0:
                results[0].sum().backward()
            else:
                layer(torch.randn(9, 48))
        except flashmoe.GroupError as error:
            return str(error)
    return ""


def _leave_one_alone(rank: int, ranks: int, name: str) -> str:
    """Rank 0 makes a backward pass, and rank 1 closes its context instead. Returns rank 0's error."""
    limits = {"max_tokens": 32, "dtype": "float32", "timeout": 2.0}
    with flashmoe.Context(rank=rank, ranks=ranks, name=name, **limits, **SIZES) as ctx:
        y = module_of(ctx)(torch.randn(9, 48))
        if rank == 0:
            with pytest.raises(flashmoe.PeerTimeout) as raised:
                y.sum().backward()
            return str(raised.value)
    return ""


def test_a_rank_without_the_backward_pass_is_named(pool: RankPool):
    said, _ = pool.call(_leave_one_alone, [()] * 2, ranks=2, timeout=60.0)
    assert said.startswith("rank 1 holds up call 2: ")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("another call", "compute the gradients of different calls"),
        ("a forward pass", "rank 0 is in a backward pass, rank 1 in a forward one"),
    ],
)
def test_ranks_that_disagree_are_told(pool: RankPool, how: str, message: str):
    for said in pool.call(_disagree, [(how,)] * 2, ranks=2, timeout=60.0):
        assert message in said
