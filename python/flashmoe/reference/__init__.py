"""The definition of the operator, in float64: what every engine must compute, and nothing about how.

The reference shares no code with the engines. It uses NumPy, has one plain loop over the experts, and takes the weights
of all experts in one place. The names and the defaults of its arguments come from the same tables as those of
`flashmoe.moe`. `forward` has the layer, `backward` its gradients. `routing`, `activations` and `quantised` have what
both need. `flashmoe.tolerance` says how far an engine may be off.
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
