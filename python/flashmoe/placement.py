"""Which rank holds which expert.

A placement is a sequence with an entry for each expert: the rank that holds the expert, or several ranks, each of which
then has a copy of the expert's weights. A rank sends all of its tokens of an expert to one copy: its own, if it has
one. The ranks that have no copy are dealt out in ascending order to the holders in turn, in the order in which the
placement names the holders.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from . import _ffi
from .errors import InvalidArgument
from .spec import MAX_EXPERTS, MAX_RANKS, Placement, bounded

if TYPE_CHECKING:
    from torch import Tensor

Placed = tuple[int | tuple[int, ...], ...]
"""A placement as it is stored: the entry of an expert with one holder is a number."""


def contiguous(experts: int, ranks: int) -> tuple[int, ...]:
    """The default: contiguous shares, as even as possible; the first ``experts % ranks`` ranks get one more.

    Examples
    --------
    >>> from flashmoe.placement import contiguous
    >>> contiguous(5, 2)
    (0, 0, 0, 1, 1)
    """
    share, more = divmod(experts, ranks)
    return tuple(rank for rank in range(ranks) for _ in range(share + (rank < more)))


def hybrid(experts: int, ranks: int, tensor: int) -> tuple[int, ...]:
    """A placement of experts cut into `tensor` slices (see `flashmoe.slices`): expert times tensor parallelism.

    Every `tensor` consecutive ranks share the same experts: each of these ranks has one slice of each of the experts.
    The experts are divided among such sets of ranks in contiguous shares. Raises `InvalidArgument` unless `tensor`
    divides R.

    Examples
    --------
    Ranks 0 and 1 have the two slices of each of experts 0 and 1; ranks 2 and 3 have those of experts 2 and 3.

    >>> from flashmoe.placement import hybrid
    >>> hybrid(4, 4, 2)
    (0, 1, 0, 1, 2, 3, 2, 3)
    """
    if bounded("tensor", tensor, 1, ranks) and ranks % tensor:
        raise InvalidArgument(f"tensor: expected a divisor of R={ranks}, got {tensor}")
    return tuple(group * tensor + i for group in contiguous(experts, ranks // tensor) for i in range(tensor))


def balanced(load: Sequence[float] | np.ndarray, ranks: int, copies: int = 0) -> Placed:
    """A placement that gives all ranks as equal an amount of work as a search finds.

    Parameters
    ----------
    load: [E]
        What each expert has to compute for all ranks' tokens: for example, how many tokens chose it. It is assumed that
        each rank's tokens make up 1 / R of it.
    ranks:
        R, the number of ranks.
    copies:
        The most copies of experts, besides the E experts. The busiest experts get copies, as far as that helps. Each
        copy takes the memory of an expert's weights on one rank.

    Returns
    -------
    The same placement for the same arguments. Every rank holds the same number of experts, copies included, or one
    more.

    Raises
    ------
    InvalidArgument
        `load` has numbers below 0, or no numbers; `ranks` or `copies` is out of range.

    Examples
    --------
    Expert 0 has twice as much work as all others together. If both ranks hold it, they have equal work.

    >>> from flashmoe.placement import balanced
    >>> balanced([8, 2, 1, 1], 2)
    (0, 1, 0, 1)
    >>> balanced([8, 2, 1, 1], 2, copies=1)
    ((0, 1), 1, 0, 0)
    """
    loads = _checked_load(load)
    ranks = bounded("ranks", ranks, 1, MAX_RANKS)
    left = bounded("copies", copies, 0, len(loads) * (ranks - 1))
    # Fewer copies are tried too: a copy takes a place on a rank, so if loads are even, more copies may make the ranks
    # less even.
    default = contiguous(len(loads), ranks)
    found = [(float(np.bincount(default, loads, ranks).max()), 0, default)]
    while True:
        found.append(_placed_with(loads, ranks, left))
        if left == 0:
            return min(found, key=lambda each: each[:2])[2]
        left //= 2


def roomy(experts: int, ranks: int, copies: int) -> tuple[int, ...]:
    """A placement for a `Context` that is to have room for every placement that `balanced` makes with this number of
    copies: its rank 0 has as many experts as a rank of those placements may have. Raises `InvalidArgument`.

    Examples
    --------
    >>> from flashmoe.placement import roomy
    >>> roomy(4, 2, copies=2)
    (0, 0, 0, 1)
    """
    experts, ranks = bounded("experts", experts, 1, MAX_EXPERTS), bounded("ranks", ranks, 1, MAX_RANKS)
    copies = bounded("copies", copies, 0, experts * (ranks - 1))
    most = -(-(experts + copies) // ranks)
    return (0,) * most + tuple(1 + i % (ranks - 1) for i in range(experts - most))


def _placed_with(loads: np.ndarray, ranks: int, copies: int) -> tuple[float, int, Placed]:
    """A placement with at most `copies` copies: the load of its fullest rank, the number of copies, and itself."""
    counts = _copies_of(loads, ranks, copies)
    # A part is one instance of an expert: (expert, the number of ranks whose tokens it gets). So its load is this
    # number times 1 / R of the expert's load.
    parts = [(e, ranks // n + (i < ranks % n)) for e, n in enumerate(counts) for i in range(n)]
    slots = -(-len(parts) // ranks)
    # An empty slot gets a copy of an additional expert that nobody chooses, so that no rank has two empty slots.
    parts += [(len(loads), 0)] * (slots * ranks - len(parts))
    expert = np.array([e for e, _ in parts])
    all_loads = np.append(loads, 0.0)[expert]
    weight = all_loads * [share for _, share in parts]
    order = np.lexsort((expert, -all_loads))  # an expert's copies are neighbours, so they get different ranks
    rank = np.empty(len(parts), np.int64)
    rank[order] = np.arange(len(parts)) % ranks
    _exchange(expert, weight, rank, ranks)
    placed = as_placed(rank[expert == e].tolist() for e in range(len(loads)))
    return float(np.bincount(rank, weight, ranks).max()) / ranks, sum(counts) - len(counts), placed


def rank_loads(placement: Placement, load: Sequence[float] | np.ndarray, ranks: int) -> np.ndarray:
    """What each rank has to compute with `placement`, float64 [R].

    `load`: [E], the load of each expert, as `balanced` takes it; or [R, E], the loads by each rank's tokens.
    """
    each = np.asarray(load, np.float64)
    by_source = np.tile(each / ranks, (ranks, 1)) if each.ndim == 1 else each
    total = np.zeros(ranks)
    for rank, of_rank in enumerate(by_source):
        np.add.at(total, list(owners(placement, rank)), of_rank)
    return total


def move(tensors: Mapping[str, Tensor], before: Placement, after: Placement, group: Any = None) -> dict[str, Tensor]:
    """This rank's tensors of experts for the placement `after`, from the tensors that the ranks have by `before`.

    Collective over `group`. An expert comes from a rank that has it; if several ranks need it, from its holders in
    turn. What a rank keeps is copied. A rank needs memory for its experts by `before` and by `after`, and no more: 64
    experts of one tensor are sent at a time, and each is received in its place in the new tensor.

    Parameters
    ----------
    tensors:
        PyTorch tensors [El, ...] by any names, the same names on every rank. El are this rank's experts by `before`,
        ascending. Examples are weights and biases of `flashmoe.moe`. If experts are cut, the tensors are those of
        slices.
    before, after:
        Placements of the same experts, or of the same slices.
    group:
        A ``torch.distributed`` process group; default: all ranks. Its ranks are those of the placements. Its backend
        must send tensors of this device, and its timeout is how long ranks wait for one another.

    Returns
    -------
    New tensors [El, ...] by the same names, of this rank's experts by `after`.

    Raises
    ------
    InvalidArgument
        A placement or a tensor of this rank is not as above. The other ranks raise `GroupError`, which names this rank.
    GroupError
        The ranks disagree on placements, names, shapes or types. Nothing is sent then.

    Examples
    --------
    A group of one rank keeps its two experts.

    >>> import torch, torch.distributed as dist
    >>> from flashmoe.placement import move
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> moved = move({"down_proj": torch.ones(2, 16, 8)}, before=(0, 0), after=(0, 0))
    >>> moved["down_proj"].shape
    torch.Size([2, 16, 8])
    >>> dist.destroy_process_group()
    """
    from .pytorch import moving  # needs PyTorch

    rank, ranks = moving.place_in(group)

    def facts() -> tuple[Placed, Placed, Any]:
        experts = len(as_placed(before))
        placed = checked(before, experts, ranks), checked(after, experts, ranks)
        return *placed, moving.rows_of(tensors, len(local_experts(placed[0], rank)), rank)

    was, wanted, _ = moving.agreed(group, facts, ("before", "after", "tensors"))
    mine, to_be = local_experts(was, rank), local_experts(wanted, rank)
    return moving.moved(tensors, mine, to_be, moves(was, wanted), rank, group)


class Move(NamedTuple):
    """An expert that a rank needs and does not have."""

    expert: int
    source: int
    target: int


def moves(before: Placement, after: Placement) -> list[Move]:
    """What `move` sends, by ascending expert and target. A rank that has an expert keeps it. Other ranks that need it
    get it from the ranks that have it, in turn."""
    found = []
    for expert, (has, wants) in enumerate(zip(before, after, strict=True)):
        sources = holders(has)
        targets = sorted(set(holders(wants)) - set(sources))
        found += [Move(expert, sources[i % len(sources)], target) for i, target in enumerate(targets)]
    return found


def owners(placement: Placement, rank: int) -> tuple[int, ...]:
    """For each expert, the rank to which `rank` sends the expert's tokens.

    Examples
    --------
    Both ranks have a copy of expert 2, and send its tokens to their own copy.

    >>> from flashmoe.placement import owners
    >>> placement = (0, 1, (0, 1), 1)
    >>> owners(placement, 0), owners(placement, 1)
    ((0, 1, 0, 1), (0, 1, 1, 1))
    """
    return tuple(_ffi.library().placement_owners(flat(placement), rank))


def local_experts(placement: Placement, rank: int) -> list[int]:
    """The experts that `rank` holds, ascending: the order of its weights.

    Examples
    --------
    >>> from flashmoe.placement import local_experts
    >>> placement = (0, 1, (0, 1), 1)
    >>> local_experts(placement, 0), local_experts(placement, 1)
    ([0, 2], [1, 2, 3])
    """
    return [expert for expert, ranks in enumerate(placement) if rank in holders(ranks)]


def most_local(placement: Placement, ranks: int) -> int:
    """The most experts that a rank holds."""
    return int(np.bincount([rank for each in placement for rank in holders(each)], minlength=ranks).max())


def holders(entry: int | Sequence[int]) -> tuple[int, ...]:
    """The ranks of a placement's entry."""
    return (entry,) if isinstance(entry, int) else tuple(entry)


