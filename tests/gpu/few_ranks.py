"""Functions that tests/gpu/test_few_group.py runs in the processes of a group, one rank in each process.

The same ranks have two contexts. One has so few `max_tokens` that the kernel for a few tokens makes its calls, the
other has so many that the general kernel makes every call. With `direct`, a token's row has the same bits in both
contexts, whatever the number of tokens in the call."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import flashmoe
import torch
from layers import Problem, call, capture, check, gpu_operations, poisoned_outputs, random_problem
from ranks import alone_on, device_of, joined, processors, share_of, told_of_a_stall, with_experts

MANY = 2048
"""`max_tokens` of a context whose calls all use the general kernel, because it has too many for the other kernel."""


def sizes_of(spec: dict[str, Any], most: int, **limits: Any) -> dict[str, Any]:
    sizes = {name: spec[name] for name in ("hidden", "intermediate", "experts", "top_k")}
    sizes["shared_intermediate"] = spec["intermediate"]
    return {**sizes, "max_tokens": most, "dtype": "bfloat16", "return_mode": "direct", **limits}


def own_problem(rank: int, ranks: int, spec: dict[str, Any], most: int, seed: int) -> Problem:
    """A problem with `most` tokens, which are this rank's share of the group's, and with all experts."""
    whole = random_problem(seed, most * ranks, device=f"cuda:{device_of(rank)}", **spec)
    return share_of(whole, rank, [most] * ranks)


def first_tokens(problem: Problem, tokens: int) -> Problem:
    names = [name for name in ("x", "topk_ids", "topk_weights") if getattr(problem, name) is not None]
    return replace(problem, **{name: getattr(problem, name)[:tokens] for name in names})


def by_general_kernel(
    rank: int, ranks: int, name: str, own: Problem, spec: dict[str, Any], **limits: Any
) -> torch.Tensor:
    """The rows of all tokens as the general kernel computes them, checked against the float64 reference."""
    with joined(rank, ranks, f"{name}-general", **sizes_of(spec, MANY, **limits)) as context:
        y, report = call(context, with_experts(own, context.local_experts()))
        check(own, y, report)
        return y


def alone(rank: int, own: Problem) -> list[torch.Tensor]:
    """Rows as a lone rank with all experts computes them: of one token, of eight, and of all tokens."""
    with alone_on(rank, own) as context:
        return [call(context, first_tokens(own, tokens))[0] for tokens in (1, 8, len(own.x))]


def compare(
    rank: int,
    ranks: int,
    name: str,
    spec: dict[str, Any],
    most: int,
    calls: list[list[int]],
    placement: flashmoe.placement.Placement | None = None,
    late: bool = False,
) -> int:
    """Makes `calls`, which give the number of each rank's tokens, in a context for few tokens; the host does not wait
    between them. Outputs begin as NaN. Returns how many calls differ in any bit from the general kernel's rows; calls
    of a lone rank are among them. late: in about one call of 16, a rank's GPU is delayed first."""
    own = own_problem(rank, ranks, spec, most, 61)
    expected = by_general_kernel(rank, ranks, name, own, spec, placement=placement)
    by_one = alone(rank, own)
    draw = random.Random(f"rank {rank}")
    limits = sizes_of(spec, most, placement=placement)
    with joined(rank, ranks, f"{name}-few", **limits) as context, poisoned_outputs():
        local = with_experts(own, context.local_experts())
        results = []
        for tokens in calls:
            if late and draw.randrange(16) == 0:
                torch.cuda._sleep(draw.randrange(1_000_000))
            results.append(flashmoe.moe(context, **first_tokens(local, tokens[rank]).arguments()))
        context.synchronize()
        assert context.last_call.tokens == calls[-1][rank]
    return sum(not torch.equal(y, expected[: len(y)]) for y in [*results, *by_one])


def operations(rank: int, ranks: int, name: str, spec: dict[str, Any], most: int) -> list[str]:
    """The names of the GPU's operations in three calls of a context for few tokens."""
    own = own_problem(rank, ranks, spec, most, 62)
    with joined(rank, ranks, name, **sizes_of(spec, most)) as context:
        local = with_experts(own, context.local_experts())
        call(context, local)
        arguments = local.arguments()

        def run() -> None:
            for _ in range(3):
                flashmoe.moe(context, **arguments)
            context.synchronize()

        gpu_operations(run)
        return gpu_operations(run)


