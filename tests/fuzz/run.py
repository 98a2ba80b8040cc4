"""Fuzz the code that reads files and tensors of strangers.

    python tests/fuzz/run.py --target NAME [--seconds N] [--seed N] [--corpus DIR] [--out FILE.json] [--commit COMMIT]
    python tests/fuzz/run.py --target NAME --replay [FILE ...]
    python tests/fuzz/run.py --target NAME --merge DIR

Begins with the inputs of tests/fuzz/corpus/NAME, and adds to DIR new inputs that reach more of the code; without DIR
they are deleted at the end. With `--replay` the files, or all of the corpus, are run once each. With `--merge` the
corpus gets those inputs of DIR that reach more of the code than it does. Exits with 1 if there is a finding: an input
that is neither accepted nor refused with an error of the package. The input is left in a folder, and the command that
repeats it is printed. All but `--replay` needs atheris (`pip install '.[fuzz]'`).
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(HERE.parent)]
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy loads its BLAS
from flashmoe.bench.origin import commit_option, cpu_model, write  # noqa: E402

CORPUS = HERE / "corpus"
TARGETS = ("header", "index", "config", "profiles", "dlpack")
SECONDS_OF_AN_INPUT = 20
"""An input that takes longer counts as one that hangs."""
MOST_RESIDENT = 1024
"""The most MiB that the process may have, so that a leak of memory that adds up over the inputs is found."""
MOST_BYTES = 2**15
"""The most bytes of an input."""


def folder_in_memory() -> tempfile.TemporaryDirectory:
    """A folder for a target's files. It is made here, since the target's process may end before it removes a folder."""
    return tempfile.TemporaryDirectory(
        prefix="flashmoe-fuzz-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    )


def replay(name: str, files: Iterable[Path]) -> list[Path]:
    """Run the target once for each file, and print what is found. Returns the files with findings. The target runs in
    this process: a file that crashes it ends the replay, and is the last one whose name was printed."""
    import targets

    bad = []
    with targets.made(name) as target:
        for path in files:
            print(f"{name}: {path.name}", flush=True)
            signal.alarm(SECONDS_OF_AN_INPUT)
            try:
                targets.checked(target, path.read_bytes())
            except Exception:
                traceback.print_exc(limit=-4, chain=False)
                bad.append(path)
            finally:
                signal.alarm(0)
    return bad


def child(name: str, running: Path, *options: str | Path) -> subprocess.CompletedProcess:
    """Run the target under libFuzzer, and return the process when it has ended."""
    command = [sys.executable, HERE / "child.py", name, running, f"-timeout={SECONDS_OF_AN_INPUT}"]
    command += [f"-rss_limit_mb={MOST_RESIDENT}", f"-max_len={MOST_BYTES}", *options]
    with folder_in_memory() as folder:
        environment = os.environ | {"TMPDIR": folder}
        return subprocess.run(command, stderr=subprocess.PIPE, text=True, errors="replace", env=environment)


def fuzz(name: str, seconds: int, seed: int, found: Path, findings: Path) -> dict:
    """Fuzz for `seconds`, and return a record of it. New inputs go to `found`, inputs with findings to `findings`."""
    committed = CORPUS / name
    running = findings / "crash-running"
    start = time.monotonic()
    options = [f"-max_total_time={seconds}", f"-seed={seed}", f"-artifact_prefix={findings}/", "-print_final_stats=1"]
    done = child(name, running, *options, found, committed)
    spent = time.monotonic() - start
    reached = re.findall(r"cov: (\d+) ft: (\d+) corp: (\d+)", done.stderr)
    runs = re.search(r"stat::number_of_executed_units: (\d+)", done.stderr)
    if done.returncode == 0 or len(list(findings.iterdir())) > 1:  # no finding, or libFuzzer has stored the input
        running.unlink(missing_ok=True)
    bad = sorted(path.name for path in findings.iterdir())
    if done.returncode or bad or not reached or not runs:
        print(done.stderr[-8000:], file=sys.stderr)
    return {
        "target": name,
        "seconds": round(spent, 1),
        "seed": seed,
        "executions": int(runs[1]) if runs else 0,
        "edges": int(reached[-1][0]) if reached else 0,
        "features": int(reached[-1][1]) if reached else 0,
        "inputs": int(reached[-1][2]) if reached else 0,
        "committed_inputs": len(list(committed.iterdir())),
        "status": done.returncode,
        "findings": bad,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, choices=TARGETS)
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--seed", type=int, default=random.randrange(1, 2**31), help="default: another each time")
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--replay", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--merge", type=Path, metavar="DIR")
    parser.add_argument("--out", type=Path)
    commit_option(parser)
    args = parser.parse_args()
    if args.replay is not None:
        with folder_in_memory() as tempfile.tempdir:
            return 1 if replay(args.target, args.replay or sorted((CORPUS / args.target).iterdir())) else 0
    if args.seconds < 1:  # to libFuzzer, 0 means without end
        parser.error(f"--seconds: expected 1 or more, got {args.seconds}")
    findings = Path(tempfile.mkdtemp(prefix=f"flashmoe-findings-{args.target}-"))
    if args.merge is not None:
        done = child(args.target, findings / "running", "-merge=1", CORPUS / args.target, args.merge)
        print(done.stderr.splitlines()[-1])
        shutil.rmtree(findings)
        return done.returncode
    with tempfile.TemporaryDirectory() as forgotten:
        found = args.corpus or Path(forgotten)
        found.mkdir(parents=True, exist_ok=True)
        outcome = fuzz(args.target, args.seconds, args.seed, found, findings)
    print(", ".join(f"{name} {value}" for name, value in outcome.items()))
    if args.out is not None:
        write(args.out, {"device": f"{cpu_model()} x0", "commit": args.commit, **outcome})
    if outcome["findings"]:
        command = f"python {Path(__file__).relative_to(ROOT)} --target {args.target} --replay"
        print("\n".join(f"to repeat: {command} {findings / name}" for name in outcome["findings"]))
    else:
        findings.rmdir()
    return 1 if outcome["findings"] or outcome["status"] or not outcome["executions"] else 0


if __name__ == "__main__":
    sys.exit(main())
