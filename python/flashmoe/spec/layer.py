"""`LayerSpec`: what a layer is, as both engines, the memory planner and the modules take it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, make_dataclass

from .encodings import ENCODINGS, FP8, Encoding, row_bytes
from .options import OPTIONS, TYPES
from .values import GATED, halves_of

_OfOptions = make_dataclass(
    "_OfOptions",
    [
        (name, TYPES[name], field(default=option.default, kw_only=True))
        for name, option in OPTIONS.items()
        if option.in_layer
    ],
    frozen=True,
)


@dataclass(frozen=True)
class LayerSpec(_OfOptions):
    """A layer of E experts: ``y[t] = sum_k w[t, k] * (down[e] @ act(gate_up[e] @ x[t]))``, see `flashmoe.moe`.

    Besides the fields below it has a field for each option of `flashmoe.spec.options` with `Option.in_layer`. C++ has
    the same struct (include/flashmoe/spec/layer.h) and reads it by the names of the fields. What belongs to a call is
    not in it: the tokens, the tensors' addresses, the experts' placement, and options such as `strict` and
    `redispatch`.
    """

    hidden: int
    """H: elements of a token's row."""
    intermediate: int
    """I: elements of an expert's intermediate row."""
    experts: int
    """E: experts of all ranks."""
    top_k: int
    """K: experts of a token."""
    limit: float = math.inf
    """For ``clamped_swiglu``: the gate is at most this, and up lies within plus and minus this."""
    routing: str = "softmax"
    """One of `ROUTINGS`."""
    shared: int = 0
    """The number of slices of width I into which the shared expert, an FFN of every token, is cut; 0: there is none."""
    shared_gate: bool = False
    """Whether the shared expert's result is multiplied by the sigmoid of a row's product with x."""
    top_groups: int = 1
    """The number of groups from which experts are chosen: the groups whose two best experts have the largest sum."""
    choice_bias: bool = False
    """Whether E numbers are added to the scores for the choice of experts, but not for their weights."""
    router_bias: bool = False
    """Whether the router has a bias [E]."""
    gate_up_bias: bool = False
    """Whether the experts have a bias [El, 2I], or [El, I] without a gate, before the activation."""
    down_bias: bool = False
    """Whether the experts have a bias [El, H] after the second product."""
    x_type: str = "bfloat16"
    """Element type of x [T, H] as it is given: that of y, or `FP8`, which weights of `FP8` allow."""
    token_type: str = "bfloat16"
    """Element type of x's rows as they go to other ranks and are multiplied. Rows of `FP8` have scales
    (`row_bytes`)."""
    weight_type: str = "bfloat16"
    """Element type of gate_up_proj and down_proj, and of the shared expert's."""
    weight_scales: str = "none"
    """One of `WEIGHT_SCALES`; ``none`` where weights are not quantised."""
    intermediate_type: str = "bfloat16"
    """Element type of the activated rows between the two products."""
    y_type: str = "bfloat16"
    """One of `DTYPES`: element type of y [T, H], of the router, of the shared expert's gate and of all biases."""
    return_type: str = "bfloat16"
    """Element type of the experts' weighted rows, and of a rank's sums of them, on their way home."""
    return_mode: str = "direct"
    """One of `RETURN_MODES`: each expert's row travels home, or a rank's sum of a token's rows does. The layer for
    which a context is made may also have ``auto``."""
    capacity_factor: float = 0.0
    """An expert takes at most ceil(capacity_factor * (T * K) / E) of each rank's (token, k) pairs; 0: all of them."""
    most_tokens: int = 0
    """As all ranks promise, no rank has more tokens in a call; 0: no rank promises less than the context allows."""

    @property
    def parts(self) -> int:
        """The number of slices of all experts. A placement has an entry for each slice."""
        return self.experts * self.slices

    @property
    def choices(self) -> int:
        """The number of slices of a token's K experts. All are computed for the token."""
        return self.top_k * self.slices

    @property
    def gated(self) -> bool:
        """Whether the activation has a gate, so that an expert's first matrix has 2I rows."""
        return self.activation in GATED

    @property
    def halves(self) -> int:
        """See `halves_of`."""
        return halves_of(self.activation, self.interleaved)

    @property
    def gate_up_rows(self) -> int:
        """Rows of an expert's first matrix."""
        return 2 * self.intermediate if self.gated else self.intermediate

    @property
    def shared_experts(self) -> int:
        """1 if there is a shared expert, which is one more choice of every token; else 0."""
        return min(self.shared, 1)

    @property
    def token_row_bytes(self) -> int:
        """Bytes of a token's row, as it goes to another rank."""
        return row_bytes(self.hidden, self.token_type)

    @property
    def encoding(self) -> Encoding | None:
        """How the weights are stored, if they are quantised; otherwise None."""
        return ENCODINGS.get(self.weight_type)

    @property
    def quantised(self) -> bool:
        """Whether rows are quantised before they are sent and multiplied, as they are with weights of `FP8`."""
        return self.token_type == FP8

    @property
    def return_row_bytes(self) -> int:
        """Bytes of a row that travels home."""
        return row_bytes(self.hidden, self.return_type)

    def to_map(self) -> dict[str, int | float | str]:
        """The fields by name, as the library takes them."""
        return {name: int(value) if value is True or value is False else value for name, value in vars(self).items()}
