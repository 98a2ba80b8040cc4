"""README's figures are those in the files of measurements, and these files lie where they are looked for."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest
from flashmoe.bench.origin import result_path
from flashmoe.bench.shapes import SHAPES

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"

README = (ROOT / "README.md").read_text()
_h, _i, _e, _k = SHAPES["paper-E64"][:4]
ROWS = {
    f"H = I = {_h}, {_e} experts, {_k} a token (FlashDMoE's)": "paper-E64",
    "Qwen3-30B-A3B": "qwen3-30b",
    "Mixtral-8x7B": "mixtral",
    "Qwen2-MoE": "qwen2-moe",
    "Phi-3.5-MoE": "phi3.5",
}
"""The shapes of the benchmarks, by README's names for them."""


def section(readme: str) -> str:
    return readme.split("## How fast")[1].split("\n## ")[0]


def table(readme: str) -> list[list[str]]:
    """The cells of the section's table, row by row, the header first."""
    lines = [line for line in section(readme).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if not set(line) <= set("| -")]


def measured(gpus: int, device: str = "H200") -> dict:
    path = result_path("fused_gpu" if gpus == 1 else "fused_group", f"NVIDIA {device}", gpus)
    return json.loads(path.read_text())


def row_of(result: dict, shape: str, tokens: int) -> dict:
    (row,) = [row for row in result["shapes"] if (row["shape"], row["tokens"]) == (shape, tokens)]
    return row


def differs(printed: str, value: float) -> bool:
    """Whether `printed` is not `value`, rounded to as many decimals as `printed` has."""
    return f"{value:.{len(printed.partition('.')[2])}f}" != printed


def faults(readme: str) -> Iterator[str]:
    """A message for each cell of README's table that is not as measured, and for the sentence below the table."""
    header, *rows = table(readme)
    results = []
    for title in header[1:]:
        found = re.fullmatch(r"(\d+) GPUs?(?:, (H\d+))? \(([0-9a-f]{7,40})\)", title)
        if found is None:
            yield f"column {title!r}: expected a number of GPUs and a commit"
            return
        results.append(measured(int(found[1]), found[2] or "H200"))
        if not results[-1]["commit"].startswith(found[3]):
            yield f"column {title!r}: measured of {results[-1]['commit']}"
    for label, *cells in rows:
        name, _, tokens = label.rpartition("; ")
        if name not in ROWS:
            yield f"row {label!r}: expected one of {', '.join(ROWS)}"
            continue
        for cell, result in zip(cells, results, strict=True):
            row = row_of(result, ROWS[name], int(tokens))
            expected = [row[key] for key in ("fused_ms", "ratio", "plain_ratio") if key in row]
            figures = re.fullmatch(r"(\d+\.\d+) \((\d+\.\d+(?:, \d+\.\d+)?)\)", cell)
            printed = [figures[1], *figures[2].split(", ")] if figures else []
            if len(printed) != len(expected) or any(map(differs, printed, expected)):
                yield f"row {label!r}: {cell}, measured {expected}"
    one = re.search(r"One token of Qwen3 takes (\d\.\d+) ms on one GPU", section(readme))
    if one is None or differs(one[1], row_of(measured(1), "qwen3-30b", 1)["fused_ms"]):
        yield f"one token: {one and one[0]}"


def test_every_figure_of_readme_is_measured():
    header, *rows = table(README)
    assert len(header) >= 2 and len(rows) >= 6
    assert list(faults(README)) == []


def numbers() -> list[tuple[int, int]]:
    """The places in README (begin, end) of its table's figures, of the columns' commits, and of the rows' tokens."""
    begin = README.index(section(README))
    lines = [each for each in re.finditer(r"^\|.*$", section(README), re.MULTILINE) if set(each[0]) - set("| -")]
    pattern = r"(?<=\()[0-9a-f]{7}(?=\))|\d+\.\d+(?!-)(?= \(|\)|, \d)|(?<=; )\d+"
    return [
        (begin + line.start() + each.start(), begin + line.start() + each.end())
        for line in lines
        for each in re.finditer(pattern, line[0])
    ]


def test_any_other_figure_is_caught():
    places = numbers()
    header, *rows = table(README)
    columns = len(header) - 1
    assert len(places) == columns + len(rows) * (1 + 3 * columns)  # tokens; ms and two ratios per column
    for start, end in places:
        last = README[end - 1]
        other = README[: end - 1] + ("1" if last == "0" else "0") + README[end:]
        if ";" in README[start - 2 : start]:  # other tokens were not measured
            with pytest.raises(ValueError, match="unpack"):
                list(faults(other))
        else:
            assert len(list(faults(other))) == 1, README[start - 30 : end]


