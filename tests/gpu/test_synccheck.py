"""Small calls under compute-sanitizer's synccheck, which finds barriers that are used wrongly."""

from __future__ import annotations

import pytest
from sanitizer import every_part, sanitize

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(0)]


@every_part
def test_synccheck(part, ranks):
    sanitize("synccheck", part, ranks)
