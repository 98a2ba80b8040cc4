"""Fixtures that several test files share."""

import os
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Before numpy loads its BLAS: the ranks need the cores, and its threads would spin on them.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Before PyTorch loads its OpenMP: its threads sleep between parallel regions. By default they spin, on cores that the
# ranks and the other process of tests need.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# As wide as each test says: consoles keep what they find first, and a process of pytest-xdist finds 80.
os.environ.update(COLUMNS="", LINES="")

import flashmoe
import nightly_evidence
import pytest
from flashmoe.launch import RankPool
from problems import Ranks


def pytest_configure(config: pytest.Config) -> None:
    nightly_evidence.begin(config)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Eight processes for the ranks of all tests."""
    ranks = Ranks()
    yield ranks
    ranks.close()


class RenewedPool(RankPool):
    """One whose processes are others once any has ended: a test that had one killed is not to fail all that follow."""

    def call(self, *args: Any, **options: Any) -> list[Any]:
        if any(worker.ending() is not None for worker in self._workers):
            self.close()
            super().__init__(self.ranks)
        return super().call(*args, **options)


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Four processes for functions of the tests' own: those of torch.distributed, for the most part."""
    with RenewedPool(4) as pool:
        yield pool


@pytest.fixture
def released() -> Iterator[None]:
    """No context of calls that were given none is open before the test, nor behind it."""
    flashmoe.release()
    yield
    flashmoe.release()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Of PyTorch: its threads and the engine's wait for one another where there are fewer cores than both."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class SecondUser:
    """Another user of this machine."""

    place: Path
    """A folder like /tmp: everybody may make files there, and remove only their own."""
    uid: int = 61002

    def does(self, act: Callable[[], object]) -> None:
        """Call `act` in a process of that user; what it raises is a failure here."""
        process = os.fork()
        if process == 0:
            status = 1
            try:
                os.setgroups([])
                os.setgid(self.uid)
                os.setuid(self.uid)
                os.umask(0)
                act()
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0


@pytest.fixture
def second_user() -> Iterator[SecondUser]:
    if os.geteuid() != 0:
        pytest.skip("expected to run as root, which alone can act as a second user")
    place = Path(tempfile.mkdtemp(prefix="flashmoe-"))  # pytest's own folders are closed to others
    place.chmod(0o1777)
    yield SecondUser(place)
    shutil.rmtree(place)
