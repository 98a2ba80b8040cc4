"""FlashMoE in vLLM 0.32 and 0.33; see docs/vllm.md.

vLLM finds `register` by this package's entry point in the group ``vllm.general_plugins``, and calls it in each of its
processes. With ``FLASHMOE_VLLM=1`` in the environment, the operator computes vLLM's fused experts, unquantised or in
FP8. Without it, vLLM stays as it is. Importing this package imports no vLLM.
"""

from __future__ import annotations

import logging
import multiprocessing
import os

from ..release import untried

OLDEST, NEWEST = (0, 32), (0, 33)
"""The oldest and newest release, by major and minor number, with fused experts that this integration is written for."""

ENABLED = "FLASHMOE_VLLM"
"""The variable that, with the value 1, puts FlashMoE in place of vLLM's fused experts."""

__all__ = ["ENABLED", "NEWEST", "OLDEST", "register"]


def register() -> None:
    """Puts FlashMoE in place of vLLM's fused experts, unquantised or in FP8, if ``FLASHMOE_VLLM=1``. Idempotent.

    Otherwise, and in another release of vLLM unless ``FLASHMOE_UNTRIED=1``, it logs one line and changes nothing, so
    that vLLM computes its experts itself.

    Raises
    ------
    ImportError
        There is no vLLM.
    InvalidArgument
        Another plugin has already replaced the same classes.
    """
    found = untried("vllm", "vLLM", OLDEST, NEWEST)
    if os.environ.get(ENABLED) != "1":
        _say(f"FlashMoE leaves vLLM as it is; with {ENABLED}=1 it computes the experts")
    elif found is not None:
        _say(found)
    else:
        from .hooks import install

        install()


def _say(line: str) -> None:
    """Logs the line in the first of vLLM's processes alone, because each of them loads the plugin. As a warning: that
    process loads plugins before it configures its log, and until then Python shows nothing less."""
    if multiprocessing.parent_process() is None:
        logging.getLogger(f"vllm.{__name__}").warning(line)
