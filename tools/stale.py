"""Prints which GPU tests are to be run again, why, and how many minutes of a GPU this takes. No GPU is needed.

python tools/stale.py
"""

from __future__ import annotations

from gpu_evidence.collect import collected
from gpu_evidence.digests import Tree
from gpu_evidence.plan import Shard, shards, units
from gpu_evidence.records import PLACES, Evidence, read


def said(planned: list[Shard]) -> list[str]:
    """A line for each shard, and one for each file in it."""
    lines = []
    for number, shard in enumerate(planned, 1):
        lines.append(f"shard {number}, {PLACES[shard.place].title}: {shard.seconds / 60:.1f} minutes")
        lines += [f"  {unit.file}: {unit.why} ({unit.seconds:.0f} s)" for unit in shard.units]
    return lines


def main() -> None:
    evidence = Evidence(collected(), read(), Tree())
    planned = shards(units(evidence))
    there = sum(len(tests) for files in evidence.collected.values() for tests in files.values())
    stale = sum(len(unit.tests) for shard in planned for unit in shard.units)
    minutes = sum(shard.seconds for shard in planned) / 60
    print("\n".join(said(planned)))
    print(f"GPU tests to run again: {stale} of {there}, in {len(planned)} shards, {minutes:.0f} minutes")


if __name__ == "__main__":
    main()
