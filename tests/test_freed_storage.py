"""PyTorch tensors whose memory was freed or cut short, while their shape stayed: a call's error names such a tensor."""

from __future__ import annotations

from typing import Any

import flashmoe
import numpy as np
import pytest
from flashmoe.quantize import quantize_weights
from processes import processes  # noqa: F401  (a fixture)

torch = pytest.importorskip("torch")

T, H, I, E, K = 20, 16, 12, 4, 2
LIMITS = {
    "max_tokens": 32,
    "hidden": H,
    "intermediate": I,
    "experts": E,
    "top_k": K,
    "processors": 1,
    "shared_intermediate": I,
}


def layer(**changes: tuple[int, ...] | None) -> dict[str, Any]:
    """Random tensors of a layer. `changes` gives tensors other shapes, adds tensors, or leaves one out (None)."""
    shapes = {"x": (T, H), "gate_up_proj": (E, 2 * I, H), "down_proj": (E, H, I), "router": (E, H), **changes}
    return {name: torch.randn(shape) * 0.1 for name, shape in shapes.items() if shape is not None}


def with_biases() -> dict[str, Any]:
    biases = {"router_bias": (E,), "choice_bias": (E,), "gate_up_bias": (E, 2 * I), "down_bias": (E, H)}
    return layer(**biases) | {
        "load": torch.zeros(E, dtype=torch.int64),
        "router_logits": torch.zeros(T, E),
    }


def with_shared_expert() -> dict[str, Any]:
    return layer(shared_gate_up=(2 * I, H), shared_down=(H, I), shared_gate=(1, H))


def with_given_routing() -> dict[str, Any]:
    routing = {"topk_ids": torch.arange(T * K).reshape(T, K) % E, "topk_weights": torch.ones(T, K)}
    return layer(router=None) | routing


def quantised() -> dict[str, Any]:
    made = layer()
    for name in ("gate_up_proj", "down_proj"):
        weights, scales = quantize_weights(made[name].numpy())
        made[name] = torch.from_numpy(weights.view(np.uint8)).clone().view(torch.float8_e4m3fn)
        made[name.replace("_proj", "_scale")] = torch.from_numpy(scales).clone()
    return made


LAYERS = (with_biases, with_shared_expert, with_given_routing, quantised)
CASES = [
    (make, name) for i, make in enumerate(LAYERS) for name in make() if not any(name in each() for each in LAYERS[:i])
] + [(quantised, "gate_up_proj")]


def called(ctx: flashmoe.Context, tensors: dict[str, Any]) -> Any:
    return flashmoe.moe(ctx, **tensors, top_k=K if "router" in tensors else None)


def said(call: Any) -> str:
    try:
        call()
    except flashmoe.InvalidArgument as error:
        return str(error)
    return "no error"


def forward(pipe: Any, make: Any, name: str, left: int, trains: bool) -> None:
    """Sends the error of a call whose tensor `name` has only `left` bytes of memory. Then sends whether the next call,
    for which the tensor has all its memory again, gives the right result."""
    tensors = make()
    if trains:
        tensors["x"].requires_grad_()
    with flashmoe.Context(**LIMITS, dtype="float32", weight_dtype=_weights_of(make)) as ctx:
        right = called(ctx, tensors)
        whole, storage = tensors[name].detach().clone(), tensors[name].untyped_storage()
        storage.resize_(left)
        pipe.send(said(lambda: called(ctx, tensors)))
        storage.resize_(whole.nbytes)
        with torch.no_grad():
            tensors[name].copy_(whole)
        pipe.send(torch.equal(called(ctx, tensors), right))


def _weights_of(make: Any) -> str | None:
    return "float8_e4m3fn" if make is quantised else None


@pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("left", [0, 16], ids=["freed", "cut short"])
@pytest.mark.parametrize(("make", "name"), CASES, ids=lambda each: getattr(each, "__name__", each))
def test_a_call(processes, make, name, left, trains):  # noqa: F811
    bytes_needed = make()[name].nbytes
    if left >= bytes_needed:
        left = bytes_needed - 1
    process = processes.start(forward, make, name, left, trains)
    assert f"{name}: expected {bytes_needed} bytes of storage" in (message := process.hear(60.0))
    assert f"got {left}" in message
    assert process.hear()


def backward(pipe: Any, make: Any, name: str) -> None:
    """Sends the error of a backward pass, if the memory of the tensor `name` was freed after the call."""
    tensors = make()
    for each in tensors.values():
        if each.is_floating_point() and each.dtype == torch.float32:
            each.requires_grad_()
    for each in ("choice_bias", "router_logits"):
        if each in tensors:
            tensors[each] = tensors[each].detach()
    with flashmoe.Context(**LIMITS, dtype="float32") as ctx:
        y = called(ctx, tensors)
        tensors[name].untyped_storage().resize_(0)
        pipe.send(said(y.sum().backward))


@pytest.mark.parametrize(
    ("make", "name"),
    [case for case in CASES if case[0] is not quantised and case[1] not in ("load", "router_logits", "choice_bias")],
    ids=lambda each: getattr(each, "__name__", each),
)
def test_a_backward_pass(processes, make, name):  # noqa: F811
    process = processes.start(backward, make, name)
    assert f"{name}: expected {make()[name].nbytes} bytes of storage" in process.hear(60.0)


def main_grad(pipe: Any) -> None:
    import flashmoe.nn

    with flashmoe.Context(**LIMITS, dtype="float32") as ctx:
        module = flashmoe.nn.MoE(ctx, H, I, E, K)
        module.main_grad = True
        for parameter in module.parameters():
            parameter.main_grad = torch.zeros_like(parameter)
        y = module(torch.randn(T, H))
        module.experts.down_proj.main_grad.untyped_storage().resize_(0)
        pipe.send(said(y.sum().backward))


def test_what_gradients_are_added_to(processes):  # noqa: F811
    message = processes.start(main_grad).hear(60.0)
    assert f"down_proj.main_grad: expected {4 * E * H * I} bytes of storage" in message


def test_parts_of_a_larger_storage():
    """A view of rows needs the storage only up to its own last row, and an empty view needs no storage."""
    whole = layer(x=(3 * T, H))
    storage = whole["x"].untyped_storage()
    inner, behind, none = (whole["x"][begin:end] for begin, end in ((T, 2 * T), (T + 1, 2 * T + 1), (2 * T, 2 * T)))
    with flashmoe.Context(**LIMITS, dtype="float32") as ctx:
        right = called(ctx, whole | {"x": inner})
        storage.resize_(4 * 2 * T * H)
        assert torch.equal(called(ctx, whole | {"x": inner}), right)
        got = said(lambda: called(ctx, whole | {"x": behind}))
        assert f"x: expected {4 * (2 * T + 1) * H} bytes of storage" in got
        storage.resize_(0)
        assert called(ctx, whole | {"x": none}).shape == (0, H)
