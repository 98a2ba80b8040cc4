"""Runs the tests of random programs and calls, more of them than CI has time for, and writes the outcome to a file.

    python benchmarks/random_tests.py programs calls

`programs` (tests/test_transformers_programs.py: 1,000 of them) use the installed release of Transformers. `calls`
(tests/test_refused_calls.py: 10,000) are of groups of ranks on the CPU engine; some calls are refused by a rank, others
have rows of NaN, or rows that no expert may have. Outcomes that the file already has stay there if they are of the same
sources, and of the other tests or another release of Transformers.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import pathlib
import re
import subprocess
import sys
import time
from typing import Any

from flashmoe.bench.origin import ROOT, commit_option, cpu_model, digest_of, result_path, write
from harness import described_on_cpu

SOURCES = ("include", "csrc", "python")
TESTS = {
    "programs": ("tests/test_transformers_programs.py", "", "FLASHMOE_PROGRAMS", 1000),
    "calls": ("tests/test_refused_calls.py", "random", "FLASHMOE_REFUSED_CALLS", 10_000),
}
"""The file, which of its tests run (pytest's -k), the environment variable that sets how many programs or calls there
are, and this number."""


def run(name: str) -> dict[str, Any]:
    """Runs the tests `name`, and returns their outcome. If a test fails, prints what it printed and ends Python."""
    file, chosen, variable, number = TESTS[name]
    start = time.monotonic()
    tests = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file, "-k", chosen],
        cwd=ROOT,
        env={**os.environ, variable: str(number)},
        capture_output=True,
        text=True,
        check=False,
    )
    outcomes = {what: int(count) for count, what in re.findall(r"(\d+) (passed|failed|skipped|error)", tests.stdout)}
    if tests.returncode != 0 or set(outcomes) != {"passed"}:
        sys.exit(tests.stdout[-4000:] + tests.stderr[-1000:])
    found = {"tests": file, "number": number, **outcomes, "seconds": round(time.monotonic() - start)}
    if name == "programs":
        found |= {each: importlib.metadata.version(each) for each in ("transformers", "torch")}
    return found


def kind(run: dict[str, Any]) -> tuple[str, str | None]:
    """What a run tested. Of two runs with the same value, only the later one stays in the file."""
    return run["tests"], run.get("transformers")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", nargs="+", choices=TESTS)
    parser.add_argument("--out", type=pathlib.Path, default=result_path("random_tests", cpu_model(), 0))
    commit_option(parser)
    args = parser.parse_args()
    result = {**described_on_cpu(args.commit), "sources": list(SOURCES), "sources_sha256": digest_of(ROOT, *SOURCES)}
    before = json.loads(args.out.read_text()) if args.out.exists() else {}
    runs = before["runs"] if before.get("sources_sha256") == result["sources_sha256"] else []
    for which in args.which:
        found = run(which)
        runs = [*(each for each in runs if kind(each) != kind(found)), found]
        print(found, flush=True)
        write(args.out, {**result, "runs": runs})


if __name__ == "__main__":
    main()
