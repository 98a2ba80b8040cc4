"""What another user of the machine can do to ranks that meet in /dev/shm, where every user may make files.

This user, the stranger, cannot read a rank's memory, end its process or hold it up. The stranger can only take the name
of a rank's file, and a rank that finds such a file says so at once. The tests need root, to act as two users.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
import threading
import time
from pathlib import Path
from typing import Any

import flashmoe
import pytest
from flashmoe import GroupError
from flashmoe.launch import _remove_segments
from processes import LIMITS, SHARED_MEMORY, Page, Processes, await_condition, page_of, processes

__all__ = ["processes"]  # a fixture

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as two users of the machine")

STRANGER = 54321
VICTIMS = [pytest.param(0, id="root"), pytest.param(54322, id="user")]
PATIENT = 60.0
"""The timeout of ranks, in seconds. Tests allow much less time, so a rank that waits for its timeout fails them."""


# ---- the stranger ----------------------------------------------------------------------------------------------------


def page_of_a_rank(name: str, rank: int, ranks: int) -> bytes:
    """The control page of a rank that is joining. The rank is a thread of this process, in a group of another name."""

    def wait_for_ever() -> None:
        flashmoe.Context(name=f"{name}-elsewhere", rank=rank, ranks=ranks, timeout=0, **LIMITS)

    threading.Thread(target=wait_for_ever, daemon=True).start()
    path = SHARED_MEMORY / f"flashmoe-{name}-elsewhere-{rank}"
    await_condition(path.exists, f"{path} is not there")
    with page_of(path) as page:
        await_condition(lambda: page["state"] == Page.READY, "it is not ready")
        return page.read()


def make_file(path: Path, content: bytes, mode: int = 0o666) -> int:
    """Makes a file with this content and mode, whatever the umask. Returns its descriptor."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.write(file, content)
    os.fchmod(file, mode)
    return file


def take(pipe: Any, path: Path, what: str) -> None:
    """Take the path of a rank's file in the way `what` (see `WAYS`), say so, and stay."""
    held = []
    if what == "folder":
        path.mkdir(mode=0o777)
    elif what == "pipe":
        os.mkfifo(path, 0o666)
    elif what == "socket":
        server = socket.socket(socket.AF_UNIX)
        server.bind(str(path))
        held.append(server)
    elif what == "link":
        path.symlink_to("/proc/self/environ")
    else:
        held.append(make_file(path, b"", 0o600 if what == "closed file" else 0o666))
    if what == "leased file":  # whoever opens the file waits up to 45 s until its holder gives the lease back
        fcntl.fcntl(held[0], fcntl.F_SETLEASE, fcntl.F_WRLCK)
    pipe.send("taken")
    pipe.recv()


WAYS = ["open file", "closed file", "leased file", "folder", "pipe", "socket", "link"]


def pretend(pipe: Any, name: str, rank: int, ranks: int) -> None:
    """Imitate a rank of the group `name` as well as possible: with a file that has the control page of a living, ready
    rank, and memory for a heap. When told to, shorten the file to 0 bytes."""
    page = page_of_a_rank(name, rank, ranks)
    file = make_file(SHARED_MEMORY / f"flashmoe-{name}-{rank}", page)
    os.truncate(file, int.from_bytes(page[40:48], "little"))
    pipe.send("taken")
    pipe.recv()
    os.truncate(file, 0)
    pipe.send("short")
    pipe.recv()


def lock(pipe: Any, name: str, rank: int, ranks: int) -> None:
    """Make the file that a rank leaves behind if it is killed, and lock it."""
    page = bytearray(page_of_a_rank(name, rank, ranks))
    page[16:20] = (2**22 + 1).to_bytes(4, "little")  # a process id that no process can have
    file = make_file(SHARED_MEMORY / f"flashmoe-{name}-{rank}", page)
    fcntl.flock(file, fcntl.LOCK_EX)
    pipe.send("taken")
    pipe.recv()


# ---- what the stranger does to a rank --------------------------------------------------------------------------------


def expect_refusal(rank: Any, path: Path, victim: int) -> None:
    """The rank ends at once, with an error that names the path, the file's user and the user that was expected."""
    told = rank.hear()
    assert type(told.error) is GroupError, told
    expected = rf"{path}: expected a file of uid {victim} .*, got .* of uid {STRANGER}\b"
    assert re.search(expected, str(told.error)), told.error


@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("what", WAYS)
def test_a_name_is_taken_before_ranks_join(processes: Processes, victim: int, what: str):
    stranger = processes.start(take, processes.path(1), what, uid=STRANGER)
    assert stranger.hear() == "taken"
    expect_refusal(processes.join(0, 2, PATIENT, uid=victim), processes.path(1), victim)
    expect_refusal(processes.join(1, 2, PATIENT, uid=victim), processes.path(1), victim)
    assert os.path.lexists(processes.path(1))  # the stranger's file is not removed
    assert not os.path.lexists(processes.path(0))


