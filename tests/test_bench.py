"""`flashmoe bench`: suites in their small form, runs that go on where one stopped, comparisons, and the page."""

from __future__ import annotations

import itertools
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from flashmoe.bench import baselines, compare, counters, runner, store
from flashmoe.bench.baselines import liger
from flashmoe.bench.baselines import needs as needs_module
from flashmoe.bench.baselines.needs import Needs
from flashmoe.bench.layer import Sizes
from flashmoe.bench.plan import Machine, Point, Suite, Voided
from flashmoe.bench.run import Run
from flashmoe.bench.suites import SUITES, packages
from flashmoe.cli import main, measure
from flashmoe.jit import Variant
from performance import figures, papers, report, series

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "performance.md"
CPU = Machine("cpu", 0)


def fake(name: str, answers: dict[str, list[float]], shows: str = "") -> Suite:
    """A suite without ranks. `answers`: the times of each point; a point without times is voided."""

    def measure(run, key):
        if not answers[key]:
            raise Voided("wrong rows")
        return {"check": run.check(0.0, 1.0, "rows"), "samples": {"flashmoe": {"plain": answers[key]}}}

    return Suite(name, shows, (), lambda machine: [Point(key, 0, {"key": key}) for key in answers], measure)


def run(out: Path, *suites: Suite, budget: float | None = None) -> runner.Outcome:
    return runner.run_suites(
        list(suites), CPU, "A CPU", out=out, commit="0" * 40, budget=budget, tell=lambda progress: None
    )


# ---- suites ----------------------------------------------------------------------------------------------------------


def test_suites_in_their_small_form(tmp_path, capsys):
    """One run of suites that measure in different ways: the results have each of the suites' points, and every point's
    error is within its bound."""
    pytest.importorskip("torch")
    names = (
        "memory",
        "metrics",
        "gpus",
        "baselines",
        "trace-api",
        "utilization",
        "stragglers",
        "breakdown",
        "imbalance",
        "training",
    )
    names += ("step", "fp8", "shared", "decode", "models", "soak", "faults")
    chosen = [argument for name in names for argument in ("--suite", name)]
    assert main(["bench", "--engine", "cpu", "--out", str(tmp_path), *chosen]) == 0
    printed = capsys.readouterr().out
    for name in names:
        (path,) = tmp_path.glob(f"{store.PREFIX}{name.replace('-', '_')}/*.json")
        result = store.read(path)
        points = {point.name for point in SUITES[name].points(CPU)}
        assert {point["name"] for point in result["points"]} == points
        assert all(point["check"]["error"] <= point["check"]["bound"] for point in result["points"])
        assert f"{name}, " in printed
    gpus = store.read(next(tmp_path.glob("bench_gpus/*.json")))["points"]
    assert [set(point["samples"]) >= {"flashmoe", "pytorch", "gemms"} for point in gpus] == [True, True]
    assert "exchange" in gpus[1]["samples"] and len(gpus[0]["samples"]["flashmoe"]["plain"]) == runner.REPEATS["cpu"]
    assert main(["bench", "--engine", "cpu", "--out", str(tmp_path), *chosen]) == 0
    assert "0 points in" in capsys.readouterr().out  # all points were measured from these sources before


def test_every_suite_has_a_small_form_and_points_of_one_name_each():
    for suite in SUITES.values():
        for machine in (CPU, Machine("cuda", 4)):
            points = list(suite.points(machine))
            assert points and len({point.name for point in points}) == len(points)
            assert max(point.ranks for point in points) <= (4 if machine.gpus else 2)


# ---- the harness -----------------------------------------------------------------------------------------------------


def test_a_failed_check_voids_its_point_alone(tmp_path):
    outcome = run(tmp_path, fake("tokens", {"right": [1.0], "wrong": []}))
    assert outcome.wrong == ["tokens, wrong: wrong rows"] and outcome.measured == 2
    right, wrong = store.read(outcome.files[0])["points"]
    assert right["samples"] and wrong["voided"] == "wrong rows" and "samples" not in wrong


