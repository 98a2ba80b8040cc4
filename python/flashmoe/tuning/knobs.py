"""The numbers that a profile may set, see `flashmoe.Context`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from ..contexts.limits import engine_return_mode
from ..errors import FlashMoEError, InvalidArgument
from ..spec import bounded
from . import profiles


@dataclass(frozen=True)
class Knob:
    """A number that a profile may set."""

    most: int
    """The largest value."""
    tried: tuple[int, ...]
    """Values that `flashmoe tune` tries besides the built-in one."""
    alone: bool = True
    """Whether the number has an effect on a rank that is alone."""
    least: int = 1


PROFILE = {
    "gemm1_lag": Knob(2**31, (66, 132, 264, 528, 1056, 2**31)),
    "raster": Knob(32, (2, 4, 8, 16, 32)),  # kMaxRaster in order.h is 32
    "window": Knob(2**20, (66, 132, 264, 528, 1056)),
    "gemm1_lists": Knob(2, (1, 2), alone=False),
    "own_first": Knob(2**10, (1, 2, 4), alone=False),
    "senders": Knob(2**10, (8, 16, 24, 32, 48), alone=False),
    "link_clusters": Knob(2**10, (0, 4, 8, 12, 16, 24), alone=False, least=0),
}
"""The numbers that a profile may set, by name; see `flashmoe.Context`."""
BUILT_IN = 2**32 - 1
"""What the library takes in place of a number that no profile sets: OrderPolicy::kBuiltIn of order.h."""


def checked_profile(profile: Mapping[str, int]) -> dict[str, int]:
    """`profile`, checked to have known names and valid values. Raises `InvalidArgument`."""
    if not isinstance(profile, Mapping):
        raise InvalidArgument(f"profile: expected a mapping of names among {', '.join(PROFILE)}, got {profile!r}")
    if unknown := [name for name in profile if name not in PROFILE]:
        raise InvalidArgument(f"profile: expected names among {', '.join(PROFILE)}, got {sorted(map(str, unknown))}")
    return {
        name: bounded(f"profile[{name}]", value, PROFILE[name].least, PROFILE[name].most)
        for name, value in profile.items()
    }


def order_of(profile: Mapping[str, int]) -> dict[str, int]:
    """A checked profile as the library takes it: every number, `BUILT_IN` where the profile sets none."""
    return {name: profile.get(name, BUILT_IN) for name in PROFILE}


def stored_profile(setting: profiles.Setting) -> tuple[dict[str, int], str | None]:
    """The profile that `flashmoe tune` has stored for a context with this setting, and its return mode. If the profile
    cannot be used, warns and returns an empty one, because only speed depends on it."""
    try:
        stored = profiles.lookup(setting)
        mode = stored.pop("return_mode", None)
        if mode is not None:
            engine_return_mode("cuda", mode, setting.ranks, setting.top_k, setting.intermediate)
        return checked_profile(stored), mode
    except FlashMoEError as error:
        profiles.notice(logging.WARNING, f"profile: what is stored is not used: {error}")
        return {}, None
