"""NaN, infinities, and ids that name no expert: which rows they spoil, and what reports and errors say. All other rows,
ranks and calls have the results that they have without them."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Any

import flashmoe
import flashmoe.nn
import numpy as np
import pytest
import torch
from flashmoe.launch import RankPool
from flashmoe.placement import hybrid
from flashmoe.reference import moe_gradients, moe_reference
from problems import Outcome, Problem, Ranks, random_problem
from test_slices import Sliced
from training import train

SIZES = {"hidden": 32, "intermediate": 24, "experts": 8, "top_k": 3}
ROUTED = {
    "softmax, direct": {"return_mode": "direct"},
    "softmax, reduced": {"return_mode": "reduced"},
    "not renormalised, biases": {"renormalize": False, "biases": (True, True, True)},
    "one expert a token": {"top_k": 1},
    "two experts a token": {"top_k": 2},
    "sigmoid, a bias of the choice": {"score": "sigmoid", "choice_bias": True, "routed_scale": 2.5},
    "groups": {"groups": 4, "top_groups": 2},
    "weights on the input": {"weights_on_input": True, "activation": "gelu"},
    "a shared expert with a gate": {"shared": 2, "shared_gate": True},
    "one expert and a shared one": {"top_k": 1, "shared": 1},
}
GIVEN = {
    "given, direct": {"return_mode": "direct"},
    "given, reduced": {"return_mode": "reduced"},
    "given, one expert a token": {"top_k": 1},
    "given, two experts a token": {"top_k": 2},
    "given, weights on the input": {"weights_on_input": True},
    "given, a shared expert": {"shared": 2},
}
LAYERS = {name: options | {"fused": True} for name, options in ROUTED.items()} | {
    name: options | {"fused": False} for name, options in GIVEN.items()
}
TOKENS = {1: [40], 2: [33, 47], 4: [21, 0, 40, 9]}


def drawn(seed: int, count: int, **options: Any) -> Problem:
    return random_problem(seed, TOKENS[count], **SIZES | options)


def spoiled(problem: Problem, seed: int) -> tuple[Problem, list[np.ndarray]]:
    """The problem with a tenth of each rank's rows spoiled, at least one: by NaN or an infinity in x, or if ids are
    given, by ids of -1 (further choices, at random, are then -1 too). Also, by rank, which rows have no expert."""
    rng = np.random.default_rng(seed)
    x, rows = [each.copy() for each in problem.x], []
    for of_rank in x:
        some = np.zeros(len(of_rank), bool)
        some[rng.permutation(len(of_rank))[: -(-len(of_rank) // 10)]] = True
        rows.append(some)
    if problem.topk_ids is None:
        for of_rank, some in zip(x, rows, strict=True):
            for token in some.nonzero()[0]:
                of_rank[token, rng.integers(of_rank.shape[1])] = rng.choice([np.nan, np.inf, -np.inf])
        return replace(problem, x=x), rows
    ids, weights = ([each.copy() for each in both] for both in (problem.topk_ids, problem.topk_weights))
    for of_rank, of_weights, some in zip(ids, weights, rows, strict=True):
        of_rank[some] = -1
        of_rank[rng.random(of_rank.shape) < 0.1] = -1
        of_weights[of_rank < 0] = np.nan  # weights of choices without an expert are not read
    return replace(problem, topk_ids=ids, topk_weights=weights), [(each < 0).all(axis=1) for each in ids]


def without(problem: Problem, rows: list[np.ndarray]) -> Problem:
    def left(arrays: list[np.ndarray] | None) -> list[np.ndarray] | None:
        return None if arrays is None else [each[~some] for each, some in zip(arrays, rows, strict=True)]

    of_tokens = {name: left(getattr(problem, name)) for name in ("x", "topk_ids", "topk_weights")}
    return replace(problem, **of_tokens)


def reference(problem: Problem, rank: int, **more: Any) -> Any:
    names = ("router", "router_bias", "choice_bias", "gate_up_bias", "down_bias")
    given = {name: getattr(problem, name) for name in names} | problem.shared
    if problem.topk_ids is None:
        given["top_k"] = problem.top_k
    else:
        given |= {"topk_ids": problem.topk_ids[rank], "topk_weights": problem.topk_weights[rank]}
    options = {name: each for name, each in problem.options.items() if name != "return_mode"}
    arrays = problem.x[rank], problem.gate_up_proj, problem.down_proj
    with np.errstate(invalid="ignore"):
        return moe_reference(*arrays, **given, **options, **more)


def verify(problem: Problem, outcomes: list[Outcome]) -> None:
    """In float32, routing, reports and results are those of the reference, the results within an error of float32."""
    for rank, outcome in enumerate(outcomes):
        expected, report = reference(problem, rank), outcome.report
        np.testing.assert_array_equal(report.topk_ids, expected.topk_ids)
        bad = np.isnan(expected.y).all(axis=1)
        assert (report.bad_rows, report.dropped) == (bad.sum(), expected.dropped)
        np.testing.assert_array_equal(np.isnan(outcome.y), np.isnan(expected.y))
        if not (~bad).any():
            continue
        hidden, inner = outcome.y.shape[1], problem.down_proj.shape[2]
        allowed = (hidden + 2 * inner + SIZES["experts"]) * 2.0**-23 * max(1.0, np.abs(expected.y[~bad]).max())
        assert np.abs(outcome.y - expected.y)[~bad].max() <= allowed
        assert (report.topk_weights[report.topk_ids < 0] == 0).all() or expected.dropped


# ---- rows ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("name", LAYERS)
def test_other_rows_keep_their_bits(ranks: Ranks, name: str, count: int):
    """Rows that are not spoiled have the bits of a call with these rows alone, and all rows are as in the reference."""
    problem, rows = spoiled(drawn(11, count, **LAYERS[name]), 12)
    alone = without(problem, rows)
    limits = problem.limits() | {"return_mode": "auto"}
    found, others = ranks.calls([problem, alone], limits)
    verify(problem, found)
    for of_rank, of_others, some in zip(found, others, rows, strict=True):
        assert of_rank.y[~some].tobytes() == of_others.y.tobytes()
        assert (of_rank.report.topk_ids[some] == -1).all()
    if problem.topk_ids is not None and problem.shared_down is None:
        assert all((of_rank.y[some] == 0.0).all() for of_rank, some in zip(found, rows, strict=True))


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("fused", [True, False])
def test_they_take_no_expert_s_capacity(ranks: Ranks, fused: bool, count: int):
    problem, _ = spoiled(drawn(13, count, fused=fused, capacity_factor=0.9, skew=3.0), 14)
    found = ranks.call(problem)
    verify(problem, found)
    assert sum(each.report.dropped for each in found) > 0


@pytest.mark.parametrize("fused", [True, False])
def test_copies_of_experts(ranks: Ranks, fused: bool):
    placement: list[int | list[int]] = [[0, 1, 2, 3], 0, [3, 1], 2, 3, [2, 0], 1, 1]
    problem, _ = spoiled(drawn(15, 4, fused=fused, placement=placement), 16)
    verify(problem, ranks.call(problem))


@pytest.mark.parametrize("mode", ["direct", "reduced"])
@pytest.mark.parametrize("fused", [True, False])
def test_ranks_without_experts(ranks: Ranks, fused: bool, mode: str):
    """In a call after one in which these ranks had all experts, so that their memory has results of their own."""
    before = drawn(17, 4, fused=fused, placement=[1, 2, 3, 1, 2, 3, 1, 2])
    problem, _ = spoiled(drawn(17, 4, fused=fused, placement=[0] * 8), 18)
    first, found = ranks.calls([before, problem], problem.limits() | {"return_mode": mode})
    verify(before, first)
    verify(problem, found)


@pytest.mark.parametrize("slices", [2, 4])
@pytest.mark.parametrize("fused", [True, False])
def test_sliced_experts(ranks: Ranks, fused: bool, slices: int):
    whole, rows = spoiled(drawn(19, 4, fused=fused), 20)
    sliced = Sliced.of(whole, slices, hybrid(SIZES["experts"], 4, slices))
    found, others = ranks.calls([sliced, without(sliced, rows)], sliced.limits())
    verify(whole, found)
    for of_rank, of_others, some in zip(found, others, rows, strict=True):
        assert of_rank.y[~some].tobytes() == of_others.y.tobytes()


@pytest.mark.parametrize("fused", [True, False])
def test_half_types(ranks: Ranks, fused: bool):
    for dtype in ("bfloat16", "float16"):
        problem, rows = spoiled(drawn(17, 2, fused=fused, dtype=dtype), 18)
        found, others = ranks.calls([problem, without(problem, rows)], problem.limits())
        for of_rank, of_others, some in zip(found, others, rows, strict=True):
            assert of_rank.y[~some].tobytes() == of_others.y.tobytes()
            assert np.isnan(of_rank.y[some].astype(np.float32)).all() if fused else (of_rank.y[some] == 0).all()


def test_random_calls_back_to_back(ranks: Ranks):
    """Calls with a router and calls with given ids, some with spoiled rows, all with random delays: their results are
    right, and none hangs."""
    for count in (1, 2, 4):
        problems = []
        for seed in range(12):
            problem = drawn(100 + seed, count, fused=seed % 2 == 0, return_mode=("direct", "reduced")[seed // 2 % 2])
            problems.append(spoiled(problem, seed)[0] if seed % 3 else problem)
        limits = problems[0].limits() | {"return_mode": "auto"}
        for problem, found in zip(problems, ranks.calls(problems, limits, perturb=range(1, 13)), strict=True):
            verify(problem, found)


def test_all_rows(ranks: Ranks):
    for problem in (drawn(19, 2, fused=True), drawn(19, 2, fused=False), drawn(19, 1, top_k=1)):
        if problem.topk_ids is None:
            problem.x = [np.full_like(each, np.nan) for each in problem.x]
        else:
            problem.topk_ids = [np.full_like(each, -1) for each in problem.topk_ids]
        verify(problem, ranks.call(problem))


# ---- logits of -inf ----------------------------------------------------------------------------------------------


def masked(problem: Problem, experts: list[int], where: str) -> Problem:
    of_expert = getattr(problem, where)
    bias = np.zeros(len(problem.down_proj), np.float32) if of_expert is None else of_expert.copy()
    bias[experts] = -np.inf
    return replace(problem, **{where: bias})


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("where", ["router_bias", "choice_bias"])
@pytest.mark.parametrize(
    "options",
    [{}, {"renormalize": False}, {"score": "sigmoid"}, {"groups": 4, "top_groups": 3}, {"top_k": 1}],
    ids=str,
)
def test_experts_that_are_ruled_out(ranks: Ranks, where: str, options: dict[str, Any], count: int):
    problem = masked(drawn(21, count, **options), [1, 4], where)
    found = ranks.call(problem)
    verify(problem, found)
    assert not any(np.isin(each.report.topk_ids, [1, 4]).any() for each in found)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_a_large_bias_of_the_choice_chooses_no_expert_that_a_logit_rules_out(ranks: Ranks, score: str):
    problem = masked(drawn(22, 1, score=score, choice_bias=True), [2], "router_bias")
    problem.choice_bias[2] = 100.0
    found = ranks.call(problem)
    verify(problem, found)
    assert (found[0].report.topk_ids != 2).all()


@pytest.mark.parametrize("options", [{}, {"renormalize": False}, {"score": "sigmoid"}, {"choice_bias": True}], ids=str)
def test_too_few_are_left(ranks: Ranks, options: dict[str, Any]):
    """If fewer than K experts are left, the lowest ids among the experts that are ruled out are chosen too, with a
    weight of 0, as by PyTorch's softmax and topk."""
    problem = masked(drawn(23, 1, **options), [0, 1, 2, 3, 4, 6], "router_bias")
    (found,) = ranks.call(problem)
    verify(problem, [found])
    assert set(found.report.topk_ids[:, :2].ravel()) == {5, 7}
    assert (found.report.topk_ids[:, 2] == 0).all() and (found.report.topk_weights[:, 2] == 0.0).all()
    if options.get("score") is None and problem.choice_bias is None:
        logits = torch.from_numpy(problem.x[0] @ problem.router.T + problem.router_bias)
        theirs = logits.softmax(dim=1).topk(3, dim=1).values
        theirs /= theirs.sum(dim=1, keepdim=True) if options.get("renormalize", True) else 1.0
        torch.testing.assert_close(torch.from_numpy(found.report.topk_weights), theirs, rtol=1e-5, atol=1e-7)


