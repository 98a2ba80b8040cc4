"""Small calls under compute-sanitizer's initcheck: reads of global memory that nothing has written."""

from __future__ import annotations

import pytest
from sanitizer import every_part, sanitize

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(0)]


@every_part
def test_initcheck(part, ranks):
    sanitize("initcheck", part, ranks)
