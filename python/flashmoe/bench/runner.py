"""Runs suites until all points are measured, or the budget is spent."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import jit
from ..errors import FlashMoEError
from ..launch import RankFailed
from .group import Group
from .plan import Machine, Point, Suite, Voided
from .run import Run
from .shapes import SHAPES
from .store import Results

REPEATS = {"cuda": 32, "cpu": 8}


@dataclass
class Progress:
    """How far a run has come."""

    suite: Suite
    point: Point
    measured: dict[str, Any] | None
    """The point's results; None: the point is about to be measured."""
    done: int
    points: int
    """The points of this run, without those that were measured before."""


@dataclass
class Outcome:
    measured: int = 0
    known: int = 0
    """Points that the files already had, measured from the same sources."""
    left: int = 0
    """Points for which the budget left no time."""
    wrong: list[str] = field(default_factory=list)
    """For each point that failed: suite, point and why. A check or a rank failed."""
    files: list[Path] = field(default_factory=list)


def run_suites(
    suites: list[Suite],
    machine: Machine,
    device: str,
    *,
    out: Path,
    commit: str,
    budget: float | None,
    tell: Callable[[Progress], None],
    ranks: Iterable[int] = (),
) -> Outcome:
    """Measures the points that the files in `out` do not have from the present sources. Points are sorted by number of
    ranks, because a group of ranks is kept for the next point if that has as many. No point begins after `budget`
    seconds. `ranks`: measure only points with these numbers of ranks; default: all."""
    begin = time.monotonic()
    files = {suite.name: Results(out, suite, machine, device, commit) for suite in suites}
    outcome = Outcome(files=[each.path for each in files.values()])
    todo = []
    for suite, point in in_order(suites, machine, ranks):
        if files[suite.name].has(point):
            outcome.known += 1
        else:
            todo.append((suite, point))
    if machine.engine == "cuda":
        compile_kernels(todo)
    group: Group | None = None
    try:
        for done, (suite, point) in enumerate(todo):
            if budget is not None and time.monotonic() - begin >= budget:
                outcome.left = len(todo) - done
                break
            tell(Progress(suite, point, None, done, len(todo)))
            if group is not None and group.ranks != point.ranks:
                group.close()
                group = None
            start = time.monotonic()
            try:
                if group is None and point.ranks and not point.kills:
                    group = Group(machine.engine, point.ranks)
                measured = measure(machine, group, suite, point)
            except (FlashMoEError, OSError, subprocess.SubprocessError) as error:
                measured = failure(error)
                outcome.wrong.append(f"{suite.name}, {point.name}: {measured.get('voided') or measured['failed']}")
                if group is not None:  # its ranks may still hold memory or wait for one another
                    group.close()
                    group = None
            measured["seconds"] = round(time.monotonic() - start, 2)
            files[suite.name].put(point, measured)
            outcome.measured += 1
            tell(Progress(suite, point, measured, done + 1, len(todo)))
    finally:
        if group is not None:
            group.close()
    return outcome


def compile_kernels(todo: list[tuple[Suite, Point]]) -> None:
    """Compiles the kernels of all points in parallel, before the ranks start: a rank that compiles a kernel during a
    point makes the other ranks wait."""
    wanted = dict.fromkeys(variant for suite, point in todo for variant in kernels_of(suite, point))

    def compile_one(variant: jit.Variant) -> None:
        with suppress(FlashMoEError):  # the point that needs the kernel reports the error
            jit.compile_kernel(variant)

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        list(pool.map(compile_one, wanted))


def kernels_of(suite: Suite, point: Point) -> list[jit.Variant]:
    """The kernels of a point's layer; none for a point without ranks."""
    if not point.ranks:
        return []
    sizes = point.sizes
    shape = SHAPES.get(sizes.get("shape"))
    of = {"dtype": sizes.get("dtype", "bfloat16"), "exact": sizes.get("exact", False)}
    of["activation"] = shape[4] if shape else sizes.get("activation", "swiglu")
    found = []
    for each in suite.variants:
        trains = not {"keeps", "backward"}.isdisjoint(each)
        if point.ranks == 1 and not trains:
            found += jit.variants_alone(**of, **each)
        else:
            found.append(jit.Variant(**of, **each, group=trains and point.ranks > 1))
    return found


def in_order(suites: list[Suite], machine: Machine, ranks: Iterable[int] = ()) -> list[tuple[Suite, Point]]:
    """All points, by number of ranks. Points with as many ranks begin with the first of each suite, then come the
    second ones, and so on, so that each suite has some points if the budget ends early."""
    points = [(i, suite, point) for suite in suites for i, point in enumerate(_by_ranks(suite, machine, ranks))]
    return [(suite, point) for _, suite, point in sorted(points, key=lambda each: (each[2].ranks, each[0]))]


def _by_ranks(suite: Suite, machine: Machine, ranks: Iterable[int]) -> list[Point]:
    chosen = [point for point in suite.points(machine) if not ranks or point.ranks in ranks]
    return sorted(chosen, key=lambda point: point.ranks)


def measure(machine: Machine, group: Group | None, suite: Suite, point: Point) -> dict[str, Any]:
    repeats = REPEATS[machine.engine]
    if group is not None and not point.kills:
        return group.measure(suite.name, point, repeats, suite.seconds)
    return suite.measure(Run(machine.engine, 0, 1, repeats), **point.sizes)


def failure(error: Exception) -> dict[str, Any]:
    """The entry of a point that has no figures because of `error`."""
    errors = list(error.errors.values()) if isinstance(error, RankFailed) else [error]
    for each in errors:
        if isinstance(each, Voided):
            return {"voided": str(each)}
    first = next((each for each in errors if not isinstance(each, FlashMoEError)), errors[0])
    return {"failed": f"{type(first).__name__}: {' '.join(str(first).split())[:400]}"}
