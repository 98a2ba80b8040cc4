"""Times layers with the installed flashmoe as it is told over a pipe: the worker of old_new.py.

Standard input has a JSON object a line, standard output its answers. The context and the weights of a layer stay from
its `make` to its `drop`, so that processes with different versions can be timed in turn.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import flashmoe
import torch
from harness import SHAPES, milliseconds


class Made:
    """A layer of random weights that calls are made of, in bf16."""

    def __init__(self, shape: str, tokens: int) -> None:
        hidden, inner, experts, top_k, activation, _ = SHAPES[shape]
        torch.manual_seed(tokens)
        make = {"device": "cuda", "dtype": torch.bfloat16}
        router = torch.randn(experts, hidden, **make) * 0.02
        w1 = torch.randn(experts, (2 if activation == "swiglu" else 1) * inner, hidden, **make) * 0.02
        w2 = torch.randn(experts, hidden, inner, **make) * 0.02
        xs = [torch.randn(tokens, hidden, **make) for _ in range(4)]
        torch.cuda.empty_cache()  # the context's memory does not come from PyTorch's cache
        self.context = flashmoe.Context(
            engine="cuda",
            max_tokens=tokens,
            hidden=hidden,
            intermediate=inner,
            experts=experts,
            top_k=top_k,
            dtype="bfloat16",
            return_mode="direct",
            profile={},
        )

        def call(i: int) -> torch.Tensor:
            return flashmoe.moe(self.context, xs[i % 4], w1, w2, router=router, top_k=top_k, activation=activation)

        self.call = call

    def drop(self) -> None:
        self.context.synchronize()
        self.context.close()
        del self.call
        torch.cuda.empty_cache()


def occupy(call: Callable[[int], Any], seconds: float) -> None:
    """Calls back to back for so long."""
    end = time.monotonic() + seconds
    i = 0
    while time.monotonic() < end:
        for _ in range(8):
            call(i)
            i += 1
        torch.cuda.synchronize()


def main() -> None:
    # What anything else prints goes to standard error: the pipe is for answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**what: Any) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    answer(device=torch.cuda.get_device_name(), torch=torch.__version__, package=flashmoe.__file__)
    made = None
    for line in sys.stdin:
        told = json.loads(line)
        if told["do"] == "make":
            made = Made(told["shape"], told["tokens"])
            y = made.call(0)
            made.context.synchronize()
            answer(y=hashlib.sha256(y.cpu().view(torch.uint8).numpy().tobytes()).hexdigest())
        elif told["do"] == "time":
            answer(ms=milliseconds(made.call, told["repeats"], told["busy"]))
        elif told["do"] == "occupy":
            occupy(made.call, told["seconds"])
            answer()
        else:
            made.drop()
            answer()


if __name__ == "__main__":
    main()
