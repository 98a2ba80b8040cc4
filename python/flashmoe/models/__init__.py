"""The shapes of published MoE layers (`shapes`), and random layers of those shapes (`random_layers`).

The shapes are real; the weights and the tokens made here are random. Routing is always a plain softmax over all experts
followed by top-k. Where a model routes in another way, `ModelShape.differs` says what is not emulated.
"""

from .random_layers import DTYPES, MAX_SKEW, random_layer, router_and_tokens, target_shares
from .shapes import MODELS, ModelShape, find, scaled

__all__ = [
    "DTYPES",
    "MAX_SKEW",
    "MODELS",
    "ModelShape",
    "find",
    "random_layer",
    "router_and_tokens",
    "scaled",
    "target_shares",
]
