"""The shapes of published MoE layers, and random layers of those shapes.

The shapes are real; the weights and the tokens made here are random. Routing is always a plain softmax over
all experts followed by top-k; where a model routes otherwise, `ModelShape.differs` says what is not emulated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import NormalDist

import ml_dtypes
import numpy as np

from .checkpoint import MoELayer
from .errors import InvalidArgument

DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
"""The dtypes of the operator, by name."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes of one MoE layer of a published model."""

    name: str
    """As `find` takes it: lower case."""
    hidden: int
    """H."""
    intermediate: int
    """I, of one routed expert."""
    experts: int
    """E, routed experts only."""
    top_k: int
    """K."""
    activation: str = "swiglu"
    """``swiglu`` has a gate; ``gelu`` has none."""
    renormalize: bool = True
    """Whether a token's K weights are scaled to sum to one."""
    shared: str = ""
    """The dense experts that the model adds for every token; not part of the layers made here."""
    differs: str = ""
    """What the model does besides or instead of softmax, top-k and the activation; not emulated."""

    @property
    def weights(self) -> int:
        """Elements of the router and of all routed experts."""
        matrices = 3 if self.activation == "swiglu" else 2
        return self.experts * self.hidden * (1 + matrices * self.intermediate)


MAX_SKEW = 16.0
"""Long before it, all tokens have the same experts."""

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
"""Published shapes; all but ``flashmoe-paper`` (the source paper's benchmark) and ``qwen2-moe`` (a common
benchmark with Qwen1.5-MoE's sizes and 64 experts) are those of a model one can download."""


def find(name: str) -> ModelShape:
    """The shape of that name, upper or lower case. Raises `InvalidArgument` with the names there are."""
    for shape in MODELS:
        if shape.name == name.lower():
            return shape
    known = ", ".join(shape.name for shape in MODELS)
    raise InvalidArgument(f"model: expected one of {known}; got {name!r}")


def scaled(shape: ModelShape, scale: float) -> ModelShape:
    """`shape` with H and I times `scale`, to the nearest multiple of 8 and at least 8; E and K as they are.

    Routing and its imbalance stay those of the full model while the arithmetic shrinks with the square.
    """
    if not 0 < scale <= 1:
        raise InvalidArgument(f"scale: expected 0 < scale <= 1, got {scale}")

    def shrink(size: int) -> int:
        return max(8, 8 * round(size * scale / 8))

    return replace(shape, hidden=shrink(shape.hidden), intermediate=shrink(shape.intermediate))


