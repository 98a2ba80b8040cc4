"""`load` and `router_logits`: a call adds counts of its choices to the one, and writes its logits to the other."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import flashmoe
import numpy as np
import pytest
from flashmoe import InvalidArgument
from flashmoe.launch import RankPool
from flashmoe.reference import choose, router_logits
from problems import Problem, is_certain, random_problem, routed
from test_exporters import Exporter

E, K = 12, 3
SIZES = {"hidden": 32, "intermediate": 16, "experts": E, "top_k": K}
TOKENS = (0, 1, 2, 9, 64, 300)


def certain(seed: int, tokens: list[int], **how: Any) -> Problem:
    """A random problem without tokens whose choice of experts float32 may misjudge."""
    problem = random_problem(seed, tokens, **SIZES | {"skew": 4.0} | how)
    return replace(problem, x=[x[is_certain(problem, x)] for x in problem.x])


def chosen(problem: Problem, rank: int = 0) -> np.ndarray:
    """int64 [E]: how often the rank's tokens choose each expert, by the reference."""
    if problem.topk_ids is not None:
        ids = problem.topk_ids[rank]
    else:
        ids = choose(router_logits(problem.x[rank], problem.router, problem.router_bias), problem.top_k)
    return np.bincount(ids.ravel(), minlength=len(problem.down_proj))


def context_of(problem: Problem, **limits: Any) -> flashmoe.Context:
    return flashmoe.Context(**problem.limits() | limits)


# Load


@pytest.mark.parametrize("processors", [1, 3])
@pytest.mark.parametrize("fused", [True, False], ids=["router", "given"])
@pytest.mark.parametrize("tokens", TOKENS)
def test_choices_are_counted_in_all_calls(tokens: int, fused: bool, processors: int):
    problem = certain(1, [tokens]) if fused else random_problem(1, [tokens], fused=False, skew=4.0, **SIZES)
    before = np.arange(E, dtype=np.int64) * 2**40
    load = before.copy()
    with context_of(problem, processors=processors) as ctx:
        expected = flashmoe.moe(ctx, **problem.arguments(0))
        for calls in (1, 2, 3):
            y = flashmoe.moe(ctx, **problem.arguments(0), load=load)
            assert y.tobytes() == expected.tobytes()
            np.testing.assert_array_equal(load - before, calls * chosen(problem))


@pytest.mark.parametrize("factor", [0.2, 1.0])
@pytest.mark.parametrize("fused", [True, False], ids=["router", "given"])
def test_choices_that_a_capacity_drops_are_counted(fused: bool, factor: float):
    problem = random_problem(2, [200], fused=fused, skew=8.0, capacity_factor=factor, **SIZES)
    load = np.zeros(E, np.int64)
    with context_of(problem, processors=2) as ctx:
        flashmoe.moe(ctx, **problem.arguments(0), load=load)
        assert ctx.last_call.dropped > 0
    np.testing.assert_array_equal(load, chosen(problem))
    assert load.sum() == K * len(problem.x[0])


@pytest.mark.parametrize("fused", [True, False], ids=["router", "given"])
def test_a_shared_expert_is_not_counted(fused: bool):
    how = {"shared": 2, "shared_gate": True}
    problem = certain(3, [50], **how) if fused else random_problem(3, [50], fused=False, **SIZES, **how)
    load = np.zeros(E, np.int64)
    with context_of(problem) as ctx:
        flashmoe.moe(ctx, **problem.arguments(0), load=load)
    np.testing.assert_array_equal(load, chosen(problem))


def test_choices_of_groups_of_experts():
    """Experts are chosen by groups, scores and a bias. The report says which were chosen."""
    problem = random_problem(
        4,
        [100],
        score="sigmoid",
        groups=4,
        top_groups=2,
        choice_bias=True,
        round_logits=True,
        dtype="bfloat16",
        **SIZES,
    )
    load = np.zeros(E, np.int64)
    with context_of(problem) as ctx:
        flashmoe.moe(ctx, **problem.arguments(0), load=load)
        np.testing.assert_array_equal(load, np.bincount(ctx.last_call.topk_ids.ravel(), minlength=E))


def test_ids_of_no_experts_are_not_counted():
    problem = random_problem(5, [8], fused=False, **SIZES)
    problem.topk_ids[0][3, 1] = -1
    load = np.zeros(E, np.int64)
    with context_of(problem) as ctx:
        flashmoe.moe(ctx, **problem.arguments(0), load=load)
    ids = problem.topk_ids[0]
    np.testing.assert_array_equal(load, np.bincount(ids[ids >= 0], minlength=E))


