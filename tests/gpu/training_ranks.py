"""What tests/gpu/test_training_group.py runs in the processes of a group, one rank each."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import flashmoe
import numpy as np
import torch
from layers import PATIENCE
from leaves import gradients_of, leaves_of, operations_of_backward, poisoned
from ranks import device_of, joined, processors
from test_slices import Sliced
from training import as_array, as_tensor, trainable

Gradients = dict[str, np.ndarray]


def context_for(problem: Any, rank: int, name: str, **more: Any) -> flashmoe.Context:
    mode = {"return_mode": problem.options["return_mode"]} if "return_mode" in problem.options else {}
    limits = problem.limits() | {"timeout": PATIENCE} | mode | more
    return joined(rank, problem.ranks, name, **limits)


def gradients(rank: int, ranks: int, _: str, name: str, calls: Sequence[tuple], times: int) -> list[Gradients]:
    """This rank's gradients for each problem (`calls`: arguments of `trainable`), with the same bits `times` times."""
    found = []
    for number, (seed, tokens, sizes) in enumerate(calls):
        torch.cuda.set_device(device_of(rank))
        problem, grads = trainable(seed, tokens, **sizes)
        with context_for(problem, rank, f"{name}-{number}") as context:
            first = gradients_of(context, problem, grads[rank], rank)
            for _ in range(times - 1):
                for each, values in gradients_of(context, problem, grads[rank], rank).items():
                    assert values.tobytes() == first[each].tobytes(), each
        found.append(first)
    return found


def with_link_clusters(
    rank: int, ranks: int, _: str, name: str, calls: Sequence[tuple], numbers: Sequence[int]
) -> None:
    """Each problem's results and gradients have the same bits, however many clusters (`numbers`) stop early. `calls`
    has the arguments of `trainable` for each problem."""
    for number, (seed, tokens, sizes) in enumerate(calls):
        torch.cuda.set_device(device_of(rank))
        problem, grads = trainable(seed, tokens, **sizes)
        found = []
        for n in numbers:
            with context_for(problem, rank, f"{name}-{number}-{n}", profile={"link_clusters": n}) as context:
                found.append(gradients_of(context, problem, grads[rank], rank))
        for each, values in found[0].items():
            assert all(values.tobytes() == other[each].tobytes() for other in found[1:]), (number, each)


def of_slices(
    rank: int,
    ranks: int,
    _: str,
    name: str,
    seed: int,
    tokens: list[int],
    sizes: dict[str, Any],
    placement: list[int],
    redispatch: bool,
) -> Gradients:
    """This rank's gradients, with each expert in two slices. A second call must have the same bits."""
    torch.cuda.set_device(device_of(rank))
    whole, grads = trainable(seed, tokens, **sizes)
    sliced = Sliced.of(whole, 2, placement)
    with context_for(sliced, rank, name, redispatch=redispatch) as context:
        first = gradients_of(context, sliced, grads[rank], rank)
        for each, values in gradients_of(context, sliced, grads[rank], rank).items():
            assert values.tobytes() == first[each].tobytes(), each
    return first


def operations(rank: int, ranks: int, _: str, name: str, seed: int, tokens: list[int], sizes: dict[str, Any]) -> list:
    """The names of the operations of this rank's GPU in a backward pass."""
    torch.cuda.set_device(device_of(rank))
    problem, grads = trainable(seed, tokens, **sizes)
    with context_for(problem, rank, name) as context:
        return operations_of_backward(context, problem, grads[rank], rank)


def both_ways(
    rank: int, ranks: int, _: str, name: str, seed: int, tokens: list[int], sizes: dict[str, Any], times: int
) -> Gradients:
    """This rank's gradients, with the same bits in `times` calls. Every second call sends x again (`redispatch`)."""
    torch.cuda.set_device(device_of(rank))
    problem, grads = trainable(seed, tokens, **sizes)
    ways = [replace(problem, options=problem.options | {"redispatch": again}) for again in (False, True)]
    with context_for(problem, rank, name, redispatch=True) as context:
        first = gradients_of(context, ways[0], grads[rank], rank)
        for n in range(1, times):
            for each, values in gradients_of(context, ways[n % 2], grads[rank], rank).items():
                assert values.tobytes() == first[each].tobytes(), (n, each)
    return first


