"""Every table and figure of both papers, the suites that regenerate them, and the values that the papers state.

FlashDMoE: Aimuyo, Oh and Singh, 2025. COMET: Zhang et al., MLSys 2025. Values are those that a paper states in words or
tables; none is read off its pictures.
"""

from __future__ import annotations

from typing import NamedTuple


class Item(NamedTuple):
    """A table or figure of a paper."""

    paper: str
    name: str
    shows: str
    suite: str | None = None
    """The suite of `flashmoe bench` that regenerates it; None: no suite does."""
    needs: str | None = None
    """With a suite: what the published measurement needs that the suite does without. Without a suite: why there is no
    suite."""


_DRAWING = "a drawing"

ITEMS = (
    Item("FlashDMoE", "figure 1.1", "Transformer blocks with and without MoE", needs=_DRAWING),
    Item("FlashDMoE", "figure 1.2", "latency by number of experts", "experts"),
    Item("FlashDMoE", "figure 1.3", "schedules that overlap, and that do not", needs=_DRAWING),
    Item("FlashDMoE", "table 1.1", "launched GPU operations", "launches"),
    Item("FlashDMoE", "figure 1.4", "summary of figures 6.1 to 6.5", "tokens"),
    Item("FlashDMoE", "figures 1.5, 1.6", "actors; the address space", needs=_DRAWING),
    Item("FlashDMoE", "figure 3.1", "stragglers of a synchronous all-to-all", "stragglers"),
    Item("FlashDMoE", "figure 3.2", "idle time that another schedule uses", needs=_DRAWING),
    Item("FlashDMoE", "figure 3.3", "CUDA API calls of a forward pass", "trace-api"),
    Item("FlashDMoE", "figures 4.1 to 5.3", "the kernel, its tasks, its layout", needs=_DRAWING),
    Item("FlashDMoE", "table 6.1", "implementation metrics", "metrics"),
    Item("FlashDMoE", "figure 6.1", "latency by tokens a GPU, 4 and 8 GPUs", "tokens"),
    Item(
        "FlashDMoE",
        "figure 6.2",
        "SM utilization",
        "utilization",
        "hardware counters (ncu)",
    ),
    Item("FlashDMoE", "figure 6.3", "latency and overlap efficiency by number of GPUs", "gpus"),
    Item("FlashDMoE", "figure 6.4", "throughput by number of GPUs", "gpus"),
    Item("FlashDMoE", "figure 6.5", "latency by number of experts", "experts"),
    Item("FlashDMoE", "figure 6.6", "latency on several machines", needs="machines with GPUs and a network of RDMA"),
    Item("FlashDMoE", "table 6.2", "memory", "memory"),
    Item(
        "FlashDMoE",
        "figure A.1",
        "memory throughput in FP16 and FP32",
        "shared-memory",
        "hardware counters (ncu)",
    ),
    Item("COMET", "table 1", "symbols", needs="a list"),
    Item("COMET", "figure 1", "communication's part of a model's time", "breakdown"),
    Item("COMET", "figures 2 to 7", "the layer, its dependencies, the kernel", needs=_DRAWING),
    Item("COMET", "figure 8", "thread blocks for communication", "split"),
    Item("COMET", "table 2", "sizes of models", needs="a list: the shapes of `tokens`"),
    Item("COMET", "figure 9", "whole models", "models"),
    Item("COMET", "figure 10", "one layer by tokens", "tokens"),
    Item("COMET", "figure 11", "breakdown of a layer's time", "breakdown"),
    Item("COMET", "figure 12", "expert times tensor parallelism", "parallelism"),
    Item("COMET", "figure 13", "experts and experts a token", "topk"),
    Item("COMET", "figure 14, left", "uneven experts", "imbalance"),
    Item("COMET", "figure 14, right", "GPUs without NVLink", "parallelism", "GPUs joined by PCIe (L20)"),
    Item("COMET", "table 3", "NVSHMEM's memory", "memory"),
)


class Published(NamedTuple):
    """A value as a paper states it."""

    suite: str
    what: str
    value: float
    unit: str
    of: str
    """Where the paper states it, and on which machine it was measured."""


