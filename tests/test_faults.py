"""What a caller or a peer does wrong ends in the documented error, which says what is wrong, and leaves nothing behind.

A rank that waits for a peer gives up within TIMEOUT seconds, plus the MARGIN seconds that a busy machine may need to
run it. After each test with a group, the group's processes are gone and none of its shared memory is left.
"""

from __future__ import annotations

import glob
import json
import math
import multiprocessing
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import flashmoe
import flashmoe.launch
import ml_dtypes
import numpy as np
import pytest
from flashmoe import FlashMoEError, GroupError, HeapError, InvalidArgument, LimitExceeded, PeerTimeout
from problems import random_problem

TIMEOUT = 2.0
MARGIN = 10.0
SIZES = {"hidden": 16, "intermediate": 12, "experts": 6, "top_k": 2, "dtype": "float32"}
LIMITS = {**SIZES, "max_tokens": 20, "timeout": TIMEOUT}

# Each rank is forked from a server that has imported the slow modules, so that a start takes milliseconds, not seconds.
_FORKSERVER = multiprocessing.get_context("forkserver")
_FORKSERVER.set_forkserver_preload(["flashmoe", "tvm_ffi"])


# ---- groups of processes that go wrong ---------------------------------------------------------------------


@dataclass(frozen=True)
class Failure:
    """How a rank ended: with which exception (None: its calls succeeded), and when (CLOCK_MONOTONIC)."""

    error: Exception | None
    at: float


class Group:
    """The processes of one test. Each rank joins, says so, waits for `go`, makes its calls, and says how they ended."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.name = f"fault-{secrets.token_hex(6)}"
        self._processes: dict[int, multiprocessing.Process] = {}
        self._ended: list[multiprocessing.Process] = []
        self._pipes: dict[int, Any] = {}

    def start(self, rank: int, *, calls: int = 1, limits: dict | None = None, **problem: Any) -> None:
        """Start a rank that makes `calls` calls, with changes to its limits and to `_live`'s problem."""
        pipe, theirs = _FORKSERVER.Pipe()
        limits = {"rank": rank, "ranks": self.ranks, "name": self.name, **LIMITS, **(limits or {})}
        process = _FORKSERVER.Process(target=_live, args=(theirs, limits, calls, problem), daemon=True)
        process.start()
        theirs.close()
        if rank in self._processes:  # a new process takes the rank's place
            self._ended.append(self._processes[rank])
        self._processes[rank] = process
        self._pipes[rank] = pipe

    def hear(self, rank: int) -> Any:
        """The next message of a rank. The test fails if none comes within TIMEOUT + MARGIN."""
        assert self._pipes[rank].poll(TIMEOUT + MARGIN), f"rank {rank} says nothing"
        return self._pipes[rank].recv()

    def go(self) -> float:
        """Wait until every rank has joined, and let the ranks call. Returns the time."""
        for rank in self._pipes:
            assert self.hear(rank) == "joined"
        for pipe in self._pipes.values():
            pipe.send("go")
        return time.monotonic()

    def kill(self, rank: int, number: int = signal.SIGKILL) -> float:
        """Send a signal to a rank's process. Returns the time."""
        os.kill(self._processes[rank].pid, number)
        return time.monotonic()

    def exit_code(self, rank: int) -> int | None:
        """The exit code of a rank's process, after it has ended by itself; None if it does not end in time."""
        self._processes[rank].join(TIMEOUT + MARGIN)
        return self._processes[rank].exitcode

    def errors(self, *ranks: int, since: float) -> list[Exception]:
        """What these ranks raised, or None. Asserts that each rank ended in time, and that its process then closes its
        context and exits by itself."""
        failures = [self.hear(rank) for rank in ranks]
        for failure in failures:
            assert failure.at - since < TIMEOUT + MARGIN
        for rank in ranks:
            self._pipes[rank].send("close")
            self._processes[rank].join(MARGIN)
            assert self._processes[rank].exitcode == 0
        return [failure.error for failure in failures]

    def segments(self) -> list[str]:
        return glob.glob(f"/dev/shm/*{self.name}*")

    def segments_of(self, rank: int) -> list[str]:
        return glob.glob(f"/dev/shm/*{self.name}-{rank}")

    def wait_until_seen(self, rank: int) -> None:
        """Wait until another rank has opened this rank's segment. The second word of the segment's control page counts
        the ranks that have opened it."""
        end = time.monotonic() + MARGIN
        seen = 0
        while seen == 0:
            assert time.monotonic() < end, f"nobody sees rank {rank}"
            time.sleep(0.001)
            for path in self.segments_of(rank):
                with open(path, "rb") as page:
                    seen = int.from_bytes(page.read(8)[4:], sys.byteorder)

    def end(self) -> None:
        for process in (*self._processes.values(), *self._ended):
            process.kill()
            process.join()
        left = self.segments()
        for path in left:
            os.unlink(path)
        assert left == []


def _live(pipe: Any, limits: dict[str, Any], calls: int, problem: dict[str, Any]) -> None:
    """What a rank's process does.

    `problem`: changes to SIZES, the `tokens` of each rank, and `spoil` = (argument, index, value), a value to
    put into an argument of this rank.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of scripts inherit that it is ignored
    try:
        context = flashmoe.Context(**limits)
    except Exception as error:
        pipe.send(Failure(error, time.monotonic()))
        pipe.recv()
        return
    pipe.send("joined")
    pipe.recv()
    try:
        for turn in range(calls):
            _call(context, turn, **{"tokens": 16, "spoil": None, "fused": False, **SIZES, **problem})
        failure = Failure(None, time.monotonic())
    except Exception as error:
        failure = Failure(error, time.monotonic())
    if calls:
        pipe.send(failure)
    pipe.recv()  # "close", or the end of the test
    context.close()


def _call(context: flashmoe.Context, seed: int, tokens: int, spoil: tuple | None, **sizes: Any) -> None:
    arguments = random_problem(seed, [tokens] * context.ranks, **sizes).arguments(context.rank)
    if spoil is not None:
        name, index, value = spoil
        arguments[name][index] = value
    flashmoe.moe(context, **arguments)


@pytest.fixture(scope="module")
def server() -> None:
    """Waits until the server has imported its modules, so that no test's time limit has to allow for that."""
    process = _FORKSERVER.Process(target=os.getpid)
    process.start()
    process.join()


