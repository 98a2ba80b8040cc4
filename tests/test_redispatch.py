"""Backward passes that send x again (`redispatch`), so that forward passes need not keep other ranks' rows: the bits
of the gradients, the bytes that are kept, and the errors if ranks differ in the option."""

from __future__ import annotations

import os
from typing import Any

import flashmoe
import flashmoe.nn
import numpy as np
import pytest
import torch
from flashmoe.launch import RankPool
from hypothesis import given, settings
from problems import Problem
from test_slices import Sliced
from test_training import LAYERS, SIZES, kept_objects, layers
from training import check, kept_bytes, train, trainable

AGAIN = ({"redispatch": False}, {"redispatch": True})


def both_ways(pool: RankPool, problem: Problem, grads: list[np.ndarray], times: int = 2, **how: Any) -> Any:
    """Makes `times` calls in one context, in turn without and with `redispatch`. Checks that the gradients of all calls
    have the same bits, and returns those of the first call."""
    limits = problem.limits() | {"redispatch": True}
    runs = train(pool, problem, grads, times=times, limits=limits, options=AGAIN, **how)
    for run in runs[1:]:
        for found, expected in zip(run, runs[0], strict=True):
            assert found.keys() == expected.keys()
            for name, each in found.items():
                assert each.tobytes() == expected[name].tobytes(), name
    return runs[0]


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", ["gpt-oss", "given, weights on the input", "a capacity", "direct", "reduced"])
def test_bits_are_those_of_keeping(pool: RankPool, name: str, count: int):
    problem, grads = trainable(3, [37, 0, 5, 64][-count:], **{**SIZES, "biases": (True,) * 3} | LAYERS[name])
    check(problem, grads, both_ways(pool, problem, grads))


@pytest.mark.parametrize("options", [{"shared": 2, "shared_gate": True}, {"dtype": "bfloat16"}], ids=str)
def test_shared_experts_and_half_types(pool: RankPool, options: dict[str, Any]):
    problem, grads = trainable(4, [40, 7, 1], **SIZES | options)
    check(problem, grads, both_ways(pool, problem, grads))


def test_copies_and_slices(pool: RankPool):
    placement: list[int | list[int]] = [[0, 1], 0, [1, 0], 1]
    sizes = SIZES | {"experts": 4, "top_k": 2}
    both_ways(pool, *trainable(8, [20, 30], **sizes, placement=placement))
    problem, grads = trainable(9, [20, 30], **sizes)
    both_ways(pool, Sliced.of(problem, 2, [0, 1, 1, 0, 0, 1, 1, 0]), grads)


@pytest.mark.parametrize("count", [2, 4])
def test_bits_are_those_of_every_run(pool: RankPool, count: int):
    """Neither random delays (`perturb`) nor another shape of the tiles changes the bits of the gradients."""
    problem, grads = trainable(6, [70, 33, 0, 50][:count], **SIZES, return_mode="reduced")
    first = both_ways(pool, problem, grads, 11, perturb=range(11))
    other = both_ways(pool, problem, grads, 11, perturb=range(11, 22), tile=(16, 24))
    for found, expected in zip(other, first, strict=True):
        assert all(each.tobytes() == expected[name].tobytes() for name, each in found.items())


