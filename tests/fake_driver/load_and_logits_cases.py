"""What a call writes beside its result: the load of each expert, and the router's logits."""

from __future__ import annotations

import flashmoe
import numpy as np
import pytest
import torch
from fake_gpu import SIZES, E, arguments, driver, given, launched, on_gpu, sparse
from flashmoe.contexts import context as contexts
from flashmoe.engines import cuda


@pytest.mark.parametrize("tokens", [3, 100], ids=["few tokens", "many"])
def test_what_a_call_writes_to(ctx, tokens):
    """Each call writes to the `load` and `router_logits` that it was given, and to none if it was given none."""
    args = arguments(tokens)
    for _ in range(2):
        load, logits = on_gpu(E, dtype=torch.int64), on_gpu(tokens, E, dtype=torch.float32)
        for asked in ({"load": load}, {"router_logits": logits}, {"load": load, "router_logits": logits}, {}):
            flashmoe.moe(ctx, **args, **asked)
            written = {name: asked[name].data_ptr() if name in asked else 0 for name in ("load", "router_logits")}
            seen = launched()
            assert {name: seen[name] for name in written} == written
    flashmoe.moe(ctx, **given(tokens), load=load)
    assert launched()["load"] == load.data_ptr()
    flashmoe.moe(ctx, **arguments(tokens + 1), router_logits=on_gpu(tokens + 1, E, dtype=torch.float32))


@pytest.mark.parametrize("tokens", [3, 100], ids=["few tokens", "many"])
def test_calls_write_to_the_load_of_their_context(monkeypatch, tokens):
    """Unless a call is given a `load` of its own. Reading the context's load does not synchronise."""
    made = on_gpu(E, dtype=torch.int64)
    monkeypatch.setattr(contexts, "_zeros", lambda experts, device: made if (experts, device) == (E, 0) else None)
    monkeypatch.setattr(cuda.CudaEngine, "synchronize", None)
    with flashmoe.Context(engine="cuda", **SIZES, count_load=True) as ctx:
        for args in (arguments(tokens), given(tokens)):
            flashmoe.moe(ctx, **args)
            assert launched()["load"] == made.data_ptr()
        own = on_gpu(E, dtype=torch.int64)
        flashmoe.moe(ctx, **arguments(tokens), load=own)
        assert launched()["load"] == own.data_ptr()
        made[:] = 3
        load = ctx.load(clear=True)
        assert load.data_ptr() != made.data_ptr() and (load == 3).all() and not made.any()


WRONG_TO_WRITE_TO = [
    (lambda: {"load": on_gpu(E, dtype=torch.int32)}, r"load: expected \[E\] int64, got \[16\] int32"),
    (lambda: {"load": on_gpu(E + 1, dtype=torch.int64)}, r"load: expected \[E=16\].*, got \[17\]"),
    (lambda: {"load": on_gpu(2 * E, dtype=torch.int64)[::2]}, "load: expected .*contiguous.*, got .*strides"),
    (lambda: {"load": torch.zeros(E, dtype=torch.int64)}, "load: expected a tensor of cuda:0, .* got cpu"),
    (lambda: {"load": np.zeros(E, np.int64)}, r"load: expected \[E\] int64, a PyTorch one, got ndarray"),
    (lambda: {"router_logits": on_gpu(100, E)}, r"router_logits: expected \[T, E\] float32, got \[100, 16\] bfloat16"),
    (
        lambda: {"router_logits": on_gpu(99, E, dtype=torch.float32)},
        r"router_logits: expected \[T=100, E=16\].*, got \[99, 16\]",
    ),
    (
        lambda: {"router_logits": on_gpu(E, 100, dtype=torch.float32).T},
        "router_logits: expected .*contiguous.*, got .*strides",
    ),
    (lambda: {"router_logits": sparse(100, E)}, "router_logits: expected a dense tensor, got one of layout"),
]


@pytest.mark.parametrize("known", [False, True], ids=["another layer", "a known layer"])
@pytest.mark.parametrize(("wrong", "message"), WRONG_TO_WRITE_TO)
def test_what_cannot_be_written_to_is_refused_before_the_launch(ctx, wrong, message, known):
    args, asked = arguments(100), wrong()
    if known:
        good = {"load": on_gpu(E, dtype=torch.int64), "router_logits": on_gpu(100, E, dtype=torch.float32)}
        flashmoe.moe(ctx, **args, **{name: good[name] for name in asked})
    before = driver.fake_last_launch()
    with pytest.raises(flashmoe.InvalidArgument, match=message):
        flashmoe.moe(ctx, **args, **asked)
    assert driver.fake_last_launch() == before


def test_given_routing_has_no_logits(ctx):
    with pytest.raises(flashmoe.InvalidArgument, match="router_logits: expected router with it, got None"):
        flashmoe.moe(ctx, **given(100), router_logits=on_gpu(100, E, dtype=torch.float32))
