"""Ranks that join one group after the other, and ranks that fail to join."""

from __future__ import annotations

import os
import re
import signal

import flashmoe
import pytest
from fake_gpu import SIZES, driver
from fake_group import Joined, join, joined, on_ranks
from flashmoe import nvshmem as nvshmem_files


def test_a_rank_without_memory_is_named_at_once():
    """The other ranks name it, although they have no timeout. All ranks can then join another group."""
    changes = {"timeout": 0}  # no timeout
    for rank, told in enumerate(joined(3, {**changes, "without_memory": 1}, changes)):
        own = r"workspace: expected .* got 1000 free of 1000.*"
        expected = rf"HeapError: {own}" if rank == 1 else rf"GroupError: group '.*': rank 1 did not join: {own}"
        assert re.fullmatch(expected, told[0]) and isinstance(told[1], Joined)


def close_while_joining(rank, ranks, name, environment):
    """Joins two groups. While rank 0 waits for the second, its signal handler closes its first context. Returns whether
    the first context is closed, and the list to which the handler has appended."""
    os.environ.update(environment)
    nvshmem_files.library = lambda: "libnvshmem_host.so.3"
    settings = {**SIZES, "engine": "cuda", "rank": rank, "ranks": ranks, "device": rank, "timeout": 20.0}
    first = flashmoe.Context(name=f"{name}-1", **settings)
    closed = []

    def close(*_):
        first.close()
        closed.append(True)

    if rank == 0:
        signal.signal(signal.SIGALRM, close)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
    else:
        driver.fake_allocation_ms(1000)  # each allocation takes a second; all ranks have met before
    with flashmoe.Context(name=f"{name}-2", **settings):
        return first.closed, closed


def test_a_context_is_closed_while_another_joins():
    """An interrupted wait may run a signal handler or a garbage collection, and these may close another context."""
    assert on_ranks(close_while_joining, [()] * 2) == [(True, [True]), (False, [])]


def test_ranks_join_and_take_the_same_memory_again():
    first, second = joined(2, {}, {}, {"max_tokens": 64}, {})
    assert first == second
    large, again, small, anew = first
    assert large == again == anew and small.heap_bytes < large.heap_bytes
    assert {each.symmetric_blocks for each in first} == {1}


def test_ranks_that_share_a_gpu():
    for (told,) in joined(2, {}, devices=(1, 1)):
        assert told == (
            "InvalidArgument: device: expected a GPU of its own for each rank, got the same for ranks 0 and 1"
        )
    for (made,) in joined(2, {}, devices=(1, 1), environment={"FLASHMOE_SHARE_GPUS": "2"}):
        assert isinstance(made, Joined)


def test_a_second_group_of_other_ranks():
    for _, told in joined(2, {}, {"swapped": True}):
        assert "GroupError" in told and "expected the ranks of this process's first group of several GPUs" in told


def test_a_rank_alone_needs_no_nvshmem():
    for before, alone, after in joined(2, {}, {"ranks": 1}, {}):
        assert alone.symmetric_blocks == 1 and before == after


def test_ranks_that_want_other_sizes():
    (first,), (second,) = on_ranks(join, [([{"top_k": 2 + rank}],) for rank in range(2)])
    assert "top_k: rank 0 has 2, rank 1 has 3" in first and "top_k: rank 1 has 3, rank 0 has 2" in second


def test_a_rank_that_does_not_come():
    with pytest.raises(flashmoe.PeerTimeout, match=r"rank 1 did not join within 0\.5 s"):
        flashmoe.Context(engine="cuda", ranks=2, name=f"alone-{os.getpid()}", timeout=0.5, **SIZES)


def test_without_nvshmem():
    path = "/nowhere/libnvshmem_host.so.3"
    for (told,) in joined(2, {}, environment={"FAKE_NVSHMEM_PATH": path}):
        assert told.startswith(
            f"FlashMoEError: nvshmem: expected the library {path}, which a group of several GPUs needs "
            f"({nvshmem_files.INSTALL}), got: "
        )


def join_with_libraries(rank, ranks, name, environment, libraries):
    return join(rank, ranks, name, {**environment, **libraries}, [{"timeout": 0}])


def test_one_rank_without_nvshmem_is_named_at_once():
    path = "/nowhere/libnvshmem_host.so.3"
    (there,), (missing,) = on_ranks(join_with_libraries, [({},), ({"FAKE_NVSHMEM_PATH": path},)])
    own = f"nvshmem: expected the library {path}, which a group of several GPUs needs"
    assert missing.startswith(f"FlashMoEError: {own}")
    assert re.match(rf"GroupError: group '.*': rank 1 did not join: {own}", there)


def join_with_an_engine_of_its_own(rank, ranks, name, environment):
    os.environ.update(environment)
    nvshmem_files.library = lambda: "libnvshmem_host.so.3"
    engine = {"engine": "cpu", "processors": 1} if rank == 0 else {"engine": "cuda", "device": 1}
    try:
        flashmoe.Context(rank=rank, ranks=ranks, name=name, timeout=20.0, return_mode="direct", **engine, **SIZES)
    except flashmoe.FlashMoEError as error:
        return f"{type(error).__name__}: {error}"


def test_ranks_of_different_engines():
    for told in on_ranks(join_with_an_engine_of_its_own, [()] * 2):
        assert re.match(r"GroupError: group '.*' disagrees on engine or version, .*: rank \d has \d+, rank", told)


def test_nvshmem_that_hangs():
    for first, second in joined(2, {"timeout": 1.0}, {}, environment={"FAKE_NVSHMEM_HANGS": "1"}):
        assert "PeerTimeout" in first and "NVSHMEM's initialisation did not end within 1 s" in first
        assert "GroupError" in second and "start a new process" in second
