"""A token's result has the same bits in every call, whatever the other tokens are and whichever kernel computes it, in
16 bits on one GPU (docs/invariance.md)."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from layers import Problem, call, context_of, random_problem
from seeds import SEED
from test_few import USUAL, first_tokens

pytestmark = pytest.mark.gpu

LONGEST = 4096
LENGTHS = (*range(1, 65), 100, 128, 129, 256, 257, 384, 385, 512, 513, 1000)
"""Numbers of tokens on both sides of every boundary between kernels, and between ways to compute within a kernel."""

LONG = {"hidden": 640, "intermediate": 2056, "experts": 9, "top_k": 4}
"""Sizes with which calls of a few tokens have few and long tasks, so that these are halved."""
LAYERS = {
    "usual": USUAL,
    "Qwen3-30B-A3B": {"hidden": 2048, "intermediate": 768, "experts": 128, "top_k": 8},
    "Mixtral, fewer columns": {"hidden": 4096, "intermediate": 3584, "experts": 8, "top_k": 2},
    "GELU and biases": {**LONG, "biases": True, "activation": "gelu"},
    "long rows, one expert a token": {"hidden": 7168, "intermediate": 264, "experts": 33, "top_k": 1},
    "two experts a token, which are joined": {**USUAL, "top_k": 2},
    "weights on the input": {**USUAL, "weights_on_input": True},
    "a gate that two blocks share": {"hidden": 1032, "intermediate": 136, "experts": 300, "top_k": 6},
    "odd sizes": {"hidden": 1032, "intermediate": 1368, "experts": 7, "top_k": 3},
    "smallest": {"hidden": 8, "intermediate": 8, "experts": 1, "top_k": 1},
    "a shared expert": {**USUAL, "shared": 1, "shared_gate": True},
    "a shared expert, long rows": {**LONG, "shared": 1},
}


def differing(problem: Problem, lengths: tuple[int, ...]) -> list[int]:
    """The lengths at which calls with the problem's first tokens have other bits than a call with all its tokens."""
    with context_of(problem) as context:
        expected = call(context, problem)[0].clone()
        return [n for n in lengths if not torch.equal(call(context, first_tokens(problem, n))[0], expected[:n])]


@pytest.mark.parametrize("ids", [None, "int32"], ids=["router", "given"])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_prefix(dtype: str, layer: str, ids: str | None):
    problem = random_problem(71, LONGEST, dtype=dtype, ids=ids, skew=1.0, **LAYERS[layer])
    assert differing(problem, LENGTHS) == []


def random_layer(draw: random.Random) -> dict[str, Any]:
    """Sizes and options of a layer, as arguments of `random_problem`."""
    experts = draw.choice((1, 2, 5, 8, 31, 64, 100, 128, 200, 257, 384))
    layer: dict[str, Any] = {
        "hidden": 8 * draw.randint(1, draw.choice((16, 80, 400))),
        "intermediate": 8 * draw.randint(1, draw.choice((8, 40, 200))),
        "experts": experts,
        "top_k": draw.randint(1, min(experts, 9)),
        "dtype": draw.choice(("bfloat16", "float16")),
        "ids": draw.choice((None, None, "int32")),
        "activation": draw.choice(("swiglu", "gelu")),
        "skew": draw.choice((0.0, 1.0, 4.0)),
        "shared": draw.choice((0, 0, 1)),
    }
    if layer["shared"]:
        layer["shared_gate"] = draw.random() < 0.5
    else:
        layer["biases"] = draw.random() < 0.3
        layer["weights_on_input"] = draw.random() < 0.2
    if layer["ids"] is None:
        layer["round_logits"] = draw.random() < 0.3
        layer["renormalize"] = draw.random() < 0.5
        layer["score"] = draw.choice(("softmax", "sigmoid"))
    return layer


@pytest.mark.parametrize("part", range(4))
def test_random_layers(part: int):
    draw = random.Random(SEED + part)
    for _ in range(50):
        layer = random_layer(draw)
        lengths = {1, 8, 9, *(draw.randint(2, 600) for _ in range(5))}
        problem = random_problem(draw.randrange(1 << 30), draw.choice((601, 1100)), **layer)
        assert differing(problem, tuple(sorted(lengths))) == [], layer