def test_a_run_goes_on_where_the_last_one_stopped(tmp_path, monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(runner.time, "monotonic", lambda: float(next(clock)))
    suite = fake("tokens", {"a": [1.0], "b": [2.0], "c": [3.0]})
    # Each reading of the clock is a second later. The clock is read once before each point, and twice around it.
    outcome = run(tmp_path, suite, budget=5.0)
    assert (outcome.measured, outcome.left) == (2, 1)
    outcome = run(tmp_path, suite)
    assert (outcome.measured, outcome.known, outcome.left) == (1, 2, 0)
    monkeypatch.setattr(store, "sources_digest", lambda: "another")
    assert run(tmp_path, suite).measured == 3  # the earlier measurements are of other sources
    assert [point["sources_sha256"] for point in store.read(outcome.files[0])["points"]] == ["another"] * 3


def test_a_file_names_no_folder_of_the_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(store.sys, "argv", ["/x/bin/flashmoe", "bench", "--out", "/x/benchmarks/results"])
    path = run(tmp_path, fake("tokens", {"a": [1.0]})).files[0]
    assert store.read(path)["command"] == "flashmoe bench --out benchmarks/results"


def test_times_are_written_on_one_line(tmp_path):
    path = run(tmp_path, fake("tokens", {"a": [1.23456789, 2.0, 3e-5]})).files[0]
    assert '"plain": [1.23457, 2.0, 3e-05]' in path.read_text()
    assert store.read(path)["points"][0]["samples"] == {"flashmoe": {"plain": [1.23457, 2.0, 3e-5]}}


def test_a_point_that_was_voided_is_measured_again(tmp_path):
    answers: dict[str, list[float]] = {"a": []}
    run(tmp_path, fake("tokens", answers))
    answers["a"] = [1.0]
    assert run(tmp_path, fake("tokens", answers)).wrong == []


def test_first_points_of_all_suites_come_first():
    suites = [fake("tokens", {"a": [1.0], "b": [1.0]}), fake("gpus", {"c": [1.0]})]
    assert [point.name for _, point in runner.in_order(suites, CPU)] == ["a", "c", "b"]


def test_points_of_some_ranks_in_the_order_of_their_suites():
    machine = Machine("cuda", 4)
    chosen = runner.in_order([SUITES[name] for name in ("fp8", "step", "gpus")], machine, [4])
    assert {point.ranks for _, point in chosen} == {4}
    assert [suite.name for suite, _ in chosen[:4]] == ["fp8", "step", "gpus", "fp8"]


def test_kernels_are_compiled_before_ranks_wait():
    """`kernels_of` names the kernels that a suite's passes need at a point, so that the kernels of all points can be
    compiled together. Passes among several ranks need other kernels than those of one rank."""

    def kernels(name: str, ranks: int) -> set[Variant]:
        points = [point for point in SUITES[name].points(Machine("cuda", 2)) if point.ranks == ranks]
        return {each for point in points for each in runner.kernels_of(SUITES[name], point)}

    for ranks in (1, 2):
        passes = {Variant(**{which: True}, group=ranks > 1) for which in ("keeps", "backward")}
        assert kernels("step", ranks) == passes
        general = {Variant(), Variant(quantised=True)}
        assert kernels("fp8", ranks) == general | {replace(each, few=True) for each in general if ranks == 1}
    assert kernels("gpus", 2) == {Variant(activation="gelu")}
    assert not kernels("metrics", 0)


def test_what_another_package_fails_in_is_said():
    run = Run("cpu", 0, 1, 4)
    assert baselines.tried(run, lambda: 3) == (3, "")
    assert baselines.tried(run, lambda: 1 // 0)[1] == "ZeroDivisionError: integer division or modulo by zero"


def test_efficiency_is_beside_two_ranks():
    """The efficiency compares points of two and of more ranks that have the same number of tokens on each rank."""
    medians = {"a x2": {"flashmoe": 3.0}, "a x4": {"flashmoe": 4.0}, "b x4": {"flashmoe": 1.0}}
    said = [measure._scaled({"name": name, "ranks": int(name[-1])}, medians) for name in medians]
    assert said == [[], ["T(2)/T(4) 0.750"], []]


def test_a_call_that_is_wrong_has_no_time():
    """The check of a layer finds a single wrong row among those that it compares, and voids the point."""
    torch = pytest.importorskip("torch")
    from flashmoe.bench.run import apart

    expected = torch.randn(4, 8, dtype=torch.float64)
    assert apart(expected, expected) == 0.0
    wrong = expected.clone()
    wrong[2] *= 1.1
    run = Run("cpu", 0, 1, 4)
    for error in (apart(wrong, expected), float("nan")):
        with pytest.raises(Voided, match="expected an error of at most"):
            run.check(error, 1e-3, "rows")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--suite", "speed"], "--suite: expected one of memory, "),
        (["--engine", "tpu"], "--engine: expected cuda or cpu, got 'tpu'"),
        (["--budget", "0"], "--budget: expected seconds above 0, got 0"),
        (["--engine", "cpu", "--ranks", "3"], "--ranks: expected a number of ranks that has points here, got 3"),
        (["--engine", "cuda", "--suite", "tokens"], "--engine cuda: expected a GPU for tokens, found none"),
        (["--compare", "a.json", "b.json"], "a.json: expected a file that flashmoe bench has written"),
    ],
)
def test_what_cannot_be_done_is_said(capsys, arguments, said):
    assert main(["bench", *arguments]) == 2
    assert said in capsys.readouterr().err


