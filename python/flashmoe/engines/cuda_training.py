"""Gradients on a GPU: which layers have them, what a call keeps, and what PyTorch's operators do for layers with
biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from .. import _ffi, jit
from ..calls.arguments import layer_of_operands
from ..calls.tensors import Operand, dtype_name
from ..spec import Options
from ..spec.tensors import Tensors

MOST_KEPT = 1 << 36
"""The most bytes that a call can keep, because the backward pass counts them in units of 16 bytes, in 32 bits."""


def missing(tensors: Tensors, rdma: bool, spread: bool = False) -> str | None:
    """Why a call has no gradients on a GPU: words for a part of it that gradients do not support. None: the call has
    gradients. `rdma`: ranks reach one another by puts alone. `spread`: ranks pretend to be on several machines."""
    if rdma:
        return "ranks whose memory is not mapped"
    if spread:
        return "ranks of several machines"
    if tensors.gate_up_scale is not None or dtype_name(tensors.x) not in jit.TRAINED:
        return f"x of {dtype_name(tensors.x)} with weights of {dtype_name(tensors.gate_up_proj)}"
    return None


def kept_token_bytes(tensors: Tensors, options: Options) -> int:
    """Bytes that a call of a rank that is alone keeps for each token. They depend only on the tensors' shapes and
    types, and on the options."""
    given = {
        name: Operand(each.shape, dtype_name(each)) for name, each in tensors._asdict().items() if each is not None
    }
    of_all = tensors.gate_up_proj.shape[0] // options.slices if tensors.router is None else tensors.router.shape[0]
    top_k = options.top_k if tensors.topk_ids is None else tensors.topk_ids.shape[1]
    return _ffi.library().cuda_kept_token_bytes(layer_of_operands(given, options, of_all, top_k).to_map())


class KeptRouting(NamedTuple):
    """Where a call's routing lies in what the call keeps: at its end, in three fields (``cuda::RoutingLayout``). Each
    number is an offset in bytes."""

    ids: int
    weights: int
    logits: int
    bytes: int
    """Bytes of everything that is kept."""

    def own(self, kept: Any) -> Any:
        """The part of `kept` that has the routing."""
        return kept[self.ids :]

    def choices(self, kept: Any, tokens: int, choices: int) -> tuple[Any, Any]:
        """The expert and the weight of each choice, [T, choices] int32 and float32."""
        import torch

        ids, weights = kept[self.ids : self.weights], kept[self.weights : self.logits]
        return ids.view(torch.int32).view(tokens, choices), weights.view(torch.float32).view(tokens, choices)

    def logits_in(self, kept: Any, tensors: Tensors) -> Any:
        """The router's logits, [T, E] float32; None without a router."""
        import torch

        if tensors.router is None:
            return None
        return kept[self.logits :].view(torch.float32).view(tensors.x.shape[0], tensors.router.shape[0])


class KeptRoom(NamedTuple):
    """Room for the rows that a call among several ranks keeps. The layout of what is kept follows from it
    (``gpu::KeptRoom``)."""

    rows: int
    """Rows of this rank's experts; for a shared expert, the rows of each slice."""
    received: int
    """Rows of x of other ranks' tokens, each once; 0 if the backward pass dispatches them again."""
    pitch: int
    """The most tokens that any rank has."""


NO_ROOM = KeptRoom(0, 0, 0)


class KeptRows(NamedTuple):
    """How many rows a call among several ranks has kept (``cuda::KeptRows``), and the room for them. `rows` and
    `received` count what `KeptRoom` has by these names."""

    rows: int
    received: int
    call: int
    """The number of the call among the context's calls."""
    room_rows: int
    room_received: int
    pitch: int

    @property
    def room(self) -> KeptRoom:
        return KeptRoom(self.room_rows, self.room_received, self.pitch)


ALONE = KeptRows(0, 0, 0, *NO_ROOM)
"""Stands for the numbers of a rank that is alone, which follow from the call's tensors."""


def weights_by_bias(tensors: Tensors, given: Mapping[str, Any], ids: Any) -> Any:
    """What `down_bias` contributes to the gradients of combine weights, each of which is ``dY . (down a + bias)``:
    [T, K] float64; None without `down_bias`. `given` is `Gradients.given`; `ids` [T, K] is negative for a choice
    without a row."""
    if tensors.down_bias is None:
        return None
    of_bias = given["y"].double() @ tensors.down_bias.double().T
    return of_bias.gather(1, ids.clamp(min=0).long()).where(ids >= 0, 0.0)


_ROWS_AT_ONCE = 1024  # rows of x that are converted to float64 at a time


def gate_gradient(logit_gradients: Any, x: Any, to: Any, accumulates: bool) -> None:
    """Writes the gradient of the shared expert's gate to `to`, [1, H], or adds it to the contents. It is the sum over
    tokens of x [T, H], times `logit_gradients` [T], float32: the gradients of the products of the gate with x."""
    import torch

    found = x.new_zeros(x.shape[1], dtype=torch.float64)
    for rows, by in zip(x.split(_ROWS_AT_ONCE), logit_gradients.split(_ROWS_AT_ONCE), strict=True):
        found += rows.double().mul_(by.double()[:, None]).sum(0)
    to.copy_(to + found if accumulates else found.view(to.shape))


def bias_gradient(logit_gradients: Any, to: Any, accumulates: bool) -> None:
    """Writes the gradient of a router's bias to `to`, [E], or adds it to the contents. It is the sum over tokens of the
    gradients of the logits, [T, E]."""
    import torch

    found = logit_gradients.sum(0, dtype=torch.float64)
    to.copy_(to + found if accumulates else found)