@pytest.fixture
def group(server: None) -> Iterator[Group]:
    group = Group(3)
    yield group
    group.end()


def expect(errors: list[Exception], kind: type[Exception], pattern: str) -> None:
    """Asserts that all errors are of this kind and have this pattern in their text."""
    for error in errors:
        assert type(error) is kind, repr(error)
        assert re.search(pattern, str(error)), str(error)


# ---- a peer is missing -------------------------------------------------------------------------------------


def test_a_rank_never_joins(group):
    since = time.monotonic()
    group.start(0)
    group.start(1)
    while len(group.segments()) < 2:  # so that the fixture's check at the end has something to find
        assert time.monotonic() - since < MARGIN
    expect(group.errors(0, 1, since=time.monotonic()), PeerTimeout, r"rank 2 did not join within 2 s")


def test_a_rank_is_killed_before_it_joins(group):
    """The rank that has seen the killed rank raises the error, though it would wait without end for a rank that nobody
    has seen."""
    for rank in (0, 1):
        group.start(rank, limits={"timeout": 0})
    group.wait_until_seen(1)
    since = group.kill(1)
    expect(group.errors(0, since=since), PeerTimeout, r"rank 1 did not finish joining: its process \d+ is gone")


@pytest.mark.parametrize("delay", [0.0, 0.001, 0.01, 0.1])
def test_a_rank_that_was_killed_while_it_joined_starts_again(group, delay):
    """It starts again under the same name, beside the segment that its killed process has left. A segment says from its
    first moment on which process made it, so ranks see that this process is gone. (It is killed while it takes the
    memory of a large heap, or after that.)"""
    group.start(1, limits={"max_tokens": 20_000, "hidden": 2048})
    while not group.segments():
        pass
    time.sleep(delay)
    group.kill(1)
    assert group.exit_code(1) == -signal.SIGKILL
    for rank in range(3):
        group.start(rank)
    assert group.errors(0, 1, 2, since=group.go()) == [None] * 3


def test_a_rank_dies_while_another_waits_for_a_third(group):
    """A rank that waits for one peer also watches the peers that it has seen."""
    for rank in (1, 2):
        group.start(rank, limits={"timeout": 0})
    group.wait_until_seen(2)
    since = group.kill(2)
    expect(group.errors(1, since=since), PeerTimeout, r"rank 2 did not finish joining: its process \d+ is gone")


def test_a_rank_that_gave_up_comes_back_at_once(group):
    """Rank 1 still joins with the earlier process of rank 0, and has not noticed that this process gave up. The new
    process of rank 0 does not join with this attempt of rank 1."""
    for rank in (0, 1):
        group.start(rank, limits={"timeout": 0})
    group.wait_until_seen(0)
    group.wait_until_seen(1)
    group.kill(1, signal.SIGSTOP)
    group.kill(0, signal.SIGINT)
    assert group.exit_code(0) == 1
    group.start(0)
    while not group.segments_of(0):
        time.sleep(0.001)
    time.sleep(0.05)  # rank 0 looks at rank 1 every millisecond
    since = group.kill(1, signal.SIGCONT)
    expect(group.errors(1, since=since), GroupError, r"rank 0 failed to join: it was interrupted")
    group.start(1)
    group.start(2)
    assert group.errors(0, 1, 2, since=group.go()) == [None] * 3


def test_an_interrupt_ends_the_wait_for_others(group):
    group.start(0, limits={"timeout": 0})
    while not group.segments():
        time.sleep(0.001)
    group.kill(0, signal.SIGINT)
    assert group.exit_code(0) == 1
    assert group.segments() == []


def test_an_interrupt_ends_a_call(group):
    """Without a timeout, ranks wait without end for a peer that never calls, unless the user interrupts them."""
    for rank in range(3):
        group.start(rank, calls=0 if rank == 1 else 1, limits={"timeout": 0})
    group.go()
    time.sleep(0.2)
    for rank in (0, 2):
        group.kill(rank, signal.SIGINT)
    assert [group.exit_code(rank) for rank in (0, 2)] == [1, 1]


_INTERRUPTED = """
import signal, threading, os
import numpy as np, flashmoe
sizes = {"hidden": 512, "intermediate": 1024, "experts": 8, "top_k": 8}  # most of a second of one thread
context = flashmoe.Context(max_tokens=4096, processors=1, dtype="float32", **sizes)
numbers = lambda *shape: np.random.default_rng(1).standard_normal(shape, np.float32)
arguments = {"x": numbers(4096, 512), "router": numbers(8, 512), "top_k": 8}
arguments |= {"gate_up_proj": numbers(8, 2048, 512), "down_proj": numbers(8, 512, 1024)}
signal.signal(signal.SIGUSR1, lambda *_: print("heard"))
signal.signal(signal.SIGINT, signal.default_int_handler)
wanted = flashmoe.moe(context, **arguments)
for number in (signal.SIGUSR1, signal.SIGINT):
    timer = threading.Timer(context.last_call.wall_ns * 1e-9 * 0.3, os.kill, (os.getpid(), number))
    timer.start()
    try:
        print("same bits", (flashmoe.moe(context, **arguments) == wanted).all())
    except KeyboardInterrupt:
        print("interrupted")
try:
    flashmoe.moe(context, **arguments)
except flashmoe.GroupError as error:
    print(error)
"""


