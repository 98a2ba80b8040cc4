"""How much of a GPU's memory a context takes, beside what the papers publish."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...contexts.memory import compare_published, plan_memory
from ..plan import Machine, Point, Suite
from ..run import Run

COMET = {  # table 3: MB of NVSHMEM's memory, by M, the tokens of all ranks
    "mixtral-8x7b": {4096: 32, 8192: 64},
    "qwen2-moe": {4096: 16, 8192: 32},
    "phi-3.5-moe": {4096: 32, 8192: 64},
}
SIZES = {"mixtral-8x7b": (4096, 14336, 8, 2), "qwen2-moe": (2048, 1408, 64, 4), "phi-3.5-moe": (4096, 6400, 16, 2)}
RANKS = 8
"""The ranks of COMET's machine."""


def points(machine: Machine) -> Iterator[Point]:
    for ranks in (4, 8):
        yield Point(f"table 6.2 x{ranks}", 0, {"table": "flashdmoe", "ranks": ranks})
    yield Point(f"table 3 x{RANKS}", 0, {"table": "comet", "ranks": RANKS})


def measure(run: Run, table: str, ranks: int) -> dict[str, Any]:
    """Computes a rank's bytes from the same tables of fields by which the engine allocates its memory."""
    rows = flashdmoe(ranks) if table == "flashdmoe" else comet(ranks)
    # A row is checked against the plan's terms: their sum must be the plan's number of bytes.
    error = max(abs(row.pop("terms_bytes") - row["bytes"]) for row in rows)
    return {"check": run.check(error, 0.0, "the plan, beside the sum of its terms"), "values": {"rows": rows}}


def flashdmoe(ranks: int) -> list[dict[str, Any]]:
    return [
        {
            "tokens": each.max_tokens,
            "experts": each.experts,
            "published_bytes": each.published_bytes,
            "bytes": each.bounded.total_bytes,
            "dropless_bytes": each.dropless.total_bytes,
            "terms_bytes": sum(term.bytes for term in each.bounded.terms),
        }
        for each in compare_published(ranks)
    ]


def comet(ranks: int) -> list[dict[str, Any]]:
    """A row for each entry of `COMET`. The bytes are those of the heap only, which has room for any routing."""
    rows = []
    for name, published in COMET.items():
        hidden, inner, experts, top_k = SIZES[name]
        sizes = {"hidden": hidden, "intermediate": inner, "experts": experts, "top_k": top_k}
        for in_all, mb in published.items():
            plan = plan_memory(engine="cuda", ranks=ranks, max_tokens=in_all // ranks, **sizes)
            terms = sum(term.bytes for term in plan.terms if term.region == "heap")
            row = {"model": name, "tokens_in_all": in_all, "published_bytes": mb * 2**20, "bytes": plan.heap_bytes}
            rows.append(row | {"terms_bytes": terms})
    return rows


SUITE = Suite(
    "memory",
    "bytes of a rank, beside those published; needs no GPU",
    ("FlashDMoE, table 6.2", "COMET, table 3"),
    points,
    measure,
)
