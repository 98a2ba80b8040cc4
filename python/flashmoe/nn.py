"""`MoE`: the layer as a PyTorch module."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, Unpack, overload

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from . import placement as placements
from .calls.arguments import check_quantised, layer_of, placement_of, resolved
from .calls.keywords import described, with_known_options
from .calls.optional_context import ctx_may_be_left_out
from .calls.refusals import tell
from .calls.through_torch import in_autocast
from .checkpoint import MoELayer
from .contexts.context import Context, contexts, room_of
from .contexts.limits import Room, room_alone
from .errors import InvalidArgument
from .pytorch.operator import call, check_tensors, context_id, saving_contexts
from .pytorch.replicated import Replicas
from .pytorch.routing import route
from .pytorch.watched import found_on, is_touched
from .slices import cut
from .spec import (
    DTYPES,
    ENCODINGS,
    FP8,
    MAX_EXPERTS,
    MAX_TOKENS,
    MAX_WIDTH,
    OPTIONS,
    CallOptions,
    LayerSpec,
    ModuleOptions,
    Options,
    bounded,
    checked_values,
    dtype_named,
    element_types,
    one_of,
    truth,
)
from .spec.tensors import Tensors
from .weights.scales import SCALE_OF, scale_shape

__all__ = ["Experts", "MoE", "Router", "SharedExpert", "saving_contexts"]


_MATRICES = ("gate_up_proj", "down_proj")
"""The names of the matrices in `Experts` and in `SharedExpert`."""
_BIASES = {"gate_up_bias": "gate_up_proj_bias", "down_bias": "down_proj_bias"}
"""The names of experts' biases: in `flashmoe.moe`, and of the parameters."""
_SHARED = {
    "gate_up_proj": "shared_gate_up",
    "down_proj": "shared_down",
    "gate_up_scale": "shared_gate_up_scale",
    "down_scale": "shared_down_scale",
}
"""The names of a shared expert's tensors in `flashmoe.moe`, by the names of the experts' tensors."""
TOKENS = ("own", "replicated")
"""Whether a rank has tokens of its own, or the same tokens as other ranks."""


