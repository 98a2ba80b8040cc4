"""Which releases of a framework an integration is for."""

from __future__ import annotations

import importlib
import re

Release = tuple[int, int]
"""Major and minor number."""


def check_release(integration: str, framework: str, oldest: Release, newest: Release, advice: str = "") -> None:
    """Raises `ImportError` unless `framework`, which is the module of that name in lower case, is of one of these
    releases. `advice`: what the message ends with."""
    expected = f"flashmoe.integrations.{integration}: expected {framework} {_said(oldest)} to {_said(newest)}"
    try:
        release = importlib.import_module(framework.lower()).__version__
    except ImportError as error:
        raise ImportError(f"{expected}, got none ({error}){advice}") from error
    numbers = re.match(r"(\d+)\.(\d+)", release)
    if numbers is None or not oldest <= tuple(map(int, numbers.groups())) <= newest:
        raise ImportError(f"{expected}, got {release}{advice}")


def _said(release: Release) -> str:
    return ".".join(map(str, release))
