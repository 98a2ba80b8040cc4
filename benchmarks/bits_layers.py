"""The layers whose bits same_bits.py compares. This file only describes them; bits.py computes them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

SHARING = 4
"""The number of ranks that share the GPU."""


@dataclass(frozen=True)
class Layer:
    """Describes one call of a group of ranks: everything except the values of its tensors."""

    name: str
    tokens: tuple[int, ...]
    """How many tokens each rank has."""
    hidden: int
    inner: int
    experts: int
    top_k: int
    dtype: str = "bfloat16"
    activation: str = "swiglu"
    given: str = ""
    """The type of the ids, if the caller gives the routing; empty: the layer has a router."""
    biases: bool = False
    skew: float = 0.0
    """How unevenly tokens choose experts: from 0 (all experts equally likely) to 50 (nearly all tokens choose the same
    experts)."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the call."""
    context: dict[str, Any] = field(default_factory=dict)
    """The options of its context, besides sizes. Layers with the same `dtype` and `context` share one context."""
    strided: bool = False
    """Whether there is unused memory between the rows of x."""
    graph: bool = False
    """Whether the call is also captured as a CUDA graph, and the output of a replay is hashed too."""

    def owners(self) -> list[int]:
        """The rank of each expert. If the layer names no placement, ranks have contiguous shares of the experts; if the
        shares cannot be equal, those of the first ranks are larger by one."""
        ranks = len(self.tokens)
        size, rest = divmod(self.experts, ranks)
        contiguous = [rank for rank in range(ranks) for _ in range(size + (rank < rest))]
        return self.options.get("placement", contiguous)


UNEVEN = (130, 0, 1, 61, 17, 0, 96, 33)
MODES = ("direct", "reduced")


def scattered(experts: int, ranks: int) -> list[int]:
    return [(7 * expert + 1) % ranks for expert in range(experts)]


def cpu_layers(ranks: int) -> list[Layer]:
    """Layers of groups on the CPU engine, in each type and return mode. They have every activation, a router or a given
    routing, dropped choices, odd sizes, and ranks without tokens or experts."""
    usual = {"hidden": 64, "inner": 48, "experts": 16, "top_k": 4}
    even = (64,) * ranks
    kept = {"capacity_factor": 1.0}
    cases: dict[str, dict[str, Any]] = {
        "swiglu": usual,
        "relu, given": {**usual, "top_k": 3, "activation": "relu", "given": "int32", "biases": True},
        "gelu": {**usual, "top_k": 2, "activation": "gelu", "biases": True},
        "silu, given, drops": {**usual, "activation": "silu", "given": "int64", "options": {"capacity_factor": 0.75}},
        "drops": {**usual, "biases": True, "options": {"capacity_factor": 0.5}},
        "odd sizes": {"hidden": 37, "inner": 29, "experts": 13, "top_k": 5, "biases": True},
        "uneven": {**usual, "tokens": UNEVEN[:ranks]},
        "one rank's tokens": {**usual, "tokens": (90, *[0] * (ranks - 1))},
        "no tokens": {**usual, "tokens": (0,) * ranks},
        "skewed": {**usual, "skew": 50.0, "options": {"placement": scattered(16, ranks)}},
        "one choice": {**usual, "top_k": 1, "activation": "gelu", "options": {"renormalize": False}},
        "one rank's experts": {**usual, "options": {"placement": [ranks - 1] * 16}},
        "fewer experts than ranks": {**usual, "experts": 5, "top_k": 3},
        "many tiles": {"hidden": 320, "inner": 264, "experts": 4, "top_k": 2, "tokens": (300,) * ranks},
        "room for what is kept": {**usual, "given": "int32", "options": {"capacity_factor": 0.9}, "context": kept},
    }
    made = []
    for (case, spec), dtype, mode in itertools.product(cases.items(), ("float32", "bfloat16", "float16"), MODES):
        named = {"tokens": even, **spec, "options": {**spec.get("options", {}), "return_mode": mode}}
        if "placement" in named["options"]:  # the context must have room for as many experts as one rank gets
            named["context"] = {"placement": named["options"]["placement"]}
        made.append(Layer(name=f"cpu, {ranks} ranks, {dtype}, {mode}: {case}", dtype=dtype, **named))
    return made