def kept_and_needed(
    rank: int, ranks: int, _: str, name: str, seed: int, tokens: list[int], sizes: dict[str, Any], redispatch: bool
) -> tuple:
    """How many bytes a call keeps, how many of them its rows need, and how many rows its experts have kept."""
    torch.cuda.set_device(device_of(rank))
    problem, _grads = trainable(seed, tokens, **sizes)
    with context_for(problem, rank, name, redispatch=redispatch) as context:
        tensors, leaves = leaves_of(problem, rank)
        for each in leaves.values():
            each.requires_grad_()
        size, counted = kept_by(flashmoe.moe(context, **tensors))
        return size, needed_by(problem, rank, counted, redispatch), counted[0]


def kept_by(y: torch.Tensor) -> tuple[int, list[int]]:
    """The bytes that the call with the result y keeps, and what the call has counted
    (`flashmoe.engines.cuda_training.KeptRows`)."""
    node = y.grad_fn
    while not hasattr(node, "saved_tensors"):
        node = node.next_functions[0][0]
    kept, counted, *_others = node.saved_tensors
    return kept.numel(), counted.tolist()


def needed_by(problem: Any, rank: int, counted: Sequence[int], redispatch: bool) -> int:
    """The bytes that a call needs for the rows that it has counted, and for its own tokens' choices and logits."""
    rows, received, *_more = counted
    width = problem.gate_up_proj.shape[1] * problem.gate_up_proj.itemsize
    logits = 0 if problem.router is None else len(problem.router)
    choices = problem.top_k if problem.topk_ids is None else problem.topk_ids[rank].shape[1]
    of_received = 0 if redispatch else received * problem.x[0].itemsize * problem.x[0].shape[1]
    return rows * width + of_received + len(problem.x[rank]) * (8 * choices + 4 * logits)


class Kept(NamedTuple):
    """What a call that keeps has given and kept on one rank."""

    gradients: Gradients
    counted: list[int]
    bytes: int
    needed: int


def one_after_the_other(
    rank: int, ranks: int, _: str, name: str, calls: Sequence[tuple[Any, list[np.ndarray]]], redispatch: bool
) -> list[Kept]:
    """Makes the calls of one layer on one context, then their backward passes, that of the last call first. Each of
    `calls` has a problem and the ranks' dY. The problems differ in tokens and in routing."""
    torch.cuda.set_device(device_of(rank))
    most = max(max(len(x) for x in problem.x) for problem, _grads in calls)
    found, of_layer = [], leaves_of(calls[0][0], rank)[0]
    with context_for(calls[0][0], rank, name, max_tokens=most, redispatch=redispatch) as context:
        graphs = []
        for problem, _grads in calls:
            tensors, leaves = leaves_of(problem, rank)
            shared = {each: of_layer[each] for each in leaves if each not in ("x", "topk_weights")}
            tensors, leaves = tensors | shared, leaves | shared
            for each in leaves.values():
                each.requires_grad_()
            with poisoned():
                graphs.append((flashmoe.moe(context, **tensors), leaves))
        for (problem, grads), (y, leaves) in zip(reversed(calls), reversed(graphs), strict=True):
            size, counted = kept_by(y)
            with poisoned():
                each = torch.autograd.grad(y, list(leaves.values()), as_tensor(grads[rank]).cuda())
            gradients = {named: as_array(one.cpu()) for named, one in zip(leaves, each, strict=True)}
            gradients["y"] = as_array(y.detach().cpu())
            found.append(Kept(gradients, counted, size, needed_by(problem, rank, counted, redispatch)))
    return found[::-1]


