"""Rows of tensors on their way between ranks, over ``torch.distributed``: what `flashmoe.placement.move` moves with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import GroupError, InvalidArgument

_AT_ONCE = 64
"""Rows of a tensor that are on their way between all ranks, at most."""

Moves = Sequence[tuple[int, int, int]]
"""Rows by their ids, each with the rank that has it and the one that it goes to."""


def place_in(group: Any, name: str = "group") -> tuple[int, int]:
    """This process's rank in `group`, an argument of that name (None: all processes), and how many there are. Raises
    `InvalidArgument`, also where this process is none of them: who calls collectively without being a member is not
    told, and goes on alone."""
    if not dist.is_initialized():
        raise InvalidArgument(f"{name}: expected torch.distributed to be initialised, got no process group")
    if group not in (None, dist.GroupMember.NON_GROUP_MEMBER) and not isinstance(group, dist.ProcessGroup):
        raise InvalidArgument(f"{name}: expected a process group or None, got {type(group).__name__}")
    try:
        rank = dist.get_rank(group)
    except ValueError:  # it was destroyed
        rank = -1
    if rank < 0:
        raise InvalidArgument(f"{name}: expected a process group that this rank is in, got another")
    return rank, dist.get_world_size(group)


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


def agreed(group: Any, facts: Callable[[], tuple[Any, ...]], names: Sequence[str]) -> tuple[Any, ...]:
    """What `facts` returns, by `names`, once it is known to be the same on all ranks. Raises `GroupError`."""
    first, *others = together(group, facts, "bring its experts")
    for rank, theirs in enumerate(others, 1):
        for name, expected, got in zip(names, first, theirs, strict=True):
            if got != expected:
                raise GroupError(
                    f"{name}: expected all ranks to have the same, got {got} on rank {rank}, {expected} on 0"
                )
    return first


def rows_of(tensors: Any, local: int, rank: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and type of a row of each tensor, by its name, once all have `local` rows. Raises `InvalidArgument`."""
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
    """The tensors whose rows are the `wanted` ones, from those of the ids `mine` and what other ranks send."""
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
    """This rank's part in the moves: each an operation, the bytes of a row, and the other rank."""
    for id, source, target in todo:
        if source == rank:
            yield dist.isend, _bytes(old[at[id]]), target
        elif target == rank:
            yield dist.irecv, _bytes(new[to[id]]), source


def _bytes(row: Tensor) -> Tensor:
    """The same memory: not every backend knows every element type."""
    return row.reshape(-1).view(torch.uint8)


def _exchange(messages: list[tuple[Any, Tensor, int]], group: Any) -> None:
    peer = dist.get_global_rank if group is not None else lambda _, rank: rank
    operations = [dist.P2POp(act, row, peer(group, other), group) for act, row, other in messages]
    for request in dist.batch_isend_irecv(operations) if operations else ():
        request.wait()
