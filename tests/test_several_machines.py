"""Groups whose ranks are on several machines. The machines are network namespaces, and TLS over TCP connects them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import flashmoe
import numpy as np
import pytest
from flashmoe import FlashMoEError, GroupError, InvalidArgument, PeerTimeout, _ffi
from flashmoe.groups.meeting import StoreMeeting
from flashmoe.groups.rendezvous import AddressMeeting
from flashmoe.system import openssl
from hosts import Network, network
from processes import MARGIN, await_condition, processes
from spread_ranks import (
    LONG,
    OPEN,
    PORT,
    SECRET,
    K,
    MakeNetwork,
    all_of,
    check_leaving,
    compute,
    enter,
    formed,
    gradients,
    join,
    nightly,
    one_rank,
    tokens_of,
    told,
)

__all__ = ["network", "processes"]  # fixtures

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Python warns if a process with threads forks


def listen(address: str) -> None:
    taken = socket.create_server((address, PORT))
    OPEN["taken"] = taken  # type: ignore[assignment]


class Refused(NamedTuple):
    """How an attempt to join ended."""

    error: Exception
    seconds: float
    left: list[str]
    """Files, sockets, threads and shared memory that this process holds after the attempt and did not hold before."""


def attempt(*arguments: Any) -> Refused | None:
    """Tries to join a group. Returns None if that succeeds."""
    before, since = held(), time.monotonic()
    try:
        enter(*arguments)
    except FlashMoEError as error:
        seconds = time.monotonic() - since
        with contextlib.suppress(AssertionError):  # a thread that has been joined may take a moment to be gone
            await_condition(lambda: held() <= before, "")
        return Refused(error, seconds, sorted(held() - before))
    return None


def held() -> set[str]:
    found = {f"thread {path.name}" for path in Path("/proc/self/task").iterdir()}
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor by which this loop lists the folder may be closed
            found.add(os.readlink(path))
    return found | {line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm" in line}


def holds() -> int:
    return len(held())


SPREADS = [[0, 1, 1, 0], [0, 0, 1, 2, 2]] + ([[0, 1], [0, 0, 1, 1, 2, 2, 0, 1]] if LONG else [])


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("spread", SPREADS, ids=str)
def test_direct_has_the_bits_of_one_rank(network: MakeNetwork, spread: list[int]):
    """The ranks have different numbers of tokens, and one has none. They make many calls, and leave nothing behind."""
    net = network(max(spread) + 1)
    ranks, alone = formed(net, spread), one_rank(net)
    counts = [([37, 0, 150, 9, 64] * 2)[p] for p in range(len(spread))]
    for seed, calls in ((0, 1), (1, 2000 if LONG else 40)):
        xs = tokens_of(counts, seed)
        ys = all_of(ranks, compute, [(x, seed, calls) for x in xs], 900 if LONG else 4 * MARGIN)
        for rank, y in enumerate(ys):
            for at in range(0, len(xs[rank]), 100):
                expected = told(alone, compute, xs[rank][at : at + 100], seed)
                assert np.array_equal(y[at : at + 100], expected)
    check_leaving(ranks)


@nightly
@pytest.mark.timeout(3600)
def test_groups_of_any_sizes(network: MakeNetwork):
    """The same 24 processes join 200 groups, one after the other, and keep nothing of a group that has ended."""
    net, rng = network(3), np.random.default_rng(5)
    alone = one_rank(net)
    here = [net.start([host] * 8, FLASHMOE_SECRET=SECRET) for host in range(3)]
    first: dict[int, int] = {}  # by process id: how many things (`held`) the process holds after its first group
    for seed in range(200):
        spread = [0, *rng.integers(0, 3, rng.integers(1, 8)).tolist()]
        free = [rng.permutation(np.array(each, object)).tolist() for each in here]
        ranks = [free[host].pop() for host in spread]
        join(ranks, f"{net.address(0)}:{PORT}")
        xs = tokens_of(rng.integers(0, 60, len(spread)).tolist(), seed)
        for y, x in zip(all_of(ranks, compute, [(x, seed, 3) for x in xs]), xs, strict=True):
            assert np.array_equal(y, told(alone, compute, x, seed))
        check_leaving(ranks)
        for rank, count in zip(ranks, all_of(ranks, holds, [()] * len(ranks)), strict=True):
            assert count <= first.setdefault(rank.pid, count), (seed, spread)


def test_reduced_returns_are_within_rounding(network: MakeNetwork):
    """The results with `reduced` have the same bits in every call, and differ from those with `direct` by no more than
    the rounding of a sum of K numbers."""
    net = network(2)
    xs = tokens_of([30, 41, 0], 3)
    ranks, alone = formed(net, [0, 1, 1], "reduced"), one_rank(net)
    for y, x in zip(all_of(ranks, compute, [(x, 3, 5) for x in xs]), xs, strict=True):
        expected = told(alone, compute, x, 3)
        # Both modes add the K rows of a token, each in its own order: K - 1 additions, each of which errs by at most
        # half an ulp of a sum of up to K rows.
        bound = 2 * K * np.finfo(np.float32).eps * np.abs(expected).max(initial=0) * K
        assert np.abs(y - expected).max(initial=0) <= bound
    check_leaving(ranks)


@nightly
def test_gradients_have_the_bits_of_one_rank(network: MakeNetwork):
    """Only gradients of x are compared: each of their rows is returned by itself, whereas gradients of weights sum over
    the tokens of all ranks."""
    net = network(2)
    ranks, alone = formed(net, [0, 1, 1]), one_rank(net)
    xs, dys = tokens_of([30, 41, 0], 3), tokens_of([30, 41, 0], 4)
    # When all ranks import PyTorch at the same time, that may take a minute.
    grads = all_of(ranks, gradients, [(x, dy, 3) for x, dy in zip(xs, dys, strict=True)], 200.0)
    for (dx, *_), x, dy in zip(grads, xs, dys, strict=True):
        assert np.array_equal(dx, told(alone, gradients, x, dy, 3, seconds=200.0)[0])
    check_leaving(ranks)


# ---- What goes wrong while ranks join -------------------------------------------------------------------------------


def errors_of_joining(net: Network, spread: Sequence[int], arguments: Sequence[tuple], **secrets: str) -> list[Any]:
    ranks = net.start(spread, FLASHMOE_SECRET=SECRET)
    if "other" in secrets:
        ranks[-1] = net.start(spread[-1:], FLASHMOE_SECRET=secrets["other"])[0]
    all_of(ranks, os.getpid, [()] * len(ranks))  # all processes run now, so starting them takes none of the timeout
    errors = []
    for arguments_of, refused in zip(arguments, all_of(ranks, attempt, arguments), strict=True):
        timeout = arguments_of[-1]
        assert isinstance(refused, Refused)
        assert refused.seconds < timeout + MARGIN
        assert refused.left == []
        errors.append(refused.error)
    return errors


def test_a_rank_that_comes_behind_the_end_of_its_meeting_hears_why(monkeypatch):
    """Rank 0 too hears why: it listens from the start, but comes to its own meeting only when the meeting has ended."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = free.getsockname()
    over, told = threading.Event(), []
    connect = AddressMeeting._connect

    def connect_later(meeting: AddressMeeting, where: tuple[str, int]) -> Any:
        assert meeting.rank != 0 or over.wait(MARGIN)
        return connect(meeting, where)

    def meet(rank: int, ranks: int) -> None:
        with pytest.raises(GroupError) as refused:
            AddressMeeting(address, "g", rank, ranks, 3 * MARGIN, SECRET.encode())
        told.append(str(refused.value))

    monkeypatch.setattr(AddressMeeting, "_connect", connect_later)
    first = threading.Thread(target=meet, args=(0, 2))
    first.start()
    meet(1, 3)
    over.set()
    first.join(MARGIN)
    assert not first.is_alive()
    assert len(told) == 2 and told[0] == told[1] and "disagrees on ranks: rank 0 has 2, rank 1" in told[0]


