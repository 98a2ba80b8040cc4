"""Calls of one rank on a GPU and their gradients, for the tests of training."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import flashmoe
import numpy as np
import pytest
import torch
from layers import gpu_operations
from problems import Problem
from training import CONSTANT, as_array, as_tensor

OTHER_KERNELS = ("gelu", "relu", "swiglu", "clamped_swiglu")
"""The activations with which layers in bfloat16 can train with weights on the input, a shared expert or slices."""


@contextmanager
def poisoned() -> Iterator[None]:
    """Fills new tensors with NaN, or with 255 if their type has none, so that tests notice elements nobody writes."""

    def poison(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.fill_(math.nan if tensor.is_floating_point() else 255)

    with pytest.MonkeyPatch.context() as patch:
        empty_like, new_empty = torch.empty_like, torch.Tensor.new_empty
        patch.setattr(torch, "empty_like", lambda *args, **how: poison(empty_like(*args, **how)))
        patch.setattr(torch.Tensor, "new_empty", lambda *args, **how: poison(new_empty(*args, **how)))
        yield


def leaves_of(problem: Problem, rank: int = 0) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The rank's arguments for `flashmoe.moe`, on the device, and those of them that have gradients."""
    arguments = problem.arguments(rank)
    tensors = {
        name: as_tensor(each).cuda() if isinstance(each, np.ndarray) else each for name, each in arguments.items()
    }
    leaves = {name: each for name, each in tensors.items() if torch.is_tensor(each) and name not in CONSTANT}
    return tensors, leaves


def gradients_of(
    context: flashmoe.Context, problem: Problem, grad: np.ndarray, rank: int = 0, **instead: torch.Tensor
) -> dict[str, np.ndarray]:
    """Makes one call and its backward pass from `grad`, the gradient of y. Returns the gradients by the arguments'
    names, and y under "y". `instead`: tensors to use in place of the problem's, by name; they must have gradients."""
    tensors, leaves = leaves_of(problem, rank)
    tensors |= instead
    leaves |= instead
    for each in leaves.values():
        each.requires_grad_()
    with poisoned():
        y = flashmoe.moe(context, **tensors)
        found = torch.autograd.grad(y, list(leaves.values()), as_tensor(grad).cuda())
    context.synchronize()
    named = dict(zip(leaves, found, strict=True))
    return {name: as_array(each.cpu()) for name, each in named.items()} | {"y": as_array(y.detach().cpu())}


def operations_of_backward(context: flashmoe.Context, problem: Problem, dy: np.ndarray, rank: int = 0) -> list[str]:
    """The names of the GPU's operations in the rank's backward pass, for all tensors that have gradients."""
    tensors, leaves = leaves_of(problem, rank)
    for each in leaves.values():
        each.requires_grad_()
    grad = as_tensor(dy).cuda()
    y = flashmoe.moe(context, **tensors)

    def backward() -> None:
        torch.autograd.grad(y, list(leaves.values()), grad, retain_graph=True)

    backward()
    gpu_operations(backward)  # not counted: in its first run the profiler may do operations of its own
    return gpu_operations(backward)
