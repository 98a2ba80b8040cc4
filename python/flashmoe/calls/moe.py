"""`moe`: the operator as a function."""

from __future__ import annotations

from typing import Any, Unpack

from ..arguments import SCALES, WRITTEN, CallOptions, Options, Tensors
from ..contexts.context import Context, context_id, run
from ..placement import Placement
from ..spec import truth
from .keywords import refuse_unknown
from .refusals import tell
from .through_torch import goes_through_torch

_KNOWN = frozenset((*Options._fields, *Tensors._fields, "ctx", "trace"))


def moe(
    ctx: Context,
    x: Any,
    gate_up_proj: Any,
    down_proj: Any,
    *,
    router: Any = None,
    topk_ids: Any = None,
    topk_weights: Any = None,
    top_k: int | None = None,
    activation: str = "swiglu",
    renormalize: bool = True,
    router_bias: Any = None,
    gate_up_bias: Any = None,
    down_bias: Any = None,
    placement: Placement | None = None,
    capacity_factor: float | None = None,
    return_mode: str | None = None,
    trace: bool = False,
    exact: bool = False,
    choice_bias: Any = None,
    shared_gate_up: Any = None,
    shared_down: Any = None,
    shared_gate: Any = None,
    **options: Unpack[CallOptions],
) -> Any:
    """One Mixture-of-Experts layer over the ranks of `ctx`; every rank must call it.

    ``y[t] = sum_k w[t, k] * (down_proj[e] @ act(gate_up_proj[e] @ x[t] + gate_up_bias[e]) + down_bias[e])``
    with ``e = topk_ids[t, k]`` (FlashDMoE, equations 5.1 to 5.3). With a gate, ``act`` is ``act(gate) * up`` of the two
    halves of ``gate_up_proj[e] @ x[t]``.

    Tensors are of one element type: float32, bfloat16 (NumPy: ``ml_dtypes.bfloat16``) or float16; experts' matrices may
    be quantised (`CallOptions`). T may differ by rank, and be 0. What engines ask of tensors: see `Context`.

    Parameters
    ----------
    x: [T, H]
        This rank's tokens.
    gate_up_proj: [El, 2I, H] with a gate (gate rows, then up rows), else [El, I, H]
    down_proj: [El, H, I]
        Weights of this rank's El experts, by ascending expert id.
    router: [E, H]
        Router weights: a token gets its `top_k` largest scores, in fp32; of equal ones, the lower experts.
    topk_ids, topk_weights: [T, K] int32 or int64, [T, K] float32 or x's type
        Given routing, instead of `router`: distinct experts; -1: none. E: `placement`'s, a lone rank's, or `ctx`'s.
    top_k, renormalize:
        With `router`: K; whether the K weights are divided by their sum (that of sigmoids plus 1e-20).
    activation:
        One of `flashmoe.spec.ACTIVATIONS`, such as ``"gelu"`` (by erf); of `flashmoe.spec.GATED` with a gate.
    router_bias, gate_up_bias, down_bias: [E], [El, 2I] or [El, I], [El, H]
        Optional biases. choice_bias, [E] float32: added to the scores for the choice of experts alone.
    shared_gate_up, shared_down, shared_gate: [2Is, H] or [Is, H], [H, Is], [1, H]
        The shared expert, whole on every rank: an FFN of width Is, a multiple of I. Its result is added for each of
        this rank's tokens, times ``sigmoid(shared_gate @ x[t])`` if there is a gate. (In two matrices: `shared_up`.)
    placement, capacity_factor:
        Who holds which expert, as for a `Context`; default: the context's for its E, else contiguous shares. Factor
        None: dropless. Else each rank keeps, per expert, the first ``ceil(capacity_factor * (T * K) / E)`` of its
        (token, k) pairs in token order (GShard, section 2.2). If `ctx` has a factor: required, at most that.
    return_mode, trace:
        See `Context`; whether to record what actors do when (``ctx.last_call.events``). On a GPU a traced call waits.
    exact:
        CUDA engine, float32: multiply in float32, ten times as slow as the default, in TF32 (10 bits of mantissa).

    Returns
    -------
    [T, H], of x's library and type. Intermediate activations and each weighted expert row are rounded to that type,
    with ``"reduced"`` also a rank's partial sum; all accumulation is in fp32 in a fixed order, so the bits do not
    depend on timing, and with ``"direct"`` not on R either.

    With PyTorch tensors there are gradients (docs/training.md); all ranks make the backward passes in one order.
    Quantised weights, transport ``"rdma"`` and forward-mode derivatives raise `NotImplementedError`. Where PyTorch
    compiles, traces or transforms calls, and for tensors without values, a call without `trace` is one operator, such
    as ``torch.ops.flashmoe.moe`` (`flashmoe.pytorch.operator`).

    Raises
    ------
    InvalidArgument
        A tensor or option is outside its domain. If shapes, types or options show it, the context stays usable; with
        the CUDA engine the other ranks wait for the call. If only values show it (ids; with `strict`, NaN logits), this
        rank raises a `BadRow` once it knows (docs/models.md, docs/gpus.md), and the ranks' next calls match.
    GroupError
        The ranks disagree on sizes, types, placement or other options; an earlier call failed; or another rank has
        refused this call (CUDA engine: an earlier one), as the message says: then all may make the next call.
    LimitExceeded, PeerTimeout
        The call is more than the context was made for; or the group stood still for its timeout (the message says who).
    FlashMoEError
        The context is closed, another process's, or in a call that this thread's signal handler has interrupted; a
        kernel cannot be compiled or launched, or not be captured yet; a thread of the CPU engine could not go on.
    """
    weights = (gate_up_proj, down_proj, router, router_bias, choice_bias, gate_up_bias, down_bias, shared_gate_up)
    try:
        further, written = ([options.pop(name, None) for name in names] for names in (("shared_up", *SCALES), WRITTEN))
        tensors = Tensors(x, *weights, shared_down, shared_gate, *further, topk_ids, topk_weights, *written)
        refuse_unknown("moe", options, _KNOWN)
        chosen = Options(top_k, activation, renormalize, placement, capacity_factor, return_mode, exact, **options)
        return _call(ctx, tensors, chosen, trace)
    except Exception as error:
        tell(ctx, error, x)
        raise


def _call(ctx: Context, tensors: Tensors, options: Options, trace: bool) -> Any:
    if not truth("trace", trace) and goes_through_torch(tensors.x, tensors):
        from ..pytorch import operator

        return operator.by_operator(context_id(ctx), tensors, options)
    return run(ctx, tensors, options, trace)
