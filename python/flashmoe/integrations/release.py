"""Which releases of a framework an integration has been tried with, and what it does with others."""

from __future__ import annotations

import importlib
import os
import re
import warnings

Release = tuple[int, int]
"""Major and minor number."""

UNTRIED = "FLASHMOE_UNTRIED"
"""The variable that, with the value 1, makes integrations work in releases with which they have not been tried."""


def release_of(integration: str, framework: str, oldest: Release, newest: Release) -> tuple[Release, str]:
    """The release of `framework`, also as the framework writes it; its module has the same name in lower case. Raises
    `ImportError` if there is none."""
    try:
        said = importlib.import_module(framework.lower()).__version__
    except ImportError as error:
        expected = _expected(integration, framework, oldest, newest)
        raise ImportError(f"{expected}, got none ({error})") from error
    match = re.match(r"(\d+)\.(\d+)", said)
    return (int(match[1]), int(match[2])) if match else (0, 0), said


def check_release(integration: str, framework: str, oldest: Release, newest: Release) -> Release:
    """The release of `framework`. Warns of one that is newer than `newest`. Raises `ImportError` if there is none, or
    one older than `oldest`, which lacks what the integration uses."""
    release, said = release_of(integration, framework, oldest, newest)
    expected = _expected(integration, framework, oldest, newest)
    if release < oldest:
        raise ImportError(f"{expected}, got {said}")
    if release > newest:
        warnings.warn(f"{expected}, got {said}, which has not been tried", stacklevel=2)
    return release


def joins(integration: str, framework: str, oldest: Release, newest: Release) -> bool:
    """Whether the integration works in this release of `framework`: one from `oldest` to `newest`, or any release if
    `UNTRIED` is set. Otherwise warns that the framework is left as it is. Raises `ImportError` if there is none."""
    release, said = release_of(integration, framework, oldest, newest)
    if oldest <= release <= newest or os.environ.get(UNTRIED) == "1":
        return True
    expected = _expected(integration, framework, oldest, newest)
    left = f"FlashMoE leaves {framework} as it is; with {UNTRIED}=1 it does not"
    warnings.warn(f"{expected}, got {said}, which has not been tried: {left}", stacklevel=2)
    return False


def _expected(integration: str, framework: str, oldest: Release, newest: Release) -> str:
    return f"flashmoe.integrations.{integration}: expected {framework} {_said(oldest)} to {_said(newest)}"


def _said(release: Release) -> str:
    return ".".join(map(str, release))
