"""Fixtures that several test files share."""

from collections.abc import Iterator

import pytest
from problems import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Eight processes for the ranks of all tests."""
    ranks = Ranks()
    yield ranks
    ranks.close()
