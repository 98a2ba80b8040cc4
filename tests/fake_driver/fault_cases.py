"""Faults that the kernel reports: who learns of them, and when."""

from __future__ import annotations

import flashmoe
import pytest
import torch
from fake_gpu import SIZES, E, H, I, K, arguments, driver
from flashmoe.contexts.growing import Shape, growing_context
from flashmoe.pytorch import operator
from flashmoe.spec import Options
from flashmoe.spec.tensors import Tensors


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ((4, 0, 0, 0), flashmoe.PeerTimeout, "rank 0 holds up call 3: .* waited 30 s"),
    ],
)
@pytest.mark.parametrize("where", ["next call", "synchronize", "last_call", "trace"])
def test_faults(fault, error, message, where):
    with flashmoe.Context(engine="cuda", **SIZES) as ctx:
        driver.fake_fault(*fault)
        if where == "trace":
            with pytest.raises(error, match=message):
                flashmoe.moe(ctx, **arguments(), trace=True)
        else:
            flashmoe.moe(ctx, **arguments())  # does not wait for the kernel, so does not know of the fault
            with pytest.raises(error, match=message):
                if where == "next call":
                    flashmoe.moe(ctx, **arguments())
                elif where == "synchronize":
                    ctx.synchronize()
                else:
                    _ = ctx.last_call
        for again in (lambda: flashmoe.moe(ctx, **arguments()), ctx.synchronize):
            with pytest.raises(flashmoe.GroupError, match="an earlier call failed"):
                again()


@pytest.mark.parametrize("captures", [False, True])
def test_a_growing_context_goes_on_behind_a_fault(monkeypatch, captures):
    """The call that learns of the fault raises it; the next call gets a new context. A captured context is kept."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures and capturing)
    context, capturing = growing_context(Shape(0, "bfloat16", H, I, E, K)), False
    tensors = Tensors(**{name: each for name, each in arguments().items() if name != "top_k"})

    def call() -> None:
        operator.call(context.number, tensors, Options(top_k=K))

    call()
    failed, capturing = context.with_room_for(100), True
    call()
    capturing = False
    driver.fake_fault(4, 0, 0, 0)
    call()
    with pytest.raises(flashmoe.PeerTimeout, match="rank 0 holds up call"):
        call()
    call()
    fresh = context.with_room_for(100)
    assert fresh is not failed and context._captured == [failed] * captures
    call()
    assert context.with_room_for(100) is fresh
    context._context = None
    context._captured.clear()
    fresh.close()
    failed.close()


NOTES = {
    "logits": ((1, 5, 0), flashmoe.BadRow, "router: .* NaN or infinity for token 5 of rank 0"),
    "range": ((2, 5, -2), flashmoe.InvalidArgument, r"ids in \[0, E=16\), or -1 for none, got -2 for token 5"),
    "twice": ((3, 5, 3), flashmoe.InvalidArgument, "got expert 3 twice for token 5"),
}


@pytest.mark.parametrize("what", NOTES)
@pytest.mark.parametrize("where", ["next call", "synchronize", "last_call", "trace"])
def test_rows_that_are_errors(what, where):
    """The error is raised once. A later call that raises it is launched all the same. The context stays usable."""
    note, error, message = NOTES[what]
    with flashmoe.Context(engine="cuda", **SIZES) as ctx:
        driver.fake_note(*note)
        if where == "trace":
            with pytest.raises(error, match=message):
                flashmoe.moe(ctx, **arguments(), trace=True, strict=True)
        else:
            flashmoe.moe(ctx, **arguments(), strict=True)  # does not wait for the kernel, so does not know of the row
            with pytest.raises(error, match=message):
                if where == "next call":
                    flashmoe.moe(ctx, **arguments())
                elif where == "synchronize":
                    ctx.synchronize()
                else:
                    _ = ctx.last_call
        for again in (lambda: flashmoe.moe(ctx, **arguments()), ctx.synchronize, lambda: ctx.last_call.topk_ids):
            again()


def test_bad_rows_that_are_no_errors():
    with flashmoe.Context(engine="cuda", **SIZES) as ctx:
        driver.fake_note(1, 5, 0)
        flashmoe.moe(ctx, **arguments())
        ctx.synchronize()
