"""What PyTorch has to do with a call: whether PyTorch must see the call as one operator, whether autocast changes the
call, and whether the call is a recomputation that PyTorch makes in a backward pass."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any


def goes_through_torch(x: Any, others: Iterable[Any], trains: bool = False) -> bool:
    """Whether PyTorch must see the call as one operator. Where PyTorch compiles, traces or transforms calls, it must,
    because PyTorch cannot look into this code. Where gradients are recorded for one of the tensors, it must too, so
    that autograd gets the operator's gradients, or its error if it has none. With `trains`, the caller gives autograd
    the gradients itself, and recording alone is no reason."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(x, torch.Tensor):
        return False
    if torch.compiler.is_compiling() or x.is_meta:
        return True
    recorded, usual = torch.is_grad_enabled() and not trains, (torch.Tensor, torch.nn.Parameter)
    for each in others:
        kind = type(each)
        if kind not in usual and (each is None or not isinstance(each, torch.Tensor)):
            continue
        if recorded and each.requires_grad:
            return True
        # A subclass with a __torch_dispatch__ of its own wraps other tensors, or has no data at all.
        if kind not in usual and kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            return True
    traced = torch.jit.is_tracing() or torch._C._len_torch_dispatch_stack() > 0 or _in_mode_of_functions(torch)
    transformed = torch._C._functorch.peek_interpreter_stack() is not None
    derived = torch.autograd.forward_ad._current_level >= 0
    return traced or transformed or derived


def in_autocast(x: Any) -> bool:
    """Whether x is a tensor of PyTorch in memory of a kind for which ``torch.autocast`` is on."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(x, torch.Tensor):
        return False
    return (device := x.device.type) in ("cpu", "cuda") and torch.is_autocast_enabled(device)


def is_recomputed() -> bool:
    """Whether this call is made within a backward pass. Then it repeats an earlier call: ``torch.utils.checkpoint``
    makes calls again, to compute what it has not kept."""
    torch = sys.modules.get("torch")
    return torch is not None and not torch.compiler.is_compiling() and torch._C._current_graph_task_id() >= 0


def _in_mode_of_functions(torch: Any) -> bool:
    """Whether a mode of PyTorch intercepts calls of its functions. The mode that only sets the device on which tensors
    are made does not count."""
    if torch._C._len_torch_function_stack() == 0:
        return False
    from torch.utils._device import DeviceContext

    return any(type(mode) is not DeviceContext for mode in torch.overrides._get_current_function_mode_stack())
