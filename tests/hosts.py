"""Hosts that tests make: network namespaces on this machine, each with a name, an address and a /dev/shm of its own."""

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
    """A host: a process with namespaces of its own for network, mounts and host name, which exist until it ends."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._keeper = subprocess.Popen(
            ["unshare", "--net", "--mount", "--uts", "sh", "-c", "echo; exec sleep infinity"], stdout=subprocess.PIPE
        )
        assert self._keeper.stdout is not None
        self._keeper.stdout.read(1)  # waits for a newline, which says that the process is in its namespaces

    @property
    def pid(self) -> int:
        return self._keeper.pid

    def inside(self, *command: str) -> list[str]:
        """The command line that runs `command` on this host."""
        return ["nsenter", "--target", str(self.pid), "--net", "--mount", "--uts", *command]

    def run(self, *command: str) -> None:
        _run(*self.inside(*command))

    def processes(self) -> list[int]:
        """The ids of the processes in this host's network namespace."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # the process has ended
                if os.readlink(path / "ns/net") == os.readlink(f"/proc/{self.pid}/ns/net"):
                    found.append(int(path.name))
        return found

    def sockets(self) -> list[str]:
        """The host's lines in /proc/net/tcp and udp, without connections that every process has closed and that only
        wait for packets on their way."""
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
    """What a rank does on the host whose process is `keeper`: it enters the namespaces, and calls functions as
    `answer` describes."""
    for kind in ("net", "uts", "mnt"):
        with open(f"/proc/{keeper}/ns/{kind}") as namespace:
            enter(namespace.fileno())
    os.environ.update(environment)
    answer(pipe)


def answer(pipe: Any) -> None:
    """Calls each function that arrives through the pipe, and sends back what it has returned or raised, for ever."""
    while True:
        fn, arguments = pipe.recv()
        try:
            said = fn(*arguments)
        except Exception as error:
            said = error
        pipe.send(said)


class Network:
    """Hosts 10.77.0.1, 10.77.0.2, ... that are joined by a switch, or by a cable with faults if one is given."""

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
        """What the cable has carried so far."""
        self._carrier.tell("how much?")
        return self._carrier.hear()

    def address(self, host: int) -> str:
        return f"10.77.0.{host + 1}"

    def start(self, spread: Sequence[int], **environment: str) -> list[Process]:
        """New ranks, each on the host that `spread` says."""
        return [self._processes.start(serve, self.hosts[host].pid, environment) for host in spread]

    def cut(self, host: int) -> None:
        """Cuts the host off: no packet gets to it or comes from it any more."""
        self._switch.run("ip", "link", "set", f"port{host + 1}", "down")

    def mend(self, host: int) -> None:
        self._switch.run("ip", "link", "set", f"port{host + 1}", "up")

    def slow(self, host: int, *how: str) -> None:
        """Slows the packets on their way to this host. `how`: the arguments of `tc`."""
        self._switch.run("tc", "qdisc", "replace", "dev", f"port{host + 1}", "root", *how)

    def left(self) -> list[str]:
        """What ranks have left on the hosts, once all ranks have ended: processes, names in shared memory, sockets."""
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
    """A function that makes a network of hosts. After the test, asserts that ranks have left nothing on the hosts."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    made: list[Network] = []

    def make(hosts: int, cable: Cable | None = None) -> Network:
        made.append(Network(hosts, processes, cable))
        return made[-1]

    try:
        yield make
    finally:
        processes.end()  # before the processes' hosts are gone
        left = [each.left() for each in made]
        for each in made:
            each.close()
    assert not any(left), left
