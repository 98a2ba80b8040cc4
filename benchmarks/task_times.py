"""Times of tasks on one GPU by the number of a tile's rows, from traces. `flashmoe simulate` computes with these times.

    python benchmarks/task_times.py [--out FILE]

Each layer is called with its router, as in the other benchmarks, and with given routings. In a given routing, all tiles
of an expert are full except the last, which has the same number of rows for every expert: so the number of rows of each
traced task is known. The GPU is kept busy before each call, as where layers are timed, and five calls are traced. The
results are their medians, in microseconds: how long a task takes, and its epilogue as a part of it; when gate and
packets end; when tasks begin and end; how long a warp's pieces of Combine take.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import flashmoe
import torch
from epilogues import with_epilogues
from flashmoe.bench.measure import BUSY_CYCLES, milliseconds
from flashmoe.bench.origin import commit_option, result_path, write
from flashmoe.bench.shapes import SHAPES
from flashmoe.trace import Event
from group_trace import GEMMS, microseconds
from harness import described

LAYERS = {"paper-E64": (16384,), "qwen3-30b": (8192, 1024), "mixtral": (8192,)}
FULL_ROWS = 256
LAST_ROWS = (16, 64, 96, 128, 192, FULL_ROWS)
TRACED = 5

Figures = dict[str, float]


def median(values: Iterable[float]) -> float:
    return round(statistics.median(list(values)), 2)


class Layer:
    """One of `LAYERS`, with random weights."""

    def __init__(self, name: str) -> None:
        self.hidden, inner, self.experts, self.top_k, self.activation, _ = SHAPES[name]
        # The rows of an expert's full tiles: the average number of rows of an expert, rounded down to whole tiles.
        rows = max(LAYERS[name]) * self.top_k // self.experts
        self.full_rows = rows // FULL_ROWS * FULL_ROWS
        self.tokens = max(*LAYERS[name], self.tokens_of(FULL_ROWS))
        gates = 2 if self.activation == "swiglu" else 1
        torch.manual_seed(0)
        self.x = self.normal(self.tokens, self.hidden)
        self.w1 = self.normal(self.experts, gates * inner, self.hidden) * self.hidden**-0.5
        self.w2 = self.normal(self.experts, self.hidden, inner) * inner**-0.5
        self.router = self.normal(self.experts, self.hidden) * 0.02
        sizes = {"hidden": self.hidden, "intermediate": inner, "experts": self.experts, "top_k": self.top_k}
        self.context = flashmoe.Context(engine="cuda", max_tokens=self.tokens, dtype="bfloat16", **sizes)

    @staticmethod
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    def tokens_of(self, last_rows: int) -> int:
        """The number of tokens with which each expert has its full tiles and a last tile of `last_rows` rows."""
        return self.experts * (self.full_rows + last_rows) // self.top_k

    def routed(self, tokens: int) -> tuple[float, list[list[Event]]]:
        """The median milliseconds of a call with the layer's router, and the events of each traced call."""
        return self._measure(tokens, {"router": self.router, "top_k": self.top_k})

    def given(self, last_rows: int) -> tuple[float, list[list[Event]]]:
        """The same with a given routing, by which each expert's last tile has `last_rows` rows."""
        tokens = self.tokens_of(last_rows)
        choices = torch.arange(tokens * self.top_k, device="cuda").reshape(tokens, self.top_k)
        weights = torch.full_like(choices, 1 / self.top_k, dtype=torch.bfloat16)
        return self._measure(tokens, {"topk_ids": (choices % self.experts).int(), "topk_weights": weights})

    def _measure(self, tokens: int, routing: dict[str, object]) -> tuple[float, list[list[Event]]]:
        def call() -> None:
            arguments = {**routing, "activation": self.activation}
            flashmoe.moe(self.context, self.x[:tokens], self.w1, self.w2, **arguments)

        ms = statistics.median(milliseconds(lambda _: call(), 16))
        events = []
        for i in range(TRACED + 1):
            torch.cuda._sleep(BUSY_CYCLES)
            (traced,) = self.context.trace(call)
            if i != 0:  # the first call loads the kernel that traces
                events.append(traced.events)
        return round(ms, 4), events


