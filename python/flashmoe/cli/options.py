"""Options that several commands have, each defined once with its type and help. Every command sets its own defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..spec import ACTIVATIONS

# The four sizes of a layer.
PublishedModel = Annotated[str | None, typer.Option(help="Shape of a published model, such as qwen3-30b-a3b.")]
Hidden = Annotated[int | None, typer.Option(help="Hidden size H.")]
Intermediate = Annotated[int | None, typer.Option(help="Intermediate size I of one expert.")]
Experts = Annotated[int | None, typer.Option(help="Experts E in all.")]
TopK = Annotated[int | None, typer.Option(help="Experts per token K.")]

# Further properties of a layer, and of its group.
Activation = Annotated[str | None, typer.Option(help=", ".join(ACTIVATIONS) + ".  [default: the model's, else swiglu]")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16.")]
Ranks = Annotated[int, typer.Option(help="Ranks in the group.")]
Tokens = Annotated[int, typer.Option(help="Tokens per rank.")]

# Which layer a command calls, and how.
RandomModel = Annotated[str | None, typer.Option(help="A random layer of this published shape.")]
Checkpoint = Annotated[Path | None, typer.Option(help="A .safetensors file or a checkpoint folder.")]
LayerDtype = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.  [default: the layer's]")]
Return = Annotated[str, typer.Option("--return", help="direct, reduced or auto.")]