def test_joining_ends_with_a_named_error(network: MakeNetwork):
    net = network(2)
    where = f"{net.address(0)}:{PORT}"

    def attempts(*ranks: int, of: int, timeout: float = 2.0) -> list[tuple]:
        return [(p, of, where, "direct", timeout) for p in ranks]

    # No rank listens at the address.
    (error,) = errors_of_joining(net, [1], attempts(1, of=2))
    assert isinstance(error, PeerTimeout)
    assert "rank 1 on host host2 cannot reach the rendezvous" in str(error) and "refused" in str(error)
    # One rank is missing.
    for error in errors_of_joining(net, [0, 1], attempts(0, 2, of=3)):
        assert isinstance(error, PeerTimeout) and "rank 1 did not join within 2 s" in str(error)
    # A rank that joins twice.
    for error in errors_of_joining(net, [0, 1, 1], attempts(0, 1, 1, of=3, timeout=30.0)):
        assert isinstance(error, GroupError) and "already has a rank 1" in str(error) and "host2" in str(error)
    # Ranks that disagree on the number of ranks.
    disagreeing = [*attempts(0, of=2, timeout=30.0), *attempts(1, of=3, timeout=30.0)]
    for error in errors_of_joining(net, [0, 1], disagreeing):
        assert isinstance(error, GroupError)
        assert "disagrees on ranks: rank 0 has 2, rank 1 on host host2 has 3" in str(error)
    # A rank with another secret is told so, and the other rank hears why that rank is missing.
    told_so, other = errors_of_joining(net, [0, 1], attempts(0, 1, of=2), other="another secret, which is wrong")
    assert isinstance(other, GroupError) and "FLASHMOE_SECRET" in str(other)
    assert isinstance(told_so, PeerTimeout) and "another secret was refused" in str(told_so)
    # The port is taken by a process that is no rank: rank 0 cannot listen, and rank 1 does not reach it.
    squatter = net.start([0])[0]
    assert told(squatter, listen, net.address(0)) is None
    error, elsewhere = errors_of_joining(net, [0, 1], attempts(0, 1, of=2))
    assert isinstance(error, GroupError) and f"expected port {PORT}" in str(error)
    assert isinstance(elsewhere, PeerTimeout) and f"cannot reach the rendezvous {where}" in str(elsewhere)
    squatter.end()
    # The link between the hosts is cut.
    net.cut(1)
    here, there = errors_of_joining(net, [0, 1], attempts(0, 1, of=2))
    assert isinstance(here, PeerTimeout) and "rank 1 did not join within 2 s" in str(here)
    assert isinstance(there, PeerTimeout) and f"cannot reach the rendezvous {where}" in str(there)