def random_layer(
    shape: ModelShape, tokens: int, *, seed: int = 0, skew: float = 0.0, dtype: str = "bfloat16"
) -> tuple[MoELayer, np.ndarray]:
    """A layer with random weights, and hidden states [tokens, H] that route through it with a given skew.

    `skew` s: the expert of popularity rank j = 1..E is chosen by a share of the tokens proportional to
    j**-s, at most by all of them; the shares add up to K. So s = 0 loads every expert alike, s = 1 is Zipf's
    law, and the larger s, the heavier the first. Which expert has which rank is random. The loads come within
    a few percent of that (they are fitted to the tokens), up to sampling noise.

    Weights have variance 1 / (columns), hidden states about 1, so that results are of order 1. The same
    arguments give the same bits.
    """
    if dtype not in DTYPES:
        raise InvalidArgument(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    rng = np.random.default_rng(seed)
    router, hidden_states = router_and_tokens(shape, tokens, skew, DTYPES[dtype], rng)
    rows = shape.intermediate * (2 if shape.activation == "swiglu" else 1)
    gate_up_proj = np.empty((shape.experts, rows, shape.hidden), DTYPES[dtype])
    down_proj = np.empty((shape.experts, shape.hidden, shape.intermediate), DTYPES[dtype])
    for expert in range(shape.experts):  # one at a time: float32 copies of all would double the memory
        gate_up_proj[expert] = _normal(rng, gate_up_proj.shape[1:])
        down_proj[expert] = _normal(rng, down_proj.shape[1:])
    layer = MoELayer(
        name=shape.name,
        router=router,
        gate_up_proj=gate_up_proj,
        down_proj=down_proj,
        top_k=shape.top_k,
        renormalize=shape.renormalize,
        activation=shape.activation,
    )
    return layer, hidden_states


def target_shares(experts: int, top_k: int, skew: float) -> np.ndarray:
    """float64 [E], descending: the share of tokens that choose the expert of popularity rank 1..E; sum K."""
    law = np.arange(1, experts + 1, dtype=np.float64) ** -skew
    # A token chooses an expert once at most: who would get more than every token gets every token, and the
    # law's proportions hold among the rest.
    full = 0
    while full < top_k and law[full] * (top_k - full) > law[full:].sum():
        full += 1
    shares = np.ones(experts)
    shares[full:] = law[full:] * ((top_k - full) / law[full:].sum())
    return shares


def router_and_tokens(
    shape: ModelShape, tokens: int, skew: float, dtype: np.dtype, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Router [E, H] and hidden states [tokens, H] whose routing has the target shares.

    Every hidden state has the same component along one direction of +-1 signs, and the rest of it is random
    and orthogonal to that. A router row's component along the direction is then a constant added to the
    expert's logits: a bias per expert, by means of weights alone.

    Raises `InvalidArgument` for a skew outside [0, MAX_SKEW].
    """
    if not 0 <= skew <= MAX_SKEW:
        raise InvalidArgument(f"skew: expected a number in [0, {MAX_SKEW:g}], got {skew}")
    direction = rng.choice(np.float32([-1, 1]), shape.hidden)
    random_part = _orthogonal(rng.standard_normal((tokens, shape.hidden), np.float32), direction)
    hidden_states = (random_part + 0.5 * direction).astype(dtype)
    router = _orthogonal(_normal(rng, (shape.experts, shape.hidden)), direction)

    target = rng.permutation(target_shares(shape.experts, shape.top_k, skew))
    sample = hidden_states[:2048].astype(np.float32)
    bias = _fit_bias(sample @ router.T, target, shape.top_k)
    router += bias[:, None] * direction * (2 / shape.hidden)  # times 0.5 * direction . direction = the bias
    return router.astype(dtype), hidden_states


def _fit_bias(logits: np.ndarray, target: np.ndarray, top_k: int) -> np.ndarray:
    """float32 [E]: what to add to `logits` [T, E] so that a share target[e] of the tokens chooses expert e.

    The logits are about normal, so a share translates to a bias through the normal quantile (probit); a few
    corrections by the difference of the quantiles, wanted minus seen, make up for what that neglects.
    """
    tokens, experts = logits.shape
    wanted = _probit(target, tokens)
    if top_k >= experts or tokens == 0:
        return np.zeros(experts, np.float32)
    spread = logits.std()
    bias = np.zeros(experts, np.float32)
    for _ in range(20):
        chosen = np.argpartition(logits + bias, experts - top_k, axis=1)[:, experts - top_k :]
        seen = np.bincount(chosen.ravel(), minlength=experts) / tokens
        bias += (0.7 * spread * (wanted - _probit(seen, tokens))).astype(np.float32)
    return bias


def _probit(shares: np.ndarray, tokens: int) -> np.ndarray:
    """The normal quantile of shares, kept half a token away from none and all."""
    margin = 0.5 / max(tokens, 1)
    quantile = NormalDist().inv_cdf
    return np.array([quantile(share) for share in np.clip(shares, margin, 1 - margin)])


def _orthogonal(rows: np.ndarray, direction: np.ndarray) -> np.ndarray:
    """`rows` [N, H] without their component along `direction` [H], whose elements are +-1."""
    return rows - np.outer(rows @ direction / len(direction), direction)


def _normal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """float32 normal numbers of variance 1 / (last dimension)."""
    return rng.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5)
