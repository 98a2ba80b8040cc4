"""Makes docs/evidence.md from the list of promises and the records of runs.

python tools/evidence_page.py [PAGE]
"""

from __future__ import annotations

import sys
from pathlib import Path

from gpu_evidence.page import Page
from gpu_evidence.records import RESULTS, read

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    page = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "evidence.md"
    page.write_text(Page(RESULTS.parent, read()).text())


if __name__ == "__main__":
    main()