@pytest.mark.parametrize(
    ("gone", "text"),
    [(0, "rank 0, at {where}, has gone while ranks joined"), (1, "rank 1 on host host2 has gone while ranks joined")],
    ids=["the one who listens", "another"],
)
def test_a_rank_that_ends_while_others_join_is_named(network: MakeNetwork, gone: int, text: str):
    net = network(2)
    where = f"{net.address(0)}:{PORT}"
    ranks = net.start([0, 1, 1], FLASHMOE_SECRET=SECRET)
    for p, rank in enumerate(ranks):
        rank.tell((attempt, (p, 4, where, "direct", 30.0)))  # of four ranks; the fourth never comes
    at_rank_0 = f":{PORT:04X}"
    await_condition(
        lambda: len([line for line in net.hosts[0].sockets() if line.split()[1].endswith(at_rank_0)]) == 1 + len(ranks),
        "they have not come to where rank 0 listens",
    )
    time.sleep(0.5)  # meanwhile rank 0 accepts the ranks that have come
    ranks.pop(gone).signal(signal.SIGKILL)
    for refused in [rank.hear(2 * MARGIN) for rank in ranks]:
        assert isinstance(refused.error, GroupError) and text.format(where=where) in str(refused.error)
        assert refused.seconds < MARGIN
        assert refused.left == []


def test_strangers_neither_join_nor_hold_the_listener_up(network: MakeNetwork):
    """Of 100 connections of a stranger, a third sends nothing, a third sends a wrong proof of the secret, and a third
    sends too many bytes. They stay open while the ranks meet."""
    net = network(2)
    ranks = net.start([0, 1], FLASHMOE_SECRET=SECRET)
    stranger = net.start([1])[0]
    where = f"{net.address(0)}:{PORT}"
    ranks[0].tell((enter, (0, 2, where, "direct", 10.0)))
    assert told(stranger, pester, net.address(0)) == "nothing but greetings and refusals"
    ranks[1].tell((enter, (1, 2, where, "direct", 10.0)))
    assert [type(rank.hear(4 * MARGIN)) for rank in ranks] == [float, float]
    check_leaving(ranks)


