"""FlashMoE: a Mixture-of-Experts layer over a group of ranks, with one-sided communication and no collective."""

from typing import Any

from flashmoe_layer import refuse_other_distributions

from .system.interrupts import deferred

refuse_other_distributions()  # before the imports below can take another distribution's modules for this package's

with deferred():
    from ._version import __version__
    from .calls.moe import moe
    from .contexts.context import Context
    from .contexts.kept import release
    from .errors import (
        BadRow,
        CheckpointError,
        FlashMoEError,
        GroupError,
        HeapError,
        InvalidArgument,
        LimitExceeded,
        PeerTimeout,
        UnknownOption,
    )
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
    "LimitExceeded",
    "PeerTimeout",
    "UnknownOption",
    "__version__",
    "moe",
    "release",
]


def __getattr__(name: str) -> Any:
    """Imports `flashmoe.nn` only when it is first used, because `flashmoe.nn` imports PyTorch."""
    if name != "nn":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return importlib.import_module(".nn", __name__)
