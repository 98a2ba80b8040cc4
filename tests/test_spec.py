"""The description of a layer (`LayerSpec`), its options, and how both go from Python to C++."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, replace

import flashmoe
import pytest
from flashmoe import _ffi, spec, trace
from flashmoe.contexts.limits import checked_context
from flashmoe.spec import LayerSpec
from problems import random_problem

SIZES = {"hidden": 16, "intermediate": 8, "experts": 4, "top_k": 2}
LIMITS = {
    "engine": "cpu",
    "ranks": 1,
    "max_tokens": 8,
    "dtype": "float32",
    "placement": None,
    "return_mode": "auto",
    "processors": 1,
    "capacity_factor": None,
    "transport": "auto",
    **SIZES,
}


@pytest.fixture
def call():
    """A function that makes a call of a valid layer in a context with room for it."""
    arguments = random_problem(1, [5], **SIZES).arguments(0)
    with flashmoe.Context(max_tokens=8, dtype="float32", processors=1, **SIZES) as context:
        yield lambda: flashmoe.moe(context, **arguments)


@pytest.mark.parametrize(
    ("option", "names"),
    [
        ("dtype", spec.ELEMENT_TYPES),
        ("weight_scales", spec.WEIGHT_SCALES),
        ("activation", spec.ACTIVATIONS),
        ("routing", spec.ROUTINGS),
        ("return_mode", spec.RETURN_MODES),
        ("phase", trace.PHASES),
    ],
)
def test_options_have_the_same_names_and_numbers_in_python_and_cpp(option, names):
    assert tuple(map(str, _ffi.library().option_names()[option])) == names


def test_every_option_of_the_library_is_compared():
    options = {str(option) for option in _ffi.library().option_names()}
    assert options == {"dtype", "activation", "routing", "return_mode", "weight_scales", "phase"}
    assert {*spec.ELEMENT_BYTES, spec.MXFP4} == set(spec.ELEMENT_TYPES)


def test_a_layer_is_frozen():
    with pytest.raises(FrozenInstanceError):
        LayerSpec(**SIZES).hidden = 8


def changed(monkeypatch, change) -> None:
    """Applies `change` to every map in which Python gives a layer to the C++ library."""
    whole = LayerSpec.to_map
    monkeypatch.setattr(LayerSpec, "to_map", lambda layer: change(whole(layer)))


@pytest.mark.parametrize("name", [field.name for field in fields(LayerSpec)])
def test_no_field_of_a_layer_may_be_missing(call, monkeypatch, name):
    changed(monkeypatch, lambda numbers: {key: value for key, value in numbers.items() if key != name})
    with pytest.raises(flashmoe.FlashMoEError, match=f"^layer: {name}: expected a value, got none"):
        call()


def test_no_other_field_may_be_there(call, monkeypatch):
    changed(monkeypatch, lambda numbers: numbers | {"shared_experts": 1})
    with pytest.raises(flashmoe.FlashMoEError, match=r"^layer: shared_experts: expected no such key, got a value"):
        call()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (
            "activation",
            "tanh",
            f"activation: expected one of {', '.join(spec.ACTIVATIONS)}, got tanh",
        ),
        (
            "activation",
            3,
            f"activation: expected one of {', '.join(spec.ACTIVATIONS)}, got no text",
        ),
        ("x_type", "float8", "x_type: expected one of float32, bfloat16, float16, float8_e4m3fn, mxfp4, got float8"),
        ("hidden", -1, r"hidden: expected an integer in \[0, 4294967295\], got -1"),
        ("experts", 2**32, r"experts: expected an integer in \[0, 4294967295\], got 4294967296"),
        ("top_k", "2", r"top_k: expected an integer in \[0, 4294967295\], got something else"),
        ("renormalize", 2, r"renormalize: expected an integer in \[0, 1\], got 2"),
        ("capacity_factor", "all", "capacity_factor: expected a number, got something else"),
    ],
)
def test_no_field_may_have_a_value_that_it_cannot_hold(call, monkeypatch, field, value, message):
    changed(monkeypatch, lambda numbers: numbers | {field: value})
    with pytest.raises(flashmoe.FlashMoEError, match=f"^layer: {message}"):
        call()


@pytest.mark.parametrize("field", ["x_type", "token_type", "weight_type", "intermediate_type", "return_type"])
def test_element_types_that_differ_are_refused_by_name(call, monkeypatch, field):
    changed(monkeypatch, lambda numbers: numbers | {field: "bfloat16"})
    expected = f"^{field}: expected float32 beside weights of (float32|bfloat16) and a y of float32, got bfloat16"
    with pytest.raises(flashmoe.InvalidArgument, match=expected):
        call()


def test_limits_are_read_whole():
    limits = checked_context(**LIMITS).limits()
    library = _ffi.library()
    assert library.rows_of_rank(limits) == 16
    for name in limits:
        with pytest.raises(flashmoe.FlashMoEError, match=f"^limits: {name}: expected a value, got none"):
            library.rows_of_rank({key: value for key, value in limits.items() if key != name})
    with pytest.raises(flashmoe.FlashMoEError, match=r"^limits: max_token: expected no such key"):
        library.rows_of_rank(limits | {"max_token": 8})


def test_row_bytes_follow_their_own_types():
    layer = LayerSpec(**SIZES, token_type="float32", return_type="float16")
    assert (layer.token_row_bytes, layer.return_row_bytes) == (64, 32)
    assert replace(layer, return_type="float32").return_row_bytes == 64


@pytest.mark.parametrize(("activation", "rows"), [("swiglu", 16), ("silu", 8)])
def test_gated_layers_have_two_rows_for_each_hidden_element(activation, rows):
    assert LayerSpec(**SIZES, activation=activation).gate_up_rows == rows
