"""Many calls of changing size: the same tokens must give the same bits, whatever calls came before."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Iterator
from typing import Any

from ..layer import Layer, Sizes
from ..plan import Machine, Point, Suite
from ..run import Run
from .latency import small

LENGTHS = (0, 1, 7, 64)
"""Numbers of tokens of a batch; a third of the largest batch, and the largest, are added."""
LOOK = 50
"""Of so many calls, the result of one is read. Reading a result waits for its call, but most calls should follow one
another without a pause."""


def points(machine: Machine) -> Iterator[Point]:
    for ranks in machine.groups:
        if machine.small:
            yield Point(f"small x{ranks}", ranks, {**small(), "calls": 60})
            continue
        if ranks > 1:  # batches whose calls last a fraction of a millisecond
            sizes = {"shape": "qwen3-30b", "tokens": 128, "calls": 100_000}
            yield Point(f"qwen3-30b 128 x{ranks}", ranks, sizes)
        yield Point(f"qwen3-30b 2048 x{ranks}", ranks, {"shape": "qwen3-30b", "tokens": 2048, "calls": 2000})


def measure(run: Run, calls: int, **sizes: Any) -> dict[str, Any]:
    """Each rank draws the number of tokens of each call at random: from all numbers, or, if the result is read, from a
    few. Results of the same number of tokens are compared bit by bit."""
    of = Sizes.of(**sizes)
    draw = random.Random(run.rank)  # ranks have different numbers of tokens in one call, some have none
    lengths = [*(each for each in LENGTHS if each <= of.tokens), of.tokens // 3, of.tokens]
    first: dict[int, str] = {}
    wrong = compared = 0
    with Layer(run, of) as layer:
        layer.checked()
        x = layer.xs[0]
        begin = time.monotonic()
        for i in range(calls):
            look = run.small or i % LOOK == 0
            length = draw.choice(lengths) if look else draw.randint(0, of.tokens)
            y = layer.of(x[:length])
            if look:
                wrong += first.setdefault(length, bits(y)) != bits(y)
                compared += 1
        layer.context.synchronize()
        seconds = time.monotonic() - begin
    check = run.check(float(wrong), 0.0, "results that are not bit for bit those of the first call of as many tokens")
    values = {"calls": calls, "compared": compared, "seconds": seconds, "lengths": lengths}
    return {"check": check, "values": values | {"figures": {"us a call": seconds / calls * 1e6}}}


def bits(y: Any) -> str:
    import torch

    return hashlib.sha256(y.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


SUITE = Suite("soak", "many calls of changing size, and their bits", (), points, measure)
