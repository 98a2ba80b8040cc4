"""A shared expert whose gate and up are two matrices. If the kernel can read both through one tensor map, it gets their
addresses; otherwise both are copied into one matrix."""

from __future__ import annotations

from typing import Any

import flashmoe
import pytest
import torch
from fake_gpu import SIZES, E, H, I, K, OnGpu, arguments, launched, on_gpu, prepared
from flashmoe.engines import cuda
from flashmoe.engines.base import Gradients
from flashmoe.spec import Options
from flashmoe.spec.tensors import Tensors

SHARED = 3
WIDTH = SHARED * I


@pytest.fixture
def wide():
    with flashmoe.Context(engine="cuda", **SIZES | {"shared_intermediate": WIDTH}) as context:
        yield context


def pair(between: int = 64, pitch: int = H, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    """Two matrices in one memory. The second begins `between` elements behind the end of the first."""
    memory = on_gpu(2 * WIDTH * pitch + between, dtype=dtype)
    first = memory[: WIDTH * pitch].view(WIDTH, pitch)[:, :H]
    return first, memory[WIDTH * pitch + between :].view(WIDTH, pitch)[:, :H]


def told(gate: torch.Tensor, up: torch.Tensor) -> dict[str, Any]:
    return {"shared_gate_up": gate, "shared_up": up, "shared_down": on_gpu(H, WIDTH)}


@pytest.mark.parametrize("tokens", [1, 100], ids=["few tokens", "more"])
@pytest.mark.parametrize("pitch", [H, H + 8])
def test_an_up_behind_its_gate_is_read_where_it_is(wide, pitch, tokens):
    gate, up = pair(pitch=pitch)
    flashmoe.moe(wide, **arguments(tokens), **told(gate, up))
    seen = launched()["shared_gate_up"]
    assert launched()["few"] == (tokens == 1)
    assert (seen["base"], seen["dims"]) == (gate.data_ptr(), [H, 8, 2, I // 8, SHARED])
    assert seen["strides"] == [2 * pitch, up.data_ptr() - gate.data_ptr(), 16 * pitch, 2 * pitch * I]
    assert seen["box"] == [64, 8, 2, 8, 1]


def test_they_may_have_their_rows_in_turn(wide):
    """Gates and ups may be the rows of one matrix in turn: a gate's row, then an up's row."""
    both = on_gpu(WIDTH, 2, H)
    flashmoe.moe(wide, **arguments(), **told(both[:, 0], both[:, 1]))
    seen = launched()["shared_gate_up"]
    assert (seen["base"], seen["strides"][:2]) == (both.data_ptr(), [4 * H, 2 * H])


def otherwise() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    first, second = pair()
    return {
        "the up before its gate": (second, first),
        "one matrix twice": (first, first),
        "rows further apart": (first, pair(pitch=H + 8)[1]),
    }


@pytest.mark.parametrize("how", otherwise())
def test_elsewhere_they_are_put_together(wide, how):
    """Each call copies both into one matrix, since their values may have changed. The layer is checked only once."""
    gate, up = otherwise()[how]
    call = arguments() | told(gate, up)
    for _ in range(2):
        flashmoe.moe(wide, **call)
        seen = launched()["shared_gate_up"]
        assert seen["base"] not in (gate.data_ptr(), up.data_ptr())
        assert seen["strides"] == [2 * H, 2 * H * WIDTH, 16 * H, 2 * H * I]
    assert list(prepared(wide).values()).count(None) == 1


def test_what_is_put_together_is_checked_before(wide):
    second, first = pair()
    for changed, message in (
        ({"interleaved": True}, "shared_up: expected none with interleaved"),
        ({"shared_up": second[:-8]}, rf"shared_up: expected \[Is={WIDTH}, H={H}\] bfloat16, got"),
        ({"shared_up": second.float().as_subclass(OnGpu)}, "shared_up: expected bfloat16, the type of x"),
        ({"shared_up": on_gpu(H, WIDTH).T}, "shared_up: expected rows without gaps"),
        ({"shared_up": on_gpu(WIDTH, H + 1)[:, 1:]}, "shared_up: expected rows that begin at multiples of 16 bytes"),
        ({"shared_up": torch.zeros(WIDTH, H, dtype=torch.bfloat16)}, "shared_up: expected a tensor of cuda:0"),
    ):
        with pytest.raises(flashmoe.InvalidArgument, match=message):
            flashmoe.moe(wide, **{**arguments(), **told(first, second), **changed})
    assert not prepared(wide)


def test_another_up_is_another_layer(wide):
    memory = on_gpu(3, WIDTH, H)
    call = arguments() | told(memory[0], memory[1])
    for count, up in ((1, 1), (1, 1), (2, 2), (2, 1)):
        flashmoe.moe(wide, **call | {"shared_up": memory[up]})
        assert launched()["shared_gate_up"]["strides"][1] == 2 * H * WIDTH * up
        assert len(prepared(wide)) == count


def test_layers_that_are_put_together_are_forgotten_too(wide, monkeypatch):
    monkeypatch.setattr(cuda, "_MOST_LAYERS", 3)
    for _ in range(4):
        second, first = pair()
        flashmoe.moe(wide, **arguments(), **told(first, second))
        assert len(prepared(wide)) <= 3


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("order", ["the up behind", "the up before"])
@pytest.mark.parametrize("trained", [("shared_gate_up", "shared_up"), ("shared_gate_up",), ("shared_up",)], ids=str)
def test_a_backward_pass(wide, trained, order, accumulates):
    """Gradients go to two tensors. For the ups, the kernel gets the address of a matrix whose second half is theirs."""
    gate, up = pair() if order == "the up behind" else pair()[::-1]
    tokens, options = 300, Options(top_k=K)
    tensors = Tensors(
        x=on_gpu(tokens, H),
        gate_up_proj=on_gpu(E, 2 * I, H),
        down_proj=on_gpu(E, H, I),
        router=on_gpu(E, H),
        **told(gate, up),
    )
    _, kept, counted = wide._engine.call_and_keep(tensors, options)
    given = {name: each for name, each in tensors._asdict().items() if each is not None} | {"y": on_gpu(tokens, H)}
    dtype = torch.float32 if accumulates else torch.bfloat16
    wanted = {name: on_gpu(WIDTH, H, dtype=dtype) for name in trained}
    wide._engine.backward(kept, counted, options, Gradients(given, wanted, accumulates))
    seen = launched()
    of_gates, of_ups = seen["options"][1], seen["shared_ups_gradient"] + WIDTH * H * dtype.itemsize
    assert [of_gates, of_ups][0 if trained[0] == "shared_gate_up" else 1] == wanted[trained[0]].data_ptr()
    if len(trained) == 2:
        assert (of_gates, of_ups) == tuple(wanted[name].data_ptr() for name in trained)
    assert of_gates and seen["shared_ups_gradient"] and of_gates != of_ups
    matrix = seen["shared_gate_up"]
    assert matrix["dims"] == [H, I, 2, 1, SHARED] and matrix["box"] == [64, 64, 1, 1, 1]
    apart = up.data_ptr() - gate.data_ptr() if order == "the up behind" else 2 * H * WIDTH
    assert [matrix["strides"][n] for n in (0, 1, 3)] == [2 * H, apart, 2 * H * I]
    assert (matrix["base"] == gate.data_ptr()) == (order == "the up behind")
