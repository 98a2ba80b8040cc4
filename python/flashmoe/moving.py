"""Experts on their way from one placement to another, over ``torch.distributed``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from . import placement as placements
from .errors import GroupError, InvalidArgument

_AT_ONCE = 64
"""Experts between whose first and last message all ranks wait: so many rows of a tensor are on their way at most."""


class Move(NamedTuple):
    """An expert that a rank needs and has not got."""

    expert: int
    source: int
    target: int


def moves(before: placements.Placement, after: placements.Placement) -> list[Move]:
    """What must be sent for experts placed as in `before` to be as in `after`, by ascending expert and target.

    A rank that has an expert keeps it. The ranks that an expert comes to get it from those that have it, in turn.
    """
    found = []
    for expert, (has, wants) in enumerate(zip(before, after, strict=True)):
        sources = placements.holders(has)
        targets = sorted(set(placements.holders(wants)) - set(sources))
        found += [Move(expert, sources[i % len(sources)], target) for i, target in enumerate(targets)]
    return found


def move(
    tensors: Mapping[str, Tensor], before: placements.Placement, after: placements.Placement, group: Any = None
) -> dict[str, Tensor]:
    """See `flashmoe.placement.move`."""
    if not dist.is_initialized():
        raise InvalidArgument("group: expected torch.distributed to be initialised, got no process group")
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    facts = together(group, lambda: _facts(tensors, before, after, rank, ranks), "bring its experts")
    for other, theirs in enumerate(facts):
        for what, mine, their in zip(("before", "after", "tensors"), facts[0], theirs, strict=True):
            if mine != their:
                raise GroupError(
                    f"{what}: expected all ranks to have the same, got {their} on rank {other}, {mine} on 0"
                )
    before, after = (placements.as_placed(each) for each in facts[rank][:2])
    mine, wanted = (placements.local_experts(each, rank) for each in (before, after))
    place, to = ({expert: at for at, expert in enumerate(experts)} for experts in (mine, wanted))
    made = {}
    todo = moves(before, after)
    for name, old in sorted(tensors.items()):
        old = old.detach().contiguous()
        new = made[name] = old.new_empty((len(wanted), *old.shape[1:]))
        for expert in wanted:
            if expert in place:
                new[to[expert]] = old[place[expert]]
        for first in range(0, len(todo), _AT_ONCE):
            part = todo[first : first + _AT_ONCE]
            _exchange(list(_messages(part, rank, old, place, new, to)), group)
    return {name: made[name] for name in tensors}


def together(group: Any, act: Callable[[], Any], what: str) -> list[Any]:
    """What `act` returns on each rank of the group, once all have done it: one that fails must not be waited for as one
    that is late. Raises its error, or `GroupError` where it is another rank's."""
    result = error = None
    try:
        result = act()
    except Exception as raised:
        error = raised
    outcomes: list[Any] = [None] * dist.get_world_size(group)
    said = (None, result) if error is None else (f"{type(error).__name__}: {error}", None)
    dist.all_gather_object(outcomes, said, group)
    if error is not None:
        raise error
    for rank, (other, _) in enumerate(outcomes):
        if other is not None:
            raise GroupError(f"rank {rank}: expected it to {what}, got {other}")
    return [result for _, result in outcomes]


def _facts(
    tensors: Any, before: Any, after: Any, rank: int, ranks: int
) -> tuple[placements.Placed, placements.Placed, dict[str, tuple[tuple[int, ...], str]]]:
    """What all ranks must have in common, once this one's tensors are those of its experts."""
    experts = len(placements.as_placed(before))
    placed = placements.checked(before, experts, ranks), placements.checked(after, experts, ranks)
    local = len(placements.local_experts(placed[0], rank))
    if not isinstance(tensors, Mapping) or not tensors:
        raise InvalidArgument(f"tensors: expected tensors by name, got {type(tensors).__name__}")
    rows = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided or tensor.ndim < 1:
            raise InvalidArgument(f"{name}: expected a dense tensor of PyTorch, got {type(tensor).__name__}")
        if len(tensor) != local:
            raise InvalidArgument(
                f"{name}: expected El={local} experts, those of rank {rank}, got {list(tensor.shape)}"
            )
        rows[name] = tuple(tensor.shape[1:]), str(tensor.dtype)
    return *placed, dict(sorted(rows.items()))


def _messages(
    todo: list[Move], rank: int, old: Tensor, place: dict[int, int], new: Tensor, to: dict[int, int]
) -> Iterator[tuple[Any, Tensor, int]]:
    """This rank's part in the moves: each an operation, the bytes of a row, and the other rank."""
    for expert, source, target in todo:
        if source == rank:
            yield dist.isend, _bytes(old[place[expert]]), target
        elif target == rank:
            yield dist.irecv, _bytes(new[to[expert]]), source


def _bytes(row: Tensor) -> Tensor:
    """The same memory: not every backend knows every element type."""
    return row.reshape(-1).view(torch.uint8)


def _exchange(messages: list[tuple[Any, Tensor, int]], group: Any) -> None:
    at = dist.get_global_rank if group is not None else lambda _, peer: peer
    operations = [dist.P2POp(act, row, at(group, peer), group) for act, row, peer in messages if row.numel()]
    for request in dist.batch_isend_irecv(operations) if operations else ():
        request.wait()
