"""Experts that are cut into slices on several ranks, on the CPU engine, against the same layer with whole experts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import flashmoe
import numpy as np
import pytest
import torch
from flashmoe.checkpoint import MoELayer
from flashmoe.errors import GroupError, InvalidArgument
from flashmoe.launch import RankFailed, RankPool
from flashmoe.nn import MoE
from flashmoe.placement import hybrid, local_experts
from flashmoe.reference import activate, moe_reference
from flashmoe.slices import cut
from flashmoe.tolerance import call_error
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from layer_options import EXPERTS, WITH_SHARED
from problems import (
    DEFAULT_TILE,
    DTYPES,
    PATIENCE,
    SHAPE_OPTIONS,
    Outcome,
    Problem,
    Ranks,
    _fused_routing,
    random_problem,
)
from test_properties import EXAMPLES

SIZES = {"hidden": 48, "intermediate": 24, "experts": 6, "top_k": 3}
TOKENS = [65, 0, 7, 33]
OF_EXPERTS = ("gate_up_proj", "down_proj", "gate_up_bias", "down_bias")


@dataclass(eq=False)
class Sliced(Problem):
    """A problem whose experts are slices of another problem's experts. `placement` says where each slice lies."""

    slices: int = 1

    @classmethod
    def of(cls, whole: Problem, slices: int, placement: Any) -> Sliced:
        how = {
            name: whole.options[name] for name in ("activation", "interleaved", "transposed") if name in whole.options
        }
        parts = cut(slices, *(getattr(whole, name) for name in OF_EXPERTS), **how)
        fields = {**vars(whole), **parts, "placement": list(placement)}
        fields["options"] = whole.options | {"slices": slices, "return_mode": "reduced"}
        return cls(**fields, slices=slices)

    def limits(self) -> dict[str, Any]:
        limits = super().limits()
        return limits | {"experts": len(self.down_proj) // self.slices, "slices": self.slices}


def check(whole: Problem, sliced: Sliced, outcomes: list[Outcome]) -> None:
    """Every rank's y is that of the whole experts, within the error bound of slices, and so is its routing."""
    slices = sliced.slices
    for rank, outcome in enumerate(outcomes):
        x, report = whole.x[rank], outcome.report
        if whole.topk_ids is None:
            ids, weights, variance = _fused_routing(whole, x, report)
        else:
            ids, weights = whole.topk_ids[rank], whole.topk_weights[rank].astype(np.float32)
            variance = np.zeros(weights.shape)
        shape = {name: whole.options[name] for name in SHAPE_OPTIONS if name in whole.options} | whole.shared
        biases = {"gate_up_bias": whole.gate_up_bias, "down_bias": whole.down_bias}
        routing = {"topk_ids": ids, "topk_weights": weights, "capacity_factor": whole.options.get("capacity_factor")}
        expected = moe_reference(x, whole.gate_up_proj, whole.down_proj, **routing, **shape, **biases)
        np.testing.assert_array_equal(report.topk_ids, expected.topk_ids)
        assert report.dropped == expected.dropped
        assert (np.abs(report.topk_weights - weights) <= 8.0 * np.sqrt(variance))[expected.topk_ids >= 0].all()
        kept = expected.topk_ids[..., None]
        parts = np.where(kept < 0, -1, kept * slices + np.arange(slices)).reshape(len(x), ids.shape[1] * slices)
        allowed = call_error(
            x,
            sliced.gate_up_proj,
            sliced.down_proj,
            parts,
            np.repeat(weights, slices, axis=1),
            weight_variance=np.repeat(variance, slices, axis=1),
            return_mode="reduced",
            placement=sliced.destinations(rank),
            rank=rank,
            gate_up_bias=sliced.gate_up_bias,
            down_bias=sliced.down_bias,
            **shape,
        )
        error = np.linalg.norm(outcome.y.astype(np.float64) - expected.y)
        assert error <= allowed.bound, f"rank {rank}: error {error:.3e}, {allowed}, {expected.scale=:.3e}"


LAYERS: dict[str, dict[str, Any]] = {
    **EXPERTS,
    **{f"shared: {name}": {"experts": 16, **layer} for name, layer in WITH_SHARED.items()},
    "no gate": {"activation": "gelu"},
    "transposed": {"transposed": True},
    "biases": {"biases": (True, True, True)},
    "given routing": {"fused": False},
    "a capacity": {"capacity_factor": 0.6, "skew": 3.0},
}


@pytest.mark.parametrize(("count", "tensor"), [(2, 2), (4, 2), (4, 4), (3, 3)])
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_layers(ranks: Ranks, layer: dict[str, Any], count: int, tensor: int):
    whole = random_problem(3, TOKENS[:count], **SIZES | layer)
    sliced = Sliced.of(whole, tensor, hybrid(len(whole.down_proj), count, tensor))
    check(whole, sliced, ranks.call(sliced, tile=(16, 8)))


SPLITS = [(count, tensor) for count in (2, 4, 8) for tensor in (1, 2, 4, 8) if tensor <= count]
"""The number of ranks, and how many of them share the slices of an expert."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("count", "tensor"), SPLITS)
def test_every_split(ranks: Ranks, count: int, tensor: int, dtype: str):
    """All ways to split ranks between expert and tensor parallelism, with biases or with a capacity. Ranks have
    different numbers of tokens, and some have none."""
    tokens = [40, 0, 7, 33, 1, 0, 19, 150][:count]
    sizes = {"hidden": 40, "intermediate": 32, "experts": 8, "top_k": 3, "skew": 3.0}
    for options in ({"biases": (True, True, True)}, {"capacity_factor": 0.5}):
        whole = random_problem(count * tensor, tokens, **sizes, **options, dtype=dtype)
        sliced = Sliced.of(whole, tensor, hybrid(8, count, tensor))
        outcomes = ranks.call(sliced, tile=(16, 8))
        check(whole, sliced, outcomes)
        check_traffic(sliced, outcomes)


@st.composite
def sliced_problems(draw) -> tuple[Problem, Sliced, dict[str, Any]]:
    """Any number of slices and any placement of them, also with several copies of a slice, with different numbers of
    slices on the ranks, and with ranks that hold none."""
    count = draw(st.sampled_from([2, 4, 8]) | st.integers(2, 8))
    slices = draw(st.sampled_from([n for n in range(2, count + 1) if count % n == 0]) | st.integers(2, 8))
    experts = draw(st.integers(1, 12))
    rank = st.integers(0, count - 1)
    entry = rank | st.lists(rank, min_size=1, max_size=count, unique=True)
    whole = random_problem(
        draw(st.integers(0, 2**32 - 1)),
        draw(st.lists(st.just(0) | st.integers(0, 150), min_size=count, max_size=count)),
        hidden=draw(st.integers(1, 96)),
        intermediate=slices * draw(st.integers(1, 24)),
        experts=experts,
        top_k=draw(st.integers(1, experts)),
        dtype=draw(st.sampled_from(list(DTYPES))),
        fused=draw(st.booleans()),
        skew=draw(st.sampled_from([0.0, 3.0, 50.0])),
        biases=draw(st.tuples(st.booleans(), st.booleans(), st.booleans())),
        capacity_factor=draw(st.none() | st.floats(0.1, 2.0)),
        activation=draw(st.sampled_from(["swiglu", "gelu"])),
        transposed=draw(st.booleans()),
    )
    anywhere = st.lists(entry, min_size=experts * slices, max_size=experts * slices)
    if count % slices == 0:
        anywhere |= st.just(list(hybrid(experts, count, slices)))
    how = {
        "perturb": [draw(st.just(0) | st.integers(1, 2**31 - 1))],
        "tile": draw(st.sampled_from([DEFAULT_TILE, (8, 16)]) | st.tuples(st.integers(4, 128), st.integers(4, 200))),
    }
    return whole, Sliced.of(whole, slices, draw(anywhere)), how


@pytest.mark.timeout(0)
@settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(sliced_problems())
def test_any_placement_of_slices(ranks: Ranks, drawn: tuple[Problem, Sliced, dict[str, Any]]):
    whole, sliced, how = drawn
    outcomes = ranks.call(sliced, **how)
    check(whole, sliced, outcomes)
    check_traffic(sliced, outcomes)


def check_traffic(sliced: Sliced, outcomes: list[Outcome]) -> None:
    """Reports count the right traffic between ranks: a token's row goes once to each other rank that holds a slice of
    its experts, and one row comes back from that rank. In addition, each slice for which a row goes to another rank
    adds an entry of 12 bytes, and each packet a signal of 8 bytes."""
    n, row = sliced.slices, sliced.x[0].shape[1] * sliced.x[0].itemsize
    sent = np.zeros((len(outcomes), len(outcomes)), np.int64)  # [from, to] tokens
    entries = np.zeros_like(sent)
    for rank, outcome in enumerate(outcomes):
        holder = np.array(sliced.destinations(rank))
        for chosen in outcome.report.topk_ids:
            kept = chosen[chosen >= 0]
            to = np.concatenate([holder[kept * n + i] for i in range(n)])
            np.add.at(entries[rank], to, 1)
            sent[rank, np.unique(to)] += 1
    for each in (sent, entries):
        np.fill_diagonal(each, 0)
    for rank, outcome in enumerate(outcomes):
        report = outcome.report
        assert report.rows_sent == sent[rank].sum()
        assert report.return_rows_sent == sent[:, rank].sum()
        packets = report.tasks["gate"] * (len(outcomes) - 1)
        rows = report.rows_sent + report.return_rows_sent
        assert report.bytes_sent == rows * row + 12 * entries[rank].sum() + 8 * packets


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_bits_whatever_the_schedule(ranks: Ranks, dtype: str):
    whole = random_problem(5, TOKENS, **SIZES, dtype=dtype)
    sliced = Sliced.of(whole, 2, hybrid(6, 4, 2))
    runs = ranks.calls([sliced] * 50, perturb=list(range(50)), tile=(8, 16))
    check(whole, sliced, runs[0])
    assert len({tuple(outcome.y.tobytes() for outcome in run) for run in runs}) == 1


def test_a_row_crosses_once_to_a_rank_with_several_slices(ranks: Ranks):
    """Each of two ranks has a slice of every expert: a token's row goes to the other rank once, and one sum of its
    slices' rows comes back."""
    whole = random_problem(6, [40, 30], **SIZES, fused=False)
    outcomes = ranks.call(Sliced.of(whole, 2, hybrid(6, 2, 2)))
    assert [outcome.report.rows_sent for outcome in outcomes] == [40, 30]
    assert [outcome.report.return_rows_sent for outcome in outcomes] == [30, 40]
    assert [outcome.report.tile_rows for outcome in outcomes] == [70 * 3] * 2


def test_whole_and_sliced_calls_of_one_context(ranks: Ranks):
    whole = random_problem(7, TOKENS, **SIZES)
    sliced = Sliced.of(whole, 2, hybrid(6, 4, 2))
    limits = sliced.limits() | {"intermediate": 24, "placement": [0] * 12}
    as_reduced = replace(whole, options={"return_mode": "reduced"}, placement=[0, 1, 2, 3, 0, 1])
    alone = ranks.call(as_reduced)
    runs = ranks.calls([sliced, as_reduced, sliced, as_reduced], limits)
    check(whole, sliced, runs[0])
    for first, later in ((runs[0], runs[2]), (alone, runs[1]), (alone, runs[3])):
        assert [each.y.tobytes() for each in first] == [each.y.tobytes() for each in later]


# ---- The module ----------------------------------------------------------------------------------------------


def _module(
    rank: int, ranks: int, name: str, sliced: Sliced, layer: Any, state: dict[str, Any], how: str
) -> np.ndarray:
    """The result of a module that is made in the way `how`: from whole experts, or from this rank's slices."""
    sizes = {"hidden": 48, "intermediate": 24, "experts": 6, "top_k": 3}
    placed = {"placement": sliced.placement, "slices": sliced.slices}
    with flashmoe.Context(rank=rank, ranks=ranks, name=name, **sliced.limits()) as context, torch.no_grad():
        if how == "a layer":
            module = MoE.from_layer(context, layer, **placed)
        elif how == "its part of a layer":
            cut_up = replace(layer, slices=sliced.slices, **{name: getattr(sliced, name) for name in OF_EXPERTS})
            part = cut_up.with_experts(local_experts(sliced.placement, rank))
            module = MoE.from_layer(context, part, placement=sliced.placement)
            others = cut_up.with_experts(local_experts(sliced.placement, 1 - rank))
            for refused, slices in ((others, 1), (part, 3), (layer.with_experts([0, 1, 2, 3, 4, 5]), 2)):
                with pytest.raises(
                    InvalidArgument, match=r"^(layer: expected one with slices|slices: expected 2, as the)"
                ):
                    MoE.from_layer(context, refused, placement=sliced.placement, slices=slices)
        else:
            module = MoE(context, **sizes, **placed, expert_bias=True, router_bias=True)
            missing = module.load_state_dict(state)
            assert not missing.missing_keys and not missing.unexpected_keys
            if how == "its own state":
                again = MoE(context, **sizes, **placed, expert_bias=True, router_bias=True)
                again.load_state_dict(module.state_dict())
                module = again
        assert module.experts.ids == local_experts(sliced.placement, rank)
        return module(torch.from_numpy(sliced.x[rank])).numpy()


@pytest.mark.parametrize("how", ["a layer", "its part of a layer", "a state dict", "its own state"])
def test_a_module_cuts_what_it_loads(how: str):
    """Each of the two ranks has 6 slices, as many as there are experts, so the number of matrices does not tell whether
    they are whole experts or a rank's slices."""
    whole = random_problem(12, [30, 20], **SIZES, biases=(True, True, True))
    sliced = Sliced.of(whole, 2, hybrid(6, 2, 2))
    weights = {name: getattr(whole, name) for name in (*OF_EXPERTS, "router", "router_bias", "choice_bias")}
    layer = MoELayer(name="a layer", **weights, top_k=3, renormalize=True, activation="swiglu")
    state = {
        "gate.weight": whole.router,
        "gate.bias": whole.router_bias,
        "experts.gate_up_proj": whole.gate_up_proj,
        "experts.down_proj": whole.down_proj,
        "experts.gate_up_proj_bias": whole.gate_up_bias,
        "experts.down_proj_bias": whole.down_bias,
    }
    state = {name: torch.from_numpy(each) for name, each in state.items()}
    with RankPool(2) as pool:
        expected = pool.call(_call_sliced, [(sliced,)] * 2, timeout=6 * PATIENCE)
        results = pool.call(_module, [(sliced, layer, state, how)] * 2, timeout=6 * PATIENCE)
    for y, wanted in zip(results, expected, strict=True):
        assert y.tobytes() == wanted.tobytes()


def _call_sliced(rank: int, ranks: int, name: str, sliced: Sliced) -> np.ndarray:
    with flashmoe.Context(rank=rank, ranks=ranks, name=name, **sliced.limits()) as context:
        return flashmoe.moe(context, **sliced.arguments(rank))


# ---- Refusals ------------------------------------------------------------------------------------------------

SMALL = {"max_tokens": 4, "hidden": 8, "intermediate": 8, "experts": 3, "top_k": 2}
REFUSED = {
    "a rank alone": ({"ranks": 1}, "slices: expected 1 with one rank, got 2"),
    "direct": ({"return_mode": "direct"}, "return_mode: expected 'reduced' or 'auto' with slices, got 'direct'"),
    "none": ({"slices": 0}, r"slices: expected an integer in \[1, 8192\], got 0"),
    "too many": ({"slices": 4000}, "slices: expected at most 2730 with E=3, got 4000"),
    "a placement of experts": ({"placement": [0, 1, 0]}, "placement: expected one rank or more for each of E=6"),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_contexts(changes: dict[str, Any], message: str):
    with pytest.raises(InvalidArgument, match=message):
        flashmoe.Context(rank=0, name="refused", **{"ranks": 2, "slices": 2, **SMALL, **changes})


def test_refused_calls(ranks: Ranks):
    whole = random_problem(8, [5, 5], **SIZES)
    sliced = Sliced.of(whole, 2, hybrid(6, 2, 2))
    for problem, limits, message in (
        (
            replace(sliced, options=sliced.options | {"return_mode": "direct"}),
            {},
            "return_mode: expected 'reduced' wit",
        ),
        (
            sliced,
            {"slices": 1, "placement": [0] * 6, "return_mode": "reduced"},
            "experts: expected at most 6, .* got 12",
        ),
        (
            sliced,
            {"slices": 1, "placement": [0] * 6, "return_mode": "direct"},
            "return_mode: expected 'reduced' with s",
        ),
    ):
        with pytest.raises(RankFailed, match=message):
            ranks.call(problem, sliced.limits() | limits)


@pytest.mark.parametrize(
    ("id", "message"), [(6, r"ids in \[0, E=6\), .*, got 6"), (-2, r"E=6\), .*, got -2"), (2, "got expert 2 twice")]
)
def test_bad_routing_is_named_as_the_caller_has_it(ranks: Ranks, id: int, message: str):
    whole = random_problem(9, [5, 5], **SIZES, fused=False)
    whole.topk_ids[1][3] = [id, 2, 1]
    with pytest.raises(RankFailed, match=f"topk_ids: expected .*{message} for token 3 of rank 1"):
        ranks.call(Sliced.of(whole, 2, hybrid(6, 2, 2)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_later_slice_brings_no_bias_of_the_second_product(dtype: str):
    whole = random_problem(10, [5, 5], **SIZES, biases=(False, False, True), dtype=dtype)
    sliced = Sliced.of(whole, 2, hybrid(6, 2, 2))
    good = sliced.down_bias.copy()
    sliced.down_bias[7, 3] = -0.5  # slice 1 of expert 3, the fourth slice that rank 1 has
    with RankPool(2) as pool:
        messages, *results = zip(*pool.call(_call_again, [(sliced, good)] * 2, timeout=6 * PATIENCE), strict=True)
    assert messages[0] == f"rank 1 refused call 1: {messages[1]}"
    assert messages[1] == "down_bias: expected 0 in all slices but the first, got -0.5 in row 3, of slice 1 of expert 3"
    sliced.down_bias = good
    check(whole, sliced, [Outcome(y, report) for y, report in zip(*results, strict=True)])


def _call_again(rank: int, ranks: int, name: str, sliced: Sliced, bias: np.ndarray) -> tuple[str, Any, Any]:
    """Rank 1 refuses a call for its down bias, and rank 0 gets an error that says so. Then both ranks call with `bias`.
    Returns the rank's error text, and the result and report of the second call."""
    expected = InvalidArgument if rank == 1 else GroupError
    with flashmoe.Context(rank=rank, ranks=ranks, name=name, **sliced.limits()) as context:
        with pytest.raises(expected) as caught:
            flashmoe.moe(context, **sliced.arguments(rank))
        message = str(caught.value)
        sliced.down_bias = bias
        return message, flashmoe.moe(context, **sliced.arguments(rank)), context.last_call


# ---- Cutting -------------------------------------------------------------------------------------------------


def test_hybrid_placements():
    assert hybrid(4, 4, 2) == (0, 1, 0, 1, 2, 3, 2, 3)
    assert hybrid(3, 2, 1) == (0, 0, 1)
    assert [local_experts(hybrid(5, 4, 4), rank) for rank in range(4)] == [list(range(r, 20, 4)) for r in range(4)]
    for tensor in (0, 3, 8):
        with pytest.raises(InvalidArgument, match="tensor: "):
            hybrid(4, 4, tensor)


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("activation", "interleaved"), [("swiglu", False), ("swiglu", True), ("gelu", False)], ids=str)
def test_slices_add_up_to_the_expert(activation: str, interleaved: bool, transposed: bool, library: str):
    options = {"activation": activation, "interleaved": interleaved}
    experts, hidden, width, slices = 3, 5, 12, 4
    rng = np.random.default_rng(0)
    rows = width * (2 if activation == "swiglu" else 1)
    up, down = rng.standard_normal((experts, rows, hidden)), rng.standard_normal((experts, hidden, width))
    up_bias, down_bias = rng.standard_normal((experts, rows)), rng.standard_normal((experts, hidden))
    stored = [each.swapaxes(1, 2) if transposed else each for each in (up, down)]
    given = [torch.from_numpy(each.copy()) if library == "torch" else each for each in (*stored, up_bias, down_bias)]
    parts = {name: np.asarray(each) for name, each in cut(slices, *given, transposed=transposed, **options).items()}
    matrices = [parts[name].swapaxes(1, 2) if transposed else parts[name] for name in ("gate_up_proj", "down_proj")]
    x = rng.standard_normal(hidden)
    for e in range(experts):
        whole = down[e] @ activate(up[e] @ x + up_bias[e], **options) + down_bias[e]
        of = range(e * slices, (e + 1) * slices)
        activated = [activate(matrices[0][n] @ x + parts["gate_up_bias"][n], **options) for n in of]
        summed = sum(matrices[1][n] @ a + parts["down_bias"][n] for n, a in zip(of, activated, strict=True))
        np.testing.assert_allclose(summed, whole, rtol=1e-12, atol=1e-12)


def test_refused_cuts():
    with pytest.raises(InvalidArgument, match="slices: expected a divisor of I=12, got 5"):
        cut(5, np.zeros((2, 24, 8)), np.zeros((2, 8, 12)))
