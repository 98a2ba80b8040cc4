"""The definition of the operator, in float64: what every engine must compute, and nothing about how.

It shares no code with the engines: numpy, one plain loop over the experts, all experts' weights in one place.
`forward` has the layer, `routing` and `activations` what it is made of. How far an engine may be off is another matter,
see `flashmoe.tolerance`.
"""

from .activations import activate
from .forward import ReferenceResult, moe_reference
from .routing import check_topk, choice_values, choose, router_logits, scores, weigh

__all__ = [
    "ReferenceResult",
    "activate",
    "check_topk",
    "choice_values",
    "choose",
    "moe_reference",
    "router_logits",
    "scores",
    "weigh",
]
