"""Functions whose results ``torch.compile`` takes for constants of the code that it makes."""

from __future__ import annotations

from typing import Any

import torch

from ..contexts.growing import Shape
from ..contexts.kept import kept_context


@torch.compiler.assume_constant_result
def kept_number(*shape: Any) -> int:
    """The number of the kept context of that `Shape`, which is the same in every process."""
    return kept_context(Shape(*shape)).number
