"""How ranks find one another in shared memory: what they leave there, trust there and wait for, how they try again."""

from __future__ import annotations

import fcntl
import os
import re
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flashmoe
import pytest
from flashmoe import FlashMoEError, GroupError, HeapError, PeerTimeout
from processes import (
    LIMITS,
    MARGIN,
    SHARED_MEMORY,
    Page,
    Process,
    Processes,
    await_condition,
    join,
    page_of,
    processes,
)

__all__ = ["processes"]  # a fixture

PATIENT = 60.0
"""A timeout in seconds that is longer than any test: a rank that ends earlier has not waited for it."""


# ---- trying again ----------------------------------------------------------------------------------------------------


def join_until_all_are_there(pipe: Any, rank: int, ranks: int) -> None:
    """Joins each group whose name it hears, and tries again at once after an error. Sends how often it had to try."""
    pipe.send("here")
    while True:
        name = pipe.recv()
        for attempt in range(1, 1000):
            try:
                context = flashmoe.Context(
                    name=name, rank=rank, ranks=ranks, timeout=PATIENT, **LIMITS | {"experts": 8}
                )
            except FlashMoEError:
                continue
            pipe.send(attempt)
            pipe.recv()
            context.close()
            break


@pytest.mark.parametrize(("ranks", "first"), [(4, 1), (4, 2), (8, 2), (8, 6)])
def test_ranks_that_all_try_again_meet_soon(processes: Processes, ranks: int, first: int):
    """The last rank is killed when the `first` ranks have met it. These are stopped until the others have met them.
    Then all give up and try again at once. What ended an old attempt must not end another rank's new attempt."""

    def start(rank: int) -> Process:
        process = processes.start(join_until_all_are_there, rank, ranks)
        assert process.hear() == "here"
        return process

    all_ranks = [start(rank) for rank in range(ranks)]
    for turn in range(3):
        name = f"{processes.name}-{turn}"
        early, late, killed = all_ranks[:first], all_ranks[first:-1], all_ranks[-1]
        all_ranks[-1] = start(ranks - 1)
        killed.tell(name)
        path = SHARED_MEMORY / f"flashmoe-{name}-{ranks - 1}"
        await_condition(path.exists, "the last rank does not join")
        killed.signal(signal.SIGSTOP)
        with page_of(path) as page:
            for rank in early:
                rank.tell(name)
            await_condition(lambda page=page: page["seen_by"] == first, "they do not meet it")
        for rank in early:
            rank.signal(signal.SIGSTOP)
        killed.signal(signal.SIGKILL)
        for rank in late:
            rank.tell(name)
        time.sleep(0.1)
        for rank in early:
            rank.signal(signal.SIGCONT)
        all_ranks[-1].tell(name)
        attempts = [rank.hear() for rank in all_ranks]
        assert max(attempts) <= 4, attempts
        for rank in all_ranks:
            rank.tell("close")


def test_a_failure_from_before_an_attempt_does_not_end_it(processes: Processes):
    """Rank 0 meets rank 1, which has failed before rank 0's attempt began: rank 0 waits until rank 1 joins again."""
    old = processes.join(1, 3, PATIENT)
    with page_of(processes.await_path(1)) as page:
        await_condition(lambda: page["state"] == Page.READY, "it is not ready")
        old.signal(signal.SIGSTOP)  # so that its file stays in shared memory
        page["state"] = Page.FAILED  # for a cause that arose at time 0
        new = processes.join(0, 3, PATIENT)
        await_condition(lambda: page["seen_by"] == 1, "rank 0 does not look")
        time.sleep(0.1)  # rank 0 looks every millisecond
        assert page["seen_by"] == 1  # rank 0 is counted once
    old.signal(signal.SIGKILL)
    ranks = [new, processes.join(1, 3, PATIENT), processes.join(2, 3, PATIENT)]
    assert [rank.hear().error for rank in ranks] == [None] * 3


# ---- what is left behind ---------------------------------------------------------------------------------------------


def join_another_group(processes: Processes) -> None:
    """Two ranks join a group of another name. Before they join, they remove leftovers of all groups."""
    name = f"{processes.name}-other"
    ranks = [processes.start(join, name, rank, 2, 2.0) for rank in range(2)]
    assert [rank.hear().error for rank in ranks] == [None, None]


