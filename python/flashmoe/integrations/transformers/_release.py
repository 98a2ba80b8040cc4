"""The releases of Transformers that this integration is for. Importing this module warns if a newer release is
installed, and raises `ImportError` if an older one or none is."""

from __future__ import annotations

from ..release import check_release

OLDEST, NEWEST = (5, 17), (5, 24)
"""The oldest and newest release, by major and minor number, with an experts interface that this integration is written
for."""

WITH_EXPERT_PARALLELISM = (5, 23)
"""The first release whose expert parallelism calls a registered implementation."""

INSTALLED = check_release("transformers", "Transformers", OLDEST, NEWEST)
"""The release that is installed."""
