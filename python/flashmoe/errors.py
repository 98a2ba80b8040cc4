"""The errors FlashMoE raises. Every message names what was expected and what was got."""

from __future__ import annotations


class FlashMoEError(RuntimeError):
    """Base of every error raised by this package."""


class InvalidArgument(FlashMoEError, ValueError):
    """An argument is outside its documented domain: wrong shape, dtype, range, option or placement.

    Raised before any rank has been sent anything, so the context stays usable.
    """


class CheckpointError(FlashMoEError):
    """A checkpoint file is missing, truncated, or does not hold the MoE layer that was asked for."""


class HeapError(FlashMoEError):
    """The symmetric heap cannot be allocated, or is too small for the call."""


class GroupError(FlashMoEError):
    """The ranks of a group do not meet: one is missing, or they disagree on what they are computing."""


class PeerTimeout(GroupError):
    """A bounded wait expired. The message names the rank that was awaited and what it should have sent."""
