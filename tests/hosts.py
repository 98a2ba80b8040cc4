"""Hosts of tests' own: network namespaces on this machine, each with a name, an address and a /dev/shm of its own."""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from flashmoe import ucx
from processes import Process, Processes


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


def serve(pipe: Any, keeper: int, environment: dict[str, str]) -> None:
    """A rank's life on the host of that keeper: it calls what it is told, and says what that has returned or raised."""
    libc = ctypes.CDLL(None, use_errno=True)
    for kind in ("net", "uts", "mnt"):
        with open(f"/proc/{keeper}/ns/{kind}") as namespace:
            if libc.setns(namespace.fileno(), 0) != 0:
                raise OSError(ctypes.get_errno(), f"setns {kind}")
    os.environ.update(environment)
    answer(pipe)


def answer(pipe: Any) -> None:
    """Calls what it is told, and says what that has returned or raised, for ever."""
    while True:
        fn, arguments = pipe.recv()
        try:
            said = fn(*arguments)
        except Exception as error:
            said = error
        pipe.send(said)


class Network:
    """Hosts 10.77.0.1, 10.77.0.2, ... that reach one another through a switch."""

    def __init__(self, hosts: int, processes: Processes) -> None:
        self._processes = processes
        self.hosts: list[Host] = []
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

    def start(self, spread: Sequence[int], **environment: str) -> list[Process]:
        """New ranks, each on the host that `spread` says."""
        return [self._processes.start(serve, self.hosts[host].pid, environment) for host in spread]

    def cut(self, host: int) -> None:
        """Nothing gets to or from that host any more."""
        self._switch.run("ip", "link", "set", f"port{host + 1}", "down")

    def mend(self, host: int) -> None:
        self._switch.run("ip", "link", "set", f"port{host + 1}", "up")

    def slow(self, host: int, *how: str) -> None:
        """Shapes what gets to that host, in tc's words."""
        self._switch.run("tc", "qdisc", "replace", "dev", f"port{host + 1}", "root", *how)

    def close(self) -> None:
        for host in [*self.hosts, self._switch]:
            host.close()


@functools.cache
def why_not() -> str | None:
    """Why there can be no hosts here; None if there can."""
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
def network(processes: Processes) -> Iterator[Callable[[int], Network]]:
    """Makes a network of so many hosts."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    made: list[Network] = []

    def make(hosts: int) -> Network:
        made.append(Network(hosts, processes))
        return made[-1]

    try:
        yield make
    finally:
        processes.end()  # before their hosts are gone
        for each in made:
            each.close()
