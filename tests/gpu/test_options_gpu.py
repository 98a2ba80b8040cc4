"""What models' layers need besides softmax, top-k and SwiGLU, on a GPU: each option, in both kernels."""

from __future__ import annotations

from typing import Any

import flashmoe
import pytest
import torch
from flashmoe import jit
from layer_options import CLAMPED
from layer_options import EXPERTS as EITHER_ENGINES
from layers import ARITHMETIC, call, check, context_of, random_problem, run_and_check

pytestmark = pytest.mark.gpu

USUAL = {"hidden": 256, "intermediate": 192, "experts": 64, "top_k": 6}
TOKENS = (5, 333)
"""With 5 tokens, calls use the kernel for a few tokens; with 333, the general kernel."""

ROUTERS: dict[str, dict[str, Any]] = {
    "sigmoid": {"score": "sigmoid"},
    "sigmoid, not normalised": {"score": "sigmoid", "renormalize": False},
    "bias of the choice": {"choice_bias": True},
    "bias of the choice, not normalised": {"choice_bias": True, "renormalize": False},
    "groups": {"groups": 8, "top_groups": 3},
    "groups of one": {"groups": 32, "top_groups": 9, "experts": 32},
    "scaled": {"routed_scale": 2.5},
    "scaled, not normalised": {"routed_scale": -0.5, "renormalize": False},
    "DeepSeek-V3": {
        "score": "sigmoid",
        "choice_bias": True,
        "groups": 8,
        "top_groups": 4,
        "routed_scale": 2.5,
        "experts": 256,
        "top_k": 8,
    },
    "8 experts, sigmoid": {"score": "sigmoid", "experts": 8, "top_k": 2},
    "1024 experts, groups": {"groups": 16, "top_groups": 5, "experts": 1024, "top_k": 32},
}

EXPERTS = EITHER_ENGINES | {"clamped, interleaved": CLAMPED | {"interleaved": True}}

TRANSPOSED = EXPERTS | {
    "swiglu": {},
    "relu": {"activation": "relu"},
    "gelu": {"activation": "gelu"},
    "silu": {"activation": "silu"},
    "geglu, interleaved": {"activation": "geglu", "interleaved": True},
    "Llama 4": {"weights_on_input": True, "score": "sigmoid", "renormalize": False},
}
"""Options of layers whose experts are stored transposed."""


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("options", ROUTERS.values(), ids=ROUTERS)
def test_routers(options: dict[str, Any], dtype: str, tokens: int):
    run_and_check(random_problem(1, tokens, dtype=dtype, **USUAL | options))


@pytest.mark.parametrize("tokens", (*TOKENS, 3000))
@pytest.mark.parametrize("biases", [False, True], ids=["plain", "biases"])
@pytest.mark.parametrize("arithmetic", ARITHMETIC)
@pytest.mark.parametrize("options", EXPERTS.values(), ids=EXPERTS)
def test_experts(options: dict[str, Any], arithmetic: str, biases: bool, tokens: int):
    run_and_check(
        random_problem(2, tokens, biases=biases, **ARITHMETIC[arithmetic], **USUAL | {"experts": 16} | options)
    )


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_given_weights_may_be_of_the_type_of_x(dtype: str, tokens: int):
    problem = random_problem(3, tokens, dtype=dtype, ids="int64", **USUAL)
    problem.topk_weights = problem.topk_weights.to(problem.x.dtype)
    run_and_check(problem)


@pytest.mark.parametrize("tokens", TOKENS)
def test_logits_are_rounded_as_a_linear_layer_rounds_them(tokens: int):
    """x and the router are small integers, so that logits are exact, and this rounding is the only one."""
    problem = random_problem(4, tokens, round_logits=True, **USUAL)
    generator = torch.Generator(device="cuda").manual_seed(4)
    for tensor in (problem.x, problem.router):
        tensor.copy_(torch.randint(-3, 4, tensor.shape, generator=generator, device="cuda"))
    run_and_check(problem)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("choice_bias", [False, True])
def test_logits_that_are_not_finite_are_told(choice_bias: bool, tokens: int):
    problem = random_problem(5, tokens, score="sigmoid", choice_bias=choice_bias, **USUAL)
    problem.x[tokens - 1, 0] = float("inf")
    problem.options["strict"] = True
    with (
        context_of(problem) as context,
        pytest.raises(flashmoe.BadRow, match=f"for token {tokens - 1} of rank 0"),
    ):
        call(context, problem)


