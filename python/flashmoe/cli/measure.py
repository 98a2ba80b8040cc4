"""``flashmoe bench``: the suites behind docs/performance.md, on this machine."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from flashmoe_layer import install_extra
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table

from ..bench import compare, runner, store
from ..bench.origin import head
from ..bench.plan import Machine, Suite
from ..bench.run import median
from ..bench.suites import SUITES
from ..errors import FlashMoEError, InvalidArgument
from .console import console, count

DEFAULT_OUT = Path("flashmoe-bench")


def command(
    suite: Annotated[
        list[str] | None, typer.Option(help="A suite; may be given several times.  [default: all of them]")
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="Say what suites there are, and end.")] = False,
    engine: Annotated[
        str | None, typer.Option(help="cuda, or cpu: small forms of seconds.  [default: cuda where there is a GPU]")
    ] = None,
    ranks: Annotated[
        list[int] | None, typer.Option(help="Only points of so many ranks; may be given several times.")
    ] = None,
    budget: Annotated[float | None, typer.Option(help="Seconds after which no point is begun.")] = None,
    out: Annotated[Path, typer.Option(help="Where results lie.")] = DEFAULT_OUT,
    commit: Annotated[str, typer.Option(help="Of the sources, where git does not know.")] = "",
    compare_: Annotated[
        tuple[Path, Path] | None,
        typer.Option("--compare", help="Two files of one suite: what differs by more than the spread."),
    ] = None,
) -> int:
    """Measure suites, each a figure or table of FlashDMoE or COMET, or one of our own.

    Points with fewer ranks come first. Among points with as many ranks, the suites take turns in the order in which
    they are named, so that each suite has some figures when the budget ends. Every point is checked before it is timed.
    Points that --out has from the same sources are not measured again, so that a run goes on where the last one
    stopped. Exit status 1: a check or a rank failed.
    """
    if list_:
        _list()
        return 0
    if compare_ is not None:
        return _compare(*compare_)
    if budget is not None and not budget > 0:
        raise InvalidArgument(f"--budget: expected seconds above 0, got {budget:g}")
    machine, device = store.detected(engine)
    suites = _chosen(suite)
    _require(machine, suites if suite else [])
    if unknown := set(ranks or ()) - {point.ranks for each in suites for point in each.points(machine)}:
        raise InvalidArgument(f"--ranks: expected a number of ranks that has points here, got {min(unknown)}")
    commit = commit or head()
    return _measure(suites, machine, device, out, commit, budget, ranks or [])


def _chosen(names: list[str] | None) -> list[Suite]:
    if unknown := [name for name in names or () if name not in SUITES]:
        raise InvalidArgument(f"--suite: expected one of {', '.join(SUITES)}, got {', '.join(unknown)}")
    return [SUITES[name] for name in dict.fromkeys(names or SUITES)]


def _require(machine: Machine, asked: list[Suite]) -> None:
    """Raises if PyTorch is missing, or if a suite that was asked for has no points on this machine."""
    if importlib.util.find_spec("torch") is None:
        raise FlashMoEError(
            "bench: expected PyTorch, whose process groups ranks join, found none; to install: "
            + install_extra("torch")
        )
    if without := [suite.name for suite in asked if not list(suite.points(machine))]:
        several = "several GPUs, or FLASHMOE_SHARE_GPUS=2"
        lacking = (several, "one") if machine.gpus else ("a GPU", "none")
        raise InvalidArgument(f"--engine cuda: expected {lacking[0]} for {', '.join(without)}, found {lacking[1]}")


def _list() -> None:
    table = Table(box=None, pad_edge=False)
    for title in ("suite", "shows", "regenerates"):
        table.add_column(title, overflow="fold")
    for suite in SUITES.values():
        table.add_row(suite.name, suite.shows, "; ".join(suite.figures))
    console.print(table)


def _measure(
    suites: list[Suite],
    machine: Machine,
    device: str,
    out: Path,
    commit: str,
    budget: float | None,
    ranks: list[int],
) -> int:
    gpus = f", {count(machine.gpus, 'GPU')}" if machine.engine == "cuda" else ""
    console.print(f"{device}{gpus}, {machine.engine} engine", style="bold", soft_wrap=True)
    begin = time.monotonic()
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)

        def tell(progress: runner.Progress) -> None:
            what = f"{progress.suite.name}, {progress.point.name}"
            bar.update(task, description=what, completed=progress.done, total=progress.points)
            if progress.measured is not None:
                console.print(f"{what}: {_shown(progress.measured)}", soft_wrap=True, markup=False)

        outcome = runner.run_suites(
            suites, machine, device, out=out, commit=commit, budget=budget, tell=tell, ranks=ranks
        )
    for line in _summary(outcome.files, ranks):
        console.print(line, soft_wrap=True, markup=False)
    seconds = time.monotonic() - begin
    known = f"; {outcome.known} of the same sources were there" if outcome.known else ""
    console.print(f"{count(outcome.measured, 'point')} in {seconds:.0f} s{known}; results: {out}", soft_wrap=True)
    if outcome.left:
        console.print(f"{count(outcome.left, 'point')} left: the same command goes on with them", style="yellow")
    for each in outcome.wrong:
        console.print(f"no figures: {each}", style="red", soft_wrap=True, markup=False)
    return int(bool(outcome.wrong))


def _shown(measured: dict[str, Any]) -> str:
    """The medians of a point, or why it has none."""
    for reason in ("voided", "failed"):
        if reason in measured:
            return f"{reason}: {measured[reason]}"
    parts = [f"{call} {each:.4g}" for call, each in _medians(measured).items()]
    error = f"error {measured['check']['error']:.1e}"
    return f"{', '.join(parts)} ms, {error}" if parts else f"measured, {error}"


def _summary(files: list[Path], ranks: list[int]) -> list[str]:
    """A line for each point that has figures: FlashMoE's time, that time relative to the times of the GEMMs alone and
    of PyTorch, and the point's most telling values."""
    lines = []
    for path in filter(Path.exists, files):
        result = store.read(path)
        points = [point for point in result["points"] if "check" in point]
        medians = {point["name"]: _medians(point) for point in points}
        for point in points:
            if ranks and point["ranks"] not in ranks:
                continue
            figures = point.get("values", {}).get("figures", {})
            parts = [*_beside(medians[point["name"]]), *_scaled(point, medians)]
            if figures:
                parts += [f"{name} {each:.4g}" for name, each in figures.items()]
            elif not parts:
                parts = [f"{name} {each:.4g} ms" for name, each in medians[point["name"]].items()]
            if parts:
                lines.append(f"{result['suite']}, {point['name']} | {'; '.join(parts)}")
    return lines