def test_a_handler_that_returns_does_not_end_a_call():
    """A handler that raises an exception ends the call, and makes the context unusable."""
    heard, same, interrupted, broken = run_python(_INTERRUPTED).splitlines()
    assert (heard, same, interrupted) == ("heard", "same bits True", "interrupted")
    assert broken == "context: an earlier call failed on this group; close it and make a new one"


def _join_again_and_again(rank: int, ranks: int, name: str) -> None:
    for _ in range(300):
        flashmoe.Context(rank=rank, ranks=ranks, name=name, **LIMITS).close()


def test_a_group_of_the_same_name_forms_at_once():
    """Ranks join and leave 300 groups of one name. A rank that is ahead of the others does not meet them in a group
    that it has left."""
    flashmoe.launch.run_ranks(3, _join_again_and_again, [()] * 3, timeout=60)


def test_a_rank_never_calls(group):
    for rank in range(3):
        group.start(rank, calls=0 if rank == 1 else 1)
    errors = group.errors(0, 2, since=group.go())
    expect(
        errors,
        PeerTimeout,
        r"rank 1 holds up call 1: it has not begun call 1 .* waited (2 s )?for the call signal",
    )


def test_a_rank_leaves_after_some_calls(group):
    for rank in range(3):
        group.start(rank, calls=2 if rank == 1 else 5)
    since = group.go()
    assert group.errors(1, since=since) == [None]
    errors = group.errors(0, 2, since=since)
    expect(errors, PeerTimeout, r"rank 1 holds up call 3: its process \d+ is gone; .* waited (2 s )?for ")


@pytest.mark.parametrize("delay", [0.0, 0.05, 0.1, 0.2, 0.4])
def test_a_rank_is_killed_at_any_moment_of_many_calls(group, delay):
    for rank in range(3):
        group.start(rank, calls=10**9)
    group.go()
    time.sleep(delay)
    errors = group.errors(0, 2, since=group.kill(1))
    expect(errors, PeerTimeout, r"rank 1 holds up call \d+: its process \d+ is gone; .* waited (2 s )?for .* rank")


@pytest.mark.parametrize("delay", [0.0, 0.1, 0.4])
def test_a_rank_is_stopped_at_any_moment_of_many_calls(group, delay):
    for rank in range(3):
        group.start(rank, calls=10**9)
    group.go()
    time.sleep(delay)
    errors = group.errors(0, 2, since=group.kill(1, signal.SIGSTOP))
    expect(errors, PeerTimeout, r"rank 1 holds up call \d+: it has (not )?begun .* waited (2 s )?for .* rank")
    group.kill(1, signal.SIGCONT)  # the stopped rank, which is late, is told as well
    expect(group.errors(1, since=time.monotonic()), PeerTimeout, r"rank 1 holds up call")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_rank_fails_in_the_middle_of_a_long_call(group, number):
    """Rank 1 holds all experts: the call takes it seconds, and the others wait that long without an error."""
    large = {"hidden": 1024, "intermediate": 1024, "experts": 4, "top_k": 4, "placement": [1] * 4}
    limits = {**large, "max_tokens": 2000, "processors": 1}
    for rank in range(3):
        group.start(rank, limits=limits, tokens=2000, **large)
    group.go()
    time.sleep(0.5)
    errors = group.errors(0, 2, since=group.kill(1, number))
    expect(errors, PeerTimeout, r"rank 1 holds up call 1: it")


def test_a_rank_raises_before_it_calls(group):
    for rank in range(3):
        group.start(rank, **({"activation": "tanh"} if rank == 1 else {}))
    since = group.go()
    expect(group.errors(1, since=since), InvalidArgument, r"activation: expected .*, got 'tanh'")
    expect(group.errors(0, 2, since=since), GroupError, r"rank 1 refused call 1: activation: expected .*, got 'tanh'")


# ---- ranks disagree ----------------------------------------------------------------------------------------

# The change to rank 1's limits, the pattern of the message, the others' value and rank 1's value. In the pattern, `{}`
# stands for what two ranks have, in either order.
DISAGREEMENTS_IN_LIMITS = {
    "hidden": ({"hidden": 8}, "hidden: {}", 16, 8),
    "experts": ({"experts": 9}, "experts: {}", 6, 9),
    "top_k": ({"top_k": 3}, "top_k: {}", 2, 3),
    "tokens": ({"max_tokens": 21}, "max_tokens: {}", 20, 21),
    "dtype": ({"dtype": "bfloat16"}, r"\(dtype\): {}", 4, 2),
    "placement": ({"placement": [0] * 6}, r"\(placement\): {}", 2, 6),
    "return mode": ({"return_mode": "direct"}, r"\(return_mode\): {}", 3, 2),
    "capacity": ({"capacity_factor": 0.5}, r"\(capacity_factor\): {}", 0, 4),
    "number of ranks": ({"ranks": 4}, "ranks: {}", 3, 4),
}


def either_order(pattern: str, usual: object, of_rank_1: object) -> str:
    """`pattern` with what two ranks have, one of them rank 1, in place of `{}`."""
    one = f"rank [02] has {usual}, rank 1 has {of_rank_1}"
    other = f"rank 1 has {of_rank_1}, rank [02] has {usual}"
    return pattern.format(f"({one}|{other})")


@pytest.mark.parametrize("what", DISAGREEMENTS_IN_LIMITS)
def test_contexts_disagree(group, what):
    """The ranks that find the disagreement say what it is. A rank that has met no rank which differs from it says that
    another rank failed to join."""
    limits, pattern, usual, of_rank_1 = DISAGREEMENTS_IN_LIMITS[what]
    for rank in range(3):
        group.start(rank, limits=limits if rank == 1 else None)
    errors = group.errors(0, 1, 2, since=time.monotonic())
    disagreement = either_order(pattern, usual, of_rank_1)
    expect(errors, GroupError, rf"{disagreement}|rank \d failed to join")
    assert any(re.search(disagreement, str(error)) for error in errors)