def stopped(processes: Processes, rank: int, ranks: int) -> Process:
    """A rank that is stopped when it has written its page."""
    process = processes.join(rank, ranks, PATIENT)
    with page_of(processes.await_path(rank)) as page:
        await_condition(lambda: page["state"] == Page.READY, "it is not ready")
    process.signal(signal.SIGSTOP)
    return process


def killed_while_joining(
    processes: Processes, rank: int, ranks: int, change: Callable[[Page], None] = lambda page: None
) -> Path:
    """`change` edits the page while the rank lives: later any group, also another test's, may remove the page."""
    process = stopped(processes, rank, ranks)
    path = processes.path(rank)
    with page_of(path) as page:
        change(page)
    process.signal(signal.SIGKILL)
    return path


def of_another_process(page: Page) -> None:
    page["pid"] = os.getpid()  # this process did not start at the time that the page says


def test_heaps_of_ranks_that_were_all_killed_are_removed_by_the_next_group(processes: Processes):
    """The next group may have any name."""
    ranks = [processes.join(rank, 4, PATIENT) for rank in range(3)]
    left = [processes.await_path(rank) for rank in range(3)]
    for rank in ranks:
        rank.signal(signal.SIGSTOP)  # so that no rank removes what another one has left
    assert all(path.exists() for path in left)
    for rank in ranks:
        rank.signal(signal.SIGKILL)
    join_another_group(processes)
    assert not any(path.exists() for path in left)


def test_a_heap_is_removed_though_its_processs_number_is_anothers(processes: Processes):
    path = killed_while_joining(processes, 0, 2, of_another_process)
    join_another_group(processes)
    assert not path.exists()


def test_a_rank_takes_its_place_though_its_processs_number_is_anothers(processes: Processes):
    killed_while_joining(processes, 0, 2, of_another_process)
    ranks = [processes.join(rank, 2) for rank in range(2)]
    assert [rank.hear().error for rank in ranks] == [None, None]


def test_what_may_be_in_use_is_not_removed(processes: Processes):
    """Files of a living rank, of a rank in another pid namespace, of the user, and of a rank that is about to join."""
    # At offset 24, a page has the pid namespace of its process.
    elsewhere = killed_while_joining(processes, 3, 4, lambda page: page.write(24, bytes([0xFF] * 8)))
    processes.join(0, 4, PATIENT)
    living = processes.await_path(0)
    own = SHARED_MEMORY / f"flashmoe-{processes.name}-notes.txt"
    own.touch(0o600)
    own.write_text("to do")
    young = SHARED_MEMORY / f".flashmoe-{processes.name}-0.abcdef"
    young.touch(0o600)
    join_another_group(processes)
    assert all(path.exists() for path in (living, elsewhere, own, young))


def test_a_name_that_was_never_finished_is_removed_after_a_minute(processes: Processes):
    left = SHARED_MEMORY / f".flashmoe-{processes.name}-0.abcdef"
    left.touch(0o600)
    os.utime(left, (time.time() - 100,) * 2)
    join_another_group(processes)
    assert not left.exists()


# ---- locks -----------------------------------------------------------------------------------------------------------


def test_a_lock_is_waited_for_no_longer_than_the_timeout(processes: Processes):
    """Another process of this user locks the file that a killed rank has left."""
    process = stopped(processes, 0, 2)
    path = processes.path(0)
    with path.open("rb") as locked:
        fcntl.flock(locked, fcntl.LOCK_EX)  # while rank 0 lives: later any group, also another test's, may remove it
        process.signal(signal.SIGKILL)
        told = processes.join(0, 2, 1.0).hear()
        assert type(told.error) is PeerTimeout, told
        assert re.search(rf"{path}, which process \d+ has left behind: another .* locked", str(told.error))
        assert 1.0 <= told.seconds < 1.0 + MARGIN
        # Rank 1, which gives up because rank 0 is missing, does not wait for the lock.
        told = processes.join(1, 2, 1.0).hear()
        assert type(told.error) is PeerTimeout and "rank 0 did not join" in str(told.error)
    path.unlink()


# ---- a page that is wrong --------------------------------------------------------------------------------------------


WRONG_PAGES = {
    "another file": ("magic", 0x1234, "expected that of a rank of this version, got a file that begins otherwise"),
    "more ranks than there can be": ("ranks", 2**32 - 1, "got a group of 4294967295 ranks"),
    "no ranks": ("ranks", 0, "disagrees on ranks: rank 0 has 2, rank 1 has 0"),
    "another size": ("bytes", 2**60, r"bytes that a rank shares: rank 0 has \d+, rank 1 has 1152921504606846976"),
}


