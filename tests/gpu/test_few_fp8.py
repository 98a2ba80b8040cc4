"""Calls of a few tokens with experts in FP8, which have a kernel of their own (sm90/decode/alone.cuh)."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from layer_options import CLAMPED
from layers import at_random
from problems import Outcome, check, quantised, random_problem
from quantised_on_gpu import (
    call,
    check_a_captured_call,
    check_that_bits_are_a_tokens_own,
    check_that_scales_of_other_blocks_are_noticed,
    check_what_is_no_number,
    context_of,
    first_tokens,
    layer_and_quantisation,
    run_and_check,
    with_shared,
)

pytestmark = pytest.mark.gpu

EXAMPLES = max(1, int(os.environ.get("FLASHMOE_EXAMPLES", "200")) // 2)
SIZES: dict[str, Any] = {"hidden": 272, "intermediate": 144, "experts": 24, "top_k": 5, "dtype": "bfloat16"}
"""H and I are no multiples of 128, so the last blocks of scales are smaller."""
MOST = 76
"""The most tokens with which this layer uses the kernel for a few tokens: experts have at most 16 rows on average."""


@pytest.mark.parametrize("how", ["router", "given", "given, x in FP8"])
@pytest.mark.parametrize("scales", ["block", "row", "tensor"])
def test_every_number_of_tokens(scales: str, how: str):
    """Calls of the kernel for a few tokens take turns with calls of one token more, which the general kernel computes,
    in one context. Neither kernel disturbs the other."""
    problem = random_problem(41, [MOST + 1], **SIZES, fused=how == "router", skew=3.0, biases=(True, True, True))
    problem = quantised(problem, scales, x=how == "given, x in FP8")
    with context_of(problem) as context:
        for tokens in (*range(1, 10), MOST + 1, 16, 17, 33, MOST + 1, 64, MOST, 1):
            part = first_tokens(problem, tokens)
            y, report = call(context, part)
            check(part, [Outcome(y, report)], tensor_cores=True)


@pytest.mark.parametrize("tokens", [128, 256])
@pytest.mark.parametrize("skew", [0.0, 2.5, 50.0])
def test_many_of_the_few(tokens: int, skew: float):
    """With a skew, some experts have more rows than a warp multiplies at a time, and some have none."""
    sizes = {"hidden": 512, "intermediate": 128, "experts": 128, "top_k": 8, "dtype": "bfloat16"}
    run_and_check(quantised(random_problem(51, [tokens], **sizes, skew=skew)))


@pytest.mark.parametrize("tokens", [1, 8, 96])
def test_all_tokens_on_one_expert(tokens: int):
    """All tokens choose the last expert, so the experts before it have no tokens."""
    problem = random_problem(52, [tokens], **SIZES | {"top_k": 1}, fused=False)
    problem.topk_ids = [np.full((tokens, 1), 23, np.int32)]
    run_and_check(quantised(problem))


LAYERS: dict[str, dict[str, Any]] = {
    "whole blocks": {"hidden": 512, "intermediate": 256},
    "smallest": {"hidden": 16, "intermediate": 16},
    "no gate": {"activation": "silu"},
    "GELU": {"activation": "gelu", "intermediate": 400},
    "GEGLU": {"activation": "geglu"},
    "ReLU squared": {"activation": "relu2", "intermediate": 128},
    "biases": {"biases": (True, True, True)},
    "biases without a gate": {"biases": (True, True, True), "activation": "relu"},
    "interleaved": {"activation": "clamped_swiglu", "interleaved": True, "biases": (False, True, True), **CLAMPED},
    "weights on input": {"weights_on_input": True},
    "capacity": {"capacity_factor": 0.6, "skew": 3.0},
    "sigmoids": {"score": "sigmoid", "choice_bias": True, "routed_scale": 2.5},
    "one expert for each token": {"top_k": 1},
    "shared": {"shared": 1, "shared_gate": True},
    "parts of the intermediate columns": {"intermediate": 8192, "experts": 6, "top_k": 2},
    "float16": {"dtype": "float16"},
}


@pytest.mark.parametrize("tokens", [5, 48])
@pytest.mark.parametrize("scales", ["block", "row", "tensor"])
@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_layers(options: dict[str, Any], scales: str, tokens: int):
    run_and_check(quantised(random_problem(1, [tokens], **SIZES | options), scales))


@pytest.mark.parametrize("scales", ["block", "row", "tensor"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_slices_of_a_shared_expert(interleaved: bool, scales: str):
    """The kernel for a few tokens computes each slice as a choice, and rounds each slice's result row before it adds
    them. With scales of blocks, a slice's scales are rows of the scales of shared_gate_up, and columns of the scales of
    shared_down. With scales of rows, all slices share the scales of shared_down. With scales of matrices, they share
    both."""
    sizes = SIZES | {"intermediate": 128, "shared": 3, "shared_gate": True, "interleaved": interleaved}
    run_and_check(quantised(random_problem(54, [7], **sizes), scales), shared_in_slices=True)


def test_as_many_numbers_as_a_models_layer_has():
    sizes = {"hidden": 2048, "intermediate": 768, "experts": 16, "top_k": 8, "dtype": "bfloat16"}
    problem = quantised(random_problem(11, [32], **sizes))
    for tokens in (1, 32):
        run_and_check(first_tokens(problem, tokens))


def test_few_thread_blocks():
    run_and_check(quantised(random_problem(9, [MOST], **SIZES)), processors=4)


def test_x_may_come_quantised_which_changes_no_bit():
    problem = random_problem(5, [40], **SIZES, fused=False)
    y = run_and_check(quantised(problem))
    np.testing.assert_array_equal(run_and_check(quantised(problem, x=True)), y)


@pytest.mark.parametrize("intermediate", [144, 8192], ids=["whole", "in parts"])
def test_a_tokens_bits_do_not_depend_on_the_others(intermediate: int):
    sizes = SIZES | {"intermediate": intermediate, "experts": 12, "top_k": 2}
    check_that_bits_are_a_tokens_own(quantised(random_problem(43, [64], **sizes, skew=3.0)))


def test_what_is_no_number_reaches_its_own_token_alone():
    check_what_is_no_number(quantised(random_problem(6, [40], **SIZES, fused=False)))


def test_the_bound_notices_scales_of_other_blocks():
    sizes = {"hidden": 512, "intermediate": 256, "experts": 32, "top_k": 4, "dtype": "bfloat16"}
    check_that_scales_of_other_blocks_are_noticed(quantised(random_problem(9, [128], **sizes, fused=False)))


@pytest.mark.parametrize("tokens", [3, 40])
def test_a_captured_call_repeats(tokens: int):
    check_a_captured_call(quantised(random_problem(12, [tokens], **SIZES)))


@st.composite
def cases(draw) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of `random_problem` and of `quantised`."""
    experts = draw(st.integers(1, 40))
    top_k = draw(st.integers(1, min(8, experts)))
    tokens = draw(st.integers(1, min(256, 16 * experts // top_k)) | st.integers(1, 8))
    problem, how = layer_and_quantisation(draw, experts, top_k, tokens)
    return with_shared(draw, problem), how


@pytest.mark.timeout(0)
@at_random(EXAMPLES)
@given(case=cases())
def test_any_layer_agrees_with_the_reference(case: Any):
    arguments, quantisation = case
    run_and_check(quantised(random_problem(**arguments), **quantisation))
