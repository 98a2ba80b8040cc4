"""Names calls in what profilers of PyTorch show."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

_NOTHING = contextlib.nullcontext()


def named(name: str) -> contextlib.AbstractContextManager[Any]:
    """Encloses what a profiler shows as a range of that name: `torch.profiler` on the host, and as a range of NVTX
    within ``torch.autograd.profiler.emit_nvtx``. Without a profiler it encloses nothing."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.autograd._profiler_enabled():
        return _NOTHING
    return torch.autograd.profiler.record_function(name)