def flat(placement: Placement) -> list[int]:
    """A placement as one list of integers, as PyTorch's operators and the library take it: for each expert a rank that
    holds it, followed by ``~rank`` for each further holder."""
    return [~rank if i else rank for entry in placement for i, rank in enumerate(holders(entry))]


def from_flat(flat: Iterable[int]) -> list[list[int]]:
    """The placement from which `flat` made this list."""
    placement: list[list[int]] = []
    for rank in flat:
        if rank >= 0 or not placement:
            placement.append([rank])
        else:
            placement[-1].append(~rank)
    return placement


def as_placed(placement: Any) -> Placed:
    """`placement`, any iterable of integers or of iterables of integers, as it is stored. Raises `InvalidArgument`."""
    try:
        entries = tuple(_entry(each) for each in itertools.islice(placement, MAX_EXPERTS + 1))
    except Exception:  # another type's __iter__ or __index__ may raise anything
        raise InvalidArgument(
            f"placement: expected rank numbers, one or more for each expert, got {placement!r}"
        ) from None
    if len(entries) > MAX_EXPERTS:  # the iterable may have no end
        raise InvalidArgument(f"placement: expected at most {MAX_EXPERTS} experts' ranks, got more")
    for expert, entry in enumerate(entries):
        ranks = holders(entry)
        if not ranks:
            raise InvalidArgument(f"placement: expected a rank for every expert, got none for expert {expert}")
        for rank in ranks:
            if not 0 <= rank < MAX_RANKS:
                raise InvalidArgument(f"placement: expected ranks in [0, {MAX_RANKS}), got {rank} for expert {expert}")
        if len(set(ranks)) < len(ranks):
            twice = next(rank for rank in ranks if ranks.count(rank) > 1)
            raise InvalidArgument(f"placement: expected an expert on a rank once, got expert {expert} on {twice} twice")
    return entries


