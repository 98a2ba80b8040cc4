"""Layers in each format of weights on the CPU engine: against the float64 reference, on several ranks, in slices; and
what every format refuses.

Each test runs for each row of FORMATS. What is true of one format alone is in test_fp8.py or test_mxfp4.py.

FLASHMOE_EXAMPLES (500 if it is not set) sets the number of random layers of each format: two fifths of it, by default
200.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import permutations, product
from typing import Any

import flashmoe
import numpy as np
import pytest
from flashmoe.checkpoint import shipped_layer
from flashmoe.quantize import quantize_layer
from flashmoe.slices import cut
from flashmoe.spec import ENCODINGS, FP8, GATED, MXFP4
from flashmoe.spec.encodings import Encoding
from flashmoe.spec.tensors import Tensors
from hypothesis import given
from hypothesis import strategies as st
from layer_options import CLAMPED
from problems import ACTIVATIONS, PATIENCE, Problem, Ranks, check, in_mxfp4, quantised, random_problem
from test_properties import at_random

EXAMPLES = int(os.environ.get("FLASHMOE_EXAMPLES", "500")) * 2 // 5
TOKENS = [65, 0, 7, 33]
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no gate": {"activation": "silu"},
    "biases": {"biases": (True, True, True)},
    "interleaved": {"interleaved": True, **CLAMPED} | {"biases": (False, True, True)},
    "weights on input": {"weights_on_input": True},
    "capacity": {"capacity_factor": 0.6, "skew": 3.0},
    "given routing": {"fused": False},
    "shared": {"shared": 1, "shared_gate": True},
    "float32": {"dtype": "float32"},
    "float16": {"dtype": "float16"},
}
"""Options of layers that every format has."""


# ---- The formats ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Format:
    """A format of weights, and layers that fit it."""

    encoding: Encoding
    quantise: Callable[..., Problem]
    """Returns the given problem with its experts' matrices in this format. The argument `scales` is one of `kinds`. If
    the format quantises rows, `x` says whether x comes quantised."""
    sizes: dict[str, Any]
    """The sizes of most layers. Half of this I is no whole number of blocks."""
    layers: dict[str, dict[str, Any]]
    widths: st.SearchStrategy[int]
    """Draws H and I of random layers."""

    @property
    def kinds(self) -> dict[str, str]:
        """The kinds of scales, each by its own name."""
        return {kind: kind for kind in self.encoding.kinds}

    def problem(self, seed: int, tokens: list[int], scales: str = "block", **options: Any) -> Problem:
        """A random problem of these sizes and options, in this format."""
        return self.quantise(random_problem(seed, tokens, **self.sizes | options), scales)


FORMATS = {
    FP8: Format(
        ENCODINGS[FP8],
        quantised,
        # H and I are no multiples of 128, so the last block of 128 columns is smaller.
        {"hidden": 200, "intermediate": 136, "experts": 12, "top_k": 4, "dtype": "bfloat16"},
        LAYERS | {"shared, in slices": {"shared": 3, "intermediate": 128}},
        st.one_of(st.integers(1, 140), st.integers(141, 300), st.sampled_from([128, 256, 384])),
    ),
    MXFP4: Format(
        ENCODINGS[MXFP4],
        lambda problem, scales="block": in_mxfp4(problem),
        # H and I are multiples of 32, but of no larger power of two.
        {"hidden": 224, "intermediate": 160, "experts": 12, "top_k": 4, "dtype": "bfloat16"},
        LAYERS
        | {
            "gpt-oss": {"transposed": True, "interleaved": True, **CLAMPED} | {"biases": (True, True, True)},
            "shared, in slices": {"shared": 3, "intermediate": 96},
            "shared, interleaved": {"shared": 2, "intermediate": 64, "interleaved": True, **CLAMPED},
        },
        st.integers(1, 10).map(lambda blocks: 32 * blocks),
    ),
}


def for_each(**tables: str) -> pytest.MarkDecorator:
    """Runs a test for each format, which is the argument `weights`. Each keyword names another argument, and the
    format's table whose rows that argument gets in turn."""
    cases = []
    for weights in (FORMATS[dtype] for dtype in ENCODINGS):  # this fails if FORMATS lacks an encoding
        for rows in product(*(getattr(weights, table).items() for table in tables.values())):
            name = "-".join([weights.encoding.name, *(name for name, _ in rows)])
            cases.append(pytest.param(weights, *(row for _, row in rows), id=name))
    return pytest.mark.parametrize(("weights", *tables), cases)


