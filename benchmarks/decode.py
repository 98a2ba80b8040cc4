"""How fast one GPU decodes: calls of 1 to 256 tokens, compared with the speed at which its memory can be read.

    python benchmarks/decode.py [--layers NAME ...] [--types bf16 fp8 mxfp4] [--tokens T ...]
                                [--out benchmarks/results/decode/h200x1.json]

Layers have random weights and x in bf16. The experts' matrices are in bf16, in e4m3 with a scale for each block of
128 x 128, or in MXFP4. For MXFP4 there is no kernel of more than 16 rows for each expert on average, so calls with more
are left out. Layers of gpt-oss have its clamped SwiGLU, interleaved rows and biases. One CUDA graph calls eight layers
one after the other, so that no layer's weights stay in the L2; a time is an eighth of the graph's. The tokens of a call
are the first T of one batch, and each layer has a router of its own. "weights_tb_s" is the bytes of the chosen experts'
matrices and scales, divided by the time of the whole layer, router included. "of_read" is this speed divided by the
speed at which a sum reads 2 GiB of fp32 in the same run. Times are medians, with the smallest and largest.
"""

from __future__ import annotations

import argparse
import itertools
import pathlib
from typing import Any

import torch
from flashmoe.bench.decoding import OF_GPT_OSS, TOKENS, TYPES, Layers, read_speed
from flashmoe.bench.origin import commit_option, write
from flashmoe.bench.shapes import SHAPES
from harness import described


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", nargs="*", default=["qwen3-30b", "mixtral"], choices=[*SHAPES, *OF_GPT_OSS])
    parser.add_argument("--types", nargs="*", default=["bf16", "fp8"], choices=TYPES)
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS)
    parser.add_argument("--repeats", type=int, default=16)
    parser.add_argument("--out", type=pathlib.Path)
    commit_option(parser)
    args = parser.parse_args()
    read = read_speed()
    result: dict[str, Any] = {**described(args.commit), "read_tb_s": read / 1e12, "layers": []}
    print(f"{result['device']}, read at {read / 1e12:.2f} TB/s\n{'layer':>17} {'tokens':>6}       us  TB/s of read")
    for name, weight_type in itertools.product(args.layers, args.types):
        layers = Layers(name, max(args.tokens), weight_type)
        few = 16 * layers.experts // layers.top_k  # the most tokens for which there is a kernel for MXFP4
        for tokens in (each for each in args.tokens if weight_type != "mxfp4" or each <= few):
            row = {"layer": name, "type": weight_type} | layers.measure(tokens, args.repeats, read)
            result["layers"].append(row)
            figures = f"{tokens:>6} {row['us']:8.1f} {row['weights_tb_s']:5.2f} {row['of_read']:7.3f}"
            print(f"{name:>12} {weight_type} {figures}", flush=True)
        layers.context.close()
        del layers
        torch.cuda.empty_cache()
    if args.out:
        write(args.out, result)


if __name__ == "__main__":
    main()
