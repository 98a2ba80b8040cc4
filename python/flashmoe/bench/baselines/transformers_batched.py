"""The experts of Transformers' Qwen3-MoE by ``batched_mm``, which copies an expert's matrices for each (token, k)."""

from __future__ import annotations

from dataclasses import replace

from ..layer import Layer, Sizes
from ..run import Call, Run
from . import transformers_grouped

MOST_BYTES = 4 << 30
"""The most bytes of matrices that may be copied at once: the larger of an expert's matrices, for each (token, k)."""


def too_many_copies(run: Run, sizes: Sizes) -> str | None:
    each = 2 * sizes.intermediate * sizes.hidden * (4 if sizes.dtype == "float32" else 2)
    copies = sizes.tokens * sizes.top_k * each
    return f"it would copy {copies >> 30} GiB of matrices" if copies > MOST_BYTES else None


NEEDS = replace(transformers_grouped.NEEDS, further=too_many_copies)


def call(layer: Layer) -> Call:
    return transformers_grouped.block(layer, "batched_mm")