ARITHMETIC: dict[str, dict[str, Any]] = {
    "bf16 swiglu": {},
    "bf16 gelu": {"activation": "gelu"},
    "bf16 relu": {"activation": "relu"},
    "bf16 silu": {"activation": "silu"},
    "fp16 swiglu": {"dtype": "float16"},
    "fp32 swiglu": {"dtype": "float32"},
    "exact swiglu": {"dtype": "float32", "options": {"exact": True}},
}
GPU_VARIANTS = [
    *(["--activation", activation] for activation in ("swiglu", "gelu", "relu", "silu")),
    ["--dtype", "float16"],
    ["--dtype", "float32"],
    ["--dtype", "float32", "--exact"],
]
"""The arguments of `flashmoe compile` for the kernels of `ARITHMETIC`."""


def gpu_layers() -> list[Layer]:
    """Layers of one GPU. In each arithmetic: a few tokens, calls that are joined, and calls with Combine. Besides, some
    large layers."""
    usual = {"hidden": 512, "inner": 256, "experts": 16, "top_k": 4}
    few = {"hidden": 320, "inner": 192, "experts": 24, "top_k": 5}
    drops = {"capacity_factor": 0.7}
    cases: dict[str, dict[str, Any]] = {
        "1 token": {**few, "tokens": (1,), "biases": True},
        "3 tokens, given": {**few, "tokens": (3,), "given": "int64"},
        "8 tokens, skewed": {**few, "tokens": (8,), "skew": 3.0},
        "8 tokens, drops": {**few, "tokens": (8,), "options": drops},
        "9 tokens": {**few, "tokens": (9,)},
        "joined": {"tokens": (700,), "hidden": 264, "inner": 136, "experts": 5, "top_k": 2},
        "joined, one choice": {"tokens": (900,), "hidden": 520, "inner": 128, "experts": 6, "top_k": 1},
        "joined, given": {**usual, "tokens": (1024,), "experts": 4, "top_k": 2, "given": "int32", "biases": True},
        "combined": {**usual, "tokens": (1500,), "biases": True},
        "combined, given, drops": {**usual, "tokens": (1500,), "given": "int64", "options": drops},
        "combined, drops": {**usual, "tokens": (777,), "biases": True, "options": {"capacity_factor": 0.5}},
        "skewed": {"tokens": (2048,), "hidden": 1024, "inner": 512, "experts": 64, "top_k": 4, "skew": 50.0},
        "odd sizes": {"tokens": (1000,), "hidden": 136, "inner": 72, "experts": 13, "top_k": 5, "biases": True},
        "as scored": {**usual, "tokens": (333,), "options": {"renormalize": False}},
        "rows apart": {**usual, "tokens": (200,), "strided": True},
        "graph": {**usual, "tokens": (300,), "graph": True},
        "graph of 5 tokens": {**few, "tokens": (5,), "graph": True},
    }
    made = []
    for (how, arithmetic), (case, spec) in itertools.product(ARITHMETIC.items(), cases.items()):
        options = {**arithmetic.get("options", {}), **spec.get("options", {})}
        made.append(Layer(name=f"gpu, {how}: {case}", **{**arithmetic, **spec, "options": options}))
    qwen3 = {"hidden": 2048, "inner": 768, "experts": 128, "top_k": 8}
    paper = {"hidden": 2048, "inner": 2048, "top_k": 2, "activation": "gelu"}
    kept = {"options": {"capacity_factor": 1.0}, "context": {"capacity_factor": 1.0}}
    large: dict[str, dict[str, Any]] = {
        **{f"Qwen3, {tokens} tokens": {**qwen3, "tokens": (tokens,)} for tokens in (1, 8, 64, 1024, 8192)},
        **{f"paper, {e} experts": {**paper, "experts": e, "tokens": (16384,)} for e in (8, 64)},
        "Mixtral": {"hidden": 4096, "inner": 14336, "experts": 8, "top_k": 2, "tokens": (2048,)},
        "32 of 1024 experts": {"hidden": 128, "inner": 64, "experts": 1024, "top_k": 32, "tokens": (500,)},
        "Qwen3 in fp16": {**qwen3, "tokens": (1024,), "dtype": "float16"},
        "Qwen3 in fp32": {**qwen3, "experts": 64, "tokens": (1024,), "dtype": "float32"},
        "four thread blocks": {**usual, "tokens": (2000,), "context": {"processors": 4}},
        "four thread blocks, 8 tokens": {**few, "tokens": (8,), "context": {"processors": 4}},
        "room for what is kept": {**usual, "tokens": (1500,), "given": "int32", **kept},
    }
    return made + [
        Layer(name=f"gpu: {case}", **{"context": {"max_tokens": max(spec["tokens"])}, **spec})
        for case, spec in large.items()
    ]


