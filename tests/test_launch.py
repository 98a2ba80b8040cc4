"""Ranks as processes: results, failures of every kind, and nothing left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import flashmoe
import pytest
from flashmoe import launch
from flashmoe.errors import InvalidArgument
from flashmoe.launch import RankFailed, RankKilled, RankOverdue, RankPool, group_name, run_ranks


def describe(rank: int, ranks: int, name: str, *args: object) -> tuple:
    return rank, ranks, name, args


def process_id(rank: int, ranks: int, name: str) -> int:
    return os.getpid()


def fail_on_rank_1(rank: int, ranks: int, name: str) -> int:
    if rank == 1:
        raise InvalidArgument("x: expected [T, H=8], got [4, 7]")
    return rank


def die_on_rank_2(rank: int, ranks: int, name: str, how: str) -> int:
    if rank == 2:
        if how == "exit":
            os._exit(7)
        os.kill(os.getpid(), signal.SIGKILL)
    return rank


def sleep_on_rank_0(rank: int, ranks: int, name: str) -> None:
    if rank == 0:
        time.sleep(600)


class Unpicklable(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")  # its one argument does not rebuild it


def raise_unpicklable(rank: int, ranks: int, name: str) -> None:
    raise Unpicklable("two", "words")


def return_unpicklable(rank: int, ranks: int, name: str) -> object:
    return lambda: None


def read_environment(rank: int, ranks: int, name: str) -> tuple[str | None, bool]:
    return os.environ.get("OPENBLAS_NUM_THREADS"), "torch" in sys.modules


def leave_a_segment(rank: int, ranks: int, name: str) -> None:
    Path(f"/dev/shm/flashmoe-{name}-{rank}").touch()
    raise ValueError("after making its segment")


def is_alive(pid: int) -> bool:
    """Whether the process runs: a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture(autouse=True)
def nothing_left():
    """After every test: no child process of ours that this test started."""
    before = {child.pid for child in multiprocessing.active_children()}
    yield
    assert {child.pid for child in multiprocessing.active_children()} <= before


@pytest.fixture(scope="module")
def pool():
    with RankPool(3) as pool:
        yield pool


def test_results_come_in_rank_order_with_one_name():
    results = run_ranks(3, describe, [(10,), (11, "a"), ()])
    name = results[0][2]
    assert results == [(0, 3, name, (10,)), (1, 3, name, (11, "a")), (2, 3, name, ())]


def test_names_differ(pool):
    names = {pool.call(describe, [(), (), ()])[0][2] for _ in range(3)} | {group_name() for _ in range(100)}
    assert len(names) == 103


def test_ranks_have_one_blas_thread_and_no_torch(pool):
    assert pool.call(read_environment, [()] * 3) == [("1", False)] * 3


def test_pool_serves_smaller_groups_with_the_same_processes(pool):
    processes = pool.call(process_id, [()] * 3)
    assert len({*processes, os.getpid()}) == 4
    assert pool.call(process_id, [()] * 2, ranks=2) == processes[:2]
    smaller = pool.call(describe, [("a",), ("b",)], ranks=2)
    assert [result[:2] for result in smaller] == [(0, 2), (1, 2)]


