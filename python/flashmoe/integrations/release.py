"""Checks that a framework's release is one that an integration is written for."""

from __future__ import annotations

import importlib
import re

Release = tuple[int, int]
"""Major and minor number."""


def check_release(integration: str, framework: str, oldest: Release, newest: Release, advice: str = "") -> Release:
    """The release of `framework`; its module has the same name in lower case. Raises `ImportError` unless the release
    is in [oldest, newest]. `advice`: what the message ends with."""
    expected = f"flashmoe.integrations.{integration}: expected {framework} {_said(oldest)} to {_said(newest)}"
    try:
        release = importlib.import_module(framework.lower()).__version__
    except ImportError as error:
        raise ImportError(f"{expected}, got none ({error}){advice}") from error
    match = re.match(r"(\d+)\.(\d+)", release)
    numbers = (int(match[1]), int(match[2])) if match else (0, 0)
    if not oldest <= numbers <= newest:
        raise ImportError(f"{expected}, got {release}{advice}")
    return numbers


def _said(release: Release) -> str:
    return ".".join(map(str, release))
