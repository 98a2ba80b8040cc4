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
MACHINES = MODEL.with_name("machines.pml")
"""The model of relays, which pass rows on and sum them on the way to and from other machines."""
INSTALL = "apt-get install -y spin gcc"

TWO_PROCESSORS = ["PROCESSORS0=2"]
TWO_SENDERS = ["SENDERS0=2"]
ONE_ROW_TILES = ["PAIRS=1", "ROWS=1"]
PUTS = ["REDUCED", "PUTS"]

CONFIGURATIONS = {
    "direct": [],
    "direct, two processors": [*ONE_ROW_TILES, *TWO_PROCESSORS],
    "direct, two processors, two columns in a group": ["IDLE_RANK", "COLUMNS1=2", *ONE_ROW_TILES, *TWO_PROCESSORS],
    "direct, two columns and groups": ["COLUMNS0=2", "COLUMNS1=2", "GROUPS=2", *ONE_ROW_TILES],
    "direct, two blocks by two senders": ["BLOCKS=2", "PAIRS=1", *TWO_SENDERS],
    "direct, two parts by two senders": ["PARTS=2", *TWO_SENDERS, "SENDERS1=2"],
    "direct, two formers": ["EXPERTS=2", "BLOCKS1=0", "ROWS=1"],
    "direct, rows computed before their source is closed": ["LATE_CLOSE", *ONE_ROW_TILES],
    "direct, a rank without experts": ["IDLE_RANK", *TWO_PROCESSORS],
    "reduced": ["REDUCED"],
    "reduced, two formers": ["REDUCED", "EXPERTS=2", "BLOCKS1=0", "ROWS=1"],
    "reduced, two processors": ["REDUCED", *ONE_ROW_TILES, *TWO_PROCESSORS],
    "reduced, two processors, two pieces": ["REDUCED", "IDLE_RANK", "PIECES=2", *ONE_ROW_TILES, *TWO_PROCESSORS],
    "reduced, two processors, of which one stops early": ["REDUCED", "EARLY_STOP", *ONE_ROW_TILES, *TWO_PROCESSORS],
    "reduced, a rank without experts": ["REDUCED", "IDLE_RANK"],
    "reduced, two columns and groups": ["REDUCED", "COLUMNS1=2", "GROUPS=2", *ONE_ROW_TILES],
    "reduced, two blocks": ["REDUCED", "BLOCKS=2", "PAIRS=1"],
    "puts": PUTS,
    "puts, two senders, two pieces": [*PUTS, "PIECES=2", *TWO_SENDERS],
    "puts, two processors": [*PUTS, "IDLE_RANK", *ONE_ROW_TILES, *TWO_PROCESSORS],
    "puts, two blocks by two senders": [*PUTS, "BLOCKS=2", "PAIRS=1", *TWO_SENDERS],
    "puts, a rank without experts": [*PUTS, "IDLE_RANK", *TWO_SENDERS, "SENDERS1=2"],
}

WAYS = {"direct": ONE_ROW_TILES, "reduced": ["REDUCED", *ONE_ROW_TILES], "puts": [*PUTS, *ONE_ROW_TILES]}

DEADLOCK = r"invalid end state"
# What Spin prints if an agent reads a wrong value: of entries or rows of packets, of return rows, or of an outbox.
ENTRIES = r"assertion violated .*\.entries\[.*==1\)"
ROWS = r"assertion violated .*\.rows\[.*==1\)"
RETURNS = r"assertion violated .*\.return_rows\[.*==1\)"
OUTBOX = r"assertion violated .*\.outbox\["


def not_zero(counter):
    return rf"assertion violated .*\.{counter}(\[[^]]*\])?==0\)"


