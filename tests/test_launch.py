"""Ranks as processes: results, failures of every kind, and nothing left behind."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
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
        super().__init__(f"{first} {second}")  # pickle passes this one text to __init__, which needs two


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
    """After every test, no child process is left that the test has started."""
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
        pool.call(describe, [(), ()])  # waits until both have started
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


def importable() -> dict[str, str]:
    """The environment of a program that imports this file."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])}


def segments_of(process: int) -> list[Path]:
    return list(Path("/dev/shm").glob(f"flashmoe-{process}-*"))


def test_an_interrupt_while_ranks_join_leaves_no_segment(monkeypatch):
    wait = launch.link.Exchange.wait

    def interrupted(*arguments: object) -> None:
        wait(*arguments)
        if len(segments_of(os.getpid())) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(launch.link.Exchange, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_ranks(3, join_in_vain, [()] * 3)
    assert segments_of(os.getpid()) == []


def test_a_parent_that_dies_while_ranks_join_leaves_no_segment():
    script = (
        "import test_launch\n"
        "if __name__ == '__main__':\n"
        "    test_launch.run_ranks(3, test_launch.join_in_vain, [()] * 3)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], env=importable())
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
    parent = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=importable(),
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


# ---- ranks that stop, hang or leave a child behind -------------------------------------------------------


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Asserts that the block ends within so many seconds, and leaves no file descriptor open."""
    resource_tracker.ensure_running()  # otherwise the first pool starts this process, which stays
    descriptors, start = len(os.listdir("/proc/self/fd")), time.monotonic()
    yield
    assert time.monotonic() - start < seconds
    assert len(os.listdir("/proc/self/fd")) == descriptors


def overdue(pool: RankPool, *call: object) -> str:
    """The text of the error of a call in which only rank 1 gives no answer within 3 s. Its process must be gone."""
    process = pool._workers[1].process.pid
    with pytest.raises(RankFailed) as caught:
        pool.call(*call, timeout=3.0)
    assert list(caught.value.errors) == [1] and isinstance(caught.value.errors[1], RankOverdue)
    assert not is_alive(process)
    return str(caught.value)


@pytest.mark.timeout(90)
@pytest.mark.parametrize(("size", "sent"), [(0, "[0-9,]+ of [0-9]{2,3} bytes"), (64 << 20, "[0-9,]+ of 67,1.* bytes")])
def test_a_rank_that_is_stopped_before_it_takes_its_arguments(size, sent):
    with at_most(60), RankPool(2) as pool:
        pool.call(describe, [(), ()])
        os.kill(pool._workers[1].process.pid, signal.SIGSTOP)
        said = overdue(pool, describe, [(bytes(size),), (bytes(size),)])
        where = rf"while it started or took its arguments \({sent} sent\); its process, which was stopped,"
        assert re.fullmatch(rf"rank 1: no answer after 3\.\d s, {where} was killed", said)


def stop_while_it_answers(rank: int, ranks: int, name: str) -> bytes:
    """Rank 1 stops itself as soon as its main thread is about to send the result of this function."""
    main = threading.get_ident()

    def watch() -> None:
        while sys._current_frames()[main].f_code.co_name not in ("answer", "_send", "send_bytes"):
            time.sleep(0.0002)
        os.kill(os.getpid(), signal.SIGSTOP)

    if rank == 1:
        threading.Thread(target=watch, daemon=True).start()
    return bytes(128 << 20 if rank == 1 else 0)


@pytest.mark.timeout(90)
def test_a_rank_that_is_stopped_while_it_sends_its_answer():
    with at_most(60), RankPool(2) as pool:
        pool.call(describe, [(), ()])
        said = overdue(pool, stop_while_it_answers, [(), ()])
        where = r"while it sent its answer \([0-9,]+ of 134,\d{3},\d{3} bytes\)"
        assert re.search(where + "; its process, which was stopped, was killed$", said)


def hang_without_its_files(rank: int, ranks: int, name: str) -> None:
    if rank == 1:
        os.closerange(3, 1024)
        time.sleep(600)


@pytest.mark.timeout(90)
def test_a_rank_that_closes_its_files_and_hangs():
    with at_most(60), RankPool(2) as pool:
        pool.call(describe, [(), ()])
        said = overdue(pool, hang_without_its_files, [(), ()])
        assert "after it had closed its connection while it ran test_launch.hang_without_its_files" in said


def test_what_an_overdue_rank_ran_is_named():
    with RankPool(1) as pool:
        pool.call(describe, [()])
        with pytest.raises(RankFailed, match=r"while it ran test_launch\.sleep_on_rank_0; its process was killed"):
            pool.call(sleep_on_rank_0, [()], timeout=3.0)


def die_and_leave_a_child(rank: int, ranks: int, name: str, file: Path) -> None:
    """Rank 1 forks a child, which has all its open files, writes the child's id to `file`, and kills itself."""
    if rank == 1:
        if (child := os.fork()) == 0:
            time.sleep(100)
            os._exit(0)
        file.write_text(str(child))
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.timeout(150)
@pytest.mark.parametrize("timeout", [None, 80.0])
def test_the_death_of_a_rank_whose_child_lives_on(tmp_path, timeout):
    file = tmp_path / "child"
    try:
        with at_most(60), pytest.raises(RankFailed, match=r"^rank 1: killed by SIGKILL$"):
            run_ranks(2, die_and_leave_a_child, [(file,)] * 2, timeout=timeout)
        assert is_alive(int(file.read_text()))
    finally:
        os.kill(int(file.read_text()), signal.SIGKILL)


def describe_late(rank: int, ranks: int, name: str, *args: object) -> tuple:
    time.sleep(0.5)
    return describe(rank, ranks, name, *args)


def test_what_a_killed_rank_had_sent_is_no_answer_to_a_later_call(monkeypatch):
    kill = launch._kill
    with RankPool(1) as pool:
        pool.call(describe, [()])
        monkeypatch.setattr(launch, "_kill", lambda workers: (time.sleep(3), kill(workers)))
        with pytest.raises(RankFailed, match="no answer after"):
            pool.call(describe_late, [("first",)], timeout=0.0)
        monkeypatch.setattr(launch, "_kill", kill)
        with pytest.raises(RankFailed, match="rank 0: killed by SIGKILL"):
            pool.call(describe, [("second",)])


def test_children_that_the_system_reaps():
    """A program that ignores SIGCHLD learns no exit status, so its error cannot say how a rank's process ended."""
    script = (
        "import signal, test_launch\n"
        "if __name__ == '__main__':\n"
        "    signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "    test_launch.run_ranks(3, test_launch.die_on_rank_2, [('kill',)] * 3)\n"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=importable(), stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.stderr.endswith("RankFailed: rank 2: its process ended before it answered\n")


# ---- before ranks are started, and while they are --------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "arguments", "timeout", "reason"),
    [
        (0, [], None, "ranks: expected an integer in [1, 1024], got 0"),
        ("2", [(), ()], None, "ranks: expected an integer in [1, 1024], got '2'"),
        (2, [()], None, "per_rank_args: expected 2 tuples, got 1"),
        (1, [()], -1.0, "timeout: expected seconds, at least 0, or None, got -1.0"),
        (1, [()], float("nan"), "timeout: expected seconds, at least 0, or None, got nan"),
        (1, [()], "soon", "timeout: expected seconds, at least 0, or None, got 'soon'"),
    ],
)
def test_arguments_are_checked_before_a_process_is_started(monkeypatch, ranks, arguments, timeout, reason):
    monkeypatch.setattr(launch._SPAWN, "Process", lambda *_, **__: pytest.fail("a process is started"))
    with pytest.raises(InvalidArgument, match=re.escape(reason)):
        run_ranks(ranks, describe, arguments, timeout=timeout)


def test_what_cannot_be_pickled_starts_no_process(monkeypatch):
    monkeypatch.setattr(launch._SPAWN, "Process", lambda *_, **__: pytest.fail("a process is started"))
    with pytest.raises(Exception, match="pickle"):
        run_ranks(1, describe, [(lambda: None,)])


def children_of(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def test_ranks_that_start_do_not_hear_an_interrupt(capfd):
    """Ctrl-C signals all processes of the terminal, also ranks that are still importing."""
    with RankPool(2) as pool:
        deadline = time.monotonic() + 1
        while time.monotonic() < deadline:
            for worker in pool._workers:
                os.kill(worker.process.pid, signal.SIGINT)
            time.sleep(0.01)
        assert len(pool.call(describe, [(), ()])) == 2
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("started", [2, 5])
def test_an_interrupt_of_the_command_while_ranks_start(tmp_path, started):
    """The interrupt comes when `started` child processes (ranks, and one of multiprocessing's) are there."""
    # Processes in a shell's background ignore SIGINT, and their children inherit this.
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    command = f"{heard}; import sys; from flashmoe.cli import main; sys.exit(main(sys.argv[1:]))"
    parent = subprocess.Popen(
        [sys.executable, "-c", command, "run", "--engine", "cpu", "--ranks", "4", "--out", str(tmp_path)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while len(children := children_of(parent.pid)) < started and time.monotonic() < deadline:
        time.sleep(0.001)
    os.killpg(parent.pid, signal.SIGINT)
    _, said = parent.communicate(timeout=60)
    assert (parent.returncode, said) == (130, "error: interrupted\n")
    while any(map(is_alive, children)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, children))
