"""Small calls under compute-sanitizer's memcheck: accesses outside of what is allocated, and misaligned ones."""

from __future__ import annotations

import pytest
from sanitizer import every_part, sanitize

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(0)]


@every_part
def test_memcheck(part, ranks):
    sanitize("memcheck", part, ranks)
