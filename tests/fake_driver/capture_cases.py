"""Calls while a CUDA graph is captured."""

from __future__ import annotations

import flashmoe
import pytest
from fake_gpu import E, H, I, arguments, driver, launched, on_gpu


def test_capture(ctx):
    """A call like an earlier one is captured. A call that must wait for the device, or is wrong, raises an error."""
    args = arguments()
    flashmoe.moe(ctx, **args)
    flashmoe.moe(ctx, **arguments(), trace=True)
    driver.fake_capture(1)
    flashmoe.moe(ctx, **{**args, "x": on_gpu(17, H)})
    assert launched()["tokens"] == 17
    flashmoe.moe(ctx, **arguments(18))  # new tensors are another layer, but have the same kernel
    assert launched()["tokens"] == 18
    for refused in (
        lambda: flashmoe.moe(ctx, **args, trace=True),
        lambda: flashmoe.moe(ctx, **arguments(router=on_gpu(E - 1, H), placement=[0] * (E - 1))),
        lambda: ctx.last_call,
        ctx.synchronize,
    ):
        with pytest.raises(flashmoe.FlashMoEError, match=r"^capture: |^gate_up_proj: "):
            refused()
    driver.fake_capture(0)
    assert ctx.last_call.tokens == 18


def test_a_kernel_is_not_loaded_during_capture(ctx):
    driver.fake_capture(1)
    with pytest.raises(flashmoe.FlashMoEError, match="capture: loading a kernel"):
        flashmoe.moe(ctx, **arguments())
    driver.fake_capture(0)
    flashmoe.moe(ctx, **arguments())


def test_a_placement_is_not_uploaded_during_capture(ctx):
    flashmoe.moe(ctx, **arguments())
    fewer = arguments(router=on_gpu(E - 1, H), gate_up_proj=on_gpu(E - 1, 2 * I, H), down_proj=on_gpu(E - 1, H, I))
    driver.fake_capture(1)
    with pytest.raises(flashmoe.FlashMoEError, match="capture: uploading a placement"):
        flashmoe.moe(ctx, **fewer)
    driver.fake_capture(0)
    flashmoe.moe(ctx, **fewer)
    assert launched()["owner_base"] == [0, E - 1]
