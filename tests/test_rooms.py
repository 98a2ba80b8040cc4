"""The package's rooms (folders of internal modules): few modules lie at the package's top, and every import path that a
page or an example names exists."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "python" / "flashmoe"
ROOMS = ("calls", "contexts", "groups", "pytorch", "system", "weights")
MOST_AT_THE_TOP = 18
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.*")])
NO_MODULES = {"flashmoe.so", "flashmoe.pml", "flashmoe.transformers", "flashmoe.profiles"}
"""Names that `imported` finds in pages, but that are files, extras or entry points."""
NEEDS = {
    "flashmoe.nn": "torch",
    "flashmoe.pytorch": "torch",
    "flashmoe.integrations.megatron": "megatron.core",
    "flashmoe.integrations.torchtitan": "torchtitan",
    "flashmoe.integrations.transformers": "transformers",
    "flashmoe.integrations.vllm": "vllm",
}
"""Modules of the package that import a package which `flashmoe` does not bring, and that package."""


def imported(text: str) -> Iterator[str]:
    """The dotted names below `flashmoe` that a text mentions or imports, in prose and in code."""
    yield from re.findall(r"(?<![\w./-])flashmoe(?:\.[A-Za-z_]\w*)+", text)
    for module, names in re.findall(r"from (flashmoe[\w.]*) import (\([^)]*\)|[^\n#`]*)", text):
        yield from (f"{module}.{name}" for name in re.findall(r"(\w+)(?: as \w+)?", names))


def named() -> list[str]:
    found = {name for page in PAGES for name in imported(page.read_text())}
    return sorted(found - NO_MODULES)


def resolved(name: str) -> object:
    """What a dotted name stands for. Raises `AttributeError` or `ImportError`."""
    parts = name.split(".")
    value: object = importlib.import_module(parts[0])
    for end, part in enumerate(parts[1:], 2):
        if not hasattr(value, part):
            importlib.import_module(".".join(parts[:end]))
        value = getattr(value, part)
    return value


def test_few_modules_lie_at_the_top():
    assert len(list(PACKAGE.glob("*.py"))) <= MOST_AT_THE_TOP


def test_what_is_collected():
    text = "`flashmoe.slices.cut` (flashmoe/spec/a.h, libflashmoe.so)\n"
    text += "from flashmoe.launch import RankPool, run_ranks as r\n"
    launch = ["flashmoe.launch", "flashmoe.launch.RankPool", "flashmoe.launch.run_ranks"]
    assert list(imported(text)) == ["flashmoe.slices.cut", *launch]
    assert len(named()) > 30
    with pytest.raises(ImportError):
        resolved("flashmoe.context.Context")


@pytest.mark.parametrize("name", named())
def test_what_a_page_names_is_there(name):
    for module, needed in NEEDS.items():
        if f"{name}.".startswith(f"{module}."):
            pytest.importorskip(needed)
    resolved(name)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_says_what_is_in_it_and_imports_nothing(room):
    tree = ast.parse((PACKAGE / room / "__init__.py").read_text())
    assert len(tree.body) == 1
    listed = re.findall(r"^\* `(\w+)`: ", ast.get_docstring(tree) or "", re.MULTILINE)
    modules = {path.stem for path in (PACKAGE / room).glob("*.py")} - {"__init__"}
    assert sorted(listed) == sorted(modules)


def test_an_import_of_the_package_brings_no_room_that_it_does_not_need():
    """`import flashmoe` imports nothing of `groups`, by which ranks meet, and nothing of `pytorch`."""
    code = "import flashmoe, sys\nprint(*{name.split('.')[1] for name in sys.modules if name[:9] == 'flashmoe.'})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(ROOMS) & set(done.stdout.split()) == {"calls", "contexts", "system", "weights"}
