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
    """Of each problem, what `trainable` is told of it, the gradients of its call here; `times` the same bits."""
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
    """Of each problem, what `trainable` is told of it: results and gradients have the same bits, however many clusters
    stop early."""
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
    """The gradients here of the problem's experts in two slices, twice the same bits."""
    torch.cuda.set_device(device_of(rank))
    whole, grads = trainable(seed, tokens, **sizes)
    sliced = Sliced.of(whole, 2, placement)
    with context_for(sliced, rank, name, redispatch=redispatch) as context:
        first = gradients_of(context, sliced, grads[rank], rank)
        for each, values in gradients_of(context, sliced, grads[rank], rank).items():
            assert values.tobytes() == first[each].tobytes(), each
    return first


def operations(rank: int, ranks: int, _: str, name: str, seed: int, tokens: list[int], sizes: dict[str, Any]) -> list:
    """What this rank's GPU does in a backward pass."""
    torch.cuda.set_device(device_of(rank))
    problem, grads = trainable(seed, tokens, **sizes)
    with context_for(problem, rank, name) as context:
        return operations_of_backward(context, problem, grads[rank], rank)


def both_ways(
    rank: int, ranks: int, _: str, name: str, seed: int, tokens: list[int], sizes: dict[str, Any], times: int
) -> Gradients:
    """The gradients of calls of which every other one sends x again; the same bits."""
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
    """Bytes that a call keeps, and what the rows that it has received need of them."""
    torch.cuda.set_device(device_of(rank))
    problem, _grads = trainable(seed, tokens, **sizes)
    with context_for(problem, rank, name, redispatch=redispatch) as context:
        tensors, leaves = leaves_of(problem, rank)
        for each in leaves.values():
            each.requires_grad_()
        size, counted = kept_by(flashmoe.moe(context, **tensors))
        return size, needed_by(problem, rank, counted, redispatch), counted[0]


def kept_by(y: torch.Tensor) -> tuple[int, list[int]]:
    """Of the call that y is the result of: bytes that it keeps, and what is counted of it
    (`flashmoe.engines.cuda_training.KeptRows`)."""
    node = y.grad_fn
    while not hasattr(node, "saved_tensors"):
        node = node.next_functions[0][0]
    kept, counted, *_others = node.saved_tensors
    return kept.numel(), counted.tolist()


def needed_by(problem: Any, rank: int, counted: Sequence[int], redispatch: bool) -> int:
    """Bytes of what a call has received of what it keeps."""
    rows, received, *_more = counted
    width = problem.gate_up_proj.shape[1] * problem.gate_up_proj.itemsize
    logits = 0 if problem.router is None else len(problem.router)
    choices = problem.top_k if problem.topk_ids is None else problem.topk_ids[rank].shape[1]
    of_received = 0 if redispatch else received * problem.x[0].itemsize * problem.x[0].shape[1]
    return rows * width + of_received + len(problem.x[rank]) * (8 * choices + 4 * logits)


class Kept(NamedTuple):
    """Of a call that keeps."""

    gradients: Gradients
    counted: list[int]
    bytes: int
    needed: int


def one_after_the_other(
    rank: int, ranks: int, _: str, name: str, calls: Sequence[tuple[Any, list[np.ndarray]]], redispatch: bool
) -> list[Kept]:
    """Calls of one layer on one context, each of a problem and dY of all ranks, then their backward passes, the last
    first. The problems differ in tokens and in their routing."""
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
    """Three calls on one context, of some of the tokens each, whose backward passes come in another order, and again:
    how many gradients are not those of calls of their own."""
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
    """So many steps of one problem, without a wait in between; how many bytes of gradients are not the first one's."""
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
    """Rank `who` stays out of a backward pass, or makes another call instead; what each is told."""
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
            else:  # another call's
                torch.autograd.grad(ys[1], list(leaves.values()), dy)
            context.synchronize()
        except flashmoe.FlashMoEError as error:
            told = f"{type(error).__name__}: {error}"
    return told


def alone(rank: int, ranks: int, _: str, seed: int, tokens: list[int], sizes: dict[str, Any]) -> list[Gradients]:
    """Of each rank's tokens, the gradients of their call with all experts on this rank alone."""
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