@pytest.mark.parametrize("victim", VICTIMS)
def test_a_name_is_taken_while_ranks_join(processes: Processes, victim: int):
    """The stranger waits until the first rank's file appears, and then takes the name of the second rank's file."""
    rank = processes.join(0, 2, PATIENT, uid=victim)
    processes.await_path(0)
    time.sleep(0.05)  # rank 0 looks for rank 1 every millisecond
    assert processes.start(take, processes.path(1), "open file", uid=STRANGER).hear() == "taken"
    expect_refusal(rank, processes.path(1), victim)


@pytest.mark.parametrize("victim", VICTIMS)
def test_a_stranger_is_no_rank(processes: Processes, victim: int):
    """However well the stranger imitates a rank, a rank refuses its file, and writes nothing to it."""
    stranger = processes.start(pretend, processes.name, 1, 2, uid=STRANGER)
    assert stranger.hear() == "taken"
    with page_of(processes.path(1)) as page:
        before = page.read()
        rank = processes.join(0, 2, PATIENT, uid=victim)
        expect_refusal(rank, processes.path(1), victim)
        assert page.read() == before


@pytest.mark.parametrize("victim", VICTIMS)
def test_a_stranger_shortens_its_file(processes: Processes, victim: int):
    """If a rank mapped the stranger's file, a load from it would end the rank with SIGBUS once the file is shorter."""
    stranger = processes.start(pretend, processes.name, 1, 2, uid=STRANGER)
    assert stranger.hear() == "taken"
    rank = processes.join(0, 2, PATIENT, uid=victim)
    time.sleep(0.2)
    stranger.tell("shorten it")
    assert stranger.hear() == "short"
    expect_refusal(rank, processes.path(1), victim)


@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("rank", [0, 1], ids=["own name", "a peer's name"])
def test_a_stranger_holds_a_lock(processes: Processes, victim: int, rank: int):
    """A locked file of the stranger's, at the rank's own name or at a peer's, does not make the rank wait."""
    stranger = processes.start(lock, processes.name, rank, 2, uid=STRANGER)
    assert stranger.hear() == "taken"
    expect_refusal(processes.join(0, 2, PATIENT, uid=victim), processes.path(rank), victim)


@pytest.mark.parametrize("victim", VICTIMS)
def test_a_stranger_is_in_the_way_of_another_group(processes: Processes, victim: int):
    """Ranks remove leftovers of other groups when they join, but leave a stranger's file alone, and do not wait for its
    lock."""
    elsewhere = SHARED_MEMORY / f"flashmoe-{processes.name}x-0"
    assert processes.start(lock, f"{processes.name}x", 0, 2, uid=STRANGER).hear() == "taken"
    ranks = [processes.join(rank, 2, uid=victim) for rank in range(2)]
    assert [rank.hear().error for rank in ranks] == [None, None]
    assert elsewhere.exists()


@pytest.mark.parametrize("victim", VICTIMS)
def test_a_file_that_others_may_open_is_no_rank(processes: Processes, victim: int):
    """A rank refuses a file that others may open even if the file is of the rank's own user, because other users may
    have mapped it."""
    os.close(make_file(processes.path(1), bytes(Page.SIZE)))
    os.chown(processes.path(1), victim, victim)
    error = processes.join(0, 2, PATIENT, uid=victim).hear().error
    assert type(error) is GroupError
    assert re.search(rf"that no other user may open, .* got a file of uid {victim} with mode 666$", str(error)), error


def test_a_file_of_two_names_is_no_rank(processes: Processes):
    """Another user may have made the second name: where the system lets users link to files of others, the file may be
    the segment of a rank of another group."""
    os.close(make_file(processes.path(1), bytes(Page.SIZE), 0o600))
    os.link(processes.path(1), f"{processes.path(1)}-too")
    error = processes.join(0, 2, PATIENT).hear().error
    assert re.search(r"with one name, got a file of uid 0 with mode 600 and 2 names$", str(error)), error


def test_root_is_no_other_user(processes: Processes):
    """A rank of another user refuses a file of root's too."""
    os.close(make_file(processes.path(1), bytes(Page.SIZE), 0o600))
    error = processes.join(0, 2, PATIENT, uid=54322).hear().error
    assert re.search(r"expected a file of uid 54322 .*, got a file of uid 0 with mode 600$", str(error)), error


def test_other_users_cannot_open_a_segment(processes: Processes):
    processes.join(0, 2, uid=54322)
    path = processes.await_path(0)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_uid == 54322


def remove_segments(pipe: Any, name: str) -> None:
    try:
        pipe.send(_remove_segments(name))
    except OSError as error:
        pipe.send(error)


def test_a_launcher_passes_over_what_is_not_its_users(processes: Processes):
    """Removing a stranger's file would fail, and that error would hide the launcher's own, which says why ranks
    failed."""
    assert processes.start(take, processes.path(1), "open file", uid=STRANGER).hear() == "taken"
    assert processes.start(remove_segments, processes.name, uid=54322).hear() is None
    assert processes.start(remove_segments, processes.name).hear() is None  # root could remove the file, but does not
    assert processes.path(1).exists()
