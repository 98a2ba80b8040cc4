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
    """The release of `framework`, as numbers and as the framework writes it. The framework's module has the framework's
    name in lower case. Raises `ImportError` if it cannot be imported."""
    try:
        said = importlib.import_module(framework.lower()).__version__
    except ImportError as error:
        expected = _expected(integration, framework, oldest, newest)
        raise ImportError(f"{expected}, got none ({error})") from error
    match = re.match(r"(\d+)\.(\d+)", said)
    return (int(match[1]), int(match[2])) if match else (0, 0), said


def check_release(integration: str, framework: str, oldest: Release, newest: Release) -> Release:
    """The release of `framework`. Warns if it is newer than `newest`. Raises `ImportError` if there is none, or if it
    is older than `oldest`, because older ones lack what the integration uses."""
    release, said = release_of(integration, framework, oldest, newest)
    expected = _expected(integration, framework, oldest, newest)
    if release < oldest:
        raise ImportError(f"{expected}, got {said}")
    if release > newest:
        warnings.warn(f"{expected}, got {said}, which has not been tried", stacklevel=2)
    return release


def untried(integration: str, framework: str, oldest: Release, newest: Release) -> str | None:
    """What to say if the integration leaves `framework` as it is, because it has not been tried in this release. None
    for a release from `oldest` to `newest`, and for any release if `UNTRIED` is set: there it works. Raises
    `ImportError` if there is no such framework."""
    release, said = release_of(integration, framework, oldest, newest)
    if oldest <= release <= newest or os.environ.get(UNTRIED) == "1":
        return None
    expected = _expected(integration, framework, oldest, newest)
    left = f"FlashMoE leaves {framework} as it is; with {UNTRIED}=1 it does not"
    return f"{expected}, got {said}, which has not been tried: {left}"


def joins(integration: str, framework: str, oldest: Release, newest: Release) -> bool:
    """Whether the integration works in this release of `framework`. Otherwise warns, in the words of `untried`."""
    found = untried(integration, framework, oldest, newest)
    if found is not None:
        warnings.warn(found, stacklevel=2)
    return found is None


def _expected(integration: str, framework: str, oldest: Release, newest: Release) -> str:
    return f"flashmoe.integrations.{integration}: expected {framework} {_said(oldest)} to {_said(newest)}"


def _said(release: Release) -> str:
    return ".".join(map(str, release))
