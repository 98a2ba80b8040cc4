"""Options that models' layers need besides softmax, top-k and SwiGLU: each by itself, and as models combine them."""

from __future__ import annotations

from typing import Any

import flashmoe
import numpy as np
import pytest
from flashmoe.reference import activate, choice_values, choose, moe_reference, weigh
from layer_options import CLAMPED
from layer_options import EXPERTS as EITHER_ENGINES
from problems import Ranks, check, random_problem

SIZES = {"hidden": 48, "intermediate": 24, "experts": 16, "top_k": 4}
DEEPSEEK = {"score": "sigmoid", "choice_bias": True, "groups": 4, "top_groups": 2, "routed_scale": 2.5}

ROUTERS: dict[str, dict[str, Any]] = {
    "sigmoid": {"score": "sigmoid"},
    "sigmoid, not normalised": {"score": "sigmoid", "renormalize": False},
    "bias of the choice": {"choice_bias": True},
    "sigmoid, bias of the choice": {"score": "sigmoid", "choice_bias": True},
    "groups": {"groups": 4, "top_groups": 2},
    "groups of one": {"groups": 16, "top_groups": 5},
    "scaled": {"routed_scale": 2.5},
    "scaled, not normalised": {"routed_scale": -0.5, "renormalize": False},
    "DeepSeek-V3": DEEPSEEK,
    "DeepSeek-V3, with the router's own bias": DEEPSEEK | {"biases": (True, False, False)},
}

EXPERTS = EITHER_ENGINES | {
    "transposed": {"transposed": True},
    "transposed, no gate": {"transposed": True, "activation": "relu"},
    "gpt-oss": CLAMPED | {"interleaved": True, "transposed": True},
    "Llama 4": {"transposed": True, "weights_on_input": True, "score": "sigmoid", "renormalize": False},
}


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("options", ROUTERS.values(), ids=ROUTERS)
def test_routers(ranks: Ranks, options: dict[str, Any], count: int):
    problem = random_problem(3, [37, 0, 5, 64][:count], **SIZES, **options)
    check(problem, ranks.call(problem))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("options", EXPERTS.values(), ids=EXPERTS)
def test_experts(ranks: Ranks, options: dict[str, Any], biased: bool, dtype: str):
    problem = random_problem(4, [65, 7], dtype=dtype, biases=(biased,) * 3, **SIZES, **options)
    check(problem, ranks.call(problem))
    check(problem, ranks.call(problem, tile=(16, 8)))  # tasks of 8 columns, not of all


@pytest.mark.parametrize("options", [EXPERTS["gpt-oss"], EXPERTS["Llama 4"]], ids=["gpt-oss", "Llama 4"])
def test_the_bits_do_not_depend_on_how_many_ranks_there_are(ranks: Ranks, options: dict[str, Any]):
    whole = random_problem(5, [64], dtype="bfloat16", return_mode="direct", **SIZES, **options)
    (alone,) = ranks.call(whole)
    parts = random_problem(5, [64], dtype="bfloat16", return_mode="direct", **SIZES, **options)
    parts.x = [whole.x[0][:10], whole.x[0][10:10], whole.x[0][10:63], whole.x[0][63:]]
    split = np.concatenate([outcome.y for outcome in ranks.call(parts)])
    np.testing.assert_array_equal(split, alone.y)


@pytest.mark.parametrize("options", [{"interleaved": True}, {"transposed": True}, EXPERTS["gpt-oss"]])
def test_how_weights_are_stored_changes_no_bit(options: dict[str, Any]):
    """The CPU engine multiplies copies of the weights, and these copies have one form, however weights are stored."""
    problem = random_problem(6, [33], biases=(False, True, True), **SIZES, **options)
    plain = {**problem.arguments(0), "interleaved": False, "transposed": False}
    if options.get("transposed"):
        for name in ("gate_up_proj", "down_proj"):
            plain[name] = plain[name].swapaxes(1, 2).copy()
    if options.get("interleaved"):
        for name in ("gate_up_proj", "gate_up_bias"):
            plain[name] = np.concatenate([plain[name][:, ::2], plain[name][:, 1::2]], axis=1)
    with flashmoe.Context(processors=2, **problem.limits()) as context:
        np.testing.assert_array_equal(flashmoe.moe(context, **problem.arguments(0)), flashmoe.moe(context, **plain))