def pester(address: str) -> str:
    for _ in range(200):  # until rank 0 listens
        try:
            socket.create_connection((address, PORT), 1).close()
            break
        except OSError:
            time.sleep(0.05)
    held = [socket.create_connection((address, PORT), 5) for _ in range(100)]
    heard = b""
    for number, each in enumerate(held):
        try:
            if number % 3:
                each.sendall(bytes([number]) * (64 if number % 3 == 1 else 5000))
            each.settimeout(0.05)
            heard = each.recv(4096)
            heard = each.recv(4096) if number % 3 == 1 else b""
        except OSError:  # a timeout, or the listener has closed the connection, since there are too many
            continue
        assert heard in (b"", bytes(32)), heard
    OPEN["held"] = held  # type: ignore[assignment]
    return "nothing but greetings and refusals"


def test_a_group_without_a_secret_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("FLASHMOE_SECRET", raising=False)
    sizes = {"max_tokens": 8, "hidden": 8, "intermediate": 8, "experts": 2, "top_k": 1}
    with pytest.raises(InvalidArgument, match="FLASHMOE_SECRET: expected the secret"):
        flashmoe.Context(rank=0, ranks=2, name="g", rendezvous="127.0.0.1:7", **sizes)
    monkeypatch.setenv("FLASHMOE_SECRET", "short")
    with pytest.raises(InvalidArgument, match="at least 16 characters"):
        flashmoe.Context(rank=0, ranks=2, name="g", rendezvous="127.0.0.1:7", **sizes)
    for wrong in ("host", "host:", ":7", "host:70000", "host:x"):
        with pytest.raises(InvalidArgument, match="rendezvous: expected host:port"):
            flashmoe.Context(rank=0, ranks=2, name="g", rendezvous=wrong, **sizes)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/nowhere/libssl.so.3", "expected the library /nowhere/libssl.so.3, which a group on several machines needs"),
        ("libc.so.6", "expected OpenSSL 3 .*, got libc.so.6 without TLS_method"),
    ],
)
def test_a_missing_library_is_named(path: str, message: str):
    with pytest.raises(FlashMoEError, match=message) as error:
        _ffi.library().network_open(0, 2, "00" * 32, 10**9, path, "")
    assert openssl.INSTALL in str(error.value)


def test_without_openssl_ranks_of_one_machine_are_a_group_and_those_of_several_say_what_is_missing(
    network: MakeNetwork,
):
    net = network(2)
    where = f"{net.address(0)}:{PORT}"
    for spread in ([0, 0], [0, 1]):
        ranks = net.start(spread, FLASHMOE_SECRET=SECRET, FLASHMOE_OPENSSL="/nowhere/libssl.so.3")
        said = all_of(ranks, attempt, [(p, 2, where, "direct", 10.0) for p in (0, 1)])
        if spread == [0, 0]:
            assert said == [None, None]
            check_leaving(ranks)
            continue
        for refused in said:
            assert type(refused.error) is FlashMoEError and openssl.INSTALL in str(refused.error)
            assert "expected the library /nowhere/libssl.so.3, which a group on several machines" in str(refused.error)
            assert refused.left == []


# ---- What goes wrong while ranks compute -----------------------------------------------------------------------------


def many_calls(x: np.ndarray, seed: int) -> str:
    try:
        for _ in range(100_000):
            compute(x, seed)
    except FlashMoEError as error:
        return f"{type(error).__name__}: {error}"
    return "it went on"


@pytest.mark.parametrize("what", ["cut", *(pytest.param(each, marks=nightly) for each in ("killed", "stopped"))])
def test_a_host_that_is_gone_is_named(network: MakeNetwork, what: str):
    """During calls, the link to a host is cut, or the host's ranks are killed or stopped. Each rank that is left ends
    with an error that names a rank on the other host, soon after the timeout."""
    net = network(2)
    timeout = 3.0
    ranks = formed(net, [0, 0, 1, 1], timeout=timeout)
    xs = tokens_of([12, 0, 30, 5], 7)
    for rank, x in zip(ranks, xs, strict=True):
        rank.tell((many_calls, (x, 7)))
    time.sleep(0.5)
    since = time.monotonic()
    if what == "cut":
        net.cut(1)
    for rank in ranks[2:]:
        if what != "cut":
            rank.signal(signal.SIGKILL if what == "killed" else signal.SIGSTOP)
    survivors = ranks if what == "cut" else ranks[:2]
    for number, rank in enumerate(survivors):
        text = rank.hear(timeout + 2 * MARGIN)
        there = (0, 1) if number >= 2 else (2, 3)
        assert text.startswith("PeerTimeout"), text
        assert any(f"rank {p} holds up call" in text for p in there), text
    assert time.monotonic() - since < 2 * timeout + MARGIN
    check_leaving(survivors)
    net.mend(1)


