"""Gradients on GPUs among several ranks: they differ from the float64 reference by no more than derived bounds.

With FLASHMOE_SHARE_GPUS, ranks share a GPU, as in test_group.py."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import ranks as on_rank
import training_ranks
from flashmoe.launch import RankPool
from layer_options import CLAMPED
from test_slices import Sliced
from training import check, trainable

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

GROUPS = (2, 4)
USUAL = {"hidden": 256, "intermediate": 192, "experts": 16, "top_k": 4, "dtype": "bfloat16", "scale": 1.0}
GIVEN = {"fused": False}
BIASES = {"biases": (True,) * 3}
GPT_OSS = CLAMPED | {"interleaved": True, "transposed": True} | BIASES
ON_INPUT = {"weights_on_input": True}
GATED_SHARED = {"shared": 2, "shared_gate": True}
FLOAT32, EXACT = {"dtype": "float32"}, {"dtype": "float32", "exact": True}
DIRECT, REDUCED = {"return_mode": "direct"}, {"return_mode": "reduced"}


@pytest.fixture(scope="module", params=GROUPS, ids=[f"{n}ranks" for n in GROUPS])
def pool(request) -> Iterator[RankPool]:
    with on_rank.pool_of(request.param) as made:
        yield made


def everywhere(pool: RankPool, fn, *arguments, timeout: float = 120.0) -> list:
    return pool.call(fn, [(training_ranks.unique(), *arguments)] * pool.ranks, timeout=timeout)


def run_and_check(pool: RankPool, tokens: list[int], times: int = 1, seed: int = 3, **sizes: Any) -> dict[str, float]:
    """Returns how far each gradient is off, as a fraction of its bound."""
    sizes = USUAL | sizes
    found = everywhere(pool, training_ranks.gradients, [(seed, tokens, sizes)], times)
    problem, grads = trainable(seed, tokens, **sizes)
    return check(problem, grads, [each[0] for each in found], engine="cuda")


@pytest.mark.parametrize("seed", range(4))
def test_clusters_that_stop_early_change_no_gradient(pool: RankPool, seed: int):
    draw = random.Random(seed)
    calls = []
    for number in range(8):
        sizes = {
            "hidden": 8 * draw.randint(1, 64),
            "intermediate": 8 * draw.randint(1, 32),
            "skew": draw.choice((0.0, 3.0)),
        }
        calls.append(
            (100 * seed + number, [draw.choice((0, 37, 400)) for _ in range(pool.ranks)], USUAL | REDUCED | sizes)
        )
    everywhere(pool, training_ranks.with_link_clusters, calls, (0, 1, 7))


LAYERS: dict[str, dict[str, Any]] = {
    "router, direct": DIRECT,
    "router, reduced": REDUCED,
    "router, biases": REDUCED | BIASES,
    "given": DIRECT | GIVEN,
    "given, biases, reduced": REDUCED | GIVEN | BIASES,
    "gelu": DIRECT | BIASES | {"activation": "gelu"},
    "relu": REDUCED | GIVEN | {"activation": "relu"},
    "clamped": CLAMPED | BIASES,
    "interleaved": {"interleaved": True},
    "transposed": GIVEN | {"transposed": True},
    "gpt-oss": GPT_OSS,
    "a capacity": REDUCED | {"capacity_factor": 0.5, "skew": 3.0},
    "a capacity, given": DIRECT | GIVEN | {"capacity_factor": 0.5, "skew": 3.0},
    "float16": REDUCED | {"dtype": "float16"},
    "weights on the input": DIRECT | GIVEN | BIASES | ON_INPUT,
    "weights on the input, reduced": REDUCED | ON_INPUT,
    "Llama 4": REDUCED | ON_INPUT | {"score": "sigmoid", "renormalize": False, "top_k": 1, "shared": 1},
    "a shared expert": DIRECT | {"shared": 1},
    "a gated shared expert": REDUCED | GATED_SHARED,
    "a gated shared expert, given": DIRECT | GIVEN | GATED_SHARED,
    "a gated shared expert, clamped": CLAMPED | GATED_SHARED | {"interleaved": True, "transposed": True},
    "float32": REDUCED | BIASES | FLOAT32,
    "float32, given": DIRECT | GIVEN | FLOAT32,
    "float32, exact": DIRECT | BIASES | EXACT,
    "float32, exact, reduced": REDUCED | GIVEN | EXACT,
    "float32, weights on the input": DIRECT | GIVEN | BIASES | ON_INPUT | FLOAT32,
    "float32, a gated shared expert": REDUCED | GATED_SHARED | FLOAT32,
    "float32, a gated shared expert, exact": DIRECT | GIVEN | GATED_SHARED | EXACT,
}


@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_layers(pool, options):
    run_and_check(pool, [150, 233, 97, 180][: pool.ranks], **options)


EDGES: dict[str, tuple[list[int], dict[str, Any]]] = {
    "a rank without tokens": ([200, 0, 120, 31], {}),
    "no rank but one has tokens": ([0, 170, 0, 0], REDUCED),
    "no tokens": ([0, 0, 0, 0], {}),
    "one token a rank": ([1, 1, 1, 1], BIASES),
    "all tokens to one expert": ([500, 300, 10, 200], {"top_k": 1, "skew": 50.0}),
    "a rank without experts": ([100, 60, 70, 80], {"placement": [0] * 16}),
    "an expert in copies": ([100, 60, 70, 80], {"placement": [[0, 1], *[1] * 15]}),
    "one expert a token": ([301, 5, 77, 100], {"top_k": 1}),
    "several tiles": ([900, 700, 300, 500], {"experts": 4, "top_k": 2, "hidden": 384, "intermediate": 320}),
    "a rank without tokens, float32": ([200, 0, 120, 31], FLOAT32 | BIASES),
    "several tiles, float32": ([900, 700, 300, 500], {"experts": 4, "top_k": 2} | FLOAT32),
    "a rank without experts, exact": ([100, 60, 70, 80], {"placement": [0] * 16} | EXACT),
    "sizes just above a tile's": ([257, 300, 3, 9], {"hidden": 264, "intermediate": 264} | BIASES),
    "shared, a rank without tokens": ([600, 0, 120, 31], GATED_SHARED),
    "shared, a rank without experts": ([100, 600, 70, 80], {"placement": [0] * 16} | GATED_SHARED),
    "shared, no tokens": ([0, 0, 0, 0], GATED_SHARED),
    "on the input, a rank without tokens": ([200, 0, 120, 31], ON_INPUT | BIASES),
}


@pytest.mark.parametrize(("tokens", "options"), EDGES.values(), ids=EDGES)
def test_edges(pool, tokens, options):
    run_and_check(pool, tokens[: pool.ranks], **options)


SLICED: dict[str, tuple[list[int], dict[str, Any]]] = {
    "given": ([150, 233, 97, 180], GIVEN),
    "given, biases": ([150, 233, 97, 180], GIVEN | BIASES),
    "router, biases": ([150, 233, 97, 180], BIASES),
    "a router's shared expert": ([300, 0, 97, 280], GATED_SHARED),
    "weights on the input": ([150, 233, 97, 180], ON_INPUT | BIASES),
    "a capacity": ([150, 233, 97, 180], {"capacity_factor": 0.5, "skew": 3.0}),
    "several tiles": ([900, 700, 300, 500], {"experts": 4, "top_k": 2, "hidden": 384, "intermediate": 320}),
    "float32": ([150, 233, 97, 180], FLOAT32 | BIASES),
}


@pytest.mark.parametrize("redispatch", [False, True])
@pytest.mark.parametrize(("tokens", "options"), SLICED.values(), ids=SLICED)
def test_slices(pool, tokens, options, redispatch):
    """Each expert is in two slices, on one rank or on two; a second call has the same bits."""
    sizes, tokens = USUAL | options, tokens[: pool.ranks]
    placement = [(e // 2 + e % 3 % 2) % pool.ranks for e in range(2 * sizes["experts"])]
    found = everywhere(pool, training_ranks.of_slices, 3, tokens, sizes, placement, redispatch)
    problem, grads = trainable(3, tokens, **sizes)
    check(problem, grads, found, engine="cuda", sliced=Sliced.of(problem, 2, placement))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("mode", on_rank.RETURN_MODES)
def test_bits_are_those_of_every_run(pool, mode, dtype):
    run_and_check(pool, [700, 500, 300, 900][: pool.ranks], times=20, return_mode=mode, dtype=dtype, **BIASES)


def test_the_hundredth_step_has_the_bits_of_the_first(pool):
    """Ranks do not wait between steps: one may begin a step while another is in the backward pass before it."""
    tokens = [300, 200, 0, 150][: pool.ranks]
    assert everywhere(pool, training_ranks.steps, 5, tokens, USUAL | BIASES, 100) == [0] * pool.ranks


def test_passes_of_any_number_of_tokens_in_any_order(pool):
    assert (
        everywhere(pool, training_ranks.in_any_order, 9, [200, 150, 130, 90][: pool.ranks], USUAL) == [0] * pool.ranks
    )


def test_gradients_of_a_rank_alone(pool):
    """With `direct`, y and dX of a rank's tokens have the same bits as on one GPU with all experts. (The gradients of
    combine weights may differ: they are sums of parts, and the parts are others if tiles have more rows.)"""
    seed, tokens, sizes = 11, [150, 120, 90, 60][: pool.ranks], USUAL | GIVEN | DIRECT
    found = everywhere(pool, training_ranks.gradients, [(seed, tokens, sizes)], 1)
    expected = pool.call(training_ranks.alone, [(seed, tokens, sizes)] * pool.ranks, timeout=120.0)[0]
    for rank, each in enumerate(expected):
        for name in ("x", "y"):
            assert found[rank][0][name].tobytes() == each[name].tobytes(), (rank, name)


@pytest.mark.parametrize("fused", [True, False])
def test_a_backward_pass_is_one_operation_of_the_gpu(pool, fused):
    for names in everywhere(
        pool, training_ranks.operations, 13, [300, 0, 90, 40][: pool.ranks], USUAL | {"fused": fused}
    ):
        assert len(names) == 1 and "flashmoe_moe" in names[0], names


AGAIN: dict[str, tuple[list[int], dict[str, Any]]] = {
    "router, direct": ([150, 233, 97, 180], DIRECT | BIASES),
    "router, reduced": ([150, 0, 97, 180], REDUCED),
    "given": ([900, 700, 300, 500], {"experts": 4, "top_k": 2, "hidden": 384, "intermediate": 320} | GIVEN),
    "a capacity": ([150, 233, 97, 180], REDUCED | {"capacity_factor": 0.5, "skew": 3.0}),
    "gpt-oss": ([150, 233, 97, 180], GPT_OSS),
    "an expert in copies": ([100, 60, 70, 80], {"placement": [[0, 1], *[1] * 15]}),
    "weights on the input": ([150, 233, 97, 180], ON_INPUT | BIASES),
    "a gated shared expert": ([150, 233, 97, 180], GATED_SHARED),
    "float32": ([150, 0, 97, 180], REDUCED | BIASES | FLOAT32),
}


@pytest.mark.parametrize(("tokens", "options"), AGAIN.values(), ids=AGAIN)
def test_bits_are_those_of_keeping_where_x_is_sent_again(pool, tokens, options):
    given = 3, tokens[: pool.ranks], USUAL | options
    found = everywhere(pool, training_ranks.both_ways, *given, 6)
    problem, grads = trainable(*given[:2], **given[2])
    check(problem, grads, found, engine="cuda")


@pytest.mark.parametrize("redispatch", [False, True])
@pytest.mark.parametrize("skew", [0.0, 50.0])
def test_what_is_kept_is_what_was_received(pool, skew, redispatch):
    sizes = USUAL | {"skew": skew}
    found = everywhere(pool, training_ranks.kept_and_needed, 12, [400, 300, 200, 100][: pool.ranks], sizes, redispatch)
    for kept, needed, _rows in found:
        assert needed <= kept <= 1.25 * needed + 4096
    assert sum(rows for *_, rows in found) == 4 * sum(
        len(x) for x in trainable(12, [400, 300, 200, 100][: pool.ranks], **sizes)[0].x
    )


IN_TURN: dict[str, tuple[dict[str, Any], list[tuple[int, int]]]] = {
    "more and fewer tokens": (REDUCED, [(n, 0) for n in (100, 100, 104, 260, 260, 20, 20, 0, 0, 1, 260, 100, 100)]),
    "another rank's experts": (GIVEN | {"skew": 50.0}, [(150, 4 * n) for n in (0, 0, 1, 2, 2, 3, 0, 0)]),
    "a gated shared expert": (GATED_SHARED, [(n, 0) for n in (80, 80, 260, 20, 20)]),
    "float32": (FLOAT32 | BIASES, [(n, 0) for n in (80, 80, 260, 20, 20)]),
}
"""Each layer's calls: how many of its tokens each rank gives, and what is added to the ids of all choices."""


