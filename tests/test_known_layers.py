"""Calls of a layer that the CPU engine knows from an earlier call: it refuses the same calls, but does less work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import flashmoe
import ml_dtypes
import numpy as np
import pytest
from flashmoe.calls.tensors import as_view
from flashmoe.engines import cpu
from flashmoe.spec.tensors import Tensors

E, K, H, I = 4, 2, 8, 6
SIZES = {"max_tokens": 8, "hidden": H, "intermediate": I, "experts": E, "top_k": K, "dtype": "float32"}


def arrays(tokens: int = 5, seed: int = 0, **changes: Any) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    shapes = {"x": (tokens, H), "gate_up_proj": (E, 2 * I, H), "down_proj": (E, H, I), "router": (E, H)}
    made = {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    return {**made, "top_k": K, **changes}


def given(tokens: int = 5, ids: type = np.int32) -> dict[str, Any]:
    routing = {"topk_ids": np.tile([0, 2], (tokens, 1)).astype(ids), "topk_weights": np.ones((tokens, K), np.float32)}
    return {**arrays(tokens), "router": None, "top_k": None, **routing}


def as_tensors(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with arrays as PyTorch's tensors."""
    torch = pytest.importorskip("torch")
    return {
        name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for name, value in arguments.items()
    }


@pytest.fixture
def ctx() -> Iterator[flashmoe.Context]:
    with flashmoe.Context(processors=1, **SIZES) as context:
        yield context


@pytest.fixture
def checks(monkeypatch) -> list[Any]:
    """The arguments of each full check of a layer that the engine has made."""
    made: list[Any] = []
    check = cpu.check
    monkeypatch.setattr(cpu, "check", lambda *arguments: made.append(arguments) or check(*arguments))
    return made


def test_a_known_layer_is_not_checked_again(ctx, checks):
    for tokens in (5, 0, 8, 5):
        flashmoe.moe(ctx, **arrays(tokens, seed=tokens))
    assert len(checks) == 1
    for tokens in (5, 0, 8, 5):
        flashmoe.moe(ctx, **given(tokens))
    assert len(checks) == 2
    for tokens in (3, 4):
        flashmoe.moe(ctx, **as_tensors(arrays(tokens)))
    assert len(checks) == 3


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a | {"renormalize": False},
        lambda a: a | {"activation": "silu", "gate_up_proj": a["gate_up_proj"][:, :I].copy()},
        lambda a: a | {"return_mode": "reduced"},
        lambda a: a | {"capacity_factor": 0.5},
        lambda a: a | {"router_bias": np.ones(E, np.float32)},
        lambda a: {**a, **{n: a[n].astype(ml_dtypes.bfloat16) for n in a if n != "top_k"}},
        lambda a: {**a, "top_k": 1},
        lambda a: given(),
    ],
)
def test_another_layer_is_another_one(ctx, checks, change):
    """Each change makes a layer that is checked anew, and has the same bits as in a fresh context."""
    flashmoe.moe(ctx, **arrays())
    y = flashmoe.moe(ctx, **change(arrays()))
    assert len(checks) == 2
    with flashmoe.Context(processors=1, **SIZES) as fresh:
        assert flashmoe.moe(fresh, **change(arrays())).tobytes() == y.tobytes()


@pytest.mark.parametrize("convert", [dict, as_tensors], ids=["numpy", "torch"])
def test_a_call_takes_the_tensors_that_it_gets(ctx, convert):
    """The engine keeps neither tensors nor results of a layer that it knows."""
    with flashmoe.Context(processors=1, **SIZES) as fresh:
        for seed in range(3):
            y = flashmoe.moe(ctx, **convert(arrays(seed=seed)))
            for known in list(fresh._engine._layers):
                del fresh._engine._layers[known]
            assert np.array_equal(np.asarray(flashmoe.moe(fresh, **convert(arrays(seed=seed)))), np.asarray(y))


