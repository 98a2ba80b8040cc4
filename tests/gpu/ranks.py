"""Functions that tests/gpu/test_group.py runs in the processes of a group, one rank in each process."""

from __future__ import annotations

import functools
import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import flashmoe
import flashmoe.placement
import flashmoe.slices
import pytest
import torch
import torch.distributed
from flashmoe import jit
from flashmoe.launch import RankPool
from layers import (
    EXPERT_OPTIONS,
    PATIENCE,
    Observed,
    Problem,
    call,
    capture,
    check,
    compiled,
    context_of,
    gpu_operations,
    module_of,
    poisoned_outputs,
    random_problem,
)

LIMITS = {
    "max_tokens": 2048,
    "hidden": 2048,
    "intermediate": 1024,
    "experts": 128,
    "top_k": 8,
    "dtype": "float32",
    "shared_intermediate": 2048,
}
"""Arguments of the contexts that most tests share. Their heaps have room for the calls of all these tests."""

RANKS_A_GPU = int(os.environ.get("FLASHMOE_SHARE_GPUS") or 1)
"""How many ranks may share a GPU."""

RETURN_MODES = ("direct", "reduced")

WAYS = {mode: {"return_mode": mode} for mode in RETURN_MODES} | {"rdma": {"transport": "rdma"}}
"""Ways in which results come home, and the context's arguments for each. ``rdma`` makes ranks put although their memory
is mapped, and its return mode is reduced."""

LINK_CLUSTERS = {f"{n} stop early": WAYS["reduced"] | {"profile": {"link_clusters": n}} for n in (0, 1, 5, 1000)}
"""More ways: n is the number of clusters that stop early to do Reduce while the others compute. With the last n, which
is larger than the number of clusters, all clusters but one stop early."""

FEW_TOKENS = 8
"""A rank that is alone uses another kernel in calls of up to this many tokens. It sums logits in another order than a
group does, and multiplies float32 without TF32, so bits differ."""

TOKENS_DRAWN = 2048
"""How many tokens are drawn for each layer of `many_calls`: as many as the shared contexts allow in a call."""

HALF_A_MILLISECOND = 1_000_000
"""About half a millisecond, in clock cycles of a GPU."""

_shared: dict[str, flashmoe.Context] = {}


def device_of(rank: int) -> int:
    """The number of the rank's GPU. If there are fewer GPUs than ranks, ranks share GPUs."""
    return rank % torch.cuda.device_count()


@contextmanager
def pool_of(ranks: int) -> Iterator[RankPool]:
    """Processes for `ranks` ranks, which stay from test to test. Skips the test if there are not enough GPUs."""
    here = torch.cuda.device_count() * RANKS_A_GPU
    if here < ranks:
        pytest.skip(f"{ranks} GPUs needed, {here} here")
    with RankPool(ranks) as made:
        yield made


def everywhere(pool: RankPool, fn: Callable[..., Any], *arguments: Any, timeout: float = 120.0) -> list[Any]:
    """Calls `fn` with these arguments on every rank of the pool, and returns the ranks' results."""
    return pool.call(fn, [arguments] * pool.ranks, timeout=timeout)


def processors() -> int | None:
    """The number of a context's thread blocks; None: as many as fit. If ranks share a GPU, each gets an equal share of
    its multiprocessors, so that all of them fit at the same time."""
    if RANKS_A_GPU == 1:
        return None
    return torch.cuda.get_device_properties(0).multi_processor_count // RANKS_A_GPU // 2 * 2


def joined(rank: int, ranks: int, name: str, **limits: Any) -> flashmoe.Context:
    """This rank's context in a new group called `name`. `limits`: arguments that replace those of LIMITS."""
    device = device_of(rank)
    torch.cuda.set_device(device)
    settings = {**LIMITS, "timeout": PATIENCE, "processors": processors(), **limits}
    return flashmoe.Context(engine="cuda", device=device, rank=rank, ranks=ranks, name=name, **settings)


def alone_on(rank: int, problem: Problem) -> flashmoe.Context:
    """A context for the problem on this rank's GPU, as the only rank of its group."""
    return context_of(problem, device=device_of(rank), processors=processors())


