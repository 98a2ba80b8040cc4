"""``flashmoe run``: a layer over the ranks of a group, with one traced call that is checked against the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from .. import models
from ..checkpoint import MoELayer
from ..errors import FlashMoEError, InvalidArgument
from ..groups import launcher
from ..launch import run_ranks
from ..placement import local_experts
from ..report import CallReport, summarize
from ..system import drawing
from ..trace import Event, write_perfetto, write_timeline
from . import device, launched, options, render
from .console import console, count, working
from .picture import picture_of
from .verify import verify
from .workload import Request, Workload, file_workload, random_workload, shipped_workload

ENGINES = ("auto", "cpu", "cuda")


def command(
    engine: Annotated[
        str,
        typer.Option(help="cpu, cuda (a GPU for each rank), or auto: cuda where there are GPUs for that."),
    ] = "auto",
    ranks: Annotated[
        int | None, typer.Option(help="Ranks; each is a process of this machine.  [default: 4; 1 with cuda]")
    ] = None,
    checkpoint: options.Checkpoint = None,
    layer: Annotated[
        int | None, typer.Option(help="Of the checkpoint: a decoder layer's number.  [default: the first with experts]")
    ] = None,
    model: options.RandomModel = None,
    scale: Annotated[float | None, typer.Option(help="Factor on the model's H and I.  [default: 1]")] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Tokens per rank.  [default: 512, or the shipped 2048 split evenly]")
    ] = None,
    dtype: options.LayerDtype = None,
    return_: options.Return = "auto",
    seed: Annotated[int | None, typer.Option(help="Of random weights and tokens.  [default: 0]")] = None,
    skew: Annotated[
        float | None,
        typer.Option(help="The expert of popularity rank j gets tokens as j^-skew.  [default: 0, balanced]"),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for timeline.png and trace.json.")] = Path("flashmoe-run"),
) -> int:
    """Run one MoE layer, over several ranks or GPUs, and check the result.

    If a launcher has started it (torchrun --no-python, on one machine or several), each process is a rank, and rank 0
    reports. Without --checkpoint or --model, it runs the small trained layer that the package ships, on 2048 hidden
    states that were recorded as inputs of this layer, so that routing is as uneven as with real text. After calls to
    warm up, one call is traced. The picture shows that call, or a simulated one if the ranks have less than two cores
    each, and says which. Exit status 0 if result and routing are within the rounding error of the float64 reference, 1
    if not.
    """
    if checkpoint is not None and model is not None:
        raise InvalidArgument("--checkpoint, --model: expected one of them, got both")
    for name, number, least in (("ranks", ranks, 1), ("tokens", tokens, 1), ("seed", seed, 0), ("layer", layer, 0)):
        if number is not None and number < least:
            raise InvalidArgument(f"--{name}: expected at least {least}, got {number}")
    _refuse_idle_options(checkpoint, model, scale=scale, skew=skew, seed=seed, layer=layer)
    place = launched.place_of(engine, ranks)
    if place is not None:
        engine, ranks = "cpu", place.ranks
    engine = chosen_engine(engine, ranks or 1)

    ranks = ranks or (1 if engine == "cuda" else 4)
    request = Request(ranks, tokens, dtype, return_, engine)
    if model is not None:
        shape = models.scaled(models.find(model), 1.0 if scale is None else scale)
        workload = random_workload(shape, request, seed or 0, skew or 0.0)
    elif checkpoint is not None:
        workload = file_workload(checkpoint, layer, request, seed or 0)
    else:
        workload = shipped_workload(request)
    if place is not None and place.rank != 0:
        launched.call(workload, place, call_on_rank)
        return 0
    _make_folder(out)
    render.show_workload(workload)

    who = count(ranks, "GPU" if engine == "cuda" else "rank")
    with working(f"{who}: warm-up and traced call"):
        results, reports = _call(workload) if place is None else launched.call(workload, place, call_on_rank)
    group = summarize(reports, workload.layer.experts)
    render.show_expert_load(group, workload.placement)
    render.show_ranks(reports, group)
    with working("timeline and trace"):
        files = _write_traces(out, workload, reports)
    render.show_files(files)
    if why := drawing.missing():
        console.print(f"no timeline.png: {why}", soft_wrap=True, markup=False)
    with working("float64 reference"):
        verdict = verify(
            workload.layer,
            np.concatenate(workload.tokens),
            np.concatenate(results),
            np.concatenate([report.topk_ids for report in reports]),
            tokens=[len(each) for each in workload.tokens],
            placement=workload.placement,
            return_mode=reports[0].return_mode,
            gpu=engine == "cuda",
        )
    render.show_verdict(verdict)
    return 0 if verdict.passed else 1


def chosen_engine(engine: str, ranks: int) -> str:
    """``cpu`` or ``cuda``. Refuses unknown engines, and ``cuda`` if this machine cannot run so many ranks with it."""
    if engine not in ENGINES:
        raise InvalidArgument(f"--engine: expected one of {', '.join(ENGINES)}, got {engine!r}")
    if engine == "auto":
        return "cuda" if device.missing(ranks) is None else "cpu"
    if engine == "cuda":
        device.require(ranks)
    return engine


def _refuse_idle_options(checkpoint: Path | None, model: str | None, **given: float | None) -> None:
    """Raise `InvalidArgument` for an option that would have no effect on this workload."""
    has = {"--model": model, "--checkpoint": checkpoint}
    needs = {"scale": ["--model"], "skew": ["--model"], "seed": list(has), "layer": ["--checkpoint"]}
    for name, value in given.items():
        if value is not None and all(has[each] is None for each in needs[name]):
            raise InvalidArgument(f"--{name}: has an effect only with {' or '.join(needs[name])}")


def _make_folder(folder: Path) -> None:
    """Create the output folder before any work is done for it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgument(f"--out: cannot make the folder {folder}: {error.strerror}") from error


