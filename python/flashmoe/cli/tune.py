"""``flashmoe tune``: the profile of one shape on this machine's GPUs, measured and stored."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from .. import _ffi, models
from ..errors import FlashMoEError, InvalidArgument
from ..spec import (
    ACTIVATIONS,
    DTYPES,
    MAX_CUDA_EXPERTS,
    MAX_CUDA_RANKS,
    MAX_CUDA_TOKENS,
    MAX_CUDA_TOP_K,
    MAX_WIDTH,
    RETURN_MODES,
)
from ..tuning import profiles
from ..tuning.knobs import PROFILE
from ..tuning.search import Candidate, Outcome, most_timings, search
from . import device, options
from .bench import CALLS, ROUNDS, Bench
from .console import console, working
from .memory import sizes_of


def command(
    model: options.PublishedModel = None,
    hidden: options.Hidden = None,
    intermediate: options.Intermediate = None,
    experts: options.Experts = None,
    top_k: options.TopK = None,
    activation: options.Activation = None,
    ranks: Annotated[int, typer.Option(help="Ranks in the group, a GPU each.")] = 1,
    tokens: options.Tokens = 4096,
    dtype: options.Dtype = "bfloat16",
) -> int:
    """Find the fastest order of tasks for a shape on this machine's GPUs, and store it for the contexts to come.

    Sizes come from --model, or from --hidden, --intermediate, --experts and --top-k; given both, the latter replace the
    model's. Weights and tokens are random, experts about equally loaded. The fastest order is stored if it beats the
    built-in order by more than the spread of the times, else the built-in order is. The file is $FLASHMOE_PROFILES, or
    profiles.json in the folder of compiled kernels.
    """
    sizes = sizes_of(model, hidden=hidden, intermediate=intermediate, experts=experts, top_k=top_k)
    activation = activation or (models.find(model).activation if model else "swiglu")
    _check(sizes, ranks=ranks, tokens=tokens, dtype=dtype, activation=activation)
    _require_gpus(ranks)
    profiles.store()  # a file that cannot be read or written must be known before anything is measured
    name = _ffi.library().cuda_device_name(0)
    setting = profiles.Setting(device=name, ranks=ranks, dtype=dtype, tokens=tokens, **sizes)
    knobs = _knobs(ranks)
    console.print(f"{setting}, {activation}", style="bold")
    console.print(f"at most {most_timings(knobs)} candidates, {ROUNDS * CALLS} calls each, slowest rank of each call")
    with working("measuring"), Bench(setting, activation) as bench:
        outcome = search(knobs, bench.measure)
    _show(outcome, _stored(setting, activation, outcome))
    return 0


def _check(sizes: dict[str, int], *, ranks: int, tokens: int, dtype: str, activation: str) -> None:
    """Refuse sizes and types that the CUDA engine does not support, before any rank is started."""
    bounds = {
        "hidden": (sizes["hidden"], MAX_WIDTH),
        "intermediate": (sizes["intermediate"], MAX_WIDTH),
        "experts": (sizes["experts"], MAX_CUDA_EXPERTS),
        "top-k": (sizes["top_k"], min(sizes["experts"], MAX_CUDA_TOP_K)),
        "ranks": (ranks, MAX_CUDA_RANKS),
        "tokens": (tokens, MAX_CUDA_TOKENS),
    }
    for name, (number, most) in bounds.items():
        if not 1 <= number <= most:
            raise InvalidArgument(f"--{name}: expected an integer in [1, {most}], got {number}")
    for name in ("hidden", "intermediate"):
        if sizes[name] % 8:
            raise InvalidArgument(f"--{name}: expected a multiple of 8, got {sizes[name]}")
    for name, value, known in (("dtype", dtype, DTYPES), ("activation", activation, ACTIVATIONS)):
        if value not in known:
            raise InvalidArgument(f"--{name}: expected one of {', '.join(known)}, got {value!r}")


def _require_gpus(ranks: int) -> None:
    """Raises if this machine cannot run so many ranks on GPUs."""
    if lacking := device.missing(ranks):
        raise FlashMoEError(f"flashmoe tune: expected {lacking}; see flashmoe info")


def _knobs(ranks: int) -> dict[str, tuple[int | str, ...]]:
    """The values of each knob that are tried. Knobs that matter only among several ranks are left out for one rank."""
    knobs: dict[str, tuple[int | str, ...]] = {
        name: knob.tried for name, knob in PROFILE.items() if ranks > 1 or knob.alone
    }
    return {"return_mode": RETURN_MODES, **knobs} if ranks > 1 else knobs


def _stored(setting: profiles.Setting, activation: str, outcome: Outcome) -> Path:
    """Stores what the search has found, and returns the path of the file."""
    return profiles.store(
        profiles.Record(
            setting=setting.in_bucket(),
            activation=activation,
            profile=outcome.best,
            milliseconds=outcome.timing.median,
            built_in_milliseconds=outcome.built_in.median,
        )
    )


def _show(outcome: Outcome, file: Path) -> None:
    table = Table(box=None, pad_edge=False)
    for name in ("step", "candidate"):
        table.add_column(name)
    for name in ("median ms", "spread ms", "of built-in"):
        table.add_column(name, justify="right", no_wrap=True)
    for step in outcome.steps:
        built_in = step.timings[0].median
        for i, (candidate, timing) in enumerate(zip(step.candidates, step.timings, strict=True)):
            figures = (f"{timing.median:.4f}", f"{timing.spread:.4f}", f"{timing.median / built_in:.3f}")
            table.add_row("" if i else step.title, _described(candidate), *figures)
        table.add_section()
    console.print(table)
    console.print()
    console.print(f"stored: {_described(outcome.best)}, in {file}", soft_wrap=True)


def _described(candidate: Candidate) -> str:
    return ", ".join(f"{name} {value}" for name, value in candidate.items()) or "built-in"
