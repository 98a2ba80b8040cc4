"""Experts that move to the ranks of a new placement, over torch.distributed; and counts to make a placement from."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from dataclasses import replace
from typing import Any

import flashmoe
import numpy as np
import pytest
import torch
import torch.distributed as dist
from flashmoe.checkpoint import OF_EXPERTS, MoELayer
from flashmoe.errors import HeapError, InvalidArgument
from flashmoe.nn import MoE
from flashmoe.placement import balanced, contiguous, holders, hybrid, local_experts, move, moves
from flashmoe.quantize import quantize_layer
from flashmoe.slices import cut
from flashmoe.spec import ENCODINGS, FP8, MXFP4
from gloo import Gloo
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import random_problem
from test_slices import Sliced

RANKS, E = 4, 10
COPIES = [[0, 2], 1, [3, 1, 0], 2, 3, [0, 1, 2, 3], 2, 1, [3, 2], 0]
ELSEWHERE = [3, [1, 0], 0, [2, 3], 2, 1, [0, 1, 2, 3], [2, 1], 3, 3]
NOTHING_ON_2 = [[0, 1], 0, 0, 1, 1, 3, 3, 3, [3, 0], 1]


@pytest.fixture
def on_ranks(pool, tmp_path):
    """Call ``fn(rank, *args)`` in ranks of torch.distributed; by rank what they return."""
    return lambda fn, *args: Gloo(pool, tmp_path)(RANKS, fn, *args)


def _whole() -> dict[str, torch.Tensor]:
    """Tensors of all experts. Rows of `scale` and `fp8` have odd numbers of bytes, and rows of `bias` have none."""
    numbers = torch.arange(E * 3 * 5, dtype=torch.float32).reshape(E, 3, 5)
    return {
        "up": numbers.bfloat16(),
        "down": numbers.transpose(1, 2),
        "scale": torch.arange(E, dtype=torch.uint8),
        "bias": numbers[:, 0, :0],
        "fp8": numbers[:, :, 0].to(torch.float8_e4m3fn),
    }


def _part(placement: Any, rank: int) -> dict[str, torch.Tensor]:
    mine = local_experts(placement, rank)
    return {name: each[mine] if name != "fp8" else torch.stack([each[e] for e in mine]) if mine else each[:0]
            for name, each in _whole().items()}  # fmt: skip


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def _moved(rank: int, placements: list[Any]) -> bool:
    tensors = _part(placements[0], rank)
    for before, after in itertools.pairwise(placements):
        old = {name: each.clone() for name, each in tensors.items()}
        made = move(tensors, before, after)
        assert list(made) == list(tensors)
        for name, each in tensors.items():  # the given tensors are not changed
            assert _bits(each) == _bits(old[name])
            assert made[name].untyped_storage().data_ptr() != each.untyped_storage().data_ptr() or not each.numel()
        tensors = made
        for name, each in _part(after, rank).items():
            assert (tensors[name].shape, tensors[name].dtype) == (each.shape, each.dtype)
            assert _bits(tensors[name]) == _bits(each)
    return True


def test_rows_are_those_of_the_experts_wherever_they_go(on_ranks):
    placements = [
        contiguous(E, RANKS),
        COPIES,
        ELSEWHERE,
        COPIES,
        NOTHING_ON_2,
        [2] * E,
        [[0, 1, 2, 3]] * E,
        NOTHING_ON_2,
    ]
    assert on_ranks(_moved, placements) == [True] * RANKS


def _moved_in_a_group(rank: int) -> Any:
    """A placement counts ranks within the process group. These numbers differ from the ranks among all processes."""
    group = dist.new_group([1, 3])
    if rank not in (1, 3):
        return None
    mine = rank // 2
    tensors = {"w": torch.full((2, 3), float(mine))}
    return move(tensors, [0, 0, 1, 1], [1, 0, 1, 0], group)["w"][:, 0].tolist()


def test_in_a_group_of_some_of_the_processes(on_ranks):
    assert on_ranks(_moved_in_a_group) == [None, [0.0, 1.0], None, [0.0, 1.0]]


def _refused(rank: int) -> list[tuple[str, str]]:
    """What this rank raises in several moves in which one rank, or all, give wrong arguments. The group can go on."""
    before, after = contiguous(E, RANKS), [*contiguous(E, RANKS)[1:], 0]

    def say(tensors: Any, before: Any, after: Any) -> tuple[str, str]:
        with pytest.raises(flashmoe.FlashMoEError) as caught:
            move(tensors, before, after)
        return type(caught.value).__name__, str(caught.value)

    good = _part(before, rank)
    one_less = {name: each[1:] for name, each in good.items()} if rank == 2 else good
    said = [say(one_less, before, after)]
    said.append(say(good, before, [*after[:-1], 4] if rank == 1 else after))
    said.append(say(good, before, [*after[:-1], 3] if rank == 3 else after))
    said.append(say(good | {"up": good["up"].float()} if rank == 1 else good, before, after))
    said.append(say({}, before, after))
    assert _moved(rank, [before, after])
    return said


def test_errors_name_the_rank(on_ranks):
    outcomes = on_ranks(_refused)
    short = "up: expected El=2 experts, those of rank 2, got [1, 3, 5]"
    outside = "placement: expected ranks in [0, 4), got 4 for expert 9"
    for rank, (rows, placed, after, kind, none) in enumerate(outcomes):
        mine = ("InvalidArgument", short) if rank == 2 else None
        assert rows == (
            mine or ("GroupError", f"rank 2: expected it to bring its experts, got InvalidArgument: {short}")
        )
        mine = ("InvalidArgument", outside) if rank == 1 else None
        assert placed == (
            mine or ("GroupError", f"rank 1: expected it to bring its experts, got InvalidArgument: {outside}")
        )
        assert after[0] == kind[0] == "GroupError"
        assert after[1].startswith("after: expected all ranks to have the same, got (") and "on rank 3" in after[1]
        assert kind[1].startswith("tensors: expected all ranks to have the same, got {") and "on rank 1" in kind[1]
        assert none == ("InvalidArgument", "tensors: expected tensors by name, got dict")


def test_without_a_process_group():
    with pytest.raises(InvalidArgument, match=r"^group: expected torch\.distributed to be initialised"):
        move({"w": torch.zeros(1, 2)}, [0], [0])


ENTRY = st.lists(st.integers(0, 7), min_size=1, max_size=8, unique=True)


@settings(max_examples=200, deadline=None, database=None)
@given(st.lists(st.tuples(ENTRY, ENTRY), min_size=1, max_size=12))
def test_what_moves(entries: list[tuple[list[int], list[int]]]):
    """Each rank gets each expert that it lacks once, from a rank that has it. All ranks that have an expert send it
    equally often, or one time more."""
    before, after = [each for each, _ in entries], [each for _, each in entries]
    todo = moves(before, after)
    lacks = [(e, rank) for e, (has, wants) in enumerate(entries) for rank in sorted(set(wants) - set(has))]
    assert [(each.expert, each.target) for each in todo] == lacks
    for expert, has in enumerate(before):
        sent = Counter(each.source for each in todo if each.expert == expert)
        assert set(sent) <= set(has)
        counts = [sent[rank] for rank in has]
        assert max(counts) - min(counts) <= 1


# ---- The module, and the load that a placement is made of ----------------------------------------------------

SIZES = {"hidden": 16, "intermediate": 8, "experts": 8, "top_k": 3}


def _balance(rank: int, whole: Any, slices: int) -> tuple[Any, Any, Any]:
    """A layer's results (twice at first, moved, moved back), the placement that it is moved to, and the load of all
    ranks, from which this placement is made."""
    problem = whole if slices == 1 else Sliced.of(whole, slices, hybrid(8, RANKS, slices))
    most = [0] * 5 * slices + [1] * 3 * slices  # room for five experts on any rank
    limits = problem.limits() | {"placement": most, "return_mode": "reduced"}
    names = [f"move-{os.urandom(6).hex()}"]
    dist.broadcast_object_list(names)
    start = problem.owners()
    with flashmoe.Context(rank=rank, ranks=RANKS, name=names[0], **limits, count_load=True) as ctx, torch.no_grad():
        layer = MoE(ctx, **SIZES, placement=start, slices=slices)
        state = {"gate.weight": whole.router}
        state |= {f"experts.{name}": getattr(whole, name) for name in ("gate_up_proj", "down_proj")}
        layer.load_state_dict({name: torch.from_numpy(each) for name, each in state.items()})
        x = torch.from_numpy(whole.x[rank])
        results = [layer(x), layer(x)]
        load = ctx.load(clear=True)
        chosen = np.bincount(ctx.last_call.topk_ids.ravel(), minlength=8)
        assert load.dtype == np.int64 and (load == 2 * chosen).all() and not ctx.load().any()
        in_all = torch.from_numpy(load)
        dist.all_reduce(in_all)
        placement = balanced(np.repeat(in_all.numpy(), slices), RANKS, 3)
        with pytest.raises(HeapError, match=f"placement: expected at most {5 * slices} experts on a rank, .*, got"):
            layer.move([0] * 8 * slices)
        layer.move(placement)
        assert layer.experts.ids == local_experts(placement, rank)
        results.append(layer(x))
        layer.move(start)
        results.append(layer(x))
        assert ctx.load().sum() == 2 * chosen.sum()
    return [each.numpy() for each in results], placement, in_all.numpy()


@pytest.mark.parametrize("slices", [1, 2])
def test_a_module_is_placed_by_what_its_context_has_counted(on_ranks, slices: int):
    whole = random_problem(1, [30, 20, 0, 25], **SIZES, skew=3.0)
    outcomes = on_ranks(_balance, whole, slices)
    placement, load = outcomes[0][1:]
    assert any(len(holders(each)) > 1 for each in placement) or slices > 1
    assert list(placement) != list(hybrid(8, RANKS, slices)) and load.sum() == 2 * 75 * 3
    for results, placed, counted in outcomes:
        assert placed == placement and (counted == load).all()
        first, again, moved, back = results
        assert first.tobytes() == again.tobytes() == back.tobytes()
        np.testing.assert_allclose(moved, first, rtol=1e-4, atol=1e-5)


def test_what_a_context_counts():
    """A context counts the calls of layers that have as many experts as it, but no call with a load of its own."""
    problem = random_problem(2, [20], **SIZES)
    given_ids = random_problem(3, [20], **SIZES, fused=False)
    fewer = random_problem(4, [20], **SIZES | {"experts": 7})
    with flashmoe.Context(**problem.limits(), count_load=True) as ctx:
        expected = np.zeros(8, np.int64)
        for each in (problem, given_ids):
            flashmoe.moe(ctx, **each.arguments(0))
            expected += np.bincount(ctx.last_call.topk_ids.ravel(), minlength=8)
            assert (ctx.load() == expected).all()
        own = np.zeros(8, np.int64)
        flashmoe.moe(ctx, **problem.arguments(0), load=own)
        flashmoe.moe(ctx, **fewer.arguments(0))
        assert own.sum() == 60 and (ctx.load() == expected).all()
        ctx.load()[:] = 0  # changes only a copy
        assert (ctx.load(clear=True) == expected).all() and not ctx.load().any()
        tensors = {name: torch.from_numpy(each) if isinstance(each, np.ndarray) else each
                   for name, each in problem.arguments(0).items()}  # fmt: skip
        flashmoe.moe(ctx, **tensors)
        assert ctx.load().sum() == 60
    with (
        flashmoe.Context(**problem.limits()) as ctx,
        pytest.raises(InvalidArgument, match="count_load: expected a con"),
    ):
        ctx.load()
    with pytest.raises(InvalidArgument, match="count_load"):
        flashmoe.Context(**problem.limits(), count_load=np.zeros(2))


# ---- Quantised experts, whose scales go with them ------------------------------------------------------------

WIDE = {"hidden": 160, "experts": 8, "top_k": 3}


def _moved_quantised(rank: int, dtype: str, scales: str, slices: int) -> list[np.ndarray]:
    """A layer's results with its experts where they are at first, after a move, and after the move back."""
    whole = MoELayer(
        "layer", *(random_problem(5, [1], **WIDE, intermediate=128 * slices).arguments(0)[name] for name in
                   ("router", "gate_up_proj", "down_proj")), top_k=3, renormalize=True, activation="swiglu"
    )  # fmt: skip
    magnitudes = 2.0 ** np.arange(8)[:, None, None]  # so that no two experts' scales are alike
    whole = replace(whole, gate_up_proj=whole.gate_up_proj * magnitudes, down_proj=whole.down_proj / magnitudes)
    quantised = quantize_layer(whole, scales, dtype)
    of_slices = cut(slices, *(getattr(quantised, name) for name in OF_EXPERTS))
    elements, scale = ENCODINGS[dtype].suffixes
    of_all = {f"{name}_proj{elements}": of_slices[f"{name}_proj"] for name in ("gate_up", "down")}
    of_all |= {f"{name}_proj{scale}": of_slices[f"{name}_scale"] for name in ("gate_up", "down")}
    names = [f"move-{os.urandom(6).hex()}"]
    dist.broadcast_object_list(names)
    start = hybrid(8, RANKS, slices)
    limits = WIDE | {"intermediate": 128, "max_tokens": 9, "dtype": "float32", "weight_dtype": dtype, "slices": slices}
    limits |= {"placement": [0] * 5 * slices + [1] * 3 * slices, "processors": 1}
    limits["return_mode"] = "direct" if slices == 1 else "reduced"
    elsewhere = [[*range(RANKS)] if part % 5 == 0 else (part + 3) % RANKS for part in range(8 * slices)]
    results = []
    with flashmoe.Context(rank=rank, ranks=RANKS, name=names[0], **limits) as ctx, torch.no_grad():
        layer = MoE.from_layer(ctx, quantised, placement=start, slices=slices)
        x = torch.from_numpy(np.random.default_rng(rank).standard_normal((9, 160)).astype(np.float32))
        for placement in (start, elsewhere, start):
            layer.move(placement)
            mine = local_experts(placement, rank)
            held = dict(layer.experts.named_parameters())
            assert layer.experts.ids == mine and set(held) == set(of_all)
            for name, each in held.items():
                assert _bits(each) == of_all[name][mine].tobytes(), name
                assert not each.requires_grad
            results.append(layer(x).numpy())
    return results


@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize(("dtype", "scales"), [(FP8, "block"), (FP8, "row"), (FP8, "tensor"), (MXFP4, "block")])
def test_scales_go_with_their_experts(on_ranks, dtype: str, scales: str, slices: int):
    for first, moved, back in on_ranks(_moved_quantised, dtype, scales, slices):
        assert first.tobytes() == back.tobytes()
        if slices == 1:
            assert first.tobytes() == moved.tobytes()
        else:  # a rank sums its rows of a token, at most 6 slices' rows in float32: after a move, in another order
            assert np.linalg.norm(moved - first) < 2.0**-20 * np.linalg.norm(first)