# ---- baselines -------------------------------------------------------------------------------------------------------


SIZES = Sizes(64, 64, 8, 2, "swiglu", 16, "float32")


@pytest.mark.parametrize("name", baselines.MODULES)
def test_a_baseline_says_what_it_lacks(name):
    module = baselines.module(name)
    reason = module.NEEDS.lacks(Run("cpu", 0, 1, 4), SIZES)
    assert reason is None if name == "pytorch" or "transformers" in name else reason
    rows = [row for row in baselines.TABLE if row[1] == f"`{name}`"]
    assert len(rows) == 1
    assert ("not run" in rows[0][2]) == ("not been run" in " ".join(module.__doc__.split()))


@pytest.mark.parametrize(
    ("needs", "engine", "ranks", "sizes", "reason"),
    [
        (Needs(("numpy", "no_such.package")), "cuda", 1, SIZES, "no_such.package: not installed"),
        (Needs(gpu=True), "cpu", 1, SIZES, "it needs a GPU"),
        (Needs(one_rank=True), "cuda", 2, SIZES, "its experts are one rank's"),
        (Needs(several_ranks=True), "cuda", 1, SIZES, "it exchanges rows between ranks"),
        (Needs(even=True), "cuda", 3, SIZES, "all ranks need as many experts"),
        (Needs(gated=True), "cuda", 1, replace(SIZES, activation="gelu"), "its experts are gated"),
        (Needs(bfloat16=True), "cuda", 1, SIZES, "it is of bfloat16 alone"),
        (Needs(bfloat16=True), "cpu", 1, SIZES, None),
        (Needs(further=lambda run, sizes: f"{sizes.tokens} tokens"), "cpu", 1, SIZES, "16 tokens"),
        (Needs(("numpy",), True, True, False, True, True), "cuda", 1, SIZES, None),
    ],
)
def test_what_is_lacking_is_said(needs, engine, ranks, sizes, reason):
    assert needs.lacks(Run(engine, 0, ranks, 4), sizes) == reason


def test_versions_are_those_of_the_packages_that_are_needed():
    assert Needs(("numpy",)).versions() == {"numpy": np.__version__}
    assert Needs().versions() == {}


def wrong_baseline(monkeypatch) -> SimpleNamespace:
    """A layer for which every baseline's result is wrong."""
    wrong = SimpleNamespace(NEEDS=Needs(), call=lambda layer: lambda i: i)
    monkeypatch.setattr(baselines, "module", lambda name: wrong)
    return SimpleNamespace(run=Run("cpu", 0, 1, 4), sizes=SIZES, error=lambda y: 1.0, bound=0.25)


def test_a_baseline_that_is_wrong_has_no_time(monkeypatch):
    calls, absent = baselines.of_layer(wrong_baseline(monkeypatch), ("other",))
    assert not calls and absent == {"other": "voided: expected an error of at most 0.5, got 1"}


def test_the_point_of_a_baseline_that_is_wrong_has_no_figures(monkeypatch):
    """The point is voided, so that it is measured again, perhaps with a release of the package that is right."""
    absent = {"absent": {"other": "voided: expected an error of at most 0.5, got 1"}}
    monkeypatch.setattr(packages, "measure_layer", lambda run, **sizes: absent)
    with pytest.raises(Voided, match=r"at most 0\.5, got 1"):
        packages.measure(Run("cpu", 0, 1, 4), "other", tokens=16)


