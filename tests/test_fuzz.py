"""Files and tensors from strangers: runs the fuzzers of tests/fuzz for some seconds, and on inputs that they have kept.

Each fuzzer runs in a process of its own, because a bug that it finds may end the process. FLASHMOE_EXAMPLES (500 if it
is not set) sets the seconds: a fortieth of it, from 2 to 60. `make fuzz` takes longer.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

FUZZ = Path(__file__).parent / "fuzz"
TARGETS = ("header", "index", "config", "profiles", "dlpack")
SECONDS = min(60, max(2, int(os.environ.get("FLASHMOE_EXAMPLES", "500")) // 40))
MOST_FILES, MOST_BYTES = 100, 300_000
"""The most files of one target's corpus, and the most bytes of all corpora together."""


def run(*arguments: str | Path) -> subprocess.CompletedProcess:
    command = [sys.executable, FUZZ / "run.py", *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=250)


@pytest.mark.parametrize("target", TARGETS)
def test_every_input_that_was_kept(target):
    done = run("--target", target, "--replay")
    assert done.returncode == 0, done.stdout
    assert done.stdout.split("\n")[:-1] == [
        f"{target}: {path.name}" for path in sorted((FUZZ / "corpus" / target).iterdir())
    ]


@pytest.mark.parametrize("target", TARGETS)
def test_some_seconds_of_fuzzing(target):
    if importlib.util.find_spec("atheris") is None:
        pytest.skip("atheris is not installed (pip install '.[fuzz]'): nothing is fuzzed, kept inputs alone are run")
    done = run("--target", target, "--seconds", str(SECONDS), "--seed", "1")
    assert done.returncode == 0, done.stdout
    assert "findings []" in done.stdout


def test_the_corpora_stay_small():
    assert {folder.name for folder in (FUZZ / "corpus").iterdir()} == set(TARGETS)
    files = {target: list((FUZZ / "corpus" / target).iterdir()) for target in TARGETS}
    assert all(0 < len(kept) <= MOST_FILES for kept in files.values())
    assert sum(path.stat().st_size for kept in files.values() for path in kept) <= MOST_BYTES


PLANTED = {
    "another exception": (
        "config",
        "checkpoint.files.read_json = lambda *_: {}['hidden_size']",
        b"{}",
        "KeyError: 'hidden_size'",
    ),
    "a message that cannot be printed": (
        "index",
        "import flashmoe.system.foreign; flashmoe.system.foreign.clipped = str",
        b'{"weight_map": {"\\ud800.layers.0.mlp.gate.weight": "fused.safetensors"}}',
        "expected a message that can be printed",
    ),
    "a layer that is larger than what there is": (
        "header",
        "checkpoint.planned.machine_bytes = lambda: 2**40",
        b'{"hidden_states": {"dtype": "F32", "shape": [4096, 8192], "data_offsets": [0, 134217728]}}',
        "bytes more at the peak",
    ),
    "a read behind the last byte": (
        "dlpack",
        "import ctypes, flashmoe; flashmoe.moe = lambda ctx, **given: "
        "[ctypes.string_at(each.first, len(each.bytes) + 1) for each in given.values() if isinstance(each, Foreign)]",
        b'{"argument": "router", "type": [2, 32, 1], "shape": [6, 16], "device": [1, 0]}',
        None,
    ),
}
PROGRAM = """
import sys
sys.path[:0] = [{fuzz!r}, {tests!r}]
import targets
from targets import *
with targets.made({name!r}) as target:
    {plant}
    targets.checked(target, {data!r})
"""


@pytest.mark.parametrize("plant", PLANTED)
def test_a_planted_bug_is_found(plant, tmp_path):
    name, change, data, said = PLANTED[plant]
    places = {"fuzz": str(FUZZ), "tests": str(FUZZ.parent)}
    program = PROGRAM.format(name=name, plant=change, data=data, **places)
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    if said is None:
        assert done.returncode == -11, done.stderr  # SIGSEGV
    else:
        assert done.returncode == 1 and said in done.stderr, done.stderr