def _medians(point: dict[str, Any]) -> dict[str, float]:
    return {name: median(timers) for name, timers in point.get("samples", {}).items()}


def _ours(medians: dict[str, float]) -> float | None:
    return next((each for name, each in medians.items() if name.startswith("flashmoe")), None)


def _beside(medians: dict[str, float]) -> list[str]:
    if (ours := _ours(medians)) is None:
        return []
    over = [name for name in ("gemms", "gemms fp8", "pytorch") if name in medians]
    return [f"{ours:.4g} ms", *(f"{ours / medians[name]:.3f} of {name}" for name in over)]


def _scaled(point: dict[str, Any], medians: dict[str, dict[str, float]]) -> list[str]:
    """T(2)/T(R): the time of a call among two ranks, over the time of this call among more ranks with as many tokens
    each; empty if there is no such pair of points."""
    ranks, ours = point["ranks"], _ours(medians[point["name"]])
    two = _ours(medians.get(f"{point['name'].removesuffix(f' x{ranks}')} x2", {}))
    return [f"T(2)/T({ranks}) {two / ours:.3f}"] if ranks > 2 and two and ours else []


def _compare(before: Path, after: Path) -> int:
    found = compare.differences(before, after)
    beyond = [each for each in found if each.beyond_spread]
    table = Table(box=None, pad_edge=False)
    for title in ("point", "call", "timer", "before, ms", "after, ms", "ratio"):
        table.add_column(title, justify="left" if title in ("point", "call", "timer") else "right", overflow="fold")
    for each in sorted(beyond, key=lambda each: each.ratio):
        medians = (f"{median:.4g} ({lower:.4g} to {upper:.4g})" for lower, median, upper in (each.before, each.after))
        table.add_row(each.point, each.call, each.timer, *medians, f"{each.ratio:.3f}")
    if beyond:
        console.print(table)
    console.print(f"{len(beyond)} of {count(len(found), 'time')} differ by more than the spread (middle halves apart)")
    return 0