def test_none_is_left(ranks: Ranks):
    every = list(range(SIZES["experts"]))
    for score in ("softmax", "sigmoid"):
        problem = masked(drawn(24, 1, score=score), every, "router_bias")
        (found,) = ranks.call(problem)
        verify(problem, [found])
        assert found.report.bad_rows == len(problem.x[0])


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("where", ["router_bias", "choice_bias"])
def test_a_bias_that_rules_out_every_choice(ranks: Ranks, where: str, value: float):
    problem = masked(drawn(25, 2), [3], where)
    getattr(problem, where)[3] = value
    found = ranks.call(problem)
    verify(problem, found)
    assert [each.report.bad_rows for each in found] == TOKENS[2]


# ---- errors, after which ranks go on calling ---------------------------------------------------------------------


def _told(
    rank: int, ranks: int, _: str, name: str, limits: dict[str, Any], calls: list[dict[str, Any]]
) -> list[tuple[str, Any]]:
    """For each call an empty text and the result, or the text of the error that it raises and `last_call`."""
    found: list[tuple[str, Any]] = []
    with flashmoe.Context(rank=rank, ranks=ranks, name=name, **limits) as context:
        for arguments in calls:
            try:
                found.append(("", flashmoe.moe(context, **arguments)))
            except flashmoe.FlashMoEError as error:
                found.append((f"{type(error).__name__}: {error}", context.last_call))
    return found


