"""Calls whose types are right, and wrong ones: tests/test_types.py runs mypy and pyright on this file."""

from typing import Any, assert_type

import flashmoe
import numpy as np
import torch
from flashmoe.launch import run_ranks
from flashmoe.nn import MoE
from numpy.typing import NDArray

ctx = flashmoe.Context(max_tokens=4, hidden=8, intermediate=4, experts=4, top_k=2, dtype="float32")
x: NDArray[Any] = np.ones((4, 8), np.float32)
up, down, router = np.ones((4, 8, 8), np.float32), np.ones((4, 8, 4), np.float32), np.ones((4, 8), np.float32)
tensors = [torch.from_numpy(each) for each in (x, up, down, router)]
logits = torch.empty(4, 4)

assert_type(flashmoe.moe(x, up, down, router=router, top_k=2), NDArray[Any])
assert_type(flashmoe.moe(ctx, x, up, down, router=router, top_k=2), NDArray[Any])
assert_type(flashmoe.moe(tensors[0], tensors[1], tensors[2], router=tensors[3], top_k=2), torch.Tensor)
assert_type(
    flashmoe.moe(ctx, tensors[0], tensors[1], tensors[2], router=tensors[3], top_k=2, router_logits=logits),
    torch.Tensor,
)

layer = MoE(8, 4, 4, 2, activation="swiglu", dtype=torch.float32)
for each in (layer, MoE(ctx, 8, 4, 4, 2), MoE(ctx, hidden=8, intermediate=4, experts=4, top_k=2, score="sigmoid")):
    assert_type(each.forward(tensors[0]), torch.Tensor)


def on_rank(rank: int, ranks: int, name: str) -> float:
    return 0.5 * rank


if __name__ == "__main__":
    assert_type(run_ranks(2, on_rank, [(), ()]), list[float])

report = ctx.last_call
tasks: int = 0 if report is None else sum(report.tasks.values())

# Each of these calls is wrong for one reason.
flashmoe.moe(x, up, down, router=router, top_k=2, activation="swigloo")  # WRONG
flashmoe.moe(ctx, x, up, down, router=router, top_k=2, score="max")  # WRONG
flashmoe.moe(x, up, down, router=router, topk=2)  # WRONG
MoE(8, 4, 4, 2, return_mode="fast")  # WRONG
MoE(ctx, 8, 4, 4)  # WRONG
flashmoe.release(1)  # WRONG
