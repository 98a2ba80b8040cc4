"""Hosts of tests' own: network namespaces on this machine, each with a name, an address and a /dev/shm of its own."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from flashmoe.system import openssl
from namespaces import enter
from processes import Process, Processes
from relay import Cable, Carried, carry


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


CLOSED = (4, 5, 6, 9, 11)
"""States of TCP in which no process has the connection any more (include/net/tcp_states.h): FIN_WAIT1, FIN_WAIT2,
TIME_WAIT, LAST_ACK, CLOSING."""


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

    def processes(self) -> list[int]:
        """Those that have its network."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended
                if os.readlink(path / "ns/net") == os.readlink(f"/proc/{self.pid}/ns/net"):
                    found.append(int(path.name))
        return found

    def sockets(self) -> list[str]:
        """Lines of /proc/net/tcp and udp, but for connections that are closed and wait for what is still on its way."""
        found = []
        for kind in ("tcp", "tcp6", "udp", "udp6"):
            lines = Path(f"/proc/{self.pid}/net/{kind}").read_text().splitlines()[1:]
            found += [line for line in lines if int(line.split()[3], 16) not in CLOSED]
        return found

    def close(self) -> None:
        self._keeper.kill()
        self._keeper.wait()
        if self._keeper.stdout is not None:
            self._keeper.stdout.close()


def serve(pipe: Any, keeper: int, environment: dict[str, str]) -> None:
    """A rank's life on the host of that keeper: it calls what it is told, and says what that has returned or raised."""
    for kind in ("net", "uts", "mnt"):
        with open(f"/proc/{keeper}/ns/{kind}") as namespace:
            enter(namespace.fileno())
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
    """Hosts 10.77.0.1, 10.77.0.2, ... that reach one another through a switch, or by a cable that is not good."""

    def __init__(self, hosts: int, processes: Processes, cable: Cable | None = None) -> None:
        self._processes = processes
        self.hosts: list[Host] = []
        self._switch = Host("switch")
        try:
            for number in range(1, hosts + 1):
                self.hosts.append(Host(f"host{number}"))
            self._carrier = self._lay(cable) if cable else self._connect()
            for host, address in zip(self.hosts, map(self.address, range(hosts)), strict=True):
                for command in (
                    ["hostname", host.name],
                    ["mount", "-t", "tmpfs", "-o", "mode=1777", "none", "/dev/shm"],
                    ["ip", "link", "set", "lo", "up"],
                    ["ip", "address", "add", f"{address}/24", "dev", "eth0"],
                    ["ip", "link", "set", "eth0", "up"],
                ):
                    host.run(*command)
        except BaseException:
            self.close()
            raise

    def _connect(self) -> None:
        self._switch.run("ip", "link", "add", "switch", "type", "bridge")
        self._switch.run("ip", "link", "set", "switch", "up")
        for number, host in enumerate(self.hosts, 1):
            port = f"port{number}"
            self._switch.run("ip", "link", "add", port, "type", "veth", "peer", "eth0", "netns", str(host.pid))
            self._switch.run("ip", "link", "set", port, "master", "switch", "up")

    def _lay(self, cable: Cable) -> Process:
        addresses = [socket.inet_aton(self.address(host)) for host in range(len(self.hosts))]
        carrier = self._processes.start(carry, [host.pid for host in self.hosts], addresses, cable)
        assert carrier.hear() == "ready"
        return carrier

    def carried(self) -> Carried:
        """By the cable, so far."""
        self._carrier.tell("how much?")
        return self._carrier.hear()

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

    def left(self) -> list[str]:
        """What is still there, once all ranks have ended: processes, names in shared memory, sockets."""
        found = []
        for host in self.hosts:
            found += [f"{host.name} has process {pid}" for pid in host.processes() if pid != host.pid]
            shared_memory = Path("/proc", str(host.pid), "root", "dev", "shm")  # as the host sees it
            found += [f"{host.name} has {path.name}" for path in shared_memory.iterdir()]
            found += [f"{host.name} has a socket: {line}" for line in host.sockets()]
        return found

    def close(self) -> None:
        for host in [*self.hosts, self._switch]:
            host.close()


@functools.cache
def why_not() -> str | None:
    """Why there can be no hosts here; None if there can."""
    try:
        ctypes.CDLL(openssl.library())
    except OSError as error:
        return f"expected OpenSSL ({openssl.INSTALL}), got: {error}"
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
def network(processes: Processes) -> Iterator[Callable[..., Network]]:
    """Makes a network of so many hosts, and at the end sees that ranks have left nothing there."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    made: list[Network] = []

    def make(hosts: int, cable: Cable | None = None) -> Network:
        made.append(Network(hosts, processes, cable))
        return made[-1]

    try:
        yield make
    finally:
        processes.end()  # before their hosts are gone
        left = [each.left() for each in made]
        for each in made:
            each.close()
    assert not any(left), left
