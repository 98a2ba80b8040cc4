"""The definition of the operator, in float64: what every engine must compute, and nothing about how.

The reference shares no code with the engines: numpy, one plain loop over the experts, all experts' weights in one
place. It takes the names and the defaults of its arguments from the tables that `flashmoe.moe` has them from. `forward`
has the layer, `backward` its gradients. `routing`, `activations` and `quantised` are the parts of both.
`flashmoe.tolerance` says how far an engine may be off.
"""

from .activations import activate, activate_backward
from .backward import moe_gradients
from .forward import ReferenceResult, moe_reference
from .quantised import dequantised, quantised_rows, rounded, row_scales, rows_are_quantised, scaled_rows
from .routing import check_topk, choice_values, choose, router_logits, scores, weigh

__all__ = [
    "ReferenceResult",
    "activate",
    "activate_backward",
    "check_topk",
    "choice_values",
    "choose",
    "dequantised",
    "moe_gradients",
    "moe_reference",
    "quantised_rows",
    "rounded",
    "router_logits",
    "row_scales",
    "rows_are_quantised",
    "scaled_rows",
    "scores",
    "weigh",
]
