"""A whole model of Transformers with its own experts and with FlashMoE's: prefill, and steps of decoding."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import transformers

from flashmoe.integrations.transformers import fuse, parallelize

from .measure import slowest

PROMPT, STEPS, TURNS = 128, 16, 4
THEIRS = ("grouped_mm", "batched_mm")
QWEN3 = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}
"""The sizes of Qwen3-30B-A3B."""


def build(layers: int, device: str = "cuda", dtype: torch.dtype = torch.bfloat16, **sizes: int) -> torch.nn.Module:
    """A Qwen3-MoE model with random weights and so many layers. `sizes` replaces those of `QWEN3`."""
    config = transformers.Qwen3MoeConfig(
        **{**QWEN3, **sizes}, norm_topk_prob=True, num_hidden_layers=layers, attn_implementation="sdpa"
    )
    torch.manual_seed(0)
    with torch.device(device):
        return transformers.Qwen3MoeForCausalLM._from_config(config, dtype=dtype).eval()


def tokens(model: torch.nn.Module, batch: int, length: int) -> torch.Tensor:
    return torch.randint(model.config.vocab_size, (batch, length), device=model.device)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(run: Callable[[], Any], repeats: int) -> float:
    """The mean milliseconds of a run, out of `repeats` runs, by the host's clock."""
    synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    synchronize()
    return (time.perf_counter() - start) * 1e3 / repeats


def prefill(model: torch.nn.Module, batch: int, length: int = 8192) -> Callable[[], float]:
    ids = tokens(model, batch, length)

    def run() -> None:
        model(input_ids=ids, use_cache=False, logits_to_keep=1)

    run()
    return lambda: timed(run, 2)


def decode(model: torch.nn.Module, batch: int) -> Callable[[], float]:
    prompt, step = tokens(model, batch, PROMPT), tokens(model, batch, 1)

    def turn() -> float:
        cache = transformers.DynamicCache(config=model.config)
        model(input_ids=prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return timed(lambda: model(input_ids=step, past_key_values=cache, use_cache=True), STEPS)

    turn()
    return turn


def decode_graph(model: torch.nn.Module, batch: int) -> Callable[[], float]:
    prompt, step = tokens(model, batch, PROMPT), tokens(model, batch, 1)
    cache = transformers.StaticCache(config=model.config, max_cache_len=2 * PROMPT)
    position = torch.full((1, 1), PROMPT, device="cuda")

    def run() -> None:
        model(input_ids=step, past_key_values=cache, use_cache=True, position_ids=position)

    model(input_ids=prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return lambda: timed(graph.replay, STEPS)


CASES = {
    "prefill 64": (functools.partial(prefill, length=64), 1),
    "prefill 8192": (prefill, 1),
    "prefill 8 x 1024": (functools.partial(prefill, length=1024), 8),
    "decode 1": (decode, 1),
    "decode 32": (decode, 32),
    "decode 1, graph": (decode_graph, 1),
    "decode 32, graph": (decode_graph, 32),
}
WHOLE = tuple(case for case in CASES if case != "prefill 64")
"""The cases that are measured of a model of Qwen3's size."""


def measure(model: torch.nn.Module, names: list[str], cases: Sequence[str] = WHOLE) -> dict[str, dict[str, Any]]:
    """The times, or the error, of each case and each implementation in `names`. ``fused`` must be the last name."""
    result: dict[str, dict[str, Any]] = {case: {} for case in cases}
    for name in names:
        if name == "fused":
            fuse(model)  # cannot be undone
        else:
            model.set_experts_implementation(name)
        for case in cases:
            prepare, batch = CASES[case]
            try:
                with torch.no_grad():
                    turn = prepare(model, batch)
                    times = [turn() for _ in range(TURNS)]
                spread = [min(times), max(times)]
                result[case][name] = {"ms": statistics.median(times), "min_max": spread, "samples": times}
            except Exception as error:
                result[case][name] = {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
            torch.cuda.empty_cache()
    return result


def spread(model: torch.nn.Module) -> torch.nn.Module:
    """The model, spread over all ranks by Transformers' own expert parallelism. All ranks hold the same batch."""
    from transformers.distributed import DistributedConfig, utils

    ranks = dist.get_world_size()
    if hasattr(utils, "initialize_distributed_mesh"):  # from release 5.23 on, which spreads the attention too
        layout = DistributedConfig(tp_size=ranks, ep_size=ranks)
        _, mesh = utils.initialize_distributed_mesh(layout)
    else:
        layout = DistributedConfig(tp_size=ranks, enable_expert_parallel=True)
        layout, _, mesh = type(model).prepare_distribute_model(layout)
    model = type(model).maybe_distribute_model(model, layout, mesh).eval()
    held = {each.num_experts for each in model.modules() if hasattr(each, "gate_up_proj")}
    if held != {expected := model.config.num_experts // ranks}:
        raise RuntimeError(f"experts: expected {expected} of each layer on a rank, got {held}")
    return model


def spread_by_flashmoe(model: torch.nn.Module, max_tokens: int, engine: str) -> Any:
    """Spreads the model's experts over all ranks by FlashMoE, and returns the context. Each rank has its own batch."""
    return parallelize(model, max_tokens=max_tokens, engine=engine)


def of_group(model: torch.nn.Module, cases: Sequence[str], batches: int) -> dict[str, list[float]]:
    """By case, the milliseconds of each turn on its slowest rank. `batches`: the number of batches that each rank
    holds: 1, its own, or all ranks' batches."""
    result = {}
    for case in cases:
        prepare, batch = CASES[case]
        with torch.no_grad():
            turn = prepare(model, batch * batches)
            times = []
            for _ in range(TURNS):
                dist.barrier()
                times.append(turn())
        result[case] = slowest(times, model.device)
    return result
