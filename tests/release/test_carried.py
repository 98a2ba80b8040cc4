"""Each kernel that a released package carries computes a layer on a GPU, without a compiler.

`tools/check_wheel.py --gpu` runs these tests with the wheel that it has installed; other installations carry no
kernels. Kernels for traced calls are left out here, because `flashmoe run` uses them, and check_wheel.py runs it too.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flashmoe
import pytest
import torch
from flashmoe import jit

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpu"))

import few_fp8_ranks
import layers
import leaves
import problems
import quantised_on_gpu
import ranks as on_rank
import training_ranks
from layer_options import CLAMPED
from training import check, trainable

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not jit.shipped_kernels(), reason="the package carries no kernels: it is not a release's"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SIZES: dict[str, Any] = {"hidden": 512, "intermediate": 256, "experts": 24, "top_k": 4}
FEW_IN_GROUP = [each for each in jit.COMMON if each.few and each.group]
OTHERS = ("quantised", "mxfp4", "keeps", "backward", "trace", "few")
PLAIN = [each for each in jit.COMMON if not any(getattr(each, name) for name in OTHERS)]
FEW, MORE = 5, 333
"""Tokens of a call by the kernel for a few tokens (transposed layers have none), and of one by the general kernel."""


@pytest.fixture(scope="module", autouse=True)
def no_compiler(tmp_path_factory) -> Iterator[None]:
    """Hides the compiler and all kernels that were compiled before, so that a kernel which the package does not carry
    causes an error."""
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHMOE_NVCC", "/none")
        patch.setenv("FLASHMOE_CACHE", str(cache))
        yield
    assert not list(cache.glob("*.cubin"))


def form_of(variant: jit.Variant) -> dict[str, Any]:
    """The options of a layer that needs this kernel."""
    form = {"activation": variant.activation, "transposed": variant.transposed}
    return form | (CLAMPED | {"interleaved": True} if variant.activation == "clamped_swiglu" else {})


@pytest.mark.parametrize("tokens", [FEW, MORE])
@pytest.mark.parametrize("variant", PLAIN, ids=[each.title for each in PLAIN])
def test_plain_layers(variant, tokens):
    problem = layers.random_problem(1, tokens, dtype=variant.dtype, **SIZES, **form_of(variant))
    with layers.context_of(problem) as context:
        layers.check(problem, *layers.call(context, problem))


@pytest.mark.parametrize("tokens", [FEW, MORE])
def test_experts_in_fp8(tokens):
    problem = problems.random_problem(2, [tokens], dtype="bfloat16", **SIZES)
    quantised_on_gpu.run_and_check(problems.quantised(problem))


def test_experts_in_mxfp4():
    problem = problems.random_problem(3, [FEW], dtype="bfloat16", **SIZES, **CLAMPED, interleaved=True)
    quantised_on_gpu.run_and_check(problems.in_mxfp4(problem))


def test_gradients():
    problem, grads = trainable(4, [MORE], dtype="bfloat16", **SIZES)
    limits = problem.limits() | {"timeout": layers.PATIENCE, "return_mode": "direct"}
    with flashmoe.Context(engine="cuda", **limits) as context:
        check(problem, grads, [leaves.gradients_of(context, problem, grads[0])], engine="cuda")


def test_gradients_of_a_group():
    """Two ranks, on GPUs of their own or, with FLASHMOE_SHARE_GPUS=2, on one GPU."""
    call = (5, [MORE, FEW], SIZES | {"dtype": "bfloat16", "return_mode": "direct"})
    with on_rank.pool_of(2) as pool:
        arguments = (training_ranks.unique(), [call], 1)
        found = pool.call(training_ranks.gradients, [arguments] * 2, timeout=120.0)
    seed, tokens, sizes = call
    problem, grads = trainable(seed, tokens, **sizes)
    check(problem, grads, [each[0] for each in found], engine="cuda")


@pytest.mark.parametrize("variant", FEW_IN_GROUP, ids=[each.title for each in FEW_IN_GROUP])
def test_few_tokens_of_a_group(variant):
    """Two ranks, on two GPUs or one, as in `test_gradients_of_a_group`."""
    problem = problems.random_problem(7, [FEW, FEW], dtype=variant.dtype, **SIZES)
    if variant.quantised:
        problem = problems.quantised(problem)
    with on_rank.pool_of(2) as pool:
        found = pool.call(few_fp8_ranks.prefixes, [(problem, [[1, FEW]])] * 2, timeout=120.0)
    problems.check(problem, [problems.Outcome(each.y, each.report) for each in found], tensor_cores=True)
    assert [each.differing for each in found] == [0, 0]


def test_what_is_not_carried_needs_a_compiler():
    problem = layers.random_problem(6, FEW, dtype="bfloat16", activation="gelu", **SIZES)
    with (
        layers.context_of(problem) as context,
        pytest.raises(flashmoe.FlashMoEError, match="FLASHMOE_NVCC: expected the path of nvcc, got '/none'"),
    ):
        layers.call(context, problem)
