"""``flashmoe run``: one layer, ranks of this machine or a GPU, one traced call, checked against the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from .. import models
from ..errors import InvalidArgument
from ..launch import run_ranks
from ..placement import local_experts
from ..report import CallReport, summarize
from ..trace import write_perfetto, write_timeline
from . import device, render
from .verify import Verdict, verify, verify_sample
from .workload import Request, Workload, file_workload, random_workload, shipped_workload

ENGINES = ("auto", "cpu", "cuda")


def command(
    engine: Annotated[
        str,
        typer.Option(help="cpu, cuda (one GPU), or auto: cuda where there is a GPU for it and --ranks is not above 1."),
    ] = "auto",
    ranks: Annotated[
        int | None, typer.Option(help="Ranks; each is a process of this machine.  [default: 4; 1 with cuda]")
    ] = None,
    layer: Annotated[Path | None, typer.Option(help="A .safetensors file or a checkpoint folder.")] = None,
    model: Annotated[str | None, typer.Option(help="A random layer of this published shape.")] = None,
    scale: Annotated[float | None, typer.Option(help="Factor on the model's H and I.  [default: 1]")] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Tokens per rank.  [default: 512, or the shipped 2048 split evenly]")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.  [default: the layer's]")] = None,
    return_: Annotated[str, typer.Option("--return", help="direct, reduced or auto.")] = "auto",
    seed: Annotated[int | None, typer.Option(help="Of random weights and tokens.  [default: 0]")] = None,
    skew: Annotated[
        float | None,
        typer.Option(help="The expert of popularity rank j gets tokens as j^-skew.  [default: 0, balanced]"),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for timeline.png and trace.json.")] = Path("flashmoe-run"),
) -> int:
    """Run one MoE layer, over several ranks or on a GPU, and check the result.

    Without --layer or --model: the small trained layer that the package ships, on 2048 hidden states that
    really reached it, with the uneven routing they have. One warm-up call, then one traced call. Exit status
    0 if result and routing are within the rounding error of the float64 reference, 1 if not.
    """
    _check_engine(engine, ranks, return_)
    if layer is not None and model is not None:
        raise InvalidArgument("--layer, --model: expected one of them, got both")
    for name, number in (("ranks", ranks), ("tokens", tokens)):
        if number is not None and number < 1:
            raise InvalidArgument(f"--{name}: expected at least 1, got {number}")
    _refuse_idle_options(layer, model, scale=scale, skew=skew, seed=seed)
    _make_folder(out)

    engine = _chosen_engine(engine, ranks, return_)
    ranks = ranks or (1 if engine == "cuda" else 4)
    request = Request(ranks, tokens, dtype, return_, engine)
    if model is not None:
        shape = models.scaled(models.find(model), 1.0 if scale is None else scale)
        workload = random_workload(shape, request, seed or 0, skew or 0.0)
    elif layer is not None:
        workload = file_workload(layer, request, seed or 0)
    else:
        workload = shipped_workload(request)
    render.show_workload(workload)

    who = "GPU" if engine == "cuda" else render.count(ranks, "rank")
    with render.working(f"{who}: warm-up and traced call"):
        results, reports = _call(workload)
    group = summarize(reports, workload.layer.experts)
    render.show_expert_load(group, workload.placement)
    render.show_ranks(reports, group)
    with render.working("timeline and trace"):
        files = _write_traces(out, workload, reports)
    render.show_files(files)
    with render.working("float64 reference"):
        verdict = _verify(workload, results, reports)
    render.show_verdict(verdict)
    return 0 if verdict.passed else 1


def _check_engine(engine: str, ranks: int | None, return_mode: str) -> None:
    """Refuse engines that there are not, and what the CUDA engine does not do."""
    if engine not in ENGINES:
        raise InvalidArgument(f"--engine: expected one of {', '.join(ENGINES)}, got {engine!r}")
    if engine == "cuda" and ranks not in (None, 1):
        raise InvalidArgument(f"--ranks: expected 1 with --engine cuda, which runs on one GPU so far, got {ranks}")
    if engine == "cuda" and return_mode == "reduced":
        raise InvalidArgument("--return: expected direct or auto with --engine cuda, got reduced")


def _chosen_engine(engine: str, ranks: int | None, return_mode: str) -> str:
    """``cpu`` or ``cuda``; refused is ``cuda`` where it cannot run."""
    if engine == "auto":
        possible = ranks in (None, 1) and return_mode != "reduced"
        return "cuda" if possible and device.missing() is None else "cpu"
    device.require(engine)
    return engine


def _refuse_idle_options(layer: Path | None, model: str | None, **given: float | None) -> None:
    """Raise `InvalidArgument` for an option that would have no effect on this workload."""
    needs = {"scale": model, "skew": model, "seed": model or layer}
    for name, value in given.items():
        if value is not None and needs[name] is None:
            raise InvalidArgument(f"--{name}: has an effect only with --model{' or --layer' * (name == 'seed')}")


def _make_folder(folder: Path) -> None:
    """Create the output folder before any work is done for it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgument(f"--out: cannot make the folder {folder}: {error.strerror}") from error


