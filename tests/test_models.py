"""Published shapes, and random layers whose routing has the skew that was asked for."""

from __future__ import annotations

import numpy as np
import pytest
from flashmoe import models
from flashmoe.errors import InvalidArgument
from flashmoe.models import MODELS, find, random_layer, scaled, target_shares


def shares_of(layer, states: np.ndarray) -> np.ndarray:
    """float64 [E], descending: the share of tokens that choose each expert."""
    logits = states.astype(np.float64) @ layer.router.astype(np.float64).T
    ids = np.argsort(-logits, axis=1, kind="stable")[:, : layer.top_k]
    return np.sort(np.bincount(ids.ravel(), minlength=layer.experts) / len(states))[::-1]


def test_shapes_are_sound():
    assert len({shape.name for shape in MODELS}) == len(MODELS)
    for shape in MODELS:
        assert shape.name == shape.name.lower()
        assert shape.hidden % 8 == 0 and shape.intermediate % 8 == 0
        assert 1 <= shape.top_k <= shape.experts
        assert shape.activation in ("swiglu", "gelu")


@pytest.mark.parametrize(
    ("name", "billions"),  # of a layer's routed experts: the parameters published for all layers / layers
    [("mixtral-8x7b", 45.1 / 32), ("qwen3-30b-a3b", 29.0 / 48), ("deepseek-v3", 653.9 / 58)],
)
def test_weights_match_the_published_model(name, billions):
    assert find(name).weights == pytest.approx(billions * 1e9, rel=0.02)


def test_find():
    assert find("Qwen3-30B-A3B").experts == 128
    with pytest.raises(InvalidArgument, match=r"expected one of .*mixtral-8x7b.*; got 'gpt-5'"):
        find("gpt-5")


def test_scaled():
    shape = scaled(find("gpt-oss-20b"), 0.1)
    assert (shape.hidden, shape.intermediate) == (288, 288)
    assert (shape.experts, shape.top_k) == (32, 4)
    tiny = scaled(find("mixtral-8x7b"), 1e-6)
    assert (tiny.hidden, tiny.intermediate) == (8, 8)
    assert scaled(find("olmoe"), 1.0) == find("olmoe")
    for scale in (0.0, -1.0, 1.5, float("nan")):
        with pytest.raises(InvalidArgument, match="scale"):
            scaled(find("olmoe"), scale)


@pytest.mark.parametrize("skew", [0.0, 0.5, 1.0, 2.0, 5.0])
@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (128, 8), (16, 1), (4, 4)])
def test_target_shares(experts, top_k, skew):
    shares = target_shares(experts, top_k, skew)
    assert shares.sum() == pytest.approx(top_k)
    assert (shares <= 1.0).all() and (np.diff(shares) <= 0).all()
    partial = np.flatnonzero(shares < 1.0)
    if partial.size:  # the power law holds among those that do not get every token
        law = (partial + 1.0) ** -skew
        assert shares[partial] / law == pytest.approx(shares[partial[0]] / law[0])


@pytest.mark.parametrize("skew", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("name", ["mixtral-8x7b", "qwen3-30b-a3b", "llama-4-scout"])
def test_load_follows_the_power_law(name, skew):
    shape = scaled(find(name), 0.02)
    layer, states = random_layer(shape, 2048, seed=3, skew=skew)
    wanted = target_shares(shape.experts, shape.top_k, skew)
    popular = wanted > 0.03
    assert shares_of(layer, states)[popular] == pytest.approx(wanted[popular], rel=0.1)


@pytest.mark.parametrize("dtype", list(models.DTYPES))
def test_random_layer(dtype):
    shape = scaled(find("qwen1.5-moe-a2.7b"), 0.02)  # H 40, I 32 after rounding 41.0 and 28.2
    layer, states = random_layer(shape, 5, seed=1, dtype=dtype)
    assert layer.router.shape == (60, 40)
    assert layer.gate_up_proj.shape == (60, 2 * 32, 40)
    assert layer.down_proj.shape == (60, 40, 32)
    assert states.shape == (5, 40)
    arrays = (layer.router, layer.gate_up_proj, layer.down_proj, states)
    assert {array.dtype for array in arrays} == {models.DTYPES[dtype]}
    assert layer.renormalize is False and layer.activation == "swiglu" and layer.top_k == 4
    assert 0.8 < states.astype(np.float64).std() < 1.3


def test_not_gated():
    layer, _ = random_layer(scaled(find("flashmoe-paper"), 0.01), 1)
    assert layer.activation == "gelu"
    assert layer.gate_up_proj.shape[1] == layer.intermediate


def test_same_arguments_give_the_same_bits():
    shape = scaled(find("mixtral-8x7b"), 0.01)
    one, states_one = random_layer(shape, 64, seed=5, skew=1.0)
    two, states_two = random_layer(shape, 64, seed=5, skew=1.0)
    other, _ = random_layer(shape, 64, seed=6, skew=1.0)
    assert states_one.tobytes() == states_two.tobytes()
    for name in ("router", "gate_up_proj", "down_proj"):
        assert getattr(one, name).tobytes() == getattr(two, name).tobytes()
        assert getattr(one, name).tobytes() != getattr(other, name).tobytes()


@pytest.mark.parametrize("tokens", [0, 1, 2])
def test_few_tokens(tokens):
    layer, states = random_layer(scaled(find("olmoe"), 0.01), tokens, skew=1.0)
    assert states.shape == (tokens, layer.hidden)
    assert np.isfinite(layer.router.astype(np.float32)).all()


def test_bad_arguments():
    shape = scaled(find("olmoe"), 0.01)
    with pytest.raises(InvalidArgument, match="dtype: expected one of float32"):
        random_layer(shape, 1, dtype="int8")
    with pytest.raises(InvalidArgument, match="skew"):
        random_layer(shape, 1, skew=-1.0)
