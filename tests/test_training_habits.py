"""What training code does around the layer, on ranks of torch.distributed over gloo: DDP, FSDP2, DTensors,
checkpointing, microbatches, many steps.

The reference is the whole model in PyTorch, in float64, with all ranks' tokens.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable
from typing import Any

import flashmoe
import flashmoe.nn
import numpy as np
import pytest
import torch
from flashmoe.launch import RankPool
from gloo import Gloo
from processes import Processes, processes
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from training import check, kept_bytes, train, trainable

__all__ = ["processes"]  # a fixture

SIZES = {"hidden": 48, "intermediate": 24, "experts": 8, "top_k": 3}
TOKENS = [19, 33, 7, 24]
ROUNDING = 32 * 2.0**-24
"""The largest error that a gradient in float32 may have, relative to its norm. A gradient is the result of six products
of up to a hundred terms each, and each product adds half of a rounding error times the square root of the number of its
terms."""


@pytest.fixture(scope="module")
def pool():
    with RankPool(8) as pool:
        yield pool


@pytest.fixture
def on_ranks(pool: RankPool, tmp_path):
    """A function that calls ``fn(rank, *args)`` in so many ranks of torch.distributed, and returns their results."""
    return lambda ranks, fn, *args: Gloo(pool, tmp_path)(ranks, fn, *args)


# A block around the layer, and what its gradients are


class Block(torch.nn.Module):
    def __init__(self, ctx: flashmoe.Context, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.into = torch.nn.Linear(48, 48)
        self.moe = flashmoe.nn.MoE(ctx, **SIZES)
        self.out = torch.nn.Linear(48, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.into(x)
        y = checkpoint(self.moe, hidden, use_reentrant=False) if self.recompute else self.moe(hidden)
        return x + self.out(y)


def whole(seed: int = 1) -> dict[str, torch.Tensor]:
    """The block's state, with all experts."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "into.weight": (48, 48),
        "into.bias": (48,),
        "moe.gate.weight": (8, 48),
        "moe.experts.gate_up_proj": (8, 48, 48),
        "moe.experts.down_proj": (8, 48, 24),
        "out.weight": (48, 48),
        "out.bias": (48,),
    }
    return {name: torch.randn(shape, generator=generator) * shape[-1] ** -0.5 for name, shape in shapes.items()}


def batch_of(rank: int, microbatch: int = 0) -> torch.Tensor:
    return torch.randn(TOKENS[rank], 48, generator=torch.Generator().manual_seed(100 * microbatch + rank))


def loss_of(y: torch.Tensor) -> torch.Tensor:
    return (y + 0.1 * y**2).mean()


def reference(ranks: int, microbatches: int = 1) -> dict[str, torch.Tensor]:
    """The gradients of the mean of the ranks' losses, added up over microbatches."""
    state = {name: each.double().requires_grad_() for name, each in whole().items()}
    for microbatch in range(microbatches):
        for rank in range(ranks):
            x = batch_of(rank, microbatch).double()
            hidden = F.linear(x, state["into.weight"], state["into.bias"])
            scores, ids = F.linear(hidden, state["moe.gate.weight"]).softmax(-1).topk(3)
            weights = torch.zeros(len(x), 8, dtype=torch.float64).scatter(1, ids, scores / scores.sum(-1, keepdim=True))
            gate, up = torch.einsum("th,eih->tei", hidden, state["moe.experts.gate_up_proj"]).chunk(2, dim=-1)
            rows = torch.einsum("tei,ehi->teh", F.silu(gate) * up, state["moe.experts.down_proj"])
            y = x + F.linear((weights[..., None] * rows).sum(1), state["out.weight"], state["out.bias"])
            (loss_of(y) / ranks).backward()
    return {name: each.grad for name, each in state.items() if each.grad is not None}


def joined(**more: Any) -> flashmoe.Context:
    return flashmoe.Context.from_torch(max_tokens=64, dtype="float32", processors=1, **SIZES, **more)


def block_of(ctx: flashmoe.Context, recompute: bool = False) -> Block:
    block = Block(ctx, recompute)
    block.load_state_dict(whole())
    return block


def expert_names(block: torch.nn.Module) -> list[str]:
    return [name for name, _ in block.named_parameters() if "experts" in name]


def all_close(block: torch.nn.Module, ids: list[int], expected: dict[str, torch.Tensor], experts_scale: float) -> None:
    """Each parameter's gradient is that of the reference, after gradients of experts are divided by `experts_scale`."""
    for name, each in block.named_parameters():
        name = name.removeprefix("module.")
        grad = each.grad.full_tensor() if hasattr(each.grad, "full_tensor") else each.grad
        wanted = expected[name]
        if "experts" in name:
            grad, wanted = grad / experts_scale, wanted[ids]
        assert grad.shape == wanted.shape, name
        off = (grad.double() - wanted).norm() / wanted.norm()
        assert off <= ROUNDING, f"{name}: {off:.2e}"


