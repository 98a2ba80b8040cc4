"""Which experts a token has, and with which weights."""

from __future__ import annotations

from typing import Unpack

import numpy as np

from ..spec.options import LayerOptions, Options

LEAST_SUM = 1e-20
"""What is added to the sum of sigmoids before it divides them."""


def router_logits(x: np.ndarray, router: np.ndarray, router_bias: np.ndarray | None = None) -> np.ndarray:
    """float64 [T, E]: router @ x[t] + router_bias."""
    logits = np.asarray(x, np.float64) @ np.asarray(router, np.float64).T
    return logits if router_bias is None else logits + np.asarray(router_bias, np.float64)


def scores(logits: np.ndarray, score: str = "softmax") -> np.ndarray:
    """float64 [T, E]: the softmax of logits [T, E] over all E experts, or the sigmoid of each logit."""
    if score == "sigmoid":
        return 1.0 / (1.0 + np.exp(-logits))
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    return exponentials / exponentials.sum(axis=1, keepdims=True)


def choice_values(
    logits: np.ndarray, *, choice_bias: np.ndarray | None = None, **options: Unpack[LayerOptions]
) -> np.ndarray:
    """float64 [T, E]: the values by which experts are chosen. These are their logits; with groups or `choice_bias`
    these are their scores plus that bias. They are -inf outside of the best groups, and where a logit is -inf."""
    rule = Options(**options)
    if rule.groups == 1 and choice_bias is None:
        return logits
    values = scores(logits, rule.score) + (0.0 if choice_bias is None else np.asarray(choice_bias, np.float64))
    values = np.where(np.isneginf(logits), -np.inf, values)
    by_group = values.reshape(len(values), rule.groups, values.shape[1] // rule.groups)
    of_group = np.sort(by_group, axis=2)[:, :, -2:].sum(axis=2)  # the two best of each group
    best = choose(of_group, rule.groups if rule.top_groups is None else rule.top_groups)
    kept = np.zeros(of_group.shape, bool)
    np.put_along_axis(kept, best, True, axis=1)
    return np.where(kept[:, :, None], by_group, -np.inf).reshape(values.shape)


def no_choice(logits: np.ndarray, choice_bias: np.ndarray | None = None) -> np.ndarray:
    """bool [T]: the tokens for which no choice can be made from their logits [T, E]: a logit, or an element of
    `choice_bias`, is NaN or +inf, or all logits are -inf."""
    bad = ~(logits < np.inf).all(axis=1) | np.isneginf(logits).all(axis=1)
    if choice_bias is not None:
        bad |= ~(np.asarray(choice_bias) < np.inf).all()
    return bad


def choose(values: np.ndarray, top_k: int) -> np.ndarray:
    """ids [T, K] of the top_k experts by `values` [T, E], such as logits; of equal values the lower ids."""
    return np.argsort(-values, axis=1, kind="stable")[:, :top_k]


def weigh(logits: np.ndarray, ids: np.ndarray, **options: Unpack[LayerOptions]) -> np.ndarray:
    """The weights [T, K] of the experts `ids` [T, K]: their scores by `logits` [T, E], divided by the sum of these K
    scores if `renormalize`, times `routed_scale`."""
    rule = Options(**options)
    if rule.score == "sigmoid":
        chosen = np.take_along_axis(scores(logits, rule.score), ids, axis=1)
        total = (chosen.sum(axis=1, keepdims=True) + LEAST_SUM) if rule.renormalize else 1.0
        return rule.routed_scale * chosen / total
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    chosen = np.take_along_axis(exponentials, ids, axis=1)
    return rule.routed_scale * chosen / (chosen if rule.renormalize else exponentials).sum(axis=1, keepdims=True)


def route(
    x: np.ndarray,
    router: np.ndarray,
    router_bias: np.ndarray | None,
    top_k: int,
    *,
    choice_bias: np.ndarray | None = None,
    **options: Unpack[LayerOptions],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits [T, E], and ids and weights [T, K], for tokens x [T, H] as the layer is given them. A token for which no
    choice can be made (`no_choice`) has ids of -1 and weights of NaN."""
    logits = router_logits(x, router, router_bias)
    if Options(**options).round_logits:
        logits = logits.astype(x.dtype).astype(np.float64)
    with np.errstate(invalid="ignore"):  # NaN and infinities are handled below
        by = choice_values(logits, choice_bias=choice_bias, **options)
        ids = choose(by, top_k)
        weights = weigh(logits, ids, **options)
        bad = no_choice(logits, choice_bias)
    ids[bad], weights[bad] = -1, np.nan
    return logits, ids, weights


def check_topk(logits: np.ndarray, ids: np.ndarray, slack: float | np.ndarray = 0.0) -> np.ndarray:
    """bool [T]: which tokens' `ids` [T, K] are a valid top-k of the float64 `logits` [T, E].

    Valid: distinct, in order of descending logit, and no expert that is not chosen has a larger logit than one that is.
    An engine that computes logits in float32 may misjudge two that are nearly equal: `slack` (one number, or
    one per token) is the difference up to which either order is accepted. With slack 0, equal logits must
    come lower id first. A -1 (a pair that the capacity dropped) may stand for any expert that is not in `ids`.
    """
    slack = np.broadcast_to(slack, len(logits))
    valid = [_is_topk(*row) for row in zip(logits, np.asarray(ids), slack, strict=True)]
    return np.array(valid, dtype=bool)


def _is_topk(logits: np.ndarray, ids: np.ndarray, slack: float) -> bool:
    kept = ids[ids != -1]
    if len(np.unique(kept)) < len(kept) or not ((kept >= 0) & (kept < len(logits))).all():
        return False
    left_out = np.setdiff1d(np.argsort(-logits, kind="stable"), kept, assume_unique=True)  # by descending logit
    order = np.concatenate([kept, left_out[len(ids) - len(kept) :][:1]])  # n times -1 stand for the n largest left out
    values = logits[order]
    largest_after = np.maximum.accumulate(values[::-1])[::-1][1:]
    if slack == 0.0:
        ties_by_id = (values[:-1] != values[1:]) | (order[:-1] < order[1:])
        return bool((values[:-1] >= largest_after).all() and ties_by_id.all())
    return bool((values[:-1] >= largest_after - slack).all())
