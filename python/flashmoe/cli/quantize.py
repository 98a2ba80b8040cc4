"""``flashmoe quantize``: writes a checkpoint with its experts quantised."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..quantize import quantize_checkpoint
from ..spec import FP8


def command(
    source: Annotated[Path, typer.Argument(help="The folder of a checkpoint in safetensors.")],
    target: Annotated[Path, typer.Argument(help="A folder that does not exist yet, or is empty.")],
    dtype: Annotated[str, typer.Option(help="float8_e4m3fn, or mxfp4 for gpt-oss.")] = FP8,
) -> None:
    """Write a checkpoint whose experts are in FP8 or MXFP4, and everything else as it is.

    Takes about the memory of the largest tensor. docs/fp8.md and docs/mxfp4.md say what is written.
    """
    quantize_checkpoint(source, target, dtype)
    print(f"{target}: the experts of {source} in {dtype}")
