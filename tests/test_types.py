"""mypy and pyright find each wrong call in tests/typed_calls.py, and no error in the pages' snippets or examples."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from page_snippets import ROOT, SNIPPETS

TYPED = Path(__file__).with_name("typed_calls.py")
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SNIPPET_FILES = {name: f"snippet_{number}.py" for number, name in enumerate(SNIPPETS)}

Found = dict[str, list[tuple[int, str]]]
"""The errors by the file's name. Each error is a line number and a text."""


def mypy_finds(output: str) -> Iterator[tuple[str, int, str]]:
    for each in map(json.loads, output.splitlines()):
        if each["severity"] == "error":
            yield each["file"], each["line"], each["message"]


def pyright_finds(output: str) -> Iterator[tuple[str, int, str]]:
    for each in json.loads(output)["generalDiagnostics"]:
        if each["severity"] == "error":
            yield each["file"], each["range"]["start"]["line"] + 1, each["message"]


CHECKERS: dict[str, tuple[list[str], Callable[[str], Iterator[tuple[str, int, str]]]]] = {
    "mypy": (["--strict", "--no-error-summary", "--output", "json"], mypy_finds),
    "pyright": (["--pythonpath", sys.executable, "--outputjson"], pyright_finds),
}


@pytest.fixture(scope="module")
def checkers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Found]]:
    """A function that returns what the checker of a given name finds. Each checker has one process for all files,
    because reading the imported modules takes most of its time."""
    for imported in ("torch", "transformers"):
        pytest.importorskip(imported)
    folder = tmp_path_factory.mktemp("typed")
    files = [Path(shutil.copy(each, folder)) for each in [TYPED, *EXAMPLES]]
    for name, file in SNIPPET_FILES.items():
        files.append(folder / file)
        files[-1].write_text(SNIPPETS[name].code())
    running = {
        name: subprocess.Popen(
            [sys.executable, "-m", name, *options, *map(str, files)],
            env={**os.environ, "MYPY_CACHE_DIR": str(folder / "cache")},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name, (options, _) in CHECKERS.items()
        if importlib.util.find_spec(name) is not None
    }

    @functools.cache
    def found_by(name: str) -> Found:
        if name not in running:
            pytest.skip(f"{name} is not installed: make lint-types installs it")
        output, errors = running[name].communicate()
        assert running[name].returncode in (0, 1), errors
        found: Found = {file.name: [] for file in files}
        for file, *where in CHECKERS[name][1](output):
            found.setdefault(Path(file).name, []).append(tuple(where))
        return found

    yield found_by
    for process in running.values():
        process.kill()
        process.communicate()


@pytest.fixture(params=CHECKERS)
def found(request: pytest.FixtureRequest, checkers: Callable[[str], Found]) -> Found:
    return checkers(request.param)


def test_each_wrong_call_is_found_and_no_other(found: Found):
    wrong = [number for number, line in enumerate(TYPED.read_text().splitlines(), 1) if line.endswith("# WRONG")]
    assert wrong and sorted({line for line, _ in found[TYPED.name]}) == wrong, found[TYPED.name]


@pytest.mark.parametrize("name", SNIPPETS)
def test_snippets_of_pages(found: Found, name: str):
    assert found[SNIPPET_FILES[name]] == []


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.name)
def test_examples(found: Found, file: Path):
    assert found[file.name] == []


def test_no_other_file_has_errors(found: Found):
    assert set(found) == {TYPED.name, *SNIPPET_FILES.values(), *(file.name for file in EXAMPLES)}
