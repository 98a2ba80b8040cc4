"""What `make` shows while pip installs, and what it says where pip fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pip_progress import LAST_LINES, is_fourth, step

TOOL = Path(__file__).resolve().parents[1] / "tools" / "pip_progress.py"


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("Collecting ml-dtypes>=0.5 (from flashmoe-layer==0.2.0)\n", "fetching ml-dtypes"),
        ("  Collecting cmake>=3.24\n", "fetching cmake"),
        ("  [12/76] Building CXX object CMakeFiles/flashmoe_cpu.dir/gemm.cpp.o\n", "compiling: 12 of 76"),
        ("  [76/76] Linking CXX shared library libflashmoe.so\n", "compiling: 76 of 76"),
        ("Installing collected packages: numpy, flashmoe-layer\n", "installing"),
        ("  [0/2] Re-checking globbed directories...\n", None),
        ("  Running command Building wheel\n", None),
    ],
)
def test_what_is_shown(line, shown):
    assert step(line) == shown


@pytest.mark.parametrize("steps", [1, 3, 4, 76, 77])
def test_at_most_four_lines_and_the_last_are_shown(steps):
    shown = [n for n in range(1, steps + 1) if is_fourth(f"[{n}/{steps}] Building CXX object a.o\n")]
    assert len(shown) == min(4, steps) and shown[-1] == steps


def test_a_failure_shows_the_end_of_the_log(tmp_path):
    log = tmp_path / "pip.log"
    command = [sys.executable, TOOL, log, "--no-index", "--no-deps", str(tmp_path / "nothing")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    assert "ERROR" in done.stderr and "nothing" in done.stderr
    assert done.stderr.splitlines() == log.read_text().splitlines()[-LAST_LINES:]
