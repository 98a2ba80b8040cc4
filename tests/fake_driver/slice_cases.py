"""Experts that are cut into slices: to the kernel, each slice is an expert."""

from __future__ import annotations

import flashmoe
import pytest
from fake_gpu import SIZES, E, H, I, K, arguments, launched, on_gpu
from fake_group import on_ranks, pretend
from flashmoe.placement import hybrid


def test_slices_are_experts_behind_the_gate(cubin):
    """What the kernel is told of 16 experts in two slices each, on two ranks; and contexts that are refused."""
    for told, mode in on_ranks(sliced_launch, [(cubin,)] * 2):
        assert (told["experts"], told["top_k"], told["local_experts"]) == (2 * E, 2 * K, E)
        assert (told["intermediate"], told["return_mode"], mode) == (I // 2, 1, "reduced")
        assert told["router"] == told["router_of_experts"]
    for changes, message in (
        ({"top_k": 9, "slices": 4}, "slices: expected at most 3 with K=9, got 4"),
        ({"experts": 600}, "slices: expected at most 1 with E=600, got 2"),
        ({"return_mode": "direct"}, "return_mode: expected 'reduced' or 'auto' with slices, got 'direct'"),
    ):
        with pytest.raises(flashmoe.InvalidArgument, match=message):
            flashmoe.Context(engine="cuda", rank=0, ranks=2, name="sliced", **SIZES | {"slices": 2} | changes)


def sliced_launch(rank, ranks, name, environment, cubin):
    """What the kernel is told of a call with slices, with the router's map of a call without; the return mode."""
    pretend([rank], cubin, environment)
    settings = {"timeout": 20.0, **SIZES, "slices": 2}
    with flashmoe.Context(engine="cuda", device=rank, rank=rank, ranks=ranks, name=name, **settings) as made:
        tensors = {"x": on_gpu(10, H), "router": on_gpu(E, H)}
        whole = {"gate_up_proj": on_gpu(E // 2, 2 * I, H), "down_proj": on_gpu(E // 2, H, I)}
        parts = {"gate_up_proj": on_gpu(E, I, H), "down_proj": on_gpu(E, H, I // 2)}
        flashmoe.moe(made, **arguments(**tensors, **whole))
        router = launched()["router"]
        flashmoe.moe(made, **arguments(**tensors, **parts), slices=2, placement=hybrid(E, 2, 2))
        return launched() | {"router_of_experts": router}, made.return_mode
