"""Finds which GPU tests there are, by pytest's collection. No GPU is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from .digests import ROOT, TESTS
from .records import Collected


def collected(root: Path = ROOT) -> Collected:
    """The tests by place and file. If pytest cannot collect them, raises `RuntimeError` with pytest's output."""
    with tempfile.TemporaryDirectory(prefix="flashmoe-collected-") as folder:
        told = Path(folder) / "told"
        command = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-p", "no:cacheprovider", str(TESTS)]
        environment = {**os.environ, "FLASHMOE_TOLD": str(told)}
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"pytest cannot collect the GPU tests:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
        first = json.loads(told.read_text().splitlines()[0])
    return by_place(first["collected"])


def by_place(items: dict[str, list[str]]) -> Collected:
    """The tests by place and file. `items` names for each of pytest's items (a test with one set of parameters) its
    test, and then the places where it runs."""
    found: dict[str, dict[str, dict[str, None]]] = defaultdict(lambda: defaultdict(dict))
    for item, (test, *places) in items.items():
        for place in places:
            found[place][file_of(item)][test] = None
    return {place: {file: tuple(tests) for file, tests in files.items()} for place, files in found.items()}


def file_of(item: str) -> str:
    return item.partition("::")[0]