def promised(rank: int, ranks: int, name: str, spec: dict[str, Any], most: int, calls: int) -> tuple[int, list[str]]:
    """Calls of one context for many tokens, in random order with a promise of at most `most` tokens and without one.
    Returns how many differ from the general kernel's rows, and the kernels of one more call with a promise."""
    own = own_problem(rank, ranks, spec, most, 65)
    expected = by_general_kernel(rank, ranks, name, own, spec)
    draw = random.Random(11)
    with joined(rank, ranks, f"{name}-promised", **sizes_of(spec, MANY)) as context, poisoned_outputs():
        local = with_experts(own, context.local_experts())
        results = []
        for _ in range(calls):
            tokens = [draw.choice((0, 1, 3, 9, most)) for _ in range(ranks)]
            promise = draw.choice((None, most, max(*tokens, 1)))
            given = first_tokens(local, tokens[rank]).arguments()
            results.append(flashmoe.moe(context, **given, most_tokens=promise))
        context.synchronize()
        off = sum(not torch.equal(y, expected[: len(y)]) for y in results)

        def run() -> None:
            flashmoe.moe(context, **local.arguments(), most_tokens=most)
            context.synchronize()

        run()
        gpu_operations(run)
        return off, [name for name in gpu_operations(run) if "flashmoe" in name]  # others poison the output


def mixed(rank: int, ranks: int, name: str, spec: dict[str, Any], most: int, calls: int, alike: bool) -> int:
    """Calls of a layer without and with a shared expert, in random order in one context for few tokens; returns how
    many differ from the general kernel's rows. The general kernel makes the calls with the shared expert. alike: in
    each call, all ranks take the same of the two layers. Otherwise each rank draws one for itself, so that the two
    kernels meet in one call. (Ranks need not agree on a shared expert.) Ranks that share a GPU then have half as many
    thread blocks each: otherwise blocks of one kernel could occupy one of each two multiprocessors that a cluster of
    the other kernel needs together."""
    with_shared = own_problem(rank, ranks, {**spec, "shared": 1}, most, 63)
    layers = (replace(with_shared, shared_gate_up=None, shared_down=None), with_shared)
    expected = [by_general_kernel(rank, ranks, f"{name}-{i}", own, spec) for i, own in enumerate(layers)]
    draw = random.Random(7)
    choose = draw if alike else random.Random(f"rank {rank}")
    blocks = processors()
    if blocks is not None and not alike:
        blocks //= 2
    with (
        joined(rank, ranks, f"{name}-mixed", **sizes_of(spec, most), processors=blocks) as context,
        poisoned_outputs(),
    ):
        local = [with_experts(own, context.local_experts()) for own in layers]
        results = []
        for _ in range(calls):
            tokens = [draw.choice((0, 1, 3, 9, most)) for _ in range(ranks)]
            which = choose.randrange(2)
            y = flashmoe.moe(context, **first_tokens(local[which], tokens[rank]).arguments())
            results.append((y, expected[which][: len(y)]))
        context.synchronize()
    return sum(not torch.equal(y, rows) for y, rows in results)


def replay(rank: int, ranks: int, name: str, spec: dict[str, Any], most: int) -> int:
    """Captures a call and replays it with other tokens; returns how many replays differ from a call with them."""
    problems = [own_problem(rank, ranks, spec, most, seed) for seed in (64, 65, 66)]
    off = 0
    with joined(rank, ranks, f"{name}-graph", **sizes_of(spec, most)) as context:
        local = with_experts(problems[0], context.local_experts())
        x = local.x.clone()
        graph, y = capture(context, replace(local, x=x))
        for other in problems:
            x.copy_(other.x)
            y.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            again, report = call(context, replace(local, x=x))
            check(replace(problems[0], x=other.x), y, report)
            off += not torch.equal(y, again)
    return off


def stall(rank: int, ranks: int, name: str, spec: dict[str, Any], most: int, who: int, timeout: float) -> str:
    """Rank `who` makes the third call only after the others have given up. Then all ranks make a new group, and check a
    call in it. Returns the error that this rank got in the third call."""
    own = own_problem(rank, ranks, spec, most, 67)
    with joined(rank, ranks, f"{name}-1", **sizes_of(spec, most), timeout=timeout) as context:
        local = with_experts(own, context.local_experts())
        for _ in range(2):
            call(context, local)
        told = told_of_a_stall(rank, who, timeout, lambda: call(context, local))
    with joined(rank, ranks, f"{name}-2", **sizes_of(spec, most)) as context:
        check(own, *call(context, local))
    return told


def disagree(rank: int, ranks: int, name: str, spec: dict[str, Any], most: int) -> str:
    """Rank 1 makes a call with another K than the others. Returns the error that this rank got."""
    own = own_problem(rank, ranks, spec, most, 69)
    with joined(rank, ranks, name, **sizes_of(spec, most)) as context:
        local = with_experts(own, context.local_experts())
        try:
            call(context, replace(local, top_k=own.top_k - 1) if rank == 1 else local)
        except flashmoe.FlashMoEError as error:
            return f"{type(error).__name__}: {error}"
    return "nothing"
