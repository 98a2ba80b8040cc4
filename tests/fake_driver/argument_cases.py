"""Arguments that are refused before anything is launched."""

from __future__ import annotations

import flashmoe
import numpy as np
import pytest
import torch
from fake_gpu import SIZES, E, H, K, arguments, freed, given, launched, on_gpu, sparse
from flashmoe.contexts.context import run_backward
from flashmoe.engines.base import Gradients
from flashmoe.spec import Options
from flashmoe.spec.tensors import Tensors


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: arguments(x=torch.zeros(9, H, dtype=torch.bfloat16)), "x: expected a tensor of cuda:0, .* got cpu"),
        (lambda: arguments(x=np.zeros((9, H), np.float32)), "x: expected .* a PyTorch one, got ndarray"),
        (lambda: arguments(down_proj=None), "down_proj: expected .* got NoneType"),
        (lambda: arguments(router=on_gpu(E, H, dtype=torch.float16)), "router: expected bfloat16, the type of x"),
        (lambda: arguments(x=on_gpu(9, H + 1)[:, 1:]), "x: expected rows that begin at multiples of 16 bytes"),
        (lambda: arguments(x=on_gpu(H, 16).T), "x: expected rows without gaps"),
        (lambda: arguments(router=on_gpu(E, 2 * H)[:, ::2]), "router: expected rows without gaps"),
        (
            lambda: arguments(x=torch._neg_view(on_gpu(16, H))),
            "x: expected values in memory, got a view that negates them",
        ),
        (lambda: arguments(x=sparse(16, H)), "x: expected a dense tensor, got one of layout torch.sparse_coo"),
        (lambda: arguments(router=sparse(E, H)), "router: expected a dense tensor, got one of layout"),
        (lambda: arguments(router_bias=on_gpu(2 * E)[::2]), "router_bias: expected a contiguous tensor"),
        (lambda: arguments(router=None), "router: expected a router, or topk_ids and topk_weights, got none"),
        (lambda: arguments(activation="tanh"), "activation: expected one of"),
        (lambda: arguments(activation=["relu"]), "activation: expected one of"),
        (lambda: arguments(return_mode="reduced"), "return_mode: expected 'direct', the context's"),
        (lambda: arguments(capacity_factor=-1), "capacity_factor: expected"),
        (lambda: given(topk_ids=on_gpu(100, K, dtype=torch.int16)), "topk_ids: expected .* int32 or int64"),
        (lambda: given(topk_weights=on_gpu(99, K, dtype=torch.float32)), "topk_weights: expected"),
        (
            lambda: arguments(gate_up_proj=on_gpu(E, 108, H), down_proj=on_gpu(E, H, 54)),
            r"down_proj: expected I a multiple of 8 \(16-byte rows for the copy engine\), got 54",
        ),
    ],
)
def test_refused_before_the_launch(ctx, make, message):
    with pytest.raises(flashmoe.InvalidArgument, match=message):
        flashmoe.moe(ctx, **make())
    with pytest.raises(flashmoe.InvalidArgument, match=message):  # again, since it is not stored as a known layer
        flashmoe.moe(ctx, **make())


@pytest.mark.parametrize("left", [0, 100])
@pytest.mark.parametrize(
    ("name", "make"),
    [
        *[(name, arguments) for name in ("x", "gate_up_proj", "down_proj", "router")],
        ("router_bias", lambda: arguments(router_bias=on_gpu(8 * E)[:E])),
        ("topk_ids", given),
        ("topk_weights", given),
        ("load", lambda: arguments(load=on_gpu(E, dtype=torch.int64))),
        ("router_logits", lambda: arguments(router_logits=on_gpu(100, E, dtype=torch.float32))),
        ("shared_down", lambda: arguments(shared_gate_up=on_gpu(128, H), shared_down=on_gpu(H, 64))),
    ],
)
def test_memory_that_was_freed_between_two_calls(name, make, left):
    """The second call finds the known layer, but still notices the freed memory, and launches nothing."""
    called = make()
    with flashmoe.Context(engine="cuda", **SIZES, shared_intermediate=64) as ctx:
        flashmoe.moe(ctx, **called)
        before = launched()
        freed(called[name], left if left < called[name].nbytes else called[name].nbytes - 1)
        with pytest.raises(flashmoe.InvalidArgument, match=f"{name}: expected [0-9]* bytes of storage"):
            flashmoe.moe(ctx, **called)
        assert launched() == before


@pytest.mark.parametrize("name", ["x", "gate_up_proj", "down_proj", "router", "y"])
def test_memory_that_was_freed_before_the_backward_pass(ctx, name):
    given = {key: each for key, each in arguments().items() if key != "top_k"}
    tensors, options = Tensors(**given), Options(top_k=K)
    kept, counted = ctx._engine.call_and_keep(tensors, options)[1:]
    before, given["y"] = launched(), on_gpu(100, H)
    wanted = {"x": on_gpu(100, H)}
    freed(given[name])
    with pytest.raises(flashmoe.InvalidArgument, match=f"{name}: expected [0-9]* bytes of storage"):
        run_backward(ctx, kept, counted, options, Gradients(given, wanted, False))
    assert launched() == before