_FLASHDMOE = "FlashDMoE, section {}; H100, float32"
_LAUNCHES = "FlashDMoE, table 1.1; 2 GPUs, 64 experts"
_COMET = "COMET, section 5.3; 8 H800"

PUBLISHED = (
    *(
        Published("launches", what, count, "GPU operations", _LAUNCHES)
        for what, count in {
            "FlashDMoE": 1,
            "COMET": 33,
            "Megatron-LM, CUTLASS": 85,
            "Megatron-LM, TE": 261,
            "Megatron-LM + DeepEP": 432,
            "DeepSpeedMoE": 550,
        }.items()
    ),
    *(
        Published(
            "utilization", what, percent, "% SM cycles", "FlashDMoE, section 6.3; 2 A100, 8192 tokens, 64 experts"
        )
        for what, percent in {
            "FlashDMoE": 93.17,
            "Megatron-LM, TE": 59.11,
            "COMET": 42.31,
            "DeepEP + Megatron-LM": 13.55,
            "FasterMoE": 9.67,
        }.items()
    ),
    Published("tokens", "FlashDMoE over Megatron-TE, 16384 tokens, 4 GPUs", 4.6, "times", _FLASHDMOE.format("6.2")),
    Published("tokens", "FlashDMoE over FasterMoE, 16384 tokens, 4 GPUs", 2.6, "times", _FLASHDMOE.format("6.2")),
    Published("tokens", "FlashDMoE over baselines, 8 GPUs, at most", 6.4, "times", _FLASHDMOE.format("6.2")),
    Published("tokens", "COMET over its baselines, at least", 1.28, "times", _COMET),
    Published("tokens", "COMET over its baselines, at most", 2.37, "times", _COMET),
    Published("gpus", "FlashDMoE, 8 GPUs", 17.7, "Mtokens/s", _FLASHDMOE.format("6.5")),
    Published(
        "gpus",
        "FlashDMoE's overlap efficiency over others', 8 GPUs",
        4.0,
        "times",
        _FLASHDMOE.format("6.4"),
    ),
    Published("experts", "FlashDMoE over baselines, 128 experts, 4 GPUs", 4.0, "times", _FLASHDMOE.format("6.6")),
    Published("experts", "FlashDMoE over baselines, 128 experts, 8 GPUs", 6.6, "times", _FLASHDMOE.format("6.6")),
    Published("stragglers", "all-to-all, p95 over mean, 32 A100", 1.32, "times", "FlashDMoE, section 3"),
    Published("stragglers", "all-to-all, p95, 8 V100 of a virtual machine", 11.0, "times", "FlashDMoE, section 3"),
    Published("breakdown", "communication hidden by COMET", 86.5, "%", _COMET),
    Published("breakdown", "communication hidden by Tutel", 68.6, "%", _COMET),
    Published("breakdown", "communication hidden by FasterMoE", 29.2, "%", _COMET),
    Published("models", "COMET's latency under Megatron-CUTLASS's", 34.1, "%", "COMET, section 5.2; 8 H800"),
    Published("models", "COMET's latency under Megatron-TE's", 42.6, "%", "COMET, section 5.2; 8 H800"),
    Published("models", "COMET's latency under FasterMoE's", 44.4, "%", "COMET, section 5.2; 8 H800"),
    Published("models", "COMET's latency under Tutel's", 31.8, "%", "COMET, section 5.2; 8 H800"),
    Published("topk", "COMET over its baselines, at least", 1.52, "times", "COMET, section 5.4; 8 H800"),
    Published("topk", "COMET over its baselines, at most", 2.23, "times", "COMET, section 5.4; 8 H800"),
    *(
        Published("metrics", what, value, unit, "FlashDMoE, table 6.1; SM 80")
        for what, value, unit in (
            ("registers per thread", 255, ""),
            ("spill stores and loads", 0, "bytes"),
            ("shared memory per block", 46, "KB"),
            ("lines of code", 6820, ""),
            ("compilation", 53, "s"),
            ("binary", 29, "MB"),
        )
    ),
)
