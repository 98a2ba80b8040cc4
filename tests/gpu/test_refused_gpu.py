"""Calls that some ranks of a group refuse: such a call is over on all ranks, and the calls after it are right."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ranks as on_rank
import refused_ranks
from flashmoe.launch import RankPool
from ranks import everywhere

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

SPEC = {"hidden": 512, "intermediate": 256, "experts": 32, "top_k": 4}
MOST = {"few": 8, "many": 300}
"""The most tokens of a rank, by the kernel that computes its calls: that for a few tokens, or the general one."""


@pytest.fixture(scope="module", params=(2, 4), ids=lambda n: f"{n}ranks")
def pool(request) -> Iterator[RankPool]:
    """The ranks' processes, which all tests of this file use."""
    with on_rank.pool_of(request.param) as made:
        yield made


@pytest.mark.parametrize("lockstep", [True, False], ids=["in lockstep", "ahead"])
@pytest.mark.parametrize("kernel", MOST)
def test_random_calls(pool, kernel: str, lockstep: bool):
    given = SPEC, MOST[kernel], 81, 400, lockstep
    assert everywhere(pool, refused_ranks.random_calls, *given) == [[]] * pool.ranks


@pytest.mark.parametrize("mode", on_rank.RETURN_MODES)
def test_gradients(pool, mode: str):
    assert everywhere(pool, refused_ranks.gradients, SPEC, 70, mode) == [[]] * pool.ranks


def test_a_rank_that_does_not_come_to_it_is_named(pool):
    """Rank 0 refuses call 2 and then makes another call, but rank 1 comes too late. Rank 0's host names rank 1
    in its error. Of four ranks, the others name it too: ranks 2 and 3 have begun call 2 and find out on the device."""
    told = everywhere(pool, refused_ranks.leave_alone, SPEC, 2.0)
    expected = "PeerTimeout: rank 1 holds up call 2: it has not begun call 2 (it is at 1); rank "
    assert told[0].startswith(expected)
    if pool.ranks == 2:
        assert told[1] == "GroupError: rank 0 refused call 2: nothing"
    else:
        assert all(each.startswith(expected) for each in told[2:]), told
        assert told[1].startswith("PeerTimeout: rank 1 holds up call 2: "), told
