"""Layers of vLLM whose experts are spread over two ranks, made by vLLM's own classes. The experts' results are compared
bit for bit, and those of a whole layer, with vLLM's router, within 1e-5.

Each rank is a process with vLLM's process groups. Expected is `flashmoe.moe` of one rank with all experts: with the
direct return, a token's result has the same bits, however the experts are spread.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import flashmoe
import numpy as np
import pytest
import torch
from flashmoe.launch import RankFailed, RankPool
from torch import Tensor

vllm = pytest.importorskip("vllm", reason="there is no vLLM: see `make test-integrations`")

from flashmoe.integrations.vllm import register  # noqa: E402
from flashmoe.quantize import quantize_weights  # noqa: E402
from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.distributed import (  # noqa: E402
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.forward_context import set_forward_context  # noqa: E402
from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory  # noqa: E402
from vllm.model_executor.layers.quantization import get_quantization_config  # noqa: E402

H, I, K = 64, 48, 2
FP8_H, FP8_I = 256, 128
RANKS = 2
MODES = {
    "tensor and expert parallel": {"tensor_parallel_size": RANKS},
    "data and expert parallel": {"data_parallel_size": RANKS},
}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def parallel_config(rank: int, port: int, sizes: dict[str, int], **more: Any) -> ParallelConfig:
    config = ParallelConfig(enable_expert_parallel=True, **sizes, **more)
    if config.data_parallel_size > 1:
        config.data_parallel_rank, config._data_parallel_master_port_list = (
            rank,
            [port],
        )  # as the engine tells its ranks
    return config


def begin(rank: int, ranks: int, name: str, port: int, sizes: dict[str, int]) -> None:
    """Makes this process a rank of vLLM's, with the plugin."""
    import os

    os.environ |= {"FLASHMOE_VLLM": "1", "VLLM_DIST_IDENT": str(port)}
    register()
    with set_current_vllm_config(VllmConfig(parallel_config=parallel_config(rank, port, sizes))):
        in_data = "data_parallel_size" in sizes
        init_distributed_environment(
            world_size=1 if in_data else ranks,
            rank=0 if in_data else rank,
            local_rank=0 if in_data else rank,
            distributed_init_method=f"tcp://127.0.0.1:{port}",
            backend="gloo",
        )
        initialize_model_parallel(sizes.get("tensor_parallel_size", 1))


@pytest.fixture(scope="module", params=MODES)
def group(request) -> Iterator[tuple[RankPool, dict[str, int]]]:
    """Two ranks of vLLM's, and how they are spread."""
    sizes, port = MODES[request.param], free_port()
    try:
        with RankPool(RANKS) as pool:
            pool.call(begin, [(port, sizes)] * RANKS, timeout=200)
            yield pool, sizes
    finally:  # what vLLM's ranks share for their all-reduce, and leave behind
        for left in Path("/dev/shm").glob(f"{port}-tp*cpushm*"):
            left.unlink()


