"""mypy and pyright take types as they are: in tests/typed_calls.py, in the pages' snippets and in the examples."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from page_snippets import ROOT, SNIPPETS

TYPED = Path(__file__).with_name("typed_calls.py")


def mypy(cache: Path, *files: Path) -> list[tuple[int, str]]:
    """The errors, by line."""
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--cache-dir", str(cache)]
    ran = subprocess.run([*command, "--output", "json", *map(str, files)], capture_output=True, text=True)
    assert ran.returncode in (0, 1), ran.stderr
    found = [json.loads(line) for line in ran.stdout.splitlines()]
    return [(each["line"], each["message"]) for each in found if each["severity"] == "error"]


def pyright(_: Path, *files: Path) -> list[tuple[int, str]]:
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson", *map(str, files)]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode in (0, 1), ran.stderr
    found = json.loads(ran.stdout)["generalDiagnostics"]
    return [(each["range"]["start"]["line"] + 1, each["message"]) for each in found if each["severity"] == "error"]


@pytest.fixture(params=[mypy, pyright], ids=lambda checker: checker.__name__)
def checker(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., list[tuple[int, str]]]:
    """Called with files. What mypy finds out of PyTorch serves all tests."""
    name = request.param.__name__
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed: make lint-types installs it")
    return partial(request.param, tmp_path_factory.getbasetemp() / "mypy")


def test_each_wrong_call_is_found_and_no_other(checker, tmp_path):
    pytest.importorskip("torch")
    file = tmp_path / TYPED.name
    file.write_text(TYPED.read_text())
    wrong = [number for number, line in enumerate(TYPED.read_text().splitlines(), 1) if line.endswith("# WRONG")]
    found = checker(file)
    assert wrong and sorted({line for line, _ in found}) == wrong, found


@pytest.mark.parametrize("name", SNIPPETS)
def test_snippets_of_pages(checker, tmp_path, name):
    pytest.importorskip("torch")
    file = tmp_path / "example.py"
    file.write_text(SNIPPETS[name].code())
    assert checker(file) == []


def test_examples(checker, tmp_path):
    pytest.importorskip("transformers")
    copies = [Path(shutil.copy(each, tmp_path)) for each in sorted((ROOT / "examples").glob("*.py"))]
    assert copies and checker(*copies) == []