def test_a_slow_link_and_one_that_is_down_for_a_while_change_nothing(network: MakeNetwork):
    """The results are right if the link is cut for half a second during calls, if a rank is stopped for half a second,
    and if the link has only 10 Mbit/s."""
    net = network(2)
    ranks, alone = formed(net, [0, 1], timeout=8.0), one_rank(net)
    xs = tokens_of([180, 11], 8)
    expected = [np.concatenate([told(alone, compute, x[at : at + 90], 8) for at in range(0, len(x), 90)]) for x in xs]

    def check(disturb: Callable[[], None], calls: int) -> None:
        for rank, x in zip(ranks, xs, strict=True):
            rank.tell((compute, (x, 8, calls)))
        disturb()
        for rank, right in zip(ranks, expected, strict=True):
            assert np.array_equal(rank.hear(4 * MARGIN), right)

    def interrupt() -> None:
        time.sleep(0.05)
        net.cut(1)
        time.sleep(0.5)
        net.mend(1)

    def stop() -> None:
        ranks[1].signal(signal.SIGSTOP)
        time.sleep(0.5)
        ranks[1].signal(signal.SIGCONT)

    check(interrupt, 100)
    check(stop, 20)
    for host in (0, 1):
        net.slow(host, "tbf", "rate", "10mbit", "burst", "16kb", "latency", "500ms")
    check(lambda: None, 3)
    check_leaving(ranks)


# ---- Through a store, and by a launcher ---------------------------------------------------------------------------


def meet_in_threads(ranks: Sequence[int], of: int, secrets: Sequence[bytes | None], timeout: float = 10.0) -> list[Any]:
    """Runs these ranks of a group of `of` ranks as threads. Returns for each rank the results of two exchanges, or the
    error."""
    store = pytest.importorskip("torch.distributed").HashStore()

    def meet(rank: int, secret: bytes | None) -> Any:
        try:
            meeting = StoreMeeting(store, "g", rank, of, timeout, secret, "here")
            return meeting.exchange("numbers", rank), meeting.exchange("squares", rank * rank)
        except FlashMoEError as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(meet, ranks, secrets))


def test_ranks_meet_in_a_store():
    assert meet_in_threads([0, 1, 2], 3, [None] * 3) == [([0, 1, 2], [0, 1, 4])] * 3
    assert meet_in_threads([1, 0], 2, [b"secret"] * 2) == [([0, 1], [0, 1])] * 2
    for error in meet_in_threads([0, 2], 3, [None] * 2, timeout=0.3):
        assert isinstance(error, PeerTimeout) and "rank 1 did not join within 0.3 s" in str(error)
    for error in meet_in_threads([0, 1], 2, [b"secret", b"another"]):
        assert isinstance(error, GroupError) and "FLASHMOE_SECRET: expected the same secret" in str(error)
    errors = meet_in_threads([0, 1, 1], 3, [None] * 3)
    assert all(isinstance(error, GroupError) and "already has a rank 1" in str(error) for error in errors)


@nightly
def test_the_demo_under_torchrun(network: MakeNetwork, tmp_path: Path):
    pytest.importorskip("torch")
    net, tools = network(2), Path(sys.executable).parent
    command = ["--nnodes=2", "--nproc-per-node=2", f"--master-addr={net.address(0)}", f"--master-port={PORT}"]
    runs = [
        subprocess.Popen(
            net.hosts[host].inside(
                str(tools / "torchrun"), *command, f"--node-rank={host}", "--no-python", str(tools / "flashmoe"), "run"
            ),
            cwd=tmp_path,
            env={**os.environ, "FLASHMOE_SECRET": SECRET},
            stdout=subprocess.PIPE,
            text=True,
        )
        for host in (0, 1)
    ]
    said = [run.communicate(timeout=300)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    assert "4 ranks of 512 tokens" in said[0] and "PASS" in said[0]
    assert said[1].strip() == ""