# Logits


def off_by_at_most(problem: Problem, rank: int = 0) -> np.ndarray:
    """[T, 1]: 8 standard deviations of the token's least certain logit in float32."""
    slack = routed(problem, problem.x[rank])[3]  # 8 standard deviations of two logits' difference
    return slack[:, None] / math.sqrt(2.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("tokens", TOKENS)
def test_logits_are_the_references(tokens: int, bias: bool, dtype: str):
    problem = random_problem(6, [tokens], dtype=dtype, biases=(bias, False, False), **SIZES)
    logits = np.full((tokens, E), np.nan, np.float32)
    with context_of(problem, processors=3) as ctx:
        expected = flashmoe.moe(ctx, **problem.arguments(0))
        y = flashmoe.moe(ctx, **problem.arguments(0), router_logits=logits)
        assert y.tobytes() == expected.tobytes()
        again = np.full_like(logits, np.nan)
        flashmoe.moe(ctx, **problem.arguments(0), router_logits=again, load=np.zeros(E, np.int64))
    assert logits.tobytes() == again.tobytes()
    error = np.abs(logits - router_logits(problem.x[0], problem.router, problem.router_bias))
    assert (error <= off_by_at_most(problem)).all()


SCORES = {
    "softmax": {},
    "sigmoid": {"score": "sigmoid"},
    "groups and a bias of the choice": {"score": "sigmoid", "groups": 4, "top_groups": 2, "choice_bias": True},
    "not renormalised": {"renormalize": False, "routed_scale": 2.5},
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("rounded", [False, True], ids=["", "rounded"])
@pytest.mark.parametrize("rule", SCORES.values(), ids=SCORES)
def test_logits_are_those_that_scores_are_made_of(rule: dict[str, Any], rounded: bool, dtype: str):
    """Logits of integers are exact, so that `round_logits` is the only rounding."""
    problem = random_problem(7, [40], dtype=dtype, round_logits=rounded, **SIZES, **rule)
    random = np.random.default_rng(7)
    problem.x[0][:] = random.integers(-15, 16, problem.x[0].shape)
    problem.router[:] = random.integers(-15, 16, problem.router.shape)
    exact = router_logits(problem.x[0], problem.router)
    assert np.abs(exact).max() > 256  # more than the 8 bits of bfloat16, which must round
    logits = np.empty((40, E), np.float32)
    with context_of(problem) as ctx:
        flashmoe.moe(ctx, **problem.arguments(0), router_logits=logits)
    expected = exact.astype(problem.x[0].dtype) if rounded else exact
    np.testing.assert_array_equal(logits, expected.astype(np.float64))


# Ranks


def _observe(
    rank: int, ranks: int, name: str, limits: dict[str, Any], arguments: dict[str, Any]
) -> tuple[np.ndarray, ...]:
    """In a rank: load and logits of two calls."""
    tokens = len(arguments["x"])
    load, logits = np.zeros(E, np.int64), np.full((tokens, E), np.nan, np.float32)
    asked = {"load": load} if "topk_ids" in arguments else {"load": load, "router_logits": logits}
    with flashmoe.Context(rank=rank, ranks=ranks, name=name, **limits) as ctx:
        for _ in range(2):
            flashmoe.moe(ctx, **arguments, **asked)
    return load, logits


@pytest.mark.parametrize("how", [{}, {"fused": False}, {"capacity_factor": 0.5}], ids=["router", "given", "drops"])
@pytest.mark.parametrize("tokens", [[40, 3], [17, 0, 64, 5]], ids=["2 ranks", "4 ranks"])
def test_every_rank_has_its_own(pool: RankPool, tokens: list[int], how: dict[str, Any]):
    ranks = len(tokens)
    problem = certain(8, tokens, **how) if how.get("fused", True) else random_problem(8, tokens, **SIZES, **how)
    calls = [(problem.limits(), problem.arguments(rank)) for rank in range(ranks)]
    for rank, (load, logits) in enumerate(pool.call(_observe, calls, ranks=ranks)):
        np.testing.assert_array_equal(load, 2 * chosen(problem, rank))
        if problem.topk_ids is None:
            error = np.abs(logits - router_logits(problem.x[rank], problem.router))
            assert (error <= off_by_at_most(problem, rank)).all()


# Errors, and memory of other libraries


@pytest.fixture
def problem() -> Problem:
    return random_problem(9, [20], **SIZES)


@pytest.fixture
def ctx(problem: Problem) -> Iterator[flashmoe.Context]:
    with context_of(problem) as ctx:
        yield ctx


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


def misaligned(*shape: int, dtype: type) -> np.ndarray:
    size = math.prod(shape) * np.dtype(dtype).itemsize
    return np.zeros(size + 1, np.uint8)[1:].view(dtype).reshape(shape)


WRONG = {
    "load of another type": ({"load": np.zeros(E, np.int32)}, r"load: expected \[E\] int64, got \[12\] int32"),
    "load of another size": ({"load": np.zeros(E + 1, np.int64)}, r"load: expected \[E=12\] int64, got \[13\] int64"),
    "load of two dimensions": ({"load": np.zeros((1, E), np.int64)}, r"load: expected \[E=12\] int64, got \[1, 12\]"),
    "load with gaps": ({"load": np.zeros(2 * E, np.int64)[::2]}, "load: expected a contiguous tensor, got a strided"),
    "load that is none": ({"load": [0] * E}, r"load: expected \[E\] int64, got list"),
    "load that is read-only": (
        {"load": read_only(np.zeros(E, np.int64))},
        "load: expected an array that can be written to, got a read-only or misaligned one",
    ),
    "load that is misaligned": (
        {"load": misaligned(E, dtype=np.int64)},
        "load: expected an array that can be written to, got a read-only or misaligned one",
    ),
    "logits of another type": (
        {"router_logits": np.zeros((20, E))},
        r"router_logits: expected \[T, E\] float32, got \[20, 12\] float64",
    ),
    "logits of other tokens": (
        {"router_logits": np.zeros((21, E), np.float32)},
        r"router_logits: expected \[T=20, E=12\] float32, got \[21, 12\] float32",
    ),
    "logits of other experts": (
        {"router_logits": np.zeros((20, E - 1), np.float32)},
        r"router_logits: expected \[T=20, E=12\] float32, got \[20, 11\] float32",
    ),
    "logits that are transposed": (
        {"router_logits": np.zeros((E, 20), np.float32).T},
        "router_logits: expected a contiguous tensor, got a strided",
    ),
    "logits that are read-only": (
        {"router_logits": np.broadcast_to(np.float32(0), (20, E))},
        "router_logits: expected an array that can be written to",
    ),
}


@pytest.mark.parametrize(("wrong", "message"), WRONG.values(), ids=WRONG)
def test_wrong_arguments_are_refused(ctx, problem: Problem, wrong: dict[str, Any], message: str):
    """They are also refused if the context knows the layer from an earlier call; and the context stays usable."""
    arguments = problem.arguments(0)
    good = {"load": np.zeros(E, np.int64), "router_logits": np.zeros((20, E), np.float32)}
    for _ in range(2):
        with pytest.raises(InvalidArgument, match=f"^{message}"):
            flashmoe.moe(ctx, **arguments, **good | wrong)
        assert not good["load"].any()
        flashmoe.moe(ctx, **arguments, **good)
        good["load"][:] = 0


def test_there_are_no_logits_of_given_routing():
    problem = random_problem(10, [20], fused=False, **SIZES)
    with (
        context_of(problem) as ctx,
        pytest.raises(InvalidArgument, match=r"^router_logits: expected router with it, got"),
    ):
        flashmoe.moe(ctx, **problem.arguments(0), router_logits=np.zeros((20, E), np.float32))


def test_memory_of_other_libraries(ctx, problem: Problem):
    """Such memory comes by DLPack: the call writes to the memory that a capsule describes."""
    load, logits = np.zeros(E, np.int64), np.zeros((20, E), np.float32)
    flashmoe.moe(ctx, **problem.arguments(0), load=load, router_logits=logits)
    exported = np.zeros(E, np.int64), np.zeros((20, E), np.float32)
    flashmoe.moe(ctx, **problem.arguments(0), load=Exporter(exported[0]), router_logits=Exporter(exported[1]))
    assert exported[0].tobytes() == load.tobytes() and exported[1].tobytes() == logits.tobytes()
    strided = Exporter(np.zeros(2 * E, np.int64)[::2])
    with pytest.raises(InvalidArgument, match=r"^load: expected a contiguous tensor"):
        flashmoe.moe(ctx, **problem.arguments(0), load=strided)
