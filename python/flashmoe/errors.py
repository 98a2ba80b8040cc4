"""The errors FlashMoE raises. Every message names what was expected and what was got."""

from __future__ import annotations


class FlashMoEError(RuntimeError):
    """Base of every error raised by this package."""


class InvalidArgument(FlashMoEError, ValueError):
    """An argument is outside its documented domain: wrong shape, dtype, range, option or placement.

    What a rank sees before it begins a call (shapes, types, options) leaves the context usable. With the CPU engine
    the group is told: the call is over on every rank, and those that have not refused it themselves raise `GroupError`.
    With the CUDA engine the other ranks wait for the call. What only values show (an expert id, a router logit that is
    not finite) ends the call on every rank, and the context with it.
    """


class CheckpointError(FlashMoEError):
    """A checkpoint file is missing, truncated, or does not hold the MoE layer that was asked for."""


class HeapError(FlashMoEError):
    """The symmetric heap cannot be allocated, or is too small for the call."""


class GroupError(FlashMoEError):
    """The ranks of a group do not meet: one is missing, they disagree on what they are computing, or one has refused
    the call. The last, "rank 1 refused call 17: ...", is the only one behind which the context may be used.
    """


class PeerTimeout(GroupError):
    """A bounded wait expired. The message names the rank that was awaited and what it should have sent."""
