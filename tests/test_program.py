"""The table of tasks (include/flashmoe/spec/program.h) is not repeated elsewhere: code that runs tasks names no
product, and Python's list of phases has the rows of the table."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = ROOT / "include" / "flashmoe" / "spec" / "program.h"
WHO_RUNS = (*(f"include/flashmoe/{layer}" for layer in ("actors", "protocol", "gpu", "sm90")), "csrc")


def products() -> set[str]:
    """The names of products: the enumeration without Reduce, Combine and the words that are no tasks."""
    kinds = re.search(r"enum class TaskKind : uint32_t \{(.*?)\}", PROGRAM.read_text(), re.DOTALL)
    assert kinds
    return set(re.findall(r"k\w+", kinds[1])) - {"kNone", "kStop", "kFormed", "kReduce", "kCombine", "kBehindStop"}


def named(root: Path) -> list[str]:
    """Where a product is named: file and line."""
    name = re.compile(rf"\b(?:{'|'.join(products())})\b")
    found = []
    for folder in WHO_RUNS:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix not in {".h", ".cuh", ".cpp", ".cu"}:
                continue
            for number, line in enumerate(path.read_text().splitlines(), 1):
                if name.search(line):
                    found.append(f"{path.relative_to(root)}:{number}: {line.strip()}")
    return found


def test_products_are_named_in_the_table_alone() -> None:
    assert products() == {"kGemm0", "kGemm1"}
    assert named(ROOT) == []


def test_a_name_would_be_found(tmp_path: Path) -> None:
    actor = tmp_path / WHO_RUNS[0] / "scheduler.h"
    actor.parent.mkdir(parents=True)
    actor.write_text("if (task.kind == TaskKind::kGemm1) hurry();\n")
    assert named(tmp_path) == ["include/flashmoe/actors/scheduler.h:1: if (task.kind == TaskKind::kGemm1) hurry();"]


def phases_of_python() -> list[tuple[str, ...]]:
    lists = []
    for path in sorted((ROOT / "python" / "flashmoe").rglob("*.py")):
        for names in re.findall(r"^_?PHASES = \((.*?)\)", path.read_text(), re.DOTALL | re.MULTILINE):
            lists.append(tuple(re.findall(r'"(\w+)"', names)))
    return lists


def test_phases_of_python_are_the_rows() -> None:
    forward = re.search(r"kForward = (.*?)\}\);", PROGRAM.read_text(), re.DOTALL)
    assert forward
    rows = [kind.lower() for kind in re.findall(r"\.kind = TaskKind::k(\w+)", forward[1])]
    expected = ("gate", "dispatch", *rows, "wait", "schedule")
    expected += ("epilogue", "form", "send", "rehearse", "gradients", "return")
    lists = phases_of_python()
    assert lists
    for phases in lists:  # a list may lack the last phase, return
        assert phases in (expected, expected[:-1])
