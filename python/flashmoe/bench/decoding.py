"""Calls of few tokens on one GPU. A CUDA graph calls eight layers one after the other."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from typing import Any

import torch

import flashmoe
from flashmoe.spec import GATED

from .measure import milliseconds
from .origin import QUERY, nvidia_smi
from .quantised import by_block, weights
from .shapes import SHAPES

LAYERS = 8
TYPES = {"bf16": {}, "fp8": {"weight_dtype": "float8_e4m3fn"}, "mxfp4": {"weight_dtype": "mxfp4"}}
"""The types of weights, and for each the options that its `Context` is made with."""
GPT_OSS = {"activation": "clamped_swiglu", "interleaved": True, "limit": 7.0, "alpha": 1.702, "up_offset": 1.0}
OF_GPT_OSS = {"gpt-oss-20b": (2880, 2880, 32, 4), "gpt-oss-120b": (2880, 2880, 128, 4)}  # H, I, E, K
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
READ_BYTES = 2 << 30


def captured(call: Callable[[int], Any], calls: int) -> torch.cuda.CUDAGraph:
    """A graph of `call(0)`, ..., `call(calls - 1)`. Each of these calls runs once before it is captured."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for i in range(calls):
            call(i)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            call(i)
    return graph


def read_speed() -> float:
    """The bytes per second that PyTorch's sum over a large tensor reads."""
    data = torch.zeros(READ_BYTES // 4, device="cuda")
    graph = captured(lambda _: data.sum(), 1)
    return READ_BYTES / statistics.median(milliseconds(lambda _: graph.replay(), 16)) * 1e3


class Layers:
    """Eight layers of a shape, and the context of their calls."""

    def __init__(self, name: str, most: int, weight_type: str) -> None:
        if name in OF_GPT_OSS:
            hidden, inner, self.experts, self.top_k = OF_GPT_OSS[name]
            self.options = GPT_OSS
        else:
            hidden, inner, self.experts, self.top_k, activation, _ = SHAPES[name]
            self.options = {"activation": activation}
        torch.manual_seed(1)
        normal = functools.partial(torch.randn, device="cuda", dtype=torch.bfloat16)
        self.x = normal(most, hidden)
        rows = inner * (2 if self.options["activation"] in GATED else 1)
        matrices = ((rows, hidden), (hidden, inner))
        self.routers = [normal(self.experts, hidden) * 0.02 for _ in range(LAYERS)]
        self.weights = [self.matrices(weight_type, matrices, normal) for _ in range(LAYERS)]
        self.expert_bytes = sum(each.nbytes for each in self.weights[0].values()) // self.experts
        if name in OF_GPT_OSS:
            biases = {"gate_up_bias": normal(self.experts, rows), "down_bias": normal(self.experts, hidden)}
            self.options = {**self.options, **biases}
        torch.cuda.empty_cache()  # the context's memory does not come from PyTorch's cache
        sizes = {"hidden": hidden, "intermediate": inner, "experts": self.experts, "top_k": self.top_k}
        options = {"return_mode": "direct", "profile": {}, "dtype": "bfloat16", **TYPES[weight_type]}
        self.context = flashmoe.Context(engine="cuda", max_tokens=most, **options, **sizes)

    def matrices(
        self, weight_type: str, shapes: tuple[tuple[int, int], ...], normal: Callable[..., torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The random matrices (and scales) of one layer, by the names of `flashmoe.moe`'s arguments."""
        names = ("gate_up", "down")
        if weight_type == "bf16":
            of_layer = [normal(self.experts, *shape) * 0.02 for shape in shapes]
            return {f"{name}_proj": each for name, each in zip(names, of_layer, strict=True)}
        made = {}
        for name, (rows, columns) in zip(names, shapes, strict=True):
            if weight_type == "mxfp4":  # any byte is two valid numbers; the scales are 2^-7 and 2^-6
                blocks = (self.experts, rows, columns // 32)
                made[f"{name}_proj"] = torch.randint(256, (*blocks, 16), device="cuda", dtype=torch.uint8)
                made[f"{name}_scale"] = torch.randint(120, 122, blocks, device="cuda", dtype=torch.uint8)
                continue
            made[f"{name}_proj"], made[f"{name}_scale"] = weights(self.experts, rows, columns, by_block)
        return made

    def call(self, tokens: int, layer: int) -> torch.Tensor:
        router = {"router": self.routers[layer], "top_k": self.top_k, "round_logits": True}  # as models' routers do
        return flashmoe.moe(self.context, self.x[:tokens], **self.weights[layer], **router, **self.options)

    def touched_bytes(self, tokens: int) -> float:
        """Bytes of the experts that are chosen by at least one token, on average over the layers."""
        chosen = [(self.x[:tokens] @ router.mT).topk(self.top_k).indices.unique() for router in self.routers]
        return statistics.mean(len(experts) for experts in chosen) * self.expert_bytes

    def measure(self, tokens: int, repeats: int, read: float) -> dict[str, Any]:
        graph = captured(lambda layer: self.call(tokens, layer), LAYERS)
        times = [ms / LAYERS * 1e3 for ms in milliseconds(lambda _: graph.replay(), repeats)]
        self.context.synchronize()
        speed = self.touched_bytes(tokens) / statistics.median(times) * 1e6
        row = {"tokens": tokens, "us": statistics.median(times), "min_max": [min(times), max(times)], "samples": times}
        return row | {"weights_tb_s": speed / 1e12, "of_read": speed / read, "nvidia_smi": {QUERY: nvidia_smi()}}
