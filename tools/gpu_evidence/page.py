"""Makes docs/evidence.md: each promise of the pages, the tests that show it, and where these tests ran last."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .promises import TOPICS, Promise
from .records import PLACES, Ran, last_runs

HEAD = """\
# Evidence

What README and these pages promise, which tests show it, and where the tests ran last. `python tools/evidence_page.py`
makes this page from the list of promises and the records of runs.

Tests without a mark need no GPU and run with each change. Behind a **GPU** test stand the places where it ran last, and
a digest of all that it was of there: its file and what that imports, the package's Python, the host's C++ and the
kernels that were loaded; the [last table](#gpu-tests-by-file) has the devices, days and commits. `make stale` says
which digests are no longer today's, and how many minutes it takes to run what is of them; `make test-gpu` runs that.
Tests in a **framework** run in an environment of its own (`make test-integrations`), those of a **release** with
`make wheel`; of them the commits stand here. Speed is measured, not tested: [performance](performance.md),
[measured](measured.md).
"""
FOLDERS = {
    "tests/integrations/training": ("framework", "integrations_training"),
    "tests/integrations": ("framework", "integrations"),
    "tests/release": ("release", "release"),
}


class Page:
    """The page, made from records. `results`: the folder of results, whose other records the page also cites."""

    def __init__(self, results: Path, records: list[dict[str, Any]]) -> None:
        self._commits = {
            folder: sorted({json.loads(path.read_text())["commit"][:7] for path in (results / name).glob("*.json")})
            for folder, (_, name) in FOLDERS.items()
        }
        self._runs: dict[tuple[str, str], dict[str, Ran]] = {}
        for (place, file, test), run in last_runs(records).items():
            self._runs.setdefault((file, test.partition("[")[0]), {})[place] = run

    def text(self) -> str:
        parts = [HEAD]
        unshown = [promise for topic in TOPICS for promise in topic.promises if not promise.tests]
        for topic in TOPICS:
            lines = [self._row(promise) for promise in topic.promises if promise.tests]
            parts.append("\n".join([f"## {topic.title}\n", "| Promise | Shown by |", "| --- | --- |", *lines]) + "\n")
        lines = [f"- {promise.says} ({link(promise.page)})" for promise in unshown]
        parts.append("## What no test shows\n\n" + "\n".join(lines) + "\n")
        parts.append("## GPU tests by file\n\n" + "\n".join(self._files()) + "\n")
        return "\n".join(parts)

    def _row(self, promise: Promise) -> str:
        shown = "<br>".join(f"{test_link(test)}{self._where(test)}" for test in promise.tests)
        return f"| {promise.says} ({link(promise.page)}) | {shown} |"

    def _where(self, test: str) -> str:
        """Where a test ran last; empty for a test that needs no GPU and no environment of its own."""
        file, _, name = test.partition("::")
        if file.startswith("tests/gpu/"):
            runs: dict[str, Ran] = {}
            for (of, function), found in self._runs.items():
                if of == file and name in ("", function):
                    runs |= found
            return ": **GPU**, " + ("; ".join(said(place, runs[place]) for place in PLACES if place in runs) or "never")
        for folder, (kind, _) in FOLDERS.items():
            if file.startswith(folder):
                return f": **{kind}**, {', '.join(self._commits[folder]) or 'never'}"
        return ""

    def _files(self) -> Iterator[str]:
        yield "| File | Where | Passed | Failed | Skipped | Seconds | Device, day, commit, digest |"
        yield "| --- | --- | --- | --- | --- | --- | --- |"
        reasons: Counter[str] = Counter()
        for file in sorted({file for file, _ in self._runs}):
            for place, (_, _, _, title) in PLACES.items():
                runs = [found[place] for (of, _), found in self._runs.items() if of == file and place in found]
                if not runs:
                    continue
                for run in runs:
                    reasons.update(run.skipped)
                counts = [sum(run.passed for run in runs), sum(run.failed for run in runs)]
                counts.append(sum(sum(run.skipped.values()) for run in runs))
                last = max(runs, key=lambda run: run.ended)
                figures = " | ".join(map(str, [*counts, round(last.start + sum(run.seconds for run in runs))]))
                yield f"| {test_link(file)} | {title} | {figures} | {stamp(last)} |"
        yield ""
        yield "Why tests were skipped:"
        yield ""
        yield from (f"- {reason}: {count}" for reason, count in sorted(reasons.items()))


def said(place: str, run: Ran) -> str:
    return f"{PLACES[place].title} `{digest(run)}`" + (f", {run.failed} failed" if run.failed else "")


def stamp(run: Ran) -> str:
    device = run.device.removeprefix("NVIDIA ")
    return f"{device}, {run.ended[:10]}, {run.commit[:7]}, `{digest(run)}`"


def digest(run: Ran) -> str:
    """A digest of the sources and kernels that a run tested."""
    return hashlib.sha256(json.dumps([run.sources, run.kernels], sort_keys=True).encode()).hexdigest()[:8]


def link(page: str) -> str:
    """A link from a page of docs/ to another page. README gets no link: on the site it lies at another place than on
    GitHub, so no link would work on both."""
    return "README" if page == "README.md" else f"[{Path(page).stem}]({page.removeprefix('docs/')})"


def test_link(test: str) -> str:
    return f"`{test.removeprefix('tests/')}`"
