"""Calls of a few tokens with experts in MXFP4 (sm90/decode/alone.cuh). Calls of more tokens have no kernel."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import flashmoe
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layer_options import CLAMPED
from layers import at_random
from problems import Outcome, check, in_mxfp4, random_problem
from quantised_on_gpu import (
    call,
    check_a_captured_call,
    check_that_bits_are_a_tokens_own,
    check_that_scales_of_other_blocks_are_noticed,
    check_what_is_no_number,
    context_of,
    first_tokens,
    on_gpu,
    on_host,
    random_layer,
    run_and_check,
    with_shared,
)

pytestmark = pytest.mark.gpu

EXAMPLES = max(1, int(os.environ.get("FLASHMOE_EXAMPLES", "200")) // 2)
SIZES: dict[str, Any] = {"hidden": 288, "intermediate": 160, "experts": 24, "top_k": 5, "dtype": "bfloat16"}
"""H and I are no multiples of 256, the columns of a stage. Rows have 9 and 5 scales, of a byte each, so they begin at
any byte."""
MOST = 76
"""The most tokens with which this layer uses the kernel for a few tokens: experts have at most 16 rows on average."""
SCALES = ("gate_up_scale", "down_scale")


@pytest.mark.parametrize("fused", [True, False], ids=["router", "given"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_number_of_tokens(dtype: str, fused: bool):
    """A call with one token more is refused, and does not disturb the other calls."""
    options = SIZES | {"dtype": dtype, "fused": fused, "skew": 3.0, "biases": (True, True, True)}
    problem = in_mxfp4(random_problem(41, [MOST + 1], **options))
    with context_of(problem) as context:
        for tokens in (*range(1, 10), 16, 17, 33, 64, MOST, 1):
            part = first_tokens(problem, tokens)
            y, report = call(context, part)
            check(part, [Outcome(y, report)])
            with pytest.raises(flashmoe.InvalidArgument, match=f"^x: expected at most {MOST} tokens with weights of"):
                call(context, problem)


@pytest.mark.parametrize("tokens", [128, 256])
@pytest.mark.parametrize("skew", [0.0, 2.5, 50.0])
def test_many_of_the_few(tokens: int, skew: float):
    """With a skew, some experts have more rows than a warp multiplies at a time, and some have none."""
    sizes = {"hidden": 512, "intermediate": 128, "experts": 128, "top_k": 8, "dtype": "bfloat16"}
    run_and_check(in_mxfp4(random_problem(51, [tokens], **sizes, skew=skew)))


@pytest.mark.parametrize("tokens", [1, 8, 9, 17, 96])
def test_all_tokens_on_one_expert(tokens: int):
    """All tokens choose the last expert, so the experts before it have no tokens."""
    problem = random_problem(52, [tokens], **SIZES | {"top_k": 1}, fused=False)
    problem.topk_ids = [np.full((tokens, 1), 23, np.int32)]
    run_and_check(in_mxfp4(problem))


LAYERS: dict[str, dict[str, Any]] = {
    "whole stages": {"hidden": 512, "intermediate": 256},
    "smallest": {"hidden": 32, "intermediate": 32},
    "no gate": {"activation": "silu"},
    "GELU": {"activation": "gelu", "intermediate": 416},
    "GEGLU": {"activation": "geglu"},
    "ReLU squared": {"activation": "relu2", "intermediate": 128},
    "biases": {"biases": (True, True, True)},
    "biases without a gate": {"biases": (True, True, True), "activation": "relu"},
    "gpt-oss": {"activation": "clamped_swiglu", "interleaved": True, "biases": (True, True, True), **CLAMPED},
    "weights on input": {"weights_on_input": True},
    "capacity": {"capacity_factor": 0.6, "skew": 3.0},
    "sigmoids": {"score": "sigmoid", "choice_bias": True, "routed_scale": 2.5},
    "one expert for each token": {"top_k": 1},
    "shared": {"shared": 1, "shared_gate": True},
    "parts of the intermediate columns": {"intermediate": 8192, "experts": 6, "top_k": 2},
}


@pytest.mark.parametrize("tokens", [5, 48])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_layers(options: dict[str, Any], dtype: str, tokens: int):
    tokens = min(tokens, 16 * options.get("experts", 24) // options.get("top_k", 5))
    run_and_check(in_mxfp4(random_problem(1, [tokens], **SIZES | options | {"dtype": dtype})))


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_slices_of_a_shared_expert(interleaved: bool):
    """The kernel for a few tokens computes each slice as a choice, and rounds its row. A slice's scales are rows of the
    scales of shared_gate_up, and columns of the scales of shared_down."""
    sizes = SIZES | {"shared": 3, "shared_gate": True, "interleaved": interleaved}
    run_and_check(in_mxfp4(random_problem(54, [7], **sizes)), shared_in_slices=True)


def test_as_many_numbers_as_a_models_layer_has():
    sizes = {"hidden": 2880, "intermediate": 2880, "experts": 4, "top_k": 2, "dtype": "bfloat16"}
    options = {"activation": "clamped_swiglu", "interleaved": True, "biases": (True, True, True), **CLAMPED}
    problem = in_mxfp4(random_problem(11, [32], **sizes, **options))
    for tokens in (1, 32):
        run_and_check(first_tokens(problem, tokens))


def test_few_thread_blocks():
    run_and_check(in_mxfp4(random_problem(9, [MOST], **SIZES)), processors=4)


@pytest.mark.parametrize("intermediate", [160, 8192], ids=["whole", "in parts"])
def test_a_tokens_bits_do_not_depend_on_the_others(intermediate: int):
    sizes = SIZES | {"intermediate": intermediate, "experts": 12, "top_k": 2}
    check_that_bits_are_a_tokens_own(in_mxfp4(random_problem(43, [64], **sizes, skew=3.0)))


@pytest.mark.parametrize("tokens", [5, 9, 60])
def test_scales_beyond_the_usual_change_no_bit(tokens: int):
    """The kernel has a branch of its own for scales of 2 and more. The test divides x by a power of two and multiplies
    all scales by it. This must multiply y by exactly that power."""
    problem = in_mxfp4(random_problem(44, [tokens], **SIZES, fused=False))
    y = run_and_check(problem)
    assert max(getattr(problem, name).max() for name in SCALES) < 128
    for power in (14, 40):
        x = (problem.x[0].astype(np.float32) * 2.0**-power).astype(problem.x[0].dtype)
        scales = {name: getattr(problem, name) + np.uint8(power) for name in SCALES}
        moved = run_and_check(replace(problem, x=[x], **scales))
        np.testing.assert_array_equal(moved.astype(np.float32), y.astype(np.float32) * 2.0**power)


def test_a_block_of_large_scale_among_others():
    for dtype in ("bfloat16", "float16"):
        problem = in_mxfp4(random_problem(45, [9], **SIZES | {"dtype": dtype}, scale=0.03))
        for name in SCALES:
            scales = getattr(problem, name).copy()
            scales[:, 7::40, 1] = 128 + np.arange(len(scales))[:, None] % 3
            problem = replace(problem, **{name: scales})
        run_and_check(problem)


@pytest.mark.parametrize("tokens", [4, 40])
def test_a_scale_that_is_no_number_reaches_its_experts_tokens_alone(tokens: int):
    """The scale is the first or the last one of its expert, so it lies in memory beside a scale of another expert."""
    problem = in_mxfp4(random_problem(46, [tokens], **SIZES | {"top_k": 2}, fused=False))
    expected = run_and_check(problem)
    for at in ((0, 0), (-1, -1)):
        scales = problem.gate_up_scale.copy()
        scales[11][at] = 255
        with context_of(problem) as context:
            y, _ = call(context, replace(problem, gate_up_scale=scales))
        has = (problem.topk_ids[0] == 11).any(axis=1)
        assert np.isnan(y[has].astype(np.float32)).all()
        np.testing.assert_array_equal(y[~has], expected[~has])


def test_what_is_no_number_reaches_its_own_token_alone():
    check_what_is_no_number(in_mxfp4(random_problem(6, [40], **SIZES, fused=False)))


@pytest.mark.parametrize("behind", [1, 2, 3])
def test_scales_may_lie_anywhere(behind: int):
    """The scales may begin at any byte. The kernel must not use the bytes around them, which are NaN."""
    problem = in_mxfp4(random_problem(47, [12], **SIZES))
    expected = run_and_check(problem)
    arguments = {name: on_gpu(each) for name, each in problem.arguments(0).items()}
    for name in SCALES:
        scales = arguments[name]
        wide = torch.full((scales.numel() + 8,), 255, dtype=torch.uint8, device=scales.device)
        arguments[name] = wide[behind : behind + scales.numel()].view(scales.shape)
        arguments[name].copy_(scales)
    with context_of(problem) as context:
        y = flashmoe.moe(context, **arguments)
        context.synchronize()
    np.testing.assert_array_equal(on_host(y), expected)


def test_the_bound_notices_scales_of_other_blocks():
    sizes = {"hidden": 512, "intermediate": 256, "experts": 32, "top_k": 4, "dtype": "bfloat16"}
    check_that_scales_of_other_blocks_are_noticed(in_mxfp4(random_problem(9, [128], **sizes, fused=False)))


@pytest.mark.parametrize("tokens", [3, 40])
def test_a_captured_call_repeats(tokens: int):
    check_a_captured_call(in_mxfp4(random_problem(12, [tokens], **SIZES)))


@st.composite
def cases(draw) -> dict[str, Any]:
    """The arguments of `random_problem`."""
    experts = draw(st.integers(1, 40))
    top_k = draw(st.integers(1, min(8, experts)))
    tokens = draw(st.integers(1, min(256, 16 * experts // top_k)) | st.integers(1, 8))
    size = st.integers(1, 20).map(lambda n: 32 * n) | st.sampled_from([128, 256, 512])
    return with_shared(draw, random_layer(draw, size, experts, top_k, tokens))


@pytest.mark.timeout(0)
@at_random(EXAMPLES)
@given(case=cases())
def test_any_layer_agrees_with_the_reference(case: dict[str, Any]):
    run_and_check(in_mxfp4(random_problem(**case)))