def _call(workload: Workload) -> tuple[list[np.ndarray], list[CallReport]]:
    """Run the workload: every rank's result [T_p, H] and report of the traced call."""
    if workload.engine == "cuda":
        y, report = device.call(workload)
        return [y], [report]
    layer = workload.layer
    sizes = {name: size for name, size in workload.limits.items() if name != "ranks"}
    sizes["placement"] = workload.placement
    routing = {
        "router": layer.router,
        "top_k": layer.top_k,
        "renormalize": layer.renormalize,
        "activation": layer.activation,
    }
    per_rank = []
    for rank, x in enumerate(workload.tokens):
        local = local_experts(workload.placement, rank)
        per_rank.append((sizes, x, layer.gate_up_proj[local], layer.down_proj[local], routing))
    answers = run_ranks(len(workload.tokens), call_on_rank, per_rank)
    return [y for y, _ in answers], [CallReport.from_dict(report) for _, report in answers]


def call_on_rank(
    rank: int,
    ranks: int,
    name: str,
    sizes: dict[str, Any],
    x: np.ndarray,
    gate_up_proj: np.ndarray,
    down_proj: np.ndarray,
    routing: dict[str, Any],
) -> tuple[np.ndarray, dict[str, Any]]:
    """In a rank's process: one warm-up call, one traced call; its result and report."""
    from .. import Context, moe  # loads the engine's library, which only the ranks need

    with Context(rank=rank, ranks=ranks, name=name, **sizes) as context:
        moe(context, x, gate_up_proj, down_proj, **routing)
        y = moe(context, x, gate_up_proj, down_proj, trace=True, **routing)
        return y, context.last_call.to_dict()


def _write_traces(folder: Path, workload: Workload, reports: list[CallReport]) -> list[Path]:
    """Write timeline.png and trace.json; their paths."""
    layer, counts = workload.layer, [report.tokens for report in reports]
    ranks = render.count(len(reports), "rank")
    title = (
        f"{workload.title}: H {layer.hidden}, I {layer.intermediate}, E {layer.experts}, K {layer.top_k}, "
        f"{layer.dtype.name}; {ranks}, {sum(counts)} tokens, {reports[0].return_mode} return"
    )
    events = [report.events for report in reports]
    timeline, trace = folder / "timeline.png", folder / "trace.json"
    write_timeline(timeline, events, title)
    write_perfetto(trace, events)
    return [timeline, trace]


def _verify(workload: Workload, results: list[np.ndarray], reports: list[CallReport]) -> Verdict:
    """Check the results of all ranks together."""
    layer = workload.layer
    gpu = workload.engine == "cuda"
    if isinstance(layer, device.DeviceLayer):
        return verify_sample(
            device.to_host(layer.router),
            lambda experts: device.some_experts(layer, experts),
            layer.gate_up_proj[0].numel() + layer.down_proj[0].numel(),
            workload.tokens[0],
            results[0],
            reports[0].topk_ids,
            gpu=gpu,
        )
    return verify(
        layer,
        np.concatenate(workload.tokens),
        np.concatenate(results),
        np.concatenate([report.topk_ids for report in reports]),
        placement=workload.placement,
        return_mode=reports[0].return_mode,
        gpu=gpu,
    )
