"""Calls without a context: they have the bits of calls with one, and the package makes, keeps, grows and closes
contexts for them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import flashmoe
import ml_dtypes
import numpy as np
import pytest
from flashmoe import InvalidArgument
from flashmoe.calls import alone
from flashmoe.checkpoint import shipped_layer
from flashmoe.contexts import context as contexts_of
from flashmoe.contexts import kept
from flashmoe.quantize import quantize_weights

pytestmark = pytest.mark.usefixtures("released")

T, H, I, E, K = 24, 64, 32, 8, 2


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The finalizers of the contexts that are made from now on: one is alive as long as its context is open."""
    finalizers, make = [], contexts_of.Context.__init__

    def recorded(self: flashmoe.Context, *args: Any, **sizes: Any) -> None:
        make(self, *args, **sizes)
        finalizers.append(self._engine._finalizer)

    monkeypatch.setattr(contexts_of.Context, "__init__", recorded)
    return finalizers


def numbers(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return (np.random.default_rng(sum(shape)).standard_normal(shape) / shape[-1] ** 0.5).astype(dtype)


def layer(tokens: int = T, hidden: int = H, experts: int = E, dtype: Any = np.float32) -> dict[str, Any]:
    """The arguments of a call."""
    return {
        "x": numbers(tokens, hidden, dtype=dtype),
        "gate_up_proj": numbers(experts, 2 * I, hidden, dtype=dtype),
        "down_proj": numbers(experts, hidden, I, dtype=dtype),
        "router": numbers(experts, hidden, dtype=dtype),
        "top_k": K,
    }


def given_routing(tokens: int = T) -> dict[str, Any]:
    of_router = layer(tokens)
    del of_router["router"], of_router["top_k"]
    ids = np.random.default_rng(0).permuted(np.tile(np.arange(E), (tokens, 1)), axis=1)[:, :K].copy()
    return of_router | {"topk_ids": ids, "topk_weights": np.full((tokens, K), 0.5, np.float32)}


def of_shared() -> dict[str, Any]:
    return layer() | {"shared_gate_up": numbers(4 * I, H), "shared_down": numbers(H, 2 * I)}


def transposed() -> dict[str, Any]:
    matrices = {"gate_up_proj": numbers(E, H, 2 * I), "down_proj": numbers(E, I, H)}
    return layer() | matrices | {"transposed": True}


def quantised() -> dict[str, Any]:
    of_floats = layer(hidden=128, dtype=ml_dtypes.bfloat16)
    up, up_scale = quantize_weights(numbers(E, 256, 128))
    down, down_scale = quantize_weights(numbers(E, 128, 128))
    return of_floats | {
        "gate_up_proj": up,
        "gate_up_scale": up_scale,
        "down_proj": down,
        "down_scale": down_scale,
    }


def bits(y: Any) -> bytes:
    return np.ascontiguousarray(y).tobytes()


def with_context(given: dict[str, Any], **sizes: Any) -> np.ndarray:
    largest = {"max_tokens": 64, "hidden": 128, "intermediate": 128, "experts": E, "top_k": K, "dtype": "float32"}
    with flashmoe.Context(**largest | {"shared_intermediate": 2 * I} | sizes) as ctx:
        return flashmoe.moe(ctx, **given)


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        (layer(), {}),
        (layer(dtype=np.float16), {}),
        (layer(dtype=ml_dtypes.bfloat16), {}),
        (layer(tokens=0), {}),
        (layer() | {"activation": "gelu", "gate_up_proj": numbers(E, I, H)}, {}),
        (layer() | {"capacity_factor": 0.5}, {}),
        (given_routing(), {}),
        (of_shared(), {"intermediate": I}),
        (transposed(), {}),
        (quantised(), {"dtype": "bfloat16", "weight_dtype": "float8_e4m3fn", "shared_intermediate": 0}),
    ],
    ids=["float32", "float16", "bfloat16", "no tokens", "gelu", "capacity", "given", "shared", "transposed", "fp8"],
)
def test_the_bits_of_a_call_with_a_context(given, sizes):
    y = flashmoe.moe(**given)
    assert y.dtype == given["x"].dtype and y.shape == given["x"].shape
    assert bits(y) == bits(with_context(given, **sizes))


def test_the_first_example():
    """A call of the shipped layer, with x and the matrices given by position."""
    of_model, x = shipped_layer()
    tensors = of_model.tensors()
    up, down = tensors.pop("gate_up_proj"), tensors.pop("down_proj")
    y = flashmoe.moe(x, up, down, **tensors, **of_model.rule())
    sizes = {"max_tokens": len(x), "hidden": 256, "intermediate": of_model.intermediate, "experts": of_model.experts}
    with flashmoe.Context(**sizes, top_k=of_model.top_k) as ctx:
        assert bits(y) == bits(flashmoe.moe(ctx, x, up, down, **tensors, **of_model.rule()))


def test_the_hundredth_call_takes_the_context_of_the_first(made):
    given = layer()
    ys = [bits(flashmoe.moe(**given | {"x": given["x"][: 1 + n % T]})) for n in range(100)]
    assert len(made) == 1 and ys[23] == ys[47] == ys[71]


def test_more_tokens_make_a_larger_context(made):
    small, large = layer(), layer(tokens=300)
    y = bits(flashmoe.moe(**small))
    assert bits(flashmoe.moe(**large)) == bits(with_context(large, max_tokens=300))
    assert [each.alive for each in made] == [False, True, False]  # the last is with_context's
    assert bits(flashmoe.moe(**small)) == y and len(made) == 3