# The bugs of the table in docs/model_checking.md. For each: its macro, the defines that it needs, what Spin must say.
BUGS = [
    # Calls, tiles and tasks.
    ("EPOCH_REUSE", [], DEADLOCK),
    ("LOST_TERMINATION", [], DEADLOCK),
    ("ALL_EARLY", ["REDUCED", "EARLY_STOP", *ONE_ROW_TILES, *TWO_PROCESSORS], DEADLOCK),
    ("UNFLUSHED_TILES", [], DEADLOCK),
    ("EARLY_CLOSE", [], RETURNS),
    ("COUNTER_KEPT", [], not_zero("pending")),
    ("SHORT_QUEUE", [*TWO_PROCESSORS, "IDLE_RANK"], r"assertion violated .*\.queue\[.*\.tail"),
    # Sending.
    ("MISSING_RELEASE", [], ENTRIES),
    ("EARLY_OWN", [], OUTBOX),
    ("SHARED_OUTBOX", ["BLOCKS=2", "PAIRS=1"], OUTBOX),
    ("LAST_PART", ["PARTS=2", *TWO_SENDERS], f"{ENTRIES}|{ROWS}"),
    ("RELAXED_SENT", ["PARTS=2", *TWO_SENDERS], f"{ENTRIES}|{ROWS}"),
    ("SENT_KEPT", ["PARTS=2"], not_zero("out_sent")),
    ("SENDERS_BEHIND", [], DEADLOCK),
    # Returning.
    ("RELAXED_RETURN", [], RETURNS),
    ("RELAXED_COUNTER", ["IDLE_RANK", "COLUMNS1=2", *ONE_ROW_TILES, *TWO_PROCESSORS], RETURNS),
    ("RELAXED_COUNTER", ["REDUCED", "IDLE_RANK", "PIECES=2", *ONE_ROW_TILES, *TWO_PROCESSORS], RETURNS),
    ("EAGER_RETURN", ["IDLE_RANK"], DEADLOCK),
    ("EARLY_REDUCE", ["REDUCED"], r"assertion violated .*(\.executed1|count==)"),
    ("UNSUMMED", ["REDUCED"], RETURNS),
    ("LAST_TICKET", ["REDUCED", "IDLE_RANK", "PIECES=2", *ONE_ROW_TILES, *TWO_PROCESSORS], RETURNS),
    ("DONE_KEPT", ["REDUCED"], not_zero("reduce_done")),
    (
        "WRONG_PARITY",
        ["REDUCED", "IDLE_RANK", *ONE_ROW_TILES, *TWO_PROCESSORS],
        r"assertion violated .*\.executed_reduce",
    ),
    ("DROPPED_PIECE", ["REDUCED", "IDLE_RANK", *ONE_ROW_TILES, *TWO_PROCESSORS], DEADLOCK),
    ("EARLY_COMBINE", [], RETURNS),
    ("FIRST_GROUP", ["COLUMNS1=2", "GROUPS=2", *ONE_ROW_TILES], RETURNS),
    # Puts.
    ("MISSING_RELEASE", PUTS, ENTRIES),
    ("NO_SETTLE", PUTS, ENTRIES),
    ("NO_QUIET", PUTS, r"assertion violated .*\.putting"),
    ("EARLY_READY", PUTS, r"assertion violated .*\.sums\["),
    ("NO_QUIET_RETURN", [*PUTS, "PIECES=2", *TWO_SENDERS], RETURNS),
    ("RETURNS_SENT_KEPT", [*PUTS, *TWO_SENDERS], not_zero("returns_sent")),
]


@pytest.fixture(autouse=True)
def tools():
    missing = [tool for tool in ("spin", "gcc") if shutil.which(tool) is None]
    if missing:
        message = f"{' and '.join(missing)} not installed: {INSTALL}"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)


# With small functions inlined, -Og searches as fast as -O1 and compiles in two thirds of its time. -O2 takes longer to
# compile than it saves.
FAST = ["-Og", "-finline-small-functions"]
# -DNOCOMP: states are stored with their padding, which takes a tenth more memory and a sixth less time. With -DNP, Spin
# does not allow it.
SAFETY = [*FAST, "-DSAFETY", "-DNOCOMP"]
# A seeded bug shows within thousands of steps, so optimised code or a large hash table would cost more than it saves.
SHORT = {"gcc": ["-DSAFETY"], "pan": ["-m100000", "-w18"]}


