"""One MoE layer of a checkpoint: its tensors, and how it computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Self, TypeVar

import numpy as np

from ..calls.tensors import dtype_name
from ..spec import ENCODINGS, STORED_AS, halves_of
from ..weights.scales import common_kind

Weights = TypeVar("Weights")
OF_EXPERTS = ("gate_up_proj", "down_proj", "gate_up_bias", "down_bias", "gate_up_scale", "down_scale")
"""The tensors of experts, by the names of `flashmoe.moe`."""
SHARED = ("shared_gate_up", "shared_down", "shared_gate", "shared_gate_up_scale", "shared_down_scale")
"""The tensors of a shared expert, by the names of `flashmoe.moe`."""


@dataclass(frozen=True, eq=False)
class MoELayerOf(Generic[Weights]):
    """The weights and the routing rule of one MoE layer.

    All tensors but `choice_bias` share one dtype (see `DTYPES`), with two exceptions. A router may be float32 beside
    others of 16 bits: `flashmoe.nn.MoE` computes such a layer, `flashmoe.moe` refuses it. And the experts' matrices may
    be quantised, with scales: in FP8, or in MXFP4, whose tensors have the shapes that `flashmoe.moe` takes.

    E is the number of experts, H the hidden size, I the intermediate size of one expert. `tensors` and `rule` are what
    `flashmoe.moe` takes.
    """

    name: str
    """The layer's name in the checkpoint, such as ``model.layers.1.mlp``."""
    router: np.ndarray
    """[E, H]"""
    gate_up_proj: Weights
    """[E, 2I, H], an expert's gate rows before its up rows; [E, I, H] if `activation` has no gate. With the `options`
    ``interleaved`` or ``transposed`` the order is different."""
    down_proj: Weights
    """[E, H, I], or transposed."""
    top_k: int
    """Experts per token."""
    renormalize: bool
    """Whether a token's top-k probabilities are scaled to sum to one."""
    activation: str
    """The activation's name in `flashmoe.moe`, such as ``swiglu``."""
    router_bias: np.ndarray | None = None
    """[E]"""
    choice_bias: np.ndarray | None = None
    """[E] float32"""
    gate_up_bias: Weights | None = None
    """[E, 2I] or [E, I]"""
    down_bias: Weights | None = None
    """[E, H]"""
    shared_gate_up: np.ndarray | None = None
    """[2Is, H]; transposed if the experts' matrices are."""
    shared_down: np.ndarray | None = None
    """[H, Is], or transposed."""
    shared_gate: np.ndarray | None = None
    """[1, H]"""
    gate_up_scale: Weights | None = None
    """The scales of gate_up_proj, if it is quantised, as `flashmoe.moe` takes them. The next three are those of other
    matrices."""
    down_scale: Weights | None = None
    shared_gate_up_scale: np.ndarray | None = None
    shared_down_scale: np.ndarray | None = None
    options: dict[str, Any] = field(default_factory=dict)
    """The options of `flashmoe.spec.LayerOptions` that differ from their defaults."""
    own_router: str = ""
    """The name of the router's rule, if `flashmoe.moe` does not compute this rule; else empty. A call of `flashmoe.moe`
    must then be given the routing."""
    left_out: tuple[str, ...] = ()
    """Names of the modules of a shared expert that this layer leaves out, for example because that expert's width is no
    multiple of I. In the model, that expert's results are added to the layer's."""
    slices: int = 1
    """The number of slices into which the experts are cut (see `flashmoe.slices`). If there are several, the experts'
    tensors have an entry for each slice, and I is the width of a slice."""
    held: tuple[int, ...] | None = None
    """Ids of the experts, or of their slices, that these tensors belong to; None: all."""

    @property
    def experts(self) -> int:
        """E."""
        return self.router.shape[0]

    @property
    def hidden(self) -> int:
        """H."""
        return self.router.shape[1]

    @property
    def intermediate(self) -> int:
        """I."""
        return self._numbers("down_proj")[1 if self.options.get("transposed") else 2]

    @property
    def shared_intermediate(self) -> int:
        """Is, the intermediate size of the shared expert; 0: there is none."""
        if self.shared_down is None:
            return 0
        return self._numbers("shared_down")[0 if self.options.get("transposed") else 1]

    @property
    def dtype(self) -> np.dtype:
        """NumPy's dtype of all tensors except quantised ones, their scales and a float32 router."""
        if self.router.dtype != np.float32:
            return self.router.dtype
        beside = [self.gate_up_bias, self.shared_gate, self.down_proj if self.gate_up_scale is None else None]
        return next((each.dtype for each in beside if isinstance(each, np.ndarray)), self.router.dtype)

    @property
    def weight_dtype(self) -> str:
        """The type of the experts' matrices, as `flashmoe.Context` takes it."""
        return self.dtype.name if self.gate_up_scale is None else STORED_AS[dtype_name(self.gate_up_proj)]

    @property
    def weight_scales(self) -> str:
        """Which numbers of a matrix share a scale: one of `flashmoe.spec.WEIGHT_SCALES`."""
        if self.gate_up_scale is None:
            return "none"
        scales = {"gate_up_proj": self.gate_up_scale, "down_proj": self.down_scale}
        shapes = {name: (self._numbers(name), scale.shape) for name, scale in scales.items()}
        halves = halves_of(self.activation, bool(self.options.get("interleaved")))
        return common_kind(ENCODINGS[self.weight_dtype], shapes, halves)

    def _numbers(self, name: str) -> tuple[int, ...]:
        """The shape of the matrices called `name`, counted in numbers (a packed element has several)."""
        shape = getattr(self, name).shape
        return shape if self.gate_up_scale is None else ENCODINGS[self.weight_dtype].numbers(shape)

    def with_experts(self, experts: Sequence[int]) -> Self:
        """The layer with the weights of only these experts, in this order; its router remains [E, H]."""
        held = tuple(experts if self.held is None else (self.held[each] for each in experts))
        return replace(self, held=held, **{name: each[experts] for name, each in self._of_experts().items()})

    def tensors(self) -> dict[str, Any]:
        """The layer's tensors, by the names of `flashmoe.moe`; without the router if the model computes the router
        itself."""
        others = {} if self.own_router else {"router": self.router, "router_bias": self.router_bias}
        others["choice_bias"] = self.choice_bias
        others |= self.shared()
        return self._of_experts() | {name: each for name, each in others.items() if each is not None}

    def shared(self) -> dict[str, np.ndarray | None]:
        """The tensors of the shared expert, by the names of `flashmoe.moe`."""
        return {name: getattr(self, name) for name in SHARED}

    def rule(self) -> dict[str, Any]:
        """The other arguments of `flashmoe.moe` that the layer decides on."""
        routing = {} if self.own_router else {"top_k": self.top_k, "renormalize": self.renormalize}
        sliced = {} if self.slices == 1 else {"slices": self.slices}
        return {"activation": self.activation, **routing, **self.options, **sliced}

    def _of_experts(self) -> dict[str, Weights]:
        """The tensors whose first axis is the experts, by the names of `flashmoe.moe`."""
        named = {name: getattr(self, name) for name in OF_EXPERTS}
        return {name: each for name, each in named.items() if each is not None}


class MoELayer(MoELayerOf[np.ndarray]):
    """A layer in host memory."""