def test_a_ninth_shape_closes_the_first_context(made):
    ys = {}
    for experts in range(3, 3 + kept.MOST):
        ys[experts] = bits(flashmoe.moe(**layer(experts=experts)))
    assert all(each.alive for each in made)
    flashmoe.moe(**layer(experts=3))  # so the context of 4 experts is now the least recently used one
    flashmoe.moe(**layer(experts=20))
    assert [each.alive for each in made] == [True, False] + [True] * (kept.MOST - 1)
    assert bits(flashmoe.moe(**layer(experts=4))) == ys[4]
    assert [each.alive for each in made[:3]] == [True, False, False] and len(made) == kept.MOST + 2


def test_release_closes_all(made):
    y = bits(flashmoe.moe(**layer()))
    flashmoe.moe(**layer(experts=4))
    flashmoe.release()
    flashmoe.release()
    assert [each.alive for each in made] == [False, False]
    assert bits(flashmoe.moe(**layer())) == y and len(made) == 3


def test_two_threads():
    """Several threads make calls of two shapes, while another thread releases the contexts."""
    right = {experts: bits(flashmoe.moe(**layer(experts=experts))) for experts in (4, 8)}
    wrong: list[Any] = []

    def calls(experts: int) -> None:
        given = layer(experts=experts)
        try:
            wrong.extend(n for n in range(100) if bits(flashmoe.moe(**given)) != right[experts])
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=calls, args=(experts,)) for experts in (4, 8, 8)]
    for each in threads:
        each.start()
    for _ in range(50):
        flashmoe.release()
    for each in threads:
        each.join()
    assert wrong == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Python warns if a process with threads forks
def test_a_forked_process_makes_its_own():
    given = layer()
    right = bits(flashmoe.moe(**given))
    if (child := os.fork()) == 0:
        os._exit(0 if bits(flashmoe.moe(**given)) == right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert bits(flashmoe.moe(**given)) == right


SHARE = "as on a rank of a group, got none"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"gate_up_proj": numbers(4, 2 * I, H), "down_proj": numbers(4, H, I)},
            "ctx: expected a flashmoe.Context, since gate_up_proj has 4 of the router's 8 experts, " + SHARE,
        ),
        ({"trace": True}, "trace: expected a context with it, in whose last_call events are, got None"),
        ({"x": [1.0]}, "x: expected a float32, bfloat16, float16, float8_e4m3fn tensor, got list"),
        ({"x": numbers(T, 32)}, "x: expected [T, H=64] float32, as gate_up_proj and down_proj have it, got [24, 32]"),
        ({"down_proj": numbers(E, H, 16)}, "gate_up_proj: expected [El=8, 2I=32, H=64] float32, got [8, 64, 64]"),
        ({"top_k": None}, "top_k: expected an integer with router, got None"),
        ({"top_k": 9}, "top_k: expected an integer in [1, E=8], got 9"),
        ({"router": None, "top_k": None}, "router: expected a router, or topk_ids and topk_weights, got none of them"),
        ({"placement": [0] * 7 + [1]}, "placement: expected ranks in [0, 1), got 1"),
        ({"slices": 2}, "gate_up_proj: expected [El=16, 2I=64, H=64] float32, got [8, 64, 64] float32"),
        ({"activation": "tanh"}, "activation: expected one of "),
    ],
)
def test_what_is_refused(monkeypatch, made, changes, message):
    """If no call of these shapes came before, a wrong call is refused before a context is made."""
    monkeypatch.setattr(kept, "_known", {})
    monkeypatch.setattr(alone, "_found", {})
    with pytest.raises(InvalidArgument) as refused:
        flashmoe.moe(**layer() | changes)
    assert str(refused.value).startswith(message)
    assert made == []


def test_what_is_no_context():
    given = layer()
    matrices = given.pop("x"), given.pop("gate_up_proj"), given.pop("down_proj")
    with pytest.raises(InvalidArgument, match=r"ctx: expected a flashmoe\.Context, got str"):
        flashmoe.moe("ctx", *matrices, **given)
    assert bits(flashmoe.moe(None, *matrices, **given)) == bits(flashmoe.moe(*matrices, **given))


@pytest.mark.parametrize("with_ctx", [False, True])
def test_leading_dimensions(with_ctx):
    call: Callable[..., Any] = with_context if with_ctx else lambda given: flashmoe.moe(**given)
    flat = given_routing()
    y = call(flat)
    cut = {name: flat[name].reshape(2, 3, 4, -1) for name in ("x", "topk_ids", "topk_weights")}
    for given in (flat | cut, flat | {"x": cut["x"]}):
        assert call(given).shape == (2, 3, 4, H) and bits(call(given)) == bits(y)
    logits, of_rows = np.zeros((2, 3, 4, E), np.float32), np.zeros((T, E), np.float32)
    call(layer() | {"router_logits": of_rows})
    call(layer() | {"x": cut["x"], "router_logits": logits})
    assert bits(logits) == bits(of_rows) and logits.any()
    with pytest.raises(InvalidArgument, match=r"topk_ids: expected \[T, K\] int32 or int64, got \[3, 8, 2\]"):
        call(flat | {"x": cut["x"], "topk_ids": flat["topk_ids"].reshape(3, 8, K)})


def test_numpy_needs_no_torch():
    code = """
import sys
sys.modules["torch"] = None
import numpy as np
import flashmoe
y = flashmoe.moe(np.ones((2, 8), np.float32), np.ones((4, 8, 8), np.float32), np.ones((4, 8, 4), np.float32),
                 router=np.ones((4, 8), np.float32), top_k=2)
print(y.shape)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.stdout == "(2, 8)\n", ran.stderr
