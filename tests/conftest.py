"""Fixtures that several test files share."""

import os
from collections.abc import Iterator

# Before numpy loads its BLAS: the ranks need the cores, and its threads would spin on them.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest
from problems import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Eight processes for the ranks of all tests."""
    ranks = Ranks()
    yield ranks
    ranks.close()
