"""The shapes of layers that are measured."""

from __future__ import annotations

SHAPES = {  # H, I, E, K, activation, token counts
    "paper-E64": (2048, 2048, 64, 2, "gelu", (16384,)),
    "paper-E8": (2048, 2048, 8, 2, "gelu", (16384,)),
    "paper-E16": (2048, 2048, 16, 2, "gelu", (16384,)),
    "paper-E32": (2048, 2048, 32, 2, "gelu", (16384,)),
    "paper-E128": (2048, 2048, 128, 2, "gelu", (16384,)),
    "qwen3-30b": (2048, 768, 128, 8, "swiglu", (8192, 1024, 64, 1)),
    "mixtral": (4096, 14336, 8, 2, "swiglu", (8192,)),
    "qwen2-moe": (2048, 1408, 64, 4, "swiglu", (8192,)),
    "phi3.5": (4096, 6400, 16, 2, "swiglu", (8192,)),
    "deepseek-v3": (7168, 2048, 256, 8, "swiglu", (4096,)),
    "deepseek-v4-flash": (4096, 2048, 256, 6, "swiglu", (4096, 1024, 64)),
    # Shapes whose rows take about as long on the link between GPUs as in the GEMMs.
    "qwen3-next": (2048, 512, 512, 10, "swiglu", (8192,)),
    "olmoe": (2048, 1024, 64, 8, "swiglu", (8192,)),
    "lfm2": (2048, 1792, 32, 4, "swiglu", (8192,)),
    "minimax-m2": (3072, 1536, 256, 8, "swiglu", (4096,)),
    # What one rank computes if each expert is cut into four slices, one on each of four ranks.
    "qwen3-30b-slice": (2048, 192, 128, 8, "swiglu", (8192,)),
    "mixtral-slice": (4096, 3584, 8, 2, "swiglu", (8192,)),
}
SMALL = {"small": (64, 128, 8, 2, "swiglu", (256,))}
"""A layer that two CPU cores compute within a second."""

TRAINED = ("qwen3-30b", "mixtral", "qwen2-moe", "phi3.5", "paper-E64")
"""The shapes whose backward passes are measured, each with the first of its token counts."""
