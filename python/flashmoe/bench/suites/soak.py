"""Many calls of changing size: the same tokens make the same bits, whatever came before."""

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


def points(machine: Machine) -> Iterator[Point]:
    for ranks in machine.groups:
        if machine.small:
            yield Point(f"small x{ranks}", ranks, {**small(), "calls": 60})
            continue
        yield Point(f"qwen3-30b 2048 x{ranks}", ranks, {"shape": "qwen3-30b", "tokens": 2048, "calls": 2000})


def measure(run: Run, calls: int, **sizes: Any) -> dict[str, Any]:
    of = Sizes.of(**sizes)
    draw = random.Random(run.rank)  # ranks have different numbers of tokens in one call, some of them none
    lengths = [0, 1, 7, 64, of.tokens // 3, of.tokens]
    first: dict[int, str] = {}
    wrong = 0
    with Layer(run, of) as layer:
        layer.checked()
        whole = layer.xs[0]
        begin = time.monotonic()
        for i in range(calls):
            length = draw.choice(lengths)
            layer.xs[0] = whole[:length]
            y = layer(0)
            if i % 10 == 0 or run.small:  # reading a result waits for it; most calls follow one another
                wrong += first.setdefault(length, bits(y)) != bits(y)
        layer.context.synchronize()
        seconds = time.monotonic() - begin
        layer.xs[0] = whole
    check = run.check(float(wrong), 0.0, "results that are not bit for bit those of the first call of as many tokens")
    return {"check": check, "values": {"calls": calls, "seconds": seconds, "lengths": lengths}}


def bits(y: Any) -> str:
    import torch

    return hashlib.sha256(y.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


SUITE = Suite("soak", "many calls of changing size, and their bits", (), points, measure)