def in_any_order(rank: int, ranks: int, _: str, name: str, seed: int, tokens: list[int], sizes: dict[str, Any]) -> int:
    """Makes three calls on one context, each with some of the tokens, then their backward passes in another order, one
    of them twice. Returns how many gradients differ from those of calls made by themselves."""
    torch.cuda.set_device(device_of(rank))
    whole, grads = trainable(seed, tokens, **sizes)
    parts = [slice(0, None), slice(0, 3), slice(20, 57)]
    problems = [replace(whole, x=[x[part] for x in whole.x]) for part in parts]
    given = [grads[rank][part] for part in parts]
    differing = 0
    with context_for(whole, rank, name) as context:
        expected = [gradients_of(context, *each, rank) for each in zip(problems, given, strict=True)]
        calls = []
        for problem in problems:
            tensors, leaves = leaves_of(problem, rank)
            for each in leaves.values():
                each.requires_grad_()
            calls.append((flashmoe.moe(context, **tensors), leaves))
            with torch.no_grad():
                flashmoe.moe(context, **tensors)
        for n in (1, 2, 0, 1):
            y, leaves = calls[n]
            found = torch.autograd.grad(y, list(leaves.values()), as_tensor(given[n]).cuda(), retain_graph=True)
            for each, one in zip(leaves, found, strict=True):
                differing += as_array(one.cpu()).tobytes() != expected[n][each].tobytes()
    return differing


def steps(
    rank: int, ranks: int, _: str, name: str, seed: int, tokens: list[int], sizes: dict[str, Any], times: int
) -> int:
    """Makes `times` steps without a wait between. Returns how many bytes of gradients differ from the first step's."""
    torch.cuda.set_device(device_of(rank))
    problem, grads = trainable(seed, tokens, **sizes)
    with context_for(problem, rank, name) as context:
        tensors, leaves = leaves_of(problem, rank)
        dy = as_tensor(grads[rank]).cuda()
        for each in leaves.values():
            each.requires_grad_()
        first = torch.autograd.grad(flashmoe.moe(context, **tensors), list(leaves.values()), dy)
        off = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(times - 1):
            found = torch.autograd.grad(flashmoe.moe(context, **tensors), list(leaves.values()), dy)
            for one, other in zip(first, found, strict=True):
                off += (one.view(torch.uint8) != other.view(torch.uint8)).sum() if one.numel() else 0
        context.synchronize()
        return int(off)


def stray(rank: int, ranks: int, _: str, name: str, how: str, who: int, timeout: float) -> str:
    """Rank `who` stays out of a backward pass, or makes another call instead. Returns the error that this rank gets."""
    torch.cuda.set_device(device_of(rank))
    problem, grads = trainable(
        21, [60] * ranks, hidden=256, intermediate=128, experts=8, top_k=2, dtype="bfloat16", fused=False, scale=1.0
    )
    told = "nothing"
    with context_for(problem, rank, name, timeout=timeout) as context:
        tensors, leaves = leaves_of(problem, rank)
        for each in leaves.values():
            each.requires_grad_()
        ys = [flashmoe.moe(context, **tensors) for _ in range(2)]
        dy = as_tensor(grads[rank]).cuda()
        try:
            if rank != who:
                torch.autograd.grad(ys[0], list(leaves.values()), dy)
            elif how == "stays out":
                time.sleep(3 * timeout)
                torch.autograd.grad(ys[0], list(leaves.values()), dy)
            elif how == "forward":
                with torch.no_grad():
                    flashmoe.moe(context, **tensors)
            else:  # the backward pass of another call
                torch.autograd.grad(ys[1], list(leaves.values()), dy)
            context.synchronize()
        except flashmoe.FlashMoEError as error:
            told = f"{type(error).__name__}: {error}"
    return told


def alone(rank: int, ranks: int, _: str, seed: int, tokens: list[int], sizes: dict[str, Any]) -> list[Gradients]:
    """For each rank, the gradients of a call of its tokens on this GPU alone, with all experts."""
    torch.cuda.set_device(device_of(rank))
    problem, grads = trainable(seed, tokens, **sizes)
    found = []
    for r in range(ranks):
        own = replace(
            problem,
            x=[problem.x[r]],
            topk_ids=None if problem.topk_ids is None else [problem.topk_ids[r]],
            topk_weights=None if problem.topk_weights is None else [problem.topk_weights[r]],
            placement=None,
        )
        limits = own.limits() | {"timeout": PATIENCE, "return_mode": "direct"}
        with flashmoe.Context(engine="cuda", processors=processors(), **limits) as context:
            found.append(gradients_of(context, own, grads[r]))
    return found


def unique() -> str:
    return f"train-{secrets.token_hex(6)}"
