"""``flashmoe memory``: what a context would allocate, term by term, and whether it fits."""

from __future__ import annotations

from typing import Annotated

import typer

from .. import models
from ..contexts import memory
from ..contexts.limits import engine_return_mode
from ..contexts.memory import MemoryPlan
from ..errors import HeapError, InvalidArgument
from ..placement import roomy
from ..spec import ACTIVATIONS, bounded
from . import options
from .console import console, print_error
from .render import show_comparisons, show_memory, show_memory_terms, show_training_costs


def command(
    context: typer.Context,
    model: options.PublishedModel = None,
    hidden: options.Hidden = None,
    intermediate: options.Intermediate = None,
    experts: options.Experts = None,
    top_k: options.TopK = None,
    shared_intermediate: Annotated[int, typer.Option(help="Intermediate size Is of a shared expert; 0: none.")] = 0,
    engine: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    ranks: options.Ranks = 4,
    machines: Annotated[int, typer.Option(help="Machines on which these are, about as many on each.")] = 1,
    copies: Annotated[
        int, typer.Option(help="Copies of experts besides the E, as flashmoe balance places them; weights not counted.")
    ] = 0,
    tokens: options.Tokens = 4096,
    dtype: options.Dtype = "bfloat16",
    weight_dtype: Annotated[
        str | None, typer.Option(help="Of the experts' weights: dtype, float8_e4m3fn or mxfp4.  [default: dtype]")
    ] = None,
    return_: Annotated[
        str, typer.Option("--return", help="direct, reduced or auto: room for both; cuda: the one it takes untuned.")
    ] = "auto",
    capacity_factor: Annotated[
        float | None, typer.Option(help="Largest capacity factor of a call, which then each has.  [default: dropless]")
    ] = None,
    processors: Annotated[
        int | None,
        typer.Option(help="Threads of a rank, or multiprocessors of its GPU.  [default: its share of the cores; 132]"),
    ] = None,
    transport: Annotated[
        str, typer.Option(help="How rows get to other GPUs: auto (memory is mapped) or rdma.")
    ] = "auto",
    budget: Annotated[
        str | None,
        typer.Option(
            help="Bytes that heap and workspace of one rank may take, such as 2GiB.  [default: with the CPU engine, "
            "all ranks must fit into this machine's memory and swap, and their heaps into the free space of /dev/shm]"
        ),
    ] = None,
    training: Annotated[
        bool, typer.Option("--training", help="Also what a layer's gradients need, and what each way to have it costs.")
    ] = False,
    redispatch: Annotated[
        bool,
        typer.Option("--redispatch", help="With room for backward passes that send tokens again."),
    ] = False,
    activation: Annotated[str, typer.Option(help=f"With --training: {', '.join(ACTIVATIONS)}.")] = "swiglu",
    table: Annotated[
        bool, typer.Option("--table", help="FlashDMoE's table of memory, and the CUDA engine's figures beside it.")
    ] = False,
) -> int:
    """Show whether a context's memory fits, then every term of it, and refuse (exit status 1) what does not fit.

    Sizes come from --model, or from --hidden, --intermediate, --experts and --top-k; given both, the latter
    replace the model's. With --table, no other option but --ranks is allowed.
    """
    if table:
        _refuse_all_but(context, "table", "ranks")
        show_comparisons(memory.compare_published(ranks), ranks)
        return 0
    sizes = sizes_of(model, hidden=hidden, intermediate=intermediate, experts=experts, top_k=top_k)
    limit = None if budget is None else memory.parse_bytes(budget)
    asked = sizes | {
        "engine": engine,
        "ranks": ranks,
        "max_tokens": tokens,
        "dtype": dtype,
        "return_mode": return_,
        "processors": processors,
        "capacity_factor": capacity_factor,
        "transport": transport,
        "shared_intermediate": shared_intermediate,
        "weight_dtype": weight_dtype,
        "placement": roomy(sizes["experts"], ranks, copies) if copies else None,
        "activation": activation,
        "machines": _machines_of(ranks, machines),
    }
    plan = memory.plan_memory(**asked, training=training, redispatch=redispatch)
    further = {"copies": copies, "shared_intermediate": shared_intermediate}
    shown = sizes | {name: number for name, number in further.items() if number}
    described = ", ".join(f"{name.replace('_', ' ')} {size:,}" for name, size in shown.items())
    mode = engine_return_mode(engine, return_, ranks, sizes["top_k"], sizes["intermediate"], transport == "rdma")
    drops = "dropless" if capacity_factor is None else f"capacity factor {capacity_factor:g}"
    types = dtype if weight_dtype in (None, dtype) else f"{dtype}, weights {weight_dtype}"
    show_memory(plan, f"{described}, {types}, return {mode}, {drops}, {engine} engine")
    fits = _show_whether_it_fits(plan, engine, limit)
    show_memory_terms(plan)
    if training:
        show_training_costs(memory.training_costs(**asked))
    return 0 if fits else 1


def _show_whether_it_fits(plan: MemoryPlan, engine: str, limit: int | None) -> bool:
    if engine == "cuda" and limit is None:
        console.print("not compared with what a GPU has: its context does that, or --budget here")
        return True
    try:
        memory.check_fits(plan, limit)
        if limit is None:
            memory.check_machine(plan)
    except HeapError as error:
        print_error(str(error))
        return False
    console.print("fits", style="bold green")
    return True


def _machines_of(ranks: int, machines: int) -> list[int]:
    """The machine of each rank, if the ranks are spread evenly over `machines` machines. One machine: empty."""
    if machines == 1:
        return []
    bounded("machines", machines, 1, ranks)
    return [rank * machines // ranks for rank in range(ranks)]


def _refuse_all_but(context: typer.Context, *names: str) -> None:
    """Raises `InvalidArgument` if the command line has options other than `names`."""
    for name in context.params:
        if name not in names and context.get_parameter_source(name).name == "COMMANDLINE":
            option = "--" + name.strip("_").replace("_", "-")
            raise InvalidArgument(f"--{names[0]}: expected no other option but --{names[1]}, got {option}")


def sizes_of(model: str | None, **given: int | None) -> dict[str, int]:
    """The four sizes: the model's, replaced by those given. Raises `InvalidArgument` if one is missing."""
    shape = models.find(model) if model else None
    sizes = {name: getattr(shape, name, None) if size is None else size for name, size in given.items()}
    missing = [f"--{name.replace('_', '-')}" for name, size in sizes.items() if size is None]
    if missing:
        raise InvalidArgument(f"sizes: expected --model, or all four sizes; missing {', '.join(missing)}")
    return sizes
