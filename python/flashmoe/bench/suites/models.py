"""A whole model of Transformers with its own experts and with FlashMoE's, by benchmarks/transformers_model.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..baselines.needs import not_installed
from ..plan import Machine, Point, Suite
from ..programs import program
from ..run import Run, apart

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 128,
}


def points(machine: Machine) -> Iterator[Point]:
    if machine.small:
        yield Point("small 2 layers x1", 1, {"layers": 2, "cases": ["prefill 64", "decode 1"]})
        return
    yield Point("qwen3-30b 12 layers x1", 1, {"layers": 12, "cases": ["prefill 8192", "decode 1", "decode 32"]})
    yield Point("qwen3-30b 12 layers, graphs x1", 1, {"layers": 12, "cases": ["decode 1, graph", "decode 32, graph"]})


def measure(run: Run, layers: int, cases: list[str]) -> dict[str, Any]:
    if reason := not_installed("transformers"):
        return {"check": run.check(0.0, 0.0, "nothing is measured"), "absent": {"transformers": reason}, "values": {}}
    import torch

    of = program("transformers_model")
    dtype = torch.float32 if run.small else torch.bfloat16
    model = of.build(layers, run.device, dtype, **(SMALL if run.small else {}))
    names = [*of.THEIRS, "flashmoe", "fused"]
    # Of another order of sums in each layer, and its roundings: what follows a router is not continuous.
    check = run.check(error(of, model, run), 1e-3 if run.small else 0.1, "logits with flashmoe beside grouped_mm's")
    rows = of.measure(model, names, cases)
    samples, absent = {}, {}
    for case in cases:
        for name in names:
            row = rows[case][name]
            if "ms" in row:
                samples[f"{case}, {name}"] = {"plain": row["samples"]}
            else:
                absent[f"{case}, {name}"] = row["error"]
    return {"check": check, "samples": samples, "absent": absent, "values": {"layers": layers}}


def error(of: Any, model: Any, run: Run) -> float:
    import torch

    ids = of.tokens(model, 1, 64)
    logits = {}
    for name in ("grouped_mm", "flashmoe"):
        model.set_experts_implementation(name)
        with torch.no_grad():
            logits[name] = model(input_ids=ids, use_cache=False).logits
    return apart(logits["flashmoe"], logits["grouped_mm"])


SUITE = Suite("models", "a whole model, prefill and decoding", ("COMET, figure 9",), points, measure)
