"""The CUDA engine against the float64 reference: kinds of call, ends of ranges, random shapes, many calls.

FLASHMOE_EXAMPLES sets the number of random shapes, and FLASHMOE_CALLS the number of calls in one process. FLASHMOE_SEED
makes a run draw what the run with this seed has drawn. Every output begins as NaN (layers.poisoned_outputs).
"""

from __future__ import annotations

import math
import os
import random
from dataclasses import replace

import flashmoe
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layers import (
    ACTIVATIONS,
    ARITHMETIC,
    DTYPES,
    SEED,
    Problem,
    at_random,
    call,
    check,
    context_of,
    poisoned_outputs,
    random_problem,
    run_and_check,
)
from size_bound import error_bound

pytestmark = pytest.mark.gpu

EXAMPLES = int(os.environ.get("FLASHMOE_EXAMPLES", "200"))
CALLS = int(os.environ.get("FLASHMOE_CALLS", "10000"))
USUAL = {"hidden": 256, "intermediate": 192, "experts": 16, "top_k": 4}
ROUTINGS = {"router": None, "int32": "int32", "int64": "int64"}


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("biases", [False, True], ids=["plain", "biases"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("arithmetic", ARITHMETIC)
def test_every_kind_of_call(arithmetic, activation, biases, routing):
    kind = {**ARITHMETIC[arithmetic], "activation": activation, "biases": biases, "ids": ROUTINGS[routing]}
    run_and_check(random_problem(1, 333, **kind, skew=3.0, **USUAL))


EDGES = {
    "no tokens": (0, {}),
    "one token": (1, {}),
    "nine tokens": (9, {}),
    "one expert": (300, {"experts": 1, "top_k": 1}),
    "one expert, probability 1": (50, {"experts": 1, "top_k": 1, "renormalize": False}),
    "one expert for each token": (300, {"top_k": 1}),
    "every expert for every token": (150, {"top_k": 16}),
    "all tokens to the same experts": (1000, {"top_k": 2, "skew": 50.0}),
    "all tokens to one expert": (3000, {"top_k": 1, "skew": 50.0}),
    "experts without tokens": (3, {"experts": 300}),
    "1024 experts": (500, {"experts": 1024, "top_k": 8}),
    "32 experts of a token": (200, {"experts": 64, "top_k": 32}),
    "32 of 32 experts": (100, {"experts": 32, "top_k": 32}),
    "1024 experts, 32 of a token": (700, {"experts": 1024, "top_k": 32}),
    # The two thread blocks of a cluster that share a gate take equally many steps, with one token block each. The
    # numbers of token blocks are odd, so that in the last step one of the two has no token block.
    "300 experts, 133 token blocks": (132 * 32 + 20, {"experts": 300}),
    "1024 experts, 265 token blocks": (264 * 16 + 5, {"experts": 1024, "top_k": 8}),
    "the smallest sizes": (70, {"hidden": 8, "intermediate": 8}),
    "the smallest H": (70, {"hidden": 8, "intermediate": 1000}),
    "the smallest I": (70, {"hidden": 1000, "intermediate": 8}),
    "sizes just above a tile's": (257, {"hidden": 136, "intermediate": 136}),
    "full tiles whose last tasks are half": (1500, {"hidden": 320, "intermediate": 320, "experts": 4, "top_k": 2}),
    "powers of two": (1024, {"hidden": 1024, "intermediate": 512, "experts": 8, "top_k": 2}),
    "return groups, and more tiles than a window takes": (3000, {"hidden": 1024, "experts": 40}),
    "probabilities not renormalized": (200, {"renormalize": False}),
    "capacity below one token": (200, {"capacity_factor": 1e-6}),
    "capacity of all": (200, {"capacity_factor": 1e6, "skew": 50.0}),
    "capacity of half": (400, {"capacity_factor": 0.5, "skew": 3.0}),
    "capacity of half, ids given": (400, {"capacity_factor": 0.5, "skew": 3.0, "ids": "int64"}),
    "capacity of half, 300 experts, 133 token blocks": (
        132 * 32 + 20,
        {"experts": 300, "capacity_factor": 0.5, "skew": 3.0},
    ),
    "capacity that drops most": (900, {"capacity_factor": 0.3, "skew": 50.0, "ids": "int32"}),
}


@pytest.mark.parametrize("arithmetic", ARITHMETIC)
@pytest.mark.parametrize("edge", EDGES)
def test_edge(edge, arithmetic):
    tokens, changes = EDGES[edge]
    run_and_check(random_problem(len(edge), tokens, **ARITHMETIC[arithmetic], **USUAL | changes))


@pytest.mark.parametrize("tokens", [9, 300])
def test_exact_is_more_than_tf32(tokens):
    """Tests the bound: the result of tensor cores (TF32) is outside the bound of an exact call. (Ids are given, so that
    only the experts' products differ. Calls of fewer tokens do not use tensor cores for float32.)"""
    problem = random_problem(13, tokens, dtype="float32", ids="int32", exact=True, **USUAL)
    with context_of(problem) as context:
        expected = check(problem, *call(context, problem))
        y, _ = call(context, replace(problem, options={**problem.options, "exact": False}))
    assert float((y.double() - expected.y).norm()) > expected.bound


@pytest.mark.parametrize("edge", [edge for edge in EDGES if edge.startswith("capacity")])
def test_memory_for_what_a_capacity_keeps(edge):
    tokens, changes = EDGES[edge]
    problem = random_problem(len(edge), tokens, **USUAL | changes)
    run_and_check(problem, capacity_factor=changes["capacity_factor"])


@pytest.mark.parametrize("tokens", [7, 200, 3000])
@pytest.mark.parametrize("top_k", [1, 4])
def test_every_expert_keeps_what_it_may(tokens, top_k):
    """The experts' rows just fit their capacity: nothing is dropped, and the context has little room for more rows."""
    problem = random_problem(7, tokens, **USUAL | {"experts": 12, "top_k": top_k}, ids="int32", capacity_factor=1.0)
    pairs = torch.arange(tokens * top_k, device="cuda", dtype=torch.int32)
    problem.topk_ids = (pairs % 12).view(tokens, top_k)
    with context_of(problem, capacity_factor=1.0) as context:
        y, report = call(context, problem)
        check(problem, y, report)
    assert report.dropped == 0


@pytest.mark.parametrize("tokens", [7, 8, 64, 65, 96, 255, 256, 257, 513, 1056, 1057, 8448, 20000])
def test_tokens_around_the_sizes_of_blocks_and_tiles(tokens):
    run_and_check(random_problem(tokens, tokens, hidden=64, intermediate=64, experts=4, top_k=2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("experts", [1, 32, 33, 64, 65, 128, 129, 300])
def test_experts_around_the_gates_sizes(experts, dtype):
    """Each thread block has several token blocks, so that the gate goes round its ring of stages and begins its token
    blocks at different stages."""
    sizes = {"hidden": 360, "intermediate": 64, "experts": experts, "top_k": min(experts, 2)}
    run_and_check(random_problem(experts, 3000, dtype=dtype, **sizes), processors=36)


@pytest.mark.parametrize("processors", [2, 4, 6, 66])
def test_few_thread_blocks(processors):
    run_and_check(random_problem(9, 500, **USUAL), processors=processors)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_expert_empty_but_one(dtype):
    problem = random_problem(4, 700, dtype=dtype, ids="int32", **USUAL | {"experts": 200, "top_k": 1})
    problem.topk_ids.fill_(137)
    run_and_check(problem)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_logits_choose_the_lower_ids(dtype):
    """x and the router have small integers, so that logits are exact, in TF32 too, and many of them are equal."""
    problem = random_problem(5, 200, dtype=dtype, **USUAL | {"hidden": 64, "experts": 40, "top_k": 5})
    generator = torch.Generator(device="cuda").manual_seed(5)
    for each in (problem.x, problem.router):
        each.copy_(torch.randint(-1, 2, each.shape, generator=generator, device="cuda"))
    problem.x[5] = 0  # all logits of this token are equal
    with context_of(problem) as context:
        _, report = call(context, problem)
    logits = (problem.x.double() @ problem.router.double().T).cpu()
    ids = logits.sort(dim=1, descending=True, stable=True).indices[:, :5]
    assert torch.equal(torch.from_numpy(report.topk_ids).long(), ids)
    assert report.topk_ids[5].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_rows(dtype):
    """The rows of x, router and weights have gaps between them, as the experts' matrices have; the gaps hold NaN."""
    problem = random_problem(6, 310, dtype=dtype, **USUAL)

    def apart(tensor: torch.Tensor, columns: int, each_other: bool) -> torch.Tensor:
        shape = [*tensor.shape[:-1], tensor.shape[-1] + columns]
        shape[0] *= 2 if each_other else 1
        wide = torch.full(shape, math.nan, dtype=tensor.dtype, device=tensor.device)
        view = wide[:: 2 if each_other else 1][..., 8 : 8 + tensor.shape[-1]]
        view.copy_(tensor)
        return view

    strided = replace(
        problem,
        x=apart(problem.x, 24, True),
        router=apart(problem.router, 8, False),
        gate_up_proj=apart(problem.gate_up_proj, 16, True),
        down_proj=apart(problem.down_proj, 40, True),
    )
    with context_of(problem) as context:
        y, report = call(context, strided)
        check(strided, y, report)
        assert torch.equal(y, call(context, problem)[0])


@pytest.mark.parametrize("apart", [0, 8, 64])
def test_rows_of_x_that_overlap(apart):
    """The rows of x share memory, as in results of Tensor.expand() and Tensor.as_strided()."""
    problem = random_problem(8, 300, **USUAL)
    rows = problem.x.flatten().as_strided((300, USUAL["hidden"]), (apart, 1))
    with context_of(problem) as context:
        y, report = call(context, replace(problem, x=rows))
        check(replace(problem, x=rows.contiguous()), y, report)


def test_weights_that_a_caller_changes_are_read_anew():
    problem = random_problem(7, 100, **USUAL)
    with context_of(problem) as context:
        for factor in (1.0, -2.0, 0.5):
            problem.down_proj.mul_(factor)
            problem.router.mul_(-1.0)
            check(problem, *call(context, problem))


# ---- The same bits ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 40, 1500])
def test_a_hundred_calls_give_the_same_bits(tokens, dtype):
    problem = random_problem(8, tokens, dtype=dtype, skew=3.0, **USUAL | {"experts": 64, "top_k": 8})
    with context_of(problem) as context:
        y, report = call(context, problem)
        check(problem, y, report)
        for turn in range(99):
            again, _ = call(context, problem)
            assert torch.equal(again, y), f"call {turn + 2} differs"


def test_the_bits_do_not_depend_on_the_number_of_thread_blocks():
    problem = random_problem(10, 700, skew=3.0, **USUAL)
    outputs = []
    for processors in (2, 18, None):
        with context_of(problem, processors=processors) as context:
            outputs.append(call(context, problem)[0])
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])


# ---- Random shapes ------------------------------------------------------------------------------------


@st.composite
def shapes(draw) -> dict:
    experts = draw(st.integers(1, 300) | st.integers(1, 16), label="experts")
    size = st.integers(1, 256).map(lambda n: 8 * n) | st.integers(1, 40).map(lambda n: 8 * n)
    return {
        "seed": draw(st.integers(0, 2**31 - 1)),
        "tokens": draw(st.integers(0, 3000) | st.integers(0, 64), label="tokens"),
        "hidden": draw(size, label="hidden"),
        "intermediate": draw(size, label="intermediate"),
        "experts": experts,
        "top_k": draw(st.integers(1, min(16, experts)), label="top_k"),
        "dtype": draw(st.sampled_from(DTYPES)),
        "activation": draw(st.sampled_from(ACTIVATIONS)),
        "ids": draw(st.sampled_from([None, None, "int32", "int64"])),
        "skew": draw(st.sampled_from([0.0, 3.0, 50.0])),
        "scale": draw(st.sampled_from([1.0, 0.03, 8.0])),
        "biases": draw(st.booleans()),
        "renormalize": draw(st.booleans()),
        "capacity_factor": draw(st.sampled_from([None] * 4 + [0.3, 1.0, 2.5])),
    }


@pytest.mark.timeout(0)
@at_random(EXAMPLES)
@given(shape=shapes())
def test_random_shapes(shape):
    run_and_check(random_problem(**shape))


# ---- Many calls ---------------------------------------------------------------------------------------


def dense(problem: Problem, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, float]:
    """y in float32, computed by applying every expert to every token; and the norm of the terms that y sums."""
    experts, hidden, inner = problem.down_proj.shape
    z = (x.float() @ problem.gate_up_proj.float().flatten(0, 1).T).view(len(x), experts, 2 * inner)
    gate, up = z.chunk(2, dim=2)
    f = torch.einsum("tei,ehi->teh", torch.nn.functional.silu(gate) * up, problem.down_proj.float())
    terms = weights[..., None] * f.gather(1, ids.long()[..., None].expand(-1, -1, hidden))
    return terms.sum(dim=1), float(terms.norm())


@pytest.mark.timeout(0)
def test_ten_thousand_calls_of_changing_size():
    """Calls with a router and calls with given ids in turn, in one context. Every tenth call is compared with `dense`.
    The bound is `error_bound`, a bound of the relative root mean square error for such data, times a factor for the
    tail of the error's distribution, which is larger for few tokens (flashmoe.tolerance: s = 23)."""
    sizes = {"hidden": 256, "intermediate": 128, "experts": 32, "top_k": 4}
    most = 1024
    routed = random_problem(11, most, **sizes)
    given_ids = random_problem(12, most, ids="int64", **sizes)
    expected_error = error_bound("bfloat16", 256, 128, 4, "direct")
    chosen = random.Random(SEED)
    with context_of(routed) as context, poisoned_outputs():
        for turn in range(CALLS):
            tokens = chosen.choice([0, 1, 8, most, chosen.randint(0, 64), chosen.randint(0, most)])
            first = chosen.randint(0, most - tokens)
            part = slice(first, first + tokens)
            problem = replace(routed, x=routed.x[part])
            if turn % 2:
                problem = replace(
                    given_ids,
                    x=given_ids.x[part],
                    topk_ids=given_ids.topk_ids[part],
                    topk_weights=given_ids.topk_weights[part],
                )
            y = flashmoe.moe(context, **problem.arguments())
            if turn % 20 not in (0, 11):  # compares about every tenth call, in turn with a router and with given ids
                continue
            report = context.last_call
            ids = torch.from_numpy(report.topk_ids).cuda()
            weights = torch.from_numpy(report.topk_weights).cuda()
            expected, scale = dense(problem, problem.x, ids, weights)
            bound = scale * expected_error * math.sqrt(1 + 2 * math.sqrt(23 / max(1, tokens)) + 46 / max(1, tokens))
            error = float((y.float() - expected).norm())
            assert error <= bound, f"call {turn + 1}, T={tokens}: error {error:.3e}, bound {bound:.3e}"
        context.synchronize()