def checked(placement: Placement | None, experts: int, ranks: int) -> Placed:
    """`placement` of E experts as it is stored; the default if it is None. Raises `InvalidArgument`."""
    if placement is None:
        if (
            experts > MAX_EXPERTS
        ):  # `experts` may be a size of a tensor, and is any number if the tensor is empty or its shape is a lie
            raise InvalidArgument(f"experts: expected at most {MAX_EXPERTS}, got {experts}")
        return contiguous(experts, ranks)
    placed = as_placed(placement)
    if len(placed) != experts:
        raise InvalidArgument(
            f"placement: expected one rank or more for each of E={experts} experts, got {len(placed)}"
        )
    for expert, entry in enumerate(placed):
        for rank in holders(entry):
            if rank >= ranks:
                raise InvalidArgument(f"placement: expected ranks in [0, {ranks}), got {rank} for expert {expert}")
    return placed


def _entry(each: Any) -> int | tuple[int, ...]:
    """One entry as `Placed` has it: a rank, or several ranks from an iterable."""
    if hasattr(each, "__index__"):
        try:
            return operator.index(each)
        except TypeError:  # an array of several ranks
            pass
    ranks = tuple(operator.index(rank) for rank in itertools.islice(each, MAX_RANKS + 1))
    return ranks[0] if len(ranks) == 1 else ranks


