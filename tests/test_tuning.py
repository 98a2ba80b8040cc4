"""`flashmoe tune` without a GPU: the search, with times from functions instead of measured ones, and the command."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import flashmoe
import pytest
from flashmoe.cli import bench, main, tune
from flashmoe.tuning import profiles
from flashmoe.tuning import search as tuning
from flashmoe.tuning.knobs import PROFILE
from flashmoe.tuning.profiles import Record, Setting
from flashmoe.tuning.search import Timing

SETTING = Setting("Fake", 4, "bfloat16", 2048, 768, 128, 8, 8192)


@pytest.fixture(autouse=True)
def file(tmp_path, monkeypatch) -> Path:
    """The path of a file of profiles that only this test uses."""
    path = tmp_path / "profiles.json"
    monkeypatch.setenv("FLASHMOE_PROFILES", str(path))
    return path


# ---- the search ------------------------------------------------------------------------------------------

KNOBS = {"first": (1, 2, 4), "second": (1, 2, 4, 8), "mode": ("direct", "reduced")}


class Clock:
    """In place of measured times, the function `cost` gives each candidate's time. Timings and steps are counted. With
    `drift`, each step's times are longer than the last step's, all by the same factor."""

    def __init__(self, cost, spread: float = 0.0, drift: float = 0.0) -> None:
        self.cost, self.spread, self.drift = cost, spread, drift
        self.timings = 0
        self.steps = 0

    def __call__(self, candidates):
        assert len(candidates) == len({str(sorted(each.items())) for each in candidates})
        self.timings += len(candidates)
        self.steps += 1
        slower = 1.0 + self.drift * self.steps
        return [Timing(self.cost(candidate) * slower, self.spread) for candidate in candidates]


@pytest.mark.parametrize("optimum", list(itertools.product((None, 1, 4), (None, 2, 8), (None, "reduced"))))
@pytest.mark.parametrize("drift", [0.0, 0.3])
def test_the_search_finds_the_optimum_of_a_separable_cost(optimum, drift):
    best = {name: value for name, value in zip(KNOBS, optimum, strict=True) if value is not None}
    clock = Clock(lambda each: 1.0 + sum(each.get(name) != best.get(name) for name in KNOBS), drift=drift)
    outcome = tuning.search(KNOBS, clock)
    assert outcome.best == best
    assert clock.timings <= tuning.most_timings(KNOBS)
    assert outcome.built_in.median / outcome.timing.median == pytest.approx(1 + len(best))
    assert all(step.candidates[0] == {} for step in outcome.steps)
    again = tuning.search(KNOBS, Clock(clock.cost, drift=drift))
    assert again == outcome


def test_a_knob_is_looked_at_again_when_another_has_changed():
    """The best value of the knob `first` depends on the value of the knob `second`."""
    costs = {(1, None): 9, (None, None): 10, (1, 8): 7, (None, 8): 8, (4, 8): 5}
    outcome = tuning.search(KNOBS, Clock(lambda each: costs.get((each.get("first"), each.get("second")), 11)))
    assert outcome.best == {"first": 4, "second": 8}


def test_a_tie_keeps_the_built_in_order():
    clock = Clock(lambda each: 1.0)
    outcome = tuning.search(KNOBS, clock)
    assert outcome.best == {} and outcome.timing == outcome.built_in
    assert len(outcome.steps) == len(KNOBS)


@pytest.mark.parametrize(("spread", "best"), [(0.09, {"first": 4}), (0.1, {}), (0.2, {})])
def test_less_than_the_spread_is_no_gain(spread, best):
    outcome = tuning.search(KNOBS, Clock(lambda each: 1.0 - 0.1 * (each.get("first") == 4), spread=spread))
    assert outcome.best == best


def test_a_gain_that_was_luck_is_not_stored():
    """The last step times the best candidate and the built-in one once more, so that one lucky time does not count."""

    def cost(candidate):
        lucky = clock.steps <= len(KNOBS) and candidate.get("first") == 4
        return 0.5 if lucky else 1.0

    clock = Clock(cost)
    outcome = tuning.search(KNOBS, clock)
    assert outcome.best == {} and outcome.timing == outcome.built_in
    assert outcome.steps[0].candidates[-1] == {"first": 4} and outcome.steps[0].timings[-1].median == 0.5


def test_the_most_timings_are_not_exceeded_however_times_vary():
    """A clock by which every candidate is faster than all before it, so that the search never settles."""
    moments = itertools.count()
    clock = Clock(lambda each: 1000.0 - next(moments))
    tuning.search(KNOBS, clock)
    assert clock.steps == tuning.SWEEPS * len(KNOBS) + 1
    assert clock.timings <= tuning.most_timings(KNOBS)


def test_timing():
    assert Timing.of([1.0, 5.0, 2.0, 4.0, 3.0]) == Timing(3.0, 2.0)


def test_of_every_call_the_slowest_rank_counts(monkeypatch):
    """`by_rank` has the times of two ranks, for two candidates with three calls each."""
    by_rank = [[[1.0, 2.0, 9.0], [5.0, 5.0, 5.0]], [[3.0, 1.0, 1.0], [6.0, 4.0, 5.0]]]
    compiled, asked = [], []

    class Pool:
        def __init__(self, ranks):
            assert ranks == 2

        def call(self, fn, arguments):
            asked.extend(arguments)
            assert fn is bench.time_candidates
            return by_rank

        def close(self):
            asked.append("closed")

    monkeypatch.setattr(bench, "RankPool", Pool)
    monkeypatch.setattr(bench.jit, "compile_kernel", compiled.append)
    setting = replace(SETTING, ranks=2)
    with bench.Bench(setting, "gelu") as made:
        timings = made.measure([{}, {"raster": 2}])
    assert timings == [Timing.of([3.0, 2.0, 9.0]), Timing.of([6.0, 5.0, 5.0])]
    assert asked == [(setting, "gelu", [{}, {"raster": 2}])] * 2 + ["closed"]
    assert compiled == [flashmoe.jit.Variant("bfloat16", "gelu")]
    compiled.clear()
    monkeypatch.setattr(bench, "RankPool", lambda ranks: None)
    bench.Bench(replace(SETTING, ranks=1), "gelu")
    assert compiled == [flashmoe.jit.Variant("bfloat16", "gelu", few=few) for few in (False, True)]


# ---- the command -----------------------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch):
    """Stand-ins for GPUs, on which candidates with {"raster": 4} take 3 ms and all others 4 ms. The value of the
    fixture is the list of what has been timed: settings and activations."""
    settings = []

    class FakeBench(bench.Bench):
        def __init__(self, setting, activation):
            settings.append((setting, activation))

        def measure(self, candidates):
            return [Timing(3.0 if each.get("raster") == 4 else 4.0, 0.1) for each in candidates]

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(tune, "_require_gpus", lambda ranks: None)
    monkeypatch.setattr(tune, "Bench", FakeBench)
    library = SimpleNamespace(cuda_device_name=lambda device: "Fake")
    monkeypatch.setattr(tune, "_ffi", SimpleNamespace(library=lambda: library))
    monkeypatch.setenv("COLUMNS", "200")
    return settings


def test_the_best_is_shown_and_stored(machine, file, capsys):
    assert main(["tune", "--model", "qwen3-30b-a3b", "--tokens", "5000", "--ranks", "4"]) == 0
    assert machine == [(replace(SETTING, tokens=5000), "swiglu")]
    assert profiles.read() == [Record(SETTING, "swiglu", {"raster": 4}, 3.0, 4.0)]
    printed = capsys.readouterr().out
    assert "Fake x 4, H 2048, I 768, E 128, K 8, bfloat16, 5000 tokens a rank, swiglu" in printed
    assert any(line.split() == ["raster", "4", "3.0000", "0.1000", "0.750"] for line in printed.splitlines())
    assert f"stored: raster 4, in {file}" in printed


def test_no_gain_is_stored_as_such(machine, monkeypatch, file, capsys):
    """An empty profile is stored, because a context would otherwise take the profile of another number of tokens."""
    monkeypatch.setattr(tune.Bench, "measure", lambda self, candidates: [Timing(4.0, 0.1)] * len(candidates))
    assert main(["tune", "--model", "flashmoe-paper"]) == 0
    (stored,) = profiles.read()
    assert (stored.profile, stored.activation, stored.setting.ranks) == ({}, "gelu", 1)
    assert f"stored: built-in, in {file}" in capsys.readouterr().out


@pytest.mark.parametrize(("ranks", "tried"), [(1, False), (2, True)])
def test_sending_and_returning_are_tried_where_there_is_a_peer(ranks, tried):
    knobs = tune._knobs(ranks)
    assert (
        ("return_mode" in knobs) == ("senders" in knobs) == ("gemm1_lists" in knobs) == ("own_first" in knobs) == tried
    )
    assert ("link_clusters" in knobs) == tried
    for name, knob in PROFILE.items():
        if name in ("gemm1_lists", "own_first", "senders", "link_clusters") and not tried:
            continue
        assert knobs[name] == knob.tried == tuple(sorted(set(knob.tried)))
        assert knob.tried[0] >= knob.least and knob.tried[-1] <= knob.most


def test_a_file_that_cannot_be_read_is_noticed_before_anything_is_measured(machine, file, capsys):
    file.write_text("{")
    assert main(["tune", "--model", "olmoe"]) == 2
    assert f"profiles: cannot read {file}" in capsys.readouterr().err
    assert machine == [] and file.read_text() == "{"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ([], "missing --hidden, --intermediate, --experts, --top-k"),
        (["--model", "gpt-5"], "model: expected one of flashmoe-paper"),
        (["--model", "olmoe", "--tokens", "0"], "--tokens: expected an integer in [1, 65536], got 0"),
        (["--model", "olmoe", "--ranks", "33"], "--ranks: expected an integer in [1, 32], got 33"),
        (["--model", "olmoe", "--experts", "1025"], "--experts: expected an integer in [1, 1024], got 1025"),
        (["--model", "olmoe", "--top-k", "33"], "--top-k: expected an integer in [1, 32], got 33"),
        (["--model", "olmoe", "--experts", "4"], "--top-k: expected an integer in [1, 4], got 8"),
        (["--model", "olmoe", "--hidden", "100"], "--hidden: expected a multiple of 8, got 100"),
        (["--model", "olmoe", "--intermediate", "-8"], "--intermediate: expected an integer in [1, "),
        (["--model", "olmoe", "--dtype", "fp8"], "--dtype: expected one of float32, bfloat16, float16, got 'fp8'"),
        (["--model", "olmoe", "--activation", "tanh"], "--activation: expected one of relu, "),
        (["--model", "olmoe"], "flashmoe tune: expected a GPU, found none; see flashmoe info"),
    ],
)
def test_what_cannot_be_tuned_is_refused_in_one_line(monkeypatch, capsys, file, options, reason):
    monkeypatch.setattr("flashmoe.cli.device.missing", lambda ranks: "a GPU, found none")
    assert main(["tune", *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and reason in error
    assert not file.exists()
