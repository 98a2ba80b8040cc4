"""Names calls in what profilers of PyTorch show."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def is_profiled() -> bool:
    """Whether a profiler of PyTorch is active. Each call asks, and a context manager that does nothing would take the
    host ten times as long as this."""
    torch = sys.modules.get("torch")
    return torch is not None and torch._C._autograd._profiler_enabled()


def named(name: str, call: Callable[..., Any], *args: Any) -> Any:
    """What `call` returns for `args`. A profiler shows it as a range of that name: `torch.profiler` on the host, and as
    a range of NVTX within ``torch.autograd.profiler.emit_nvtx``."""
    import torch

    with torch.autograd.profiler.record_function(name):
        return call(*args)