def told(pool: RankPool, problems: list[Problem]) -> list[list[tuple[str, Any]]]:
    """Makes these calls in one group. Returns what `_told` returns, by rank and by call."""
    count, name = problems[0].ranks, f"told-{secrets.token_hex(6)}"
    arguments = [(name, problems[0].limits(), [each.arguments(rank) for each in problems]) for rank in range(count)]
    return pool.call(_told, arguments, ranks=count, timeout=120.0)


WRONG = {
    "beyond the experts": ([5, 8, 2], r"ids in [0, E=8), or -1 for none, got 8 for token 3 of rank {}"),
    "below -1": ([5, 4, -2], r"ids in [0, E=8), or -1 for none, got -2 for token 3 of rank {}"),
    "the least": ([-(2**31), 4, 2], r"ids in [0, E=8), or -1 for none, got -2147483647 for token 3 of rank {}"),
    "twice": ([6, 1, 6], "distinct experts per token, got expert 6 twice for token 3 of rank {}"),
    "twice, beside none": ([6, -1, 6], "distinct experts per token, got expert 6 twice for token 3 of rank {}"),
}


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("what", WRONG)
def test_wrong_ids_are_told_to_their_rank_and_the_group_goes_on(pool: RankPool, what: str, count: int):
    wrong, message = WRONG[what]
    good, who = random_problem(31, [12] * count, **SIZES, fused=False), count - 1
    bad = replace(good, topk_ids=[each.copy() for each in good.topk_ids])
    bad.topk_ids[who][3] = wrong
    for rank, (first, second, third) in enumerate(told(pool, [good, bad, good])):
        assert first[0] == third[0] == "" and first[1].tobytes() == third[1].tobytes()
        if rank != who:
            assert second[0] == "" and second[1].tobytes() == first[1].tobytes()
        else:
            assert second == (f"BadRow: topk_ids: expected {message.format(who)}", None)