def _checked_load(load: Any) -> np.ndarray:
    try:
        loads = np.asarray(load, np.float64)
    except (TypeError, ValueError):
        loads = np.empty(0)
    if loads.ndim != 1 or not 1 <= len(loads) <= MAX_EXPERTS or not (np.isfinite(loads) & (loads >= 0.0)).all():
        raise InvalidArgument(f"load: expected [E] numbers from 0 on, got {load!r}")
    return loads


def _copies_of(loads: np.ndarray, ranks: int, copies: int) -> list[int]:
    """How many ranks are to hold each expert. Again and again, the expert with the busiest holder gets more holders: as
    many as it takes to give that holder less to do. This ends when there are too few copies left."""
    counts = [1] * len(loads)
    served = [ranks] * len(loads)  # for each expert, how many ranks its busiest holder serves
    left = copies
    while True:
        steps = [-(-ranks // (most - 1)) - n if most > 1 else left + 1 for n, most in zip(counts, served, strict=True)]
        able = [e for e, step in enumerate(steps) if step <= left and loads[e] > 0.0]
        if not able:
            return counts
        busiest = max(able, key=lambda e: (loads[e] * served[e], -e))
        counts[busiest] += steps[busiest]
        left -= steps[busiest]
        served[busiest] = -(-ranks // counts[busiest])


def _exchange(expert: np.ndarray, weight: np.ndarray, rank: np.ndarray, ranks: int) -> None:
    """Exchanges two parts that are on different ranks, in `rank`, as long as that makes the ranks' loads more even. No
    rank gets two parts of one expert."""
    held = np.zeros((expert.max() + 1, ranks), bool)
    held[expert, rank] = True
    difference = weight[:, None] - weight
    while True:
        load = np.bincount(rank, weight, ranks)
        # Half of the change in the sum of the loads' squares.
        change = difference * (difference - (load[rank][:, None] - load[rank]))
        moves = held[expert][:, rank]  # whether the column's rank already has the row's expert
        change[moves | moves.T] = 0.0
        row, column = np.unravel_index(change.argmin(), change.shape)
        if change[row, column] >= -1e-12 * (load**2).sum():
            return
        for part, to in ((row, rank[column]), (column, rank[row])):
            held[expert[part], rank[part]] = False
            held[expert[part], to] = True
        rank[row], rank[column] = rank[column], rank[row]
