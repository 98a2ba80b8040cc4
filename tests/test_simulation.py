"""Simulated time: its inputs are the measured ones, and the times that it predicts are within 10 % of measured ones."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from flashmoe import models, simulation
from flashmoe.cli import main
from flashmoe.errors import InvalidArgument
from flashmoe.simulation import inputs

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
WITHIN = 0.1

LAYERS = {
    "paper-E64": ("flashmoe-paper", 16384),
    "qwen3-30b": ("qwen3-30b-a3b", 8192),
    "mixtral": ("mixtral-8x7b", 8192),
}
"""Layers by their names in the benchmarks: the name in `flashmoe.models`, and the tokens per GPU."""
MEASURED = [
    ("fused_gpu/h200x1.json", 1),
    ("fused_gpu_slices/h100x1.json", 1),
    ("fused_group/h200x2.json", 2),
    ("fused_group/h100x2.json", 2),
    ("fused_group/h200x4.json", 4),
]


def predicted(layer: str, gpus: int) -> float:
    """The simulated time of a call, in milliseconds."""
    model, tokens = LAYERS[layer]
    return simulation.simulate(models.find(model), tokens=tokens, gpus=gpus).call_us / 1e3


def measured(file: str, layer: str) -> float:
    """The measured time of a call, in milliseconds: the median over calls, each timed on its slowest rank."""
    rows = json.loads((RESULTS / file).read_text())["shapes"]
    return next(row["fused_ms"] for row in rows if (row["shape"], row["tokens"]) == (layer, LAYERS[layer][1]))


def test_task_times_are_those_measured():
    assert inputs.traced() == json.loads((RESULTS / "task_times" / "h100x1.json").read_text())


@pytest.mark.parametrize("gpus", [1, 4])
def test_a_timeline_is_of_the_call_that_is_simulated(gpus):
    """The timeline's tasks take as long as those of the simulated call, the first task begins and the last task ends
    when the call's do, and a cluster has one task at a time."""
    of = {"tokens": 2048, "gpus": gpus}
    events = simulation.timeline(models.find("qwen3-30b-a3b"), **of)
    call = simulation.simulate(models.find("qwen3-30b-a3b"), **of)
    tasks = [[each for each in of_rank if each.kind in ("gemm0", "gemm1")] for of_rank in events]
    clusters = {event.actor for event in events[0]}
    assert len(events) == gpus and len(clusters) == inputs.GPU["blocks"] / 2
    busy_ns = sum(each.end_ns - each.start_ns for of_rank in tasks for each in of_rank)
    # The timeline has whole nanoseconds, so each of its times is too small by less than 1 ns.
    assert busy_ns / len(clusters) / gpus == pytest.approx(call.busy_us * 1000, abs=max(map(len, tasks)))
    assert max(min(each.start_ns for each in of_rank) for of_rank in tasks) == int(call.first_task_us * 1000)
    assert max(each.end_ns for of_rank in tasks for each in of_rank) == int(call.last_task_us * 1000)
    assert max(each.end_ns for of_rank in events for each in of_rank) <= call.call_us * 1000
    for of_rank in tasks:
        for cluster in clusters:
            own = sorted((each.start_ns, each.end_ns) for each in of_rank if each.actor == cluster)
            assert all(end <= start for (_, end), (start, _) in pairwise(own))
    assert {"gate", "combine"} <= {each.kind for of_rank in events for each in of_rank}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_predicted_as_measured(layer, gpus):
    call = predicted(layer, gpus)
    for file in (file for file, of in MEASURED if of == gpus):
        assert abs(call / measured(file, layer) - 1) < WITHIN, file


def test_traced_layers_have_their_own_times():
    for name, (model, _) in LAYERS.items():
        shape = models.find(model)
        own = [
            row
            for product, axis in enumerate((shape.hidden, shape.intermediate))
            for row in inputs.product_times(name, product, inputs.stages(axis))
        ]
        assert inputs.task_times(shape) == own


def test_bytes_are_those_of_rows():
    """Each of two ranks has half of the experts, and K = 2. A token's row goes to the other rank unless both its
    experts are on the token's own rank, and one row comes back for each of its experts on the other rank."""
    tokens, shape = 16384, models.find("flashmoe-paper")
    call = simulation.simulate(shape, tokens=tokens, gpus=2)
    here = (shape.experts / 2 / shape.experts) * ((shape.experts / 2 - 1) / (shape.experts - 1))
    rows = tokens * (1 - here) + tokens * shape.top_k / 2
    entries = tokens * shape.top_k / 2 * 16
    assert call.nvlink_bytes == pytest.approx(rows * shape.hidden * 2 + entries, rel=0.01)
    assert (call.nic_bytes, call.nic_messages) == (0, 0)


def test_several_machines():
    shape = models.scaled(models.find("qwen3-30b-a3b"), 0.25)
    few = simulation.simulate(shape, tokens=64, machines=2, gpus=2)
    slower = simulation.simulate(shape, tokens=64, machines=2, gpus=2, nic_gb_s=5.0)
    assert few == simulation.simulate(shape, tokens=64, machines=2, gpus=2)
    assert few.nic_messages > 0 and few.nic_bytes == slower.nic_bytes
    assert 0 < few.exposed_us < few.call_us < slower.call_us


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"tokens": 0}, "tokens: expected 1 to 65536, got 0"),
        ({"tokens": 64, "gpus": 3}, "machines x gpus: expected a divisor of"),
        ({"tokens": 64}, "tokens: expected a call of tiles"),
        ({"tokens": 64, "gpus": 8, "nic_gb_s": 0.0}, "nic: expected more than 0"),
        ({"tokens": 64, "machines": 1024, "gpus": 8}, "machines x gpus: expected 1 to 1024, got 8192"),
        (
            {"tokens": 64, "machines": 2, "gpus": 2, "return_mode": "direct"},
            "return_mode: expected reduced with several machines, got direct",
        ),
    ],
)
def test_refused(arguments, said):
    with pytest.raises(InvalidArgument) as caught:
        simulation.simulate(models.find("qwen3-30b-a3b"), **arguments)
    assert said in str(caught.value)


def test_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("flashmoe.cli.simulate.SCALING", (1, 2))
    arguments = ["--model", "flashmoe-paper", "--gpus", "2", "--tokens", "512"]
    assert main(["simulate", *arguments, "--json", str(tmp_path / "a.json"), "--png", str(tmp_path / "a.png")]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "exposed" in printed and "NVLink" in printed and "once to a machine" in printed
    figures = json.loads((tmp_path / "a.json").read_text())
    assert figures["simulated"] is True
    assert [call["machines"] for call in figures["calls"]] == [1, 2]
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
