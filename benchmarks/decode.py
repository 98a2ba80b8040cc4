"""How fast one GPU decodes: calls of 1 to 256 tokens, beside the speed at which its memory is read.

    python benchmarks/decode.py [--layers NAME ...] [--tokens T ...] [--out benchmarks/results/decode/h200x1.json]

Random bf16 layers. The weights of eight layers take turns, so that none stays in the L2; the calls of all eight are one
CUDA graph, and a figure is an eighth of its time. The tokens of a call are the first T of one batch, each layer has a
router of its own. "weights": the bytes of the experts that the tokens choose, and nothing else, over the time, router
included; "of read": over the speed at which a sum reads 2 GiB of fp32, in the same run. Medians; smallest and largest.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import statistics
from collections.abc import Callable
from typing import Any

import flashmoe
import torch
from harness import QUERY, SHAPES, commit_option, described, milliseconds, nvidia_smi, write

LAYERS = 8
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
READ_BYTES = 2 << 30


def captured(call: Callable[[int], Any], calls: int) -> torch.cuda.CUDAGraph:
    """A graph of `call(0)`, `call(1)`, ..., each of which has run before."""
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
    """Bytes a second at which a sum reads."""
    data = torch.zeros(READ_BYTES // 4, device="cuda")
    graph = captured(lambda _: data.sum(), 1)
    return READ_BYTES / statistics.median(milliseconds(lambda _: graph.replay(), 16)) * 1e3


class Layers:
    """Eight layers of a shape, and the context of their calls."""

    def __init__(self, name: str, most: int) -> None:
        hidden, inner, self.experts, self.top_k, self.activation, _ = SHAPES[name]
        torch.manual_seed(1)
        normal = functools.partial(torch.randn, device="cuda", dtype=torch.bfloat16)
        self.x = normal(most, hidden)
        rows = inner * (2 if self.activation == "swiglu" else 1)
        self.weights = [
            [normal(self.experts, *shape) * 0.02 for shape in ((hidden,), (rows, hidden), (hidden, inner))]
            for _ in range(LAYERS)
        ]
        self.expert_bytes = 2 * (rows + inner) * hidden
        torch.cuda.empty_cache()  # the context's memory does not come from PyTorch's cache
        sizes = {"hidden": hidden, "intermediate": inner, "experts": self.experts, "top_k": self.top_k}
        self.context = flashmoe.Context(engine="cuda", max_tokens=most, return_mode="direct", profile={}, **sizes)

    def call(self, tokens: int, layer: int) -> torch.Tensor:
        router, w1, w2 = self.weights[layer]
        options = {"router": router, "top_k": self.top_k, "activation": self.activation}
        return flashmoe.moe(self.context, self.x[:tokens], w1, w2, **options)

    def touched_bytes(self, tokens: int) -> float:
        """Bytes of the experts that a layer's tokens choose, on average."""
        chosen = [(self.x[:tokens] @ router.mT).topk(self.top_k).indices.unique() for router, _, _ in self.weights]
        return statistics.mean(len(experts) for experts in chosen) * self.expert_bytes

    def measure(self, tokens: int, repeats: int, read: float) -> dict[str, Any]:
        graph = captured(lambda layer: self.call(tokens, layer), LAYERS)
        times = [ms / LAYERS * 1e3 for ms in milliseconds(lambda _: graph.replay(), repeats)]
        self.context.synchronize()
        speed = self.touched_bytes(tokens) / statistics.median(times) * 1e6
        row = {"tokens": tokens, "us": statistics.median(times), "min_max": [min(times), max(times)]}
        return row | {"weights_tb_s": speed / 1e12, "of_read": speed / read, "nvidia_smi": {QUERY: nvidia_smi()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", nargs="*", default=["qwen3-30b", "mixtral"], choices=SHAPES)
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS)
    parser.add_argument("--repeats", type=int, default=16)
    parser.add_argument("--out", type=pathlib.Path)
    commit_option(parser)
    args = parser.parse_args()
    read = read_speed()
    result: dict[str, Any] = {**described(args.commit), "read_tb_s": read / 1e12, "layers": []}
    print(f"{result['device']}, read at {read / 1e12:.2f} TB/s\n{'layer':>12} {'tokens':>6}       us  TB/s of read")
    for name in args.layers:
        layers = Layers(name, max(args.tokens))
        for tokens in args.tokens:
            row = {"layer": name} | layers.measure(tokens, args.repeats, read)
            result["layers"].append(row)
            print(
                f"{name:>12} {tokens:>6} {row['us']:8.1f} {row['weights_tb_s']:5.2f} {row['of_read']:7.3f}", flush=True
            )
        layers.context.close()
        del layers
        torch.cuda.empty_cache()
    if args.out:
        write(args.out, result)


if __name__ == "__main__":
    main()