def test_of_several_wrong_rows_the_first_is_told(pool: RankPool):
    problem = random_problem(32, [64], **SIZES, fused=False)
    problem.topk_ids[0][[60, 7, 9, 33], 1] = 99
    ((message, _),) = told(pool, [problem])[0]
    assert message.endswith("got 99 for token 7 of rank 0")


@pytest.mark.parametrize("count", [1, 2, 4])
def test_strict_calls(pool: RankPool, count: int):
    """Only the rank that has the bad row gets an error, and the ranks' next calls are right."""
    good, who = random_problem(33, [12] * count, **SIZES, strict=True), count - 1
    bad = replace(good, x=[each.copy() for each in good.x])
    bad.x[who][5, 7] = np.nan
    lenient = replace(bad, options={})
    for rank, (first, second, third, fourth) in enumerate(told(pool, [good, bad, lenient, good])):
        assert first[0] == third[0] == fourth[0] == "" and first[1].tobytes() == fourth[1].tobytes()
        if rank != who:
            assert second[1].tobytes() == third[1].tobytes() == first[1].tobytes()
        else:
            expected = "router: expected logits of which the largest is finite, with strict, got NaN or infinity"
            assert second[0] == f"BadRow: {expected} for token 5 of rank {who}"
            assert np.isnan(third[1]).any(axis=1).nonzero()[0].tolist() == [5]


