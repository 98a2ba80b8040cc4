"""The errors FlashMoE raises. Every message names what was expected and what was got."""

from __future__ import annotations


class FlashMoEError(RuntimeError):
    """Base of every error raised by this package."""


class InvalidArgument(FlashMoEError, ValueError):
    """An argument is outside its documented domain: wrong shape, dtype, range, option or placement.

    What a rank sees before it begins a call (shapes, types, options) leaves the context usable, and the other ranks
    waiting for the call. What only values show (an expert id) is raised when the call, which the rank has made, is
    over: the context stays usable, and the other ranks know nothing of it.
    """


class BadRow(InvalidArgument):
    """With `strict`: a token's router logits are NaN or infinite, so that it has no experts. Raised as what only values
    show."""


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
    """The ranks of a group do not meet: one is missing, or they disagree on what they are computing."""


class PeerTimeout(GroupError):
    """A bounded wait expired. The message names the rank that was awaited and what it should have sent."""