@pytest.mark.parametrize("what", WRONG_PAGES)
def test_a_page_that_is_wrong(processes: Processes, what: str):
    field, value, message = WRONG_PAGES[what]
    stopped(processes, 1, 2)
    with page_of(processes.path(1)) as page:
        page[field] = value
        rank = processes.join(0, 2, PATIENT)
        if field == "bytes":  # it is compared when all ranks are there
            await_condition(lambda: page["seen_by"] == 1, "rank 0 does not look")
            page["state"] = 2
    error = rank.hear().error
    assert type(error) is GroupError and re.search(message, str(error)), error


@pytest.mark.parametrize("left", [0, 100, Page.SIZE])
def test_a_segment_that_is_too_short(processes: Processes, left: int):
    """Rank 0 reads nothing behind the end of rank 1's file, and raises an error."""
    stopped(processes, 1, 2)
    with page_of(processes.path(1)) as page:
        os.truncate(processes.path(1), left)
        rank = processes.join(0, 2, PATIENT)
        if left == Page.SIZE:  # the heap is mapped when all have met
            await_condition(lambda: page["seen_by"] == 1, "rank 0 does not look")
            page["state"] = 2
    error = rank.hear().error
    assert type(error) is GroupError
    assert re.search(rf"{processes.path(1)}: expected .*, got {left}\b", str(error)), error


def test_the_words_of_a_peer_are_made_text(processes: Processes):
    """A peer's error text may have any bytes, and may lack the zero at its end."""
    first = processes.join(1, 3, PATIENT)
    with page_of(processes.await_path(1)) as page:
        await_condition(lambda: page["state"] == Page.READY, "it is not ready")
        first.signal(signal.SIGINT)
        await_condition(lambda: page["state"] == Page.FAILED, "it does not give up")
        words = page.read().index(b"it was interrupted")
    stopped(processes, 1, 3)
    with page_of(processes.path(1)) as page:
        rank = processes.join(0, 3, PATIENT)
        await_condition(lambda: page["seen_by"] == 1, "rank 0 does not look")
        page.write(
            words, b"caf\xc3\xa9 \xf0\x9f\x98\x80 \xff\xfe \xc3 \xed\xa0\x80 \xc0\xaf".ljust(511, b"x") + b"\xe2"
        )
        page.write(words - 12, (2**63).to_bytes(8, "little"))  # when the cause arose: later than rank 0's attempt
        page["state"] = Page.FAILED
        error = rank.hear().error
    assert type(error) is GroupError
    said = str(error).partition("rank 1 failed to join: ")[2]
    assert said.startswith("café 😀 ?? ? ??? ??xxx") and said.endswith("xx?") and len(said.encode()) <= 512, said


# ---- what the system allows a process --------------------------------------------------------------------------------


def join_with_limits(pipe: Any, name: str, which: int, most: int) -> None:
    """Joins with limited files or memory. The process does not ignore SIGXFSZ (too large a file), as Python does."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    if which == resource.RLIMIT_AS:
        most += int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(which, (most, resource.RLIM_INFINITY))
    try:
        flashmoe.Context(name=name, rank=0, ranks=2, timeout=1.0, **LIMITS | {"hidden": 2**20, "max_tokens": 64})
    except FlashMoEError as error:
        pipe.send((type(error), str(error)))


def test_files_that_may_not_be_as_large_as_a_heap(processes: Processes):
    told = processes.start(join_with_limits, processes.name, resource.RLIMIT_FSIZE, 100_000).hear()
    message = r"heap: expected files of \d+ bytes to be allowed, got a limit of 100000 \(RLIMIT_FSIZE; see ulimit -f\)"
    assert told[0] is HeapError and re.fullmatch(message, told[1]), told
    assert not processes.path(0).exists()


def test_memory_that_a_process_may_not_have(processes: Processes):
    """The limit is that of the process's address space, not the machine's memory."""
    kind, message = processes.start(join_with_limits, processes.name, resource.RLIMIT_AS, 2**24).hear()
    assert kind is HeapError
    assert re.search(r"heap: cannot map \d+ bytes: .*limited to \d+ bytes \(RLIMIT_AS; see ulimit -v\)", message), (
        message
    )
    assert not processes.path(0).exists()
