"""Which releases of Transformers this is for; importing it where there is another, or none, raises `ImportError`."""

from __future__ import annotations

from ..release import check_release

OLDEST, NEWEST = (5, 17), (5, 24)
"""The releases, by major and minor number, whose experts interface this has been written for."""

WITH_EXPERT_PARALLELISM = (5, 23)
"""The first release whose expert parallelism asks a registered implementation."""

INSTALLED = check_release("transformers", "Transformers", OLDEST, NEWEST)
"""The release that is here."""