def test_liger_tries_few_of_its_configurations(monkeypatch):
    """The test makes the same configurations that liger-kernel 0.8.5 has: 32 for each of the two GEMMs, 40 for the
    sum."""

    def grid(warps: tuple[int, ...], stages: tuple[int, ...], **blocks: tuple[int, ...]) -> SimpleNamespace:
        of_blocks = [dict(zip(blocks, each, strict=True)) for each in itertools.product(*blocks.values())]
        each = itertools.product(of_blocks, warps, stages)
        return SimpleNamespace(configs=[SimpleNamespace(kwargs=of, num_warps=w, num_stages=s) for of, w, s in each])

    up, down = (grid((4, 8), (2, 3, 4, 5), BLOCK_N=(64, 128), BLOCK_K=(32, 64)) for _ in range(2))
    gather = grid((4, 8), (4,), BLOCK_H=(64, 128, 256, 512), BLOCK_K=(1, 2, 4, 8, 16))
    kernels = SimpleNamespace(
        _fused_up_proj_swiglu_kernel=up, _fused_down_proj_kernel=down, _token_gather_weighted_sum_kernel=gather
    )
    assert sum(len(each.configs) for each in (up, down, gather)) == 104
    monkeypatch.setitem(sys.modules, "liger_kernel", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "liger_kernel.ops", SimpleNamespace(fused_moe_kernels=kernels))
    liger.fewer_configurations.__wrapped__()
    assert [len(each.configs) for each in (up, down, gather)] == [8, 8, 4]
    assert {(each.num_warps, each.num_stages) for each in up.configs} == set(itertools.product((4, 8), (2, 3, 4, 5)))
    assert {(each.kwargs["BLOCK_N"], each.kwargs["BLOCK_K"]) for each in down.configs} == {(128, 64)}
    with pytest.raises(ValueError, match="another release's"):
        liger.keep(up, BLOCK_N=(256,))


def test_packages_that_are_not_installed_have_no_points(monkeypatch):
    def names() -> set[str]:
        points = list(SUITES["baselines"].points(Machine("cuda", 1)))
        assert all(point.name.endswith(f"{point.sizes['baseline']} x1") for point in points)
        return {point.sizes["baseline"] for point in points}

    monkeypatch.setattr(needs_module, "_there", lambda package: package.startswith(("liger", "triton")))
    assert names() == {"pytorch", "pytorch_graph", "liger", "liger_cute"}
    monkeypatch.setattr(needs_module, "_there", lambda package: package != "liger_cute_kernels")
    assert names() == set(baselines.MODULES) - {"liger_cute", "deepep"}  # deepep needs several ranks


def test_ranks_share_a_gpu_where_they_may(monkeypatch):
    """Ranks share a GPU only in the suites that need several ranks, and only if the machine has a single GPU."""
    alone, shared, two = Machine("cuda", 1), Machine("cuda", 1, True), Machine("cuda", 2, True)
    for name, suite in SUITES.items():
        if name in ("stragglers", "parallelism", "imbalance"):
            assert not list(suite.points(alone))
            assert [point.name for point in suite.points(shared)] == [point.name for point in suite.points(two)]
            assert {point.ranks for point in suite.points(shared)} == {2}
        else:
            assert list(suite.points(alone)) == list(suite.points(shared))
    monkeypatch.setattr(store, "_gpus", lambda: ["NVIDIA H200"])
    for said, expected in ((None, alone), ("", alone), ("1", alone), ("2", shared)):
        if said is None:
            monkeypatch.delenv("FLASHMOE_SHARE_GPUS", raising=False)
        else:
            monkeypatch.setenv("FLASHMOE_SHARE_GPUS", said)
        assert store.detected(None) == (expected, "NVIDIA H200")


