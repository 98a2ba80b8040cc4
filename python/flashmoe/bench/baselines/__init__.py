"""Baselines beside FlashMoE's layer: on the same inputs, in the same processes, with the same timers.

Each baseline is a file here. The file says what the baseline needs (`NEEDS`). Its function `call` returns, for a
`Layer`, a function that computes the result [T, H] from the layer's tensors. The result is checked as FlashMoE's is; a
baseline that fails the check has no time. `TABLE` also lists baselines that could not be made here, and why.
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
    """The calls by name, after a check of each, and why the other baselines are absent. All ranks return the same
    names: what a baseline lacks is the same on all ranks, and a baseline that fails on one rank is absent on all."""
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
        # A baseline may round once more than FlashMoE's layer does: when it adds up the weighted rows.
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
    """What `attempt`, another package's code, returns; or None, and why it failed. If it fails on any rank, all ranks
    return None. But if other ranks wait inside `attempt` for the rank that failed, the point's time runs out, and then
    its ranks are killed."""
    try:
        result, reason = attempt(), ""
    except Exception as problem:  # of any type: an error of another package must not end the run
        said = str(problem).splitlines()
        result, reason = None, f"{type(problem).__name__}: {said[0][:200] if said else ''}"
    if run.worst(float(result is None)):
        return None, reason or "it failed on another rank"
    return result, ""


def floors(layer: Layer) -> dict[str, Any]:
    """By name: the layer's GEMMs alone, on ready rows that are spread over the experts at random. With several ranks
    also the exchange alone of one row for each (token, k), there and back."""
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
"""Rows of a table in docs/performance.md: the baselines that exist, and why others are absent."""