def weights_of(experts: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(experts)
    return torch.randn(experts, 2 * I, H, generator=random) / 8, torch.randn(experts, H, I, generator=random) / 7


def batch_of(tokens: int, experts: int, seed: int, hidden: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, distinct experts of each token, and their weights."""
    random = torch.Generator().manual_seed(1000 * tokens + seed)
    x = torch.randn(tokens, hidden, generator=random)
    weights, ids = torch.rand(tokens, experts, generator=random).topk(K)
    return x, ids.to(torch.int32), weights


def expected_of(weights: tuple[Tensor, Tensor], x: Tensor, ids: Tensor, of_ids: Tensor) -> Tensor:
    return flashmoe.moe(x, *weights, topk_ids=ids, topk_weights=of_ids)


def in_fp8(experts: int) -> dict[str, Tensor]:
    """All experts' matrices of H x I = 256 x 128 and their scales, by the names of `flashmoe.moe`."""
    random = np.random.default_rng(experts)
    found = {}
    for name, rows, columns, halves in (("gate_up", 2 * FP8_I, FP8_H, 2), ("down", FP8_H, FP8_I, 1)):
        elements, scales = quantize_weights(random.standard_normal((experts, rows, columns)) / 11, halves=halves)
        found[f"{name}_proj"] = torch.from_numpy(elements.view(np.uint8)).view(torch.float8_e4m3fn)
        found[f"{name}_scale"] = torch.from_numpy(scales)
    return found


LAYERS = iter(range(1000))


def layer_of(
    rank: int,
    sizes: dict[str, int],
    experts: int,
    options: dict[str, Any],
    redundant: int = 0,
    shape: tuple[int, int] = (H, I),
    dtype: torch.dtype = torch.float32,
) -> tuple[Any, VllmConfig]:
    """vLLM's layer for this rank's share of the experts, and vLLM's configuration. Experts that are not quantised are
    loaded."""
    parallel = parallel_config(rank, 1, sizes, **options.get("parallel", {}))
    config = VllmConfig(parallel_config=parallel)
    if redundant:  # vLLM's check of this option asks for a GPU
        object.__setattr__(config.parallel_config, "enable_eplb", True)
    with set_current_vllm_config(config):
        layer = FusedMoEFactory(
            experts,
            K,
            *shape,
            params_dtype=dtype,
            prefix=f"layers.{next(LAYERS)}",
            enable_eplb=redundant > 0,
            num_redundant_experts=redundant,
            **options.get("layer", {}),
        )
        routed = layer.routed_experts
        own = torch.arange(routed.global_num_experts)[routed.expert_map >= 0] % experts
        if "quant_config" in options.get("layer", {}):
            weights = in_fp8(experts)
            routed.w13_weight_scale_inv.data.copy_(weights["gate_up_scale"][own])
            routed.w2_weight_scale_inv.data.copy_(weights["down_scale"][own])
            matrices = weights["gate_up_proj"], weights["down_proj"]
        else:
            matrices = weights_of(experts)
        for parameter, all_of_it in zip((routed.w13_weight, routed.w2_weight), matrices, strict=True):
            parameter.data.copy_(all_of_it[own])
        routed.quant_method.process_weights_after_loading(routed)
    return layer, config


def results_of(rank: int, layer: Any, sizes: dict[str, int], batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """What vLLM makes of a call: the sum over ranks that hold the same tokens."""
    x, ids, weights = batch
    y = layer.routed_experts.forward_modular(x, weights, ids, None, None)
    return layer._maybe_reduce_final_output(y, None, layer._fused_output_is_reduced)


def batch_on(
    rank: int, sizes: dict[str, int], tokens: tuple[int, int], experts: int, hidden: int = H
) -> tuple[Tensor, Tensor, Tensor]:
    """With tensor parallelism all ranks have the same tokens; with data parallelism each has its own."""
    own = rank if "data_parallel_size" in sizes else 0
    return batch_of(tokens[own], experts, own, hidden)


# ---- What the ranks do -----------------------------------------------------------------------------------------------


def compute(
    rank: int, ranks: int, name: str, sizes: dict[str, int], experts: int, options: dict[str, Any], calls: Any
) -> list[int]:
    """Makes calls of the given numbers of tokens. Returns the ids of this rank's experts."""
    layer, _ = layer_of(rank, sizes, experts, options)
    assert not layer._fused_output_is_reduced
    for tokens in calls:
        batch = batch_on(rank, sizes, tokens, experts)
        assert torch.equal(results_of(rank, layer, sizes, batch), expected_of(weights_of(experts), *batch)), tokens
    return torch.nonzero(layer.expert_map >= 0).flatten().tolist()


def compute_in_fp8(rank: int, ranks: int, name: str, sizes: dict[str, int]) -> None:
    said = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    options = {"layer": {"quant_config": get_quantization_config("fp8").from_config(said)}}
    layer, _ = layer_of(rank, sizes, 8, options, shape=(FP8_H, FP8_I), dtype=torch.bfloat16)
    for tokens in CALLS:
        x, ids, weights = batch_on(rank, sizes, tokens, 8, FP8_H)
        y = results_of(rank, layer, sizes, (x.bfloat16(), ids, weights))
        assert torch.equal(y, flashmoe.moe(x.bfloat16(), **in_fp8(8), topk_ids=ids, topk_weights=weights)), tokens


def leave_out(rank: int, ranks: int, name: str, sizes: dict[str, int]) -> None:
    """Ids of -1, as of rows that pad a batch."""
    layer, _ = layer_of(rank, sizes, 8, {})
    x, ids, weights = batch_on(rank, sizes, (7, 9), 8)
    ids[2:] = -1
    y = results_of(rank, layer, sizes, (x, ids, weights))
    assert torch.equal(y, expected_of(weights_of(8), x, ids, weights))
    assert y[:2].all() and not y[2:].any()


def update(rank: int, ranks: int, name: str, sizes: dict[str, int]) -> None:
    """Weights that change in place between two calls, as a trainer's updates do."""
    layer, _ = layer_of(rank, sizes, 8, {})
    batch = batch_on(rank, sizes, (7, 9), 8)
    before = results_of(rank, layer, sizes, batch)
    storage = layer.routed_experts.w2_weight.data_ptr()
    layer.routed_experts.w2_weight.data.mul_(2.0)
    layer.routed_experts.quant_method.process_weights_after_loading(layer.routed_experts)
    assert layer.routed_experts.w2_weight.data_ptr() == storage
    assert torch.equal(results_of(rank, layer, sizes, batch), 2.0 * before)


def balance(rank: int, ranks: int, name: str, sizes: dict[str, int]) -> None:
    """Copies of two experts, and then, in the same memory, copies of two others, as vLLM's balancer puts them there.
    (The balancer itself asks for a GPU.)"""
    experts, redundant = 8, 2
    layer, _ = layer_of(rank, sizes, experts, {}, redundant)
    places = layer.routed_experts.get_expert_weights()
    own = torch.nonzero(layer.expert_map >= 0).flatten()
    x, logical, weights = batch_on(rank, sizes, (30, 41), experts)
    expected = expected_of(weights_of(experts), x, logical, weights)
    for placed in ([0, 1, 2, 3, 4, 5, 6, 7, 0, 1], [7, 3, 2, 5, 0, 7, 1, 4, 6, 3]):
        for place, whole in zip(places, weights_of(experts), strict=True):
            place.copy_(whole[torch.tensor(placed)[own]].flatten(1))
        for which in (0, -1):  # an expert's first place, and its last
            at = [[p for p, e in enumerate(placed) if e == expert][which] for expert in range(experts)]
            physical = torch.tensor(at, dtype=torch.int32)[logical.long()]
            assert torch.equal(results_of(rank, layer, sizes, (x, physical, weights)), expected)


def make(rank: int, ranks: int, name: str, sizes: dict[str, int], options: dict[str, Any]) -> None:
    layer_of(rank, sizes, 8, options)


def route(rank: int, ranks: int, name: str, sizes: dict[str, int], tokens: int) -> None:
    """A call of vLLM's whole layer: its router, the experts, its sum."""
    layer, config = layer_of(rank, sizes, 8, {"layer": {"renormalize": True}})
    own = rank if "data_parallel_size" in sizes else 0
    random = torch.Generator().manual_seed(own)
    x, logits = torch.randn(tokens, H, generator=random), torch.randn(tokens, 8, generator=random)
    counts = torch.tensor([tokens] * ranks) if "data_parallel_size" in sizes else None
    with set_current_vllm_config(config), set_forward_context(None, config, tokens, num_tokens_across_dp=counts):
        y = layer(x.clone(), logits)
    weights, ids = logits.softmax(-1).topk(K)
    expected = expected_of(weights_of(8), x, ids.to(torch.int32), weights / weights.sum(-1, keepdim=True))
    assert torch.allclose(y, expected, rtol=0, atol=1e-5), (y - expected).abs().max()


# ---- The tests -------------------------------------------------------------------------------------------------------


def on_each(group: tuple[RankPool, dict[str, int]], fn: Callable[..., Any], *args: Any) -> list[Any]:
    pool, sizes = group
    return pool.call(fn, [(sizes, *args)] * RANKS, timeout=200)


CALLS = [(1, 1), (1, 30), (70, 2), (2, 2), (3, 5), (200, 201)]


@pytest.mark.parametrize("experts", [8, 9], ids=["even", "uneven"])
def test_a_token_s_result_has_the_bits_of_one_rank_s(group, experts):
    owned = on_each(group, compute, experts, {}, CALLS)
    assert owned == [list(range(-(-experts // 2))), list(range(-(-experts // 2), experts))]


def test_experts_in_fp8_have_the_bits_of_one_rank_s(group):
    on_each(group, compute_in_fp8)


def test_experts_in_turn(group):
    """``--expert-placement-strategy round_robin``, which vLLM takes for groups of experts, without data parallelism."""
    options = {
        "parallel": {"expert_placement_strategy": "round_robin"},
        "layer": {"use_grouped_topk": True, "num_expert_group": 2, "topk_group": 1},
    }
    owned = on_each(group, compute, 8, options, CALLS)
    in_turn = [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert owned == (in_turn if "tensor_parallel_size" in group[1] else [[0, 1, 2, 3], [4, 5, 6, 7]])


def test_ids_of_no_expert(group):
    on_each(group, leave_out)


def test_weights_that_change_in_place_are_used(group):
    on_each(group, update)


def test_experts_that_vllm_balances(group):
    on_each(group, balance)


@pytest.mark.parametrize("tokens", [1, 15])
def test_a_whole_layer(group, tokens):
    on_each(group, route, tokens)


def test_another_way_to_send_tokens_is_refused(group):
    with pytest.raises(RankFailed, match=r"all2all_backend: expected one of allgather_reducescatter, passthrough, got"):
        on_each(group, make, {"parallel": {"all2all_backend": "deepep_low_latency"}})
