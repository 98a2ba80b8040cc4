"""The shapes of published MoE layers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..errors import InvalidArgument
from ..spec import GATED


@dataclass(frozen=True)
class ModelShape:
    """The sizes of one MoE layer of a published model."""

    name: str
    """The name that `find` takes, in lower case."""
    hidden: int
    """H, the hidden size."""
    intermediate: int
    """I, of one routed expert."""
    experts: int
    """E, the number of routed experts."""
    top_k: int
    """K, the number of experts that a token chooses."""
    activation: str = "swiglu"
    """``swiglu`` has a gate; ``gelu`` has none."""
    renormalize: bool = True
    """Whether a token's K weights are scaled to sum to one."""
    shared: str = ""
    """The dense experts that the model adds for every token. The layers made here do not have them."""
    differs: str = ""
    """What the model does besides or instead of softmax, top-k and the activation. It is not emulated."""

    @property
    def weights(self) -> int:
        """Elements of the router and of all routed experts."""
        matrices = 3 if self.activation in GATED else 2
        return self.experts * self.hidden * (1 + matrices * self.intermediate)


_SIGMOID = "sigmoid scores, a per-expert bias on the choice"
_GPT_OSS = "bias on router and experts, SwiGLU clamped and with 1 added to the up half"
_LLAMA4 = "sigmoid weight, applied to the expert's input instead of its output"

MODELS = (
    ModelShape("flashmoe-paper", 2048, 2048, 64, 2, activation="gelu"),
    ModelShape("mixtral-8x7b", 4096, 14336, 8, 2),
    ModelShape("qwen1.5-moe-a2.7b", 2048, 1408, 60, 4, renormalize=False, shared="1 gated, I=5632"),
    ModelShape("qwen2-moe", 2048, 1408, 64, 4, renormalize=False, shared="1 gated, I=5632"),
    ModelShape("phi-3.5-moe", 4096, 6400, 16, 2, differs="each expert's weight from a thresholded softmax"),
    ModelShape("olmoe", 2048, 1024, 64, 8, renormalize=False),
    ModelShape("qwen3-30b-a3b", 2048, 768, 128, 8),
    ModelShape("qwen3-235b-a22b", 4096, 1536, 128, 8),
    ModelShape("qwen3-next", 2048, 512, 512, 10, shared="1 gated, I=512"),
    ModelShape(
        "deepseek-v3",
        7168,
        2048,
        256,
        8,
        shared="1, I=2048",
        differs=f"{_SIGMOID}, experts chosen in groups, weights scaled by 2.5",
    ),
    ModelShape("gpt-oss-20b", 2880, 2880, 32, 4, differs=_GPT_OSS),
    ModelShape("gpt-oss-120b", 2880, 2880, 128, 4, differs=_GPT_OSS),
    ModelShape("glm-4.5-air", 4096, 1408, 128, 8, shared="1, I=1408", differs=_SIGMOID),
    ModelShape("kimi-k2", 7168, 2048, 384, 8, shared="1, I=2048", differs=f"{_SIGMOID}, weights scaled by 2.827"),
    ModelShape("llama-4-scout", 5120, 8192, 16, 1, shared="1, I=8192", differs=_LLAMA4),
    ModelShape("llama-4-maverick", 5120, 8192, 128, 1, shared="1, I=8192", differs=_LLAMA4),
)
"""Published shapes. Each is the shape of a model that one can download, except ``flashmoe-paper`` (the benchmark of the
paper on FlashDMoE) and ``qwen2-moe`` (a common benchmark with Qwen1.5-MoE's sizes and 64 experts)."""


def find(name: str) -> ModelShape:
    """The shape of that name, in upper or lower case. Raises `InvalidArgument`, which lists the known names."""
    for shape in MODELS:
        if shape.name == name.lower():
            return shape
    known = ", ".join(shape.name for shape in MODELS)
    raise InvalidArgument(f"model: expected one of {known}; got {name!r}")


def scaled(shape: ModelShape, scale: float) -> ModelShape:
    """`shape` with H and I times `scale`, to the nearest multiple of 8 and at least 8. E and K do not change.

    Routing and its imbalance stay those of the full model, while the arithmetic shrinks with the square of `scale`.
    """
    if not 0 < scale <= 1:
        raise InvalidArgument(f"scale: expected 0 < scale <= 1, got {scale}")

    def shrink(size: int) -> int:
        return max(8, 8 * round(size * scale / 8))

    return replace(shape, hidden=shrink(shape.hidden), intermediate=shrink(shape.intermediate))
