"""FlashMoE in vLLM 0.32 and 0.33; see docs/vllm.md.

vLLM finds `register` by this package's entry point in the group ``vllm.general_plugins``, and calls it in each of its
processes. From then on the operator computes vLLM's fused experts, unquantised or in FP8. Importing this package
imports no vLLM.
"""

from __future__ import annotations

from ..release import joins

OLDEST, NEWEST = (0, 32), (0, 33)
"""The oldest and newest release, by major and minor number, with fused experts that this integration is written for."""

__all__ = ["NEWEST", "OLDEST", "register"]


def register() -> None:
    """Puts FlashMoE in place of vLLM's fused experts, unquantised or in FP8. Idempotent.

    In another release of vLLM, it warns and changes nothing, so that vLLM computes its experts itself; unless
    ``FLASHMOE_UNTRIED=1``.

    Raises
    ------
    ImportError
        There is no vLLM.
    InvalidArgument
        Another plugin has already replaced the same classes.
    """
    if joins("vllm", "vLLM", OLDEST, NEWEST):
        from .hooks import install

        install()
