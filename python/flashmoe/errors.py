"""The errors FlashMoE raises. Every message names what was expected and what was got."""

from __future__ import annotations


class FlashMoEError(RuntimeError):
    """Base of every error raised by this package."""


class InvalidArgument(FlashMoEError, ValueError):
    """An argument is outside its documented domain: wrong shape, dtype, range, option or placement.

    What a rank sees before it begins a call (shapes, types, options) leaves the context usable. The group is told: the
    call is over on every rank, and those that have not refused it themselves raise `GroupError`. (Not with
    ``transport="rdma"``, nor while a graph is captured: there the other ranks wait for the call that this one makes
    next.) What only values show is a `BadRow`.
    """


class BadRow(InvalidArgument):
    """What values alone show of a token: an expert's number in `topk_ids` that there is not, or twice; with `strict`,
    router logits that are NaN or infinite. The token has no experts. Raised by the rank whose token it is when the
    call, which it has made, is over: the context stays usable, and the other ranks know nothing of it.
    """


class CheckpointError(FlashMoEError):
    """A checkpoint file is missing, truncated, or does not hold the MoE layer that was asked for."""


class HeapError(FlashMoEError):
    """The symmetric heap cannot be allocated, or is too small for the call."""


class LimitExceeded(InvalidArgument, HeapError):
    """An argument is more than the context was made for: an `InvalidArgument` of the call, for which the memory that
    the context has is too small."""


class UnknownOption(InvalidArgument, TypeError):
    """A keyword argument has a name that there is not."""


class GroupError(FlashMoEError):
    """The ranks of a group do not meet: one is missing, they disagree on what they are computing, or one has refused
    the call. The last, "rank 1 refused call 17: ...", is the only one behind which the context may be used. With the
    CUDA engine, whose calls do not wait, a later call raises it, which is made, or a wait for the device.
    """


class PeerTimeout(GroupError):
    """A bounded wait expired. The message names the rank that was awaited and what it should have sent."""