# Losses of the router


IDLE = 6
"""This expert and those with higher ids, which are all experts of the last rank, are never chosen."""
LOADS = [19, 33, 0, 24]
"""How many tokens each rank has in the test of losses of the router."""


def _router_losses(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The sum of three losses of one rank's tokens, 0 without tokens: a loss of y, a load-balancing loss (Switch
    Transformers, equation 4, for K choices) and a z loss (ST-MoE, equation 5)."""
    count, experts = max(1, len(logits)), logits.shape[1]
    chosen = logits.topk(SIZES["top_k"]).indices
    share = torch.bincount(chosen.flatten(), minlength=experts).to(logits.dtype) / count
    balance = experts * (share * logits.softmax(-1).sum(0) / count).sum()
    z = torch.logsumexp(logits, -1).square().sum() / count
    return (y + 0.1 * y**2).sum() / count + 0.3 * balance + 0.2 * z


def _layer_with_idle_experts() -> dict[str, torch.Tensor]:
    """The layer's state. The first feature of every x is 1, and the router's weights for it keep idle experts from
    being chosen."""
    state = {name.removeprefix("moe."): each for name, each in whole().items() if name.startswith("moe.")}
    state["gate.weight"][IDLE:, 0] = -30.0
    return state


def _tokens_of(rank: int) -> torch.Tensor:
    x = torch.randn(LOADS[rank], 48, generator=torch.Generator().manual_seed(rank))
    x[:, 0] = 1.0
    return x


def _with_router_losses(rank: int) -> dict[str, torch.Tensor | None]:
    """A rank's gradients, and the ids of its experts."""
    with joined() as ctx:
        layer = flashmoe.nn.MoE(ctx, **SIZES)
        layer.load_state_dict(_layer_with_idle_experts())
        x = _tokens_of(rank).requires_grad_()
        y, logits = layer(x, return_router_logits=True)
        _router_losses(logits, y).backward()
        found = {name: each.grad for name, each in layer.named_parameters()}
        return found | {"x": x.grad, "ids": torch.tensor(layer.experts.ids)}


def test_losses_of_router_logits_on_four_ranks(on_ranks: Callable[..., Any]):
    """Gradients are those of the whole layer in float64. A rank without tokens and experts without rows get zeros, not
    None."""
    state = {name: each.double().requires_grad_() for name, each in _layer_with_idle_experts().items()}
    xs = [_tokens_of(rank).double().requires_grad_() for rank in range(4)]
    routers = []
    for x in xs:
        router = state["gate.weight"].detach().requires_grad_()
        logits = F.linear(x, router)
        scores, ids = logits.softmax(-1).topk(SIZES["top_k"])
        assert not (ids >= IDLE).any()
        weights = torch.zeros_like(logits).scatter(1, ids, scores / scores.sum(-1, keepdim=True))
        gate, up = torch.einsum("th,eih->tei", x, state["experts.gate_up_proj"]).chunk(2, dim=-1)
        rows = torch.einsum("tei,ehi->teh", F.silu(gate) * up, state["experts.down_proj"])
        _router_losses(logits, (weights[..., None] * rows).sum(1)).backward()
        routers.append(router.grad)

    for rank, found in enumerate(on_ranks(4, _with_router_losses)):
        ids = found.pop("ids").tolist()
        expected = {"x": xs[rank].grad, "gate.weight": routers[rank]}
        expected |= {name: state[name].grad[ids] for name in found if name.startswith("experts.")}
        assert expected.keys() == found.keys() and all(each is not None for each in found.values())
        for name, wanted in expected.items():
            assert found[name].shape == wanted.shape, name
            off = (found[name].double() - wanted).norm()
            assert off <= ROUNDING * wanted.norm(), f"rank {rank}, {name}: {off:.2e} of {wanted.norm():.2e}"
        # Gradients that should be 0 are exactly 0: the router's on the rank without tokens, and those of the last
        # rank's experts, which have no rows.
        assert (rank == 2) != bool(found["gate.weight"].any())
        assert (ids[0] >= IDLE) != bool(found["experts.down_proj"].any()) and (rank == 3) == (ids[0] >= IDLE)


# DDP


