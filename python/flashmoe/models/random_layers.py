"""Random layers of given shapes, and tokens that route through them with a given skew."""

from __future__ import annotations

from statistics import NormalDist

import ml_dtypes
import numpy as np

from ..checkpoint import MoELayer
from ..errors import InvalidArgument
from ..spec import GATED
from .shapes import ModelShape

DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
"""The dtypes of the operator, by name."""

MAX_SKEW = 16.0
"""The largest skew. Even with a much smaller one, all tokens have the same experts."""


def random_layer(
    shape: ModelShape, tokens: int, *, seed: int = 0, skew: float = 0.0, dtype: str = "bfloat16"
) -> tuple[MoELayer, np.ndarray]:
    """A layer with random weights, and hidden states [tokens, H] that route through it with a given skew.

    `skew` s: the expert of popularity rank j = 1..E is chosen by a share of the tokens proportional to j**-s, at most
    by all of them; the shares add up to K. So s = 0 loads every expert alike, s = 1 is Zipf's law, and the larger s is,
    the more the first experts are loaded. Which expert has which rank is random. The loads come within a few percent of
    these shares (they are fitted to the tokens), up to sampling noise.

    Weights have variance 1 / (columns), hidden states about 1, so that results are of order 1. The same arguments give
    the same bits.
    """
    if dtype not in DTYPES:
        raise InvalidArgument(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    rng = np.random.default_rng(seed)
    router, hidden_states = router_and_tokens(shape, tokens, skew, DTYPES[dtype], rng)
    rows = shape.intermediate * (2 if shape.activation in GATED else 1)
    gate_up_proj = np.empty((shape.experts, rows, shape.hidden), DTYPES[dtype])
    down_proj = np.empty((shape.experts, shape.hidden, shape.intermediate), DTYPES[dtype])
    for expert in range(shape.experts):  # one at a time, because float32 copies of all weights would take much memory
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
    """float64 [E], descending: the share of tokens that choose the expert of popularity rank 1..E. The shares add up to
    K."""
    law = np.arange(1, experts + 1, dtype=np.float64) ** -skew
    # A token chooses an expert at most once. So an expert that would get more than every token gets every token, and
    # the law's proportions hold among the rest.
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

    Every hidden state has the same component along one direction, a vector of +-1 signs; the rest of it is random and
    orthogonal to this direction. So a router row's component along the direction adds a constant to the expert's
    logits: a bias for each expert, made by weights alone.

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
    router += bias[:, None] * direction * (2 / shape.hidden)  # so each token's 0.5 * direction adds the bias
    return router.astype(dtype), hidden_states


def _fit_bias(logits: np.ndarray, target: np.ndarray, top_k: int) -> np.ndarray:
    """float32 [E]: what to add to `logits` [T, E] so that a share target[e] of the tokens chooses expert e.

    The logits are about normal, so a share corresponds to a bias through the normal quantile (probit). This is only
    approximate, so the bias is corrected several times, by the difference of the quantiles of the wanted shares and of
    the shares seen so far.
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
    """The normal quantiles of `shares`. Shares of 0 and 1 have none, so shares are kept half a token away from both."""
    margin = 0.5 / max(tokens, 1)
    quantile = NormalDist().inv_cdf
    return np.array([quantile(share) for share in np.clip(shares, margin, 1 - margin)])


def _orthogonal(rows: np.ndarray, direction: np.ndarray) -> np.ndarray:
    """`rows` [N, H] without their component along `direction` [H], whose elements are +-1."""
    return rows - np.outer(rows @ direction / len(direction), direction)


def _normal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """float32 normal numbers of variance 1 / (last dimension)."""
    return rng.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5)
