"""Gradients on a GPU: which layers have them, what a call keeps, and what PyTorch's operators add to the kernel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from .. import _ffi, jit
from ..arguments import Options, Tensors
from ..spec import ELEMENT_BYTES
from ..tensors import dtype_name

MOST_KEPT = 1 << 36
"""Bytes that a call keeps at most: the backward pass numbers 16 of them at a time, in 32 bits."""


def missing(tensors: Tensors, options: Options, rdma: bool) -> str | None:
    """What of a call there are no gradients of on a GPU, in words; None: there are. `rdma`: ranks reach one another by
    puts alone."""
    if rdma:
        return "ranks whose memory is not mapped"
    if tensors.gate_up_scale is not None or dtype_name(tensors.x) not in jit.TRAINED:
        return f"x of {dtype_name(tensors.x)} with weights of {dtype_name(tensors.gate_up_proj)}"
    if tensors.shared_down is not None:
        return "a shared expert"
    if options.weights_on_input:
        return "weights_on_input"
    if options.slices != 1:
        return f"slices={options.slices}"
    return None


def kept_bytes(tensors: Tensors, options: Options) -> int:
    """Bytes that a call of a rank alone keeps of a token: pre-activations, experts and weights of choices, a router's
    logits."""
    columns = tensors.gate_up_proj.shape[2 if options.transposed else 1]
    return _token_bytes(tensors, options, columns * ELEMENT_BYTES[dtype_name(tensors.x)])


def kept_routing_bytes(tensors: Tensors, options: Options) -> int:
    """Bytes that a call keeps of an own token's routing."""
    return _token_bytes(tensors, options, 0)


def _token_bytes(tensors: Tensors, options: Options, row_bytes: int) -> int:
    """Of a token, each of whose choices has pre-activations of so many bytes: what the library lays out, and logits."""
    router, ids = tensors.router, tensors.topk_ids
    choices = options.top_k if ids is None else ids.shape[1]
    of_choices = _ffi.library().cuda_kept_token_bytes(int(choices), int(row_bytes))
    return of_choices + (0 if router is None else 4 * router.shape[0])


class KeptRows(NamedTuple):
    """How many rows a call among several ranks has kept (``cuda::KeptRows``)."""

    rows: int
    """Of this rank's experts."""
    received: int
    """Of other ranks' tokens, each once."""
    pitch: int
    """The most tokens that a rank had."""
    call: int
    """Which of the context's calls it was."""


ALONE = KeptRows(0, 0, 0, 0)
"""Of a rank alone, which knows its rows without."""


def counted_rows(counts: Any, ranks: int, call: int) -> tuple[KeptRows, Any]:
    """Of what the kernel has counted, int32 [2 R + R El] on the host: tokens and received rows of each rank, and how
    many rows each expert has of a rank's. And the numbers of the experts' first rows, int32 [El + 1]."""
    import torch

    tokens, received, rows = counts[:ranks], counts[ranks : 2 * ranks], counts[2 * ranks :].view(ranks, -1)
    ends = rows.sum(0).cumsum(0)
    first = torch.cat([ends.new_zeros(1), ends]).int()
    return KeptRows(int(first[-1]), int(received.sum()), int(tokens.max()), call), first


def kept_logits(kept: Any, tensors: Tensors) -> Any:
    """Of a call of these tensors the router's logits, [T, E] float32, which come last; None without a router."""
    import torch

    if tensors.router is None:
        return None
    tokens, experts = tensors.x.shape[0], tensors.router.shape[0]
    return kept[kept.shape[0] - 4 * tokens * experts :].view(torch.float32).view(tokens, experts)


def kept_routing(kept: Any, end: int, tokens: int, choices: int) -> tuple[Any, Any]:
    """Experts and weights, [T, K] int32 and float32, which end `end` bytes behind the beginning."""
    import torch

    each = 4 * tokens * choices
    ids, weights = kept[end - 2 * each : end - each], kept[end - each : end]
    return ids.view(torch.int32).view(tokens, choices), weights.view(torch.float32).view(tokens, choices)


class Computed(NamedTuple):
    """What the kernels of a backward pass have computed."""

    x: Any
    """[T, H]: what the experts owe to x."""
    weights: Any
    """[T, K] float32: gradients of combine weights, but for what biases owe to them; 0 where a choice was dropped."""
    weights_by_bias: Any
    """[T, K] float64: that; None without biases."""
    logit_parts: Any
    """[T, LOGIT_PARTS, E] bfloat16, of which the sums are the gradients of logits; None without a router."""


LOGIT_PARTS = 3
"""A float32 number is the sum of so many bfloat16 ones (kLogitParts)."""


def weights_by_bias(tensors: Tensors, given: Mapping[str, Any], ids: Any) -> Any:
    """What `down_bias` owes to the gradients of combine weights, since one is ``dY . (down a + bias)``: [T, K] float64,
    None without. `given` as in `Engine.backward`; `ids` [T, K], ``~expert`` where dropped."""
    if tensors.down_bias is None:
        return None
    of_bias = given["y"].double() @ tensors.down_bias.double().T
    return of_bias.gather(1, ids.where(ids >= 0, ~ids).long()).where(ids >= 0, 0.0)


def finish(tensors: Tensors, wanted: Mapping[str, Any], computed: Computed, accumulates: bool = False) -> None:
    """Writes what is wanted of x, of combine weights and of the router, or adds to that of the router.

    Products with the gradients of logits are of their parts, so that bfloat16 tensor cores have them, and are added up
    in float32: a product of float64 or float32 takes several times as long, and that of TF32 is not exact.
    """
    import torch

    if tensors.router is None:
        of_weights = computed.weights
        if computed.weights_by_bias is not None:
            of_weights = of_weights + computed.weights_by_bias
        for name, found in (("topk_weights", of_weights), ("x", computed.x)):
            if name in wanted and found is not wanted[name]:
                wanted[name].copy_(found)
        return
    experts = tensors.router.shape[0]
    parts = computed.logit_parts.flatten(1)  # [T, LOGIT_PARTS E]
    if "x" in wanted:
        by_router = sum(_product(parts, each.repeat(LOGIT_PARTS, 1)) for each in _bfloat16(tensors.router))
        torch.add(by_router, computed.x, out=wanted["x"])
    if "router" in wanted:
        by_part = sum(_product(parts.T, each) for each in _bfloat16(tensors.x))
        _write(wanted["router"], by_part.view(LOGIT_PARTS, experts, -1).sum(0), accumulates)
    if "router_bias" in wanted:
        by_token = parts.sum(0, dtype=torch.float64).view(LOGIT_PARTS, experts).sum(0)
        _write(wanted["router_bias"], by_token, accumulates)


def _write(to: Any, found: Any, accumulates: bool) -> None:
    to.copy_(to + found if accumulates else found)


def _bfloat16(tensor: Any) -> list[Any]:
    """bfloat16 tensors whose sum one of a 16-bit type is, exactly."""
    import torch

    high = tensor.to(torch.bfloat16)
    return [high] if tensor.dtype == torch.bfloat16 else [high, (tensor.float() - high.float()).to(torch.bfloat16)]


def _product(left: Any, right: Any) -> Any:
    """Of bfloat16 matrices, in float32."""
    import torch

    return torch.mm(left, right, out_dtype=torch.float32)