def _under_ddp(rank: int, ranks: int, microbatches: int, recompute: bool) -> bool:
    from torch.nn.parallel import DistributedDataParallel

    with joined() as ctx:
        block = block_of(ctx, recompute)
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(block, expert_names(block))
        wrapped = DistributedDataParallel(block)
        for microbatch in range(microbatches - 1):
            with wrapped.no_sync():
                loss_of(wrapped(batch_of(rank, microbatch))).backward()
        loss_of(wrapped(batch_of(rank, microbatches - 1))).backward()
        all_close(block, block.moe.experts.ids, reference(ranks, microbatches), ranks)
    return True


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_ddp_with_experts_left_out(on_ranks: Callable[..., Any], microbatches: int, recompute: bool):
    assert on_ranks(4, _under_ddp, 4, microbatches, recompute) == [True] * 4


# FSDP2


def _under_fsdp(rank: int, ranks: int, microbatches: int, recompute: bool) -> bool:
    from torch.distributed.fsdp import fully_shard

    with joined() as ctx:
        block = block_of(ctx, recompute)
        fully_shard(block, ignored_params={each for name, each in block.named_parameters() if "experts" in name})
        block.set_force_sum_reduction_for_comms(True)  # gloo cannot reduce to a mean
        for microbatch in range(microbatches):
            loss_of(block(batch_of(rank, microbatch))).backward()
        all_close(block, block.moe.experts.ids, reference(ranks, microbatches), ranks)
    return True


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_fsdp_around_a_block(on_ranks: Callable[..., Any], microbatches: int, recompute: bool):
    assert on_ranks(4, _under_fsdp, 4, microbatches, recompute) == [True] * 4