@settings(max_examples=int(os.environ.get("FLASHMOE_EXAMPLES", "500")) // 50, deadline=None)
@given(layers())
def test_random_layers(pool: RankPool, layer: tuple[int, list[int], dict[str, Any]]):
    seed, tokens, options = layer
    both_ways(pool, *trainable(seed, tokens, **options))


# What is kept


def module_of(ctx: flashmoe.Context, seed: int, **options: Any) -> flashmoe.nn.MoE:
    torch.manual_seed(seed)
    return flashmoe.nn.MoE(ctx, **SIZES, **options)


def _kept_both_ways(rank: int, ranks: int, name: str, again: bool) -> tuple[int, int, list[int]]:
    """The bytes that a call keeps with the context's `redispatch` and with `redispatch=False`, and the ids of the
    experts that its tokens chose."""
    limits = {"max_tokens": 64, "dtype": "bfloat16", "redispatch": again}
    with flashmoe.Context(rank=rank, ranks=ranks, name=name, **limits, **SIZES) as ctx:
        torch.manual_seed(rank)
        x = torch.randn(64 - 13 * rank, 48).bfloat16()
        layer = module_of(ctx, 5)
        by_default = kept_bytes(layer(x))
        chosen = ctx.last_call.topk_ids
        return by_default, kept_bytes(module_of(ctx, 5, redispatch=False)(x)), chosen.tolist()


@pytest.mark.parametrize("ranks", [1, 4])
def test_less_is_kept_by_the_rows_of_other_ranks(pool: RankPool, ranks: int):
    found = pool.call(_kept_both_ways, [(True,)] * ranks, ranks=ranks)
    each = SIZES["experts"] // ranks
    sent = [[{expert // each for expert in token} for token in ids] for *_, ids in found]
    for rank, (again, keeping, _) in enumerate(found):
        received = sum(rank in to for source, tokens in enumerate(sent) if source != rank for to in tokens)
        assert keeping - again == received * 48 * 2
        assert (received > 0) == (ranks > 1)


def test_a_context_keeps_unless_it_is_told_otherwise(pool: RankPool):
    for by_default, keeping, _ in pool.call(_kept_both_ways, [(False,)] * 2, ranks=2):
        assert by_default == keeping


def _orders(rank: int, ranks: int, name: str) -> bool:
    """Two layers, the first with `redispatch`, the second without: their gradients have the same bits in both orders of
    the backward passes, each of which runs twice. Returns whether nothing is kept at the end."""
    limits = {"max_tokens": 64, "dtype": "float32", "redispatch": True}
    with flashmoe.Context(rank=rank, ranks=ranks, name=name, **limits, **SIZES) as ctx:
        pair = [module_of(ctx, 5 + rank), module_of(ctx, 7 + rank, redispatch=False)]
        xs = [torch.randn(17 + 9 * rank, 48, requires_grad=True) for _ in pair]

        def gradients(order: tuple[int, ...], **options: Any) -> list[torch.Tensor]:
            found: dict[int, list[torch.Tensor]] = {}
            losses = [layer(x).square().sum() for layer, x in zip(pair, xs, strict=True)]
            for n in order:
                leaves = [xs[n], *pair[n].parameters()]
                again = torch.autograd.grad(losses[n], leaves, retain_graph=True)
                found[n] = list(torch.autograd.grad(losses[n], leaves))
                assert all(map(torch.equal, found[n], again))
            return found[0] + found[1]

        expected = gradients((0, 1))
        assert all(map(torch.equal, gradients((1, 0)), expected))
    return flashmoe._ffi.library().kept_calls() == 0


def test_passes_in_any_order(pool: RankPool):
    assert pool.call(_orders, [()] * 3, ranks=3) == [True] * 3


def test_a_rank_alone_has_nothing_to_send():
    with flashmoe.Context(max_tokens=64, dtype="float32", **SIZES) as ctx:
        assert ctx.limits["redispatch"] == 0
        x, before = torch.randn(20, 48), kept_objects()
        again, keeping = (module_of(ctx, 5, redispatch=asked)(x) for asked in (True, False))
        assert kept_bytes(again) == kept_bytes(keeping)
        again.sum().backward()
        keeping.sum().backward()
        del again, keeping
        assert kept_objects() == before


# Ranks that differ in `redispatch`, and what is refused


def _differ(rank: int, ranks: int, name: str) -> str:
    limits = {"max_tokens": 32, "dtype": "float32", "timeout": 20.0, "redispatch": True}
    with flashmoe.Context(rank=rank, ranks=ranks, name=name, **limits, **SIZES) as ctx:
        y = module_of(ctx, 5, redispatch=rank == 1)(torch.randn(9, 48))
        with pytest.raises(flashmoe.GroupError) as raised:
            y.sum().backward()
        return str(raised.value)


def test_ranks_that_disagree_are_told(pool: RankPool):
    for said in pool.call(_differ, [()] * 2, ranks=2, timeout=60.0):
        assert "redispatch: rank 1 sends its tokens again, rank 0 does not" in said


def _refuse(rank: int, ranks: int, name: str) -> str:
    with flashmoe.Context(rank=rank, ranks=ranks, name=name, max_tokens=32, dtype="float32", **SIZES) as ctx:
        with pytest.raises(flashmoe.InvalidArgument, match="redispatch: expected a context") as raised:
            module_of(ctx, 5, redispatch=True)
        with pytest.raises(flashmoe.InvalidArgument, match="redispatch: expected True or False, got array"):
            module_of(ctx, 5, redispatch=np.zeros(2))
        return str(raised.value)


def test_a_context_without_room_refuses(pool: RankPool):
    for said in pool.call(_refuse, [()] * 2, ranks=2, timeout=60.0):
        assert said == "redispatch: expected a context made with redispatch=True, got one without"


def _join(rank: int, ranks: int, name: str) -> str:
    limits = {"max_tokens": 32, "dtype": "float32", "timeout": 20.0, "redispatch": rank == 0}
    with pytest.raises(flashmoe.GroupError) as raised:
        flashmoe.Context(rank=rank, ranks=ranks, name=name, **limits, **SIZES)
    return str(raised.value)


def test_ranks_whose_contexts_differ_do_not_join(pool: RankPool):
    for said in pool.call(_join, [()] * 2, ranks=2, timeout=60.0):
        assert "redispatch: rank" in said
