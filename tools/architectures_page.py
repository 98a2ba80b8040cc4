"""Writes a table into docs/models.md from the record of a run of tests/test_every_architecture.py.

python tools/architectures_page.py [PAGE]
"""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "models.md"
RECORDS = ROOT / "benchmarks" / "results" / "architectures"

BEGIN = "<!-- made by tools/architectures_page.py -->\n"
END = "<!-- end of what tools/architectures_page.py makes -->\n"
HEAD = "| folder in `transformers.models` | experts | by the name | by `fuse` |\n|---|---|---|---|\n"


def record() -> Path:
    """The path of the record. Its folder has only this one."""
    (path,) = RECORDS.glob("*.json")
    return path


def with_table(page: str) -> str:
    """The page, with the table of the record between the two marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + table(record()) + END + after


def table(path: Path) -> str:
    record = json.loads(path.read_text())
    models = record["models"]
    right = {name: each for name, each in models.items() if "by name" in each or "fused" in each}
    of_name = [each["by name"] for each in right.values() if "by name" in each]
    of_fuse = [each["fused"] for each in right.values() if "fused" in each]
    worst = [max(each[what] for each in of_name + of_fuse) for what in ("logits", "gradients")]
    said = (
        f"Transformers {record['transformers']} has {len(models)} modeling files with experts. FlashMoE computes "
        f"{len(right)} of these models: {len(of_name)} by the name, {len(of_fuse)} by `fuse`. The other "
        f"{len(models) - len(right)} are refused by name. The largest difference of logits is {worst[0]:.0e} of the "
        f"largest logit, and the largest difference of gradients is {worst[1]:.0e} of the model's largest gradient. "
        f"The record of the run is `benchmarks/results/{path.parent.name}/{path.name}`."
    )
    return f"{textwrap.fill(said, 140)}\n\n{HEAD}" + "".join(row(*each) for each in models.items())


def row(folder: str, said: dict[str, Any]) -> str:
    by_name = "right" if "by name" in said else f"refused: {refused(said['refused'])}"
    return f"| `{folder}` | {', '.join(said['experts'])} | {by_name} | {'right' if 'fused' in said else '-'} |\n"


def refused(message: str) -> str:
    """The attributes or classes that the lines of a refusal's message name."""
    names = [line.partition(":")[0] for line in message.splitlines()]
    return ", ".join(f"`{each}`" for each in names)


def main() -> None:
    page = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE
    page.write_text(with_table(page.read_text()))


if __name__ == "__main__":
    main()