def kept_context(key: str, make: Callable[[], flashmoe.Context]) -> flashmoe.Context:
    """The context that this process keeps from test to test under the name `key`. If there is none, it is made."""
    context = _shared.get(key)
    if context is None or context.closed:
        context = _shared[key] = make()
    return context


def shared_context(rank: int, ranks: int, name: str, way: str) -> flashmoe.Context:
    """The kept context whose results come home in this way (a key of WAYS or LINK_CLUSTERS)."""
    return kept_context(
        way, lambda: joined(rank, ranks, f"{name}-{way}".replace(" ", "-"), **(WAYS | LINK_CLUSTERS)[way])
    )


def starting_anew(fn: Callable) -> Callable:
    """Wraps `fn`, which uses kept contexts: if `fn` fails, this process closes all of its kept contexts, so that later
    tests make new ones."""

    @functools.wraps(fn)
    def wrapped(*arguments: Any) -> Any:
        try:
            return fn(*arguments)
        except BaseException:
            while _shared:
                _shared.popitem()[1].close()
            raise

    return wrapped


def share_of(problem: Problem, rank: int, tokens: list[int]) -> Problem:
    """The problem with only this rank's tokens, and with all experts. `tokens`: the number of each rank's tokens."""
    rows = slice(sum(tokens[:rank]), sum(tokens[: rank + 1]))
    given = problem.topk_ids is not None
    return replace(
        problem,
        x=problem.x[rows],
        topk_ids=problem.topk_ids[rows].contiguous() if given else None,
        topk_weights=problem.topk_weights[rows].contiguous() if given else None,
    )


def with_experts(problem: Problem, experts: list[int]) -> Problem:
    """The problem with only the weights of these experts: a rank passes the weights of the experts that it holds."""
    names = ("gate_up_proj", "down_proj", "gate_up_bias", "down_bias")
    parts = {name: getattr(problem, name) for name in names}
    return replace(problem, **{name: part if part is None else part[experts] for name, part in parts.items()})


def memory(rank: int, ranks: int, name: str, way: str) -> tuple[int, int, int]:
    """The number of processors of a new context, and the bytes of its heap and of its workspace."""
    with joined(rank, ranks, name, **WAYS[way]) as context:
        return context.processors, context.heap_bytes, context.workspace_bytes


def in_own_group(
    rank: int, ranks: int, name: str, limits: dict[str, Any], spec: dict[str, Any], tokens: list[int]
) -> bool:
    """Makes a call in a new group, whose contexts have the call's sizes and these limits. Whether this rank's result
    has the bits that its tokens give on its GPU alone."""
    whole = random_problem(9, sum(tokens), device=f"cuda:{device_of(rank)}", **spec)
    own = share_of(whole, rank, tokens)
    sizes = {size: spec[size] for size in ("hidden", "intermediate", "experts", "top_k")}
    sizes |= {"max_tokens": max(tokens), "dtype": "bfloat16", "return_mode": "direct"}
    with joined(rank, ranks, name, **sizes, **limits) as context:
        y, _ = call(context, with_experts(own, context.local_experts()))
        with alone_on(rank, own) as single:
            alone, report = call(single, own)
            check(own, alone, report)
    return torch.equal(y, alone)


@starting_anew
def observe(rank: int, ranks: int, name: str, way: str, spec: dict[str, Any], tokens: list[int]) -> bool:
    """Makes two calls in the group, and two with this rank's tokens on its GPU alone. Whether both pairs of calls give
    the same load and router logits."""
    context = shared_context(rank, ranks, name, way)
    whole = random_problem(9, sum(tokens), device=f"cuda:{device_of(rank)}", **spec)
    own = share_of(whole, rank, tokens)
    placement = flashmoe.placement.contiguous(own.experts, ranks)
    local = with_experts(own, flashmoe.placement.local_experts(placement, rank))
    here, alone = Observed.of(own), Observed.of(own)
    for _ in range(2):
        call(context, local, placement=placement, **here.arguments())
    with alone_on(rank, own) as single:
        for _ in range(2):
            call(single, own, **alone.arguments())
    assert alone.load.sum() == 2 * own.top_k * tokens[rank]
    return torch.equal(here.load, alone.load) and (own.router is None or torch.equal(here.logits, alone.logits))