def test_ranks_that_disagree_on_who_there_is_wait_for_nobody_else(group):
    """If they waited for further ranks, they would wait without end, because they have no timeout."""
    for rank, ranks in ((0, 3), (1, 4)):
        group.start(rank, limits={"ranks": ranks, "timeout": 0})
    expect(group.errors(0, 1, since=time.monotonic()), GroupError, "ranks: rank . has ., rank . has .")


DISAGREEMENTS_IN_CALLS = {
    "hidden": ({"hidden": 8}, "hidden size H: {}", 16, 8),
    "intermediate": ({"intermediate": 5}, "intermediate size I: {}", 12, 5),
    "experts": ({"experts": 5}, "experts E: {}", 6, 5),
    "top_k": ({"top_k": 1}, "top_k K: {}", 2, 1),
    "dtype": ({"dtype": "float16"}, "dtype: {}", "float32", "float16"),
    "return mode": ({"return_mode": "reduced"}, "return_mode: {}", "direct", "reduced"),
    "activation": ({"activation": "relu"}, "activation: {}", "swiglu", "relu"),
    "capacity": ({"capacity_factor": 2.0}, "capacity_factor: {}", 0, 2),
    "placement": (
        {"placement": [0, 2, 1, 1, 0, 2]},
        "rank . and rank . place the experts differently",
        "",
        "",
    ),
}


@pytest.mark.parametrize("what", DISAGREEMENTS_IN_CALLS)
def test_calls_disagree(group, what):
    changes, pattern, usual, of_rank_1 = DISAGREEMENTS_IN_CALLS[what]
    for rank in range(3):
        group.start(rank, **(changes if rank == 1 else {}))
    errors = group.errors(0, 1, 2, since=group.go())
    expect(errors, GroupError, f"ranks disagree on call 1: .*{either_order(pattern, usual, of_rank_1)}")


def test_a_placement_that_overloads_one_rank_is_refused_by_all(group):
    for rank in range(3):
        group.start(rank, placement=[0, 0, 0, 1, 1, 2])
    errors = group.errors(0, 1, 2, since=group.go())
    expect(errors, LimitExceeded, "placement: expected at most 2 experts on a rank, the context's limit, got 3")


def test_two_processes_claim_one_rank(group):
    group.start(0)
    while not group.segments():
        time.sleep(0.001)
    with pytest.raises(GroupError, match=rf"already has a rank 0 .*{group.name}"):
        flashmoe.Context(rank=0, ranks=3, name=group.name, **LIMITS)
    expect(group.errors(0, since=time.monotonic()), PeerTimeout, "rank 1 did not join")


# ---- values that only the call sees ------------------------------------------------------------------------

BAD_VALUES = {
    "NaN in x": (("x", (3, 5), np.nan), flashmoe.BadRow, "router: .* got NaN or infinity for token 3"),
    "infinity in x": (("x", (3, 5), np.inf), flashmoe.BadRow, "router: .* got NaN or infinity for token 3"),
    "duplicate ids": (
        ("topk_ids", 3, 4),
        flashmoe.BadRow,
        "topk_ids: expected distinct experts .* got expert 4 twice for token 3",
    ),
    "an id that is no expert": (("topk_ids", (3, 1), 6), flashmoe.BadRow, r"topk_ids: .*E=6\).*, got 6 for token 3"),
    "a negative id": (("topk_ids", (3, 1), -2), flashmoe.BadRow, r"topk_ids: .*E=6\), .*, got -2 for token 3"),
}


@pytest.mark.parametrize("what", BAD_VALUES)
def test_values_that_only_the_call_sees_are_told_to_their_rank_alone(group, what):
    """All ranks complete the call. Only the rank that was given the value raises an error."""
    spoil, error, pattern = BAD_VALUES[what]
    for rank in range(3):
        group.start(rank, fused=spoil[0] == "x", strict=True, spoil=spoil if rank == 1 else None)
    errors = group.errors(0, 1, 2, since=group.go())
    assert errors[0] is errors[2] is None
    expect(errors[1:2], error, f"{pattern}.* of rank 1")


