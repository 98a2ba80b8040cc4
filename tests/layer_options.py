"""What experts of published models have besides SwiGLU, for the tests of both engines."""

from __future__ import annotations

from typing import Any

CLAMPED = {"activation": "clamped_swiglu", "limit": 0.75, "alpha": 1.702, "up_offset": 1.0}

EXPERTS: dict[str, dict[str, Any]] = {
    "geglu": {"activation": "geglu"},
    "relu2": {"activation": "relu2"},
    "clamped": CLAMPED,
    "clamped, no limit": {"activation": "clamped_swiglu", "alpha": 0.5},
    "interleaved": {"interleaved": True},
    "weights on the input": {"weights_on_input": True},
}
