"""Functions that tests/gpu/test_network_shape.py runs in the processes of a group, one rank in each process. The ranks
are on one machine and have mapped one another's memory, but they are told that they are on several machines.

In all functions, `machines` lists the ranks' machines, and `tokens` lists the numbers of the ranks' tokens."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import flashmoe
import flashmoe.placement
import numpy as np
import problems
import ranks as on_rank
import torch
from flashmoe.engines import cuda
from flashmoe.report import CallReport
from layers import Problem, call, capture, check, random_problem
from quantised_on_gpu import in_group
from ranks import FEW_TOKENS, device_of, share_of, starting_anew, with_experts

LIMITS = {
    "max_tokens": 600,
    "hidden": 1024,
    "intermediate": 512,
    "experts": 32,
    "top_k": 8,
    "dtype": "float32",
    "shared_intermediate": 512,
}
"""Arguments of the contexts that stay from test to test."""


class Spread:
    """Which ranks are on which machine, and which rank is the relay of a machine."""

    def __init__(self, machines: Sequence[int]) -> None:
        self.of = list(machines)
        self.ranks = {m: [p for p, other in enumerate(machines) if other == m] for m in machines}

    def relay(self, p: int, machine: int) -> int:
        """The rank that is the relay of `machine` towards rank p."""
        there = self.ranks[machine]
        return there[self.ranks[self.of[p]].index(p) % len(there)]


@contextmanager
def told_to_be(machines: Sequence[int]) -> Iterator[None]:
    """Contexts that are made inside this block take their ranks to be on these machines."""
    cuda.machines = tuple(machines)
    try:
        yield
    finally:
        cuda.machines = ()


def context_on(rank: int, ranks: int, name: str, machines: Sequence[int], mode: str) -> flashmoe.Context:
    """The context that this process keeps for these machines and this return mode."""
    of_spread = f"{''.join(map(str, machines))}-{mode}"

    def make() -> flashmoe.Context:
        with told_to_be(machines):
            return on_rank.joined(rank, ranks, f"{name}-{of_spread}", return_mode=mode, **LIMITS)

    return on_rank.kept_context(of_spread, make)


def two_levels(
    rows: list[torch.Tensor], owners: torch.Tensor, home: int, spread: Spread, dtype: torch.dtype
) -> torch.Tensor:
    """The result of a reduced return to rank `home`, added in the protocol's order. `rows` has for each k the rows of
    the tokens' k-th choices, float32 [T, H]; `owners` [T, K] has the ranks that compute them. A rank adds its rows of a
    token in ascending k. A relay adds the sums of its machine's ranks in fp32, in the order of these ranks. Each sum
    that goes home is rounded once to `dtype`, and home adds these sums in the order of the ranks that send them."""
    total = torch.zeros_like(rows[0])
    for q, machine in enumerate(spread.of):
        if machine != spread.of[home] and spread.relay(home, machine) != q:
            continue
        came = torch.zeros_like(total)
        for part in [q] if machine == spread.of[home] else spread.ranks[machine]:
            came += on_rank.sum_on(part, owners, rows)
        total += came.to(dtype).float()
    return total.to(dtype)


def expected(
    own: Problem, rank: int, placement: flashmoe.placement.Placement, machines: Sequence[int]
) -> dict[str, torch.Tensor]:
    """The expected result by return mode, to the bit, computed on this GPU alone. Empty for up to FEW_TOKENS tokens,
    because a rank alone gives other bits for these; with a shared expert, `direct` only."""
    if len(own.x) <= FEW_TOKENS:
        return {}
    direct, owners, rows = on_rank.rows_alone(own, rank, placement)
    if not rows:
        return {"direct": direct}
    return {"direct": direct, "reduced": two_levels(rows, owners, rank, Spread(machines), direct.dtype)}


@starting_anew
def compare(
    rank: int, ranks: int, name: str, machines: Sequence[int], spec: dict[str, Any], tokens: list[int], calls: int
) -> int:
    """Makes calls of one problem, in both return modes in turn. Counts results that differ in any bit from the expected
    ones, and results that differ from the mode's first. Each mode's first call is also compared with the float64
    reference."""
    spec = dict(spec)
    placement = spec.pop("placement", None) or flashmoe.placement.contiguous(spec["experts"], ranks)
    whole = random_problem(spec.pop("seed"), sum(tokens), device=f"cuda:{device_of(rank)}", **spec)
    own = share_of(whole, rank, tokens)
    local = with_experts(own, flashmoe.placement.local_experts(placement, rank))
    bits = expected(own, rank, placement, machines)
    differing = 0
    first: dict[str, torch.Tensor] = {}
    for i in range(calls):
        for mode in on_rank.RETURN_MODES:
            y, report = call(context_on(rank, ranks, name, machines, mode), local, placement=placement)
            if i == 0:
                check(own, y, report)
            differing += not torch.equal(y, bits.get(mode, y))
            differing += not torch.equal(y, first.setdefault(mode, y))
    return differing


@starting_anew
def all_to_one_expert(rank: int, ranks: int, name: str, machines: Sequence[int], tokens: list[int]) -> int:
    """Makes calls in which every token of every rank chooses the last expert, or the last and the first. Returns how
    many results differ in any bit from the expected ones."""
    spec = {"hidden": 512, "intermediate": 256, "experts": 16, "ids": "int32"}
    placement = flashmoe.placement.contiguous(16, ranks)
    off = 0
    for chosen in ([15], [15, 0]):
        whole = random_problem(5, sum(tokens), device=f"cuda:{device_of(rank)}", top_k=len(chosen), **spec)
        whole.topk_ids[:] = torch.tensor(chosen, dtype=torch.int32, device=whole.x.device)
        own = share_of(whole, rank, tokens)
        local = with_experts(own, flashmoe.placement.local_experts(placement, rank))
        bits = expected(own, rank, placement, machines)
        for mode in on_rank.RETURN_MODES:
            y, report = call(context_on(rank, ranks, name, machines, mode), local, placement=placement)
            check(own, y, report)
            off += not torch.equal(y, bits.get(mode, y))
    return off


@starting_anew
def after_poison(rank: int, ranks: int, name: str, machines: Sequence[int], tokens: list[int]) -> int:
    """For each return mode, makes two calls with the most tokens, whose rows and sums are all NaN, and then a call with
    `tokens` tokens. Returns how many results of the latter calls differ in any bit from the expected ones."""
    spec = {"hidden": 1024, "intermediate": 512, "experts": 32, "top_k": 8, "dtype": "float32", "ids": "int32"}
    most, placement = LIMITS["max_tokens"], flashmoe.placement.contiguous(32, ranks)
    full = random_problem(6, most * ranks, device=f"cuda:{device_of(rank)}", **spec)
    full.x.fill_(math.nan)
    everything = with_experts(share_of(full, rank, [most] * ranks), flashmoe.placement.local_experts(placement, rank))
    whole = random_problem(8, sum(tokens), device=f"cuda:{device_of(rank)}", **spec)
    own = share_of(whole, rank, tokens)
    local = with_experts(own, flashmoe.placement.local_experts(placement, rank))
    bits = expected(own, rank, placement, machines)
    off = 0
    for mode in on_rank.RETURN_MODES:
        context = context_on(rank, ranks, name, machines, mode)
        for _ in range(2):  # one call of each parity, so that both copies of the heap's fields get NaN
            y, _ = call(context, everything, placement=placement)
            assert y.isnan().all()
        y, report = call(context, local, placement=placement)
        check(own, y, report)
        off += not torch.equal(y, bits.get(mode, y))
    return off


@starting_anew
def many_calls(rank: int, ranks: int, name: str, machines: Sequence[int], seed: int, calls: int) -> int:
    """Makes calls of three layers, between which the host does not wait, in both return modes in turns of 7 calls. For
    each call, all ranks draw the same layer and numbers of tokens: about half of the ranks have none, the others at
    most 3, 60 or 600. Returns how many results differ in any bit from the expected ones."""
    placement = flashmoe.placement.contiguous(16, ranks)
    drawn = []
    for layer in range(3):
        spec = {"hidden": (64, 320, 1024)[layer], "intermediate": 128, "experts": 16, "top_k": (1, 2, 6)[layer]}
        whole = random_problem(seed + layer, 600, device=f"cuda:{device_of(rank)}", ids="int32", **spec)
        local = with_experts(whole, flashmoe.placement.local_experts(placement, rank))
        drawn.append((local, expected(whole, rank, placement, machines)))
    draw, own = random.Random(seed), random.Random(f"{seed} of rank {rank}")
    off = torch.zeros(calls, dtype=torch.bool, device=f"cuda:{device_of(rank)}")
    for i in range(calls):
        mode = on_rank.RETURN_MODES[i // 7 % 2]
        local, bits = drawn[draw.randrange(3)]
        most = draw.choice((3, 60, 600))
        n = [draw.choice((0, draw.randint(1, most))) for _ in range(ranks)][rank]
        rows = slice(first := own.randrange(600 - n + 1), first + n)
        some = replace(local, x=local.x[rows], topk_ids=local.topk_ids[rows], topk_weights=local.topk_weights[rows])
        if own.randrange(16) == 0:
            torch.cuda._sleep(own.randrange(on_rank.HALF_A_MILLISECOND))
        y = flashmoe.moe(context_on(rank, ranks, name, machines, mode), **some.arguments(), placement=placement)
        off[i] = (y != bits[mode][rows]).any()
    for mode in on_rank.RETURN_MODES:
        context_on(rank, ranks, name, machines, mode).synchronize()
    return int(off.sum())


@starting_anew
def reports(
    rank: int, ranks: int, name: str, machines: Sequence[int], spec: dict[str, Any], tokens: list[int]
) -> list[dict[str, Any]]:
    """The reports of one call in each return mode."""
    whole = random_problem(10, sum(tokens), device=f"cuda:{device_of(rank)}", **spec)
    placement = flashmoe.placement.contiguous(spec["experts"], ranks)
    local = with_experts(share_of(whole, rank, tokens), flashmoe.placement.local_experts(placement, rank))
    contexts = (context_on(rank, ranks, name, machines, mode) for mode in on_rank.RETURN_MODES)
    return [call(context, local, placement=placement)[1].to_dict() for context in contexts]


def in_fp8(
    rank: int, ranks: int, name: str, machines: Sequence[int], problem: problems.Problem, return_mode: str
) -> tuple[np.ndarray, CallReport]:
    """y and the report of a call of a layer whose experts are in FP8. A second call must give the same bits."""
    with told_to_be(machines):
        return in_group(rank, ranks, name, problem, return_mode)


@starting_anew
def memory(rank: int, ranks: int, name: str, machines: Sequence[int], mode: str) -> tuple[int, int, int]:
    """The number of processors of the context, and the bytes of its heap and of its workspace."""
    context = context_on(rank, ranks, name, machines, mode)
    return context.processors, context.heap_bytes, context.workspace_bytes


@starting_anew
def replay(rank: int, ranks: int, name: str, machines: Sequence[int]) -> int:
    """Captures a call on every rank, in each return mode, and replays it with other tokens. Returns how many replays
    differ in any bit from the expected results."""
    spec = {"hidden": 512, "intermediate": 256, "experts": 16, "top_k": 4}
    problems = [random_problem(seed, 300, device=f"cuda:{device_of(rank)}", **spec) for seed in range(3)]
    placement, off = flashmoe.placement.contiguous(16, ranks), 0
    for mode in on_rank.RETURN_MODES:
        with told_to_be(machines):
            limits = {**spec, "max_tokens": 300, "dtype": "bfloat16", "return_mode": mode}
            context = on_rank.joined(rank, ranks, f"{name}-{mode}", **limits)
        with context:
            x = problems[0].x.clone()
            local = with_experts(problems[0], context.local_experts())  # keeps the tensors that the graph reads alive
            graph, y = capture(context, replace(local, x=x))
            for other in problems:
                x.copy_(other.x)
                graph.replay()
                torch.cuda.synchronize()
                context.synchronize()
                bits = expected(replace(problems[0], x=other.x), rank, placement, machines)
                off += not torch.equal(y, bits[mode])
    return off


def stall(rank: int, ranks: int, name: str, machines: Sequence[int], who: int, timeout: float) -> str:
    """The error that this rank gets if rank `who` makes a call only after the others have given up waiting. Afterwards
    all ranks make a new group, and check a call in it."""
    with told_to_be(machines):
        return on_rank.stall(rank, ranks, name, "auto", who, timeout)


def without_gradients(rank: int, ranks: int, name: str, machines: Sequence[int]) -> str:
    """The message of the error that a backward pass raises, because calls among machines have no gradients."""
    spec = {"hidden": 256, "intermediate": 128, "experts": 8, "top_k": 2}
    whole = random_problem(7, 100, device=f"cuda:{device_of(rank)}", **spec)
    with told_to_be(machines):
        context = on_rank.joined(rank, ranks, name, **spec, max_tokens=100, dtype="bfloat16")
    with context:
        local = with_experts(whole, context.local_experts())
        y = flashmoe.moe(context, **replace(local, x=local.x.requires_grad_()).arguments())
        context.synchronize()
        try:
            y.sum().backward()
        except NotImplementedError as error:
            return str(error)
    return ""
