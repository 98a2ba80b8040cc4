"""``flashmoe compile``: the CUDA kernels, compiled before they are needed."""

from __future__ import annotations

from itertools import product
from typing import Annotated

import typer
from rich.table import Table

from ..errors import InvalidArgument
from ..jit import TRANSPOSED, Compiled, Variant, compile_kernel, variants_alone
from ..spec import ACTIVATIONS, DTYPES
from . import options
from .console import console


def command(
    dtype: options.Dtype = "bfloat16",
    activation: Annotated[str, typer.Option(help=", ".join(ACTIVATIONS) + ".")] = "swiglu",
    all_: Annotated[bool, typer.Option("--all", help="Every dtype with every activation.")] = False,
    trace: Annotated[bool, typer.Option("--trace", help="Kernels that record a trace.")] = False,
    exact: Annotated[bool, typer.Option("--exact", help="float32 without the tensor cores.")] = False,
    transposed: Annotated[bool, typer.Option("--transposed", help="For transposed weights, of 16-bit types.")] = False,
) -> int:
    """Compile CUDA kernels into the cache, so that no call has to wait until its kernels are compiled.

    Needs nvcc but no GPU. Otherwise the first call of a dtype and activation compiles two kernels: one for any number
    of tokens, and one for a few. The cache is $FLASHMOE_CACHE, $XDG_CACHE_HOME/flashmoe or ~/.cache/flashmoe.
    """
    for name, value, known in (("dtype", dtype, DTYPES), ("activation", activation, ACTIVATIONS)):
        if value not in known:
            raise InvalidArgument(f"--{name}: expected one of {', '.join(known)}, got {value!r}")
    if exact and not all_ and dtype != "float32":
        raise InvalidArgument(f"--exact: expected --dtype float32 with it, got {dtype}")
    if transposed and not all_ and dtype not in TRANSPOSED:
        raise InvalidArgument(f"--transposed: expected --dtype {' or '.join(TRANSPOSED)} with it, got {dtype}")
    wanted = product(DTYPES, ACTIVATIONS) if all_ else [(dtype, activation)]
    rows: list[tuple[Variant, Compiled]] = []
    for each_dtype, each_activation in wanted:
        variants = variants_alone(
            each_dtype,
            each_activation,
            trace=trace,
            exact=exact and each_dtype == "float32",
            transposed=transposed and each_dtype in TRANSPOSED,
        )
        rows += [(variant, compile_kernel(variant)) for variant in variants]
    _show(rows)
    return 0


def _show(rows: list[tuple[Variant, Compiled]]) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("kernel", no_wrap=True)
    table.add_column("seconds", justify="right", no_wrap=True)
    table.add_column("file", overflow="fold")
    for variant, compiled in rows:
        seconds = "cached" if compiled.seconds is None else f"{compiled.seconds:.1f}"
        table.add_row(variant.title, seconds, str(compiled.path))
    console.print(table)