def tasks(pairs: Sequence[tuple[Event, Event]]) -> Figures:
    """The median microseconds of GEMM tasks and of their epilogues, and the number of tasks."""
    figures: Figures = {}
    for kind in GEMMS:
        own = [pair for pair in pairs if pair[0].kind == kind]
        if own:
            figures[kind] = median(microseconds(task) for task, _ in own)
            figures[f"{kind}_epilogue"] = median(microseconds(epilogue) for _, epilogue in own)
            figures[f"{kind}_tasks"] = len(own)
    return figures


def course(events: Sequence[Event]) -> Figures:
    """When a call's steps begin or end, in microseconds since its first event. Steps that each block or token block has
    are medians over them."""
    begin = min(event.start_ns for event in events)
    by_block = defaultdict(list)
    for event in events:
        if event.kind in GEMMS:
            by_block[event.actor].append(event)
    first = [min(event.start_ns for event in own) for own in by_block.values()]
    last = [max(event.end_ns for event in own) for own in by_block.values()]
    figures = {
        "gate_ends": median((event.end_ns - begin) / 1000 for event in events if event.kind == "gate"),
        "packets_end": median((event.end_ns - begin) / 1000 for event in events if event.kind == "dispatch"),
        "first_task": median((ns - begin) / 1000 for ns in first),
        "last_task_ends": median((ns - begin) / 1000 for ns in last),
        "call_ends": median([(max(event.end_ns for event in events) - begin) / 1000]),
    }
    if combines := [microseconds(event) for event in events if event.kind == "combine"]:
        figures["combine"] = median(combines)
    return figures


def of_all(calls: Iterable[Figures]) -> Figures:
    """The medians of several calls' figures."""
    each = defaultdict(list)
    for call in calls:
        for name, value in call.items():
            each[name].append(value)
    return {name: median(values) for name, values in each.items()}


def split(layer: Layer, pairs: Sequence[tuple[Event, Event]]) -> tuple[Figures, Figures]:
    """The tasks of full tiles, and the tasks of the experts' last tiles. The last tiles are recognised by their time:
    each expert has one, and their tasks are the shortest."""
    by_tile = defaultdict(list)
    for pair in pairs:
        by_tile[pair[0].index].append(pair)
    order = sorted(by_tile, key=lambda tile: statistics.mean(microseconds(task) for task, _ in by_tile[tile]))
    last = [pair for tile in order[: layer.experts] for pair in by_tile[tile]]
    return tasks([pair for tile in order[layer.experts :] for pair in by_tile[tile]]), tasks(last)


def measure(name: str) -> dict[str, object]:
    layer = Layer(name)
    result: dict[str, object] = {"routed": [], "by_rows": []}
    for tokens in LAYERS[name]:
        ms, calls = layer.routed(tokens)
        figures = of_all(course(events) | tasks(with_epilogues(events)) for events in calls)
        result["routed"].append({"tokens": tokens, "ms": ms} | figures)
    for rows in LAST_ROWS:
        ms, calls = layer.given(rows)
        at = of_all(course(events) for events in calls)
        if rows == FULL_ROWS:
            full, last = of_all(tasks(with_epilogues(events)) for events in calls), {}
        else:
            both = [split(layer, with_epilogues(events)) for events in calls]
            full, last = of_all(each for each, _ in both), of_all(each for _, each in both)
        result["by_rows"].append({"last_rows": rows, "ms": ms, "full": full, "last": last} | at)
    layer.context.close()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="where to write the result; default: benchmarks/results/task_times/")
    commit_option(parser)
    args = parser.parse_args()
    result = described(args.commit) | {"layers": {name: measure(name) for name in LAYERS}}
    write(Path(args.out) if args.out else result_path("task_times", result["device"], 1), result)


if __name__ == "__main__":
    main()