def test_counters_are_read_from_what_ncu_prints():
    printed = """==PROF== Connected to process 7
==PROF== Profiling "moe": 0%....100% - 1 pass
"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","moe(Arguments)","gpu__time_duration.sum","ns","1,234,567"
"0","moe(Arguments)","sm__cycles_active","%","93.5"
"1","copy","gpu__time_duration.sum","ns","10"
==PROF== Disconnected
"""
    assert counters.parsed(printed) == [
        {"gpu__time_duration.sum": 1234567.0, "sm__cycles_active": 93.5},
        {"gpu__time_duration.sum": 10.0},
    ]
    assert counters.parsed("==ERROR== ERR_NVGPUCTRPERM") == []


# ---- comparison ------------------------------------------------------------------------------------------------------


def test_what_differs_by_more_than_the_spread(tmp_path, capsys):
    same, spread = [1.0, 1.1, 1.2, 1.3], [1.05, 1.1, 1.25, 1.3]
    before = run(tmp_path / "a", fake("tokens", {"same": same, "other": same})).files[0]
    after = run(tmp_path / "b", fake("tokens", {"same": spread, "other": [each * 1.5 for each in same]})).files[0]
    assert main(["bench", "--compare", str(before), str(after)]) == 0
    printed = capsys.readouterr().out
    assert "1 of 2 times differ" in printed and "1.500" in printed and "same" not in printed
    found = {each.point: each for each in compare.differences(before, after)}
    assert found["other"].ratio == pytest.approx(1.5) and not found["same"].beyond_spread
    assert not any(each.beyond_spread for each in compare.differences(before, before))


def test_other_suites_are_not_compared(tmp_path, capsys):
    files = [run(tmp_path, fake(name, {"a": [1.0]})).files[0] for name in ("tokens", "gpus")]
    assert main(["bench", "--compare", *map(str, files)]) == 2
    assert "expected files of one suite, got tokens and gpus" in capsys.readouterr().err


# ---- the page --------------------------------------------------------------------------------------------------------


def test_the_page_is_of_the_files_that_are_there(tmp_path):
    """The page and its pictures are made again: the text is the committed text, and the pictures are drawn from the
    same files as the committed pictures."""
    drawn = report.write(RESULTS, tmp_path / "performance.md")
    assert PAGE.read_text() == (tmp_path / "performance.md").read_text(), "tools/performance_page.py writes it anew"
    committed = PAGE.parent / report.PICTURES
    assert {path.name for path in drawn} == {path.name for path in committed.glob("*.png")}
    for path in drawn:
        assert drawn_from(committed / path.name) == drawn_from(path)


def drawn_from(picture: Path) -> str:
    """The digest of the results that a picture was drawn from; the picture's file has it."""
    from PIL import Image

    with Image.open(picture) as image:
        return image.text[figures.DIGEST]


def test_without_pytorch_it_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["bench"]) == 2
    needs = "bench: expected PyTorch, whose process groups ranks join, found none"
    assert capsys.readouterr().err == f"error: {needs}; to install: pip install 'flashmoe-layer[torch]'\n"


def test_another_figure_makes_another_page_and_picture(tmp_path):
    path = run(tmp_path, fake("tokens", {"a": [1.0]})).files[0]
    result = store.read(path) | {"engine": "cuda"}
    seen = []
    for ms in (1.0, 2.0):
        result["points"][0]["samples"]["flashmoe"]["plain"] = [ms]
        path.write_text(json.dumps(result))
        found = series.files(tmp_path)
        seen.append((report.markdown(found, set()), figures.digest(found["tokens"])))
    (page, digest), (other_page, other_digest) = seen
    assert page != other_page and digest != other_digest


def test_every_table_and_figure_of_the_papers_has_its_line():
    page = PAGE.read_text()
    for item in papers.ITEMS:
        assert f"| {item.paper}, {item.name} |" in page
        assert (item.suite is None) <= (item.needs is not None)
        assert item.suite is None or item.suite in SUITES
    of_suites = {figure for suite in SUITES.values() for figure in suite.figures}
    for figure in of_suites:
        assert re.match(r"(FlashDMoE|COMET), (figure|table|section) ", figure)


def test_published_figures_are_those_of_suites():
    assert {each.suite for each in papers.PUBLISHED} <= SUITES.keys()


def test_the_command_that_a_module_is(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["flashmoe.bench", "--list"])
    import runpy

    with pytest.raises(SystemExit) as ended:
        runpy.run_module("flashmoe.bench", run_name="__main__")
    assert ended.value.code == 0 and "soak" in capsys.readouterr().out