@starting_anew
def compare(
    rank: int, ranks: int, name: str, ways: Sequence[str], spec: dict[str, Any], tokens: list[int], calls: int = 1
) -> int:
    """Makes calls of one problem in the group, in these ways in turn. Counts results that differ in any bit from what
    the same tokens give on this GPU alone, and results that differ from the first one of the same return mode. (Where
    `results_alone` has no result, the first call of each way is compared with the float64 reference.)"""
    contexts = [shared_context(rank, ranks, name, way) for way in ways]
    spec = dict(spec)
    placement = spec.pop("placement", None) or flashmoe.placement.contiguous(spec["experts"], ranks)
    problem = random_problem(spec.pop("seed"), sum(tokens), device=f"cuda:{device_of(rank)}", **spec)
    own = share_of(problem, rank, tokens)
    local = with_experts(own, flashmoe.placement.local_experts(placement, rank))
    alone = results_alone(own, rank, placement)
    differing = 0
    first: dict[str, torch.Tensor] = {}
    for i in range(calls):
        for context in contexts:
            y, report = call(context, local, placement=placement)
            mode = report.return_mode
            assert mode == context.return_mode
            if mode in alone:
                differing += not torch.equal(y, alone[mode])
            elif i == 0:
                check(own, y, report)
            differing += not torch.equal(y, first.setdefault(mode, y))
    return differing


@starting_anew
def compare_slices(
    rank: int, ranks: int, name: str, ways: Sequence[str], spec: dict[str, Any], tokens: list[int], tensor: int
) -> int:
    """Makes calls in the group of a problem whose experts are cut into `tensor` slices, in these ways in turn, all with
    the reduced return. Returns how many differ in any bit from the expected result. This is computed on this GPU alone,
    where slices are passed as experts of their own and chosen by given ids."""
    spec = dict(spec)
    whole = random_problem(spec.pop("seed"), sum(tokens), device=f"cuda:{device_of(rank)}", **spec)
    own = share_of(whole, rank, tokens)
    placement = flashmoe.placement.hybrid(own.experts, ranks, tensor)
    form = {name: own.options[name] for name in ("activation", "interleaved", "transposed") if name in own.options}
    weights = own.gate_up_proj, own.down_proj, own.gate_up_bias, own.down_bias
    parts = flashmoe.slices.cut(tensor, *weights, **form)
    with alone_on(rank, own) as single:
        _, report = call(single, own)
    ids, chosen = torch.from_numpy(report.topk_ids), torch.from_numpy(report.topk_weights)
    as_experts = replace(
        own,
        **parts,
        top_k=own.top_k * tensor,
        topk_ids=(ids[..., None] * tensor + torch.arange(tensor)).flatten(1).int().to(own.x.device),
        topk_weights=chosen.repeat_interleave(tensor, dim=1).to(own.x.device),
        options={name: own.options[name] for name in EXPERT_OPTIONS if name in own.options},
    )
    expected = results_alone(as_experts, rank, placement)["reduced"]
    sliced = replace(own, **parts, options=own.options | {"slices": tensor})
    local = with_experts(sliced, flashmoe.placement.local_experts(placement, rank))
    contexts = [shared_context(rank, ranks, name, way) for way in ways]
    return sum(not torch.equal(call(context, local, placement=placement)[0], expected) for context in contexts * 3)


def results_alone(own: Problem, rank: int, placement: flashmoe.placement.Placement) -> dict[str, torch.Tensor]:
    """By return mode, the result that a group with this placement gives, to the bit, computed on this GPU alone. Empty
    for up to FEW_TOKENS tokens, because a rank alone gives other bits for these; with a shared expert, `direct` only.
    For `reduced`, the rows of each k come from a call of their own. They are added here as a group adds them: the rows
    of one rank in ascending k, each rank's sum rounded to the type of y, then the sums in the order of ranks."""
    if len(own.x) <= FEW_TOKENS:
        return {}
    direct, owners, rows = rows_alone(own, rank, placement)
    if not rows:
        return {"direct": direct}
    total = torch.zeros_like(rows[0])
    for q in range(max(flashmoe.placement.owners(placement, rank)) + 1):
        total += sum_on(q, owners, rows).to(direct.dtype).float()
    return {"direct": direct, "reduced": total.to(direct.dtype)}


