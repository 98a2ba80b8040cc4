"""docs/extending.md says where a change goes: the files that it names are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SHORT = {"flashmoe": "include/flashmoe", "py": "python/flashmoe"}
"""The page's short names of two folders."""
PRODUCT = ("include", "csrc", "python/flashmoe")
KINDS = (".h", ".cuh", ".cpp", ".cu", ".py")


def paths_of(page: str) -> list[str]:
    """The files, folders and patterns that a page names, from the root."""
    found = []
    for name in re.findall(r"`([\w*./]+)`", page):
        first, slash, rest = name.partition("/")
        if slash and rest:
            found.append(f"{SHORT.get(first, first)}/{rest}")
    return found


def test_the_files_of_the_table_are_there() -> None:
    named = paths_of((ROOT / "docs" / "extending.md").read_text())
    assert len(named) > 40
    assert [path for path in named if not list(ROOT.glob(path))] == []


@pytest.mark.parametrize(
    ("text", "expected"), [("`py/jit.py`", "python/flashmoe/jit.py"), ("`tests/gpu/`", "tests/gpu/")]
)
def test_names_are_read_from_the_root(text: str, expected: str) -> None:
    assert paths_of(text) == [expected]


def test_an_activation_is_said_in_the_files_of_its_row() -> None:
    """The name gelu_tanh is in every file that must state or compute an activation, by the page's row of activations.
    It is in no other file of the product, except files of that row and of the row of models' names for activations."""
    page = (ROOT / "docs" / "extending.md").read_text()
    own, names = (
        next(line for line in page.splitlines() if line.startswith(f"| {row} |")).split("|")
        for row in ("**an activation**", "a name that models have for it")
    )
    allowed = {each for path in paths_of("".join(own + names)) for each in ROOT.glob(path)}
    files = [each for folder in PRODUCT for kind in KINDS for each in (ROOT / folder).rglob(f"*{kind}")]
    said = {each for each in files if re.search("gelu_?tanh", each.read_text(), re.IGNORECASE)}
    assert {ROOT / path for path in paths_of(own[2] + own[3])} <= said <= allowed
