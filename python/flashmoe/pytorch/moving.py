"""Moves rows of tensors between ranks over ``torch.distributed``, for `flashmoe.placement.move`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import GroupError, InvalidArgument

_AT_ONCE = 64
"""The most rows of a tensor that are sent at a time, between all ranks together."""

Moves = Sequence[tuple[int, int, int]]
"""Rows to move: for each its id, the rank that has it, and the rank that it goes to."""


def place_in(group: Any, name: str = "group") -> tuple[int, int]:
    """This process's rank in `group` (None: all processes), and the number of ranks. `name`: the argument's name.
    Raises `InvalidArgument`, also if this process is not in the group: torch.distributed does not report a collective
    call by a process that is no member, but lets that process go on alone."""
    if not dist.is_initialized():
        raise InvalidArgument(f"{name}: expected torch.distributed to be initialised, got no process group")
    if group not in (None, dist.GroupMember.NON_GROUP_MEMBER) and not isinstance(group, dist.ProcessGroup):
        raise InvalidArgument(f"{name}: expected a process group or None, got {type(group).__name__}")
    try:
        rank = dist.get_rank(group)
    except ValueError:  # the group was destroyed
        rank = -1
    if rank < 0:
        raise InvalidArgument(f"{name}: expected a process group that this rank is in, got another")
    return rank, dist.get_world_size(group)


def together(group: Any, act: Callable[[], Any], what: str) -> list[Any]:
    """What `act` returns on each rank of the group, once all ranks have done it. A rank on which `act` fails takes part
    too, so that no rank waits for it. Raises this rank's error, or `GroupError` for another rank's."""
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


def agreed(group: Any, facts: Callable[[], tuple[Any, ...]], names: Sequence[str]) -> tuple[Any, ...]:
    """What `facts` returns, checked to be the same on all ranks; `names` are the names of its parts. Raises
    `GroupError`."""
    first, *others = together(group, facts, "bring its experts")
    for rank, theirs in enumerate(others, 1):
        for name, expected, got in zip(names, first, theirs, strict=True):
            if got != expected:
                raise GroupError(
                    f"{name}: expected all ranks to have the same, got {got} on rank {rank}, {expected} on 0"
                )
    return first


def rows_of(tensors: Any, local: int, rank: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and type of a row of each tensor, by the tensor's name. Raises `InvalidArgument` unless all have `local`
    rows."""
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
    return dict(sorted(rows.items()))


def moved(
    tensors: Mapping[str, Tensor], mine: Sequence[int], wanted: Sequence[int], todo: Moves, rank: int, group: Any
) -> dict[str, Tensor]:
    """The tensors with the rows whose ids are `wanted`, made of this rank's rows, whose ids are `mine`, and of the rows
    that other ranks send by `todo`."""
    at, to = ({id: row for row, id in enumerate(ids)} for ids in (mine, wanted))
    made = {}
    for name, tensor in sorted(tensors.items()):
        old = tensor.detach().contiguous()
        new = made[name] = old.new_empty((len(wanted), *old.shape[1:]))
        for id in wanted:
            if id in at:
                new[to[id]] = old[at[id]]
        for first in range(0, len(todo), _AT_ONCE):
            messages = _messages(todo[first : first + _AT_ONCE], rank, old, at, new, to)
            _exchange([each for each in messages if each[1].numel()], group)
    return {name: made[name] for name in tensors}


def _messages(
    todo: Moves, rank: int, old: Tensor, at: dict[int, int], new: Tensor, to: dict[int, int]
) -> Iterator[tuple[Any, Tensor, int]]:
    """This rank's part in the moves: for each an operation, the bytes of a row, and the other rank."""
    for id, source, target in todo:
        if source == rank:
            yield dist.isend, _bytes(old[at[id]]), target
        elif target == rank:
            yield dist.irecv, _bytes(new[to[id]]), source


def _bytes(row: Tensor) -> Tensor:
    """The row's memory as bytes, because not every backend knows every element type."""
    return row.reshape(-1).view(torch.uint8)


def _exchange(messages: list[tuple[Any, Tensor, int]], group: Any) -> None:
    peer = dist.get_global_rank if group is not None else lambda _, rank: rank
    operations = [dist.P2POp(act, row, peer(group, other), group) for act, row, other in messages]
    for request in dist.batch_isend_irecv(operations) if operations else ():
        request.wait()