WRONG: dict[str, Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]] = {
    "too many tokens": lambda a, g: arrays(9),
    "x of one dimension": lambda a, g: {**a, "x": a["x"][0]},
    "x of none": lambda a, g: {**a, "x": np.float32(1)},
    "no x": lambda a, g: {**a, "x": None},
    "x that is strided": lambda a, g: {**a, "x": np.zeros((5, 2 * H), np.float32)[:, ::2]},
    "x of another width": lambda a, g: {**a, "x": a["x"][:, :4].copy()},
    "x of another type": lambda a, g: {**a, "x": a["x"].astype(np.float16)},
    "x in another byte order": lambda a, g: {**a, "x": a["x"].astype(">f4")},
    "a list": lambda a, g: {**a, "router": [[1.0]]},
    "a router that is transposed": lambda a, g: {**a, "router": np.zeros((H, E), np.float32).T},
    "fewer experts": lambda a, g: {**a, "router": a["router"][:3]},
    "another hidden size": lambda a, g: {**a, "down_proj": a["down_proj"][:, :4].copy()},
    "weights of another type": lambda a, g: {**a, "down_proj": a["down_proj"].astype(np.float64)},
    "a bias of another size": lambda a, g: {**a, "router_bias": np.zeros(3, np.float32)},
    "top_k of another type": lambda a, g: {**a, "top_k": float(K)},
    "top_k that is a truth": lambda a, g: {**a, "top_k": True},
    "no top_k": lambda a, g: {**a, "top_k": None},
    "an activation that is none": lambda a, g: {**a, "activation": "tanh"},
    "ids of other tokens": lambda a, g: {**g, "topk_ids": g["topk_ids"][:3]},
    "weights of other tokens": lambda a, g: {**g, "topk_weights": g["topk_weights"][:3]},
    "ids of another type": lambda a, g: {**g, "topk_ids": g["topk_ids"].astype(np.uint8)},
    "ids that are no experts": lambda a, g: {**g, "topk_ids": g["topk_ids"] + 3},
    "no weights": lambda a, g: {**g, "topk_weights": None},
    "router and ids": lambda a, g: {**g, "router": a["router"]},
    "a placement of another size": lambda a, g: {**a, "placement": [0] * 3},
    "a capacity that is none": lambda a, g: {**a, "capacity_factor": float("nan")},
}


def refusal(ctx: flashmoe.Context, arguments: dict[str, Any]) -> str:
    with pytest.raises(flashmoe.FlashMoEError) as caught:
        flashmoe.moe(ctx, **arguments)
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("ids", [np.int32, np.int64])
def test_every_call_is_checked(ctx, wrong, ids):
    """Errors have the same text, whether or not similar calls have been made before, and the context stays usable."""
    arguments = WRONG[wrong](arrays(), given(ids=ids))
    expected = refusal(ctx, arguments)
    flashmoe.moe(ctx, **arrays(top_k=1))
    for right in (arrays(), given(ids=ids)):
        flashmoe.moe(ctx, **right)
    assert refusal(ctx, arguments) == expected
    flashmoe.moe(ctx, **arrays())


def test_tensors_elsewhere_are_refused_after_others(ctx):
    torch = pytest.importorskip("torch")
    right = as_tensors(arrays())
    flashmoe.moe(ctx, **right)
    with pytest.raises(flashmoe.InvalidArgument, match=r"router: expected a tensor in host memory .* got device meta"):
        flashmoe.moe(ctx, **{**right, "router": right["router"].to("meta")})
    with pytest.raises(flashmoe.InvalidArgument, match="router: expected a contiguous tensor"):
        flashmoe.moe(ctx, **{**right, "router": torch.zeros(H, E).t()})


def test_old_layers_are_forgotten(ctx, monkeypatch, checks):
    monkeypatch.setattr(cpu, "_MOST_LAYERS", 2)
    kinds = [{"top_k": 1}, {"renormalize": False}, {"return_mode": "reduced"}]
    for kind in kinds * 2:
        flashmoe.moe(ctx, **arrays(**kind))
        assert len(ctx._engine._layers) <= 2
    assert len(checks) == 6


def test_the_library_looks_at_what_it_is_given():
    """A tensor too few or too many is an error that names it, and a layer does not keep its context alive."""
    context = flashmoe.Context(processors=1, **SIZES)
    flashmoe.moe(context, **arrays())
    (known,) = context._engine._layers.values()
    x = as_view(np.zeros((0, H), np.float32))
    tensors = len(Tensors._fields)
    for count, message in (
        (0, "^x: expected a tensor, got none"),
        (5, "^router_bias: expected no tensor, got one"),
        (4, "^out: expected a tensor, got none"),
    ):
        given = [x] * count + [None] * (tensors - count)
        with pytest.raises(flashmoe.FlashMoEError, match=message):
            known.call(0, False, 0, False, False, False, *given, None, None, None)
    context.close()
    assert refusal(context, arrays()) == "FlashMoEError: context: expected an open one, got one that is closed"
    with pytest.raises(flashmoe.FlashMoEError, match=r"^context: it is closed"):
        known.call(0, False, 0, False, False, False, *[None] * (tensors + 3))


def test_a_report_is_made_when_it_is_asked_for(ctx, monkeypatch):
    made = []
    report_of = cpu.CpuEngine._report_of
    monkeypatch.setattr(cpu.CpuEngine, "_report_of", lambda self, ended: made.append(ended) or report_of(self, ended))
    flashmoe.moe(ctx, **arrays(3))
    flashmoe.moe(ctx, **arrays(5))
    assert made == []
    report = ctx.last_call
    assert (report.tokens, report.tasks["gate"], len(made)) == (5, 1, 1)
    assert ctx.last_call is report and len(made) == 1
    refusal(ctx, arrays(9))
    assert ctx.last_call is None
