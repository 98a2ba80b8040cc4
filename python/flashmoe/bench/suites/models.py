"""A whole model of Transformers, with its own experts and with FlashMoE's, by `whole_model.py`."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from ..baselines.needs import not_installed
from ..plan import Machine, Point, Suite
from ..run import Run, apart, median

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 128,
}


OF_GROUPS = {"": ["prefill 8192", "decode 1", "decode 32"], ", graphs": ["decode 1, graph", "decode 32, graph"]}
"""For groups of ranks: the ends of points' names, and the cases that each point measures. The number in a case is that
of each rank's tokens (prefill) or sequences (decode)."""
MOST_TOKENS = 8192


def points(machine: Machine) -> Iterator[Point]:
    if machine.small:
        for ranks in machine.groups:
            yield Point(f"small 2 layers x{ranks}", ranks, {"layers": 2, "cases": ["prefill 64", "decode 1"]})
        return
    for ranks in machine.groups[1:]:
        for what, cases in OF_GROUPS.items():
            yield Point(f"qwen3-30b 12 layers{what} x{ranks}", ranks, {"layers": 12, "cases": cases})
    yield Point("qwen3-30b 12 layers x1", 1, {"layers": 12, "cases": ["prefill 8192", "decode 1", "decode 32"]})
    yield Point("qwen3-30b 12 layers, graphs x1", 1, {"layers": 12, "cases": ["decode 1, graph", "decode 32, graph"]})


def measure(run: Run, layers: int, cases: list[str]) -> dict[str, Any]:
    if reason := not_installed("transformers"):
        return {"check": run.check(0.0, 0.0, "nothing is measured"), "absent": {"transformers": reason}, "values": {}}
    import torch

    from .. import whole_model as of

    build = partial(
        of.build, layers, run.device, torch.float32 if run.small else torch.bfloat16, **(SMALL if run.small else {})
    )
    if run.ranks > 1:
        return measure_group(run, of, build, layers, cases)
    model = build()
    names = [*of.THEIRS, "flashmoe", "fused"]
    check = run.check(error(of, model, run), bound(run), "logits with flashmoe beside grouped_mm's")
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


def bound(run: Run) -> float:
    """The bound for differences of logits. The two implementations sum in different orders and round differently, and a
    small difference before a router may make it choose other experts."""
    return 1e-3 if run.small else 0.1


def measure_group(run: Run, of: Any, build: Callable[[], Any], layers: int, cases: list[str]) -> dict[str, Any]:
    """Times Transformers' own expert parallelism and then FlashMoE's, with the same number of tokens in all.
    Transformers' way requires that every rank holds all tokens; with FlashMoE, each rank holds its share of them."""
    import torch
    import torch.distributed as dist

    torch.manual_seed(1)
    model = of.spread(build())
    ids = of.tokens(model, run.ranks, 64)
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits[run.rank]
    times = of.of_group(model, cases, run.ranks)
    samples = {f"{case}, Transformers": {"plain": times[case]} for case in cases}
    del model
    gc.collect()
    if run.engine == "cuda":
        torch.cuda.empty_cache()
    model = build()
    context = of.spread_by_flashmoe(model, 128 if run.small else MOST_TOKENS, run.engine)
    with torch.no_grad():
        logits = model(input_ids=ids[run.rank :][:1], use_cache=False).logits[0]
    check = run.check(apart(logits, expected), bound(run), "a rank's logits beside Transformers' own")
    torch.manual_seed(2 + run.rank)  # each rank has its own sequences
    times = of.of_group(model, cases, 1)
    samples |= {f"{case}, flashmoe": {"plain": times[case]} for case in cases}
    context.synchronize()
    dist.barrier()
    context.close()
    figures = {
        f"{case}: times Transformers' speed": median(samples[f"{case}, Transformers"])
        / median(samples[f"{case}, flashmoe"])
        for case in cases
    }
    return {"check": check, "samples": samples, "values": {"layers": layers, "figures": figures}}


def error(of: Any, model: Any, run: Run) -> float:
    import torch

    ids = of.tokens(model, 1, 64)
    logits = {}
    for name in ("grouped_mm", "flashmoe"):
        model.set_experts_implementation(name)
        with torch.no_grad():
            logits[name] = model(input_ids=ids, use_cache=False).logits
    return apart(logits["flashmoe"], logits["grouped_mm"])


SUITE = Suite("models", "a whole model, prefill and decoding", ("COMET, figure 9",), points, measure, seconds=180.0)