def rows_alone(
    own: Problem, rank: int, placement: flashmoe.placement.Placement
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Computes on this GPU alone, and returns three things: the result; for each choice the rank that has its expert,
    [T, K], -1 if the choice was dropped; and for each k the rows that the tokens' k-th choices add to the result,
    float32 [T, H]. With a shared expert, the list of rows is empty."""
    with alone_on(rank, own) as single:
        direct, report = call(single, own)
        check(own, direct, report)
        ids = torch.from_numpy(report.topk_ids).to(own.x.device)
        weights = torch.from_numpy(report.topk_weights).to(own.x.device)
        options = {name: own.options[name] for name in EXPERT_OPTIONS if name in own.options}
        rows = []
        for k in range(own.top_k if own.shared_down is None else 0):
            chosen = ids[:, k : k + 1].clamp(min=0).contiguous(), weights[:, k : k + 1].contiguous()
            one = replace(own, topk_ids=chosen[0], topk_weights=chosen[1], top_k=1, options=options)
            rows.append(call(single, one)[0].float())
    owners = torch.tensor([*flashmoe.placement.owners(placement, rank), -1], device=own.x.device)[ids.long()]
    return direct, owners, rows


def sum_on(q: int, owners: torch.Tensor, rows: list[torch.Tensor]) -> torch.Tensor:
    """Rank q's sum of rows for each token, float32 [T, H], added in ascending k."""
    part = torch.zeros_like(rows[0])
    for k, each in enumerate(rows):
        part += torch.where(owners[:, k : k + 1] == q, each, 0.0)
    return part


@dataclass(frozen=True)
class Drawn:
    """A layer with tokens whose results are computed beforehand; each call takes some of these tokens."""

    spec: dict[str, Any]
    local: dict[str, Any]
    """This rank's arguments of `flashmoe.moe`, with all tokens."""
    expected: dict[str, torch.Tensor]
    """The results of all tokens by return mode, each [TOKENS_DRAWN, H]."""

    @classmethod
    def kind(cls, name: str, seed: int, rank: int, ranks: int) -> Drawn:
        """The layer called `name`, drawn from `seed`. Raises `AssertionError` if tokens have other bits, on this GPU
        alone, in a call with fewer tokens."""
        draw = random.Random(f"{seed} {name}")
        spec = draw_spec(draw, ranks)
        whole = random_problem(draw.randrange(2**31), TOKENS_DRAWN, device=f"cuda:{device_of(rank)}", **spec)
        placement = flashmoe.placement.contiguous(whole.experts, ranks)
        expected = results_alone(whole, rank, placement)
        first, tokens = draw.randrange(1000), draw.randrange(FEW_TOKENS + 1, 1000)
        for mode, some in results_alone(share_of(whole, 1, [first, tokens]), rank, placement).items():
            assert torch.equal(some, expected[mode][first : first + tokens]), f"{spec}, {tokens} tokens alone, {mode}"
        own = with_experts(whole, flashmoe.placement.local_experts(placement, rank))
        return cls(spec, own.arguments() | {"placement": placement}, expected)

    def call(self, context: flashmoe.Context, first: int, tokens: int) -> torch.Tensor:
        rows = slice(first, first + tokens)
        of_tokens = ("x", "topk_ids", "topk_weights")
        some = {name: self.local[name][rows] for name in of_tokens if name in self.local}
        return flashmoe.moe(context, **{**self.local, **some})


@starting_anew
def many_calls(rank: int, ranks: int, name: str, ways: Sequence[str], seed: int, calls: int, verify_every: int) -> int:
    """Makes calls in one context for each way; the host does not wait for any of them before it has launched the last.
    Returns how many of the verified calls differ in any bit from what one GPU alone gives.

    For each call, all ranks draw the same layer and the same numbers of tokens. The layer is one of six, whose sizes,
    type, activation, routing and skew are drawn too. The number of a rank's tokens is 0 in about half of the cases, and
    otherwise at most 3, 60, 400 or 2048. Each rank draws for itself which of the layer's tokens it takes, and whether
    its GPU is delayed first, by up to half a millisecond (in about one call of 16). The contexts take turns of
    `verify_every` calls. One call of each turn is drawn and verified: its output begins as NaN, and the GPU compares it
    with rows that it computed alone before the first call.
    """
    contexts = [shared_context(rank, ranks, name, way) for way in ways]
    layers = [Drawn.kind(str(kind), seed, rank, ranks) for kind in range(6)]
    draw, own = random.Random(seed), random.Random(f"{seed} of rank {rank}")
    verified: list[str] = []
    differs = torch.zeros(-(-calls // verify_every), dtype=torch.bool, device=f"cuda:{device_of(rank)}")
    for i in range(calls):
        turn, place = divmod(i, verify_every)
        if place == 0:
            context = contexts[turn % len(contexts)]
            chosen = draw.randrange(min(verify_every, calls - i))
        layer = draw.choice(layers)
        most = draw.choice((3, 60, 400, TOKENS_DRAWN))
        tokens = [draw.choice((0, draw.randint(1, most))) for _ in range(ranks)]
        first = own.randrange(TOKENS_DRAWN - tokens[rank] + 1)
        if own.randrange(16) == 0:
            torch.cuda._sleep(own.randrange(HALF_A_MILLISECOND))
        if place != chosen:
            layer.call(context, first, tokens[rank])
            continue
        with poisoned_outputs():
            y = layer.call(context, first, tokens[rank])
        expected = layer.expected[context.return_mode][first : first + tokens[rank]]
        differs[turn] = (y != expected).any()
        verified.append(f"rank {rank}, call {i}, {context.return_mode}, {layer.spec}, tokens {tokens}, from {first}")
    for context in contexts:
        context.synchronize()
    for call_is_off, what in zip(differs.tolist(), verified, strict=True):
        if call_is_off:
            print(f"differs: {what}", flush=True)
    return int(differs.sum())


def draw_spec(draw: random.Random, ranks: int) -> dict[str, Any]:
    experts = draw.choice((ranks, 8, 13, 64, 128))
    return {
        "hidden": 8 * draw.randint(1, 256),
        "intermediate": 8 * draw.randint(1, 128),
        "experts": experts,
        "top_k": draw.randint(1, min(8, experts)),
        "dtype": draw.choice(("bfloat16", "bfloat16", "float32")),
        "activation": draw.choice(("swiglu", "gelu")),
        "skew": draw.choice((0.0, 0.0, 3.0, 50.0)),
        "ids": draw.choice((None, "int32")),
    }


Times = list[tuple[int, int]]
"""The begin and the end of each call, in nanoseconds of CLOCK_MONOTONIC."""

OVERLAPPING = {"hidden": 2048, "intermediate": 2048, "experts": 16, "top_k": 4, "max_tokens": 8192}
"""Sizes of the layers of `overlapping_layers`. A rank with `max_tokens` tokens takes about a millisecond for a layer in
which these tokens choose only experts of the rank itself."""


class Timed:
    """Makes calls, and measures by the host's clock when each of them began and ended."""

    def __init__(self) -> None:
        self._clock = host_clock()
        self._calls: list[tuple[torch.cuda.Event, int, torch.cuda.Event]] = []

    def call(self, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        y = make()
        end.record()
        self._calls.append((start, time.monotonic_ns(), end))
        return y

    def times(self) -> Times:
        """The times of all calls. Call it once the device has done them. A begin may be reported too late by the error
        of the clock, but never before the host launched the call."""
        return [(max(self._clock(start), launched), self._clock(end)) for start, launched, end in self._calls]


def host_clock() -> Callable[[torch.cuda.Event], int]:
    """A function that gives an event's time in nanoseconds of CLOCK_MONOTONIC, which is the same clock for all ranks.
    It takes the known time of a reference event, and adds the time from there to the given event. Of ten events on the
    idle device, the reference is the one whose time the host knows most precisely, to some microseconds."""
    torch.cuda.synchronize()
    tries = []
    for _ in range(10):
        event = torch.cuda.Event(enable_timing=True)
        before = time.monotonic_ns()
        event.record()
        event.synchronize()
        after = time.monotonic_ns()
        tries.append((after - before, (before + after) // 2, event))
    _, known, reference = min(tries, key=lambda each: each[0])
    return lambda event: known + round(reference.elapsed_time(event) * 1e6)


def layers_in_turn(rank: int, ranks: int) -> tuple[torch.Tensor, list[dict[str, Any]]]:
    """This rank's tokens, and the arguments of four layers for them. In the first and third layer, a router chooses
    among all experts. In the second and fourth layer, the given ids name only experts of this rank."""
    spec = dict(OVERLAPPING)
    tokens, experts, top_k = spec.pop("max_tokens"), spec["experts"], spec["top_k"]
    owned = flashmoe.placement.local_experts(flashmoe.placement.contiguous(experts, ranks), rank)
    own = torch.tensor(owned, device=f"cuda:{device_of(rank)}")
    layers = []
    for turn in range(4):
        whole = random_problem(
            100 + turn, tokens, device=f"cuda:{device_of(rank)}", ids="int32" if turn % 2 else None, **spec
        )
        if turn % 2:
            whole.topk_ids = own[torch.rand(tokens, len(owned), device=own.device).argsort(dim=1)[:, :top_k]].int()
        layers.append(with_experts(whole, owned).arguments())
    x = random_problem(99 + 1000 * rank, tokens, device=f"cuda:{device_of(rank)}", **spec).x
    return x, layers


def forward(
    context: flashmoe.Context, layers: list[dict[str, Any]], x: torch.Tensor, how: Callable[[Callable], torch.Tensor]
) -> torch.Tensor:
    """Calls the layers in order, each with the previous layer's result as its tokens. `how` gets a function that makes
    the call, and returns the call's result."""
    for layer in layers:
        routing = {name: layer[name][: len(x)] for name in ("topk_ids", "topk_weights") if name in layer}
        x = how(functools.partial(flashmoe.moe, context, **{**layer, **routing, "x": x}))
    return x


def overlapping_layers(
    rank: int, ranks: int, name: str, way: str, forwards: int, meetings: Path
) -> tuple[int, Times, Times]:
    """Makes forward passes through several layers in two ways: first in lockstep, where all ranks wait for one another
    after every call; then without any wait of the host, and with about one call of four delayed on the GPU by up to two
    milliseconds. Returns how many outputs of the second way differ in any bit from the first way's, and the times of
    the calls of the first and of the second way.

    In each forward pass, one rank has many tokens and the other ranks have fewer. In layers whose tokens stay on their
    rank, the others are done sooner, and send this rank the rows of the next layer while it still computes."""
    draw, own = random.Random(5), random.Random(f"rank {rank}")
    x, layers = layers_in_turn(rank, ranks)
    inputs = []
    for i in range(forwards):
        tokens = [draw.choice((0, 50, 700, 3000)) for _ in range(ranks)]
        tokens[i % ranks] = len(x)
        first = own.randrange(len(x) - tokens[rank] + 1)
        inputs.append(x[first : first + tokens[rank]])
    store = torch.distributed.FileStore(str(meetings), ranks)
    number = itertools.count()
    apart, together = Timed(), Timed()

    def in_lockstep(make: Callable[[], torch.Tensor]) -> torch.Tensor:
        y = apart.call(make)
        context.synchronize()
        meet(store, ranks, f"after call {next(number)}")
        return y

    def at_once(make: Callable[[], torch.Tensor]) -> torch.Tensor:
        if own.randrange(4) == 0:
            torch.cuda._sleep(own.randrange(4 * HALF_A_MILLISECOND))
        return together.call(make)

    with joined(rank, ranks, name, **{**OVERLAPPING, "dtype": "bfloat16", **WAYS[way]}) as context:
        with poisoned_outputs():
            expected = [forward(context, layers, each, in_lockstep) for each in inputs]
            results = [forward(context, layers, each, at_once) for each in inputs]
        context.synchronize()
    differing = sum(not torch.equal(*pair) for pair in zip(results, expected, strict=True))
    return differing, apart.times(), together.times()


def meet(store: torch.distributed.Store, ranks: int, where: str) -> None:
    """Returns once all ranks have called this with the same `where`."""
    if store.add(where, 1) == ranks:
        store.set(f"{where}: all", "")
    store.wait([f"{where}: all"])


def told_of_a_stall(rank: int, who: int, timeout: float, run: Callable[[], Any]) -> str:
    """Rank `who` calls `run` only after the others have given up waiting for it. Returns this rank's error, or ""."""
    try:
        if rank == who:
            time.sleep(3 * timeout)
        run()
    except flashmoe.FlashMoEError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def stall(rank: int, ranks: int, name: str, transport: str, who: int, timeout: float) -> str:
    """Rank `who` makes the second call only after the others have given up. Then all ranks make a new group, and check
    a call in it. Returns the error that this rank got in the second call."""
    spec = {"hidden": 256, "intermediate": 128, "experts": 8, "top_k": 2}
    whole = random_problem(7, 100, device=f"cuda:{device_of(rank)}", **spec)
    limits = {**spec, "max_tokens": 100, "dtype": "bfloat16", "transport": transport}
    with joined(rank, ranks, f"{name}-1", **limits, timeout=timeout) as context:
        local = with_experts(whole, context.local_experts())
        call(context, local)
        told = told_of_a_stall(rank, who, timeout, lambda: call(context, local))
    with joined(rank, ranks, f"{name}-2", **limits) as context:
        y, report = call(context, local)
        check(whole, y, report)
    return told


def compile_late(rank: int, ranks: int, name: str, who: int, timeout: float, max_tokens: int) -> str:
    """Rank `who` takes three timeouts longer than the others to get its kernel in its first call. Meanwhile the others
    wait in that call, and the host has launched the next ones. Returns this rank's error, or ""."""
    spec = {"hidden": 256, "intermediate": 128, "experts": 8, "top_k": 2}
    whole = random_problem(9, max_tokens, device=f"cuda:{device_of(rank)}", **spec)
    compiled_kernel = jit.kernel

    def late(variant: jit.Variant) -> Path:
        if rank == who:
            time.sleep(3 * timeout)
        return compiled_kernel(variant)

    limits = {**spec, "max_tokens": max_tokens, "dtype": "bfloat16", "return_mode": "direct"}
    with joined(rank, ranks, name, **limits, timeout=timeout) as context:
        local = with_experts(whole, context.local_experts())
        jit.kernel = late
        try:
            for _ in range(3):
                y = flashmoe.moe(context, **local.arguments())
            context.synchronize()
        except flashmoe.FlashMoEError as error:
            return f"{type(error).__name__}: {error}"
        finally:
            jit.kernel = compiled_kernel
        check(whole, y, context.last_call)
    return ""


def die(rank: int, ranks: int, name: str, transport: str, who: int, timeout: float, folder: Path) -> None:
    """Rank `who` kills its own process between two calls. Each other rank writes the error of its second call to a file
    in `folder`."""
    spec = {"hidden": 256, "intermediate": 128, "experts": 8, "top_k": 2}
    whole = random_problem(7, 100, device=f"cuda:{device_of(rank)}", **spec)
    limits = {**spec, "max_tokens": 100, "dtype": "bfloat16", "transport": transport}
    with joined(rank, ranks, name, **limits, timeout=timeout) as context:
        local = with_experts(whole, context.local_experts())
        call(context, local)
        if rank == who:
            os.kill(os.getpid(), signal.SIGKILL)
        told = "nothing"
        try:
            call(context, local)
        except flashmoe.FlashMoEError as error:
            told = f"{type(error).__name__}: {error}"
        (folder / str(rank)).write_text(told)


def disagree(rank: int, ranks: int, name: str, transport: str) -> str:
    """Rank 1 makes a call with another K than the others. Returns the error that this rank got."""
    spec = {"hidden": 256, "intermediate": 128, "experts": 8, "top_k": 3}
    whole = random_problem(7, 100, device=f"cuda:{device_of(rank)}", **spec)
    with joined(rank, ranks, name, **spec, max_tokens=100, dtype="bfloat16", transport=transport) as context:
        local = replace(with_experts(whole, context.local_experts()), top_k=2 if rank == 1 else 3)
        try:
            call(context, local)
        except flashmoe.FlashMoEError as error:
            return f"{type(error).__name__}: {error}"
    return "nothing"


@starting_anew
def reports(
    rank: int, ranks: int, name: str, ways: Sequence[str], spec: dict[str, Any], tokens: list[int]
) -> list[dict[str, Any]]:
    """The reports of one call in each of these ways."""
    whole = random_problem(10, sum(tokens), device=f"cuda:{device_of(rank)}", **spec)
    owners = flashmoe.placement.contiguous(spec["experts"], ranks)
    local = with_experts(share_of(whole, rank, tokens), flashmoe.placement.local_experts(owners, rank))
    contexts = (shared_context(rank, ranks, name, way) for way in ways)
    return [call(context, local, placement=owners)[1].to_dict() for context in contexts]


def operations(rank: int, ranks: int, name: str, way: str, calls: int) -> list[str]:
    """The names of this GPU's operations in `calls` calls, after an earlier call has loaded the kernel."""
    spec = {"hidden": 512, "intermediate": 256, "experts": 16, "top_k": 4}
    whole = random_problem(3, 300, device=f"cuda:{device_of(rank)}", **spec)
    with joined(rank, ranks, name, **spec, max_tokens=300, dtype="bfloat16", **WAYS[way]) as context:
        local = with_experts(whole, context.local_experts())
        call(context, local)
        arguments = local.arguments()

        def run() -> None:
            for _ in range(calls):
                flashmoe.moe(context, **arguments)
            context.synchronize()

        gpu_operations(run)  # not counted: in its first run the profiler may do operations of its own
        return gpu_operations(run)


def module_over_process_group(
    rank: int, ranks: int, name: str, rendezvous: Path
) -> tuple[int, int, int | None, list[bool]]:
    """Makes a context from a process group of PyTorch, and calls a module on it: once as it is, and twice compiled.
    Returns the context's rank, number of ranks and device, and for each of the three calls whether its result has the
    bits that the same tokens give on this GPU alone."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.cuda.set_device(device_of(rank))
    torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    try:
        spec = {"hidden": 512, "intermediate": 256, "experts": 16, "top_k": 4}
        tokens = [200 + 50 * each for each in range(ranks)]
        whole = random_problem(12, sum(tokens), device=f"cuda:{device_of(rank)}", biases=True, **spec)
        own = share_of(whole, rank, tokens)
        sizes = {**spec, "max_tokens": max(tokens), "dtype": "bfloat16"}
        limits = {"timeout": 60.0, "processors": processors()}  # seconds: ranks wait while others compile their kernels
        with flashmoe.Context.from_torch(engine="cuda", **sizes, **limits) as context, torch.no_grad():
            module = module_of(context, whole)
            fast = compiled(module, "aot_eager")
            results = [module(own.x), fast(own.x), fast(own.x)]
            context.synchronize()
            alone = results_alone(own, rank, context.placement)[context.return_mode]
            same = [torch.equal(y, alone) for y in results]
            return context.rank, context.ranks, context.device, same
    finally:
        torch.distributed.destroy_process_group()


def replay(rank: int, ranks: int, name: str, way: str) -> int:
    """Captures a call on every rank and replays it with other tokens. Returns how many replays differ in any bit from
    what the same tokens give on this GPU alone."""
    spec = {"hidden": 512, "intermediate": 256, "experts": 16, "top_k": 4}
    problems = [random_problem(seed, 300, device=f"cuda:{device_of(rank)}", **spec) for seed in range(5)]
    first = problems[0]
    off = 0
    with joined(rank, ranks, name, **spec, max_tokens=300, dtype="bfloat16", **WAYS[way]) as context:
        local = with_experts(first, context.local_experts())
        x = first.x.clone()
        graph, y = capture(context, replace(local, x=x))
        for other in problems:
            x.copy_(other.x)
            graph.replay()
            torch.cuda.synchronize()
            context.synchronize()
            alone = results_alone(replace(first, x=other.x), rank, context.placement)
            off += not torch.equal(y, alone[context.return_mode])
    return off
