"""How much longer a call of a group of GPUs takes because rows travel between the GPUs."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist

import flashmoe
from flashmoe.placement import contiguous, local_experts

from .floors import exchange
from .measure import WARM_UP, own_span, slowest
from .shapes import SHAPES

LINK = 350e9
"""The bytes per second that one H200 sends over NVLink, measured with plain stores."""


class GroupLayer:
    """One rank's share of a layer with random weights, and its context. The context has the built-in order of tasks,
    except for what `profile` sets."""

    def __init__(
        self, name: str, tokens: int, profile: dict[str, int] | None = None, return_mode: str = "auto"
    ) -> None:
        self.hidden, self.inner, self.experts, self.top_k, self.activation, _ = SHAPES[name]
        self.rank, self.ranks, self.tokens = dist.get_rank(), dist.get_world_size(), tokens
        self.owners = contiguous(self.experts, self.ranks)
        self.own = local_experts(self.owners, self.rank)
        make = {"device": "cuda", "dtype": torch.bfloat16}
        rows = self.inner * (2 if self.activation == "swiglu" else 1)
        self.w1 = torch.randn(len(self.own), rows, self.hidden, **make) * 0.02
        self.w2 = torch.randn(len(self.own), self.hidden, self.inner, **make) * 0.02
        torch.manual_seed(self.rank + 1)
        self.x = torch.randn(tokens, self.hidden, **make)
        self.context = self.open(profile or {}, return_mode)

    def open(self, profile: dict[str, int], return_mode: str) -> flashmoe.Context:
        """A context for the layer's calls."""
        return flashmoe.Context.from_torch(
            engine="cuda",
            profile=profile,
            return_mode=return_mode,
            max_tokens=self.tokens,
            hidden=self.hidden,
            intermediate=self.inner,
            experts=self.experts,
            top_k=self.top_k,
        )

    def close(self) -> None:
        self.context.synchronize()
        dist.barrier()  # no rank may close its context while another rank's call still waits for this rank
        self.context.close()
        torch.cuda.empty_cache()


class GivenLayer(GroupLayer):
    """A `GroupLayer` whose calls get their routing from the caller."""

    def __init__(self, name: str, tokens: int) -> None:
        super().__init__(name, tokens)
        self.weights = torch.full((tokens, self.top_k), 1.0 / self.top_k, device="cuda")

    def choose(self, shares: torch.Tensor) -> torch.Tensor:
        """Ids [T, K]: distinct experts for each token, drawn with probabilities in proportion to `shares` [E]. Experts
        whose share is 0 are not drawn."""
        return torch.multinomial(shares.cuda().expand(self.tokens, -1), self.top_k).int()

    def choose_evenly(self, among: list[int]) -> torch.Tensor:
        """Ids [T, K]: distinct experts of `among` for each token, drawn at random, but with as many tokens for each."""
        n = len(among)
        if self.tokens % n != 0:
            raise SystemExit(f"tokens: expected a multiple of {n} experts, got {self.tokens}")
        # Each n tokens share K random numbers. Token j of them takes these numbers plus j, modulo n, so that each
        # expert gets exactly K of the n tokens.
        distances = torch.rand(self.tokens // n, n).argsort(1)[:, : self.top_k]
        ids = (distances[:, None, :] + torch.arange(n)[None, :, None]).remainder(n).flatten(0, 1)
        return torch.tensor(among)[ids[torch.randperm(self.tokens)]].int().cuda()

    def call(self, ids: torch.Tensor) -> Callable[[int], torch.Tensor]:
        def moe(_: int, **how) -> torch.Tensor:
            return flashmoe.moe(
                self.context,
                self.x,
                self.w1,
                self.w2,
                topk_ids=ids,
                topk_weights=self.weights,
                activation=self.activation,
                **how,
            )

        return moe

    def in_turn(self, repeats: int, *calls: Callable) -> list[list[float]]:
        """A list of milliseconds for each of `calls`. They are called in turn, so that the n-th times of all lists were
        measured one right after the other."""
        times: list[list[float]] = [[] for _ in calls]
        for i in range(repeats + WARM_UP):
            each_once = list(zip(times, calls, strict=True))
            for each, call in each_once if i % 2 == 0 else reversed(each_once):  # so a falling clock favours no call
                each.append(own_span(call, i, True))
        return [slowest(each[WARM_UP:]) for each in times]


def everyone(value: float, how=dist.ReduceOp.MAX) -> float:
    shared = torch.tensor([value], dtype=torch.float64, device="cuda")
    dist.all_reduce(shared, op=how)
    return shared.item()


def hidden(name: str, tokens: int, repeats: int) -> dict:
    layer = GivenLayer(name, tokens)
    travelling, local = (layer.call(layer.choose_evenly(among)) for among in (list(range(layer.experts)), layer.own))
    fused, stays, one_way = layer.in_turn(16 * repeats, travelling, local, exchange(tokens * layer.top_k, layer.hidden))
    travelling(0)
    sent = layer.context.last_call.rows_sent
    reduced = layer.context.last_call.return_mode == "reduced"
    returned = sent if reduced else tokens * layer.top_k * (layer.ranks - 1) / layer.ranks
    link = everyone((sent + returned) * layer.hidden * 2 / LINK * 1e3)
    layer.close()
    lower, difference, upper = statistics.quantiles([a - b for a, b in zip(fused, stays, strict=True)], n=4)
    collectives = 2 * statistics.median(one_way)
    return {
        "shape": name,
        "tokens": tokens,
        "fused_ms": statistics.median(fused),
        "local_ms": statistics.median(stays),
        "difference_ms": difference,
        "difference_quartiles_ms": [lower, upper],
        "collectives_ms": collectives,
        "exposed": difference / collectives,
        "link_ms": link,
        "exposed_of_link": difference / link,
    }