def _call(workload: Workload) -> tuple[list[np.ndarray], list[CallReport]]:
    """Run the workload: every rank's result [T_p, H] and report of the traced call."""
    settings = {**workload.limits, "placement": workload.placement, "engine": workload.engine}
    per_rank = []
    for rank, x in enumerate(workload.tokens):
        local = local_experts(workload.placement, rank)
        per_rank.append((settings, workload.layer.with_experts(local), x))
    answers = run_ranks(len(per_rank), call_on_rank, per_rank)
    return [y for y, _ in answers], [CallReport.from_dict(report) for _, report in answers]


def call_on_rank(
    rank: int,
    ranks: int,
    name: str,
    settings: dict[str, Any],
    layer: MoELayer | device.SeededLayer,
    x: np.ndarray,
) -> tuple[np.ndarray, dict[str, Any]]:
    """In a rank's process: warm-up calls of the layer with the rank's own experts, then a traced one; its result
    [T_p, H] and report."""
    from .. import Context, moe  # loads the engine's library, which only the ranks need

    tensors, settings = device.tensors_of(rank, layer, x, settings)
    with Context(rank=rank, ranks=ranks, name=name, **settings) as context:
        # A GPU's first traced call loads a kernel. Some ranks need longer than others for this and for reading the
        # trace. In the second call the host waits for nothing, so that all ranks enter the third call together.
        for trace in (True, False, True):
            y = moe(context, **tensors, **layer.rule(), trace=trace)
        return device.to_host(y), context.last_call.to_dict()


def from_first_event(events: list[Event]) -> list[Event]:
    """The events of one rank, with times in nanoseconds since its first event. Times of different ranks cannot be
    compared: the clocks of two GPUs may differ by a quarter of a millisecond, those of two machines by any amount."""
    begin = min((event.start_ns for event in events), default=0)
    return [event._replace(start_ns=event.start_ns - begin, end_ns=event.end_ns - begin) for event in events]


def _write_traces(folder: Path, workload: Workload, reports: list[CallReport]) -> dict[Path, str]:
    """Write timeline.png, if matplotlib is installed, and trace.json. Returns what each written file shows.

    Raises `FlashMoEError`, which names the file, if one cannot be written."""
    layer, counts = workload.layer, [report.tokens for report in reports]
    ranks = count(len(reports), "rank")
    title = (
        f"{workload.title}: H {layer.hidden}, I {layer.intermediate}, E {layer.experts}, K {layer.top_k}, "
        f"{layer.dtype.name}; {ranks}, {sum(counts)} tokens, {reports[0].return_mode} return"
    )
    events = [report.events for report in reports]
    if workload.engine == "cuda" or launcher.launched() is not None:
        events = [from_first_event(each) for each in events]
    timeline, trace = folder / "timeline.png", folder / "trace.json"
    written = {}
    try:
        if drawing.missing() is None:
            drawn = picture_of(workload, events, title)
            write_timeline(file := timeline, drawn.events_by_rank, drawn.title)
            written[timeline] = drawn.hint
        write_perfetto(file := trace, events)
        written[trace] = "what your run's ranks did when, for ui.perfetto.dev"
    except OSError as error:
        raise FlashMoEError(f"--out: cannot write {file}: {error.strerror or error}") from error
    return written