def _experts_under_fsdp(rank: int, ranks: int) -> bool:
    """Each of two groups has all experts, spread over its two ranks. FSDP2 shards a rank's experts among the ranks that
    have the same experts."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "expert"))
    with joined(group=mesh["expert"].get_group()) as ctx:
        block = block_of(ctx)
        experts = fully_shard(block.moe.experts, mesh=mesh["replica"])
        fully_shard(block)
        for each in (experts, block):
            each.set_force_sum_reduction_for_comms(True)
        experts.set_gradient_divide_factor(float(ranks))
        loss_of(block(batch_of(rank))).backward()
        assert all(each.to_local().shape[0] == 2 for each in experts.parameters())
        all_close(block, experts.ids, reference(ranks), 1)
    return True


def test_fsdp_shards_experts_among_groups(on_ranks: Callable[..., Any]):
    assert on_ranks(4, _experts_under_fsdp, 4) == [True] * 4


# DTensors


def _of_dtensors(rank: int) -> bool:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = init_device_mesh("cpu", (2,))
    with joined() as ctx:
        plain = block_of(ctx).moe
        layer = copy.deepcopy(plain)
        for module, placement in ((layer.experts, Shard(0)), (layer.gate, Replicate())):
            for name, each in list(module.named_parameters(recurse=False)):
                local = DTensor.from_local(each.detach(), mesh, [placement], run_check=False)
                setattr(module, name, torch.nn.Parameter(local))
        assert layer.experts.down_proj.shape[0] == 8
        results = []
        for each in (plain, layer):
            x = batch_of(rank).requires_grad_()
            y = each(x)
            y.square().sum().backward()
            results.append((y, x.grad))
        assert all(map(torch.equal, *results))
        of_layer = dict(layer.named_parameters())
        for name, each in plain.named_parameters():
            found = of_layer[name].grad
            assert isinstance(found, DTensor) and torch.equal(found.to_local(), each.grad), name
    return True


def test_parameters_that_are_dtensors(on_ranks: Callable[..., Any]):
    assert on_ranks(2, _of_dtensors) == [True] * 2


# Microbatches


def _in_another_order(rank: int) -> bool:
    with joined() as ctx:
        block = block_of(ctx)
        for order in ((0, 1), (1, 0)):
            losses = [loss_of(block(batch_of(rank, microbatch))) for microbatch in range(2)]
            before = [each.grad for each in block.parameters()]
            block.zero_grad()
            for microbatch in order:
                losses[microbatch].backward()
        found = [each.grad for each in block.parameters()]
        assert all(map(torch.equal, found, before))  # a sum of two gradients has the same bits in either order
    return True


def test_backward_passes_in_another_order_than_microbatches(on_ranks: Callable[..., Any]):
    assert on_ranks(2, _in_another_order) == [True] * 2


def _buffers_of_ranks(rank: int, ranks: int) -> bool:
    """Each expert's `main_grad` has the sum of the gradients of two microbatches, of all ranks' tokens."""
    with joined() as ctx:
        block = block_of(ctx)
        block.moe.main_grad = True
        for each in block.moe.parameters():
            each.main_grad = torch.zeros(each.shape)
        for microbatch in range(2):
            loss_of(block(batch_of(rank, microbatch))).backward()
        expected = reference(ranks, 2)
        for name, each in block.moe.experts.named_parameters():
            wanted = ranks * expected[f"moe.experts.{name}"][block.moe.experts.ids]
            off = (each.main_grad.double() - wanted).norm() / wanted.norm()
            assert each.grad is None and off <= ROUNDING, f"{name}: {off:.2e}"
    return True


def test_main_grads_of_several_ranks(on_ranks: Callable[..., Any]):
    assert on_ranks(4, _buffers_of_ranks, 4) == [True] * 4


# Many steps, many runs, many ranks

STEPS = 1000


def _resident() -> int:
    with open("/proc/self/statm") as sizes:
        return int(sizes.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _step_on(rank: int, ranks: int, name: str) -> tuple[int, int, int]:
    """The bytes by which the process's memory has grown since step 20, the most bytes that a step has kept, and the
    number of calls whose kept memory is left."""
    sizes = {"hidden": 64, "intermediate": 64, "experts": 8, "top_k": 2}
    limits = {"max_tokens": 256, "dtype": "float32", "processors": 1, "timeout": 120.0}
    with flashmoe.Context(rank=rank, ranks=ranks, name=name, **limits, **sizes) as ctx:
        torch.manual_seed(3)
        layer = flashmoe.nn.MoE(ctx, **sizes)
        optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
        x = torch.randn(256, 64)
        since = most = 0
        for step in range(STEPS):
            y = layer(x[: (97 * step + 50 * rank) % 257])
            most = max(most, kept_bytes(y))
            optimizer.zero_grad()
            y.square().mean().backward() if len(y) else y.sum().backward()
            optimizer.step()
            if step == 20:
                since = _resident()
        del y
        return _resident() - since, most, flashmoe._ffi.library().kept_calls()


def test_a_thousand_steps_of_changing_size_leave_nothing_behind(pool: RankPool):
    """Nothing kept is left, and memory grows by less than a fortieth of what the steps would keep together if each kept
    as much as the largest."""
    for grown, most, left in pool.call(_step_on, [()] * 2, ranks=2, timeout=240.0):
        assert left == 0
        assert most > 200_000 and grown < STEPS * most // 40, f"{grown:,} of {most:,}"


@pytest.mark.parametrize("return_mode", ["direct", "reduced"])
def test_bits_of_eight_ranks_over_fifty_perturbed_runs(pool: RankPool, return_mode: str):
    sizes = SIZES | {"experts": 16, "return_mode": return_mode}
    problem, grads = trainable(13, [20, 9, 0, 31, 14, 1, 26, 17], dtype="bfloat16", **sizes)
    limits = problem.limits() | {"processors": 1}
    runs = train(pool, problem, grads, times=51, limits=limits, perturb=range(51))
    check(problem, grads, runs[0])
    for run in runs[1:]:
        for found, expected in zip(run, runs[0], strict=True):
            assert found.keys() == expected.keys()
            assert all(each.tobytes() == expected[name].tobytes() for name, each in found.items())


# A rank that is gone


def _backward_for_ever(pipe: Any, name: str, rank: int, redispatch: bool) -> None:
    limits = {"max_tokens": 64, "dtype": "float32", "processors": 1, "timeout": 2.0, "redispatch": redispatch}
    with flashmoe.Context(rank=rank, ranks=3, name=name, **limits, **SIZES) as ctx:
        torch.manual_seed(rank)
        y = flashmoe.nn.MoE(ctx, **SIZES)(torch.randn(64, 48)).sum()
        pipe.send("forward")
        pipe.recv()
        try:
            while True:
                y.backward(retain_graph=True)
        except flashmoe.FlashMoEError as error:
            pipe.send(error)
        pipe.recv()


@pytest.mark.parametrize(("delay", "redispatch"), [(0.0, False), (0.05, True), (0.2, False)])
def test_a_rank_that_is_killed_in_a_backward_pass_is_named(processes: Processes, delay: float, redispatch: bool):
    ranks = [processes.start(_backward_for_ever, processes.name, rank, redispatch) for rank in range(3)]
    assert [each.hear(60.0) for each in ranks] == ["forward"] * 3
    for each in ranks:
        each.tell("go")
    time.sleep(delay)
    ranks[1].signal(9)
    for rank in (0, 2):
        error = ranks[rank].hear()
        assert type(error) is flashmoe.PeerTimeout
        assert str(error).startswith("rank 1 holds up call ") and f"its process {ranks[1].pid} is gone" in str(error)


def test_reference_is_that_of_the_layer():
    """On a rank alone, which has all experts, the block's gradients are those of `reference`."""
    with flashmoe.Context(max_tokens=64, dtype="float32", **SIZES) as ctx:
        block = block_of(ctx)
        loss_of(block(batch_of(0))).backward()
        all_close(block, list(range(8)), reference(1), 1)
        assert np.isfinite(block.moe.gate.weight.grad.numpy()).all()