def test_interleaving_changes_no_bit():
    problem = random_problem(6, 700, biases=True, **USUAL)
    with context_of(problem) as context:
        plain, _ = call(context, problem)
        for name in ("gate_up_proj", "gate_up_bias"):
            gate, up = getattr(problem, name).chunk(2, dim=1)
            setattr(problem, name, torch.stack([gate, up], dim=2).flatten(1, 2).contiguous())
        problem.options["interleaved"] = True
        woven, report = call(context, problem)
        check(problem, woven, report)
    assert torch.equal(plain, woven)


# ---- transposed weights, which only the general kernel reads ------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 7, 64, 300, 2048])
@pytest.mark.parametrize("biases", [False, True], ids=["plain", "biases"])
@pytest.mark.parametrize("dtype", jit.TRANSPOSED)
@pytest.mark.parametrize("options", TRANSPOSED.values(), ids=TRANSPOSED)
def test_transposed(options: dict[str, Any], dtype: str, biases: bool, tokens: int):
    sizes = USUAL | {"experts": 16}  # with one token, some experts have no rows
    run_and_check(random_problem(7, tokens, biases=biases, dtype=dtype, transposed=True, **sizes, **options))


ORDERS = {"no gate": {"activation": "relu"}, "halves": {}, "interleaved": {"interleaved": True}}
"""The orders in which a transposed matrix may have gates and ups."""


@pytest.mark.parametrize("tokens", [7, 300])
@pytest.mark.parametrize("sizes", [(8, 8), (72, 40), (136, 264), (1032, 712), (2880, 2880)], ids=str)
@pytest.mark.parametrize("options", ORDERS.values(), ids=ORDERS)
def test_transposed_of_odd_sizes(options: dict[str, Any], sizes: tuple[int, int], tokens: int):
    shape = {"hidden": sizes[0], "intermediate": sizes[1], "experts": 4, "top_k": 3}
    run_and_check(random_problem(8, tokens, biases=True, transposed=True, **shape, **options))


@pytest.mark.parametrize("tokens", [9, 16, 63, 65, 95, 96, 128, 129, 159, 191, 255, 256, 257, 700])
@pytest.mark.parametrize("options", ORDERS.values(), ids=ORDERS)
def test_transposed_with_all_tokens_at_one_of_many_experts(options: dict[str, Any], tokens: int):
    """The one expert has `tokens` rows, so tiles have all these numbers of rows, up to 256."""
    problem = random_problem(9, tokens, ids="int32", biases=True, transposed=True, **USUAL | {"top_k": 1} | options)
    problem.topk_ids.fill_(37)
    run_and_check(problem)


@pytest.mark.parametrize("tokens", [33, 160, 700])
@pytest.mark.parametrize("options", ORDERS.values(), ids=ORDERS)
def test_transposing_changes_no_bit(options: dict[str, Any], tokens: int):
    rows, columns = (
        random_problem(10, tokens, biases=True, transposed=transposed, **USUAL | {"experts": 4, "top_k": 2}, **options)
        for transposed in (False, True)
    )
    assert torch.equal(rows.gate_up_proj, columns.gate_up_proj.mT)
    assert torch.equal(run_and_check(rows), run_and_check(columns))


def test_transposed_parts_of_larger_matrices():
    """The weights are parts of larger matrices, whose other elements are NaN."""
    problem = random_problem(11, 300, biases=True, transposed=True, **USUAL)
    for name in ("gate_up_proj", "down_proj"):
        part = getattr(problem, name)
        whole = part.new_full((len(part) + 1, part.shape[1] + 3, part.shape[2] + 24), float("nan"))
        whole[1:, 2:-1, 8:-16] = part
        setattr(problem, name, whole[1:, 2:-1, 8:-16])
    run_and_check(problem)


@pytest.mark.parametrize("exact", [False, True])
def test_transposed_float32_is_refused(exact: bool):
    problem = random_problem(12, 9, dtype="float32", transposed=True, exact=exact, **USUAL)
    with (
        context_of(problem) as context,
        pytest.raises(flashmoe.InvalidArgument, match="transposed: expected bfloat16 or float16 weights with it"),
    ):
        call(context, problem)
