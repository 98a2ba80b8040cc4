"""FlashMoE in Megatron-Core 0.16 to 0.19; see docs/megatron.md.

    from flashmoe.integrations.megatron import with_flashmoe

    spec = with_flashmoe(get_gpt_layer_local_spec(num_experts=64, moe_grouped_gemm=False), max_tokens=4096)

Megatron's router, its losses and its shared experts stay. The operator takes the place of the experts, and of what
sends tokens to them.
"""

from __future__ import annotations

from ..release import check_release

OLDEST, NEWEST = (0, 16), (0, 19)
"""The oldest and newest release, by major and minor number, with a `MoELayer` that this integration is written for."""

RELEASE = check_release("megatron", "Megatron.Core", OLDEST, NEWEST)

from .layer import FlashMoELayer  # noqa: E402
from .spec import with_flashmoe  # noqa: E402

__all__ = ["NEWEST", "OLDEST", "FlashMoELayer", "with_flashmoe"]
