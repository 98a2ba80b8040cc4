"""A backward pass on a group of GPUs, beside one GPU's for the same number of rows and beside the bare GEMMs.

    torchrun --nproc-per-node N benchmarks/backward_group.py [--shapes NAME ...] [--out FILE.json]

For each shape, the calls below are timed in turn, in one run, by the two timers of fused_group.py. Each time is that of
the slowest rank.

  backward    the backward pass of the whole layer, under autograd: gradients of x, of the router and of the matrices of
              this rank's experts
  alone       the same of a layer on one GPU that has all experts itself, with as many tokens, and so as many rows
  floor       PyTorch's four grouped GEMMs of a backward pass alone, on as many rows, over this rank's experts
  keeps       the group's forward pass that keeps what gradients need
  inference   the group's forward pass that keeps nothing

Before the timing, four backward passes of the group must give the same gradients bit by bit; otherwise the program
ends.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
from contextlib import closing
from typing import Any

import flashmoe
import torch
import torch.distributed as dist
from backward import TIMERS
from flashmoe.bench.floors import backward_floor_call
from flashmoe.bench.joining import join_gpus
from flashmoe.bench.measure import AUTOGRAD_CYCLES, group_milliseconds, in_turn
from flashmoe.bench.origin import QUERY, commit_option, nvidia_smi, write
from flashmoe.bench.overlap import GroupLayer
from flashmoe.bench.shapes import SHAPES
from harness import described, medians_and_spread
from lone_layer import LoneLayer

DEFAULT = ("qwen3-30b", "mixtral", "paper-E64")


def calls_of(layer: Any, x: torch.Tensor, router: torch.Tensor) -> dict[str, Any]:
    """The passes of a layer, by name. The layer is this rank's alone, or the group's."""
    leaves = [each.requires_grad_() for each in (x, router, layer.w1, layer.w2)]
    moe = functools.partial(flashmoe.moe, layer.context, top_k=layer.top_k, activation=layer.activation)

    def forward(_: int) -> torch.Tensor:
        return moe(x, layer.w1, layer.w2, router=router)

    def inference(i: int) -> torch.Tensor:
        with torch.no_grad():
            return forward(i)

    y, dy = forward(0), torch.randn_like(x)

    def backward(_: int) -> Any:
        return torch.autograd.grad(y, leaves, dy, retain_graph=True)

    return {"backward": backward, "keeps": forward, "inference": inference}


def same_bits(backward: Any) -> None:
    first = backward(0)
    for _ in range(3):
        for name, ours, before in zip(("x", "router", "gate_up", "down"), backward(0), first, strict=True):
            if not torch.equal(ours.view(torch.uint8), before.view(torch.uint8)):
                raise SystemExit(f"{name}: gradients have other bits than in the call before")


def measure(name: str, tokens: int, repeats: int) -> dict[str, Any]:
    hidden, inner, experts, top_k, _, _ = SHAPES[name]
    torch.manual_seed(tokens)
    router = torch.randn(experts, hidden, device="cuda", dtype=torch.bfloat16) * 0.02
    with closing(GroupLayer(name, tokens)) as layer, closing(LoneLayer(SHAPES[name], tokens)) as lone:
        calls = calls_of(layer, layer.x, router)
        same_bits(calls["backward"])
        calls["alone"] = calls_of(lone, layer.x.detach().clone(), router.detach().clone())["backward"]
        w1, w2 = layer.w1.detach(), layer.w2.detach()
        calls["floor"] = backward_floor_call(tokens * top_k, hidden, inner, len(layer.own), w1, w2)
        timed = in_turn(functools.partial(group_milliseconds, cycles=AUTOGRAD_CYCLES), calls, repeats)
        lone.context.synchronize()
        layer.context.synchronize()
    row: dict[str, Any] = {"shape": name, "tokens": tokens, "ranks": dist.get_world_size()}
    row |= medians_and_spread(timed, TIMERS)
    for kind in (TIMERS[True], TIMERS[False]):
        for beside in ("alone", "floor"):
            row[f"{kind}over_{beside}"] = row[f"{kind}backward_ms"] / row[f"{kind}{beside}_ms"]
        row[f"{kind}keeps_ratio"] = row[f"{kind}keeps_ms"] / row[f"{kind}inference_ms"]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=DEFAULT)
    parser.add_argument("--repeats", type=int, default=16)
    parser.add_argument("--out", type=pathlib.Path)
    commit_option(parser)
    args = parser.parse_args()
    rank = join_gpus()
    result: dict[str, Any] = {**described(args.commit, dist.get_world_size()), "shapes": []}
    for name in args.shapes:
        row = measure(name, SHAPES[name][-1][0], args.repeats)
        row["nvidia_smi"] = {QUERY: nvidia_smi().splitlines()}
        result["shapes"].append(row)
        if rank == 0:
            print(
                f"{name:>12} {row['tokens']:>6} backward {row['backward_ms']:.3f} ms, over one GPU's "
                f"{row['over_alone']:.3f} (plain {row['plain_over_alone']:.3f}), "
                f"over the floor {row['over_floor']:.3f} ({row['plain_over_floor']:.3f}); "
                f"keeps / inference {row['keeps_ratio']:.3f}",
                flush=True,
            )
        torch.cuda.empty_cache()
    if args.out and rank == 0:
        write(args.out, result)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
