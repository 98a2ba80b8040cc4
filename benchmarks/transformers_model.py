"""Times a whole model of Transformers with its own experts and with FlashMoE's: prefill, and steps of decoding.

    python benchmarks/transformers_model.py [--layers 48] [--commit C] [--out FILE.json]

The model has Qwen3-30B-A3B's shape, random bf16 weights and --layers layers. Each case is timed for each experts
implementation, four times after a warm-up. Figures are milliseconds: medians, with the smallest and largest. Prefill:
8192 tokens in one prompt or in eight, without cache, with the logits of each prompt's last token. Decoding: one token
for each sequence, behind prompts of 128 tokens, eagerly with a dynamic cache, and as a CUDA graph with a static cache.
If an implementation fails in a case, the result has its error. `flashmoe`: FlashMoE computes the experts, behind the
model's own router; `fused`: FlashMoE computes whole MoE blocks, with the router.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from typing import Any

import torch
import transformers
from flashmoe.bench.origin import commit_option, nvidia_smi, result_path, write
from flashmoe.bench.whole_model import THEIRS, build, measure
from harness import described


def ratios(row: dict[str, Any]) -> str:
    """How many times as fast FlashMoE's implementations are as the fastest of Transformers' own."""
    theirs = [row[name]["ms"] for name in THEIRS if "ms" in row.get(name, {})]
    ours = [name for name in row if name not in THEIRS and "ms" in row[name]]
    return "  ".join(f"{name} {min(theirs) / row[name]['ms']:.2f}x" for name in ours) if theirs else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--names", nargs="+", default=[*THEIRS, "flashmoe", "fused"])
    parser.add_argument("--out")
    commit_option(parser)
    args = parser.parse_args()
    model = build(args.layers)
    rows = measure(model, args.names)
    result = described(args.commit) | {
        "transformers": transformers.__version__,
        "nvidia_smi": nvidia_smi(),
        "layers": args.layers,
        "rows": rows,
    }
    path = result_path("transformers_model", torch.cuda.get_device_name(), 1)
    write(pathlib.Path(args.out) if args.out else path, result)
    for case, row in rows.items():
        each = [f"{name} {one['ms']:.2f}" if "ms" in one else f"{name}: {one['error']}" for name, one in row.items()]
        print(f"{case:>18} | {'  '.join(each)} | {ratios(row)}")
    print(json.dumps({key: result[key] for key in ("device", "torch", "transformers", "layers")}))


if __name__ == "__main__":
    main()