@pytest.mark.parametrize("where", ["router", "router_bias"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_router_that_is_not_finite(where, value):
    problem = random_problem(1, [8], biases=(True, False, False), **SIZES)
    problem.x[0] = np.abs(problem.x[0]) + 1.0  # so that logits are infinite, not NaN
    getattr(problem, where)[2] = value
    with flashmoe.Context(**problem.limits()) as context:
        assert np.isnan(flashmoe.moe(context, **problem.arguments(0))).all()
        assert context.last_call.bad_rows == 8
        with pytest.raises(flashmoe.BadRow, match=r"router: .* for token 0 of rank 0"):
            flashmoe.moe(context, **problem.arguments(0), strict=True)


def test_calls_after_wrong_ids_are_as_before():
    problem = random_problem(1, [8], fused=False, **SIZES)
    good = problem.arguments(0)
    twice = np.zeros_like(good["topk_ids"])
    with flashmoe.Context(**problem.limits()) as context:
        y = flashmoe.moe(context, **good)
        with pytest.raises(InvalidArgument, match="distinct"):
            flashmoe.moe(context, **good | {"topk_ids": twice})
        assert np.array_equal(flashmoe.moe(context, **good), y)


def test_a_failed_call_has_no_report():
    problem = random_problem(1, [8], fused=False, **SIZES)
    good = problem.arguments(0)
    with flashmoe.Context(**problem.limits()) as context:
        flashmoe.moe(context, **good)
        assert context.last_call is not None
        with pytest.raises(InvalidArgument, match="distinct"):
            flashmoe.moe(context, **good | {"topk_ids": np.zeros_like(good["topk_ids"])})
        assert context.last_call is None


def test_calls_after_close_are_refused():
    problem = random_problem(1, [8], **SIZES)
    context = flashmoe.Context(**problem.limits())
    assert not context.closed
    context.close()
    context.close()
    assert context.closed
    for use in (lambda: flashmoe.moe(context, **problem.arguments(0)), context.synchronize, context.__enter__):
        with pytest.raises(FlashMoEError, match="closed"):
            use()


def test_given_routing_passes_nan_on_to_its_own_token_only():
    problem = random_problem(1, [8], fused=False, **SIZES)
    problem.x[0][3, 5] = np.nan
    with flashmoe.Context(**problem.limits()) as context:
        y = flashmoe.moe(context, **problem.arguments(0))
    assert np.isnan(y[3]).all()
    assert np.isfinite(np.delete(y, 3, axis=0)).all()


# ---- arguments outside their domain ------------------------------------------------------------------------


def zeros(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


# Calls with T=8, H=16, I=12, E=6, K=2. Each row: whether the call has a router ("fused") or ids ("given"), the wrong
# arguments, and the pattern of the message.
BAD_ARGUMENTS = {
    "x of one dimension": ("fused", {"x": zeros(16)}, r"x: expected \[T, H\], got \[16\]"),
    "x of another width": ("fused", {"x": zeros(8, 15)}, r"x: expected \[T, H=16\] .*, got \[8, 15\] float32"),
    "x of float64":
        ("fused", {"x": zeros(8, 16, dtype=np.float64)}, r"x: expected .*, got \[8, 16\] float64"),
    "x a list": ("fused", {"x": [[0.0] * 16] * 8}, r"x: expected .*, got list"),
    "x None": ("fused", {"x": None}, r"x: expected .*, got NoneType"),
    "x of bfloat16":
        ("fused", {"x": zeros(8, 16, dtype=ml_dtypes.bfloat16)}, r"gate_up_proj: expected bfloat16"),
    "gate_up_proj without up rows":
        ("fused", {"gate_up_proj": zeros(6, 12, 16)}, r"gate_up_proj: expected \[El=6, 2I"),
    "gate_up_proj of fewer experts":
        ("fused", {"gate_up_proj": zeros(5, 24, 16)}, r"gate_up_proj: expected \[El=6, "),
    "gate_up_proj of two dimensions":
        ("fused", {"gate_up_proj": zeros(24, 16)}, r"gate_up_proj: expected \[El, "),
    "gate_up_proj of float16":
        ("fused", {"gate_up_proj": zeros(6, 24, 16, dtype=np.float16)}, r"gate_up_proj: .*float16"),
    "gate_up_proj None": ("fused", {"gate_up_proj": None}, r"gate_up_proj: expected .*, got NoneType"),
    "down_proj transposed":
        ("fused", {"down_proj": zeros(6, 12, 16)}, r"(down|gate_up)_proj: expected \[El=6, "),
    "down_proj of fewer experts":
        ("fused", {"down_proj": zeros(5, 16, 12)}, r"down_proj: expected \[El=6, H=16"),
    "down_proj of float64":
        ("fused", {"down_proj": zeros(6, 16, 12, dtype=np.float64)}, r"down_proj: .*float64"),
    "router of another width":
        ("fused", {"router": zeros(6, 15)}, r"router: expected \[E=6, H=16\] float32, got \[6, 15\]"),
    "router of one dimension": ("fused", {"router": zeros(6)}, r"router: expected \[E, H\], got \[6\]"),
    "router of float16":
        ("fused", {"router": zeros(6, 16, dtype=np.float16)}, r"router: expected float32.*float16"),
    "router_bias of another size":
        ("fused", {"router_bias": zeros(5)}, r"router_bias: expected \[E=6\] float32, got \[5\]"),
    "router_bias without router":
        ("given", {"router_bias": zeros(6)}, r"router_bias: expected router with it"),
    "gate_up_bias of another size":
        ("fused", {"gate_up_bias": zeros(6, 12)}, r"gate_up_bias: expected \[El=6, 2I=24\]"),
    "down_bias of another size":
        ("fused", {"down_bias": zeros(6, 12)}, r"down_bias: expected \[El=6, H=16\]"),
    "down_bias of float16":
        ("fused", {"down_bias": zeros(6, 16, dtype=np.float16)}, r"down_bias: expected float32"),
    "no routing": ("fused", {"router": None, "top_k": None}, r"router: expected a router, or topk_ids and "),
    "two routings": ("given", {"router": zeros(6, 16), "top_k": 2}, r"router: expected either .*, got both"),
    "router and ids":
        ("fused", {"topk_ids": zeros(8, 2, dtype=np.int32)}, r"router: expected either .*, got both"),
    "ids without weights": ("given", {"topk_weights": None}, r"topk_weights: expected .*, got None"),
    "weights without ids": ("given", {"topk_ids": None}, r"topk_ids: expected .*, got None"),
    "ids of fewer tokens":
        ("given", {"topk_ids": zeros(7, 2, dtype=np.int32)}, r"topk_ids: expected \[T=8, K=2\].*\[7, 2\]"),
    "ids of one dimension":
        ("given", {"topk_ids": zeros(8, dtype=np.int32)}, r"topk_ids: expected \[T, K\].*\[8\]"),
    "ids of float32":
        ("given", {"topk_ids": zeros(8, 2)}, r"topk_ids: expected .* int32 or int64, got .*float32"),
    "ids of no column": ("given", {"topk_ids": zeros(8, 0, dtype=np.int32)}, r"top.k.*: expected .*, got 0"),
    "an id too large":
        ("given", {"topk_ids": np.full((8, 2), [0, 6])}, r"topk_ids: expected ids in \[0, E=6\), .*, got 6"),
    "a negative id":
        ("given", {"topk_ids": np.full((8, 2), [-2, 2])}, r"topk_ids: expected ids in \[0, E=6\), .*, got -2"),
    "an id beyond 32 bits":
        ("given", {"topk_ids": np.full((8, 2), [0, 2**32])}, r"topk_ids: .*, got 2147483647"),
    "weights of fewer experts":
        ("given", {"topk_weights": zeros(8, 1)}, r"topk_weights: expected \[T=8, K=2\]"),
    "weights of float64":
        ("given", {"topk_weights": zeros(8, 2, dtype=np.float64)}, r"topk_weights: expected .*float64"),
    "router without top_k": ("fused", {"top_k": None}, r"top_k: expected an integer with router, got None"),
    "top_k above E": ("fused", {"top_k": 7}, r"top_k: expected an integer in \[1, E=6\], got 7"),
    "top_k of 0": ("fused", {"top_k": 0}, r"top_k: expected .*, got 0"),
    "top_k of 2.5": ("fused", {"top_k": 2.5}, r"top_k: expected .*, got 2\.5"),
    "top_k unlike the ids": ("given", {"top_k": 3}, r"top_k: expected 2, .*, got 3"),
    "unknown activation":
        ("fused", {"activation": "tanh"}, r"activation: expected one of relu, .*, got 'tanh'"),
    "ungated activation, gated weights":
        ("fused", {"activation": "relu"}, r"gate_up_proj: expected \[El=6, I=12, H=16\]"),
    "negative capacity": ("fused", {"capacity_factor": -1.0}, r"capacity_factor: expected .*, got -1\.0"),
    "capacity of 0": ("fused", {"capacity_factor": 0.0}, r"capacity_factor: expected .*, got 0\.0"),
    "capacity NaN": ("fused", {"capacity_factor": math.nan}, r"capacity_factor: expected .*, got nan"),
    "capacity infinite": ("fused", {"capacity_factor": math.inf}, r"capacity_factor: expected .*, got inf"),
    "capacity a word": ("fused", {"capacity_factor": "all"}, r"capacity_factor: expected .*, got 'all'"),
    "capacity beyond all floats":
        ("fused", {"capacity_factor": 10**400}, r"capacity_factor: expected a number > 0 or None, got 1000"),
    "capacity an array": ("fused", {"capacity_factor": zeros(2)}, r"capacity_factor: expected .*, got array"),
    "activation an array": ("fused", {"activation": np.array(["relu", "silu"])}, r"activation: .*, got array"),
    "renormalize an array": ("fused", {"renormalize": zeros(2)}, r"renormalize: expected True or False, got arr"),
    "exact an array": ("fused", {"exact": zeros(2)}, r"exact: expected True or False, got array"),
    "trace an array": ("fused", {"trace": zeros(2)}, r"trace: expected True or False, got array"),
    "return mode an array": ("fused", {"return_mode": np.array(["direct"] * 2)}, r"return_mode: .*, got array"),
    "top_k an array": ("fused", {"top_k": np.array([2, 2])}, r"top_k: expected .*, got array"),
    "placement on a rank that is not":
        ("fused", {"placement": [0, 0, 1, 0, 0, 0]}, r"placement: .*, got 1 for expert 2"),
    "placement on rank -1":
        ("fused", {"placement": [0, 0, 0, 0, 0, -1]}, r"placement: .*, got -1 for expert 5"),
    "placement of fewer experts": ("fused", {"placement": [0] * 5}, r"placement: expected .*E=6.*, got 5"),
    "placement of words": ("fused", {"placement": ["a"] * 6}, r"placement: expected .*'a'"),
    "placement of fractions": ("fused", {"placement": [0.5] * 6}, r"placement: expected .*0\.5"),
    "placement a number": ("fused", {"placement": 0}, r"placement: expected .*, got 0"),
    "unknown return mode":
        ("fused", {"return_mode": "ring"}, r"return_mode: expected one of direct, .*, got 'ring'"),
}  # fmt: skip


@pytest.fixture(scope="module")
def calls() -> Iterator[tuple[flashmoe.Context, dict[str, dict[str, Any]]]]:
    """A context of one rank, and the arguments of a good call with a router and of one with given routing."""
    problems = {how: random_problem(1, [8], fused=how == "fused", **SIZES) for how in ("fused", "given")}
    with flashmoe.Context(**LIMITS) as context:
        yield context, {how: problem.arguments(0) | {"placement": None} for how, problem in problems.items()}


@pytest.mark.parametrize("what", BAD_ARGUMENTS)
def test_bad_argument(calls, what):
    """The error names the argument, and the context can still make calls."""
    context, good = calls
    how, changes, pattern = BAD_ARGUMENTS[what]
    with pytest.raises(InvalidArgument, match=f"^{pattern}"):
        flashmoe.moe(context, **good[how] | changes)
    assert flashmoe.moe(context, **good[how]).shape == (8, 16)


def test_given_ids_of_fewer_experts_than_the_context_has(calls):
    """A rank alone has all experts of the layer: no placement is needed to say how many there are."""
    context, _ = calls
    problem = random_problem(3, [8], fused=False, **SIZES | {"experts": 4})
    good = problem.arguments(0)
    wanted = flashmoe.moe(context, **good)
    assert np.array_equal(flashmoe.moe(context, **good | {"placement": None}), wanted)
    ids = np.where(good["topk_ids"] == 3, 4, good["topk_ids"])
    with pytest.raises(InvalidArgument, match=r"^topk_ids: expected ids in \[0, E=4\), or -1 for none, got 4"):
        flashmoe.moe(context, **good | {"placement": None, "topk_ids": ids})


@pytest.mark.parametrize("argument", ["x", "gate_up_proj", "down_proj", "router", "topk_ids", "topk_weights"])
def test_strided_argument(calls, argument):
    context, good = calls
    how = "given" if argument.startswith("topk") else "fused"
    array = good[how][argument]
    spread = np.repeat(array, 2, axis=-1)[..., ::2]
    assert not spread.flags.c_contiguous
    with pytest.raises(InvalidArgument, match=f"^{argument}: expected a contiguous tensor"):
        flashmoe.moe(context, **good[how] | {argument: spread})


# Calls that are larger than what the context's memory was made for: the size that is too large, and the message.
TOO_LARGE = {
    "tokens": ({"tokens": 21}, "x: expected at most max_tokens=20 tokens, .*, got T=21"),
    "hidden": ({"hidden": 17}, "hidden: expected at most 16, .*, got 17"),
    "intermediate": ({"intermediate": 13}, "intermediate: expected at most 12, .*, got 13"),
    "experts": ({"experts": 7}, "experts: expected at most 6, .*, got 7"),
    "top_k": ({"top_k": 3}, "top_k: expected at most 2, .*, got 3"),
}


@pytest.mark.parametrize("what", TOO_LARGE)
def test_call_above_the_limits(calls, what):
    context, good = calls
    changes, pattern = TOO_LARGE[what]
    sizes = {"tokens": 8, **SIZES, **changes}
    problem = random_problem(1, [sizes.pop("tokens")], **sizes)
    with pytest.raises(HeapError, match=f"^{pattern}"):
        flashmoe.moe(context, **problem.arguments(0))
    assert flashmoe.moe(context, **good["fused"]).shape == (8, 16)


def test_wider_type_than_the_context_is_made_for():
    problem = random_problem(1, [8], **SIZES)
    context = flashmoe.Context(**LIMITS | {"dtype": "bfloat16"})
    with context, pytest.raises(HeapError, match=r"x: expected at most 2 bytes an element .*bfloat16.*, got float32"):
        flashmoe.moe(context, **problem.arguments(0))


def test_return_mode_that_the_context_excludes():
    problem = random_problem(1, [8], **SIZES)
    context = flashmoe.Context(**LIMITS, return_mode="direct")
    with context, pytest.raises(InvalidArgument, match=r"return_mode: expected 'direct', .*, got 'reduced'"):
        flashmoe.moe(context, **problem.arguments(0), return_mode="reduced")


BAD_LIMITS = {
    "ranks of 0": ({"ranks": 0}, r"ranks: expected an integer in \[1, 1024\], got 0"),
    "rank out of range":
        ({"rank": 2, "ranks": 2, "name": "x"}, r"rank: expected an integer in \[0, 1\], got 2"),
    "negative rank": ({"rank": -1, "ranks": 2, "name": "x"}, r"rank: expected .*, got -1"),
    "no name": ({"ranks": 2}, r"name: expected a group name .*, got None"),
    "a path for a name": ({"ranks": 2, "name": "../x"}, r"name: expected a group name .*, got '\.\./x'"),
    "a name too long": ({"ranks": 2, "name": "x" * 300}, r"name: expected a group name"),
    "no tokens": ({"max_tokens": 0}, r"max_tokens: expected an integer in \[1, \d+\], got 0"),
    "tokens beyond 20 bits": ({"max_tokens": 2**20}, r"max_tokens: expected .*, got 1048576"),
    "hidden of 0": ({"hidden": 0}, r"hidden: expected .*, got 0"),
    "intermediate of 1.5": ({"intermediate": 1.5}, r"intermediate: expected .*, got 1\.5"),
    "experts of None": ({"experts": None}, r"experts: expected .*, got None"),
    "top_k above experts": ({"top_k": 7}, r"top_k: expected an integer in \[1, 6\], got 7"),
    "unknown dtype": ({"dtype": "float64"}, r"dtype: expected one of float32, .*, got 'float64'"),
    "unknown return mode": ({"return_mode": "ring"}, r"return_mode: expected one of .*, got 'ring'"),
    "placement on a rank that is not":
        ({"placement": [0, 0, 0, 3, 0, 0]}, r"placement: expected .*, got 3 for expert 3"),
    "placement of fewer experts": ({"placement": [0] * 5}, r"placement: expected .*, got 5"),
    "capacity factor of 0": ({"capacity_factor": 0}, r"capacity_factor: expected a number > 0 or None, got 0"),
    "a capacity factor beyond all floats":
        ({"capacity_factor": 10**400}, r"capacity_factor: expected a number > 0 or None, got 1000"),
    "a NumPy dtype": ({"dtype": np.dtype("float64")}, r"dtype: expected one of float32, .*, got 'float64'"),
    "a class for a dtype": ({"dtype": int}, r"dtype: expected one of float32, .*, got 'int64'"),
    "no dtype": ({"dtype": None}, r"dtype: expected one of float32, .*, got None"),
    "dtype a list": ({"dtype": [1]}, r"dtype: expected one of float32, .*, got \[1\]"),
    "a number for the name of a rank alone": ({"name": 5}, r"name: expected a group name .*, got 5"),
    "engine an array": ({"engine": np.array(["cpu", "cpu"])}, r"engine: expected one of cpu, cuda, got array"),
    "profile a number": ({"profile": 5}, r"profile: expected none with the CPU engine, got 5"),
    "no processors": ({"processors": 0}, r"processors: expected .*, got 0"),
    "negative timeout": ({"timeout": -1.0}, r"timeout: expected .*, got -1\.0"),
    "timeout NaN": ({"timeout": math.nan}, r"timeout: expected .*, got nan"),
    "timeout None": ({"timeout": None}, r"timeout: expected .*, got None"),
    "a timeout of centuries": ({"timeout": 1e12}, r"timeout: expected seconds in \[0, 1e\+09\], got 1"),
    "tokens infinite": ({"max_tokens": math.inf}, r"max_tokens: expected an integer .*, got inf"),
    "a name that C ends early": ({"ranks": 2, "name": "a\0b"}, r"name: expected a group name"),
    "a name of too many bytes": ({"ranks": 2, "name": "é" * 150}, r"name: expected a group name"),
    "a number for a name": ({"ranks": 2, "name": 5}, r"name: expected a group name .*, got 5"),
    "a profile": ({"profile": {"raster": 2}}, r"profile: expected none with the CPU engine"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD_LIMITS)
def test_bad_limit(what):
    changes, pattern = BAD_LIMITS[what]
    with pytest.raises(InvalidArgument, match=f"^{pattern}"):
        flashmoe.Context(**LIMITS | changes)


# ---- threads and processes of one context ------------------------------------------------------------------


def test_threads_that_call_at_once_are_served_one_after_the_other():
    problems = [random_problem(seed, [tokens], **SIZES) for seed, tokens in ((1, 20), (2, 11))]
    calls = [problem.arguments(0) for problem in problems]
    with flashmoe.Context(**LIMITS) as context:
        expected = [flashmoe.moe(context, **call) for call in calls]
        with ThreadPoolExecutor(4) as threads:
            which = [i % 2 for i in range(200)]
            results = list(threads.map(lambda i: flashmoe.moe(context, **calls[i]), which))
    for i, result in zip(which, results, strict=True):
        np.testing.assert_array_equal(result, expected[i])


def test_a_rank_alone_waits_for_its_own_tasks():
    """It waits however long a task takes, because there is no peer to give up on. (A task takes some ten times the
    shorter timeout.)"""
    problem = random_problem(1, [128], hidden=4096, intermediate=512, experts=1, top_k=1, dtype="float32")
    results = []
    for timeout in (0.002, 60.0):
        with flashmoe.Context(**problem.limits() | {"timeout": timeout, "processors": 1}) as context:
            results.append(flashmoe.moe(context, **problem.arguments(0)))
    np.testing.assert_array_equal(*results)


_IN_A_FORK = """
import os, sys
import flashmoe
context = flashmoe.Context(max_tokens=8, hidden=16, intermediate=16, experts=6, top_k=2, dtype="float32", processors=2)
child = os.fork()
if child == 0:
    try:
        context.synchronize()
    except flashmoe.FlashMoEError as error:
        print(error, flush=True)
    sys.exit(7)  # with all that Python does at the end
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
context.synchronize()
"""


def test_a_fork_has_no_part_in_the_context():
    told = run_python(_IN_A_FORK)
    assert re.match(r"context: expected to be used in process \d+, which made it, got process \d+, .*\n7\n$", told)


_WITH_LITTLE_MEMORY = """
import resource
import numpy as np
import flashmoe
import flashmoe._ffi
sizes = {"hidden": 65536, "intermediate": 16, "experts": 2, "top_k": 1, "dtype": "float32"}
flashmoe._ffi.library()
def leave(bytes):
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + bytes, resource.RLIM_INFINITY))
leave(1 << 30)
try:
    flashmoe.Context(max_tokens=8, processors=1024, **sizes)
except flashmoe.FlashMoEError as error:
    print(error)
leave(1 << 40)
context = flashmoe.Context(max_tokens=128, processors=1, **sizes)
zeros = lambda *shape: np.zeros(shape, np.float32)
call = {"x": zeros(128, 65536), "gate_up_proj": zeros(2, 32, 65536), "down_proj": zeros(2, 65536, 16), "top_k": 1}
leave(48 << 20)  # a result, and not the 32 MiB of a token block's rows as well
try:
    flashmoe.moe(context, router=zeros(2, 65536), **call)
except flashmoe.FlashMoEError as error:
    print(error)
"""


def test_too_little_memory_for_threads_and_their_buffers():
    threads, call = run_python(_WITH_LITTLE_MEMORY).splitlines()
    assert re.match(r"processors: expected 1025 threads, one of them the OS actor's, got \d+ \(.*\)$", threads)
    assert re.match(r"call 1: a thread of rank 0 could not go on: std::bad_alloc$", call)


def run_python(code: str) -> str:
    """What a process prints that runs `code` to its end."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- shared memory is full ---------------------------------------------------------------------------------


def test_heap_larger_than_shared_memory():
    name = f"fault-{secrets.token_hex(6)}"
    free = shutil.disk_usage("/dev/shm").free
    huge = {"hidden": 2**20, "max_tokens": max(1000, free // 2**22 + 1), "experts": 6, "top_k": 2}
    with pytest.raises(HeapError) as refused:
        flashmoe.Context(rank=0, ranks=2, name=name, **LIMITS | huge)
    numbers = [int(number) for number in re.findall(r"\d+", str(refused.value))]
    assert numbers[0] > free >= 0.5 * numbers[1] > 0  # the bytes that it wanted, and those free a moment later
    assert glob.glob(f"/dev/shm/*{name}*") == []


_IN_A_FULL_FOLDER = """
import json, os, sys
import flashmoe.checkpoint
import flashmoe.launch
limits = json.loads(sys.argv[1])
with open("/dev/shm/filler", "wb") as filler:
    filler.write(bytes(8 * 2**20 - 2**17))  # 128 KiB of 8 MiB stay free
try:
    flashmoe.Context(rank=0, ranks=2, name="full", **limits)
except flashmoe.HeapError as error:
    print(json.dumps([str(error), os.listdir("/dev/shm")]))
"""


def test_shared_memory_is_full():
    """The process has a real tmpfs of 8 MiB, in a mount namespace of its own. A heap that does not fit there is an
    error, because a store to such a heap would raise SIGBUS."""
    namespace = ["unshare", "-m", "sh", "-c"]
    mount = "mount -t tmpfs -o size=8m tmpfs /dev/shm"
    if shutil.which("unshare") is None or subprocess.run([*namespace, mount], capture_output=True).returncode:
        pytest.skip("this user may not mount a tmpfs in a namespace of its own")
    limits = json.dumps(LIMITS | {"max_tokens": 2000})
    python = subprocess.run(
        [*namespace, f'{mount} && exec "$@"', "sh", sys.executable, "-c", _IN_A_FULL_FOLDER, limits],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert python.returncode == 0, python.stderr
    message, left = json.loads(python.stdout)
    wanted, free = map(int, re.search(r"expected (\d+) bytes .*, got (\d+)", message).groups())
    assert wanted > free == 2**17
    assert left == ["filler"]
