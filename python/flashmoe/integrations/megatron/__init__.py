"""FlashMoE in Megatron-Core 0.16 to 0.19; see docs/megatron.md.

    from flashmoe.integrations.megatron import with_flashmoe

    spec = with_flashmoe(get_gpt_layer_local_spec(num_experts=64, moe_grouped_gemm=False), max_tokens=4096)

Megatron's router, its losses and its shared experts stay. The operator takes the place of the experts, and of what
sends tokens to them. In another release of Megatron-Core, importing this package warns, and `with_flashmoe` changes
nothing, unless ``FLASHMOE_UNTRIED=1`` is set.
"""

from __future__ import annotations

from typing import Any

from ..release import joins

OLDEST, NEWEST = (0, 16), (0, 19)
"""The oldest and newest release, by major and minor number, with a `MoELayer` that this integration is written for."""

__all__ = ["NEWEST", "OLDEST", "with_flashmoe"]

if joins("megatron", "Megatron.Core", OLDEST, NEWEST):
    from .layer import FlashMoELayer
    from .spec import with_flashmoe

    __all__ += ["FlashMoELayer"]
else:

    def with_flashmoe(spec: Any, **_: Any) -> Any:
        """`spec` as it is."""
        return spec
