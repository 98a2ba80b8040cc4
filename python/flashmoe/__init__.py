"""FlashMoE: a Mixture-of-Experts layer over a group of ranks, with one-sided communication and no collective."""

from ._version import __version__
from .context import Context
from .errors import BadRow, CheckpointError, FlashMoEError, GroupError, HeapError, InvalidArgument, PeerTimeout
from .ops import moe
from .report import CallReport

__all__ = [
    "BadRow",
    "CallReport",
    "CheckpointError",
    "Context",
    "FlashMoEError",
    "GroupError",
    "HeapError",
    "InvalidArgument",
    "PeerTimeout",
    "__version__",
    "moe",
]
