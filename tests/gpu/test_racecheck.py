"""Small calls under compute-sanitizer's racecheck, which finds races in shared memory."""

from __future__ import annotations

import pytest
from sanitizer import every_part, sanitize

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(0)]


@every_part
def test_racecheck(part, ranks):
    sanitize("racecheck", part, ranks)
