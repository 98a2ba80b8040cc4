"""The reference on examples small enough to work out by hand, and the check of a top-k."""

import math

import numpy as np
import pytest
from flashmoe.reference import activate, check_topk, choose, moe_reference


def test_two_experts_by_hand():
    x = np.array([[2.0], [-1.0]])
    result = moe_reference(
        x, np.array([[[3.0]], [[-1.0]]]), np.array([[[5.0]], [[7.0]]]),
        gate_up_bias=np.array([[1.0], [3.0]]), down_bias=np.array([[0.5], [-1.0]]), activation="relu",
        topk_ids=np.array([[0, 1], [1, 0]]), topk_weights=np.array([[0.5, 0.25], [2.0, 1.0]]),
    )  # fmt: skip
    # Token 0: 0.5 (5 relu(6 + 1) + 0.5) + 0.25 (7 relu(-2 + 3) - 1).
    # Token 1: 2 (7 relu(1 + 3) - 1) + 1 (5 relu(-3 + 1) + 0.5).
    assert result.y.tolist() == [[17.75 + 1.5], [54.0 + 0.5]]
    assert result.scale == math.sqrt(17.75**2 + 1.5**2 + 54.0**2 + 0.5**2)
    assert result.dropped == 0


@pytest.mark.parametrize(
    ("renormalize", "weights"),
    [(True, [[0.8, 0.2]]), (False, [[4 / 7, 1 / 7]])],
    ids=["renormalized", "plain"],
)
def test_router_picks_the_largest_and_of_equal_ones_the_lower_id(renormalize, weights):
    router = np.zeros((4, 1))
    bias = np.array([0.0, 0.0, math.log(4.0), 0.0])  # softmax 1/7, 1/7, 4/7, 1/7
    result = moe_reference(
        np.ones((1, 1)), np.ones((4, 2, 1)), np.ones((4, 1, 1)),
        router=router, router_bias=bias, top_k=2, renormalize=renormalize,
    )  # fmt: skip
    assert result.topk_ids.tolist() == [[2, 0]]
    np.testing.assert_allclose(result.topk_weights, weights, rtol=1e-15)
    np.testing.assert_allclose(result.y, [[sum(weights[0]) / (1.0 + math.exp(-1.0))]], rtol=1e-15)


def test_capacity_keeps_the_first_tokens_of_each_expert():
    ids = np.array([[0, 1], [1, 0], [0, 2], [1, 2]])
    result = moe_reference(
        np.ones((4, 1)), np.ones((3, 1, 1)), np.ones((3, 1, 1)),
        topk_ids=ids, topk_weights=np.ones((4, 2)), activation="relu", capacity_factor=0.75,
    )  # fmt: skip
    assert result.topk_ids.tolist() == [
        [0, 1],
        [1, 0],
        [-1, 2],
        [-1, 2],
    ]  # ceil(0.75 * 4 * 2 / 3) = 2 per expert
    assert (result.dropped, result.y.tolist()) == (2, [[2.0], [2.0], [1.0], [1.0]])


def test_activations_by_hand():
    z = np.array([-40.0, -1.0, 0.0, 1.0, 800.0])
    silu = [-40.0 / (1.0 + math.exp(40.0)), -1.0 / (1.0 + math.e), 0.0, 1.0 / (1.0 + math.exp(-1.0)), 800.0]
    gelu = [-20.0 * math.erfc(40.0 / math.sqrt(2.0)), -0.15865525393145707, 0.0, 0.8413447460685429, 800.0]
    tanh = [z * 0.5 * (1.0 + math.tanh(math.sqrt(2.0 / math.pi) * (z + 0.044715 * z**3))) for z in (-1.0, 0.0, 1.0)]
    np.testing.assert_allclose(activate(z, "gelu_tanh"), [0.0, *tanh, 800.0], rtol=3e-15)
    np.testing.assert_allclose(activate(np.array([-4.0]), "gelu_tanh"), [-7.024594819237269e-05], rtol=1e-14)
    np.testing.assert_allclose(activate(z, "relu"), [0.0, 0.0, 0.0, 1.0, 800.0])
    np.testing.assert_allclose(activate(z, "silu"), silu, rtol=1e-15)
    np.testing.assert_allclose(activate(z, "gelu"), gelu, rtol=1e-15)
    np.testing.assert_allclose(activate(np.append(z, 2.0 * z), "swiglu"), 2.0 * z * silu, rtol=1e-15)
    with pytest.raises(ValueError, match="tanh"):
        activate(z, "tanh")


@pytest.mark.parametrize(
    ("ids", "slack", "valid"),
    [
        ([3, 1], 0.0, True),
        ([1, 3], 0.0, False),  # not descending
        ([3, 2], 0.0, False),  # experts 1 and 2 have equal logits, so the lower id must come first
        ([3, 2], 1e-9, True),
        ([3, 0], 0.5, False),
        ([3, 0], 1.0, True),
        ([3, 3], 9.0, False),
        ([3, 4], 9.0, False),
        ([3, -2], 9.0, False),
        ([-1, 1], 0.0, True),  # expert 3 was chosen and dropped
        ([-1, 0], 0.0, False),  # experts 3 and 1 both come before expert 0, but only one choice was dropped
        ([-1, -1], 0.0, True),
    ],
)
def test_check_topk(ids, slack, valid):
    logits = np.array([[0.0, 1.0, 1.0, 4.0]])
    assert check_topk(logits, np.array([ids]), slack).tolist() == [valid]


def test_check_topk_accepts_what_the_reference_chooses():
    logits = np.random.default_rng(3).integers(0, 4, (200, 9)).astype(float)  # many ties
    assert check_topk(logits, choose(logits, 5)).all()
    assert check_topk(np.zeros((0, 9)), np.zeros((0, 5), int)).shape == (0,)