def search(folder, defines, *, model=MODEL, gcc=SAFETY, pan=("-m2000000", "-w24")):
    """Runs Spin's verifier on the model with these defines. Returns what it printed."""
    spin = ["spin", "-a", *(f"-D{define}" for define in defines), model]
    # A search that outgrows 4 GB stops and says so.
    compile_verifier = ["gcc", "-w", "-DMEMLIM=4096", *gcc, "-o", "pan", "pan.c"]
    for command in (spin, compile_verifier, ["./pan", *pan]):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def assert_exhaustive(output):
    assert re.search(r"errors: 0$", output, re.M), output
    # Spin prints one of these if it did not search everything.
    for truncated in ("Search not completed", "max search depth too small", "out of memory", "MEMLIM"):
        assert truncated not in output, output
    states, seconds = re.search(r"(\d+) states, stored", output), re.search(r"elapsed time (\S+)", output)
    print(f"{int(states[1]):,} states, {seconds[1]} s")


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_protocol_holds(name, tmp_path):
    assert_exhaustive(search(tmp_path, CONFIGURATIONS[name]))


@pytest.mark.parametrize("way", WAYS)
def test_calls_end(way, tmp_path):
    """Agents cannot go on for ever without calls ending."""
    output = search(tmp_path, WAYS[way], gcc=[*FAST, "-DNP"], pan=["-m2000000", "-w24", "-l"])
    assert "non-progress cycles \t+" in output, output
    assert_exhaustive(output)


@pytest.mark.parametrize("way", WAYS)
def test_no_check_is_vacuous(way, tmp_path):
    """Every statement is reached, assertions too. d_step becomes atomic, because Spin does not look into a d_step."""
    output = search(tmp_path, ["d_step=atomic", *WAYS[way]])
    assert_exhaustive(output)
    unreached = re.findall(r"state \d+, (.*)", output)
    # Agents have no end: calls follow each other for ever.
    assert unreached == ['"-end-"'] * 3, output


@pytest.mark.parametrize("bug, defines, reason", BUGS, ids=[" ".join([bug, *defines]) for bug, defines, _ in BUGS])
def test_bug_is_found(bug, defines, reason, tmp_path):
    output = search(tmp_path, [f"BUG_{bug}", *defines], **SHORT)
    assert re.search(r"errors: 1$", output, re.M), output
    assert re.search(reason, output), output


def test_every_bug_is_tried():
    for model, tried in ((MODEL, BUGS), (MACHINES, MACHINE_BUGS)):
        seeded = re.findall(r"\bBUG_(\w+)", model.read_text())
        assert set(seeded) == {bug for bug, _, _ in tried}


MACHINE_CONFIGURATIONS = {
    "direct": ["BATCHES=1"],
    "direct, two batches": ["CALLS=2"],
    "sums": ["SUMS", "BATCHES=1"],
    "sums, two batches": ["SUMS", "CALLS=2"],
}

MACHINE_BUGS = [
    ("SIGNAL_FIRST", [], r"assertion violated \(row\["),
    ("SIGNAL_FIRST", ["SUMS"], r"assertion violated \(row\["),
    ("OLD_BATCH", [], r"assertion violated .*row\["),
    ("RELAY_BEHIND", [], DEADLOCK),
    ("EARLY_SUM", ["SUMS"], r"assertion violated .*sum\["),
]


@pytest.mark.parametrize("name", MACHINE_CONFIGURATIONS)
def test_relays_hold(name, tmp_path):
    """The search also reaches every statement of the model."""
    output = search(tmp_path, ["d_step=atomic", *MACHINE_CONFIGURATIONS[name]], model=MACHINES)
    assert_exhaustive(output)
    assert re.findall(r"state \d+, (.*)", output) == [], output


@pytest.mark.parametrize(
    "bug, defines, reason", MACHINE_BUGS, ids=[" ".join([bug, *defines]) for bug, defines, _ in MACHINE_BUGS]
)
def test_bug_of_relays_is_found(bug, defines, reason, tmp_path):
    output = search(tmp_path, [f"BUG_{bug}", *defines], model=MACHINES, **SHORT)
    assert re.search(r"errors: 1$", output, re.M), output
    assert re.search(reason, output), output
