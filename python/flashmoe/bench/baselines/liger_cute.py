"""LigerCute, the fused expert-parallel kernel of the package liger-cute-kernels.

Written by reading liger-cute-kernels 0.8.5 and ``liger_kernel/ops/cute/ops/moe.py``. It must be the only user of
NVSHMEM in its process. So it is measured only with one rank, because FlashMoE's context of a rank that is alone does
not use NVSHMEM. It has not been run here: no machine of ours has had a GPU and this package at once.
"""

from __future__ import annotations

import functools

from ..layer import TURNS, Layer, Sizes
from ..run import Call, Run
from .needs import Needs
from .pytorch import route

MOST = {"max_tokens": 32768, "hidden_size": 8192, "num_experts": 128, "top_k": 8}
"""The largest sizes that the package is configured for. A process can configure it only once."""


def beyond_capacities(run: Run, sizes: Sizes) -> str | None:
    fits = sizes.tokens <= MOST["max_tokens"] and sizes.experts <= MOST["num_experts"] and sizes.top_k <= MOST["top_k"]
    return None if fits else f"its capacities here are {MOST}"


NEEDS = Needs(
    ("liger_kernel", "liger_cute_kernels"),
    gpu=True,
    one_rank=True,  # it does not share NVSHMEM with another library of its process
    gated=True,
    bfloat16=True,
    further=beyond_capacities,
)


@functools.cache
def configure(device: str) -> None:
    from liger_cute_kernels import MoEConfig
    from liger_cute_kernels import configure as of_package

    of_package(device=device, moe=MoEConfig(**MOST, num_hosts=1, gpus_per_host=1))


def call(layer: Layer) -> Call:
    import torch
    from liger_kernel.ops.cute.ops.moe import moe_fused

    configure(layer.run.device)
    gate, up = layer.w1.chunk(2, 1)  # views with a stride between experts, which the kernel accepts

    def forward(i: int) -> torch.Tensor:
        x = layer.xs[i % TURNS]
        weights, ids = route(layer, x)
        with torch.no_grad():
            return moe_fused(x, ids.int(), weights.to(x.dtype), gate, up, layer.w2, layer.experts, layer.top_k)

    return forward
