"""The time that a shared expert adds to a layer, beside its bare GEMMs; and the time that DeepSeek's router adds.

    python benchmarks/shared_expert.py [--out benchmarks/results/shared_expert/h200x1.json]

The shared experts are Qwen2-MoE's (with a gate, four times as wide as an expert) and DeepSeek-V3's (as wide as an
expert). These are timed in turn, in one run: "with" and "without", the layer with and without its shared expert;
"gemms", the shared expert's two GEMMs alone (PyTorch's, on ready inputs, without activation); "apart", the layer
without, followed by "gemms". "share" is (with - without) / (apart - without): "with" and "apart" are about equally
long, so the GPU has the same clocks in both. "share_alone" is (with - without) / gemms. DeepSeek-V3's router (sigmoid,
bias of the choice, groups, scale) is compared with a softmax and top-k ("softmax") on the same layer without shared
expert; both spread the tokens about equally over the experts. Figures are medians of --repeats calls, by three timers:
"busy" (the GPU is kept busy before the call, so that the launch is not in the figure), "plain" (the launch is in it),
and "sustained" (each call follows others of its kind, so the GPU has the clocks that its power allows for long).
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import statistics
from typing import Any

import flashmoe
import torch
from flashmoe.bench.floors import shared_gemms
from flashmoe.bench.measure import in_turn, milliseconds
from flashmoe.bench.origin import QUERY, commit_option, nvidia_smi, write
from harness import described, sustained

LAYERS: dict[str, dict[str, Any]] = {
    "qwen2-moe": {
        "sizes": {"hidden": 2048, "intermediate": 1408, "experts": 64, "top_k": 4},
        "tokens": 8192,
        "shared_intermediate": 5632,
        "gate": True,
        "router": {"renormalize": False},
    },
    "deepseek-v3": {
        "sizes": {"hidden": 7168, "intermediate": 2048, "experts": 256, "top_k": 8},
        "tokens": 4096,
        "shared_intermediate": 2048,
        "gate": False,
        "router": {"score": "sigmoid", "groups": 8, "top_groups": 4, "routed_scale": 2.5},
    },
}
TIMERS = {"busy": True, "plain": False, "sustained": None}
ALLOWED_SHARE, ALLOWED_ROUTER = 1.10, 1.02


def measure(name: str, repeats: int, experts: int | None) -> dict[str, Any]:
    layer = LAYERS[name]
    sizes = layer["sizes"] | ({"experts": experts} if experts else {})
    tokens, width, hidden = layer["tokens"], layer["shared_intermediate"], sizes["hidden"]
    make = {"device": "cuda", "dtype": torch.bfloat16}
    torch.manual_seed(1)
    xs = [torch.randn(tokens, hidden, **make) for _ in range(4)]
    gate_up = torch.empty(sizes["experts"], 2 * sizes["intermediate"], hidden, **make).normal_(std=0.02)
    down = torch.empty(sizes["experts"], hidden, sizes["intermediate"], **make).normal_(std=0.02)
    router = torch.randn(sizes["experts"], hidden, **make) * 0.02
    bias = {"choice_bias": 0.01 * torch.randn(sizes["experts"], device="cuda")} if "score" in layer["router"] else {}
    shared_gate_up = torch.randn(2 * width, hidden, **make) * 0.02
    shared = {"shared_gate_up": shared_gate_up, "shared_down": torch.randn(hidden, width, **make) * 0.02}
    if layer["gate"]:
        shared["shared_gate"] = torch.randn(1, hidden, **make) * 0.02
    h = torch.randn(tokens, width, **make)
    torch.cuda.empty_cache()
    with flashmoe.Context(
        engine="cuda", max_tokens=tokens, dtype="bfloat16", return_mode="direct", profile={}, shared_intermediate=width,
        **sizes,
    ) as context:  # fmt: skip
        moe = functools.partial(
            flashmoe.moe, context, gate_up_proj=gate_up, down_proj=down, router=router, top_k=sizes["top_k"]
        )
        calls = {
            "with": lambda i: moe(xs[i % 4], **layer["router"], **bias, **shared),
            "without": lambda i: moe(xs[i % 4], **layer["router"], **bias),
            "gemms": lambda i: shared_gemms(xs[i % 4], shared_gate_up, shared["shared_down"], h),
        }
        calls["apart"] = lambda i: (calls["without"](i), calls["gemms"](i))
        if bias:
            calls["softmax"] = lambda i: moe(xs[i % 4])
        timed = {**in_turn(milliseconds, calls, repeats), **sustained(calls, repeats)}
        context.synchronize()
    row: dict[str, Any] = {"layer": name, "tokens": tokens, **sizes, "shared_intermediate": width}
    for how, busy in TIMERS.items():
        medians = {what: statistics.median(timed[what, busy]) for what in calls}
        row[how] = {f"{what}_ms": value for what, value in medians.items()}
        added = medians["with"] - medians["without"]
        row[how]["share"] = added / (medians["apart"] - medians["without"])
        row[how]["share_alone"] = added / medians["gemms"]
        if bias:
            row[how]["router"] = medians["without"] / medians["softmax"]
    row["nvidia_smi"] = {QUERY: nvidia_smi()}
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", nargs="*", default=list(LAYERS))
    parser.add_argument("--experts", type=int, help="instead of the model's, where its weights do not fit")
    parser.add_argument("--repeats", type=int, default=32)
    parser.add_argument("--out", type=pathlib.Path)
    commit_option(parser)
    args = parser.parse_args()
    result = {**described(args.commit), "layers": [measure(name, args.repeats, args.experts) for name in args.layers]}
    print(result["device"])
    for row in result["layers"]:
        for how in TIMERS:
            print(f"{row['layer']:>12} {how:>5} " + " ".join(f"{what} {value:.4f}" for what, value in row[how].items()))
    if args.out:
        write(args.out, result)
    busy = [row["busy"] for row in result["layers"]]
    return int(any(row["share"] > ALLOWED_SHARE or row.get("router", 0.0) > ALLOWED_ROUTER for row in busy))


if __name__ == "__main__":
    raise SystemExit(main())
