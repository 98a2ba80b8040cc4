"""A block of Transformers' Qwen3-MoE with its experts as ``batched_mm``, which copies each row's matrices."""

from __future__ import annotations

from ..layer import Layer
from ..run import Call
from . import transformers_grouped

MOST_BYTES = 4 << 30
"""Of the copies: a matrix for each (token, k)."""


def lacks(layer: Layer) -> str | None:
    if reason := transformers_grouped.lacks(layer):
        return reason
    copies = layer.sizes.tokens * layer.top_k * layer.w1[0].nbytes
    return f"it would copy {copies >> 30} GiB of matrices" if copies > MOST_BYTES else None


def call(layer: Layer) -> Call:
    return transformers_grouped.block(layer, "batched_mm")
