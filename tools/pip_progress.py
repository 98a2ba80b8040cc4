"""Run pip install, and show what it is doing.

    python tools/pip_progress.py LOG ARGUMENT ...

On a terminal, one line shows what is fetched and how much has been compiled, and is written over. Elsewhere, a line is
printed each time a further quarter has been compiled. LOG gets everything that pip prints. If pip fails, the end of LOG
is printed. The exit status is pip's.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

FETCHED = re.compile(r"\s*Collecting ([\w.-]+)")
COMPILED = re.compile(r"\s*\[(\d+)/(\d+)\] (?:Building|Linking)")
WIDTH = 60
"""The characters of the line on a terminal. Longer texts are cut."""
LAST_LINES = 100
"""How many lines of the log are printed if pip fails."""


def step(line: str) -> str | None:
    """The text to show for a line of pip's output; None: show nothing."""
    if fetched := FETCHED.match(line):
        return f"fetching {fetched[1]}"
    if compiled := COMPILED.match(line):
        return f"compiling: {compiled[1]} of {compiled[2]}"
    return "installing" if line.startswith("Installing collected packages") else None


def is_fourth(line: str) -> bool:
    """Whether, with this line of pip's output, a further quarter has been compiled."""
    compiled = COMPILED.match(line)
    if compiled is None:
        return False
    done, all_of_them = map(int, compiled.groups())
    return done * 4 // all_of_them != (done - 1) * 4 // all_of_them


def main(log: Path, arguments: list[str]) -> int:
    pip = [sys.executable, "-m", "pip", "install", "--verbose", "--disable-pip-version-check", *arguments]
    terminal = sys.stdout.isatty()
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    with log.open("w") as kept, subprocess.Popen(pip, **options) as running:
        for line in running.stdout:
            kept.write(line)
            shown = step(line)
            if shown and terminal:
                print(f"\r    {shown[:WIDTH]:{WIDTH}}", end="", flush=True)
            elif is_fourth(line):
                print(f"    {shown}", flush=True)
    if terminal:
        print(f"\r    {'':{WIDTH}}\r", end="", flush=True)
    if running.returncode:
        print("\n".join(log.read_text().splitlines()[-LAST_LINES:]), file=sys.stderr)
    return running.returncode


if __name__ == "__main__":
    try:
        sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
    except KeyboardInterrupt:  # pip got the same signal, and ends by itself
        sys.exit(130)