# ---- Layers --------------------------------------------------------------------------------------------------


@for_each(options="layers", scales="kinds")
def test_layers(ranks: Ranks, weights: Format, options: dict[str, Any], scales: str):
    """On one rank; and on two, with tasks of 24 columns. Where rows are quantised, the engine rounds 24 up to a whole
    block of their scales."""
    problem = weights.problem(1, [65], scales, **options)
    check(problem, ranks.call(problem))
    problem = weights.problem(2, [65, 7], scales, **options)
    check(problem, ranks.call(problem, tile=(16, 24)))


@pytest.mark.parametrize("return_mode", ["direct", "reduced"])
@for_each(options="layers")
def test_four_ranks_of_uneven_tokens(ranks: Ranks, weights: Format, options: dict[str, Any], return_mode: str):
    problem = weights.problem(3, TOKENS, **options, return_mode=return_mode)
    check(problem, ranks.call(problem))


@for_each()
def test_experts_of_several_ranks(ranks: Ranks, weights: Format):
    copies = [[0, 2], 1, [3, 1, 0], 2, 3, [0, 1, 2, 3], 2, [1], [3, 2], 0, 1, [2, 0]]
    problem = weights.problem(4, TOKENS, placement=copies)
    check(problem, ranks.call(problem))


@for_each()
def test_bits_are_the_same_in_every_run_and_on_every_number_of_ranks(ranks: Ranks, weights: Format):
    whole = weights.problem(6, [96], return_mode="direct")
    (alone,) = ranks.call(whole)
    parts = replace(whole, x=[whole.x[0][:10], whole.x[0][10:10], whole.x[0][10:63], whole.x[0][63:]])
    for outcomes in ranks.calls([parts] * 6, perturb=[0, 1, 2, 3, 4, 5]):
        np.testing.assert_array_equal(np.concatenate([outcome.y for outcome in outcomes]), alone.y)


# ---- Slices --------------------------------------------------------------------------------------------------


def in_two(problem: Problem) -> dict[str, Any]:
    """The tensors of the problem's experts, cut into two slices each."""
    names = ("gate_up_proj", "down_proj", "gate_up_bias", "down_bias", "gate_up_scale", "down_scale")
    shape = {name: problem.options[name] for name in ("activation", "interleaved") if name in problem.options}
    return cut(2, *(getattr(problem, name) for name in names), **shape)


