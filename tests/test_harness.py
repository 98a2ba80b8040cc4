"""What the benchmarks share, as far as it needs no GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

from harness import beside_floor, in_turn


def test_calls_are_timed_in_turn():
    asked: list[tuple[int, int, bool]] = []

    def timer(call: Callable[[int], int], repeats: int, busy: bool) -> list[float]:
        asked.append((call(0), repeats, busy))
        return [float(len(asked))] * repeats

    timed = in_turn(timer, {"fused": lambda i: 1, "floor": lambda i: 2}, 8)
    assert asked == [(1, 2, True), (2, 2, True), (1, 2, False), (2, 2, False)] * 4
    assert timed["floor", True] == [2, 2, 6, 6, 10, 10, 14, 14]
    assert list(timed) == [("fused", True), ("fused", False), ("floor", True), ("floor", False)]


def test_a_layer_stands_beside_its_floor():
    row = beside_floor(
        {
            ("fused", True): [3.0, 2.0, 7.0],
            ("fused", False): [8.0],
            ("floor", True): [2.0, 1.0, 6.0],
            ("floor", False): [4.0],
        }
    )
    assert row == {
        "fused_ms": 3,
        "fused_min_max": [2, 7],
        "floor_ms": 2,
        "floor_min_max": [1, 6],
        "ratio": 1.5,
        "plain_fused_ms": 8,
        "plain_floor_ms": 4,
        "plain_ratio": 2,
    }
