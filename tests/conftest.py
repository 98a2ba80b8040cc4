"""Fixtures that several test files share."""

import os
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Set before numpy loads its BLAS, whose threads would spin on cores that the ranks need.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Set before PyTorch loads its OpenMP, so that OpenMP's threads sleep between parallel regions. By default they spin, on
# cores that the ranks and the other processes of pytest-xdist need.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Tests set the width of the output themselves, by COLUMNS. A console that finds a number there when it is made would
# keep this number, whatever a test sets later.
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
    """A pool that starts new processes if one has ended, so that a test which kills one does not make later tests
    fail."""

    def call(self, *args: Any, **options: Any) -> list[Any]:
        if any(worker.ending() is not None for worker in self._workers):
            self.close()
            super().__init__(self.ranks)
        return super().call(*args, **options)


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Four processes that call functions of the tests, most of which use torch.distributed."""
    with RenewedPool(4) as pool:
        yield pool


@pytest.fixture
def released() -> Iterator[None]:
    """Closes, before and after the test, the contexts that the package keeps for calls that are given no context."""
    flashmoe.release()
    yield
    flashmoe.release()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Gives PyTorch one thread during the test. With more, PyTorch's threads and the engine's wait for one another if
    there are fewer cores than threads."""
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
        """Call `act` in a process of this user. Fails if `act` raises an exception."""
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
