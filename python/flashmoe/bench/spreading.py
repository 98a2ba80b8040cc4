"""A layer whose experts are spread over the ranks in different ways, or chosen unevenly."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import flashmoe
from flashmoe.placement import Placement, balanced, contiguous, hybrid, local_experts, rank_loads
from flashmoe.slices import cut

from .expected import expert_row
from .joining import processors, ranks_a_gpu
from .measure import WARM_UP, group_milliseconds, host_milliseconds, slowest

TYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}


class SpreadLayer:
    """One rank's part of a layer with random weights. An expert's weights do not depend on how experts are spread."""

    def __init__(self, shape: tuple, engine: str, ids: np.ndarray, placement: Placement, slices: int = 1) -> None:
        self.shape = shape
        hidden, inner, experts, top_k, activation, _ = shape
        rank, tokens, device = dist.get_rank(), len(ids), _device(engine)
        make = {"device": device, "dtype": TYPES[engine]}
        mine = local_experts(placement, rank)
        parts = [_slice(*divmod(each, slices), slices, hidden, inner, activation, make) for each in mine]
        rows = inner // slices * (2 if activation == "swiglu" else 1)
        self.w1 = (
            torch.stack([each["gate_up_proj"] for each in parts]) if parts else torch.empty(0, rows, hidden, **make)
        )
        self.w2 = (
            torch.stack([each["down_proj"] for each in parts])
            if parts
            else torch.empty(0, hidden, inner // slices, **make)
        )
        generator = torch.Generator(device).manual_seed(rank)
        self.x = torch.randn(tokens, hidden, generator=generator, **make)
        self.routing = {
            "topk_ids": torch.from_numpy(ids).to(device),
            "topk_weights": torch.full(ids.shape, 1.0 / top_k, device=device),
        }
        self.ctx = flashmoe.Context.from_torch(
            engine=engine,
            max_tokens=tokens,
            hidden=hidden,
            intermediate=inner // slices,
            experts=experts,
            top_k=top_k,
            dtype=str(TYPES[engine]).removeprefix("torch."),
            placement=placement,
            slices=slices,
            processors=1 if engine == "cpu" else processors(dist.get_world_size()),
        )
        self.options = {"activation": activation, "slices": slices}

    def __call__(self, _: int) -> torch.Tensor:
        return flashmoe.moe(self.ctx, self.x, self.w1, self.w2, **self.routing, **self.options)

    def error(self, y: torch.Tensor) -> float:
        """The relative error of two of this rank's rows against float64. The experts of these two tokens are made again
        as a whole, also those of other ranks."""
        hidden, inner, _, top_k, activation, _ = self.shape
        make = {"device": self.x.device, "dtype": self.x.dtype}
        sample = [0, len(self.x) - 1]
        expected = torch.zeros(len(sample), hidden, dtype=torch.float64, device=self.x.device)
        for row, token in enumerate(sample):
            for expert in self.routing["topk_ids"][token].tolist():
                whole = _slice(expert, 0, 1, hidden, inner, activation, make)
                w1, w2 = whole["gate_up_proj"], whole["down_proj"]
                expected[row] += expert_row(self.x[token], w1, w2, activation == "swiglu") / top_k
        return ((y[sample].double() - expected).norm() / expected.norm()).item()

    def close(self) -> None:
        self.ctx.synchronize()
        dist.barrier()  # no rank may close its context while another rank's call still waits for this rank
        self.ctx.close()
        if self.x.is_cuda:
            torch.cuda.empty_cache()


def _slice(
    expert: int, n: int, slices: int, hidden: int, inner: int, activation: str, make: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """Slice n of an expert."""
    generator = torch.Generator(make["device"]).manual_seed(1000 + expert)
    rows = inner * (2 if activation == "swiglu" else 1)
    w1 = torch.randn(1, rows, hidden, generator=generator, **make) * 0.02
    w2 = torch.randn(1, hidden, inner, generator=generator, **make) * 0.02
    return {name: each[n].clone() for name, each in cut(slices, w1, w2, activation=activation).items()}


def _device(engine: str) -> str:
    return f"cuda:{torch.cuda.current_device()}" if engine == "cuda" else "cpu"


def chosen(tokens: int, experts: int, top_k: int, spread: float, seed: int) -> np.ndarray:
    """int32 [T, K]: distinct experts for each token, drawn with probabilities in proportion to the experts' shares. The
    standard deviation of the shares is `spread`; their mean is 1/E."""
    shares = np.random.default_rng(0).permutation(np.linspace(-1.0, 1.0, experts)) if experts > 1 else np.zeros(1)
    shares = np.maximum(1.0 / experts + spread * shares / max(shares.std(), 1e-9), 1e-6)
    keys = np.log(shares) + np.random.default_rng(seed).gumbel(size=(tokens, experts))
    return np.argsort(-keys, axis=1)[:, :top_k].astype(np.int32)


def milliseconds(call: Callable[[int], Any], repeats: int, engine: str) -> list[float]:
    """Times of single calls, each on its slowest rank."""
    if engine == "cuda":
        return group_milliseconds(call, repeats, ranks_a_gpu(dist.get_world_size()) == 1)
    return slowest(host_milliseconds(call, repeats), "cpu")


def measured(layers: list[SpreadLayer], repeats: int, engine: str) -> list[dict[str, Any]]:
    """For each layer a row of results, with the columns that all tables have. Calls of the layers are timed in turn."""
    errors = []
    for layer in layers:
        y = layer(0)
        layer.ctx.synchronize()
        errors.append(layer.error(y))
    for layer in layers * WARM_UP:
        layer(0)
        layer.ctx.synchronize()
    in_turn = milliseconds(lambda i: layers[i % len(layers)](i), repeats * len(layers), engine)
    return [row_of(layer, errors[i], in_turn[i :: len(layers)]) for i, layer in enumerate(layers)]


def row_of(layer: SpreadLayer, error: float, times: list[float]) -> dict[str, Any]:
    report = layer.ctx.last_call
    sent = torch.tensor([report.rows_sent, report.return_rows_sent], device=layer.x.device)
    dist.all_reduce(sent)
    return {
        "ms": statistics.median(times),
        "min_max": [min(times), max(times)],
        "samples_ms": times,
        "error": error,
        "return_mode": report.return_mode,
        "rows_sent": sent.tolist(),
    }


def splits(name: str, shape: tuple, tokens: int, repeats: int, engine: str) -> list[dict[str, Any]]:
    _, inner, experts, top_k, *_ = shape
    rank, ranks = dist.get_rank(), dist.get_world_size()
    ids = chosen(tokens, experts, top_k, 0.0, rank)
    rows, first = [], None
    for tensor in tensor_parallel(ranks, inner, top_k, engine):
        layer = SpreadLayer(shape, engine, ids, hybrid(experts, ranks, tensor), tensor)
        y = layer(0).double()
        first = y if first is None else first
        apart = torch.stack([(y - first).square().sum(), first.square().sum()])
        dist.all_reduce(apart)
        row = {"shape": name, "tokens": tokens, "expert_parallel": ranks // tensor, "tensor_parallel": tensor}
        row |= measured([layer], repeats, engine)[0]
        rows.append(row | {"difference": float((apart[0] / apart[1]).sqrt())})
        layer.close()
    return rows


def tensor_parallel(ranks: int, inner: int, top_k: int, engine: str) -> list[int]:
    """The numbers of slices into which experts may be cut: those divisors of R with slices that the engine accepts."""
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0 and inner % n == 0]
    return divisors if engine == "cpu" else [n for n in divisors if top_k * n <= 32 and inner // n % 8 == 0]


def imbalance(
    name: str, shape: tuple, tokens: int, repeats: int, engine: str, spreads: list[float]
) -> list[dict[str, Any]]:
    _, _, experts, top_k, *_ = shape
    rows = []
    for spread in spreads:
        by_rank = [chosen(tokens, experts, top_k, spread, seed) for seed in range(dist.get_world_size())]
        rows += placed({"shape": name, "tokens": tokens, "spread": spread}, shape, by_rank, repeats, engine)
    return rows


def placed(
    what: dict[str, Any], shape: tuple, by_rank: list[np.ndarray], repeats: int, engine: str
) -> list[dict[str, Any]]:
    """A row of results for the contiguous placement, one for a balanced placement, and one for each number of slices,
    all with the same routing: `by_rank` has each rank's ids."""
    _, inner, experts, top_k, *_ = shape
    rank, ranks = dist.get_rank(), len(by_rank)
    load = np.array([np.bincount(ids.ravel(), minlength=experts) for ids in by_rank])
    copies = min(experts // 8, experts * (ranks - 1))
    placements = {
        "contiguous": (contiguous(experts, ranks), 1),
        "balanced": (balanced(load.sum(axis=0), ranks, copies), 1),
    }
    for n in tensor_parallel(ranks, inner, top_k, engine)[1:]:
        placements[f"EP {ranks // n} x TP {n}"] = (hybrid(experts, ranks, n), n)
    layers = [SpreadLayer(shape, engine, by_rank[rank], *placement) for placement in placements.values()]
    rows = measured(layers, repeats, engine)
    for (how, (placement, n)), layer, row in zip(placements.items(), layers, rows, strict=True):
        of_ranks = rank_loads(placement, np.repeat(load / n, n, axis=1), ranks)
        row["fullest"] = float(of_ranks.max() / of_ranks.mean())
        pairs = zip(row["samples_ms"], rows[0]["samples_ms"], strict=True)
        row["of_contiguous"] = statistics.median(one / other for one, other in pairs)
        row |= what | {"placement": how, "spread_of_load": float((load.sum(axis=0) / load.sum()).std())}
        layer.close()
    return rows
