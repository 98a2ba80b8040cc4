"""FlashMoE in torchtitan 0.3; see docs/torchtitan.md.

`flashmoe_experts` is an override, which torchtitan imports by name:
``--override.imports flashmoe.integrations.torchtitan.flashmoe_experts``. In another release of torchtitan, importing
this package warns, and the override replaces nothing, unless ``FLASHMOE_UNTRIED=1`` is set.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from torchtitan.config import Configurable, override

from ..release import joins

OLDEST, NEWEST = (0, 3), (0, 3)
"""The oldest and newest release, by major and minor number, with a `RoutedExperts` that this integration is written
for."""

__all__ = ["NEWEST", "OLDEST", "flashmoe_experts"]

if joins("torchtitan", "torchtitan", OLDEST, NEWEST):
    from torchtitan.models.common.moe import GroupedExperts, RoutedExperts

    from .experts import FlashMoEExperts, FlashMoERoutedExperts, refusal

    __all__ += ["FlashMoEExperts", "FlashMoERoutedExperts"]

    @override(target=RoutedExperts.Config, description="Routed experts, and what sends tokens to them, by FlashMoE.")
    def flashmoe_experts(cfg: RoutedExperts.Config) -> FlashMoERoutedExperts.Config:
        """The configuration of `FlashMoERoutedExperts`, from torchtitan's. Raises `InvalidArgument` for experts that
        the operator does not compute."""
        for name, got, expected in (
            ("routed_experts", type(cfg), RoutedExperts.Config),
            ("inner_experts", type(cfg.inner_experts), GroupedExperts.Config),
        ):
            if got is not expected:
                raise refusal(name, expected.__qualname__, f"{got.__module__}.{got.__qualname__}")
        inner = FlashMoEExperts.Config(**_fields_of(cfg.inner_experts))
        return FlashMoERoutedExperts.Config(**_fields_of(cfg) | {"inner_experts": inner})

else:

    @override(target=Configurable.Config, fqns=[], description="Nothing: this release of torchtitan is not known.")
    def flashmoe_experts(cfg: Any) -> Any:
        """`cfg` as it is. torchtitan calls this override for no configuration."""
        return cfg


def _fields_of(config: object) -> dict[str, object]:
    return {field.name: getattr(config, field.name) for field in fields(config) if field.init}
