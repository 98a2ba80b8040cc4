"""Experts in FP8 on the CUDA engine, against the float64 reference: scales, options, edges, groups, random layers.

Calls of few tokens have a kernel of their own, and test_few_quantised.py tests it. FLASHMOE_EXAMPLES sets the number of
random layers, FLASHMOE_SEED makes a run repeat another.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import flashmoe
import ml_dtypes
import numpy as np
import pytest
from flashmoe.launch import RankPool
from hypothesis import given
from hypothesis import strategies as st
from layer_options import CLAMPED
from layers import at_random
from problems import Outcome, check, quantised, random_problem
from quantised_on_gpu import (
    call,
    check_a_captured_call,
    check_that_scales_of_other_blocks_are_noticed,
    check_what_is_no_number,
    context_of,
    in_group,
    layer_and_quantisation,
    run_and_check,
)
from ranks import pool_of

pytestmark = pytest.mark.gpu

EXAMPLES = int(os.environ.get("FLASHMOE_EXAMPLES", "200"))
SIZES: dict[str, Any] = {"hidden": 272, "intermediate": 144, "experts": 12, "top_k": 4, "dtype": "bfloat16"}
"""H and I are no multiples of 128, so the last blocks of scales are smaller."""


# ---- Layers --------------------------------------------------------------------------------------------------

LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "whole blocks": {"hidden": 512, "intermediate": 256},
    "no gate": {"activation": "silu"},
    "GELU": {"activation": "gelu", "intermediate": 400},
    "ReLU squared": {"activation": "relu2", "intermediate": 128},
    "biases": {"biases": (True, True, True)},
    "biases without a gate": {"biases": (True, True, True), "activation": "relu"},
    "interleaved": {"activation": "clamped_swiglu", "interleaved": True, "biases": (False, True, True), **CLAMPED},
    "weights on input": {"weights_on_input": True},
    "capacity": {"capacity_factor": 0.6, "skew": 3.0},
    "given routing": {"fused": False},
    "one expert for each token": {"top_k": 1},
    "two experts for each token": {"top_k": 2, "experts": 4},
    "shared": {"shared": 1, "shared_gate": True},
    "shared, in slices": {"shared": 3, "intermediate": 128},
    "shared, in slices, interleaved": {"shared": 2, "intermediate": 128, "interleaved": True},
    "shared, in slices, no gate": {"shared": 3, "intermediate": 128, "activation": "silu"},
    "float16": {"dtype": "float16"},
}


@pytest.mark.parametrize("scales", ["block", "row", "tensor"])
@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_layers(options: dict[str, Any], scales: str):
    run_and_check(quantised(random_problem(1, [165], **SIZES | options), scales))


@pytest.mark.parametrize(
    "tokens", [0, 1, 2, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 600]
)
def test_tokens_around_the_sizes_of_tiles(tokens: int):
    run_and_check(quantised(random_problem(tokens, [tokens], **SIZES | {"experts": 2, "top_k": 2})))


@pytest.mark.parametrize("hidden", [16, 128, 144, 240, 256, 1040])
@pytest.mark.parametrize("intermediate", [16, 112, 128, 272, 384])
def test_sizes_around_those_of_blocks(hidden: int, intermediate: int):
    problem = random_problem(hidden, [70], **SIZES | {"hidden": hidden, "intermediate": intermediate})
    run_and_check(quantised(problem))


EDGES: dict[str, tuple[int, dict[str, Any]]] = {
    "one expert": (300, {"experts": 1, "top_k": 1}),
    "every expert for every token": (150, {"top_k": 12}),
    "all tokens on the same experts": (700, {"top_k": 2, "skew": 50.0}),
    "all tokens on one expert": (1500, {"top_k": 1, "skew": 50.0}),
    "experts without tokens": (3, {"experts": 300}),
    "large values": (100, {"scale": 8.0}),
    "small values": (100, {"scale": 0.03}),
}


@pytest.mark.parametrize("edge", EDGES)
def test_edge(edge: str):
    tokens, changes = EDGES[edge]
    run_and_check(quantised(random_problem(len(edge), [tokens], **SIZES | changes)))


@pytest.mark.parametrize("processors", [2, 6, 66])
def test_few_thread_blocks(processors: int):
    run_and_check(quantised(random_problem(9, [500], **SIZES)), processors=processors)


def test_x_may_come_quantised_which_changes_no_bit():
    problem = random_problem(5, [200], **SIZES, fused=False)
    y = run_and_check(quantised(problem))
    given_x = quantised(problem, x=True)
    np.testing.assert_array_equal(run_and_check(given_x), y)
    assert y.dtype == ml_dtypes.bfloat16


def test_what_is_no_number_reaches_its_own_token_alone():
    check_what_is_no_number(quantised(random_problem(6, [80], **SIZES, fused=False)))


@pytest.mark.parametrize("scales", ["block", "row", "tensor"])
def test_as_many_numbers_as_a_models_layer_has(scales: str):
    """There are so many tiles, blocks of columns and steps of a product that each stage is filled many times."""
    sizes = {"hidden": 2048, "intermediate": 768, "experts": 8, "top_k": 2}
    run_and_check(quantised(random_problem(11, [1100], **SIZES | sizes), scales))


def test_a_captured_call_repeats():
    check_a_captured_call(quantised(random_problem(12, [200], **SIZES)))


def test_the_bound_notices_scales_of_other_blocks():
    problem = quantised(random_problem(9, [512], **SIZES | {"hidden": 512, "intermediate": 256}, fused=False))
    check_that_scales_of_other_blocks_are_noticed(problem)


# ---- Refusals ------------------------------------------------------------------------------------------------


def test_what_there_is_no_kernel_of_is_refused_by_name():
    expected = (
        r"^CUDA engine: x: expected bfloat16, float16 or float8_e4m3fn with weights of float8_e4m3fn, got float32$"
    )
    wide = quantised(random_problem(13, [3], **SIZES | {"dtype": "float32"}))
    with pytest.raises(flashmoe.InvalidArgument, match=expected):
        context_of(wide)
    odd = quantised(random_problem(13, [3], **SIZES | {"hidden": 136}))
    with context_of(odd) as context, pytest.raises(flashmoe.InvalidArgument, match="expected H a multiple of 16"):
        call(context, odd)
    with context_of(odd) as context:
        transposed = {"transposed": True}
        problem = replace(odd, options=odd.options | transposed)
        with pytest.raises(flashmoe.InvalidArgument, match="transposed: expected False with weights of float8_e4m3fn"):
            call(context, problem)


# ---- Groups --------------------------------------------------------------------------------------------------

TOKENS = [165, 0, 70, 233]
OF_GROUPS = (
    "plain",
    "biases",
    "weights on input",
    "capacity",
    "given routing",
    "shared",
    "shared, in slices",
    "float16",
)


@pytest.fixture(scope="module", params=[2, 4])
def pool(request):
    with pool_of(request.param) as made:
        yield made


@pytest.mark.timeout(300)
@pytest.mark.parametrize("return_mode", ["direct", "reduced"])
@pytest.mark.parametrize("layer", OF_GROUPS)
def test_ranks_of_uneven_tokens(pool: RankPool, layer: str, return_mode: str):
    options = SIZES | LAYERS[layer] | {"return_mode": return_mode}
    problem = quantised(random_problem(3, TOKENS[: pool.ranks], **options))
    results = pool.call(in_group, [(problem, return_mode)] * pool.ranks, timeout=120.0)
    check(problem, [Outcome(y, report) for y, report in results], tensor_cores=True)


# ---- Random layers -------------------------------------------------------------------------------------------


@st.composite
def cases(draw) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of `random_problem` and of `quantised`."""
    experts = draw(st.integers(1, 24))
    return layer_and_quantisation(draw, experts, draw(st.integers(1, min(6, experts))), draw(st.integers(0, 400)))


@pytest.mark.timeout(0)
@at_random(EXAMPLES)
@given(case=cases())
def test_any_layer_agrees_with_the_reference(case: Any):
    arguments, quantisation = case
    run_and_check(quantised(random_problem(**arguments), **quantisation))
