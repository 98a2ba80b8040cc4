"""Which rank holds which expert.

A placement is a sequence with an entry for each expert: the rank that holds it, or several, each of which then has a
copy of its weights. A rank sends all of its tokens of an expert to one copy: its own, if it has one. The ranks that
have none are dealt out, ascending, to the holders in turn, in the order in which the placement names them.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from . import _ffi
from .errors import InvalidArgument
from .spec import MAX_EXPERTS, MAX_RANKS, bounded

if TYPE_CHECKING:
    from torch import Tensor

Placement = Sequence[int | Sequence[int]]
"""An entry for each expert: a rank, or several."""
Placed = tuple[int | tuple[int, ...], ...]
"""The same as it is kept: an expert that one rank holds has its number."""


def contiguous(experts: int, ranks: int) -> tuple[int, ...]:
    """The default: contiguous shares, as even as possible; the first ``experts % ranks`` ranks get one more."""
    share, more = divmod(experts, ranks)
    return tuple(rank for rank in range(ranks) for _ in range(share + (rank < more)))


def hybrid(experts: int, ranks: int, tensor: int) -> tuple[int, ...]:
    """A placement of experts cut into `tensor` slices (see `flashmoe.slices`): expert times tensor parallelism.

    Each `tensor` ranks that follow one another are a group. Groups have contiguous shares of the experts, and the ranks
    of a group a slice each of every expert that is the group's. Raises `InvalidArgument` unless `tensor` divides R.
    """
    if bounded("tensor", tensor, 1, ranks) and ranks % tensor:
        raise InvalidArgument(f"tensor: expected a divisor of R={ranks}, got {tensor}")
    return tuple(group * tensor + i for group in contiguous(experts, ranks // tensor) for i in range(tensor))


def balanced(load: Sequence[float] | np.ndarray, ranks: int, copies: int = 0) -> Placed:
    """A placement that gives the ranks as much to compute as one another, as nearly as a search finds.

    Parameters
    ----------
    load: [E]
        What each expert has to compute, of all ranks' tokens: how many chose it, say. Each rank is taken to have the
        same share of that.
    ranks:
        R.
    copies:
        How many experts there may be besides the E: the busiest get copies, as far as that helps. Each takes an
        expert's weights on a rank.

    Returns
    -------
    The same for the same arguments. Of experts with their copies, every rank holds as many as the others, or one more.

    Raises
    ------
    InvalidArgument
        `load` has numbers below 0, or none; `ranks` or `copies` is out of range.
    """
    loads = _checked_load(load)
    ranks = bounded("ranks", ranks, 1, MAX_RANKS)
    left = bounded("copies", copies, 0, len(loads) * (ranks - 1))
    # A copy takes a place: where loads are even, more of them may leave the ranks less alike.
    default = contiguous(len(loads), ranks)
    found = [(float(np.bincount(default, loads, ranks).max()), 0, default)]
    while True:
        found.append(_placed_with(loads, ranks, left))
        if left == 0:
            return min(found, key=lambda each: each[:2])[2]
        left //= 2


def roomy(experts: int, ranks: int, copies: int) -> tuple[int, ...]:
    """A placement for a `Context` that is to have room for all that `balanced` makes with so many copies: one rank has
    as many experts as any has there. Raises `InvalidArgument`."""
    experts, ranks = bounded("experts", experts, 1, MAX_EXPERTS), bounded("ranks", ranks, 1, MAX_RANKS)
    copies = bounded("copies", copies, 0, experts * (ranks - 1))
    most = -(-(experts + copies) // ranks)
    return (0,) * most + tuple(1 + i % (ranks - 1) for i in range(experts - most))


def _placed_with(loads: np.ndarray, ranks: int, copies: int) -> tuple[float, int, Placed]:
    """What the fullest rank has, how many copies there are, and the placement."""
    counts = _copies_of(loads, ranks, copies)
    # In parts of 1 / R of a load: the holder serves itself, and its share of the ranks that have no copy.
    parts = [(e, ranks // n + (i < ranks % n)) for e, n in enumerate(counts) for i in range(n)]
    slots = -(-len(parts) // ranks)
    # Empty slots are copies of one more expert, that nobody chooses: thus no rank has two.
    parts += [(len(loads), 0)] * (slots * ranks - len(parts))
    expert = np.array([e for e, _ in parts])
    all_loads = np.append(loads, 0.0)[expert]
    weight = all_loads * [share for _, share in parts]
    order = np.lexsort((expert, -all_loads))  # an expert's follow one another: on ranks of their own
    rank = np.empty(len(parts), np.int64)
    rank[order] = np.arange(len(parts)) % ranks
    _exchange(expert, weight, rank, ranks)
    placed = as_placed(rank[expert == e].tolist() for e in range(len(loads)))
    return float(np.bincount(rank, weight, ranks).max()) / ranks, sum(counts) - len(counts), placed


def rank_loads(placement: Placement, load: Sequence[float] | np.ndarray, ranks: int) -> np.ndarray:
    """What each rank has to compute with `placement`, float64 [R].

    `load`: [E] that of each expert, as `balanced` takes it, or [R, E] for the tokens of each rank.
    """
    each = np.asarray(load, np.float64)
    by_source = np.tile(each / ranks, (ranks, 1)) if each.ndim == 1 else each
    total = np.zeros(ranks)
    for rank, of_rank in enumerate(by_source):
        np.add.at(total, list(owners(placement, rank)), of_rank)
    return total


def move(tensors: Mapping[str, Tensor], before: Placement, after: Placement, group: Any = None) -> dict[str, Tensor]:
    """This rank's tensors of experts for the placement `after`, from those that the ranks have by `before`.

    Collective over `group`. An expert comes from a rank that has it, from its holders in turn where several need it;
    what a rank keeps is copied. It takes the memory of both shares, and of nothing else: 64 experts of one tensor are
    on their way at a time, straight to their places.

    Parameters
    ----------
    tensors:
        By any names, the same on every rank: PyTorch tensors [El, ...], where El are this rank's experts by `before`,
        ascending, such as weights and biases of `flashmoe.moe`. Of experts in slices they are the slices'.
    before, after:
        Placements of the same experts, or of the same slices.
    group:
        A ``torch.distributed`` process group whose backend sends tensors of this device, and whose timeout is for how
        long ranks wait for one another; default: all ranks. Its ranks are those of the placements.

    Returns
    -------
    New tensors [El, ...] by the same names, of this rank's experts by `after`.

    Raises
    ------
    InvalidArgument
        A placement or a tensor of this rank is not as above. The other ranks raise `GroupError`, which names it.
    GroupError
        The ranks disagree on placements, names, shapes or types. Nothing is sent then.
    """
    from . import moving  # needs PyTorch

    rank, ranks = moving.place_in(group)

    def facts() -> tuple[Placed, Placed, Any]:
        experts = len(as_placed(before))
        placed = checked(before, experts, ranks), checked(after, experts, ranks)
        return *placed, moving.rows_of(tensors, len(local_experts(placed[0], rank)), rank)

    was, wanted, _ = moving.agreed(group, facts, ("before", "after", "tensors"))
    mine, to_be = local_experts(was, rank), local_experts(wanted, rank)
    return moving.moved(tensors, mine, to_be, moves(was, wanted), rank, group)


class Move(NamedTuple):
    """An expert that a rank needs and has not got."""

    expert: int
    source: int
    target: int


def moves(before: Placement, after: Placement) -> list[Move]:
    """What `move` sends, by ascending expert and target. A rank that has an expert keeps it; those that it comes to get
    it from those that have it, in turn."""
    found = []
    for expert, (has, wants) in enumerate(zip(before, after, strict=True)):
        sources = holders(has)
        targets = sorted(set(holders(wants)) - set(sources))
        found += [Move(expert, sources[i % len(sources)], target) for i, target in enumerate(targets)]
    return found


def owners(placement: Placement, rank: int) -> tuple[int, ...]:
    """For each expert, the rank to which `rank` sends its tokens."""
    return tuple(_ffi.library().placement_owners(flat(placement), rank))


def local_experts(placement: Placement, rank: int) -> list[int]:
    """The experts that `rank` holds, ascending: the order of its weights."""
    return [expert for expert, ranks in enumerate(placement) if rank in holders(ranks)]


def most_local(placement: Placement, ranks: int) -> int:
    """How many experts the rank with the most of them holds."""
    return int(np.bincount([rank for each in placement for rank in holders(each)], minlength=ranks).max())


def holders(entry: int | Sequence[int]) -> tuple[int, ...]:
    """The ranks of a placement's entry."""
    return (entry,) if isinstance(entry, int) else tuple(entry)