class Router(torch.nn.Module):
    """The router's parameters, the same on every rank: `weight` [E, H] and, if asked for, `bias` [E] and `choice_bias`
    [E].

    `choice_bias` is a buffer, since it has no gradient. It is added to scores, so it stays float32 whatever type the
    module is converted to or loads.

    If `weight` is in float32 (by ``layer.gate.float()``, or as a checkpoint has it) and x has 16 bits, logits are
    computed from x in float32. PyTorch computes them, and the choice of experts, before the operator is called.
    """

    def __init__(self, hidden: int, experts: int, *, bias: bool, choice_bias: bool = False, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(experts, hidden, dtype=dtype))
        self.bias = torch.nn.Parameter(torch.empty(experts, dtype=dtype)) if bias else None
        self.register_buffer("choice_bias", torch.zeros(experts, dtype=torch.float32) if choice_bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws new random weights and clears the biases."""
        _draw(self.weight, self.weight.shape[1], self.bias)
        if self.choice_bias is not None:
            self.choice_bias.zero_()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        before = self.choice_bias
        super()._apply(fn, recurse)
        self.choice_bias = _of_one_type(before, self.choice_bias)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        # `state_dict` is load_state_dict's own copy: entries may be replaced.
        given = state_dict.get(f"{prefix}choice_bias")
        if isinstance(given, Tensor) and given.is_floating_point():
            state_dict[f"{prefix}choice_bias"] = given.float()
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def extra_repr(self) -> str:
        return f"{list(self.weight.shape)}, bias={self.bias is not None}, {self.weight.dtype}"


class Experts(torch.nn.Module):
    """The parameters of this rank's El experts, by ascending expert id.

    `gate_up_proj` is [El, 2I, H], an expert's gate rows before its up rows, or [El, I, H] where the activation has no
    gate; `down_proj` is [El, H, I]. In a transposed layer they are [El, H, 2I or I] and [El, I, H]. With biases there
    are `gate_up_proj_bias` [El, 2I or I] and `down_proj_bias` [El, H]. With weights in FP8 there are
    `gate_up_proj_scale_inv` and `down_proj_scale_inv`, float32: they are `gate_up_scale` and `down_scale` of
    `flashmoe.moe`. With weights in MXFP4 there are `gate_up_proj_blocks` [El, 2I or I, H / 32, 16], `down_proj_blocks`
    [El, H, I / 32, 16], `gate_up_proj_scales` [El, 2I or I, H / 32] and `down_proj_scales` [El, H, I / 32] instead,
    uint8, as checkpoints of gpt-oss have them.

    ``load_state_dict`` takes each of these tensors either for these El experts, as ``state_dict`` gives it, or for all
    E experts, as a checkpoint has it, and then picks the rows of `ids`. Another number of experts raises
    `InvalidArgument`.
    In a layer whose experts are cut into slices, the experts here are slices; whole experts are cut when they are
    loaded.
    """

    def __init__(self, ids: Sequence[int], layer: LayerSpec, *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.ids = list(ids)
        """Ids of this rank's experts, ascending."""
        self.total = layer.parts
        """E, the number of experts of all ranks; of slices, if experts are cut."""
        self._slices = layer.slices
        self.form = {name: getattr(layer, name) for name in ("activation", "interleaved", "transposed")}
        """The options of the layer that decide how the experts' tensors are stored."""
        local = len(self.ids)

        up, down = (layer.gate_up_rows, layer.hidden), (layer.hidden, layer.intermediate)
        self.names = _add_matrices(self, layer, (local,), up, down, dtype)
        """The names of the parameters, by the names in `flashmoe.moe`."""
        self.gate_up_proj_bias = _parameter(local, layer.gate_up_rows, dtype=dtype) if bias else None
        self.down_proj_bias = _parameter(local, layer.hidden, dtype=dtype) if bias else None
        self._inputs = layer.hidden, layer.intermediate
        self.reset_parameters()

    def forward(
        self, number: int | None, others: dict[str, Tensor | None], options: Options, main_grad: bool
    ) -> Tensor:
        """The layer's output, from these parameters and from `others`, the other tensors of `flashmoe.moe`. The layer
        makes its call here so that a wrapper of this module alone, such as FSDP2, has the parameters in place while
        they are used.
        """
        own = {name: getattr(self, parameter) for name, parameter in (self.names | _BIASES).items()}
        tensors = Tensors(**{name: _local(each) for name, each in (own | others).items()})
        return call(number, tensors, options, main_grad)

    def reset_parameters(self) -> None:
        """Draws new random weights and clears the biases."""
        for name, inputs in zip(_MATRICES, self._inputs, strict=True):
            _reset(self, name, inputs, getattr(self, f"{name}_bias"))

    def extra_repr(self) -> str:
        return f"{_described(self)}, bias={self.down_proj_bias is not None}, of E={self.total}"

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        # `state_dict` is load_state_dict's own copy: entries may be replaced.
        local = len(self.ids)
        state_dict |= self._cut(state_dict, prefix)
        for name, parameter in self.named_parameters(recurse=False):
            given = state_dict.get(prefix + name)
            if given is None or given.ndim != parameter.ndim:
                continue  # torch reports it
            if len(given) not in (local, self.total):
                expected = f"El={local} or E={self.total} experts"
                raise InvalidArgument(f"{prefix}{name}: expected {expected}, got {list(given.shape)}")
            if len(given) != local:
                state_dict[prefix + name] = given[self.ids]
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _cut(self, state_dict: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
        """The entries for slices, made from the entries of `state_dict` for whole experts, which they replace. Empty if
        there are no entries for whole experts."""
        names = {ours: prefix + name for ours, name in (self.names | _BIASES).items()}
        given = {ours: state_dict.get(name) for ours, name in names.items()}
        up, down, mine = given["gate_up_proj"], given["down_proj"], getattr(self, self.names["down_proj"])
        axis = 1 if self.form["transposed"] else 2
        matrices = up is not None and down is not None and up.ndim == down.ndim == mine.ndim
        if self._slices == 1 or not matrices or down.shape[axis] != self._slices * mine.shape[axis]:
            return {}
        return {names[ours]: part for ours, part in cut(self._slices, **given, **self.form).items()}


class SharedExpert(torch.nn.Module):
    """The parameters of a shared expert, whole on every rank. `gate_up_proj` is [2Is, H], gate rows first, or [Is, H]
    where the activation has no gate; `down_proj` is [H, Is]. In a transposed layer they are [H, 2Is or Is] and [Is, H].
    With weights in FP8 there are `gate_up_proj_scale_inv` and `down_proj_scale_inv`. With weights in MXFP4 the names
    are those of `Experts`.

    ``load_state_dict`` also takes ``gate_proj.weight``, ``up_proj.weight`` and ``down_proj.weight``, as blocks of
    Transformers have them. Each of these may have a ``weight_scale_inv``.
    """

    def __init__(self, layer: LayerSpec, *, dtype: torch.dtype) -> None:
        super().__init__()
        width = layer.shared * layer.intermediate
        up, down = (layer.shared * layer.gate_up_rows, layer.hidden), (layer.hidden, width)
        self.names = _add_matrices(self, layer, (), up, down, dtype)
        """The names of the parameters, by the names of the experts' tensors in `flashmoe.moe`."""
        self._inputs = layer.hidden, width
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws new random weights."""
        for name, inputs in zip(_MATRICES, self._inputs, strict=True):
            _reset(self, name, inputs)

    def extra_repr(self) -> str:
        return _described(self)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        # `state_dict` is load_state_dict's own copy: entries may be replaced.
        for theirs, own in (("weight", ""), ("weight_scale_inv", "_scale_inv")):
            parts = [state_dict.pop(f"{prefix}{name}.{theirs}", None) for name in ("gate_proj", "up_proj", "down_proj")]
            given = [part for part in parts[:2] if part is not None]
            if given:
                state_dict[f"{prefix}gate_up_proj{own}"] = torch.cat(given)
            if parts[2] is not None:
                state_dict[f"{prefix}down_proj{own}"] = parts[2]
        super()._load_from_state_dict(state_dict, prefix, *rest)


class _Made(ModuleOptions, total=False):
    """What type checkers know of the keyword arguments of `MoE`."""

    router_bias: bool
    choice_bias: bool
    expert_bias: bool
    dtype: Any
    shared_intermediate: int
    shared_gate: bool
    count_load: bool
    tokens: Literal["own", "replicated"]
    token_group: Any
    weight_scales: Literal["block", "row", "tensor"]


@described(ModuleOptions)
class MoE(torch.nn.Module):
    """A Mixture-of-Experts layer whose experts are spread over the ranks of `ctx`; every rank must call it.

    ``MoE(hidden, intermediate, experts, top_k)``, without a context, is the layer of a rank alone, which has all
    experts. Its calls use the contexts that `flashmoe.moe` keeps, on the engine of x's device, and any number of
    tokens.

    The layer trains, and all ranks make the same backward passes (docs/training.md). There are no gradients with
    quantised weights, with `tokens` ``"replicated"``, and on GPUs with `transport` ``"rdma"``. Parameters and tokens
    may still require gradients there, as in a model that has not been frozen, but a backward pass that reaches the
    layer raises `NotImplementedError`. A call with forward-mode derivatives raises it everywhere.

    Within ``torch.autocast`` the layer computes in autocast's type, as `torch.nn.Linear` does (docs/training.md). The
    layer runs `flashmoe.moe`; see there. Under ``torch.compile(fullgraph=True)``, too, it is one
    ``torch.ops.flashmoe.moe``. ``ctx.last_call`` is the report of the last call. With `count_load`, `load` [E] int64
    counts how many of this rank's pairs (token, k) have chosen each expert, in all calls since ``load.zero_()`` last
    cleared it. `load` is not part of the ``state_dict``. A call that ``torch.utils.checkpoint`` makes again counts
    once.

    Parameters are named and shaped as in ``Qwen3MoeSparseMoeBlock`` of Transformers 5, so that such a block's
    ``state_dict()`` loads as it is. The block's state has all E experts; each rank keeps its own El (see `Experts`):

    ============================== ======================================================================
    ``gate.weight``                [E, H]
    ``experts.gate_up_proj``       [El, 2I, H], gate rows first; [El, I, H] without a gate
    ``experts.down_proj``          [El, H, I]
    ``gate.bias``                  [E], with `router_bias`
    ``gate.choice_bias``           [E] float32, with `choice_bias`; a buffer
    ``experts.gate_up_proj_bias``  [El, 2I] or [El, I], with `expert_bias`
    ``experts.down_proj_bias``     [El, H], with `expert_bias`
    ``shared_expert.gate_up_proj`` [2Is, H], with `shared_intermediate`; see `SharedExpert`
    ``shared_expert.down_proj``    [H, Is]
    ``shared_expert_gate.weight``  [1, H], with `shared_gate`
    ``….gate_up_proj_scale_inv``   float32, of experts in FP8; see `Experts`
    ``….down_proj_scale_inv``      float32, of experts in FP8; see `Experts`
    ``….gate_up_proj_blocks``      uint8, of experts in MXFP4, as is ``….gate_up_proj_scales``; see `Experts`
    ============================== ======================================================================

    Initial values are random, also the router's, and differ from rank to rank: load weights before use. Where
    checkpoint files hold a tensor per expert and projection, `flashmoe.checkpoint.load_layer` reads them and
    `from_layer` takes what it returns.

    The layer calls its `experts`, so their hooks run. It does not call `gate`, `shared_expert` and
    `shared_expert_gate`, but reads their parameters, parametrized ones too. Hooks, wrappers (adapters, FSDP2 on one of
    these alone) or another forward on these three raise `InvalidArgument`, since they would not run.

    Copies made by `copy.deepcopy` share the context.

    Parameters
    ----------
    ctx: Context
        The context; it must outlive the calls. Any number of layers may share one. Parameters are made on PyTorch's
        default device: with a context of the CUDA engine, move the module to its GPU. A rank that is alone may leave it
        out; layers with quantised weights need it.
    hidden, intermediate, experts, top_k: int
        H, I, E and K of this layer, within the context's limits. With the option `slices`, I is a whole expert's.
    router_bias, choice_bias: bool, default False
        Whether the router has a bias, and whether it has one for the choice of experts alone.
    expert_bias: bool, default False
        Whether both projections of every expert have a bias.
    shared_intermediate: int, default 0
        Is of a shared expert, a multiple of I; 0: none.
    shared_gate: bool, default False
        Whether a sigmoid of a projection of x weighs the shared expert's result.
    dtype: torch.dtype, str or None, default None
        ``torch.float32``, ``torch.bfloat16`` or ``torch.float16``, or such a type's name; default: the context's, or
        without a context PyTorch's default. Weights of experts are quantised if the context's `weight_dtype` is a
        quantised type.
    weight_scales: str, default 'block'
        With weights in FP8: there is a scale for each ``"block"``, ``"row"`` or ``"tensor"``.
    count_load: bool, default False
        Whether the layer has a buffer `load`; otherwise `load` is None.
    tokens: str, default 'own'
        ``"own"``: each rank has tokens of its own. ``"replicated"``: the ranks of `token_group` have the same tokens,
        as between layers that are cut by tensor parallelism. Each of the n ranks brings its share of the tokens, T / n,
        to the call, and all ranks get all results, by an all-gather of the group.
    token_group: process group or None, default None
        With `tokens` ``"replicated"``: a process group of ``torch.distributed``; None: all ranks.
    {options}

    Raises
    ------
    InvalidArgument
        A parameter is outside its domain.
    LimitExceeded
        The layer exceeds the context's limits; an `InvalidArgument` and a `HeapError`.

    Examples
    --------
    >>> import flashmoe.nn, torch
    >>> layer = flashmoe.nn.MoE(hidden=16, intermediate=8, experts=4, top_k=2)
    >>> y = layer(torch.randn(5, 16))
    >>> y.sum().backward()
    >>> y.shape, layer.experts.down_proj.grad.shape
    (torch.Size([5, 16]), torch.Size([4, 16, 8]))
    """

    main_grad: bool = False
    """Whether backward passes add each parameter's gradient to the parameter's attribute `main_grad`, and leave its
    `grad` alone. The caller has set `main_grad` to a contiguous float32 tensor of the parameter's shape
    (docs/training.md)."""

    @overload
    def __init__(
        self, hidden: int, intermediate: int, experts: int, top_k: int, /, **options: Unpack[_Made]
    ) -> None: ...
    @overload
    def __init__(
        self,
        ctx: Context | None = None,
        *,
        hidden: int,
        intermediate: int,
        experts: int,
        top_k: int,
        **options: Unpack[_Made],
    ) -> None: ...
    @overload
    def __init__(
        self,
        ctx: Context | None,
        hidden: int,
        intermediate: int,
        experts: int,
        top_k: int,
        **options: Unpack[_Made],
    ) -> None: ...
    @ctx_may_be_left_out("hidden", "intermediate", "experts", "top_k")
    @with_known_options(ModuleOptions)
    def __init__(
        self,
        ctx: Context | None,
        hidden: int,
        intermediate: int,
        experts: int,
        top_k: int,
        *,
        router_bias: bool = False,
        choice_bias: bool = False,
        expert_bias: bool = False,
        dtype: Any = None,
        shared_intermediate: int = 0,
        shared_gate: bool = False,
        count_load: bool = False,
        tokens: str = "own",
        token_group: Any = None,
        weight_scales: str = "block",
        **options: Unpack[ModuleOptions],
    ) -> None:
        super().__init__()
        if one_of("tokens", tokens, TOKENS) == "own" and token_group is not None:
            raise InvalidArgument("token_group: expected none with tokens='own', got one")
        self._replicas = None if tokens == "own" else Replicas(token_group)
        self.ctx = ctx
        self._context_id = None if ctx is None else context_id(ctx)
        widest, weights = (torch.get_default_dtype(), "") if ctx is None else (ctx.dtype, ctx.weight_dtype)
        dtype_name = dtype_named("dtype", widest if dtype is None else dtype, DTYPES)
        dtype = getattr(torch, dtype_name)
        experts = bounded("experts", experts, 1, MAX_EXPERTS)
        chosen = checked_values(Options(top_k=top_k, **options))
        slices, placement = chosen.slices, chosen.placement
        ranks = 1 if ctx is None else ctx.ranks
        self.placement = None if placement is None else placements.checked(placement, experts * slices, ranks)
        biases = {"router_bias": router_bias, "choice_bias": choice_bias}
        given = {"router"} | {name for name, wanted in biases.items() if truth(name, wanted)}
        if truth("expert_bias", expert_bias):
            given |= {"gate_up_bias", "down_bias"}
        intermediate, left = divmod(bounded("intermediate", intermediate, 1, MAX_WIDTH), slices)
        if left:
            raise InvalidArgument(f"slices: expected a divisor of I={intermediate * slices + left}, got {slices}")
        width = bounded("shared_intermediate", shared_intermediate, 0, MAX_WIDTH)
        if width % intermediate:
            raise InvalidArgument(f"shared_intermediate: expected a multiple of I={intermediate}, got {width}")
        if truth("shared_gate", shared_gate) and width == 0:
            raise InvalidArgument("shared_gate: expected False without shared_intermediate, got True")
        given |= {"shared_down"} if width else set()
        given |= {"shared_gate"} if shared_gate else set()
        layer = layer_of(
            chosen,
            given,
            hidden=bounded("hidden", hidden, 1, MAX_WIDTH),
            intermediate=intermediate,
            shared=width // intermediate,
            experts=experts,
            top_k=bounded("top_k", top_k, 1, experts),
            **element_types(dtype_name, weights if weights in ENCODINGS else ""),
        )
        check_quantised(layer)
        if layer.encoding is not None:
            layer = replace(layer, weight_scales=one_of("weight_scales", weight_scales, layer.encoding.kinds))
        self._room = room = _room_alone(layer) if ctx is None else room_of(ctx)
        placed = placement_of(room, self.placement, layer.parts)
        mine = placements.local_experts(placed, room.rank)
        self._layer = layer = resolved(room, layer, chosen, placed, tokens=0)
        self._options = chosen._replace(
            top_k=layer.top_k,
            capacity_factor=layer.capacity_factor or None,
            placement=self.placement,
        )

        self.gate = Router(layer.hidden, experts, bias=layer.router_bias, choice_bias=layer.choice_bias, dtype=dtype)
        self.experts = Experts(mine, layer, bias=layer.down_bias, dtype=dtype)
        self.shared_expert = SharedExpert(layer, dtype=dtype) if layer.shared else None
        gated = layer.shared_gate
        self.shared_expert_gate = torch.nn.Linear(layer.hidden, 1, bias=False, dtype=dtype) if gated else None
        load = torch.zeros(experts, dtype=torch.int64) if truth("count_load", count_load) else None
        self.register_buffer("load", load, persistent=False)
        self.register_load_state_dict_post_hook(_make_load)

    def reset_parameters(self) -> None:
        """Draws new random weights, and clears biases and `load`."""
        for module in self.children():
            module.reset_parameters()
        if self.load is not None:
            self.load.zero_()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MoE:
        before = self.load
        super()._apply(fn, recurse)
        self.load = _of_one_type(before, self.load)
        return self

    @overload
    @classmethod
    def from_layer(cls, layer: MoELayer, /, **options: Any) -> MoE: ...
    @overload
    @classmethod
    def from_layer(cls, ctx: Context | None, layer: MoELayer, **options: Any) -> MoE: ...
    @classmethod
    @ctx_may_be_left_out("layer")
    @with_known_options(CallOptions)
    def from_layer(
        cls,
        ctx: Context | None,
        layer: MoELayer,
        *,
        count_load: bool = False,
        slices: int = 1,
        tokens: str = "own",
        token_group: Any = None,
        **options: Unpack[CallOptions],
    ) -> MoE:
        """A module with a copy of `layer`'s router and of this rank's experts of `layer`. The parameters are where the
        context's engine computes: in host memory or on its GPU; without a context, in host memory.

        `layer` comes from `flashmoe.checkpoint.load_layer`. It decides the sizes, the rule of the router, what the
        experts compute, and the dtype. The module lacks what `layer.left_out` names. `layer` may have this rank's
        experts alone. It may also be cut into slices already; `slices` need not be given then. The other parameters and
        the errors are those of the class.
        """
        if layer.own_router:
            raise InvalidArgument(f"layer: expected a router that flashmoe.moe computes, got {layer.own_router}")
        if ctx is None and layer.weight_scales != "none":
            raise InvalidArgument("ctx: expected a flashmoe.Context made for the layer's quantised weights, got none")
        is_cut = layer.slices != 1
        if is_cut and slices not in (1, layer.slices):
            raise InvalidArgument(f"slices: expected {layer.slices}, as the layer is cut, got {slices!r}")
        how = layer.rule() if is_cut else layer.rule() | {"slices": slices}
        with torch.device("meta"):  # the parameters are about to be replaced
            module = cls(
                ctx,
                layer.hidden,
                layer.intermediate * layer.slices,
                layer.experts,
                router_bias=layer.router_bias is not None,
                choice_bias=layer.choice_bias is not None,
                expert_bias=layer.down_bias is not None,
                dtype=getattr(torch, layer.dtype.name),
                shared_intermediate=layer.shared_intermediate,
                shared_gate=layer.shared_gate is not None,
                count_load=count_load,
                tokens=tokens,
                token_group=token_group,
                weight_scales=layer.weight_scales,
                **how,
                **options,
            )
        mine, names = module.experts.ids, module.experts.names | _BIASES
        of_router = {"weight": layer.router, "bias": layer.router_bias, "choice_bias": layer.choice_bias}
        of_experts = {name: getattr(layer, name) for name in names}
        if layer.held is not None:
            if list(layer.held) != mine or (slices > 1 and not is_cut):
                what = "slices" if module.experts.total > layer.experts else "experts"
                raise InvalidArgument(
                    f"layer: expected one with {what} {mine}, those of this rank, got one with {list(layer.held)}"
                    + (", which are not cut" if slices > 1 and not is_cut else "")
                )
            mine = list(range(len(mine)))
        if slices > 1 and not is_cut:
            of_experts = cut(slices, **of_experts, **module.experts.form)
        weights = {f"gate.{name}": each.copy() for name, each in of_router.items() if each is not None}
        weights |= {f"experts.{names[name]}": each[mine] for name, each in of_experts.items() if each is not None}
        shared = {f"shared_expert.{names[ours]}": getattr(layer, theirs) for ours, theirs in _SHARED.items()}
        shared["shared_expert_gate.weight"] = layer.shared_gate
        weights |= {name: each.copy() for name, each in shared.items() if each is not None}
        device = "cpu" if ctx is None or ctx.device is None else f"cuda:{ctx.device}"
        state = {name: _tensor(array).to(device) for name, array in weights.items()}
        module.load_state_dict(state, assign=True)
        return module

    def move(self, placement: placements.Placement | None, group: Any = None) -> None:
        """Moves the experts, or their slices, to the ranks of `placement` (None: of the context's placement); later
        calls use them there. Collective: see `flashmoe.placement.move`, which has the same `group` and errors.

        The experts' parameters are new tensors afterwards. Raises `LimitExceeded`, before anything is moved, if the
        context has no room for `placement`.
        """
        experts, room, parts = self.experts, self._room, self._layer.parts
        if not isinstance(experts, Experts) or "parametrizations" in experts._modules:
            got = type(experts).__name__
            raise InvalidArgument(f"experts: expected Experts without parametrizations, to move them, got {got}")
        chosen = None if placement is None else placements.checked(placement, parts, room.ranks)
        before, after = (placement_of(room, each, parts) for each in (self.placement, chosen))
        resolved(room, self._layer, self._options, after, tokens=0)
        held = dict(experts.named_parameters(recurse=False))
        for name, tensor in placements.move(held, before, after, group).items():
            setattr(experts, name, torch.nn.Parameter(tensor, requires_grad=held[name].requires_grad))
        experts.ids = placements.local_experts(after, room.rank)
        self.placement = chosen
        self._options = self._options._replace(placement=chosen)

    @overload
    def forward(
        self, x: Tensor, return_router_logits: Literal[False] = False, *, most_tokens: int | None = None
    ) -> Tensor: ...
    @overload
    def forward(
        self, x: Tensor, return_router_logits: bool, *, most_tokens: int | None = None
    ) -> Tensor | tuple[Tensor, Tensor]: ...
    def forward(
        self, x: Tensor, return_router_logits: bool = False, *, most_tokens: int | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The layer's output for this rank's tokens.

        Parameters
        ----------
        x: [..., H]
            Of the parameters' dtype; like them in host memory, or on the GPU of a context with the CUDA engine, or on
            the device meta, where there is nothing to compute. Copied if the tokens do not lie one after the other.
        return_router_logits:
            Whether to return the router's logits too, as `flashmoe.moe` writes them.
        most_tokens:
            As for `flashmoe.moe`. It counts the tokens of x, also if several ranks hold the same tokens.

        Returns
        -------
        [..., H], contiguous; or that and the logits, [..., E] float32.

        Raises
        ------
        InvalidArgument, HeapError, GroupError, PeerTimeout, FlashMoEError, NotImplementedError
            As `flashmoe.moe`.
        """
        try:
            tensors, logits, options, main_grad = self._prepared(x, return_router_logits)
            options = options._replace(most_tokens=self._most_of_rank(most_tokens))
        except Exception as error:
            tell(contexts.get(self._context_id), error, x)
            raise
        y, replicas = self.experts(self._context_id, tensors, options, main_grad), self._replicas
        if replicas is not None:
            of_all = x.numel() // x.shape[-1]
            y = replicas.gathered(y, of_all)
            logits = None if logits is None else replicas.gathered(logits, of_all)
        if logits is None:
            return y.reshape(x.shape)
        return y.reshape(x.shape), logits.reshape(*x.shape[:-1], logits.shape[1])

    def _prepared(
        self, x: Tensor, return_router_logits: bool
    ) -> tuple[dict[str, Tensor | None], Tensor | None, Options, bool]:
        """What a call with x needs: its tensors, the tensor for the logits if they are asked for, its options, and
        whether `main_grad` is used."""
        check_tensors({"x": x})
        for name, kind in _READ.items():
            _check_read(name, getattr(self, name), kind)
        hidden = self.gate.weight.shape[1]
        if x.ndim == 0 or x.shape[-1] != hidden:
            raise InvalidArgument(f"x: expected [..., H={hidden}], got {list(x.shape)}")
        tokens, shared, shared_gate = x.reshape(-1, hidden).contiguous(), self.shared_expert, self.shared_expert_gate
        if self._replicas is not None:
            tokens = tokens[self._replicas.share(len(tokens))]
        with_logits, main_grad = truth("return_router_logits", return_router_logits), truth("main_grad", self.main_grad)
        routing, logits, options = self._routing(tokens, with_logits, main_grad)
        tensors = routing | {
            "x": tokens,
            "shared_gate": None if shared_gate is None else shared_gate.weight,
            "load": self.load,
        }
        if shared is not None:
            tensors |= {_SHARED[ours]: getattr(shared, name) for ours, name in shared.names.items()}
        return tensors, logits, options, main_grad

    def _most_of_rank(self, most_tokens: int | None) -> int | None:
        """What to promise for a rank if x has at most `most_tokens` tokens, of which each rank may bring a share."""
        if self._replicas is None or most_tokens is None:
            return most_tokens
        return self._replicas.most(bounded("most_tokens", most_tokens, 1, MAX_TOKENS))

    def _routing(
        self, x: Tensor, with_logits: bool, main_grad: bool
    ) -> tuple[dict[str, Tensor | None], Tensor | None, Options]:
        """The tensors that say how x [T, H] is routed, the tensor for the logits if they are asked for, and the options
        that go with these tensors."""
        weight, bias, choice_bias = map(_local, (self.gate.weight, self.gate.bias, self.gate.choice_bias))
        is_cast = in_autocast(x) and self._layer.encoding is None
        of_two_types = weight.dtype is torch.float32 and x.dtype in _BESIDE_FLOAT32 and not is_cast
        if not of_two_types or x.layout is not torch.strided:
            logits = x.new_empty((x.shape[0], weight.shape[0]), dtype=torch.float32) if with_logits else None
            given = {"router": weight, "router_bias": bias, "choice_bias": choice_bias, "router_logits": logits}
            return given, logits, self._options
        if main_grad:
            raise InvalidArgument(
                f"main_grad: expected False with a router in {weight.dtype} and x in {x.dtype}, got True"
            )
        with torch.autocast(x.device.type, enabled=False):  # autocast would round the logits
            routed = route(x, weight, bias, choice_bias, self._options)
        given = {"topk_ids": routed.ids, "topk_weights": routed.weights}
        return given, routed.logits if with_logits else None, self._options.of_given_routing()

    def extra_repr(self) -> str:
        return (
            f"top_k={self.top_k}, activation={self.activation!r}, renormalize={self.renormalize}, "
            f"rank {self._room.rank} of {self._room.ranks}"
        )


def _room_alone(layer: LayerSpec) -> Room:
    """The room of a context that a rank alone would make for the layer and any number of tokens, on the CPU engine,
    because its limits are the larger ones. No memory is allocated."""
    return room_alone(
        engine="cpu",
        max_tokens=MAX_TOKENS,
        hidden=layer.hidden,
        intermediate=layer.intermediate,
        experts=layer.experts,
        top_k=layer.top_k,
        dtype=layer.y_type,
        shared_intermediate=layer.shared * layer.intermediate,
    )


def _option(name: str) -> property:
    return property(lambda layer: getattr(layer._options, name), doc=OPTIONS[name].text)


# `placement` is an attribute of each layer, and `most_tokens` belongs to each call.
for _name in OPTIONS.keys() - {"placement", "most_tokens"}:
    setattr(MoE, _name, _option(_name))


_BESIDE_FLOAT32 = (torch.bfloat16, torch.float16)
"""Types of x for which PyTorch, and not the operator, computes the routing if the router is in float32."""


def _of_one_type(before: Tensor | None, after: Tensor | None) -> Tensor | None:
    """The buffer `after`, which is `before` moved or cast, on its new device but with the type and bits of `before`."""
    if before is None or after.dtype == before.dtype:
        return after
    return before.to(after.device)


def _make_load(module: MoE, keys: Any) -> None:
    """Makes `load`, which is in no ``state_dict``, if the parameters were on the device meta until weights were
    loaded."""
    if module.load is not None and module.load.is_meta:
        module.load = torch.zeros_like(module.load, device=module.gate.weight.device)


_READ = {"gate": Router, "shared_expert": SharedExpert, "shared_expert_gate": torch.nn.Linear}
"""The submodules whose parameters a layer reads without calling the submodules, and their classes."""
_FORWARDS = {kind: kind.forward for kind in _READ.values()}


def _check_read(name: str, module: torch.nn.Module | None, kind: type) -> None:
    """Raises `InvalidArgument` if the submodule has hooks, wrappers or another forward: the layer only reads the
    submodule's parameters and does not call it, so they would not run."""
    if module is None:
        return
    own_class = not isinstance(module, kind) or type(module).forward is not _FORWARDS[kind]
    if not own_class and not is_touched(module):
        return
    got = f"a {type(module).__name__}" if own_class else found_on(module)
    raise InvalidArgument(
        f"{name}: expected a {kind.__name__} without hooks, wrappers or a forward of its own, since flashmoe.nn.MoE "
        f"reads its parameters and does not call it, got {got}; put such on the layer, or on its experts"
    )


def _local(tensor: Tensor | None) -> Tensor | None:
    """This rank's part of a DTensor; else the tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _parameter(*shape: int, dtype: torch.dtype, trained: bool = True) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=trained)


def _add_matrices(
    module: Experts | SharedExpert,
    layer: LayerSpec,
    lead: tuple[int, ...],
    up: tuple[int, int],
    down: tuple[int, int],
    dtype: torch.dtype,
) -> dict[str, str]:
    """Adds the parameters of matrices [*lead, *up] and [*lead, *down], and of their scales. Quantised parameters have
    no gradients. Returns the parameters' names, by the names of the experts' tensors in `flashmoe.moe`."""
    order, encoding = reversed if layer.transposed else tuple, layer.encoding
    elements, scales = ENCODINGS[FP8].suffixes if encoding is None else encoding.suffixes
    names = {}
    for name, shape, parts in zip(_MATRICES, (up, down), (layer.halves, 1), strict=True):
        names |= {name: name + elements, SCALE_OF[name]: name + scales}
        scale = None
        if encoding is None:
            weight = _parameter(*lead, *order(shape), dtype=dtype)
        else:
            shape = (*lead, *shape)
            weight = _parameter(*encoding.elements(shape), dtype=getattr(torch, encoding.stored), trained=False)
            of_scales = scale_shape(encoding, layer.weight_scales, shape, parts)
            scale = _parameter(*of_scales, dtype=getattr(torch, encoding.scale), trained=False)
        module.register_parameter(name + elements, weight)
        module.register_parameter(name + scales, scale)
    return names


def _described(module: Experts | SharedExpert) -> str:
    matrices = [(name, getattr(module, module.names[name])) for name in _MATRICES]
    return ", ".join(f"{name}={list(each.shape)}" for name, each in matrices) + f", {matrices[1][1].dtype}"


def _reset(module: Experts | SharedExpert, name: str, inputs: int, bias: torch.nn.Parameter | None = None) -> None:
    """Draws new values for the parameter of that name, and clears `bias`, which belongs to it."""
    _draw(getattr(module, module.names[name]), inputs, bias, getattr(module, module.names[SCALE_OF[name]]))


def _draw(
    weight: torch.nn.Parameter,
    inputs: int,
    bias: torch.nn.Parameter | None = None,
    scale: torch.nn.Parameter | None = None,
) -> None:
    """Draws weights as `torch.nn.Linear` does, uniform within 1 / sqrt(inputs), and clears the bias."""
    bound = inputs**-0.5
    if bias is not None:
        torch.nn.init.zeros_(bias)
    with torch.no_grad():
        if scale is None:
            weight.uniform_(-bound, bound)
        elif weight.dtype == torch.uint8:  # any codes of e2m1, whose largest number is 6
            weight.random_(0, 256)
            scale.fill_(127 + math.floor(math.log2(bound / 6.0)))
        else:
            largest = torch.finfo(weight.dtype).max
            weight.copy_(torch.empty(weight.shape, device=weight.device).uniform_(-largest, largest))
            scale.fill_(bound / largest)


def _tensor(array: np.ndarray) -> Tensor:
    """The same memory as a tensor, also of bfloat16 and FP8, which torch does not take from NumPy."""
    if array.dtype == ml_dtypes.float8_e4m3fn:
        return torch.from_numpy(array.view(np.uint8)).view(torch.float8_e4m3fn)
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)
