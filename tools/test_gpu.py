"""Runs the GPU tests whose last run is not of today's sources, and leaves a record of each shard.

    python tools/test_gpu.py [--minutes M] [FILE ...]

tools/stale.py prints what would run, and why. If there are several GPUs, tests that need one GPU run on all of them at
once. If a run is stopped, the next run continues with what is left. Tests that need more GPUs than there are stay
stale, and are named at the end.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from flashmoe.bench.origin import commit_option
from gpu_evidence.collect import collected
from gpu_evidence.digests import Tree, differing
from gpu_evidence.plan import shards, units
from gpu_evidence.records import PLACES, RESULTS, Evidence, read
from gpu_evidence.session import Session
from stale import said


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="of tests/gpu; without any: all")
    parser.add_argument("--place", choices=PLACES, help="without: wherever there are GPUs enough")
    parser.add_argument("--minutes", type=float, default=24 * 60.0, help="begin nothing that would end later")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder for records")
    commit_option(parser)
    args = parser.parse_args()
    deadline = time.monotonic() + 60 * args.minutes
    if other := differing():
        print(f"the installed package is not of these sources, install it again: {other}", file=sys.stderr)
        return 1
    evidence = Evidence(collected(), read(), Tree())
    with tempfile.TemporaryDirectory(prefix="flashmoe-tests-") as work:
        session = Session(evidence, args.out, args.commit, deadline, Path(work))
        wanted = [
            unit
            for unit in units(evidence)
            if (not args.files or unit.file in args.files) and args.place in (None, unit.place)
        ]
        here = [unit for unit in wanted if PLACES[unit.place].gpus <= len(session.gpus)]
        planned = shards(here)
        print("\n".join(said(planned)), flush=True)
        session.run(planned)
    for unit in wanted:
        if unit not in here:
            print(f"not run, {PLACES[unit.place].gpus} GPUs needed, {len(session.gpus)} here: {unit.file}")
    for each in session.failed:
        print(f"failed: {each}")
    return 1 if session.failed else 0


if __name__ == "__main__":
    sys.exit(main())
