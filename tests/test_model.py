"""The protocol of docs/protocol.md, checked exhaustively with Spin on the model in model/flashmoe.pml.

docs/model_checking.md says what the model covers. Each seeded bug must be found, and for the reason that its
row names: a model in which a bug goes unnoticed proves nothing when it finds no error.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

MODEL = Path(__file__).parent / "model" / "flashmoe.pml"
INSTALL = "apt-get install -y spin gcc"

TWO_PROCESSORS = ["PROCESSORS0=2"]
ONE_ROW_TILES = ["PAIRS=1", "ROWS=1"]

CONFIGURATIONS = {
    "direct": [],
    "direct, two processors": [*ONE_ROW_TILES, *TWO_PROCESSORS],
    "direct, two columns and groups": ["COLUMNS0=2", "COLUMNS1=2", "GROUPS=2", *ONE_ROW_TILES],
    "direct, two blocks": ["BLOCKS=2", "PAIRS=1"],
    "direct, two formers": ["EXPERTS=2", "BLOCKS1=0", "ROWS=1"],
    "direct, rows computed before their source is closed": ["LATE_CLOSE", *ONE_ROW_TILES],
    "direct, a rank without experts": ["IDLE_RANK", *TWO_PROCESSORS],
    "reduced, two formers": ["REDUCED", "EXPERTS=2", "BLOCKS1=0", "ROWS=1"],
    "reduced, two processors": ["REDUCED", *ONE_ROW_TILES, *TWO_PROCESSORS],
    "reduced, a rank without experts": ["REDUCED", "IDLE_RANK"],
    "reduced, two columns and groups": ["REDUCED", "IDLE_RANK", "COLUMNS1=2", "GROUPS=2", *ONE_ROW_TILES],
}

MODES = {"direct": ONE_ROW_TILES, "reduced": ["REDUCED", *ONE_ROW_TILES]}

DEADLOCK = r"invalid end state"
BUGS = {
    "MISSING_RELEASE": ([], r"assertion violated .*\.entries\[.*\.epoch"),
    "RELAXED_COUNTER": (TWO_PROCESSORS, r"assertion violated .*\.return_rows\[.*\.epoch"),
    "EPOCH_REUSE": ([], DEADLOCK),
    "LOST_TERMINATION": ([], DEADLOCK),
    "UNFLUSHED_TILES": ([], DEADLOCK),
    "EARLY_CLOSE": ([], r"assertion violated .*\.return_rows\[.*\.epoch"),
    "EAGER_RETURN": (["IDLE_RANK"], DEADLOCK),
    "COUNTER_KEPT": ([], r"assertion violated .*\.pending\["),
    "SHORT_QUEUE": (TWO_PROCESSORS, r"assertion violated .*\.queue\["),
}


@pytest.fixture(autouse=True)
def tools():
    missing = [tool for tool in ("spin", "gcc") if shutil.which(tool) is None]
    if missing:
        message = f"{' and '.join(missing)} not installed: {INSTALL}"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)


def search(folder, defines, *, gcc=("-DSAFETY",), pan=()):
    """Spin's verifier on the model with these defines; what it printed."""
    spin = ["spin", "-a", *(f"-D{define}" for define in defines), MODEL]
    # A search that outgrows 4 GB stops and says so. -O2 takes longer to compile than it saves.
    compile_verifier = ["gcc", "-O1", "-w", "-DMEMLIM=4096", *gcc, "-o", "pan", "pan.c"]
    for command in (spin, compile_verifier, ["./pan", "-m2000000", "-w25", *pan]):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def assert_exhaustive(output):
    assert re.search(r"errors: 0$", output, re.M), output
    # Each is how Spin says that it did not look at everything.
    for truncated in ("Search not completed", "max search depth too small", "out of memory", "MEMLIM"):
        assert truncated not in output, output
    states, seconds = re.search(r"(\d+) states, stored", output), re.search(r"elapsed time (\S+)", output)
    print(f"{int(states[1]):,} states, {seconds[1]} s")


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_protocol_holds(name, tmp_path):
    assert_exhaustive(search(tmp_path, CONFIGURATIONS[name]))


@pytest.mark.parametrize("mode", MODES)
def test_calls_end(mode, tmp_path):
    """No run goes on for ever without calls ending."""
    output = search(tmp_path, MODES[mode], gcc=["-DNP"], pan=["-l"])
    assert "non-progress cycles \t+" in output, output
    assert_exhaustive(output)


@pytest.mark.parametrize("mode", MODES)
def test_no_check_is_vacuous(mode, tmp_path):
    """Every statement is reached, each assertion too. Spin keeps no account within a d_step."""
    output = search(tmp_path, ["d_step=atomic", *MODES[mode]])
    assert_exhaustive(output)
    unreached = re.findall(r"state \d+, (.*)", output)
    # Agents have no end: calls follow each other for ever.
    assert unreached == ['"-end-"', '"-end-"'], output


@pytest.mark.parametrize("bug", BUGS)
def test_bug_is_found(bug, tmp_path):
    defines, reason = BUGS[bug]
    output = search(tmp_path, [f"BUG_{bug}", *defines])
    assert re.search(r"errors: 1$", output, re.M), output
    assert re.search(reason, output), output
