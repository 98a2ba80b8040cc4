"""The errors FlashMoE raises. Every message names what was expected and what was got."""

from __future__ import annotations


class FlashMoEError(RuntimeError):
    """Base of every error raised by this package."""


class InvalidArgument(FlashMoEError, ValueError):
    """An argument is outside its documented domain: wrong shape, dtype, range, option or placement.

    If a rank finds the error before it begins a call (shapes, types, options), its context stays usable. The rank tells
    the group: the call is then over on every rank, and ranks that have not refused it themselves raise `GroupError`.
    (Not with ``transport="rdma"``, nor while a graph is captured: there the other ranks wait for the next call that
    this rank makes.) Errors that only values show are a `BadRow`.
    """


class BadRow(InvalidArgument):
    """The values of a token are wrong: `topk_ids` names an expert that does not exist, or one expert twice; or, with
    `strict`, a router logit or a number of `choice_bias` is NaN or +inf, or all logits are -inf. The token then has no
    experts. The token's rank still makes the call, and raises this error when the call is over. The context stays
    usable, and the other ranks learn nothing of the error."""


class CheckpointError(FlashMoEError):
    """A checkpoint file is missing, truncated, or does not hold the MoE layer that was asked for."""


class HeapError(FlashMoEError):
    """The symmetric heap cannot be allocated, or is too small for the call."""


class LimitExceeded(InvalidArgument, HeapError):
    """An argument is more than the context was made for. It is an `InvalidArgument` of the call, and a `HeapError`: the
    context's memory is too small for the call."""


class UnknownOption(InvalidArgument, TypeError):
    """A keyword argument has an unknown name."""


class GroupError(FlashMoEError):
    """The ranks do not act as a group: a rank is missing, ranks disagree on what they compute, or a rank has refused
    the call. Only after a refused call, "rank 1 refused call 17: ...", may the context be used further. Calls of the
    CUDA engine do not wait, so there this error is raised by a later call, which is made nevertheless, or by a wait for
    the device."""


class PeerTimeout(GroupError):
    """A bounded wait expired. The message names the rank that was awaited and what it should have sent."""
