"""`moe`: the operator as a function."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, Unpack, overload

from ..contexts.context import Context, context_id, run
from ..errors import InvalidArgument
from ..spec import OperatorOptions, Options, truth
from ..spec.tensors import CallTensors, Given, Tensors, parted
from . import alone
from .keywords import refuse_unknown, shows
from .optional_context import ctx_may_be_left_out
from .refusals import tell
from .through_torch import goes_through_torch, in_autocast
from .tokens import flattened, has_leading

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    Tokens = TypeVar("Tokens", NDArray[Any], Tensor)
    """The result is of the type of x."""

_KNOWN = frozenset((*Tensors._fields, *Options._fields, "ctx", "trace"))


@overload
def moe(x: Tokens, gate_up_proj: Any, down_proj: Any, *, trace: bool = False, **given: Unpack[Given]) -> Tokens: ...
@overload
def moe(
    ctx: Context | None,
    x: Tokens,
    gate_up_proj: Any,
    down_proj: Any,
    *,
    trace: bool = False,
    **given: Unpack[Given],
) -> Tokens: ...
@ctx_may_be_left_out("x", "gate_up_proj", "down_proj")
@shows(CallTensors, OperatorOptions)
def moe(
    ctx: Context | None, x: Any, gate_up_proj: Any, down_proj: Any, *, trace: bool = False, **given: Unpack[Given]
) -> Any:
    """One Mixture-of-Experts layer over the ranks of `ctx`; every rank must call it.

    ``moe(x, gate_up_proj, down_proj, ..)``, without a context, is a call of a rank alone. Its result has the same bits
    as with a context. The first such call makes a context for its shapes, on the engine of x's device. Later calls use
    this context, and a call with more tokens than it has room for makes a larger one. Contexts of the last 8 shapes are
    kept (`flashmoe.release`).

    ``y[t] = sum_k w[t, k] * (down_proj[e] @ act(gate_up_proj[e] @ x[t] + gate_up_bias[e]) + down_bias[e])``
    with ``e = topk_ids[t, k]`` (FlashDMoE, equations 5.1 to 5.3). With a gate, ``act`` is ``act(gate) * up`` of the two
    halves of ``gate_up_proj[e] @ x[t]``.

    Tensors are of one element type: float32, bfloat16 (NumPy: ``ml_dtypes.bfloat16``) or float16; experts' matrices may
    be quantised (`CallOptions`). T may differ by rank, and be 0. What engines ask of tensors: see `Context`.

    Parameters
    ----------
    ctx: Context
        The context. It may be left out by a rank that is alone.
    x: [T, H], or [.., H]
        This rank's tokens. With several leading dimensions, the tensors that have a row for each token may have these
        dimensions in place of T too.
    gate_up_proj: [El, 2I, H] with a gate (gate rows, then up rows), else [El, I, H]
    down_proj: [El, H, I]
        Weights of this rank's El experts, by ascending expert id.
    trace: bool, default False
        Whether to record when actors do what (``ctx.last_call.events``). It needs `ctx`. On a GPU, a traced call
        returns only when the kernel has ended.
    {options}

    Returns
    -------
    A tensor of x's shape, library and type. Intermediate activations and each weighted expert row are rounded to that
    type, with ``"reduced"`` also a rank's partial sum; all accumulation is in fp32 in a fixed order, so the bits do not
    depend on timing, and with ``"direct"`` not on R either.

    With PyTorch tensors there are gradients (docs/training.md); all ranks make the backward passes in the same order.
    Quantised weights, transport ``"rdma"`` and forward-mode derivatives raise `NotImplementedError`. Where PyTorch
    compiles, traces or transforms calls, and for tensors without values, a call without `trace` is one operator, such
    as ``torch.ops.flashmoe.moe`` (`flashmoe.pytorch.operator`).

    Raises
    ------
    InvalidArgument
        A tensor or option is outside its domain. If shapes, types or options show it, the context stays usable, and the
        other ranks raise `GroupError` (`flashmoe.errors.InvalidArgument`). If only values show it (ids; with `strict`,
        NaN logits), this rank raises a `BadRow` once it knows (docs/models.md, docs/gpus.md), and all ranks can make
        their next call.
    GroupError
        The ranks disagree on sizes, types, placement or other options; an earlier call failed; or another rank has
        refused this call (CUDA engine: an earlier one), as the message says: then all may make the next call.
    LimitExceeded, PeerTimeout
        The call is larger than the context was made for; or nothing in the group made progress for its timeout (the
        message says which rank holds it up).
    FlashMoEError
        The context is closed, another process's, or in a call that this thread's signal handler has interrupted; a
        kernel cannot be compiled or launched, or not be captured yet; a thread of the CPU engine could not go on.

    Examples
    --------
    >>> import flashmoe, numpy as np
    >>> x, router = np.ones((5, 16), np.float32), np.ones((4, 16), np.float32)
    >>> gate_up_proj, down_proj = np.ones((4, 16, 16), np.float32), np.ones((4, 16, 8), np.float32)
    >>> flashmoe.moe(x, gate_up_proj, down_proj, router=router, top_k=2).shape
    (5, 16)
    """
    try:
        refuse_unknown("moe", given, _KNOWN)
        return _call(ctx, *parted(x, gate_up_proj, down_proj, given), trace)
    except Exception as error:
        tell(ctx, error, x)
        raise


def _call(ctx: Context | None, tensors: Tensors, options: Options, trace: bool) -> Any:
    if has_leading(tensors.x):
        return _call(ctx, flattened(tensors), options, trace).reshape(tensors.x.shape)
    if in_autocast(tensors.x):
        from ..pytorch.autocast import as_autocast

        tensors, options = as_autocast(tensors, options)
    if truth("trace", trace):
        if ctx is None:
            raise InvalidArgument("trace: expected a context with it, in whose last_call events are, got None")
    elif goes_through_torch(tensors.x, tensors):
        from ..pytorch import operator

        number = alone.number_of(tensors, options) if ctx is None else context_id(ctx)
        return operator.by_operator(number, tensors, options)
    if ctx is not None:
        return run(ctx, tensors, options, trace)
    kept = alone.context_of(tensors, options)
    return kept.use(tensors.x.shape[0], lambda own: run(own, tensors, options, False))
