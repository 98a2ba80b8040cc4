"""`flashmoe tune` on a GPU: a small shape is measured and stored, and a new context finds it."""

from __future__ import annotations

from pathlib import Path

import flashmoe
import pytest
import torch
from flashmoe.cli import bench, main
from flashmoe.tuning import profiles
from flashmoe.tuning.knobs import PROFILE
from layers import call, check, context_of, random_problem

pytestmark = [pytest.mark.gpu, pytest.mark.undisturbed, pytest.mark.timeout(300)]

SHAPE = {"hidden": 512, "intermediate": 256, "experts": 16, "top_k": 4}
TOKENS = 500


@pytest.fixture(autouse=True)
def file(tmp_path, monkeypatch) -> Path:
    path = tmp_path / "profiles.json"
    monkeypatch.setenv("FLASHMOE_PROFILES", str(path))
    return path


def tune(ranks: int) -> profiles.Record:
    """Runs the command on SHAPE, and returns the record that it has stored."""
    sizes = [f"--{name.replace('_', '-')}={size}" for name, size in SHAPE.items()]
    assert main(["tune", *sizes, f"--tokens={TOKENS}", f"--ranks={ranks}"]) == 0
    (record,) = profiles.read()
    return record


def test_a_shape_is_tuned_and_found_by_a_new_context():
    record = tune(1)
    assert record.setting == profiles.Setting(torch.cuda.get_device_name(), 1, "bfloat16", tokens=512, **SHAPE)
    assert 0 < record.milliseconds <= record.built_in_milliseconds
    assert record.profile.keys() <= PROFILE.keys()
    # The tuned profile may equal the built-in one, so another profile shows that the context reads the file.
    for profile in (record.profile, {"raster": 2, "window": 66}):
        profiles.store(profiles.Record(record.setting, record.activation, profile, 1.0, 1.0))
        problem = random_problem(1, TOKENS, **SHAPE)
        with context_of(problem) as context:
            assert context.profile == profile
            check(problem, *call(context, problem))


@pytest.mark.own_gpus
def test_two_ranks_are_tuned():
    if torch.cuda.device_count() < 2:
        pytest.skip(f"2 GPUs needed, {torch.cuda.device_count()} here")
    record = tune(2)
    assert record.setting.ranks == 2
    assert record.profile.keys() <= {"return_mode", *PROFILE}


def test_every_call_of_every_candidate_is_timed():
    setting = profiles.Setting(torch.cuda.get_device_name(), 1, "bfloat16", tokens=TOKENS, **SHAPE)
    candidates = [{}, {"raster": 4}, {"gemm1_lag": 66, "return_mode": "direct"}]
    times = bench.time_candidates(0, 1, "alone", setting, "gelu", candidates)
    assert [len(each) for each in times] == [bench.ROUNDS * bench.CALLS] * 3
    assert min(map(min, times)) > 0


def test_a_candidate_that_cannot_be_is_named():
    setting = profiles.Setting(torch.cuda.get_device_name(), 1, "bfloat16", tokens=TOKENS, **SHAPE)
    with (
        bench.Bench(setting, "swiglu") as made,
        pytest.raises(flashmoe.FlashMoEError, match=r"profile\[raster\]: expected an integer in \[1, 32\], got 33"),
    ):
        made.measure([{"raster": 33}])
