"""Hosts of tests' own: network namespaces on this machine, each with a name, an address and a /dev/shm of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
from flashmoe import ucx

HERE = Path(__file__).parent


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


class Host:
    """A process that keeps namespaces of network, mounts and host name open, and whose end closes them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._keeper = subprocess.Popen(
            ["unshare", "--net", "--mount", "--uts", "sh", "-c", "echo; exec sleep infinity"], stdout=subprocess.PIPE
        )
        assert self._keeper.stdout is not None
        self._keeper.stdout.read(1)  # it is in them

    @property
    def pid(self) -> int:
        return self._keeper.pid

    def inside(self, *command: str) -> list[str]:
        """The command line that runs `command` on this host."""
        return ["nsenter", "--target", str(self.pid), "--net", "--mount", "--uts", *command]

    def run(self, *command: str) -> None:
        _run(*self.inside(*command))

    def close(self) -> None:
        self._keeper.kill()
        self._keeper.wait()
        if self._keeper.stdout is not None:
            self._keeper.stdout.close()


class Rank:
    """A process on a host that does what it is told: calls of functions that can be imported."""

    def __init__(self, host: Host, environment: dict[str, str], socket: str) -> None:
        self.host = host
        with Listener(socket, "AF_UNIX") as listener:
            program = f"import hosts; hosts.serve({socket!r})"
            self.process = subprocess.Popen(
                host.inside(sys.executable, "-c", program), env={**os.environ, **environment}, cwd=HERE
            )
            self._pipe: Connection = listener.accept()
        os.unlink(socket) if os.path.exists(socket) else None
        self.pid: int = self._pipe.recv()

    def start(self, fn: Any, *arguments: Any) -> None:
        self._pipe.send((fn, arguments))

    def answer(self, seconds: float) -> Any:
        """What the function has returned or raised (returned as well)."""
        if not self._pipe.poll(seconds):
            raise TimeoutError(f"no answer from a rank on {self.host.name} within {seconds} s")
        return self._pipe.recv()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        self.process.wait()
        self._pipe.close()


def serve(socket: str) -> None:
    """A rank's life."""
    from multiprocessing.connection import Client

    pipe = Client(socket, "AF_UNIX")
    pipe.send(os.getpid())
    while True:
        try:
            fn, arguments = pipe.recv()
        except EOFError:
            return
        try:
            result = fn(*arguments)
        except Exception as error:
            result = error
        pipe.send(result)


class Network:
    """Hosts 10.77.0.1, 10.77.0.2, ... that reach one another through a switch."""

    def __init__(self, hosts: int, folder: Path) -> None:
        self._folder, self._number = folder, 0
        self.hosts: list[Host] = []
        self.ranks: list[Rank] = []
        self._switch = Host("switch")
        try:
            self._switch.run("ip", "link", "add", "switch", "type", "bridge")
            self._switch.run("ip", "link", "set", "switch", "up")
            for number in range(1, hosts + 1):
                self._add(number)
        except BaseException:
            self.close()
            raise

    def _add(self, number: int) -> None:
        host = Host(f"host{number}")
        self.hosts.append(host)
        self._switch.run("ip", "link", "add", f"port{number}", "type", "veth", "peer", "eth0", "netns", str(host.pid))
        self._switch.run("ip", "link", "set", f"port{number}", "master", "switch", "up")
        for command in (
            ["hostname", host.name],
            ["mount", "-t", "tmpfs", "-o", "mode=1777", "none", "/dev/shm"],
            ["ip", "link", "set", "lo", "up"],
            ["ip", "address", "add", f"10.77.0.{number}/24", "dev", "eth0"],
            ["ip", "link", "set", "eth0", "up"],
        ):
            host.run(*command)

    def address(self, host: int) -> str:
        return f"10.77.0.{host + 1}"

    def start(self, spread: Sequence[int], **environment: str) -> list[Rank]:
        """New ranks, each on the host that `spread` says."""
        new = []
        for host in spread:
            self._number += 1
            new.append(Rank(self.hosts[host], environment, str(self._folder / f"rank{self._number}")))
            self.ranks.append(new[-1])
        return new

    def cut(self, host: int) -> None:
        """Nothing gets to or from that host any more."""
        self._switch.run("ip", "link", "set", f"port{host + 1}", "down")

    def mend(self, host: int) -> None:
        self._switch.run("ip", "link", "set", f"port{host + 1}", "up")

    def slow(self, host: int, *how: str) -> None:
        """Shapes what gets to that host, in tc's words."""
        self._switch.run("tc", "qdisc", "replace", "dev", f"port{host + 1}", "root", *how)

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        for host in [*self.hosts, self._switch]:
            host.close()

    def __enter__(self) -> Network:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def why_not() -> str | None:
    """Why there can be no hosts here; None if there can."""
    import ctypes

    try:
        ctypes.CDLL(ucx.library())
    except OSError as error:
        return f"expected UCX ({ucx.INSTALL}), got: {error}"
    try:
        host = Host("probe")
    except OSError as error:
        return f"expected unshare, got: {error}"
    try:
        host.run("ip", "link", "add", "probe", "type", "bridge")
    except (OSError, subprocess.CalledProcessError) as error:
        return f"expected to be allowed to make network namespaces, got: {error}"
    finally:
        host.close()
    return None


@pytest.fixture
def network(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Network]:
    """Of as many hosts as the test's parameter says."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with Network(request.param, tmp_path) as made:
        yield made