def test_strict_is_a_truth_value():
    problem = random_problem(34, [4], **SIZES)
    with (
        flashmoe.Context(**problem.limits()) as context,
        pytest.raises(flashmoe.InvalidArgument, match="strict: expected True or False, got array"),
    ):
        flashmoe.moe(context, **problem.arguments(0), strict=np.zeros(2))


# ---- gradients ---------------------------------------------------------------------------------------------------

TRAINED = {
    "direct": {"return_mode": "direct"},
    "reduced": {"return_mode": "reduced"},
    "not renormalised": {"renormalize": False, "biases": (True, True, True)},
    "sigmoid": {"score": "sigmoid", "choice_bias": True},
    "weights on the input": {"weights_on_input": True, "activation": "gelu"},
    "a shared expert": {"shared": 2, "shared_gate": True},
    "given": {"fused": False},
    "given, reduced": {"fused": False, "return_mode": "reduced"},
    "given, weights on the input": {"fused": False, "weights_on_input": True},
}


@pytest.mark.parametrize("redispatch", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("name", TRAINED)
def test_gradients(pool: RankPool, name: str, count: int, redispatch: bool):
    """Gradients of experts leave spoiled rows out: they have the bits of a call without these rows. A router's
    gradients are NaN if a row is spoiled."""
    problem, rows = spoiled(drawn(41, count, **TRAINED[name]), 42)
    rng = np.random.default_rng(43)
    grads = [rng.standard_normal(each.shape).astype(each.dtype) for each in problem.x]
    others = [each[~some] for each, some in zip(grads, rows, strict=True)]
    how = {"limits": problem.limits() | {"redispatch": redispatch and count > 1, "return_mode": "auto"}}
    found = train(pool, problem, grads, **how)[0]
    alone = train(pool, without(problem, rows), others, **how)[0]
    for rank, some in enumerate(rows):
        mine, expected = found[rank], alone[rank]
        for name, each in mine.items():
            if name in ("x", "topk_weights", "y"):
                assert each[~some].tobytes() == expected[name].tobytes(), name
            elif name in ("router", "router_bias"):
                assert np.isnan(each).all() if some.any() else each.tobytes() == expected[name].tobytes(), name
            elif name != "shared_gate" and (problem.shared_down is None or name in ("gate_up_proj", "down_proj")):
                assert each.tobytes() == expected[name].tobytes(), name
        if problem.topk_ids is None:
            assert np.isnan(mine["x"][some]).all()
        else:
            assert (mine["topk_weights"][problem.topk_ids[rank] < 0] == 0.0).all()
            assert problem.shared_down is not None or (mine["x"][some] == 0.0).all()


def test_gradients_of_choices_without_an_expert(pool: RankPool):
    """If some ids are -1, the gradients are those of the reference, in float64."""
    problem, _ = spoiled(drawn(44, 1, fused=False), 45)
    grad = np.random.default_rng(46).standard_normal(problem.x[0].shape).astype(np.float32)
    found = train(pool, problem, [grad])[0][0]
    weights = np.where(problem.topk_ids[0] < 0, 0.0, problem.topk_weights[0])
    arrays = grad, problem.x[0], problem.gate_up_proj, problem.down_proj
    expected = moe_gradients(*arrays, topk_ids=problem.topk_ids[0], topk_weights=weights)
    for name, each in expected.items():
        error, size = np.abs(found[name] - each).max(), np.abs(each).max()
        assert error <= (len(grad) + SIZES["hidden"] + 2 * SIZES["intermediate"]) * 2.0**-23 * size, name


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_slopes_far_out(pool: RankPool, activation: str):
    """The activations' slopes are 0 and 1 even for pre-activations whose squares and cubes are too large for
    float32."""
    sizes = {"hidden": 2, "intermediate": 2, "experts": 1, "top_k": 1}
    problem = random_problem(47, [1], **sizes, fused=False, activation=activation, biases=(False, True, False))
    problem.x[0][:] = [[1.0, 0.0]]
    problem.gate_up_proj[:] = [[[2.0**100, 0.0], [-(2.0**100), 0.0]]]
    problem.down_proj[:] = [[[2.0**-100, 0.0], [0.0, 1.0]]]
    problem.gate_up_bias[:] = 0.0
    problem.topk_weights[0][:] = 1.0
    found = train(pool, problem, [np.ones((1, 2), np.float32)])[0][0]
    assert found["y"].tolist() == [[1.0, 0.0]]
    assert found["gate_up_bias"].tolist() == [[2.0**-100, 0.0]]


# ---- modules and operators -----------------------------------------------------------------------------------------


def test_modules_count_no_such_rows():
    torch.manual_seed(0)
    with flashmoe.Context(max_tokens=16, dtype="float32", **SIZES) as context:
        module = flashmoe.nn.MoE(context, **SIZES, count_load=True)
        x = torch.randn(16, SIZES["hidden"])
        x[[2, 9], 3] = torch.nan
        y = module(x)
        assert y.isnan().all(dim=1).nonzero().ravel().tolist() == [2, 9]
        assert int(module.load.sum()) == 14 * SIZES["top_k"]
        assert context.last_call.bad_rows == 2
        strict = flashmoe.nn.MoE(context, **SIZES, strict=True)
        with pytest.raises(flashmoe.BadRow, match="for token 2 of rank 0"):
            strict(x)
        assert strict(x.nan_to_num()).isfinite().all()


def test_loss_scaling_sees_them():
    """An infinity in x makes gradients NaN, so that `GradScaler`, which looks for gradients that are not finite, skips
    the step."""
    torch.manual_seed(1)
    with flashmoe.Context(max_tokens=8, dtype="float32", **SIZES) as context:
        module = flashmoe.nn.MoE(context, **SIZES)
        x = torch.randn(8, SIZES["hidden"])
        x[4, 0] = torch.inf
        module(x).sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    assert norm.isnan()


def test_the_operator_under_a_compiler():
    problem = random_problem(51, [8], **SIZES, fused=False)
    with flashmoe.Context(**problem.limits()) as context:
        tensors = {
            name: torch.from_numpy(each) for name, each in problem.arguments(0).items() if isinstance(each, np.ndarray)
        }
        tensors["topk_ids"][3] = -1
        tensors["topk_weights"][3] = torch.nan

        def layer(x: torch.Tensor) -> torch.Tensor:
            return flashmoe.moe(context, **tensors | {"x": x}, placement=problem.owners(), strict=True)

        expected = layer(tensors["x"])
        assert (expected[3] == 0.0).all() and expected.isfinite().all()
        torch._dynamo.reset()
        assert torch.equal(torch.compile(layer, backend="eager", fullgraph=True)(tensors["x"]), expected)


def test_gradients_of_arrays_that_need_none_are_not_touched():
    """A call does not change the NumPy arrays that it is given."""
    problem, _ = spoiled(drawn(52, 1, fused=False), 53)
    arguments = problem.arguments(0)
    before = {name: each.tobytes() for name, each in arguments.items() if isinstance(each, np.ndarray)}
    with flashmoe.Context(**problem.limits()) as context:
        flashmoe.moe(context, **arguments)
    assert all(arguments[name].tobytes() == each for name, each in before.items())
