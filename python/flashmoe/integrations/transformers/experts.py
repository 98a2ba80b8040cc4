"""The experts implementation ``"flashmoe"``: a model keeps its own router, and `flashmoe.moe` computes its experts."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.integrations.finegrained_fp8 import FP8ExpertsInterface
from transformers.integrations.moe import ExpertsInterface

from ...contexts.context import Context, context_id
from ...contexts.growing import GrowingContext, growing_context
from ...errors import InvalidArgument
from ...pytorch.operator import call
from ...spec import DTYPES, ENCODINGS, Options
from ...spec.tensors import Tensors
from ..operands import as_taken, shape_of
from .attributes import computed_by, remembered, tensor_of
from .recognise import ExpertsOptions, is_of_llama4, recognise

NAME = "flashmoe"

_DEVICES = ("cpu", "cuda", "meta")
_TYPES = tuple(getattr(torch, name) for name in DTYPES)
_QUANTISED = tuple(getattr(torch, encoding.stored) for encoding in ENCODINGS.values())
_PLAIN = (torch.nn.Parameter, type(None), Tensor)

_CONTEXT = "_flashmoe_context"
"""The attribute of an experts module that holds the source of its calls' contexts: a `GrowingContext`, or the `Context`
of a group."""
_CONTEXT_WITH_SHARED = "_flashmoe_context_with_shared"
"""The same attribute for calls that include the block's shared expert."""
_LOCAL = "_flashmoe_local_experts"
"""The attribute of an experts module that says how many experts its tensors have, where others are on other ranks. If
experts are cut, it says how many slices."""
_SLICES = "_flashmoe_slices"
"""The attribute of an experts module that says into how many slices its experts are cut."""


def register() -> None:
    """Makes the implementation known to Transformers. Idempotent."""
    ExpertsInterface.register(NAME, experts_forward)
    FP8ExpertsInterface.register(NAME, experts_forward)


