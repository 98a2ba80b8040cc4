"""A shared expert whose gate and up are two matrices, `shared_gate_up` and `shared_up`, each read where it lies:
results and gradients have the bits that they have with one matrix of both."""

from __future__ import annotations

from typing import Any

import flashmoe
import numpy as np
import pytest
import torch
from flashmoe.errors import InvalidArgument
from flashmoe.launch import RankPool
from flashmoe.spec import FP8
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import quantised, random_problem
from training import as_tensor, gradients_of, train, trainable

SIZES = {"hidden": 48, "intermediate": 24, "experts": 16, "top_k": 4}
LAYERS: dict[str, dict[str, Any]] = {
    "one slice": {"shared": 1},
    "three slices": {"shared": 3, "shared_gate": True},
    "parts of a gradient have rows of both": {"shared": 3, "intermediate": 136},
    "one slice, wider than a tile": {"shared": 1, "intermediate": 264},
    "given routing": {"shared": 2, "fused": False, "activation": "geglu"},
    "weights on the input": {"shared": 2, "weights_on_input": True, "top_k": 1, "score": "sigmoid"},
}


def apart(both: Any) -> dict[str, Any]:
    """The two operands for gate and up, which have the first and the second half of the rows of `both`. Each is in
    memory of its own."""
    gate, up = (
        half.copy() if isinstance(half, np.ndarray) else half.clone()
        for half in (both[: len(both) // 2], both[len(both) // 2 :])
    )
    return {"shared_gate_up": gate, "shared_up": up}


def check_bits(together: dict[str, np.ndarray], found: dict[str, np.ndarray]) -> None:
    """A rank's result and gradients have the same bits with one matrix (`together`) and with two (`found`)."""
    assert found.keys() == together.keys() | {"shared_up"}
    halves = apart(together["shared_gate_up"])
    assert halves["shared_gate_up"].any() and halves["shared_up"].any()
    for name, each in (together | halves).items():
        assert each.tobytes() == found[name].tobytes(), name


@pytest.mark.parametrize("tile", [None, (16, 8)], ids=["usual tiles", "small tiles"])
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_rank_alone_has_the_same_bits(pool: RankPool, dtype: str, layer: dict[str, Any], tile: Any):
    problem, grads = trainable(3, [150], dtype=dtype, **SIZES | layer)
    how = {} if tile is None else {"tile": tile}
    (together,), (found,) = train(pool, problem, grads, times=2, options=({}, apart(problem.shared_gate_up)), **how)
    check_bits(together, found)


@settings(max_examples=25, deadline=None)
@given(
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    hidden=st.integers(1, 300),
    intermediate=st.integers(1, 300),
    shared=st.integers(1, 4),
    tokens=st.integers(1, 70),
    tile=st.sampled_from([(128, 256), (16, 8), (32, 64)]),
)
def test_random_sizes_have_the_same_bits(dtype, hidden, intermediate, shared, tokens, tile):
    sizes = {"hidden": hidden, "intermediate": intermediate, "experts": 4, "top_k": 2}
    problem, (grad,) = trainable(12, [tokens], dtype=dtype, shared=shared, fused=False, **sizes)
    arguments = problem.arguments(0)
    with flashmoe.Context(**problem.limits()) as context:
        context._engine.set_tile(*tile)
        together = gradients_of(context, arguments, grad)
        check_bits(together, gradients_of(context, arguments | apart(problem.shared_gate_up), grad))


@pytest.mark.parametrize("return_mode", ["direct", "reduced"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_ranks_have_the_same_bits(pool: RankPool, dtype: str, return_mode: str):
    """In the first case, one of the ranks has no tokens."""
    for tokens in ([40, 0], [33, 65]):
        problem, grads = trainable(4, tokens, dtype=dtype, shared=2, return_mode=return_mode, **SIZES)
        calls = train(pool, problem, grads, times=2, options=({}, apart(problem.shared_gate_up)), perturb=(1, 2))
        for together, found in zip(*calls, strict=True):
            if together["y"].size:
                check_bits(together, found)
            else:
                assert not found["shared_up"].any() and not found["shared_gate_up"].any()


def test_ranks_may_differ(pool: RankPool):
    """One rank may have gate and up in one matrix and the other rank in two, because each rank has its own tensors of
    the shared expert."""
    problem, grads = trainable(5, [20, 30], shared=2, **SIZES)
    (expected,) = train(pool, problem, grads)
    with_up = apart(problem.shared_gate_up)
    arguments = [problem.arguments(rank) | (with_up if rank == 1 else {}) for rank in range(2)]
    name = f"shared-up-{np.random.default_rng().integers(1 << 62):x}"
    found = pool.call(_forward, [(name, problem.limits(), each) for each in arguments], ranks=2, timeout=120.0)
    for rank in range(2):
        assert found[rank].tobytes() == expected[rank]["y"].tobytes()


def _forward(rank: int, ranks: int, _: str, name: str, limits: dict[str, Any], arguments: dict[str, Any]) -> np.ndarray:
    with flashmoe.Context(rank=rank, ranks=ranks, name=name, **limits) as context:
        return flashmoe.moe(context, **arguments)


def _leaves(problem: Any, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    arguments = problem.arguments(0)
    arguments |= apart(arguments["shared_gate_up"])
    return {name: as_tensor(each) if isinstance(each, np.ndarray) else each for name, each in arguments.items()}


@pytest.mark.parametrize("frozen", ["shared_gate_up", "shared_up"])
def test_one_of_the_two_may_be_frozen(frozen: str):
    """The frozen matrix gets no gradient, and the gradient of the other matrix is the same as if neither is frozen."""
    problem = random_problem(6, [30], shared=2, **SIZES)
    found = []
    with flashmoe.Context(**problem.limits()) as context:
        for without in (None, frozen):
            tensors = _leaves(problem)
            for name in {"shared_gate_up", "shared_up", "shared_down"} - {without}:
                tensors[name].requires_grad_()
            flashmoe.moe(context, **tensors).square().sum().backward()
            found.append(tensors)
    (trained,) = {"shared_gate_up", "shared_up"} - {frozen}
    assert found[1][frozen].grad is None
    assert found[1][trained].grad.any() and torch.equal(found[1][trained].grad, found[0][trained].grad)


def test_they_may_be_neighbours_or_one_matrix():
    """The two operands may be halves of one matrix, in either order in memory, or one matrix given twice."""
    problem = random_problem(7, [30], shared=1, **SIZES)
    both = as_tensor(problem.shared_gate_up)
    gate, up = both.chunk(2)
    turned = torch.cat([up, gate])
    cases = [(gate, up), tuple(reversed(turned.chunk(2))), (gate, gate)]
    tensors = _leaves(problem)
    with flashmoe.Context(**problem.limits()) as context:
        for first, second in cases:
            told = tensors | {"shared_gate_up": first, "shared_up": second}
            expected = flashmoe.moe(
                context, **tensors | {"shared_gate_up": torch.cat([first, second]), "shared_up": None}
            )
            assert torch.equal(flashmoe.moe(context, **told), expected)


def test_gradients_under_a_compiler():
    """Under `torch.compile`, the call is an operator of PyTorch, which returns gradients as new tensors. Their bits are
    those of a call that is not compiled."""
    problem = random_problem(8, [30], shared=2, **SIZES)
    found = []
    with flashmoe.Context(**problem.limits()) as context:
        for compiled in (False, True):
            tensors = _leaves(problem)
            for name in ("x", "shared_gate_up", "shared_up"):
                tensors[name].requires_grad_()

            def call(tensors: dict[str, Any] = tensors) -> torch.Tensor:
                return flashmoe.moe(context, **tensors)

            y = (torch.compile(call, backend="aot_eager") if compiled else call)()
            y.square().sum().backward()
            found.append(
                {name: tensors[name].grad for name in ("x", "shared_gate_up", "shared_up")} | {"y": y.detach()}
            )
    for name, each in found[0].items():
        assert torch.equal(found[1][name], each), name


def test_gradients_are_added_to_main_grads():
    from flashmoe.contexts.context import context_id
    from flashmoe.pytorch.operator import by_operator
    from flashmoe.spec import Options
    from flashmoe.spec.tensors import Tensors

    problem = random_problem(9, [30], shared=3, dtype="bfloat16", **SIZES)
    with flashmoe.Context(**problem.limits()) as context:
        tensors = _leaves(problem)
        options = Options(top_k=tensors.pop("top_k"))
        given = {name: each for name, each in tensors.items() if torch.is_tensor(each)}
        names = ("shared_gate_up", "shared_up")
        for name in names:
            given[name].requires_grad_()
            given[name].main_grad = torch.ones(given[name].shape)
        by_operator(context_id(context), Tensors(**given), options).float().sum().backward()
        by_operator(context_id(context), Tensors(**given), options, main_grad=True).float().sum().backward()
    for name in names:
        added = given[name].main_grad - 1.0
        assert added.any()
        torch.testing.assert_close(added, given[name].grad.float(), rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"shared_gate_up": None}, "shared_gate_up: expected a tensor beside shared_down, got None"),
        (
            {"shared_gate_up": None, "shared_down": None},
            "shared_gate_up: expected a tensor beside shared_up, got None",
        ),
        (
            {"shared_gate_up": np.ones((96, 48), np.float32)},
            r"shared_gate_up: expected \[Is=48, H=48\] float32, got \[96, 48\] float32",
        ),
        (
            {"shared_up": np.ones((24, 48), np.float32)},
            r"shared_up: expected \[Is=48, H=48\] float32, got \[24, 48\] float32",
        ),
        ({"shared_up": np.ones(48, np.float32)}, r"shared_up: expected \[Is, H\], got \[48\]"),
        ({"shared_up": np.ones((48, 48), np.float16)}, "shared_up: expected float32, the type of x"),
        (
            {"shared_up": np.ones((48, 96), np.float32)[:, :48]},
            r"shared_up: expected a contiguous tensor, got a strided one; call .contiguous\(\) on it",
        ),
        ({"shared_up": 3}, "shared_up: expected a float32, bfloat16, float16, float8_e4m3fn tensor, got int"),
        (
            {"activation": "gelu", "gate_up_proj": np.ones((16, 24, 48), np.float32)},
            "shared_up: expected none with 'gelu', which has no gate, got one",
        ),
        ({"interleaved": True}, "shared_up: expected none with interleaved, whose shared_gate_up has both, got one"),
        (
            {"transposed": True, "down_proj": np.ones((16, 24, 48), np.float32)},
            "shared_up: expected none with transposed, whose shared_gate_up has both, got one",
        ),
    ],
)
def test_what_does_not_fit_is_refused(changed: dict[str, Any], told: str):
    problem = random_problem(10, [5], shared=2, **SIZES)
    arguments = problem.arguments(0)
    arguments |= apart(arguments["shared_gate_up"])
    with flashmoe.Context(max_tokens=8, dtype="float32", shared_intermediate=48, **SIZES) as context:
        with pytest.raises(InvalidArgument, match=f"^{told}"):
            flashmoe.moe(context, **arguments | changed)
        flashmoe.moe(context, **arguments)


def test_quantised_weights_have_both_in_one_matrix():
    problem = quantised(random_problem(11, [5], shared=1, **SIZES))
    arguments = problem.arguments(0)
    told = f"^shared_up: expected none with weights of {FP8}, whose shared_gate_up has both, got one"
    with flashmoe.Context(**problem.limits()) as context:
        with pytest.raises(InvalidArgument, match=told):
            flashmoe.moe(context, **arguments | apart(arguments["shared_gate_up"]))
        flashmoe.moe(context, **arguments)
