"""Calls of a few tokens with experts in FP8 and in MXFP4, which have kernels of their own (sm90/decode/alone.cuh). In
MXFP4, there is no kernel for calls of more tokens."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import flashmoe
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layer_options import CLAMPED
from layers import at_random
from problems import Outcome, Problem, check, in_mxfp4, quantised, random_problem
from quantised_on_gpu import (
    call,
    check_a_captured_call,
    check_that_bits_are_a_tokens_own,
    check_that_scales_of_other_blocks_are_noticed,
    check_what_is_no_number,
    context_of,
    first_tokens,
    layer_and_quantisation,
    on_gpu,
    on_host,
    random_layer,
    run_and_check,
    with_shared,
)

pytestmark = pytest.mark.gpu

EXAMPLES = max(1, int(os.environ.get("FLASHMOE_EXAMPLES", "200")) // 2)
MOST = 76
"""The most tokens with which `SIZES` use the kernel for a few tokens: experts have at most 16 rows on average."""
SIZES: dict[str, Any] = {"experts": 24, "top_k": 5, "dtype": "bfloat16"}
SCALES = ("gate_up_scale", "down_scale")


class Format(NamedTuple):
    """A format of experts, with sizes for which it is awkward."""

    stored: Callable[[Problem], Problem]
    sizes: dict[str, Any]
    smallest: int
    """The smallest H and I."""
    model: dict[str, Any]
    """A layer with as many numbers as that of a model in this format."""

    def problem(self, seed: int, tokens: int, **options: Any) -> Problem:
        return self.stored(random_problem(seed, [tokens], **self.sizes | options))


OF_QWEN3 = {"hidden": 2048, "intermediate": 768, "experts": 16, "top_k": 8}
OF_GPT_OSS = {"activation": "clamped_swiglu", "interleaved": True, "biases": (True, True, True), **CLAMPED}
FP8_SIZES = SIZES | {"hidden": 272, "intermediate": 144}
"""H and I are no multiples of 128, so the last blocks of scales are smaller."""
MXFP4_SIZES = SIZES | {"hidden": 288, "intermediate": 160}
"""H and I are no multiples of 256, the columns of a stage. Rows have 9 and 5 scales, of a byte each, so they begin at
any byte."""
FP8 = Format(quantised, FP8_SIZES, 16, OF_QWEN3)
MXFP4 = Format(in_mxfp4, MXFP4_SIZES, 32, OF_GPT_OSS | {"hidden": 2880, "intermediate": 2880, "experts": 4, "top_k": 2})
FORMATS = {"fp8": FP8, "mxfp4": MXFP4}
KINDS = {
    "fp8 by block": FP8,
    "fp8 by row": FP8._replace(stored=functools.partial(quantised, scales="row")),
    "fp8 by matrix": FP8._replace(stored=functools.partial(quantised, scales="tensor")),
    "mxfp4": MXFP4,
    "mxfp4, float16": MXFP4._replace(sizes=MXFP4_SIZES | {"dtype": "float16"}),
}

each_format = pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


# ---- tokens ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["router", "given", "given, x in FP8"])
@pytest.mark.parametrize("scales", ["block", "row", "tensor"])
def test_every_number_of_tokens_in_fp8(scales: str, how: str):
    """Calls of the kernel for a few tokens take turns with calls of one token more, which the general kernel computes,
    in one context. Neither kernel disturbs the other."""
    problem = random_problem(41, [MOST + 1], **FP8_SIZES, fused=how == "router", skew=3.0, biases=(True, True, True))
    problem = quantised(problem, scales, x=how == "given, x in FP8")
    with context_of(problem) as context:
        for tokens in (*range(1, 10), MOST + 1, 16, 17, 33, MOST + 1, 64, MOST, 1):
            part = first_tokens(problem, tokens)
            y, report = call(context, part)
            check(part, [Outcome(y, report)], tensor_cores=True)


@pytest.mark.parametrize("fused", [True, False], ids=["router", "given"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_number_of_tokens_in_mxfp4(dtype: str, fused: bool):
    """A call with one token more is refused, and does not disturb the other calls."""
    problem = MXFP4.problem(41, MOST + 1, dtype=dtype, fused=fused, skew=3.0, biases=(True, True, True))
    with context_of(problem) as context:
        for tokens in (*range(1, 10), 16, 17, 33, 64, MOST, 1):
            part = first_tokens(problem, tokens)
            y, report = call(context, part)
            check(part, [Outcome(y, report)])
            with pytest.raises(flashmoe.InvalidArgument, match=f"^x: expected at most {MOST} tokens with weights of"):
                call(context, problem)


@pytest.mark.parametrize("tokens", [128, 256])
@pytest.mark.parametrize("skew", [0.0, 2.5, 50.0])
@each_format
def test_many_of_the_few(form: Format, skew: float, tokens: int):
    """With a skew, some experts have more rows than a warp multiplies at a time, and some have none."""
    run_and_check(form.problem(51, tokens, hidden=512, intermediate=128, experts=128, top_k=8, skew=skew))


@pytest.mark.parametrize("tokens", [1, 8, 9, 17, 96])
@each_format
def test_all_tokens_on_one_expert(form: Format, tokens: int):
    """All tokens choose the last expert, so the experts before it have no tokens."""
    problem = form.problem(52, tokens, top_k=1, fused=False)
    problem.topk_ids = [np.full((tokens, 1), 23, np.int32)]
    run_and_check(problem)


# ---- layers ----------------------------------------------------------------------------------------------------------


LAYERS: dict[str, dict[str, Any]] = {
    "whole blocks": {"hidden": 512, "intermediate": 256},
    "no gate": {"activation": "silu"},
    "GELU": {"activation": "gelu", "intermediate": 416},
    "GEGLU": {"activation": "geglu"},
    "ReLU squared": {"activation": "relu2", "intermediate": 128},
    "biases": {"biases": (True, True, True)},
    "biases without a gate": {"biases": (True, True, True), "activation": "relu"},
    "interleaved": OF_GPT_OSS | {"biases": (False, True, True)},
    "gpt-oss": OF_GPT_OSS,
    "weights on input": {"weights_on_input": True},
    "capacity": {"capacity_factor": 0.6, "skew": 3.0},
    "sigmoids": {"score": "sigmoid", "choice_bias": True, "routed_scale": 2.5},
    "one expert for each token": {"top_k": 1},
    "shared": {"shared": 1, "shared_gate": True},
    "parts of the intermediate columns": {"intermediate": 8192, "experts": 6, "top_k": 2},
    "float16": {"dtype": "float16"},
}


@pytest.mark.parametrize("tokens", [5, 48])
@each_kind
@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_layers(options: dict[str, Any], kind: Format, tokens: int):
    run_and_check(kind.problem(1, tokens, **options))


@pytest.mark.parametrize("tokens", [5, 48])
@each_kind
def test_the_smallest_layer(kind: Format, tokens: int):
    run_and_check(kind.problem(1, tokens, hidden=kind.smallest, intermediate=kind.smallest))


@each_kind
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_slices_of_a_shared_expert(interleaved: bool, kind: Format):
    """The kernel for a few tokens computes each slice as a choice, and rounds each slice's result row before it adds
    them. With scales of blocks, a slice's scales are rows of the scales of shared_gate_up, and columns of the scales of
    shared_down. With scales of rows, all slices share the scales of shared_down. With scales of matrices, they share
    both."""
    width = {"intermediate": 128} if kind.smallest == FP8.smallest else {}
    options = {"shared": 3, "shared_gate": True, "interleaved": interleaved, **width}
    run_and_check(kind.problem(54, 7, **options), shared_in_slices=True)


@each_format
def test_as_many_numbers_as_a_models_layer_has(form: Format):
    problem = form.problem(11, 32, **form.model)
    for tokens in (1, 32):
        run_and_check(first_tokens(problem, tokens))


@each_format
def test_few_thread_blocks(form: Format):
    run_and_check(form.problem(9, MOST), processors=4)


# ---- bits, scales, and what is no number -----------------------------------------------------------------------------


def test_x_may_come_quantised_which_changes_no_bit():
    problem = random_problem(5, [40], **FP8_SIZES, fused=False)
    y = run_and_check(quantised(problem))
    np.testing.assert_array_equal(run_and_check(quantised(problem, x=True)), y)


@pytest.mark.parametrize("changes", [{}, {"intermediate": 8192}], ids=["whole", "in parts"])
@each_format
def test_a_tokens_bits_do_not_depend_on_the_others(form: Format, changes: dict[str, int]):
    check_that_bits_are_a_tokens_own(form.problem(43, 64, experts=12, top_k=2, skew=3.0, **changes))


@pytest.mark.parametrize("tokens", [5, 9, 60])
def test_scales_beyond_the_usual_change_no_bit(tokens: int):
    """In MXFP4, the kernel has a branch of its own for scales of 2 and more. The test divides x by a power of two and
    multiplies all scales by it. This must multiply y by exactly that power."""
    problem = MXFP4.problem(44, tokens, fused=False)
    y = run_and_check(problem)
    assert max(getattr(problem, name).max() for name in SCALES) < 128
    for power in (14, 40):
        x = (problem.x[0].astype(np.float32) * 2.0**-power).astype(problem.x[0].dtype)
        scales = {name: getattr(problem, name) + np.uint8(power) for name in SCALES}
        moved = run_and_check(replace(problem, x=[x], **scales))
        np.testing.assert_array_equal(moved.astype(np.float32), y.astype(np.float32) * 2.0**power)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_block_of_large_scale_among_others(dtype: str):
    problem = MXFP4.problem(45, 9, dtype=dtype, scale=0.03)
    for name in SCALES:
        scales = getattr(problem, name).copy()
        scales[:, 7::40, 1] = 128 + np.arange(len(scales))[:, None] % 3
        problem = replace(problem, **{name: scales})
    run_and_check(problem)


@pytest.mark.parametrize("tokens", [4, 40])
def test_a_scale_that_is_no_number_reaches_its_experts_tokens_alone(tokens: int):
    """The scale is the first or the last one of its expert, so it lies in memory beside a scale of another expert."""
    problem = MXFP4.problem(46, tokens, top_k=2, fused=False)
    expected = run_and_check(problem)
    for at in ((0, 0), (-1, -1)):
        scales = problem.gate_up_scale.copy()
        scales[11][at] = 255
        with context_of(problem) as context:
            y, _ = call(context, replace(problem, gate_up_scale=scales))
        has = (problem.topk_ids[0] == 11).any(axis=1)
        assert np.isnan(y[has].astype(np.float32)).all()
        np.testing.assert_array_equal(y[~has], expected[~has])


@each_format
def test_what_is_no_number_reaches_its_own_token_alone(form: Format):
    check_what_is_no_number(form.problem(6, 40, fused=False))


@pytest.mark.parametrize("behind", [1, 2, 3])
def test_scales_may_lie_anywhere(behind: int):
    """In MXFP4, scales may begin at any byte. The kernel must not use the bytes around them, which are NaN."""
    problem = MXFP4.problem(47, 12)
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


@each_format
def test_the_bound_notices_scales_of_other_blocks(form: Format):
    sizes = {"hidden": 512, "intermediate": 256, "experts": 32, "top_k": 4}
    check_that_scales_of_other_blocks_are_noticed(form.problem(9, 128, **sizes, fused=False))


@pytest.mark.parametrize("tokens", [3, 40])
@each_format
def test_a_captured_call_repeats(form: Format, tokens: int):
    check_a_captured_call(form.problem(12, tokens))


# ---- random layers ---------------------------------------------------------------------------------------------------


@st.composite
def cases(draw: st.DrawFn, form: str) -> Problem:
    experts = draw(st.integers(1, 40))
    top_k = draw(st.integers(1, min(8, experts)))
    tokens = draw(st.integers(1, min(256, 16 * experts // top_k)) | st.integers(1, 8))
    if form == "fp8":
        layer, how = layer_and_quantisation(draw, experts, top_k, tokens)
        return quantised(random_problem(**with_shared(draw, layer)), **how)
    size = st.integers(1, 20).map(lambda n: 32 * n) | st.sampled_from([128, 256, 512])
    return in_mxfp4(random_problem(**with_shared(draw, random_layer(draw, size, experts, top_k, tokens))))


@pytest.mark.timeout(0)
@pytest.mark.parametrize("form", FORMATS)
@at_random(EXAMPLES)
@given(data=st.data())
def test_any_layer_agrees_with_the_reference(form: str, data: st.DataObject):
    run_and_check(data.draw(cases(form)))