@pytest.mark.parametrize("layer", ["plain", "biases", "interleaved"])
@for_each(scales="kinds")
def test_experts_in_slices(ranks: Ranks, weights: Format, scales: str, layer: str):
    """Slices of whole blocks have the same numbers, and the same scales of rows, as the whole expert."""
    width = 6 * weights.encoding.block[1]
    whole = weights.problem(8, [40, 9, 0, 21], scales, **weights.layers[layer], intermediate=width)
    parts, placement = in_two(whole), [n % 4 for n in range(24)]
    assert parts["down_proj"].shape == weights.encoding.elements((24, weights.sizes["hidden"], width // 2))
    limits = whole.limits() | {"intermediate": width // 2, "slices": 2, "placement": placement}
    sliced = replace(whole, **parts, placement=placement, options=whole.options | {"slices": 2})
    expected = ranks.call(replace(whole, options=whole.options | {"return_mode": "reduced"}))
    check(whole, expected)
    for ours, theirs in zip(ranks.call(sliced, limits), expected, strict=True):
        error = np.linalg.norm(ours.y.astype(np.float64) - theirs.reference.y)
        assert error <= 1.5 * theirs.allowed.bound  # 1.5: the sum of two slices' results is rounded once more


@for_each()
def test_slices_that_cut_blocks_are_refused(weights: Format):
    problem = weights.problem(12, [3])
    expected = f"a multiple of {weights.encoding.block[1]} columns with weights of {weights.encoding.dtype}, .*"
    got = f"2 slices of I={weights.sizes['intermediate'] // 2}"
    with pytest.raises(flashmoe.InvalidArgument, match=f"^slices: expected slices of {expected}, got {got}"):
        in_two(problem)


# ---- Random layers -------------------------------------------------------------------------------------------


@st.composite
def cases(draw: st.DrawFn, weights: Format) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The arguments of `random_problem` for a layer on 1, 2 or 4 ranks, those of the format's `quantise`, and the
    options `how` of `Ranks.call`."""
    count = draw(st.sampled_from([1, 2, 4]))
    experts = draw(st.integers(1, 24))
    holders = st.lists(st.integers(0, count - 1), min_size=1, max_size=count, unique=True)
    activation = draw(st.sampled_from([*ACTIVATIONS, "clamped_swiglu"]))
    problem: dict[str, Any] = {
        "seed": draw(st.integers(0, 2**32 - 1)),
        "tokens": draw(st.lists(st.integers(0, 120), min_size=count, max_size=count)),
        "hidden": draw(weights.widths),
        "intermediate": draw(weights.widths),
        "experts": experts,
        "top_k": draw(st.integers(1, min(6, experts))),
        "dtype": draw(st.sampled_from(["bfloat16", "bfloat16", "float16", "float32"])),
        "fused": draw(st.booleans()),
        "skew": draw(st.sampled_from([0.0, 3.0, 50.0])),
        "scale": draw(st.sampled_from([1.0, 0.03, 8.0])),
        "biases": draw(st.tuples(st.booleans(), st.booleans(), st.booleans())),
        "placement": draw(st.none() | st.lists(holders, min_size=experts, max_size=experts)),
        "activation": activation,
        "interleaved": activation in GATED and draw(st.booleans()),
        "capacity_factor": draw(st.none() | st.floats(0.05, 3.0)),
        "return_mode": draw(st.sampled_from(["direct", "reduced", "auto"])),
    }
    if activation == "clamped_swiglu":
        problem |= CLAMPED | {"limit": draw(st.sampled_from([0.75, 7.0]))}
    quantisation = {"scales": draw(st.sampled_from(["block", *weights.kinds]))}
    if weights.encoding.rows_quantised:
        quantisation["x"] = not problem["fused"] and problem["dtype"] == "bfloat16" and draw(st.booleans())
    tile = draw(st.sampled_from([(128, 256), (8, 16)]) | st.tuples(st.integers(4, 128), st.integers(4, 200)))
    return problem, quantisation, {"perturb": [draw(st.just(0) | st.integers(1, 2**31 - 1))], "tile": tile}


@pytest.mark.timeout(0)
@for_each()
@at_random(EXAMPLES)
@given(data=st.data())
def test_any_layer_agrees_with_the_reference(ranks: Ranks, weights: Format, data: st.DataObject):
    arguments, quantisation, how = data.draw(cases(weights))
    problem = weights.quantise(random_problem(**arguments), **quantisation)
    check(problem, ranks.call(problem, problem.limits() | {"processors": 2}, **how))


# ---- What is refused -----------------------------------------------------------------------------------------


def check_refused(problem: Problem, change: dict[str, Any], message: str) -> None:
    """A call with this change is refused, and the context stays usable."""
    with flashmoe.Context(processors=1, **problem.limits()) as context:
        with pytest.raises(flashmoe.InvalidArgument, match=f"^{message}"):
            flashmoe.moe(context, **problem.arguments(0) | change)
        y = flashmoe.moe(context, **problem.arguments(0))
        assert np.isfinite(y.astype(np.float32)).all()


def transposed(weights: Format) -> dict[str, Any]:
    """The arguments of a call whose matrices were transposed before they were quantised."""
    plain = random_problem(10, [3], **weights.sizes, fused=False)
    turned = {name: getattr(plain, name).swapaxes(1, 2).copy() for name in ("gate_up_proj", "down_proj")}
    return weights.quantise(replace(plain, **turned)).arguments(0) | {"transposed": True}


OTHER_SCALE = {"float32": "float64", "uint8": "float32"}
"""A type that scales do not have, by the type that they have."""
REFUSED: dict[str, Callable[[Format, Problem, Problem], tuple[dict[str, Any], str]]] = {
    "no scale": lambda weights, ours, plain: (
        {"down_scale": None},
        f"down_scale: expected a tensor with down_proj of {weights.encoding.dtype}, got None",
    ),
    "scales of another type": lambda weights, ours, plain: (
        {"gate_up_scale": ours.gate_up_scale.astype(OTHER_SCALE[weights.encoding.scale])},
        f"gate_up_scale: expected {weights.encoding.scale} scales, "
        f"got {[*ours.gate_up_scale.shape]} {OTHER_SCALE[weights.encoding.scale]}",
    ),
    "a matrix of another type": lambda weights, ours, plain: (
        {"down_proj": plain.down_proj},
        f"down_proj: expected {weights.encoding.dtype}, the type of gate_up_proj, "
        f"got {[*plain.down_proj.shape]} bfloat16",
    ),
    "scales of what is not quantised": lambda weights, ours, plain: (
        {"gate_up_proj": plain.gate_up_proj},
        "down_proj: expected bfloat16, the type of x, got",
    ),
    "transposed": lambda weights, ours, plain: (
        transposed(weights),
        f"transposed: expected False with weights of {weights.encoding.dtype}, got True",
    ),
}
"""The change of a call, and the message, by the format, a problem in the format, and the same problem in bfloat16."""


@pytest.mark.parametrize("refused", REFUSED.values(), ids=REFUSED)
@for_each()
def test_what_does_not_fit_is_refused_by_name(weights: Format, refused: Callable[..., tuple[dict[str, Any], str]]):
    plain = random_problem(10, [3], **weights.sizes, fused=False, shared=1)
    ours = weights.quantise(plain)
    change, message = refused(weights, ours, plain)
    check_refused(ours, change, re.escape(message))


def typed(dtype: str) -> Problem:
    """A problem with weights in bfloat16 or in a format, of sizes that fit every format."""
    sizes = {"hidden": 256, "intermediate": 128, "experts": 12, "top_k": 4, "dtype": "bfloat16"}
    plain = random_problem(10, [3], **sizes, fused=False, shared=1)
    return FORMATS[dtype].quantise(plain) if dtype in FORMATS else plain


@pytest.mark.parametrize(("made_for", "called"), [*permutations(("bfloat16", *FORMATS), 2)])
def test_a_context_is_made_for_one_type(made_for: str, called: str):
    ours = typed(made_for)
    expected = "float32, bfloat16, float16" if made_for == "bfloat16" else made_for
    message = f"^gate_up_proj: expected {expected}, which the context's memory is made .* got {called}"
    with flashmoe.Context(processors=1, **ours.limits()) as context:
        assert context.weight_dtype == made_for
        with pytest.raises(flashmoe.HeapError, match=message):
            flashmoe.moe(context, **typed(called).arguments(0))
        flashmoe.moe(context, **ours.arguments(0))


def test_a_context_for_weights_of_no_such_type_is_refused():
    expected = ", ".join(["bfloat16", *FORMATS])
    with pytest.raises(flashmoe.InvalidArgument, match=f"^weight_dtype: expected one of {expected}, got"):
        flashmoe.Context(**typed("bfloat16").limits() | {"weight_dtype": "float16"})


def _call_in(rank: int, ranks: int, name: str, limits: dict[str, Any], arguments: dict[str, Any]) -> None:
    with flashmoe.Context(rank=rank, ranks=ranks, name=name, **limits) as context:
        flashmoe.moe(context, **arguments)


@for_each()
def test_ranks_whose_weights_are_of_other_types_disagree(ranks: Ranks, weights: Format):
    """If rows are quantised, too, such ranks already disagree when they meet, because they then compare what their
    heaps are made for. Otherwise they need the same memory, and only their first call finds the difference."""
    plain = random_problem(13, [3, 3], **weights.sizes)
    calls = [(each.limits(), each.arguments(rank)) for rank, each in enumerate((weights.quantise(plain), plain))]
    at_call = r"dtype of weights: rank \d has \w+, rank \d has \w+"
    message = "bytes per element" if weights.encoding.rows_quantised else at_call
    with pytest.raises(flashmoe.FlashMoEError, match=message):
        ranks._pool.call(_call_in, calls, ranks=2, timeout=6 * PATIENCE)


@for_each(scales="kinds")
def test_a_layer_is_quantised_once(weights: Format, scales: str):
    layer, _ = shipped_layer()
    ours = quantize_layer(layer, scales, weights.encoding.dtype)
    assert (ours.weight_dtype, ours.weight_scales) == (weights.encoding.dtype, scales)
    assert ours.intermediate == layer.intermediate
    assert set(ours.tensors()) <= set(Tensors._fields)
    message = f"^layer: expected weights that are not quantised, got {weights.encoding.name}"
    with pytest.raises(flashmoe.InvalidArgument, match=message):
        quantize_layer(ours)
