"""A layer on one GPU. A worker imports this file together with any version of the package, so this file imports nothing
of `flashmoe.bench`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import flashmoe
import torch


class LoneLayer:
    """A layer of random weights on one GPU, with a context that has the built-in order of tasks. Calling the object
    with a number i makes a call with batch i % 4. `sizes`: an entry of `flashmoe.bench.shapes.SHAPES`."""

    def __init__(
        self, sizes: Sequence[Any], tokens: int, dtype: str = "bfloat16", exact: bool = False, round_logits: bool = True
    ) -> None:
        hidden, inner, self.experts, self.top_k, self.activation, _ = sizes
        torch.manual_seed(tokens)
        make = {"device": "cuda", "dtype": getattr(torch, dtype)}
        self.router = torch.randn(self.experts, hidden, **make) * 0.02
        rows = inner * (2 if self.activation == "swiglu" else 1)
        self.w1 = torch.randn(self.experts, rows, hidden, **make) * 0.02
        self.w2 = torch.randn(self.experts, hidden, inner, **make) * 0.02
        self.xs = [torch.randn(tokens, hidden, **make) for _ in range(4)]
        torch.cuda.empty_cache()  # the context's memory does not come from PyTorch's cache
        self.context = flashmoe.Context(
            engine="cuda",
            max_tokens=tokens,
            hidden=hidden,
            intermediate=inner,
            experts=self.experts,
            top_k=self.top_k,
            dtype=dtype,
            return_mode="direct",
            profile={},
        )
        # Models' routers are linear layers of the hidden states' type, and round their results to it.
        how = {"top_k": self.top_k, "activation": self.activation, "exact": exact, "round_logits": round_logits}
        self.moe = functools.partial(flashmoe.moe, self.context, router=self.router, **how)

    def __call__(self, i: int) -> torch.Tensor:
        return self.moe(self.xs[i % 4], self.w1, self.w2)

    def close(self) -> None:
        self.context.synchronize()
        self.context.close()
