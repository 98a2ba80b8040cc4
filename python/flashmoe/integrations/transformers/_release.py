"""Which releases of Transformers this is for; importing it where there is another, or none, raises `ImportError`."""

from __future__ import annotations

from ..release import check_release

OLDEST, NEWEST = (5, 17), (5, 24)
"""The releases, by major and minor number, whose experts interface this has been written for."""

check_release("transformers", "Transformers", OLDEST, NEWEST)