WAYS: dict[str, dict[str, Any]] = {
    "direct": {"return_mode": "direct"},
    "reduced": {"return_mode": "reduced"},
    "rdma": {"transport": "rdma"},
}
PUT = ("bfloat16", "float32")
"""The types, only with swiglu, that are computed by NVSHMEM's puts too. They are few because each takes a kernel of its
own."""


def group_layers() -> list[Layer]:
    """Layers of four ranks that share a GPU, in each of the `WAYS`."""
    usual = {"hidden": 512, "inner": 256, "experts": 16, "top_k": 4}
    even = (512,) * SHARING
    cases: dict[str, dict[str, Any]] = {
        "even": {"hidden": 1024, "inner": 512, "experts": 32, "top_k": 4},
        "two choices, given": {**usual, "top_k": 2, "given": "int64", "biases": True},
        "odd sizes": {"hidden": 136, "inner": 72, "experts": 13, "top_k": 5, "biases": True},
        "very uneven": {**usual, "tokens": (2048, 9, 33, 500)},
        "one rank without": {**usual, "tokens": (700, 0, 300, 1)},
        "one rank's tokens": {**usual, "tokens": (0, 2000, 0, 0)},
        "few each": {**usual, "tokens": (1, 3, 8, 2)},
        "no tokens": {**usual, "tokens": (0,) * SHARING},
        "drops": {**usual, "top_k": 2, "given": "int32", "options": {"capacity_factor": 0.7}},
        "one choice": {**usual, "top_k": 1},
        "one rank's experts": {**usual, "options": {"placement": [1] * 16}},
        "scattered": {**usual, "experts": 24, "options": {"placement": scattered(24, SHARING)}},
        "skewed": {"hidden": 1024, "inner": 512, "experts": 64, "top_k": 4, "skew": 50.0},
        "Qwen3": {"hidden": 2048, "inner": 256, "experts": 128, "top_k": 8, "tokens": (1024,) * SHARING},
    }
    arithmetic = {
        "bf16 swiglu": {},
        "fp32 swiglu": {"dtype": "float32"},
        "bf16 gelu": {"activation": "gelu"},
        "fp16 swiglu": {"dtype": "float16"},
    }
    made = []
    for (way, context), (how, spec), (case, sizes) in itertools.product(
        WAYS.items(), arithmetic.items(), cases.items()
    ):
        if way != "rdma" or (spec.get("dtype", "bfloat16") in PUT and "activation" not in spec):
            name = f"group, {way}, {how}: {case}"
            made.append(Layer(name=name, **{"tokens": even, **spec, **sizes, "context": context}))
    return made
