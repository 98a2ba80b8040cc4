"""`most_tokens`: all ranks promise how many tokens a rank has at most in a call. A promise changes no bit on the CPU
engine. A rank that would break its promise, or that promises another number than the others, is named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import flashmoe
import flashmoe.nn
import numpy as np
import pytest
import torch
from flashmoe.errors import InvalidArgument
from flashmoe.launch import RankPool

H, I, E, K = 16, 12, 4, 2
SIZES = {"hidden": H, "intermediate": I, "experts": E, "top_k": K, "dtype": "float32"}
MAX = 32

Calls = Sequence[tuple[Sequence[int], Sequence[Any]]]
"""For each call, the number of each rank's tokens, and what each rank promises."""


@pytest.fixture(scope="module")
def pool():
    with RankPool(3) as made:
        yield made


def weights() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(5)
    shapes = {"gate_up_proj": (E, 2 * I, H), "down_proj": (E, H, I), "router": (E, H)}
    return {name: draw.standard_normal(shape, np.float32) / 4 for name, shape in shapes.items()}


def tokens_of(rank: int, call: int, tokens: int) -> np.ndarray:
    return np.random.default_rng((rank, call)).standard_normal((tokens, H), np.float32)


def go(rank: int, ranks: int, name: str, calls: Calls) -> list[Any]:
    """What each call gave this rank: the bytes of its result, or the error's type and message."""
    outcomes: list[Any] = []
    with flashmoe.Context(rank=rank, ranks=ranks, name=name, max_tokens=MAX, timeout=20.0, **SIZES) as ctx:
        given = weights()
        for matrix in ("gate_up_proj", "down_proj"):
            given[matrix] = given[matrix][ctx.local_experts()]
        for call, (tokens, promised) in enumerate(calls):
            x = tokens_of(rank, call, tokens[rank])
            try:
                y = flashmoe.moe(ctx, x, **given, top_k=K, most_tokens=promised[rank])
                outcomes.append(y.tobytes())
            except flashmoe.FlashMoEError as error:
                outcomes.append((type(error).__name__, str(error)))
    return outcomes


def run(pool: RankPool, calls: Calls) -> list[list[Any]]:
    return pool.call(go, [(calls,)] * 3)


def test_a_promise_changes_no_bits(pool):
    sizes = [(5, 0, 8), (1, 1, 1), (0, 0, 0), (8, 8, 8), (5, 0, 8)]
    plain = run(pool, [(each, (None,) * 3) for each in sizes])
    assert run(pool, [(each, (8,) * 3) for each in sizes]) == plain
    assert run(pool, [(each, (most,) * 3) for each, most in zip(sizes, (8, 1, 7, 31, 100), strict=True)]) == plain


def test_a_broken_promise_is_refused_on_all_ranks(pool):
    """The first call of a layer, and a later one whose layer is known. The calls after these are right."""
    sizes = [(4, 9, 2), (4, 8, 2), (4, 9, 2), (4, 8, 2)]
    right = run(pool, [(each, (None,) * 3) for each in sizes])
    found = run(pool, [(each, (8,) * 3) for each in sizes])
    why = "x: expected at most most_tokens=8 tokens, got 9"
    for rank, (outcomes, expected) in enumerate(zip(found, right, strict=True)):
        for call in (0, 2):
            told = f"rank 1 refused call {call + 1}: {why}"
            assert outcomes[call] == (("InvalidArgument", why) if rank == 1 else ("GroupError", told))
        assert outcomes[1::2] == expected[1::2]


@pytest.mark.parametrize(
    ("promised", "rank", "said"),
    [((8, 8, 4), 2, "4"), ((None, 8, None), 1, "8"), ((7, None, None), 0, "7")],
    ids=str,
)
def test_ranks_must_promise_alike(pool, promised, rank, said):
    for outcomes in run(pool, [((2, 2, 2), promised)]):
        name, message = outcomes[0]
        assert name == "GroupError" and "ranks disagree on call 1: most_tokens: " in message
        assert f"rank {rank} has {said}" in message


def test_what_the_context_allows_is_no_promise(pool):
    sizes = [(5, 0, 8)]
    assert run(pool, [(sizes[0], (None, MAX, 2**20 - 1))]) == run(pool, [(sizes[0], (None,) * 3)])


WRONG = [0, -1, 2.5, True, "8", 2**20]


@pytest.mark.parametrize("wrong", WRONG, ids=repr)
def test_what_is_no_promise(wrong):
    with pytest.raises(InvalidArgument, match=r"most_tokens: expected an integer in \[1, 1048575\], got"):
        flashmoe.moe(tokens_of(0, 0, 1), **weights(), top_k=K, most_tokens=wrong)


def alone(module: bool) -> Callable[..., Any]:
    given = {name: torch.from_numpy(each) for name, each in weights().items()}
    if not module:
        return lambda x, **how: flashmoe.moe(torch.from_numpy(x), **given, top_k=K, **how)
    layer = flashmoe.nn.MoE(None, **SIZES)
    return lambda x, **how: layer(torch.from_numpy(x), **how)


@pytest.mark.parametrize("module", [False, True], ids=["moe", "nn.MoE"])
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_a_rank_alone(module, grad):
    call = alone(module)
    with torch.set_grad_enabled(grad):
        for _ in range(2):
            y = call(tokens_of(0, 0, 8))
            assert torch.equal(call(tokens_of(0, 0, 8), most_tokens=8), y)
            with pytest.raises(InvalidArgument, match="x: expected at most most_tokens=7 tokens, got 8"):
                call(tokens_of(0, 0, 8), most_tokens=7)


def test_gradients_are_those_without_a_promise():
    def gradient(**how: Any) -> torch.Tensor:
        x = torch.from_numpy(tokens_of(0, 0, 8)).requires_grad_()
        given = {name: torch.from_numpy(each).requires_grad_() for name, each in weights().items()}
        flashmoe.moe(x, **given, top_k=K, **how).sum().backward()
        return torch.cat([each.grad.flatten() for each in (x, *given.values())])

    assert torch.equal(gradient(most_tokens=8), gradient())
