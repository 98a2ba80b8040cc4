"""The names by which PyTorch's profilers show calls."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def is_profiled() -> bool:
    """Whether a profiler of PyTorch is active. Each call asks this, and uses `named` only if so, because a context
    manager takes the host ten times as long as this question, even if it does nothing."""
    torch = sys.modules.get("torch")
    return torch is not None and torch._C._autograd._profiler_enabled()


def named(name: str, call: Callable[..., Any], *args: Any) -> Any:
    """What `call` returns for `args`. Profilers show the call as a range of that name: `torch.profiler` on the host,
    and within ``torch.autograd.profiler.emit_nvtx`` those that show ranges of NVTX."""
    import torch

    with torch.autograd.profiler.record_function(name):
        return call(*args)
