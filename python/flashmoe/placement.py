"""Which rank holds which expert."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence

from .errors import InvalidArgument
from .spec import MAX_EXPERTS


def contiguous(experts: int, ranks: int) -> tuple[int, ...]:
    """The default: contiguous shares, as even as possible; the first ``experts % ranks`` ranks get one more."""
    share, more = divmod(experts, ranks)
    return tuple(rank for rank in range(ranks) for _ in range(share + (rank < more)))


def as_ints(placement: Sequence[int]) -> tuple[int, ...]:
    """`placement`, any iterable of integers, as a tuple of them. Raises `InvalidArgument`."""
    try:
        ranks = tuple(operator.index(rank) for rank in itertools.islice(placement, MAX_EXPERTS + 1))
    except Exception:  # whatever a foreign type's __iter__ or __index__ raises
        raise InvalidArgument(f"placement: expected rank numbers, one for each expert, got {placement!r}") from None
    if len(ranks) > MAX_EXPERTS:  # maybe without end
        raise InvalidArgument(f"placement: expected at most {MAX_EXPERTS} ranks, one for each expert, got more")
    return ranks


def checked(placement: Sequence[int] | None, experts: int, ranks: int) -> tuple[int, ...]:
    """`placement` as a tuple of E ranks, the default if None. Raises `InvalidArgument`."""
    if placement is None:
        if (
            experts > MAX_EXPERTS
        ):  # of a tensor that may be without end: empty in another dimension, or not what it says
            raise InvalidArgument(f"experts: expected at most {MAX_EXPERTS}, got {experts}")
        return contiguous(experts, ranks)
    owners = as_ints(placement)
    if len(owners) != experts:
        raise InvalidArgument(f"placement: expected one rank for each of E={experts} experts, got {len(owners)}")
    for expert, rank in enumerate(owners):
        if not 0 <= rank < ranks:
            raise InvalidArgument(f"placement: expected ranks in [0, {ranks}), got {rank} for expert {expert}")
    return owners


def local_experts(placement: Sequence[int], rank: int) -> list[int]:
    """The experts of `rank`, ascending."""
    return [expert for expert, owner in enumerate(placement) if owner == rank]


def most_local(placement: Sequence[int], ranks: int) -> int:
    """How many experts the rank with the most of them holds."""
    return max(list(placement).count(rank) for rank in range(ranks))