def test_another_time_of_one_token_is_caught():
    assert len(list(faults(README.replace("Qwen3 takes 0.03 ms", "Qwen3 takes 0.05 ms")))) == 1


OTHERS = {
    "PyTorch, operator by operator": "pytorch",
    "Transformers, `grouped_mm`": "transformers_grouped",
    "torchtitan": "torchtitan",
}
"""The baselines in README's first table, by the names that they have there."""


def first_table(readme: str) -> Iterator[tuple[str, str, float]]:
    """For each figure of the first table: what it is of, the figure, and the measured value. The figures are FlashMoE's
    milliseconds (as measured beside PyTorch), and each baseline's time divided by FlashMoE's time beside it."""
    head, *rows = table("## How fast" + readme[readme.index("| | FlashMoE |") : readme.index("**What it cannot do")])
    measured_points = json.loads((RESULTS / "bench_baselines" / "h200x1.json").read_text())["points"]
    points = {point["name"]: point["samples"] for point in measured_points if "samples" in point}

    def median(shape: str, baseline: str, call: str) -> float:
        return statistics.median(points[f"{shape} 8192, {baseline} x1"][call]["busy"])

    for label, ms, *ratios in rows:
        shape = {"Qwen3-30B-A3B": "qwen3-30b", "Mixtral-8x7B": "mixtral"}[label.partition(",")[0]]
        yield f"{label}, ms", ms.removesuffix(" ms"), median(shape, "pytorch", "flashmoe")
        for title, ratio in zip(head[2:], ratios, strict=True):
            name = OTHERS[title]
            yield f"{label}, {name}", ratio, median(shape, name, name) / median(shape, name, "flashmoe")


def test_readme_begins_with_what_was_measured():
    said = list(first_table(README))
    assert len(said) == 2 * (1 + len(OTHERS))
    assert [(what, printed, value) for what, printed, value in said if differs(printed, value)] == []
    other = README.replace("| 1.14 ms | 2.84 |", "| 1.14 ms | 2.85 |")
    assert sum(differs(printed, value) for _, printed, value in first_table(other)) == 1


FILES = sorted(RESULTS.rglob("*.json"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(RESULTS).as_posix())
def test_results_lie_by_suite_and_machine(path):
    """A result lies in the folder of its suite and is named after its machine. An earlier run's file also has the run's
    commit in its name."""
    result = json.loads(path.read_text())
    suite = path.relative_to(RESULTS).parts[0]
    device, _, gpus = result["device"].partition(" x")
    usual = result_path(suite, device, int(gpus or suite != "cpu_overhead"))
    stem, _, commit = path.stem.partition(f"{usual.stem}-")
    assert path.parent == usual.parent
    if path != usual:
        assert stem == "" and re.fullmatch(r"[0-9a-f]{7}(-\d+)?", commit) and result["commit"].startswith(commit[:7])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(RESULTS).as_posix())
def test_results_name_no_folder_of_a_machine(path):
    """Results, with the commands that made them, have no path in /root, /home, /tmp or /work, so that the commands can
    be typed on any machine."""
    assert re.findall(r"(?<![\w.:/])/(?:root|home|tmp|work)/[^\s\"]*", path.read_text()) == []


def texts() -> Iterator[str]:
    yield from (path.read_text() for path in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
    yield from (path.read_text() for path in (ROOT / "python").rglob("*.md"))


def test_files_that_are_cited_are_there_and_all_others_too():
    pattern = r"\b([a-z0-9_]+/[a-z0-9-]+x\d+(?:-[0-9a-f]{7}(?:-\d+)?)?\.json)"
    cited = {name for text in texts() for name in re.findall(pattern, text)}
    # No page takes figures from records of test runs, compilations and wheels. Other tests check these
    # (test_evidence.py, test_instance_records.py, test_release.py).
    uncited = ("tests", "integrations", "integrations_training", "nightly", "cuda_instances", "release")
    files = [path for path in FILES if path.parent.name not in uncited]
    # README cites the files of its table by the table's columns, not by their names.
    cited |= {"fused_gpu/h200x1.json", "fused_group/h200x2.json", "fused_group/h200x4.json"}
    assert cited == {path.relative_to(RESULTS).as_posix() for path in files}