def test_environment_of_the_parent_stays(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    with RankPool(1):
        assert os.environ["OMP_NUM_THREADS"] == "5"
        assert "OPENBLAS_NUM_THREADS" not in os.environ


def test_exception_comes_back_with_its_traceback(pool):
    with pytest.raises(RankFailed, match=r"rank 1: InvalidArgument: x: expected \[T, H=8\], got \[4, 7\]") as caught:
        pool.call(fail_on_rank_1, [()] * 3)
    assert list(caught.value.errors) == [1]
    error = caught.value.errors[1]
    assert isinstance(error, InvalidArgument)
    assert "in fail_on_rank_1" in str(error.__cause__)
    assert caught.value.__cause__ is error


def test_pool_survives_an_exception(pool):
    with pytest.raises(RankFailed):
        pool.call(fail_on_rank_1, [()] * 3)
    assert [result[0] for result in pool.call(describe, [()] * 3)] == [0, 1, 2]


def test_what_cannot_be_pickled_is_described(pool):
    with pytest.raises(RankFailed, match="all 3 ranks: FlashMoEError: Unpicklable: two words"):
        pool.call(raise_unpicklable, [()] * 3)
    with pytest.raises(RankFailed, match="pickle"):
        pool.call(return_unpicklable, [()] * 3)
    with pytest.raises(Exception, match="pickle"):
        pool.call(lambda rank, ranks, name: None, [()] * 3)
    assert len(pool.call(describe, [()] * 3)) == 3


@pytest.mark.parametrize(
    ("how", "what"),
    [("kill", "killed by SIGKILL"), ("exit", "its process exited with status 7 before it answered")],
)
def test_death_is_reported_as_such(how, what):
    with pytest.raises(RankFailed, match=f"^rank 2: {what}$") as caught:
        run_ranks(3, die_on_rank_2, [(how,)] * 3)
    assert isinstance(caught.value.errors[2], RankKilled)


def test_killed_rank_stays_dead_and_the_others_go_on():
    with RankPool(3) as pool:
        pool.kill(1)
        with pytest.raises(RankFailed, match=r"^rank 1: killed by SIGKILL$"):
            pool.call(describe, [()] * 3)
        assert pool.call(describe, [()], ranks=1)[0][:2] == (0, 1)


def test_overdue_rank_is_killed():
    with RankPool(2) as pool:
        with pytest.raises(RankFailed, match="rank 0: no answer after") as caught:
            pool.call(sleep_on_rank_0, [(), ()], timeout=3.0)
        assert list(caught.value.errors) == [0]
        assert isinstance(caught.value.errors[0], RankOverdue)


def test_others_get_only_a_grace_period_after_a_failure(monkeypatch):
    monkeypatch.setattr(launch, "GRACE_SECONDS", 0.5)
    with RankPool(2) as pool:
        pool.kill(1)
        with pytest.raises(RankFailed) as caught:
            pool.call(sleep_on_rank_0, [(), ()])
    assert isinstance(caught.value.errors[0], RankOverdue)
    assert isinstance(caught.value.errors[1], RankKilled)


def test_close_kills_busy_ranks_and_is_idempotent():
    pool = RankPool(2)
    pids = [worker.process.pid for worker in pool._workers]
    pool.close()
    pool.close()
    assert not any(map(is_alive, pids))
    with pytest.raises(Exception, match="closed"):
        pool.call(describe, [(), ()])


def test_segments_of_a_failed_group_are_freed():
    with pytest.raises(RankFailed):
        run_ranks(2, leave_a_segment, [(), ()])
    assert not list(Path("/dev/shm").glob(f"flashmoe-{os.getpid()}-*"))


def join_in_vain(rank: int, ranks: int, name: str) -> None:
    if rank != 2:
        flashmoe.Context(
            rank=rank, ranks=ranks, name=name, timeout=0, max_tokens=8, hidden=8, intermediate=8, experts=3, top_k=1
        )
    time.sleep(600)


def segments_of(process: int) -> list[Path]:
    return list(Path("/dev/shm").glob(f"flashmoe-{process}-*"))


def test_an_interrupt_while_ranks_join_leaves_no_segment(monkeypatch):
    def interrupted(*_: object) -> None:
        while len(segments_of(os.getpid())) < 2:
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "_collect", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_ranks(3, join_in_vain, [()] * 3)
    assert segments_of(os.getpid()) == []


def test_a_parent_that_dies_while_ranks_join_leaves_no_segment():
    script = (
        "import test_launch\n"
        "if __name__ == '__main__':\n"
        "    test_launch.run_ranks(3, test_launch.join_in_vain, [()] * 3)\n"
    )
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    parent = subprocess.Popen([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": path})
    deadline = time.monotonic() + 60
    while len(segments_of(parent.pid)) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(segments_of(parent.pid)) == 2
    parent.kill()
    parent.wait()
    while segments_of(parent.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert segments_of(parent.pid) == []


@pytest.mark.parametrize("busy", [False, True])
def test_workers_die_with_their_parent(busy):
    script = (
        "import sys, test_launch\n"
        "from flashmoe.launch import RankPool\n"
        "if __name__ == '__main__':\n"
        "    pool = RankPool(2)\n"
        "    print(*[worker.process.pid for worker in pool._workers], flush=True)\n"
        f"    pool.call(test_launch.{'sleep_on_rank_0' if busy else 'describe'}, [(), ()])\n"
        "    print('idle', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    parent = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    if not busy:
        assert parent.stdout.readline() == "idle\n"
    assert len(pids) == 2
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + 20
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, pids))


@pytest.mark.parametrize(("ranks", "arguments"), [(0, []), (2, [()])])
def test_wrong_counts_are_refused(ranks, arguments):
    with pytest.raises(InvalidArgument, match="expected"):
        run_ranks(ranks, describe, arguments)
