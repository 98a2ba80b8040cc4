"""Which releases of Transformers this is for; importing it where there is another, or none, raises `ImportError`."""

from __future__ import annotations

OLDEST, NEWEST = (5, 17), (5, 24)
"""The releases, by major and minor number, whose experts interface this has been written for."""


WITH_EXPERT_PARALLELISM = (5, 23)
"""The first release whose expert parallelism asks a registered implementation."""


def _checked_release() -> tuple[int, ...]:
    expected = f"expected Transformers {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
    try:
        from transformers import __version__ as release
    except ImportError as error:
        raise ImportError(f"flashmoe.integrations.transformers: {expected}, got none ({error})") from error
    numbers = tuple(int(part) for part in release.split(".")[:2])
    if not OLDEST <= numbers <= NEWEST:
        raise ImportError(f"flashmoe.integrations.transformers: {expected}, got {release}")
    return numbers


INSTALLED = _checked_release()
"""The release that is here."""