def flat(placement: Placement) -> list[int]:
    """One list of integers, as operators of PyTorch and the library take it: of each expert a rank that holds it, and
    behind it ``~rank`` for each further one."""
    return [~rank if i else rank for entry in placement for i, rank in enumerate(holders(entry))]


def from_flat(flat: Iterable[int]) -> list[list[int]]:
    """The placement of which `flat` made a list."""
    placement: list[list[int]] = []
    for rank in flat:
        if rank >= 0 or not placement:
            placement.append([rank])
        else:
            placement[-1].append(~rank)
    return placement


def as_placed(placement: Any) -> Placed:
    """`placement`, any iterable of integers or of iterables of them, as it is kept. Raises `InvalidArgument`."""
    try:
        entries = tuple(_entry(each) for each in itertools.islice(placement, MAX_EXPERTS + 1))
    except Exception:  # whatever a foreign type's __iter__ or __index__ raises
        raise InvalidArgument(
            f"placement: expected rank numbers, one or more for each expert, got {placement!r}"
        ) from None
    if len(entries) > MAX_EXPERTS:  # maybe without end
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
    """`placement` of E experts as it is kept, the default if None. Raises `InvalidArgument`."""
    if placement is None:
        if (
            experts > MAX_EXPERTS
        ):  # of a tensor that may be without end: empty in another dimension, or not what it says
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
    """A rank, or what iterates over several, as `Placed` has it."""
    if hasattr(each, "__index__"):
        try:
            return operator.index(each)
        except TypeError:  # an array of several
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
    """How many ranks are to hold each expert: the one whose busiest holder has most to do gets more, as many as it
    takes for that one to have less."""
    counts = [1] * len(loads)
    served = [ranks] * len(loads)  # by the busiest holder
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
    """Exchanges parts of two ranks, in `rank`, as long as that brings the ranks' loads closer to one another; no rank
    gets two of an expert."""
    held = np.zeros((expert.max() + 1, ranks), bool)
    held[expert, rank] = True
    difference = weight[:, None] - weight
    while True:
        load = np.bincount(rank, weight, ranks)
        # By how much the sum of the loads' squares changes, halved.
        change = difference * (difference - (load[rank][:, None] - load[rank]))
        moves = held[expert][:, rank]  # whether the row's expert is where the column's is
        change[moves | moves.T] = 0.0
        row, column = np.unravel_index(change.argmin(), change.shape)
        if change[row, column] >= -1e-12 * (load**2).sum():
            return
        for part, to in ((row, rank[column]), (column, rank[row])):
            held[expert[part], rank[part]] = False
            held[expert[part], to] = True
        rank[row], rank[column] = rank[column], rank[row]