@pytest.mark.parametrize("redispatch", [False, True])
@pytest.mark.parametrize(("options", "calls"), IN_TURN.values(), ids=IN_TURN)
def test_a_layer_whose_rows_grow_and_shrink(pool, options, calls, redispatch):
    """A call allocates the memory for kept rows before it has counted them, so the rows may fit, be too many, or be far
    fewer. In each case gradients are within their bounds, and equal calls have the same bits, whatever came before."""
    sizes = USUAL | options
    whole, grads = trainable(17, [280, 290, 300, 310][: pool.ranks], **sizes)
    problems = []
    for tokens, further in calls:
        problem = replace(whole, x=[x[:tokens] for x in whole.x])
        if whole.topk_ids is not None:
            ids = [((each[:tokens] + further) % sizes["experts"]).astype(each.dtype) for each in whole.topk_ids]
            problem = replace(problem, topk_ids=ids, topk_weights=[each[:tokens] for each in whole.topk_weights])
        problems.append((problem, [each[:tokens] for each in grads]))
    found = everywhere(pool, training_ranks.one_after_the_other, problems, redispatch)
    for n, (problem, given) in enumerate(problems):
        first = calls.index(calls[n])
        if first == n:
            check(problem, given, [of_rank[n].gradients for of_rank in found], engine="cuda")
        for of_rank in found:
            kept, alike = of_rank[n], of_rank[first]
            assert kept.needed <= kept.bytes <= 1.25 * kept.needed + 4096
            assert kept.counted[0] == alike.counted[0] <= kept.counted[3]
            for name, values in kept.gradients.items():
                assert values.tobytes() == alike.gradients[name].tobytes(), (n, name)
    for of_rank in found:  # the first call's room is its own rows; the second's has 1/16 more than these
        rows, *_others, room, _, _ = of_rank[0].counted
        assert (room, of_rank[1].counted[3]) == (rows, rows + rows // 16)


STRAYS = {
    "stays out": "PeerTimeout: rank 1 holds up call 3: ",
    "forward": "GroupError: ",
    "another call's": "GroupError: ",
}


@pytest.mark.parametrize("how", STRAYS)
def test_a_rank_that_is_elsewhere_is_named(pool, how):
    for rank, told in enumerate(everywhere(pool, training_ranks.stray, how, 1, 3.0)):
        assert told.startswith(STRAYS[how]) and (rank == 1 or "rank 1" in told), (rank, told)
