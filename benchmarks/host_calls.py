"""Times calls of one token of a tiny layer with the installed flashmoe: the worker of call_overhead.py."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

SIZES = {"max_tokens": 8, "hidden": 64, "intermediate": 64, "experts": 8, "top_k": 2}
WARM_UP, CALLS = 300, 2000
"""Calls of a case in a round: first those that are not counted, then those that are."""


def tensors() -> dict[str, Any]:
    """One token and the layer's weights, as NumPy arrays."""
    import numpy as np

    random = np.random.default_rng(0)
    hidden, inner, experts = (SIZES[name] for name in ("hidden", "intermediate", "experts"))
    shapes = {
        "x": (1, hidden),
        "gate_up_proj": (experts, 2 * inner, hidden),
        "down_proj": (experts, hidden, inner),
        "router": (experts, hidden),
    }
    return {name: random.standard_normal(shape, np.float32) * np.float32(0.1) for name, shape in shapes.items()}


class Case(NamedTuple):
    engine: str
    tensors: str
    """The tensors' library, and what is called if it is not `flashmoe.moe`; the case's name in results."""
    call: Callable[[], Any]
    wait: Callable[[], None]
    """Waits until the call is over."""


def function_case(engine: str, library: str, given: dict[str, Any]) -> Case:
    """A call of `flashmoe.moe`. Its context lives as long as the case."""
    import flashmoe

    ctx = flashmoe.Context(engine=engine, dtype="float32", processors=1 if engine == "cpu" else None, **SIZES)
    return Case(engine, library, lambda: flashmoe.moe(ctx, **given, top_k=SIZES["top_k"]), ctx.synchronize)


def block_cases(engine: str) -> Iterator[Case]:
    """Calls of the experts and blocks of Transformers' models."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import transformers
    from flashmoe.integrations.transformers import fuse
    from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    place = "cuda" if engine == "cuda" else "cpu"
    wait = torch.cuda.synchronize if engine == "cuda" else lambda: None
    sizes = {
        "hidden_size": SIZES["hidden"],
        "moe_intermediate_size": SIZES["intermediate"],
        "num_experts": SIZES["experts"],
        "num_experts_per_tok": SIZES["top_k"],
    }
    qwen3 = transformers.Qwen3MoeConfig(**sizes, experts_implementation="flashmoe")
    qwen2 = transformers.Qwen2MoeConfig(**sizes, shared_expert_intermediate_size=SIZES["intermediate"])
    with torch.device(place):
        plain, with_shared = Qwen3MoeSparseMoeBlock(qwen3).eval(), Qwen2MoeSparseMoeBlock(qwen2).eval()
        x, ids, weights = torch.zeros(1, 1, SIZES["hidden"]), torch.tensor([[0, 1]]), torch.ones(1, SIZES["top_k"])
    for parameter in (*plain.parameters(), *with_shared.parameters()):
        torch.nn.init.normal_(parameter, std=0.1)
    yield Case(engine, "torch, experts", lambda: plain.experts(x[0], ids, weights), wait)
    yield Case(engine, "torch, fused", functools.partial(fuse(plain), x), wait)
    yield Case(engine, "torch, fused, shared", functools.partial(fuse(with_shared), x), wait)


def cases() -> Iterator[Case]:
    """The cases whose engine and libraries this machine has."""
    arrays = tensors()
    yield function_case("cpu", "numpy", arrays)
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    given = {name: torch.from_numpy(array) for name, array in arrays.items()}
    engines = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    for engine in engines:
        on_device = {name: tensor.cuda() if engine == "cuda" else tensor for name, tensor in given.items()}
        yield function_case(engine, "torch", on_device)
        if importlib.util.find_spec("transformers") is not None:
            with torch.no_grad():
                yield from block_cases(engine)


def timed(case: Case) -> dict[str, float]:
    """Medians of single calls, in microseconds."""
    call_ns, host_ns = [], []
    for _ in range(WARM_UP + CALLS):
        begin, begin_thread = time.perf_counter_ns(), time.thread_time_ns()
        case.call()
        host_ns.append(time.thread_time_ns() - begin_thread)
        call_ns.append(time.perf_counter_ns() - begin)
        case.wait()
    call_ns, host_ns = call_ns[WARM_UP:], host_ns[WARM_UP:]
    return {"call_us": statistics.median(call_ns) / 1e3, "host_us": statistics.median(host_ns) / 1e3}


def main() -> None:
    """Prints a JSON object with a row for each case."""
    import flashmoe

    rows = [{"engine": case.engine, "tensors": case.tensors, **timed(case)} for case in cases()]
    print(json.dumps({"package": flashmoe.__file__, "rows": rows}))


if __name__ == "__main__":
    main()
