"""Makes docs/performance.md and its pictures from the files of results.

python tools/performance_page.py docs/performance.md benchmarks/results
"""

from __future__ import annotations

import argparse
from pathlib import Path

from performance import report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("results", type=Path, help="where `flashmoe bench --out` left its files")
    args = parser.parse_args()
    print(f"{args.page}: {len(report.write(args.results, args.page))} pictures")


if __name__ == "__main__":
    main()
