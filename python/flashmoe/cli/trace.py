"""``flashmoe trace``: where each multiprocessor's time goes in a call, as a table and for Perfetto."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from .. import models
from ..checkpoint import MoELayer
from ..errors import InvalidArgument
from ..groups import launcher
from ..quantize import quantize_layer
from ..spec import ACTIVATIONS, FP8, one_of
from ..trace import write_traces
from . import options, render
from .console import count, working
from .memory import sizes_of
from .run import chosen_engine
from .traced import accounts_of, summary, traced
from .workload import Request, Workload, file_workload, random_workload, shipped_workload


def command(
    engine: Annotated[str, typer.Option(help="cpu, cuda, or auto: cuda where there are GPUs for that.")] = "auto",
    ranks: Annotated[int, typer.Option(help="Ranks; each is a process of this machine, with cuda a GPU.")] = 1,
    model: options.RandomModel = None,
    scale: Annotated[float, typer.Option(help="Factor on the model's H and I.")] = 1.0,
    hidden: options.Hidden = None,
    intermediate: options.Intermediate = None,
    experts: options.Experts = None,
    top_k: options.TopK = None,
    activation: options.Activation = None,
    checkpoint: options.Checkpoint = None,
    layer: Annotated[int | None, typer.Option(help="Of the checkpoint: a decoder layer's number.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens per rank.")] = None,
    dtype: options.LayerDtype = None,
    weight_dtype: Annotated[
        str | None, typer.Option(help="float8_e4m3fn: experts in FP8, scales of blocks.  [default: dtype]")
    ] = None,
    return_: options.Return = "auto",
    backward: Annotated[bool, typer.Option("--backward", help="Also the backward pass.")] = False,
    seed: Annotated[int, typer.Option(help="Of random weights and tokens.")] = 0,
    skew: Annotated[float, typer.Option(help="The expert of popularity rank j gets tokens as j^-skew.")] = 0.0,
    pairs: Annotated[int, typer.Option(help="Traced and untraced calls that are timed in turn.")] = 8,
    out: Annotated[Path, typer.Option(help="Folder for trace.json and account.json.")] = Path("flashmoe-trace"),
) -> int:
    """Trace one call of a layer: where each percent of the multiprocessors' time goes.

    Layers are those of flashmoe run: the shipped one, a --model's, a --checkpoint's, or of --hidden, --intermediate,
    --experts and --top-k, which replace the model's. Prints the account of each rank, what no span covers, and how
    much longer traced calls take than others; writes trace.json for ui.perfetto.dev, all ranks by one clock.
    docs/tracing.md says how to read both.
    """
    for name, number, least in (("ranks", ranks, 1), ("tokens", tokens, 1), ("pairs", pairs, 1), ("seed", seed, 0)):
        if number is not None and number < least:
            raise InvalidArgument(f"--{name}: expected at least {least}, got {number}")
    if (place := launcher.launched()) is not None and place.ranks > 1:
        raise InvalidArgument(f"trace: expected to start its ranks itself, got {place.ranks} processes of a launcher")
    sizes = {"hidden": hidden, "intermediate": intermediate, "experts": experts, "top_k": top_k}
    given = [name for name, each in {**sizes, "model": model, "activation": activation}.items() if each is not None]
    if checkpoint is not None and given:
        raise InvalidArgument(f"--checkpoint: expected no other layer, got --{given[0].replace('_', '-')}")
    request = Request(ranks, tokens, dtype, return_, chosen_engine(engine, ranks))
    if checkpoint is not None:
        workload = file_workload(checkpoint, layer, request, seed)
    elif given:
        workload = random_workload(models.scaled(_shape(model, activation, sizes), scale), request, seed, skew)
    else:
        workload = shipped_workload(request)
    if weight_dtype is not None:
        workload = quantised(workload, one_of("--weight-dtype", weight_dtype, (FP8,)))
    if backward and (weight_dtype or workload.limits["weight_dtype"] != workload.limits["dtype"]):
        raise InvalidArgument("--backward: expected weights that are not quantised, got quantised ones")
    out.mkdir(parents=True, exist_ok=True)
    render.show_workload(workload)
    with working(f"{count(ranks, 'GPU' if workload.engine == 'cuda' else 'rank')}: {count(pairs, 'pair')} of calls"):
        of_ranks = traced(workload, backward, pairs)
    told = {"command": " ".join(["flashmoe", *sys.argv[1:]])} | summary(workload, of_ranks)
    for of_call in accounts_of(of_ranks):
        render.show_accounts(of_call)
    render.show_overhead(told["overhead"], told["clock_error_us"])
    trace, account = out / "trace.json", out / "account.json"
    write_traces(trace, [each.traces for each in of_ranks], told)
    account.write_text(json.dumps(told, indent=1) + "\n")
    render.show_files({trace: "for ui.perfetto.dev", account: "the figures above"})
    return 0


def _shape(model: str | None, activation: str | None, sizes: dict[str, int | None]) -> models.ModelShape:
    found = sizes_of(model, **sizes)
    for name, size in found.items():
        if size < 1:
            raise InvalidArgument(f"--{name.replace('_', '-')}: expected at least 1, got {size}")
    shape = models.find(model) if model else models.ModelShape("a random layer", **found)
    return replace(shape, **found, activation=one_of("--activation", activation or shape.activation, ACTIVATIONS))


def quantised(workload: Workload, dtype: str) -> Workload:
    """The workload with its experts in FP8. (Random experts for a GPU are quantised on the GPU, in `traced.py`.)"""
    layer = workload.layer
    if isinstance(layer, MoELayer):
        layer = quantize_layer(layer, dtype=dtype)
    limits = {**workload.limits, "weight_dtype": dtype}
    return replace(workload, layer=layer, limits=limits, notes=[*workload.notes, "experts in FP8, scales of blocks"])