def experts_forward(
    module: torch.nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """What `module`, an experts module of Transformers, computes.

    Parameters
    ----------
    module:
        Its weights are of `hidden_states`' dtype, or quantised with scales, and on its device.
    hidden_states: [T, H]
    top_k_index: [T, K] int32 or int64
        A token's experts; they are distinct, or -1: none.
    top_k_weights: [T, K] float32, or of a type that float32 holds

    Returns
    -------
    [T, H], of hidden_states' dtype.

    Raises
    ------
    InvalidArgument
        The module computes what the operator does not (see `flashmoe.integrations.transformers.recognise`), or a tensor
        is not as above.
    HeapError, FlashMoEError, NotImplementedError
        As `flashmoe.moe`.
    """
    options = recognise(module)
    tensors = routed_operands(module, options, hidden_states, top_k_index, top_k_weights)
    return call(number_of(module, options, top_k_index.shape[1]), tensors, options_of(module, options))


def routed_operands(
    module: torch.nn.Module, options: ExpertsOptions, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensors:
    """`operands_of`, with the choices and weights of a router."""
    weights = as_taken(top_k_weights, x.dtype).contiguous()
    return operands_of(module, options, x, topk_ids=top_k_index.contiguous(), topk_weights=weights)


def options_of(module: torch.nn.Module, options: ExpertsOptions, **routing: Any) -> Options:
    """The operator's options for a call of the experts module. `routing` has the router's options, as plain values."""
    slices = vars(module).get(_SLICES, 1)
    if torch.compiler.is_compiling():
        return options.how._replace(slices=slices, **routing)
    made_of = (options, slices, *routing.items())
    return remembered(module, "_flashmoe_options", made_of, lambda: options.how._replace(slices=slices, **routing))


def number_of(module: torch.nn.Module, options: ExpertsOptions, top_k: int, shared_intermediate: int = 0) -> int:
    """The number by which calls of the operator name the experts module's source of contexts."""
    if torch.compiler.is_compiling():
        return _number_while_compiling(id(module), top_k)
    return _number(module, options, top_k, shared_intermediate)


def is_of_group(module: torch.nn.Module) -> bool:
    """Whether the module's calls are calls of a group of ranks."""
    return isinstance(vars(module).get(_CONTEXT), Context)


def experts_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules of `model` that use Transformers' experts interface, and those of Llama 4, in the model's order."""
    return [
        module
        for module in model.modules()
        if (hasattr(module, "is_concatenated") and hasattr(module, "_apply_gate"))
        or is_of_llama4(module, "Llama4TextExperts")
    ]


def of_group(module: torch.nn.Module, context: Context) -> None:
    """Makes the calls of an experts module into calls of the group. The module has this rank's share of the tensors.

    Other implementations would take the first expert of the share for the first of all experts, so none of them can be
    chosen any more. For the same reason a share cannot be saved under the names of all experts.
    """
    vars(module)[_CONTEXT] = context
    vars(module)[_SLICES] = len(context.placement) // module.num_experts
    mark_as_share(module, len(context.local_experts()))
    always_here(module)
    module.register_state_dict_pre_hook(_refuse_state_dict)


def mark_as_share(module: torch.nn.Module, experts: int) -> None:
    """Marks the module's tensors as those of `experts` experts, this rank's."""
    vars(module)[_LOCAL] = experts


def is_share(module: torch.nn.Module) -> bool:
    """Whether the module's tensors are marked as those of this rank's experts."""
    return _LOCAL in vars(module)


def always_here(module: torch.nn.Module) -> None:
    """Makes this implementation compute an experts module, whichever implementation is chosen."""
    module.__class__ = computed_by(type(module), experts_forward)


def _refuse_state_dict(module: torch.nn.Module, prefix: str, keep_vars: bool) -> None:
    kind = "" if vars(module).get(_SLICES, 1) == 1 else " slices"
    raise InvalidArgument(
        f"state_dict: expected {prefix.removesuffix('.')} to have all E={module.num_experts} experts, got the "
        f"{getattr(module, _LOCAL)}{kind} of this rank; save the model before it is spread over ranks"
    )


def operands_of(module: torch.nn.Module, options: ExpertsOptions, x: Tensor, **others: Tensor | None) -> Tensors:
    """x, the experts' tensors, and `others`, with the checks that the operator does not make."""
    tensors = Tensors(
        x.contiguous(),
        tensor_of(module, options.gate_up),
        tensor_of(module, options.down),
        gate_up_bias=tensor_of(module, options.gate_up_bias) if options.gate_up_bias else None,
        down_bias=tensor_of(module, options.down_bias) if options.down_bias else None,
        gate_up_scale=tensor_of(module, options.gate_up_scale) if options.gate_up_scale else None,
        down_scale=tensor_of(module, options.down_scale) if options.down_scale else None,
        **others,
    )
    _check(module, tensors)
    return tensors


def _check(module: torch.nn.Module, tensors: Tensors) -> None:
    """Raises `InvalidArgument` for weights that are not plain tensors of a type and on a device that an engine takes,
    or that are not those of all experts. The operator makes the other checks."""
    device = tensors.x.device.type
    if device not in _DEVICES:
        raise InvalidArgument(f"hidden_states: expected a tensor on one of {', '.join(_DEVICES)}, got one on {device}")
    experts = vars(module).get(_LOCAL, module.num_experts)
    for tensor in tensors:
        if type(tensor) not in _PLAIN:
            _refuse_distributed(module, tensors)
    for name, weight in (("gate_up_proj", tensors.gate_up_proj), ("down_proj", tensors.down_proj)):
        allowed = _TYPES if tensors.gate_up_scale is None else _QUANTISED
        if weight.ndim != (4 if weight.dtype is torch.uint8 else 3) or weight.dtype not in allowed:
            types = ", ".join(map(str, allowed))
            raise InvalidArgument(
                f"{type(module).__name__}: expected {name} [E, ., .] of {types}, got {list(weight.shape)} "
                f"{weight.dtype} (quantised?)"
            )
        if weight.shape[0] != experts:
            raise InvalidArgument(
                f"{type(module).__name__}: expected {name} of {experts} experts, got {weight.shape[0]}"
            )


def _refuse_distributed(module: torch.nn.Module, tensors: Tensors) -> None:
    for name, tensor in zip(Tensors._fields, tensors, strict=True):
        if isinstance(tensor, DTensor):
            raise InvalidArgument(
                f"{type(module).__name__}: expected {name} as a tensor of this rank alone, got a DTensor"
            )


def _number(module: torch.nn.Module, options: ExpertsOptions, top_k: int, shared_intermediate: int = 0) -> int:
    """The number by which calls of the operator name the module's source of contexts (see `contexts/growing.py`).

    The module holds the source, so the source lives no longer than the last module that shares it. Calls with a shared
    expert have a source of their own, since calls of both kinds may take turns.
    """
    attribute = _CONTEXT if shared_intermediate == 0 else _CONTEXT_WITH_SHARED
    held: GrowingContext | Context | None = vars(module).get(attribute)
    if isinstance(held, Context):
        return context_id(held)
    down, bias = tensor_of(module, options.down), options.down_bias
    beside = None if bias is None else tensor_of(module, bias).dtype
    shape = remembered(
        module,
        "_flashmoe_shape",
        (down.device, down.dtype, beside, down.shape, options, top_k, shared_intermediate),
        lambda: shape_of(down, *options.sizes(module), top_k, shared_intermediate, beside=beside),
    )
    if held is None or held.shape != shape:
        held = vars(module)[attribute] = growing_context(shape)
    return held.number


@torch.compiler.assume_constant_result
def _number_while_compiling(identity: int, top_k: int) -> int:
    """`_number` as a constant in compiled code. PyTorch before 2.13 accepts no module as an argument of such a
    function. So the argument is the module's `id`; PyTorch uses the compiled code for no other module. The id is valid,
    because the module is being called."""
    module = ctypes.cast(identity, ctypes.py_object).value
    return _number(module, recognise(module), top_k)
