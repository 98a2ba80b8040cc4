"""Baselines beside FlashMoE's layer: on the same inputs, in the same processes, with the same timers.

Each baseline is a file here. It says what it needs (`NEEDS`), and makes a call [T, H] for a layer that it can compute
(`call`), from the tensors of `Layer`. Its result is checked as FlashMoE's is; a baseline that fails the check has no
time. `TABLE` also lists baselines that could not be made here, and why.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, TypeVar

from ..layer import Layer
from ..run import Call, Run

Result = TypeVar("Result")

MODULES = (
    *("pytorch", "pytorch_graph", "transformers_grouped", "transformers_batched"),
    *("torchtitan", "megatron", "deepspeed", "liger", "liger_cute", "vllm", "sonicmoe", "deepep"),
)
"""All baselines, in the order in which they are timed."""


def module(name: str) -> ModuleType:
    """The baseline's module, which has ``NEEDS`` and ``call``."""
    return importlib.import_module(f"{__name__}.{name}")


def of_layer(layer: Layer, names: tuple[str, ...] = MODULES) -> tuple[dict[str, Call], dict[str, str]]:
    """Calls by name, each checked, and why the others are absent. All ranks agree, since all look at the same facts."""
    calls: dict[str, Call] = {}
    absent: dict[str, str] = {}
    for name in names:
        baseline = module(name)
        if reason := baseline.NEEDS.lacks(layer.run, layer.sizes):
            absent[name] = reason
            continue
        first, absent[name] = tried(layer.run, partial(_first, baseline, layer))
        if first is None:
            continue
        call, y = first
        error = layer.run.worst(layer.error(y))
        # They may have one rounding more than ours: that of weighted rows as they are added.
        if not error <= 2 * layer.bound:
            absent[name] = f"voided: expected an error of at most {2 * layer.bound:g}, got {error:g}"
            continue
        del absent[name]
        calls[name] = call
    return calls, absent


def _first(baseline: ModuleType, layer: Layer) -> tuple[Call, Any]:
    call = baseline.call(layer)
    return call, call(0)


def tried(run: Run, attempt: Callable[[], Result]) -> tuple[Result | None, str]:
    """What another package's code returns; or None, and why it fails. If it fails on any rank, all ranks return None. A
    rank that waits for a failed one is killed together with the point."""
    try:
        result, reason = attempt(), ""
    except Exception as problem:  # of any type: it is no fault of this run
        said = str(problem).splitlines()
        result, reason = None, f"{type(problem).__name__}: {said[0][:200] if said else ''}"
    if run.worst(float(result is None)):
        return None, reason or "it failed on another rank"
    return result, ""


def floors(layer: Layer) -> dict[str, Any]:
    """The layer's bare GEMMs, on ready rows that are spread over the experts at random. With several ranks also the
    bare exchange of one row for each (token, k), there and back."""
    from ..floors import exchange, floor_call

    sizes, run = layer.sizes, layer.run
    rows = sizes.tokens * sizes.top_k
    calls: dict[str, Any] = {}
    if sizes.dtype == "bfloat16" or run.small:  # PyTorch's grouped GEMM has no other type on a GPU
        calls["gemms"] = floor_call(rows, sizes.hidden, sizes.intermediate, len(layer.own), layer.w1, layer.w2)
    if run.ranks > 1:
        one_way = exchange(rows, sizes.hidden, run.device, layer.w1.dtype)
        calls["exchange"] = lambda i: (one_way(i), one_way(i))
    return calls


TABLE = (
    ("GEMMs alone", "`floors`", "PyTorch's grouped GEMMs on ready rows"),
    ("exchange alone", "`floors`", "NCCL's all-to-all there and back; gloo's on CPUs"),
    ("PyTorch and NCCL", "`pytorch`", "has run on one GPU, and with gloo on CPUs; its gradients, on CPUs alone"),
    ("the same as a CUDA graph", "`pytorch_graph`", "has run on one GPU"),
    ("Transformers, grouped_mm", "`transformers_grouped`", "has run on one GPU and on CPUs; one rank, gated experts"),
    (
        "Transformers, batched_mm",
        "`transformers_batched`",
        "has run on one GPU and on CPUs; one rank, gated experts, small batches",
    ),
    ("torchtitan", "`torchtitan`", "has run on one GPU; one rank, gated experts"),
    ("Megatron-Core", "`megatron`", "has run on one GPU; without Transformer Engine: experts one after the other"),
    ("DeepSpeed-MoE", "`deepspeed`", "has run on one GPU; one rank: experts one after the other"),
    (
        "Liger-Kernel",
        "`liger`",
        "has run on one GPU, untuned: no figures yet; its first call of a shape tries 20 of its 104 configurations",
    ),
    ("LigerCute", "`liger_cute`", "written by reading its source, not run; one rank: it shares NVSHMEM with nobody"),
    ("vLLM, fused_experts", "`vllm`", "written by reading its source, not run; one rank, gated experts"),
    ("SonicMoE", "`sonicmoe`", "written by reading its source, not run; one rank, gated experts"),
    ("DeepEP", "`deepep`", "written by reading its source, not run; several ranks"),
    ("Tutel", "-", "absent: built from source; its API was not tried"),
    ("FasterMoE", "-", "absent: built from source; its API was not tried"),
    ("COMET (flux)", "-", "absent: built from source, for several GPUs; its API was not tried"),
)
"""Rows of the page: the baselines that exist, and why others are absent."""