def test_logits_are_rounded_as_a_linear_layer_rounds_them():
    """Logits of small integers are exact, so `round_logits` is the only rounding: 257 becomes 256, and two tie."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = np.array([[1.0, 256.0]], ml_dtypes.bfloat16)
    router = np.array([[0.0, 1.0], [1.0, 1.0], [2.0, 1.0], [0.0, 0.0]], ml_dtypes.bfloat16)  # 256, 257, 258, 0
    problem = random_problem(7, [1], hidden=2, intermediate=8, experts=4, top_k=2, dtype="bfloat16")
    arguments = problem.arguments(0) | {"x": x, "router": router}
    with flashmoe.Context(processors=1, **problem.limits()) as context:
        flashmoe.moe(context, **arguments)
        assert context.last_call.topk_ids.tolist() == [[2, 1]]
        flashmoe.moe(context, **arguments, round_logits=True)
        assert context.last_call.topk_ids.tolist() == [[2, 0]]  # logits 258, 256, 256: the lower of equal ones
        weight = 1.0 / (1.0 + np.exp(-2.0))
        np.testing.assert_allclose(context.last_call.topk_weights, [[weight, 1.0 - weight]], rtol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_given_weights_may_be_of_the_type_of_x(ranks: Ranks, dtype: str):
    problem = random_problem(8, [29, 4], dtype=dtype, fused=False, **SIZES)
    problem.topk_weights = [each.astype(problem.x[0].dtype) for each in problem.topk_weights]
    check(problem, ranks.call(problem))


def test_scores_that_vanish_have_weights_that_are_numbers(ranks: Ranks):
    """All sigmoids are 0 in float32. Their sum, which divides them, is not 0, because a small number is added to it."""
    problem = random_problem(9, [3], score="sigmoid", biases=(True, False, False), **SIZES)
    problem.router_bias -= np.float32(500.0)
    (outcome,) = ranks.call(problem)
    assert np.isfinite(outcome.report.topk_weights).all()
    assert np.isfinite(outcome.y).all()


def test_clamped_swiglu_by_hand():
    z = np.array([9.0, -9.0, 1.0, -7.5])  # gates 9, 1 and ups -9, -7.5, in turn
    options = {"limit": 7.0, "alpha": 1.702, "up_offset": 1.0, "interleaved": True}
    sigmoid = 1.0 / (1.0 + np.exp(-1.702 * np.array([7.0, 1.0])))
    expected = np.array([7.0, 1.0]) * sigmoid * (np.array([-7.0, -7.0]) + 1.0)
    np.testing.assert_allclose(activate(z, "clamped_swiglu", **options), expected, rtol=1e-14)


def test_groups_by_hand():
    logits = np.log(np.array([[0.3, 0.11, 0.05, 0.0501, 0.2, 0.2, 0.0449, 0.045]]))
    # The sums of each group's two scores: 0.41, 0.1001, 0.4, 0.0899.
    values = choice_values(logits, groups=4, top_groups=1)
    assert choose(values, 2).tolist() == [[0, 1]]
    assert choose(choice_values(logits, groups=4, top_groups=2), 3).tolist() == [[0, 4, 5]]
    bias = np.array([0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    ids = choose(choice_values(logits, groups=4, top_groups=1, choice_bias=bias), 2)
    assert ids.tolist() == [[2, 3]]
    assert choose(choice_values(np.zeros((1, 4)), groups=2, top_groups=1), 2).tolist() == [
        [0, 1]
    ]  # the lower of equal groups
    np.testing.assert_allclose(weigh(logits, ids), [[0.05 / 0.1001, 0.0501 / 0.1001]])  # weights have no bias


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"score": "softplus"}, "score: expected one of softmax, sigmoid, got 'softplus'"),
        ({"groups": 3}, "groups: expected a divisor of E=16, got 3"),
        ({"groups": 4, "top_groups": 5}, "top_groups: expected at most groups=4, got 5"),
        ({"groups": 8, "top_groups": 1}, "top_k: expected at most 2, the experts of 1 of 8 groups, got 4"),
        ({"groups": 0}, r"groups: expected an integer in \[1, 32\], got 0"),
        ({"limit": 7.0}, "limit: expected none with activation 'swiglu' .*, got 7.0"),
        ({"activation": "clamped_swiglu", "limit": -1}, "limit: expected a finite number of float32 > 0, got -1"),
        ({"activation": "clamped_swiglu", "alpha": 0}, "alpha: expected a finite number of float32 > 0, got 0"),
        ({"activation": "relu2", "interleaved": True}, "interleaved: expected False with 'relu2', which"),
        ({"routed_scale": float("nan")}, "routed_scale: expected a finite number of float32, got nan"),
        ({"choice_bias": np.zeros(15, np.float32)}, r"choice_bias: expected \[E=16\] float32, got \[15\] float32"),
        ({"choice_bias": np.zeros(16)}, r"choice_bias: expected \[E\] float32, got \[16\] float64"),
        ({"transposed": True}, r"gate_up_proj: expected \[El=16, H=48, 2I=96\] float32, got \[16, 48, 48\] float32"),
    ],
)
def test_what_makes_no_layer_is_refused_by_name(options: dict[str, Any], message: str):
    problem = random_problem(10, [3], **SIZES)
    with flashmoe.Context(processors=1, **problem.limits()) as context:
        with pytest.raises(flashmoe.InvalidArgument, match=f"^{message}"):
            flashmoe.moe(context, **problem.arguments(0) | options)
        flashmoe.moe(context, **problem.arguments(0))


@pytest.mark.parametrize("name", ["score", "groups", "routed_scale", "round_logits", "choice_bias"])
def test_a_router_is_not_described_where_routing_is_given(name: str):
    problem = random_problem(11, [3], fused=False, **SIZES)
    value = {"score": "sigmoid", "groups": 2, "routed_scale": 2.0, "round_logits": True}
    value["choice_bias"] = np.zeros(16, np.float32)
    refused = pytest.raises(flashmoe.InvalidArgument, match=f"^{name}: expected router with it")
    with flashmoe.Context(processors=1, **problem.limits()) as context, refused:
        flashmoe.moe(context, **problem.arguments(0), **{name: value[name]})


def test_the_reference_takes_all_options_at_once():
    problem = random_problem(12, [9], **SIZES, **EXPERTS["gpt-oss"], **DEEPSEEK)
    arguments = problem.arguments(0)
    del arguments["placement"]
    expected = moe_reference(**arguments)
    with flashmoe.Context(processors=1, **problem.limits()) as context:
        y = flashmoe.moe(context, **problem.arguments(0))
        np.testing.assert_array_equal(context.last_call.topk_ids, expected.topk_ids)
    np.testing.assert_allclose(y, expected.y, rtol=1e-4, atol=1e-5)
