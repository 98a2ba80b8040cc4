"""Layers that a context knows. It finds them again by their tensors' addresses, shapes and types, checks each call all
the same, and forgets the oldest layers."""

from __future__ import annotations

import flashmoe
import pytest
import torch
from fake_gpu import E, H, I, K, arguments, given, launched, on_gpu, prepared
from flashmoe.engines import cuda
from flashmoe.spec import Options
from flashmoe.spec.tensors import Tensors


def test_every_call_is_checked(ctx):
    """Not only the first call of a layer is checked."""
    args, routed = arguments(), given()
    flashmoe.moe(ctx, **args)
    flashmoe.moe(ctx, **routed)
    assert len(prepared(ctx)) == 2
    with pytest.raises(flashmoe.InvalidArgument, match="x: expected at most max_tokens=4096 tokens"):
        flashmoe.moe(ctx, **{**args, "x": on_gpu(4097, H)})
    with pytest.raises(flashmoe.InvalidArgument, match="x: expected rows that begin"):
        flashmoe.moe(ctx, **{**args, "x": on_gpu(9, H + 1)[:, 1:]})
    with pytest.raises(flashmoe.InvalidArgument, match=r"topk_ids: expected \[T=7, K=4\], contiguous"):
        flashmoe.moe(ctx, **{**routed, "x": on_gpu(7, H)})
    for other in (on_gpu(E, H, dtype=torch.float16), on_gpu(E, H - 8)):
        with pytest.raises(flashmoe.InvalidArgument):
            flashmoe.moe(ctx, **{**args, "router": other})
    with pytest.raises(flashmoe.InvalidArgument, match=r"top_k: expected an integer in \[1, E=16\], got 4\.0"):
        flashmoe.moe(ctx, **{**args, "top_k": float(K)})  # equal to the known layer's K, which is an int
    assert len(prepared(ctx)) == 2


@pytest.mark.parametrize("name", ["x", "topk_ids", "topk_weights"])
def test_a_sparse_tensor_is_no_layer_found_again(name):
    """A sparse tensor has no address, so its call must not get the key of a known layer with a dense tensor."""
    dense = {
        "x": torch.zeros(9, H),
        "topk_ids": torch.zeros(9, K, dtype=torch.int32),
        "topk_weights": torch.zeros(9, K),
    }
    weights = {"gate_up_proj": torch.zeros(E, 2 * I, H), "down_proj": torch.zeros(E, H, I)}
    known = cuda._key(Tensors(**dense, **weights), Options(), False, 0)
    assert known is not None
    assert cuda._key(Tensors(**{**dense, name: dense[name].to_sparse()}, **weights), Options(), False, 0) != known


def test_layers_are_found_again(ctx, device):
    args = arguments()
    for tokens in (1, 8, 9, 192, 193, 4096):
        flashmoe.moe(ctx, **{**args, "x": on_gpu(tokens, H)})
        assert (launched()["tokens"], launched()["block"]) == (tokens, 32 if tokens == 4096 else 8)
        assert (launched()["few"], launched()["threads"], launched()["geometry"]) == (tokens <= 192, 384, 1)
        assert (launched()["token_rows"] is None) == (tokens <= 192)  # the kernel for a few tokens reads no token map
    assert len(prepared(ctx)) == 1 and len(device) == 2
    flashmoe.moe(ctx, **args, renormalize=False)
    flashmoe.moe(ctx, **{**args, "router": on_gpu(E, H)})
    assert len(prepared(ctx)) == 3


def test_old_layers_are_forgotten(ctx, monkeypatch):
    monkeypatch.setattr(cuda, "_MOST_LAYERS", 2)
    kept = [arguments() for _ in range(5)]
    for args in kept + kept:
        flashmoe.moe(ctx, **args)
        assert launched()["router"]["base"] == args["router"].data_ptr()
        assert len(prepared(ctx)) <= 2
