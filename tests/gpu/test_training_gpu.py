"""Gradients on a GPU, of a rank alone: against the float64 reference within derived bounds.

FLASHMOE_EXAMPLES sets the number of random layers, FLASHMOE_SEED makes a run repeat another. Memory that PyTorch gives
begins as NaN.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import flashmoe
import flashmoe.nn
import numpy as np
import pytest
import torch
from flashmoe.spec import GATED
from hypothesis import given
from hypothesis import strategies as st
from layer_options import CLAMPED
from layers import PATIENCE, at_random
from problems import Problem
from training import CONSTANT, as_array, as_tensor, check, trainable

pytestmark = pytest.mark.gpu

EXAMPLES = int(os.environ.get("FLASHMOE_EXAMPLES", "30"))
USUAL = {"hidden": 256, "intermediate": 192, "experts": 16, "top_k": 4, "dtype": "bfloat16", "scale": 1.0}
GIVEN = {"fused": False}
BIASES = {"biases": (True,) * 3}
GPT_OSS = CLAMPED | {"interleaved": True, "transposed": True} | BIASES
DEEPSEEK = {"score": "sigmoid", "choice_bias": True, "groups": 4, "top_groups": 2, "routed_scale": 2.5}


@contextmanager
def poisoned() -> Iterator[None]:
    """Results and memory begin as NaN, whatever their type, so that what nobody writes is noticed."""

    def poison(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.fill_(math.nan if tensor.is_floating_point() else 255)

    with pytest.MonkeyPatch.context() as patch:
        empty_like, new_empty = torch.empty_like, torch.Tensor.new_empty
        patch.setattr(torch, "empty_like", lambda *args, **how: poison(empty_like(*args, **how)))
        patch.setattr(torch.Tensor, "new_empty", lambda *args, **how: poison(new_empty(*args, **how)))
        yield


def leaves_of(problem: Problem) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The arguments of `flashmoe.moe` on the device, and those among them that have gradients."""
    arguments = problem.arguments(0)
    tensors = {name: as_tensor(each).cuda() if isinstance(each, np.ndarray) else each for name, each in arguments.items()}
    leaves = {name: each for name, each in tensors.items() if torch.is_tensor(each) and name not in CONSTANT}
    return tensors, leaves


def gradients_of(
    context: flashmoe.Context, problem: Problem, grad: np.ndarray, **instead: torch.Tensor
) -> dict[str, np.ndarray]:
    """Of one call, by name, for the gradient of y; and y. `instead`: tensors in place of the problem's."""
    tensors, leaves = leaves_of(problem)
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


def context_of(problem: Problem, **more: Any) -> flashmoe.Context:
    return flashmoe.Context(engine="cuda", **problem.limits() | {"timeout": PATIENCE, "return_mode": "direct"} | more)


def run_and_check(seed: int, tokens: int, **sizes: Any) -> None:
    problem, grads = trainable(seed, [tokens], **USUAL | sizes)
    with context_of(problem) as context:
        check(problem, grads, [gradients_of(context, problem, grads[0])], engine="cuda")


LAYERS: dict[str, dict[str, Any]] = {
    "given": GIVEN,
    "given, biases": GIVEN | BIASES,
    "router": {},
    "router, biases": BIASES,
    "not normalised": {"renormalize": False},
    "sigmoid, not normalised": {"score": "sigmoid", "renormalize": False},
    "DeepSeek-V3": DEEPSEEK,
    "relu": GIVEN | {"activation": "relu"},
    "relu2": GIVEN | {"activation": "relu2"},
    "gelu": BIASES | {"activation": "gelu"},
    "silu": GIVEN | {"activation": "silu"},
    "geglu": {"activation": "geglu"},
    "clamped": CLAMPED | BIASES,
    "interleaved": {"interleaved": True},
    "transposed": GIVEN | {"transposed": True},
    "transposed, no gate": GIVEN | {"transposed": True, "activation": "relu"},
    "gpt-oss": GPT_OSS,
    "a capacity": {"capacity_factor": 0.5, "skew": 3.0},
    "a capacity, given": GIVEN | {"capacity_factor": 0.5, "skew": 3.0},
}
EDGES: dict[str, tuple[int, dict[str, Any]]] = {
    "no tokens": (0, {}),
    "one token": (1, {}),
    "nine tokens": (9, GIVEN),
    "one expert a token": (301, {"top_k": 1}),
    "two experts a token": (1000, {"top_k": 2, "experts": 4}),
    "every expert for every token": (150, {"top_k": 16}),
    "all tokens to one expert": (700, {"top_k": 1, "skew": 50.0}),
    "experts without tokens": (3, {"experts": 100} | BIASES),
    "the smallest sizes": (70, {"hidden": 8, "intermediate": 8} | BIASES),
    "the smallest H": (70, {"hidden": 8, "intermediate": 1000}),
    "the smallest I": (70, {"hidden": 1000, "intermediate": 8}),
    "sizes just above a tile's": (257, {"hidden": 264, "intermediate": 264}),
    "transposed, sizes just above a tile's": (257, {"hidden": 264, "intermediate": 264, "transposed": True}),
    "several tiles": (1500, {"experts": 4, "top_k": 2, "hidden": 384, "intermediate": 320}),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_layers(options, dtype):
    run_and_check(3, 333, dtype=dtype, **options)


@pytest.mark.parametrize(("tokens", "options"), EDGES.values(), ids=EDGES)
def test_edges(tokens, options):
    run_and_check(4, tokens, **options)
