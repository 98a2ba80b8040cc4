"""Faults that the kernel reports: who learns of them, and when."""

from __future__ import annotations

import flashmoe
import pytest
from fake_gpu import SIZES, E, arguments, driver


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ((6, 5, 0, 0), flashmoe.InvalidArgument, "router: expected finite logits, .* token 5 of rank 0"),
        ((7, 5, 0, 3), flashmoe.InvalidArgument, "got expert 3 twice for token 5"),
        ((8, 5, E, 2**64 - 1), flashmoe.InvalidArgument, r"ids in \[0, E=16\), got -1 for token 5"),
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
            flashmoe.moe(ctx, **arguments())  # does not wait, so does not know
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
