"""Only the header spec/build.h reads the macros that a build defines by -D. Elsewhere, the preprocessor chooses by none
of the project's macros."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

READER = "include/flashmoe/spec/build.h"
"""The one header that reads macros which a build defines."""


def sources(root: Path) -> Iterator[Path]:
    """All files that a C++ compiler or nvcc reads."""
    for folder in ("include", "csrc"):
        yield from sorted(p for p in (root / folder).rglob("*") if p.suffix in {".h", ".cuh", ".cpp", ".cu"})


def options(root: Path) -> list[str]:
    """The names of the macros by which a build gets its options."""
    text = (root / READER).read_text()
    return [*re.findall(r"ROW\(\w+, (FLASHMOE_\w+)\)", text), *re.findall(r"#ifndef (FLASHMOE_\w+)", text)]


def readers(root: Path) -> list[str]:
    """The lines of other files that name such a macro, or have the preprocessor choose by any macro FLASHMOE_...
    (except include guards)."""
    names = re.compile(rf"\b(?:{'|'.join(options(root))})\b")
    chooses = re.compile(r"^\s*#\s*(?:if|ifdef|ifndef|elif)\b.*\bFLASHMOE_(?!H\b|\w+_H\b)")
    found = []
    for path in sources(root):
        if (name := str(path.relative_to(root))) == READER:
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if names.search(line) or chooses.search(line):
                found.append(f"{name}:{number}: {line.strip()}")
    return found


def test_one_header_reads_what_a_build_is_told() -> None:
    assert {"FLASHMOE_DTYPE", "FLASHMOE_KEEPS", "FLASHMOE_RACECHECK"} <= set(options(ROOT))
    assert readers(ROOT) == []


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A source tree that has only the header `READER`. Tests add the file that is to be found."""
    (tmp_path / READER).parent.mkdir(parents=True)
    (tmp_path / READER).write_text((ROOT / READER).read_text())
    return tmp_path


def plant(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


@pytest.mark.parametrize(
    "line", ["#if FLASHMOE_TRACE", "constexpr bool kOn = FLASHMOE_KEEPS;", "#ifdef FLASHMOE_OTHER"]
)
def test_a_second_reader_is_found(planted: Path, line: str) -> None:
    plant(planted, "include/flashmoe/gpu/types.cuh", f"\n{line}\n")
    assert readers(planted) == [f"include/flashmoe/gpu/types.cuh:2: {line}"]
