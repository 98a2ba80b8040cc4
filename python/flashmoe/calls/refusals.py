"""Tells the group of a call that one rank cannot begin, so that no rank takes this rank's next call for that one."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from ..errors import BadRow, FlashMoEError, GroupError

_TOLD = "_flashmoe_told"


def tell(ctx: Any, error: Exception, x: Any = None) -> None:
    """Is called where a call of `ctx` ends with `error`; `x` is the call's tokens, if the caller has them. Tells the
    other ranks that this rank refuses the call, which is then over on all ranks. Tells nobody if all ranks know of the
    error, as with any `GroupError`, or if this rank has begun the call, as with a `BadRow`.

    Tells nobody either while PyTorch only traces calls, or if tensors have no values, because the ranks then make no
    call. May raise `PeerTimeout` itself, as `flashmoe.engines.base.Engine.refuse` does.
    """
    if getattr(ctx, "ranks", 1) == 1 or isinstance(error, GroupError | BadRow) or hasattr(error, _TOLD) or traces(x):
        return
    setattr(error, _TOLD, True)  # so that further calls of `tell` with this error do nothing
    ctx._engine.refuse(str(error) if isinstance(error, FlashMoEError) else f"{type(error).__name__}: {error}")


@contextlib.contextmanager
def made() -> Iterator[None]:
    """Encloses what an engine does after it has begun a call. `tell` does not report errors that are raised there."""
    try:
        yield
    except Exception as error:
        setattr(error, _TOLD, True)
        raise


def traces(x: Any) -> bool:
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    if torch.compiler.is_compiling() or getattr(x, "is_meta", False):
        return True
    return torch._guards.detect_fake_mode((x,)) is not None
