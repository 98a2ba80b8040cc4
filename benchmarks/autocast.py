"""What torch.autocast costs layers that train on one GPU: forward and backward pass, without an optimizer.

    python benchmarks/autocast.py [--shape NAME] [--tokens T] [--layers 12] [--float32-layers 4] [--out FILE.json]

The calls below are timed in turn, in one run, by two timers ("busy": the GPU is kept busy before each call, so that the
figure has no gap before a launch in it; "plain": the figure includes the launches):

  without     layers in bfloat16, outside of autocast
  within      the same layers within autocast to bfloat16, which has nothing to cast
  master      fewer layers in float32 within autocast, which casts their weights in each forward pass
  few         as many layers as `master` has, in bfloat16, outside of autocast
  casts       PyTorch's casts alone, for the layers of `master`: x and weights to bfloat16, their gradients to float32

Layers are residual: each adds its result to its input. Before the timing, the results of `within` must have the same
bits as those of `without`, and the results of `master` the same bits as those of `few`, whose weights are the rounded
ones; otherwise the program ends.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import torch
from flashmoe import nn
from flashmoe.bench.measure import AUTOGRAD_CYCLES, in_turn, milliseconds
from flashmoe.bench.origin import QUERY, commit_option, nvidia_smi, write
from flashmoe.bench.shapes import SHAPES
from harness import described, medians_and_spread

TIMERS = {True: "busy_", False: "plain_"}


def made(shape: str, layers: int, dtype: torch.dtype) -> list[nn.MoE]:
    """Layers of random weights. They are given no context."""
    hidden, inner, experts, top_k, activation, _ = SHAPES[shape]
    options = {"activation": activation, "round_logits": True}  # as autocast does: else outside of it bits would differ
    with torch.device("cuda"):
        stack = [nn.MoE(hidden, inner, experts, top_k, dtype=dtype, **options) for _ in range(layers)]
    for layer in stack:
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
    return stack


def passes(stack: list[nn.MoE], x: torch.Tensor, dy: torch.Tensor, autocast: bool) -> Callable[[int], torch.Tensor]:
    """A function that runs the forward and backward pass of all layers, and returns the forward pass's result."""
    parameters = [parameter for layer in stack for parameter in layer.parameters()]

    def call(_: int) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            y = x
            for layer in stack:
                y = y + layer(y)
        torch.autograd.grad(y, [x, *parameters], dy.to(y.dtype))
        return y.detach()

    return call


def casts(stack: list[nn.MoE], x: torch.Tensor) -> Callable[[int], None]:
    """A function that makes the casts of one pass of float32 layers: tensors to bfloat16, gradients to float32."""
    tensors = [*(parameter.detach() for layer in stack for parameter in layer.parameters()), *[x.detach()] * len(stack)]
    gradients = [each.bfloat16() for each in tensors]

    def call(_: int) -> None:
        for each, gradient in zip(tensors, gradients, strict=True):
            each.to(torch.bfloat16)
            gradient.to(torch.float32)

    return call


def measure(shape: str, tokens: int, layers: int, master_layers: int, repeats: int) -> dict[str, Any]:
    torch.manual_seed(tokens)
    hidden = SHAPES[shape][0]
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x)
    stack = made(shape, layers, torch.bfloat16)
    few = stack[:master_layers]
    master = made(shape, master_layers, torch.float32)
    with torch.no_grad():
        for ours, theirs in zip(master, few, strict=True):
            for to, parameter in zip(ours.parameters(), theirs.parameters(), strict=True):
                to.copy_(parameter)
    calls: dict[str, Any] = {
        "without": passes(stack, x, dy, False),
        "within": passes(stack, x, dy, True),
        "master": passes(master, x, dy, True),
        "few": passes(few, x, dy, False),
    }
    results = {name: call(0) for name, call in calls.items()}
    for name, other in (("within", "without"), ("master", "few")):
        if not torch.equal(results[name], results[other]):
            raise SystemExit(f"{name}: other bits than {other}")
    del results
    calls["casts"] = casts(master, x)
    timer = functools.partial(milliseconds, cycles=AUTOGRAD_CYCLES)
    row: dict[str, Any] = {"shape": shape, "tokens": tokens, "layers": layers, "float32_layers": master_layers}
    row |= medians_and_spread(in_turn(timer, calls, repeats), TIMERS)
    for kind in TIMERS.values():
        row[f"{kind}within_ratio"] = row[f"{kind}within_ms"] / row[f"{kind}without_ms"]
        expected = row[f"{kind}few_ms"] + row[f"{kind}casts_ms"]
        row[f"{kind}master_ratio"] = row[f"{kind}master_ms"] / expected
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-30b", choices=list(SHAPES))
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--float32-layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=16)
    parser.add_argument("--out", type=pathlib.Path)
    commit_option(parser)
    args = parser.parse_args()
    row = measure(args.shape, args.tokens, args.layers, args.float32_layers, args.repeats)
    row["nvidia_smi"] = {QUERY: nvidia_smi()}
    result = {**described(args.commit), "shapes": [row]}
    print(f"{result['device']}, {args.shape}, {args.tokens} tokens: {args.layers} layers in bfloat16 within autocast")
    for kind in TIMERS.values():
        print(
            f"  {kind[:-1]:>5}: {row[f'{kind}within_ms']:.2f} ms, {row[f'{kind}within_ratio']:.3f} of outside; "
            f"{args.float32_layers} in float32 {row[f'{kind}master_ms']:.2f} ms, {row[f'{kind}master_ratio']:.3f} of "
            f"{row[f'{kind}few_ms']:.2f} ms in bfloat16 and {row[f'{kind}casts_ms']:.2f} of casts"
        )
    if args.out:
        write(args.out, result)


if __name__ == "__main__":
    main()
