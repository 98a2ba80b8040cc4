"""The command line: what it prints, what it writes, and its exit status."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import flashmoe
import numpy as np
import pytest
from flashmoe import models
from flashmoe.checkpoint import load_layer
from flashmoe.cli import device, main, picture, render, run, verify
from flashmoe.cli import workload as workload_module
from flashmoe.contexts import memory
from flashmoe.placement import contiguous, local_experts, most_local, roomy
from flashmoe.report import CallReport, summarize
from flashmoe.trace import Event

RANDOM = ["--model", "mixtral-8x7b", "--scale", "0.005", "--tokens", "9", "--ranks", "2"]
TINY = ["--engine", "cpu", *RANDOM]


@pytest.fixture
def shipped(tmp_path) -> Path:
    """A copy of the shipped checkpoint, to be damaged."""
    with resources.as_file(resources.files("flashmoe") / "assets" / "tiny-qwen3-moe") as folder:
        return Path(shutil.copytree(folder, tmp_path / "checkpoint"))


@pytest.fixture
def small_shared_memory(monkeypatch) -> None:
    """A /dev/shm with 1 MiB free."""
    usage = SimpleNamespace(total=2 << 20, used=1 << 20, free=1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)


def run_failing(capsys, *arguments: str) -> str:
    """Run a command that is refused, and return its error, which must be one line."""
    assert main([*arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    return error


@pytest.fixture
def kept_ranks(monkeypatch, pool) -> None:
    """Has `flashmoe run` use the processes of `pool`, for tests that are not about starting processes."""
    monkeypatch.setattr(run, "run_ranks", lambda ranks, fn, arguments: pool.call(fn, arguments, ranks))


def corrupt(monkeypatch, change) -> None:
    """Make `flashmoe run` see results that went through `change(y, report)`."""
    run_ranks = run.run_ranks

    def corrupted(*arguments):
        answers = run_ranks(*arguments)
        change(*answers[0])
        return answers

    monkeypatch.setattr(run, "run_ranks", corrupted)


# ---- flashmoe run ----------------------------------------------------------------------------------------


def test_run_passes_and_writes_its_files(tmp_path, capsys):
    out = tmp_path / "new" / "folder"
    assert main(["run", *TINY, "--skew", "1", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "PASS" in printed and "FAIL" not in printed
    assert "H 24, I 72, E 8, K 2" in printed
    assert "18 tokens in " in printed
    assert (out / "timeline.png").read_bytes().startswith(b"\x89PNG")
    records = json.loads((out / "trace.json").read_text())["traceEvents"]
    assert {record["pid"] for record in records} == {0, 1}
    assert {"gate", "gemm0", "gemm1", "combine"} <= {r["name"] for r in records if r["ph"] == "X"}


def test_run_of_the_shipped_layer(tmp_path, capsys):
    assert main(["run", "--engine", "cpu", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "tiny-qwen3-moe" in printed and "2,048 tokens in " in printed
    assert "(8,192 token-expert pairs)" in printed
    assert "PASS" in printed


@pytest.mark.usefixtures("kept_ranks")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("mode", ["direct", "reduced"])
def test_run_of_every_dtype_and_return_mode(tmp_path, capsys, dtype, mode):
    options = ["--engine", "cpu", "--dtype", dtype, "--return", mode, "--tokens", "40", "--ranks", "3"]
    assert main(["run", *options, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert dtype in printed and f"{mode} return" in printed


@pytest.mark.usefixtures("kept_ranks")
def test_run_of_a_checkpoint_folder(tmp_path, shipped, capsys):
    options = ["--engine", "cpu", "--checkpoint", str(shipped), "--tokens", "5"]
    for layer in (0, 1):
        assert main(["run", *options, "--layer", str(layer), "--out", str(tmp_path)]) == 0
        printed = capsys.readouterr().out
        assert "random tokens, seed 0" in printed and f"model.layers.{layer}.mlp" in printed
    assert "layer: expected one of the MoE layers" in run_failing(capsys, "run", *options, "--layer", "99")


@pytest.mark.usefixtures("kept_ranks")
def test_run_on_one_rank_and_one_token(tmp_path, capsys):
    assert main(["run", *TINY, "--ranks", "1", "--tokens", "1", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "1 token in " in printed and "all-to-all" not in printed


@pytest.mark.usefixtures("kept_ranks")
def test_run_says_what_is_not_emulated(tmp_path, capsys):
    options = ["--engine", "cpu", "--model", "deepseek-v3", "--scale", "0.001", "--tokens", "4", "--ranks", "2"]
    assert main(["run", *options, "--out", str(tmp_path)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "not emulated: sigmoid" in printed and "without the model's shared experts" in printed


def test_what_no_rank_counts_is_not_shown(capsys):
    """A column in which no rank has a figure is left out."""
    ids = np.zeros((3, 1), np.int32)
    counted = {"tasks": {"gate": 1, "gemm0": 2}, "rows_sent": 5, "bytes_sent": 80, "phase_ns": {"gate": 9, "idle": 6}}
    unknown = dict.fromkeys(
        ("tiles", "tile_rows", "return_rows_sent", "padded_rows", "padded_bytes", "dropped", "bad_rows"), 0
    )
    report = CallReport(
        tokens=3, return_mode="direct", topk_ids=ids, topk_weights=ids, wall_ns=15, processors=1, **counted, **unknown
    )
    for reports in ([report] * 2, [report, replace(report, padded_rows=7, padded_bytes=112)]):
        render.show_ranks(reports, summarize(reports, 1))
    first, second = capsys.readouterr().out.split("Tasks\n")[1:]
    for name in ("rank", "gate", "gemm0", "rows out", "sent"):
        assert name in first and name in second
    for name in ("gemm1", "tiles", "rows/tile", "rows back"):
        assert name not in first and name not in second
    assert "padded" not in first and "a padded all-to-all would send" in second and "1.4x" in second


@pytest.mark.usefixtures("kept_ranks")
def test_run_fails_on_a_wrong_result(tmp_path, capsys, monkeypatch):
    def scale_one_element(y, report):
        y[0, 0] = y[0, 0] * 2 + 1

    corrupt(monkeypatch, scale_one_element)
    assert main(["run", *TINY, "--out", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "FAIL" in printed and "PASS" not in printed


@pytest.mark.usefixtures("kept_ranks")
def test_run_fails_on_nan(tmp_path, capsys, monkeypatch):
    def spoil(y, report):
        y[3, 2] = np.nan

    corrupt(monkeypatch, spoil)
    assert main(["run", *TINY, "--out", str(tmp_path)]) == 1
    assert "FAIL error nan" in capsys.readouterr().out


@pytest.mark.usefixtures("kept_ranks")
@pytest.mark.parametrize("expert", ["other", -1, 99])
def test_run_fails_on_wrong_routing(tmp_path, capsys, monkeypatch, expert):
    def reroute(y, report):
        ids = report["topk_ids"]
        ids[0, 1] = min(set(range(8)) - set(ids[0].tolist())) if expert == "other" else expert

    corrupt(monkeypatch, reroute)
    assert main(["run", *TINY, "--out", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "FAIL" in printed and "1 token routed to experts that are not" in printed


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--engine", "tpu"], "--engine: expected one of auto, cpu, cuda, got 'tpu'"),
        (["--model", "gpt-5"], "expected one of flashmoe-paper"),
        (["--checkpoint", "/nonexistent"], "/nonexistent"),
        (["--checkpoint", ".", "--model", "olmoe"], "expected one of them, got both"),
        (["--ranks", "0"], "expected at least 1"),
        (["--ranks", "two"], "--ranks"),
        (["--tokens", "0"], "expected at least 1"),
        (["--tokens", "513", "--ranks", "4"], "expected at most 512 for 4 ranks"),
        (["--dtype", "int8"], "expected one of float32, float16, bfloat16, got 'int8'"),
        (["--return", "both", "--engine", "cpu"], "expected one of direct, reduced, auto, got 'both'"),
        (["--model", "olmoe", "--scale", "0"], "expected 0 < scale <= 1, got 0"),
        (["--model", "olmoe", "--scale", "0.01", "--skew", "-1"], "skew: expected a number in [0, 16], got -1"),
        (["--model", "olmoe", "--scale", "0.01", "--skew", "nan"], "skew: expected a number in [0, 16], got nan"),
        (["--model", "olmoe", "--scale", "0.01", "--seed", "-1"], "--seed: expected at least 0, got -1"),
        (["--skew", "1"], "--skew: has an effect only with --model"),
        (["--seed", "1"], "--seed: has an effect only with --model or --checkpoint"),
        (["--layer", "1"], "--layer: has an effect only with --checkpoint"),
        (["--layer", "-1"], "--layer: expected at least 0, got -1"),
        (["--out", "/dev/null/folder"], "cannot make the folder"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_run_refuses_bad_arguments_in_one_line(tmp_path, monkeypatch, capsys, options, reason):
    monkeypatch.chdir(tmp_path)
    assert reason in run_failing(capsys, "run", *options)


@pytest.fixture
def gpus(monkeypatch):
    """Makes this machine seem to have two GPUs and all that the CUDA engine needs. Returns a function that takes the
    thing with the given name away."""
    torch = pytest.importorskip("torch")
    has = {
        "driver": ("flashmoe.cli.device.loads", lambda library: "nvshmem" in library, lambda library: True),
        "NVSHMEM": ("flashmoe.cli.device.loads", lambda library: "nvshmem" not in library, lambda library: True),
        "PyTorch for CUDA": (torch.cuda, "is_available", lambda: False, lambda: True),
        "second GPU": (torch.cuda, "device_count", lambda: 1, lambda: 2),
        "new second GPU": (torch.cuda, "get_device_capability", lambda i: (9 - i, 0), lambda i: (9, 0)),
        "NVLink": (torch.cuda, "can_device_access_peer", lambda i, j: i < j, lambda i, j: True),
        "nvcc": ("flashmoe.jit.find_nvcc", no_nvcc, lambda: Path("nvcc")),
    }

    def take(name: str | None) -> None:
        if name is not None:
            *where, without, _ = has[name]
            monkeypatch.setattr(*where, without)

    for *where, _, present in has.values():
        monkeypatch.setattr(*where, present)
    return take


def no_nvcc() -> None:
    raise flashmoe.FlashMoEError("none")


@pytest.mark.parametrize(
    ("lacking", "ranks", "reason"),
    [
        ("driver", 1, "the NVIDIA driver's libcuda.so.1, found none"),
        ("PyTorch for CUDA", 1, "a GPU that PyTorch can use for each of 1 rank, found 0"),
        ("second GPU", 2, "a GPU that PyTorch can use for each of 2 ranks, found 1"),
        (None, 3, "a GPU that PyTorch can use for each of 3 ranks, found 2"),
        ("new second GPU", 2, "GPUs of compute capability 9.0 (H100, H200), found 8.0"),
        ("NVLink", 2, "GPUs that reach each other's memory, found that 1 does not reach that of 0"),
        ("NVSHMEM", 2, "NVSHMEM's host library, which several GPUs need, found none"),
        ("nvcc", 1, "nvcc, which compiles the kernel, found none"),
    ],
)
def test_run_on_gpus_says_what_is_missing(tmp_path, capsys, gpus, lacking, ranks, reason):
    gpus(lacking)
    error = run_failing(capsys, "run", "--engine", "cuda", "--ranks", str(ranks), "--out", str(tmp_path))
    assert error == f"error: --engine cuda: expected {reason}; see flashmoe info\n"


@pytest.mark.parametrize(
    ("lacking", "ranks", "chosen"),
    [
        (None, 1, "cuda"),
        (None, 2, "cuda"),
        (None, 3, "cpu"),
        ("driver", 1, "cpu"),
        ("second GPU", 1, "cuda"),
        ("second GPU", 2, "cpu"),
        ("new second GPU", 1, "cuda"),
        ("new second GPU", 2, "cpu"),
        ("NVLink", 2, "cpu"),
        ("NVSHMEM", 1, "cuda"),
        ("NVSHMEM", 2, "cpu"),
        ("nvcc", 1, "cpu"),
    ],
)
def test_engine_auto(gpus, lacking, ranks, chosen):
    gpus(lacking)
    assert run.chosen_engine("auto", ranks) == chosen


def test_run_on_gpus_refuses_widths_that_they_cannot_copy(tmp_path, capsys, monkeypatch, gpus):
    shape = replace(models.find("olmoe"), hidden=12, intermediate=8)
    monkeypatch.setattr("flashmoe.cli.workload.load_layer", lambda path, layer: models.random_layer(shape, 0)[0])
    error = run_failing(capsys, "run", "--engine", "cuda", "--checkpoint", "layer", "--out", str(tmp_path))
    assert "--engine cuda: expected H and I multiples of 8, got H 12 and I 8" in error


def seeded_layer(dtype: str = "bfloat16", tokens: int = 50) -> tuple[device.SeededLayer, np.ndarray]:
    return device.random_layer(models.scaled(models.find("olmoe"), 0.02), tokens, seed=7, skew=0.5, dtype=dtype)


@pytest.mark.parametrize("ranks", [1, 2, 3, 64])
def test_seeded_experts_are_the_same_on_any_number_of_ranks(ranks):
    torch = pytest.importorskip("torch")
    layer, _ = seeded_layer()
    for name in ("gate_up_proj", "down_proj"):
        whole = getattr(layer, name)
        parts = [
            getattr(layer.with_experts(local_experts(contiguous(64, ranks), rank)), name).made("cpu")
            for rank in range(ranks)
        ]
        assert torch.equal(torch.cat(parts), whole.made("cpu"))
        assert whole.shape == tuple(torch.cat(parts).shape) and whole.nbytes == sum(part.nbytes for part in parts)


def test_seeded_experts_differ():
    pytest.importorskip("torch")
    layer, _ = seeded_layer("float32")
    weights = layer.gate_up_proj.made("cpu")
    assert len({matrix.numpy().tobytes() for matrix in weights}) == 64
    assert weights.std().item() == pytest.approx(layer.hidden**-0.5, rel=0.01)
    square = device.SeededWeights((7, 0), (3,), 8, 8, "float32")
    others = (square, replace(square, seed=(7, 1)), replace(square, seed=(8, 0)), replace(square, experts=(4,)))
    assert len({other.made("cpu").numpy().tobytes() for other in others}) == 4


def make_on_cpu(weights: device.SeededWeights) -> object:
    """Replaces `device.to_device`, because there is no GPU here."""
    return weights.made("cpu")


def call_without_gpu(rank, ranks, name, settings, layer, x):
    """Replaces `run.call_on_rank`: calls the CPU engine, for a layer whose experts this rank makes."""
    with mock.patch.object(device, "to_device", make_on_cpu):
        return run.call_on_rank(rank, ranks, name, {**settings, "engine": "cpu"}, device.layer_on_host(layer), x)


@pytest.mark.usefixtures("kept_ranks")
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_run_of_experts_that_the_ranks_make(tmp_path, capsys, monkeypatch, gpus, ranks):
    monkeypatch.setattr(run, "call_on_rank", call_without_gpu)
    monkeypatch.setattr(device, "to_device", make_on_cpu)
    assert main(["run", *RANDOM, "--ranks", ranks, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert f"{ranks} rank" in printed and "cuda engine" in printed and "PASS" in printed
    monkeypatch.setattr(device, "to_device", lambda weights: replace(weights, seed=(1, 0)).made("cpu"))
    assert main(["run", *RANDOM, "--ranks", ranks, "--out", str(tmp_path)]) == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_sample_is_judged_as_the_whole(dtype, monkeypatch):
    """If a layer has too many weights, results are checked only for tokens whose experts are all among a few chosen
    experts, and the routing is checked for all tokens."""
    pytest.importorskip("torch")
    monkeypatch.setattr(device, "to_device", make_on_cpu)
    layer, x = seeded_layer(dtype)
    whole = device.layer_on_host(layer)
    sizes = {"hidden": layer.hidden, "intermediate": layer.intermediate, "experts": 64, "top_k": 8, "dtype": dtype}
    with flashmoe.Context(max_tokens=50, **sizes) as context:
        y = flashmoe.moe(
            context, x, whole.gate_up_proj, whole.down_proj, router=layer.router, top_k=8, renormalize=False
        )
        ids = context.last_call.topk_ids

    def verdict(layer, y, ids):
        return verify.verify(
            layer, x, y, ids, tokens=[len(x)], placement=contiguous(64, 2), return_mode="direct", gpu=True
        )

    assert verdict(whole, y, ids).passed and verdict(whole, y, ids).tokens == 50
    each = whole.gate_up_proj[0].size + whole.down_proj[0].size
    monkeypatch.setattr(verify, "_MOST_WEIGHTS", 30 * each)
    few = verdict(layer, y, ids)
    assert few.passed and 0 < few.tokens < 50 == few.of_tokens
    sampled = verify._some_experts(ids, 30)
    assert len(sampled) <= 30
    wrong = y.copy()
    first = int(np.nonzero(np.isin(ids, sampled).all(axis=1))[0][-1])
    wrong[first] = -wrong[first]
    assert not verdict(layer, wrong, ids).passed
    ids[-1, 0] = ids[-1, 1]
    assert verdict(layer, y, ids).misrouted == 1


def test_run_refuses_what_does_not_fit_before_making_it(tmp_path, capsys, small_shared_memory):
    options = ["--engine", "cpu", "--model", "mixtral-8x7b", "--tokens", "1000000", "--out", str(tmp_path)]
    assert "1.0 MiB free in /dev/shm" in run_failing(capsys, "run", *options)


def test_run_refuses_a_truncated_layer(tmp_path, shipped, capsys):
    file = shipped / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    assert "model.safetensors" in run_failing(capsys, "run", "--checkpoint", str(shipped), "--out", str(tmp_path))


def test_run_refuses_a_layer_with_a_broken_header(tmp_path, shipped, capsys):
    file = shipped / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[:8] = b"\xff" * 8
    file.write_bytes(data)
    assert "model.safetensors" in run_failing(capsys, "run", "--checkpoint", str(shipped), "--out", str(tmp_path))


def command_line(*arguments: str, before: str = "", **changes) -> subprocess.CompletedProcess:
    """Runs `flashmoe` in a process of its own, as a shell does. The code `before` runs first in that process."""
    program = f"{before}\nimport sys\nfrom flashmoe.cli import main\nsys.exit(main(sys.argv[1:]))"
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "timeout": 120, **changes}
    return subprocess.run([sys.executable, "-c", program, *arguments], **options)


@pytest.mark.parametrize("cores", [1, 2, 3, 4, 8])
def test_a_picture_is_of_the_run_where_each_rank_has_two_cores(monkeypatch, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    workload = workload_module.shipped_workload(workload_module.Request(2, 8, None, "auto"))
    own = [[Event("os", "gate", 0, 1, 0, 0)]] * 2
    drawn = picture.picture_of(workload, own, "this run")
    if cores >= 4:
        assert drawn == (own, "this run", "who did what when")
        return
    few = f"{cores} core{'s' if cores > 1 else ''} for 2 ranks"
    assert drawn.title.startswith(
        f"SIMULATED, and not of this run, which had {few}: a layer of qwen3-30b-a3b on 4 GPUs"
    )
    assert drawn.hint.startswith("a simulated call of 4 GPUs") and few in drawn.hint
    assert len(drawn.events_by_rank) == 4


@pytest.mark.usefixtures("kept_ranks")
@pytest.mark.parametrize("file", ["timeline.png", "trace.json"])
@pytest.mark.parametrize(
    ("make", "reason"),
    [(lambda path: path.symlink_to("/dev/full"), "No space left on device"), (Path.mkdir, "Is a directory")],
    ids=["full disk", "folder"],
)
def test_run_names_the_file_that_it_cannot_write(tmp_path, capsys, file, make, reason):
    make(tmp_path / file)
    error = run_failing(capsys, "run", *TINY, "--out", str(tmp_path))
    assert error == f"error: --out: cannot write {tmp_path / file}: {reason}\n"


@pytest.mark.parametrize("arguments", [["memory", "--model", "olmoe"], ["info"], ["--help"]], ids=lambda each: each[0])
def test_a_full_standard_output(arguments):
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        done = command_line(*arguments, stdout=full, env=buffered)
    assert (done.returncode, done.stderr) == (2, "error: No space left on device\n")


def test_a_standard_output_that_is_closed():
    """Nobody reads the pipe any more, as in ``flashmoe memory | head -1``."""
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as closed:
        done = command_line("memory", "--model", "olmoe", stdout=closed)
    assert done.returncode != 0 and "Traceback" not in done.stderr


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_any_encoding_of_standard_output(tmp_path, encoding):
    out = tmp_path / "\u00b5\u2581"
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = command_line("run", *TINY, "--out", str(out), env=environment, encoding=encoding)
    assert (done.returncode, done.stderr) == (0, "")
    assert "PASS" in done.stdout and ("█" if encoding == "utf-8" else "##") in done.stdout
    assert out.name.encode(encoding, errors="backslashreplace").decode(encoding) in done.stdout


def test_a_user_without_a_home(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k not in ("HOME", "XDG_CACHE_HOME", "FLASHMOE_CACHE")}
    homeless = {"before": "import pwd\ndef nobody(uid): raise KeyError(uid)\npwd.getpwuid = nobody", "env": environment}
    assert command_line("run", *TINY, "--out", str(tmp_path), **homeless).returncode == 0
    told = command_line("info", **homeless)
    assert told.returncode == 0 and "has no home folder; set FLASHMOE_CACHE" in " ".join(told.stdout.split())
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\n")
    nvcc.chmod(0o755)
    environment["FLASHMOE_NVCC"] = str(nvcc)
    refused = command_line("compile", **homeless)
    reason = f"user {os.getuid()} has no home folder; set FLASHMOE_CACHE to a folder of your own"
    assert (refused.returncode, refused.stderr) == (2, f"error: cache: {reason}\n")


# ---- flashmoe trace --------------------------------------------------------------------------------------


SIZES = "--hidden 24 --intermediate 8 --experts 4 --top-k 2 --tokens 9 --activation gelu --dtype float32"


@pytest.mark.parametrize(
    ("options", "passes"),
    [
        ([*TINY, "--skew", "1"], ["forward"]),
        (["--engine", "cpu", *SIZES.split(), "--backward"], ["forward", "backward"]),
        (["--engine", "cpu", "--tokens", "40", "--weight-dtype", "float8_e4m3fn"], ["forward"]),
    ],
    ids=["ranks", "backward", "fp8"],
)
def test_trace(tmp_path, capsys, options, passes):
    """The command prints what it should, and its two files say the same."""
    assert main(["trace", *options, "--pairs", "2", "--out", str(tmp_path / "new")]) == 0
    printed = capsys.readouterr().out
    for name in passes:
        assert f"{name.capitalize()} pass, " in printed
    assert "gemm0" in printed and "uncovered" in printed and "(medians of 2, in turn)" in printed
    account = json.loads((tmp_path / "new" / "account.json").read_text())
    assert [call["pass"] for call in account["calls"]] == passes
    for call in account["calls"]:
        for rank in call["ranks"]:
            assert rank["covered"] >= 0.98 and sum(rank["shares"].values()) == pytest.approx(1)
    assert account["overhead"]["ratio"] > 0 and account["overhead"]["pairs"] == 2
    trace = json.loads((tmp_path / "new" / "trace.json").read_text())
    assert trace["otherData"] == account
    products = [record for record in trace["traceEvents"] if record["name"] == "gemm0"]
    assert {record["args"]["expert"] for record in products} <= set(range(account["experts"])) and products
    assert {record["pid"] for record in products} <= set(range(len(account["tokens"])))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--hidden", "8"], "sizes: expected --model, or all four sizes"),
        (["--model", "mixtral-8x7b", "--activation", "tanh"], "--activation: expected one of"),
        (["--model", "mixtral-8x7b", "--top-k", "0"], "--top-k: expected at least 1, got 0"),
        (["--weight-dtype", "int8"], "--weight-dtype: expected one of float8_e4m3fn, got 'int8'"),
        (
            ["--backward", "--weight-dtype", "float8_e4m3fn", "--tokens", "4"],
            "--backward: expected weights that are not",
        ),
        (["--checkpoint", "x", "--model", "mixtral-8x7b"], "--checkpoint: expected no other layer, got --model"),
        (["--pairs", "0"], "--pairs: expected at least 1, got 0"),
    ],
)
def test_trace_refuses(capsys, options, error):
    assert error in run_failing(capsys, "trace", "--engine", "cpu", *options)


# ---- flashmoe memory -------------------------------------------------------------------------------------


def test_memory_explains_every_term(capsys):
    assert main(["memory", "--model", "qwen3-30b-a3b", "--tokens", "64"]) == 0
    printed = capsys.readouterr().out
    plan = memory.plan_memory(
        ranks=4, max_tokens=64, hidden=2048, intermediate=768, experts=128, top_k=8, return_mode="auto"
    )
    for term in plan.terms:
        assert term.name in printed and memory.format_bytes(term.bytes) in printed
    assert "3 x 64 x 4,096 B" in printed  # the term `rows`: 3 peers, 64 tokens, H elements of bfloat16
    assert "fits" in printed


def test_memory_of_training(capsys):
    """Each of a token's K rows keeps 2 I elements of bfloat16 (I without a gate), and 32 bytes for its home, token and
    weight."""
    assert main(["memory", "--model", "qwen3-30b-a3b", "--tokens", "64", "--training"]) == 0
    printed = capsys.readouterr().out
    assert f"64 x 8 x {2 * 2 * 768 + 32:,} B" in printed and "per layer and token" in printed
    assert "64 x 3 x 4,096 B" in printed  # x of each of 64 tokens, on three other ranks
    assert main(["memory", "--model", "qwen3-30b-a3b", "--tokens", "64", "--training", "--activation", "silu"]) == 0
    assert f"64 x 8 x {2 * 768 + 32:,} B" in capsys.readouterr().out
    for encoding in ("float8_e4m3fn", "mxfp4"):
        assert main(["memory", "--model", "qwen3-30b-a3b", "--training", "--weight-dtype", encoding]) == 2
        assert f"training: expected weights in bfloat16, got {encoding}" in capsys.readouterr().err


def test_memory_of_training_on_a_gpu(capsys):
    """A call keeps 2 I elements and 8 bytes for each choice, and E floats for each token. A backward pass takes 3 I
    elements for each row of tiles (each expert may have a tile that is not full), and for each choice a float for every
    256 columns of I and each of a cluster's two blocks. Without a gate, 2 I and 3 I are I and 2 I."""
    command = ["memory", "--model", "qwen3-30b-a3b", "--engine", "cuda", "--tokens", "1000", "--training"]
    assert main([*command, "--ranks", "1"]) == 0
    printed = capsys.readouterr().out
    for formula in ("1,000 x 8 x 1,536 x 2 B", "1,000 x 64 B", "1,000 x 128 x 4 B", "6 x 1,000 x 8 x 4 B"):
        assert formula in printed, formula
    sizes = {"max_tokens": 1000, "hidden": 2048, "intermediate": 768, "experts": 128, "top_k": 8}
    plan = memory.plan_memory(engine="cuda", ranks=1, training=True, **sizes)
    assert plan.kept_bytes == 1000 * (8 * (2 * 768 * 2 + 8) + 4 * 128)
    assert plan.pass_bytes == (8000 // 256 + 128) * 256 * 3 * 768 * 2 + 6 * 8000 * 4
    assert f"{memory.format_bytes(plan.pass_bytes)} in a backward pass" in " ".join(printed.split())
    plain = memory.plan_memory(engine="cuda", ranks=1, training=True, activation="relu2", **sizes | {"max_tokens": 3})
    assert plain.kept_bytes == 3 * (8 * (768 * 2 + 8) + 4 * 128)
    assert plain.pass_bytes == 24 * 256 * 2 * 768 * 2 + 6 * 24 * 4
    wide = memory.plan_memory(engine="cuda", ranks=1, training=True, dtype="float32", **sizes)
    assert wide.kept_bytes == 1000 * (8 * (2 * 768 * 4 + 8) + 4 * 128)
    assert wide.pass_bytes == (8000 // 256 + 128) * 256 * 3 * 768 * 4 + 6 * 8000 * 4
    for other in (
        ["--ranks", "2", "--transport", "rdma"],
        ["--ranks", "1", "--weight-dtype", "float8_e4m3fn"],
        ["--ranks", "1", "--weight-dtype", "mxfp4"],
    ):
        assert main([*command, *other]) == 2
        assert "training: expected bfloat16, float16 or float32" in capsys.readouterr().err


@pytest.mark.parametrize("redispatch", [False, True])
def test_memory_of_training_on_gpus(redispatch):
    """Ranks also receive other ranks' tokens: each token is received by three other ranks at most. Each of a rank's 32
    experts may have a tile of 256 rows that is not full."""
    sizes = {"max_tokens": 1000, "hidden": 2048, "intermediate": 768, "experts": 128, "top_k": 8, "ranks": 4}
    plan = memory.plan_memory(engine="cuda", training=True, redispatch=redispatch, **sizes)
    assert plan.ranks == 4
    terms = {term.name: term.bytes for term in plan.terms if term.region in ("kept", "pass", "call")}
    received, tile_rows = 1000 * 3 * 2048 * 2, (8000 // 256 + 32) * 256
    assert terms["kept_rows"] == 8000 * 2 * 768 * 2 and terms["kept_logits"] == 1000 * 128 * 4
    assert terms["kept_numbers"] - 4 * (4 * 1000 + 33) in range(32)  # and padding: parts are aligned to 16 bytes
    assert (terms.get("kept_tokens", 0), terms["pass_tokens"]) == (
        (0, 2 * received) if redispatch else (received, received)
    )
    assert terms["z_gradients"] == 2 * terms["weighted"] == tile_rows * 2 * 768 * 2
    assert terms["gather"] == tile_rows * 4
    assert terms.get("call_tokens", 0) == (0 if redispatch else 3 * 1000 * 2048 * 2)
    assert terms["call_rows"] >= 8000 * 2 * 768 * 2


@pytest.mark.parametrize("engine", ["cpu", "cuda"])
def test_what_each_way_to_train_costs(capsys, engine):
    """The ways are to keep x of other ranks' tokens, to send x again, or to compute everything again."""
    sizes = {"max_tokens": 1000, "hidden": 2048, "intermediate": 768, "experts": 128, "top_k": 8}
    keep, again, compute = memory.training_costs(engine=engine, ranks=4, **sizes)
    row = 2048 * 2
    assert keep.kept_bytes - again.kept_bytes == again.pass_bytes - keep.pass_bytes == 1000 * 3 * row
    assert again.heap_bytes - keep.heap_bytes == 3 * 1000 * row and compute.heap_bytes == keep.heap_bytes > 0
    assert compute.kept_bytes == 1000 * row and compute.pass_bytes == keep.kept_bytes + keep.pass_bytes
    assert [(each.sent, each.returned, each.products) for each in (keep, again, compute)] == [
        (2, 2, 6), (3, 2, 6), (3, 3, 8)
    ]  # fmt: skip
    assert len(memory.training_costs(engine=engine, ranks=1, **sizes)) == 2
    command = ["memory", "--model", "qwen3-30b-a3b", "--engine", engine, "--tokens", "1000", "--training"]
    assert main([*command, "--redispatch"]) == 0
    printed = capsys.readouterr().out
    assert "redispatch" in printed and "checkpoint" in printed and "x_rows" in printed
    assert memory.format_bytes(again.kept_bytes) in printed


def test_memory_depends_on_sizes_and_return_mode():
    sizes = {"max_tokens": 128, "hidden": 256, "intermediate": 128, "experts": 16, "top_k": 4}
    direct = memory.plan_memory(ranks=2, **sizes, return_mode="direct")
    reduced = memory.plan_memory(ranks=2, **sizes, return_mode="reduced")
    assert direct.heap_bytes > reduced.heap_bytes  # direct has K = 4 return rows per token, reduced R = 2
    assert direct.workspace_bytes < reduced.workspace_bytes  # reduced stages the rows that it sums
    wide = memory.plan_memory(ranks=2, **sizes, return_mode="direct", dtype="float32")
    assert 1.8 < wide.heap_bytes / direct.heap_bytes <= 2


def test_a_rank_alone_takes_no_shared_memory(monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    sizes = {"max_tokens": 8, "hidden": 8, "intermediate": 8, "experts": 4, "top_k": 2}
    memory.check_fits(memory.plan_memory(ranks=1, **sizes))
    with pytest.raises(flashmoe.HeapError, match="memory: expected at most the 0 B free"):
        memory.check_fits(memory.plan_memory(ranks=2, **sizes))


def test_memory_refuses_what_exceeds_the_budget(capsys):
    assert main(["memory", "--model", "mixtral-8x7b", "--budget", "1MiB"]) == 1
    captured = capsys.readouterr()
    assert "budget of 1.0 MiB" in captured.err and captured.err.count("\n") == 1
    assert "fits" not in captured.out
    assert main(["memory", "--model", "mixtral-8x7b", "--tokens", "8", "--budget", "10G"]) == 0


def test_memory_refuses_what_exceeds_shared_memory(capsys, small_shared_memory):
    assert main(["memory", "--model", "qwen3-30b-a3b"]) == 1
    assert "1.0 MiB free in /dev/shm" in capsys.readouterr().err


def test_memory_begins_with_its_answer(capsys):
    assert main(["memory", "--model", "mixtral-8x7b", "--tokens", "8", "--budget", "10G"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    answer = r"4 ranks x 8 tokens, .* cpu engine per rank [\d.]+ .iB; .* not counted fits heap, per rank"
    assert re.match(answer, printed), printed[:300]


LARGEST = {"hidden": 1 << 20, "intermediate": 1 << 20, "experts": 8192, "top-k": 8192, "tokens": (1 << 20) - 1}


@pytest.mark.parametrize("ranks", ["1", "1024"])
def test_memory_refuses_what_exceeds_the_machine(capsys, monkeypatch, ranks):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 80))
    assert main(["memory", *(f"--{name}={size}" for name, size in LARGEST.items()), "--ranks", ranks]) == 1
    captured = capsys.readouterr()
    has = memory.format_bytes(memory.machine_bytes())
    assert f"memory: expected at most the {has} that this machine has, swap included, got {ranks} x " in captured.err
    assert captured.err.count("\n") == 1 and "fits" not in captured.out


def test_memory_says_what_it_did_not_compare(capsys):
    assert main(["memory", "--model", "mixtral-8x7b", "--engine", "cuda", "--ranks", "1"]) == 0
    printed = capsys.readouterr().out
    assert "not compared with what a GPU has" in printed and "fits" not in printed


def test_memory_of_the_cuda_engine(capsys):
    """The plan needs no GPU, and does not depend on this machine's shared memory."""
    sizes = {"ranks": 4, "max_tokens": 4096, "hidden": 2048, "intermediate": 768, "experts": 128, "top_k": 8}
    plan = memory.plan_memory(engine="cuda", **sizes)
    assert plan == memory.plan_memory(engine="cuda", processors=132, **sizes)
    terms = {term.name: term for term in plan.terms}
    assert terms["intermediate"].shape[1:3] == (256, 1536)  # rows of a tile, bytes of a row
    assert terms["out_entries"].bytes > 0
    assert main(["memory", "--model", "qwen3-30b-a3b", "--engine", "cuda"]) == 0
    printed = capsys.readouterr().out
    assert "cuda engine" in printed and memory.format_bytes(terms["intermediate"].bytes) in printed
    assert "fits" not in printed
    assert main(["memory", "--model", "qwen3-30b-a3b", "--engine", "cuda", "--budget", "10MiB"]) == 1


def test_memory_of_ranks_that_put(capsys):
    sizes = {"engine": "cuda", "ranks": 4, "max_tokens": 512, "hidden": 1024, "intermediate": 256, "experts": 32}
    sizes |= {"top_k": 4, "return_mode": "reduced"}
    mapped, puts = (memory.plan_memory(**sizes, transport=transport) for transport in ("auto", "rdma"))
    # Ranks whose memory is mapped may train: gradients of combine weights come home to the heap, [T, K] float32. Such
    # ranks also say in the heap why they refuse a call. If they promise to have few tokens, a kernel counts units of
    # rows: at most one for each expert, and one for each 16 of 2048 rows.
    more = {term.name: term.bytes for term in set(mapped.terms) - set(puts.terms)}
    units = -(-4 * (32 + 2048 // 16) // 256) * 256
    assert more == {"weight_gradients": 512 * 4 * 4, "x_rows": 0, "refusal_reason": 4 * 512, "few_done": units}
    assert mapped.heap_bytes == puts.heap_bytes + 512 * 4 * 4 + 4 * 512
    only = {term.name: term for term in set(puts.terms) - set(mapped.terms)}
    assert set(only) == {"out_rows", "returns_ready", "returns_sent", "few_done"}
    assert only["few_done"].bytes == 0
    assert (only["out_rows"].region, only["out_rows"].bytes) == ("workspace", 512 * 1024 * 2)
    command = "memory --engine cuda --hidden 1024 --intermediate 256 --experts 32 --top-k 4 --tokens 512 --transport"
    assert main([*command.split(), "rdma"]) == 0
    assert "out_rows" in capsys.readouterr().out
    assert main([*command.split(), "nvlink"]) != 0
    assert "transport: expected one of auto, rdma, got 'nvlink'" in capsys.readouterr().err


def test_memory_of_several_machines(capsys):
    """The machines have 3 and 2 ranks, so a rank of the smaller machine is the relay of up to two sources."""
    tokens, hidden, local, top_k, most, slots = 100, 64, 4, 6, 3, 2
    sizes = {"ranks": 5, "max_tokens": tokens, "hidden": hidden, "intermediate": 32, "experts": 16, "top_k": top_k}
    sizes |= {"return_mode": "reduced"}
    plan, plain = (memory.plan_memory(**sizes, machines=each) for each in ([0, 0, 0, 1, 1], ()))
    blocks = -(-tokens // 8)
    expected = {
        "relay_signal": slots * blocks * 8,
        "relay_offsets": slots * blocks * most * (local + 1) * 2,
        "relay_counts": slots * most * tokens * 2,
        "relay_entries": slots * tokens * top_k * 12,
        "sum_signal": slots * most * 8 * 8,
        "machine_sums": slots * most * tokens * hidden * 4,
    }
    added = {term.name: math.prod((*term.shape, term.elem_bytes)) for term in set(plan.terms) - set(plain.terms)}
    assert added == expected
    assert plan.heap_bytes - plain.heap_bytes == sum(-(-size // 256) * 256 for size in expected.values())
    assert plan.workspace_bytes == plain.workspace_bytes and (plan.ranks_here, plain.ranks_here) == (3, 5)
    assert main(["memory", "--model", "qwen3-30b-a3b", "--tokens", "64", "--ranks", "4", "--machines", "2"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in expected)
    with pytest.raises(flashmoe.InvalidArgument, match="machines: expected one for each of 5 ranks, got 2"):
        memory.plan_memory(**sizes, machines=[0, 1])
    with pytest.raises(flashmoe.InvalidArgument, match="machines: expected one with transport 'rdma', got 2"):
        memory.plan_memory(engine="cuda", transport="rdma", **sizes, machines=[0, 0, 0, 1, 1])
    with pytest.raises(flashmoe.InvalidArgument, match="training: expected ranks of one machine"):
        memory.plan_memory(engine="cuda", training=True, **sizes, machines=[0, 0, 0, 1, 1])


@pytest.mark.parametrize("row", memory.compare_published(4), ids=lambda row: f"{row.max_tokens}-{row.experts}")
def test_memory_is_within_the_published(row):
    assert row.bounded.total_bytes <= row.published_bytes
    assert row.bounded.total_bytes < row.dropless.total_bytes


def test_memory_table(capsys):
    assert main(["memory", "--table"]) == 0
    printed = capsys.readouterr().out
    for row in memory.compare_published(4):
        for plan in (row.bounded, row.dropless):
            assert f"{plan.total_bytes / 2**20:,.2f}" in printed
    for _, _, mib in memory.PUBLISHED:
        assert f" {mib:.2f} " in printed
    assert main(["memory", "--table", "--ranks", "8"]) == 0
    assert "with 8 ranks" in capsys.readouterr().out


def test_memory_counts_processors():
    sizes = {"ranks": 1, "max_tokens": 8, "hidden": 64, "intermediate": 32, "experts": 4, "top_k": 2}
    for engine, few, many in (("cpu", 1, 1000), ("cuda", 2, 1000)):
        plans = [memory.plan_memory(engine=engine, processors=count, **sizes) for count in (few, many)]
        assert plans[0].workspace_bytes < plans[1].workspace_bytes  # the ready queue has a stop word for each cluster


def test_memory_of_given_sizes(capsys):
    sizes = ["--hidden", "64", "--intermediate", "32", "--experts", "4", "--top-k", "2"]
    assert main(["memory", *sizes, "--tokens", "16", "--ranks", "1"]) == 0
    assert "hidden 64, intermediate 32, experts 4, top k 2" in capsys.readouterr().out


def test_memory_of_copies(capsys):
    """The memory is that of a context for a placement with copies. 32 experts and 5 copies are 37, so the fullest of 4
    ranks has 10."""
    sizes = {"hidden": 64, "intermediate": 32, "experts": 32, "top_k": 2, "ranks": 4, "max_tokens": 16}
    options = [f"--{name.replace('_', '-').replace('max-', '')}={size}" for name, size in sizes.items()]
    assert main(["memory", *options, "--copies", "5"]) == 0
    assert "experts 32, top k 2, copies 5" in capsys.readouterr().out
    placement = roomy(32, 4, 5)
    assert most_local(placement, 4) == 10
    plan, default = (memory.plan_memory(**sizes, placement=each) for each in (placement, None))
    (offsets,) = (term for term in plan.terms if term.name == "packet_offsets")
    assert offsets.shape[-1] == 10 + 1
    assert plan.total_bytes > default.total_bytes


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ([], "missing --hidden, --intermediate, --experts, --top-k"),
        (["--hidden", "8"], "missing --intermediate"),
        (["--model", "olmoe", "--top-k", "65"], "top_k: expected an integer in [1, 64], got 65"),
        (["--model", "olmoe", "--ranks", "0"], "ranks: expected an integer in [1, "),
        (["--model", "olmoe", "--machines", "5"], "machines: expected an integer in [1, 4], got 5"),
        (["--model", "olmoe", "--tokens", "-1"], "max_tokens: expected an integer in [1, "),
        (["--model", "olmoe", "--budget", "much"], "expected a size such as 512MiB or 2G, got 'much'"),
        (["--model", "olmoe", "--dtype", "fp8"], "dtype: expected one of"),
        (["--model", "olmoe", "--copies", "-1"], "copies: expected an integer in [0, "),
        (["--table", "--tokens", "8"], "--table: expected no other option but --ranks, got --tokens"),
        (["--table", "--return", "direct"], "--table: expected no other option but --ranks, got --return"),
        (["--model", "olmoe", "--engine", "tpu"], "engine: expected one of cpu, cuda, got 'tpu'"),
        (["--model", "olmoe", "--engine", "cuda", "--tokens", "65537"], "max_tokens: expected an integer in [1, 65536"),
        (["--model", "olmoe", "--engine", "cuda", "--ranks", "33"], "ranks: expected at most 32 with the CUDA engine"),
        (["--model", "olmoe", "--engine", "cuda", "--processors", "3"], "processors: expected an even number from 4"),
    ],
)
def test_memory_refuses_bad_arguments_in_one_line(capsys, options, reason):
    assert reason in run_failing(capsys, "memory", *options)


@pytest.mark.parametrize(
    ("text", "count"),
    [("1", 1), ("1000000", 10**6), ("512MiB", 512 << 20), ("2G", 2 << 30), ("1.5 kb", 1536), ("1t", 1 << 40)],
)
def test_parse_bytes(text, count):
    assert memory.parse_bytes(text) == count


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1,023 B"), (1024, "1.0 KiB"), (150 << 20, "150 MiB"), (3 << 40, "3.0 TiB")],
)
def test_format_bytes(count, text):
    assert memory.format_bytes(count) == text


# ---- flashmoe info, and the rest -------------------------------------------------------------------------


def test_info(capsys):
    assert main(["info"]) == 0
    printed = capsys.readouterr().out
    for name in (
        "engine library",
        "BLAS",
        "shared memory",
        "cores",
        "PyTorch",
        "cuda engine",
        "NVIDIA driver",
        "NVIDIA GPU",
        "PyTorch for CUDA",
        "nvcc",
        "kernel cache",
        "NVSHMEM",
    ):
        assert name in printed


def test_info_names_the_remedy(capsys, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("flashmoe.cli.info._version", lambda package: None)
    monkeypatch.setattr("flashmoe.jit.find_nvcc", no_nvcc)
    assert main(["info"]) == 0
    printed = capsys.readouterr().out
    for package in ("'nvidia-cuda-nvcc==13.0.*'", "torch"):
        assert f"pip install {package}" in printed


def test_info_of_nvshmem(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr("flashmoe.nvshmem.package", lambda: iter([tmp_path]))
    assert main(["info"]) == 0
    assert "pip install 'nvidia-nvshmem-cu13>=3.4,<3.9'" in capsys.readouterr().out
    monkeypatch.setattr("flashmoe.cli.info.loads", lambda library: True)
    header = tmp_path / "include" / "non_abi" / "nvshmem_version.h"
    header.parent.mkdir(parents=True)
    for minor, told in (
        (8, "for several GPUs; headers of 3.8.1, for transport 'rdma'"),
        (9, "for several GPUs, but not for transport 'rdma': nvshmem: expected 3.4 to 3.8, "),
    ):
        defined = {"MAJOR": 3, "MINOR": minor, "PATCH": 1}
        header.write_text("".join(f"#define NVSHMEM_VENDOR_{part}_VERSION {n}\n" for part, n in defined.items()))
        assert main(["info"]) == 0
        assert told in capsys.readouterr().out


# ---- flashmoe balance ------------------------------------------------------------------------------------


def test_balance_of_the_shipped_passage(capsys):
    assert main(["balance", "--ranks", "8"]) == 0
    printed = capsys.readouterr().out
    assert "16 experts, 8 ranks, 2 copies; load: the shipped passage" in printed
    default, balanced = map(float, re.search(r"fullest rank: (\S+) times .*, (\S+) as balanced", printed).groups())
    assert 1.85 < default < 2.0 and 1.0 <= balanced <= 1.06
    placement = json.loads(re.search("placement: (.*)", printed)[1])
    assert sum(len(each) if isinstance(each, list) else 1 for each in placement) == 16 + 2


@pytest.mark.parametrize("text", ["12 1\n1 2\n", "[12, 1, 1, 2]", "12,1,1,2.0"])
def test_balance_of_numbers(tmp_path, capsys, text):
    (tmp_path / "load").write_text(text)
    assert main(["balance", str(tmp_path / "load"), "--ranks", "2", "--copies", "1"]) == 0
    printed = capsys.readouterr().out
    assert "4 experts, 2 ranks, 1 copy; load: " in printed
    assert "fullest rank: 1.62 times the mean by default, 1.00 as balanced" in printed
    assert sorted(json.loads(re.search("placement: (.*)", printed)[1])[0]) == [0, 1]


@pytest.mark.parametrize(
    ("text", "options", "reason"),
    [
        ("", [], "FILE: expected .* to have a number for each expert, got could not convert"),
        (
            "1 two 3",
            [],
            "FILE: expected .* to have a number for each expert, got could not convert string to float: 'two'",
        ),
        ("1 -1", [], "FILE: expected 1 to 8192 numbers in .*, none below 0 and not all 0, got 2"),
        ("0 0", [], "FILE: expected 1 to 8192 numbers in .*, none below 0 and not all 0, got 2"),
        ("1 nan", [], "FILE: expected 1 to 8192 numbers in .*, none below 0 and not all 0, got 2"),
        (None, [], "FILE: expected .* to have a number for each expert, got no such file"),
        ("1 2", ["--ranks", "0"], "--ranks: expected an integer in .*, got 0"),
        ("1 2", ["--ranks", "3", "--copies", "5"], "--copies: expected an integer in .*, got 5"),
    ],
)
def test_balance_refuses_bad_arguments_in_one_line(tmp_path, capsys, text, options, reason):
    file = tmp_path / "load"
    if text is not None:
        file.write_text(text)
    assert re.search(reason, run_failing(capsys, "balance", str(file), *options))


def test_help(capsys):
    assert main([]) == 0
    assert main(["run", "--help"]) == 0
    printed = capsys.readouterr().out
    assert "memory" in printed and "--skew" in printed


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"flashmoe {flashmoe.__version__}\n"


def test_quantize(tmp_path, capsys):
    source, target = resources.files("flashmoe") / "assets" / "tiny-qwen3-moe", tmp_path / "target"
    assert main(["quantize", str(source), str(target)]) == 0
    assert capsys.readouterr().out == f"{target}: the experts of {source} in float8_e4m3fn\n"
    assert load_layer(target, 1).weight_dtype == "float8_e4m3fn"
    assert "target: expected an empty folder" in run_failing(capsys, "quantize", str(source), str(target))
    assert "dtype: expected one of" in run_failing(capsys, "quantize", str(source), str(target), "--dtype", "int8")


def test_unknown_command(capsys):
    assert "bogus" in run_failing(capsys, "bogus")
