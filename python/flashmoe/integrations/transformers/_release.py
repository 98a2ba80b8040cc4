"""Which releases of Transformers this is for; importing it where there is another, or none, raises `ImportError`."""

from __future__ import annotations

OLDEST, NEWEST = (5, 17), (5, 24)
"""The releases, by major and minor number, whose experts interface this has been written for."""


def _check_release() -> None:
    expected = f"expected Transformers {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
    try:
        from transformers import __version__ as release
    except ImportError as error:
        raise ImportError(f"flashmoe.integrations.transformers: {expected}, got none ({error})") from error
    numbers = tuple(int(part) for part in release.split(".")[:2])
    if not OLDEST <= numbers <= NEWEST:
        raise ImportError(f"flashmoe.integrations.transformers: {expected}, got {release}")


_check_release()
