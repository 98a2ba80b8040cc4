"""FlashMoE in vLLM 0.32 and 0.33; see docs/vllm.md.

vLLM finds `register` by the entry point of this package in the group ``vllm.general_plugins`` and calls it in each of
its processes. From then on its fused experts, unquantised or in FP8, are computed by the operator. Importing this
imports no vLLM.
"""

from __future__ import annotations

from ..release import check_release
from .recognise import ADVICE

OLDEST, NEWEST = (0, 32), (0, 33)
"""The releases, by major and minor number, whose fused experts this has been written for."""

__all__ = ["NEWEST", "OLDEST", "register"]


def register() -> None:
    """Puts FlashMoE in the place of vLLM's fused experts, unquantised or in FP8. Idempotent.

    Raises
    ------
    ImportError
        There is no vLLM, or another release. vLLM does not start then: it would compute the experts by itself.
    InvalidArgument
        Another plugin has replaced what this one replaces.
    """
    check_release("vllm", "vLLM", OLDEST, NEWEST, f"; {ADVICE}")
    from .hooks import install

    install()
