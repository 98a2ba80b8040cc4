"""mypy and pyright take the types of calls as they are: in tests/typed_calls.py and in README's first examples."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

TYPED = Path(__file__).with_name("typed_calls.py")
README = Path(__file__).parents[1] / "README.md"


def mypy(file: Path) -> list[tuple[int, str]]:
    """The errors, by line."""
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--cache-dir", str(file.parent)]
    ran = subprocess.run([*command, "--output", "json", str(file)], capture_output=True, text=True)
    assert ran.returncode in (0, 1), ran.stderr
    found = [json.loads(line) for line in ran.stdout.splitlines()]
    return [(each["line"], each["message"]) for each in found if each["severity"] == "error"]


def pyright(file: Path) -> list[tuple[int, str]]:
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson", str(file)]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode in (0, 1), ran.stderr
    found = json.loads(ran.stdout)["generalDiagnostics"]
    return [(each["range"]["start"]["line"] + 1, each["message"]) for each in found if each["severity"] == "error"]


@pytest.fixture(params=[mypy, pyright], ids=lambda checker: checker.__name__)
def checker(request: pytest.FixtureRequest) -> Callable[[Path], list[tuple[int, str]]]:
    name = request.param.__name__
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed: make lint-types installs it")
    return request.param


def test_each_wrong_call_is_found_and_no_other(checker, tmp_path):
    pytest.importorskip("torch")
    file = tmp_path / TYPED.name
    file.write_text(TYPED.read_text())
    wrong = [number for number, line in enumerate(TYPED.read_text().splitlines(), 1) if line.endswith("# WRONG")]
    found = checker(file)
    assert wrong and sorted({line for line, _ in found}) == wrong, found


def test_readme(checker, tmp_path):
    """The examples that are a whole file: of one rank and, appended to it, of several."""
    file = tmp_path / "example.py"
    file.write_text("\n".join(re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)[:2]))
    assert checker(file) == []
