"""Checks that tests notice when the protocol lacks a release, an acquire or another part of its memory model.

    python tools/mutate.py [--jobs N] [--only NAME ...] [--out FILE.json] [--commit COMMIT]

Each mutant is the protocol without one edge of docs/memory_model.md: a release, an acquire, a fence, or a point where
lanes wait for one another. tests/mutation/calls.cpp is compiled with the mutant and ThreadSanitizer, and is run. The
run of each mutant must fail, and the run of the unchanged sources must pass; otherwise this exits with 1. A mutant
takes about two minutes of a core.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from flashmoe.bench.origin import commit_option, cpu_model, write

ROOT = pathlib.Path(__file__).resolve().parent.parent

PROTOCOL, ACTORS = "include/flashmoe/protocol/", "include/flashmoe/actors/"
TIMEOUT = 300
"""The most seconds that a run may take. A mutant whose run takes longer counts as caught."""


@dataclass(frozen=True)
class Mutant:
    edge: str
    """The row of docs/memory_model.md, and what the mutant lacks of it."""
    file: str
    old: str
    new: str = ""


MUTANTS = [
    Mutant(
        "1 release of a call's announcement to peers",
        PROTOCOL + "announce.h",
        "P::store_release(c.call_signal(q, c.rank), call_word(c), kSystem);",
        "P::store_relaxed(c.call_signal(q, c.rank), call_word(c));",
    ),
    Mutant(
        "1 acquire of a call's announcement",
        PROTOCOL + "arrivals.h",
        "if (fresh) P::acquire(c_.call_signal(c_.rank, p), kSystem);",
    ),
    Mutant(
        "2 release of the own packet",
        PROTOCOL + "packet.h",
        "P::store_release(c.packet_signal(q, c.rank, b), word, kDevice);",
        "P::store_relaxed(c.packet_signal(q, c.rank, b), word);",
    ),
    Mutant(
        "2 meeting of the team before it",
        PROTOCOL + "packet.h",
        "  P::team_sync();\n  if (P::worker() == 0 && P::lane() == 0) signal_packet<P>",
        "  if (P::worker() == 0 && P::lane() == 0) signal_packet<P>",
    ),
    Mutant("2 acquire of the own packet", PROTOCOL + "arrivals.h", "P::acquire(signal, kDevice);"),
    Mutant(
        "2b release of another rank's packet",
        PROTOCOL + "packet.h",
        "P::store_release(c.packet_signal(q, c.rank, b), word, kSystem);",
        "P::store_relaxed(c.packet_signal(q, c.rank, b), word);",
    ),
    Mutant("2b acquire of another rank's packet", PROTOCOL + "arrivals.h", "P::acquire(signal, kSystem);"),
    Mutant("2a acquire of routing and outbox", ACTORS + "sender.h", "  P::acquire(word, kDevice);\n"),
    Mutant(
        "2b chain of a packet's senders",
        ACTORS + "machine_sender.h",
        "P::fetch_add_acq_rel(sent, 1u)",
        "P::fetch_add(sent, 1u)",
    ),
    Mutant(
        "2b meeting of a sender's lanes before its count",
        ACTORS + "sender.h",
        "P::sync();  // all lanes' writes before the count",
    ),
    Mutant(
        "3, 4, 6 release into the ready list",
        PROTOCOL + "ready_list.h",
        "P::store_release(c.list_slot(base + position), ready.pack(), kDevice);",
        "P::store_relaxed(c.list_slot(base + position), ready.pack());",
    ),
    Mutant(
        "3, 4, 6 fence of the OS actor between ready list and queue",
        ACTORS + "scheduler.h",
        "      if (!fenced) {\n        P::release_fence(kDevice);",
        "      if (!fenced) {",
    ),
    Mutant(
        "3, 4, 6 acquire of a task",
        PROTOCOL + "ready_queue.h",
        "word = P::load_acquire(slot, kDevice);",
        "word = P::load_relaxed(slot);",
    ),
    Mutant(
        "3, 4, 6 meeting of the taker's lanes",
        PROTOCOL + "ready_queue.h",
        "P::sync();  // what lane 0 acquired, every lane may read",
    ),
    Mutant(
        "4 meetings of a former's lanes before a tile is announced",
        PROTOCOL + "tile_former.h",
        "    P::sync();  // all lanes have read the state, and written rows and shapes, which announce() will release\n"
        "    if (P::lane() == 0) m_.experts[i] = x;\n    P::sync();\n",
        "    if (P::lane() == 0) m_.experts[i] = x;\n",
    ),
    Mutant(
        "5 chain of a tile's columns",
        ACTORS + "processor.h",
        "P::fetch_add_acq_rel(&c.tile(tile)->done[n], 1u)",
        "P::fetch_add(&c.tile(tile)->done[n], 1u)",
    ),
    Mutant(
        "7, 8 chain of a group's rows",
        PROTOCOL + "pending.h",
        "P::fetch_add_acq_rel(counter, change)",
        "P::fetch_add(counter, change)",
    ),
    Mutant(
        "7 release of rows to be reduced",
        PROTOCOL + "pending.h",
        "P::store_release(c.reduce_signal(p, g), Signal::make(c.epoch, 0), kDevice);",
        "P::store_relaxed(c.reduce_signal(p, g), Signal::make(c.epoch, 0));",
    ),
    Mutant("7 acquire of rows to be reduced", ACTORS + "returner.h", "    P::acquire(signal, kDevice);"),
    Mutant(
        "9 meeting of the reducer's lanes before its count",
        ACTORS + "returner.h",
        "P::sync();  // all lanes' rows before the count",
    ),
    Mutant(
        "9 chain of a group's pieces",
        ACTORS + "returner.h",
        "P::fetch_add_acq_rel(c_.reduce_done(p, g), 1u)",
        "P::fetch_add(c_.reduce_done(p, g), 1u)",
    ),
    Mutant(
        "8, 9 release of a group to the own rank",
        PROTOCOL + "pending.h",
        "P::store_release(c.return_signal(p, c.rank, g), word, kDevice);",
        "P::store_relaxed(c.return_signal(p, c.rank, g), word);",
    ),
    Mutant(
        "8, 9 release of a group to another rank",
        PROTOCOL + "pending.h",
        "P::store_release(c.return_signal(p, c.rank, g), word, kSystem);",
        "P::store_relaxed(c.return_signal(p, c.rank, g), word);",
    ),
    Mutant(
        "8, 9 acquire of a group by who combines",
        ACTORS + "returner.h",
        "P::acquire(c_.return_signal(c_.rank, returner(q), g), kSystem);",
        "{}",
    ),
    Mutant(
        "8, 9 meeting of the combining lanes behind it",
        ACTORS + "processor.h",
        "    FLASHMOE_FN void save(const S& s) {\n"
        "      P::sync();\n      if (P::lane() == 0) state_ = s;\n      P::sync();\n",
        "    FLASHMOE_FN void save(const S& s) {\n      if (P::lane() == 0) state_ = s;\n",
    ),
    Mutant(
        "11 release of a block's capacity",
        PROTOCOL + "packet.h",
        "P::store_release(c.capacity_signal(b), Signal::make(c.epoch, 0), kDevice);",
        "P::store_relaxed(c.capacity_signal(b), Signal::make(c.epoch, 0));",
    ),
    Mutant(
        "11 acquire of a block's capacity",
        PROTOCOL + "packet.h",
        "P::load_acquire(c.capacity_signal(b - 1), kDevice)",
        "P::load_relaxed(c.capacity_signal(b - 1))",
    ),
    Mutant(
        "14 acquire of a call's announcement by who reduces",
        ACTORS + "returner.h",
        "P::load_acquire(c_.call_signal(c_.rank, p), kSystem)",
        "P::load_relaxed(c_.call_signal(c_.rank, p))",
    ),
    Mutant(
        "16 fence between a packet and its signal",
        ACTORS + "put_sender.h",
        "    P::fence();\n    P::put_signal(c_.packet_offsets",
        "    P::put_signal(c_.packet_offsets",
    ),
    Mutant(
        "16 release of sums to the senders",
        PROTOCOL + "pending.h",
        "P::store_release(c.returns_ready(p), word, kDevice);",
        "P::store_relaxed(c.returns_ready(p), word);",
    ),
    Mutant(
        "16 arrival of a sender's returns before it counts them",
        ACTORS + "put_sender.h",
        "      P::quiet();\n      if (P::lane() == 0",
        "      if (P::lane() == 0",
    ),
    Mutant(
        "16 chain of the senders of a return",
        ACTORS + "put_sender.h",
        "P::fetch_add_acq_rel(c_.returns_sent(p), 1u)",
        "P::fetch_add(c_.returns_sent(p), 1u)",
    ),
    Mutant(
        "16 arrival of a sender's puts before it leaves",
        ACTORS + "put_sender.h",
        "    P::quiet();  // also if the call has failed\n",
    ),
    Mutant(
        "20 chain of a batch's senders",
        ACTORS + "machine_sender.h",
        "P::fetch_add_acq_rel(sent, 1u)",
        "P::fetch_add(sent, 1u)",
    ),
    Mutant(
        "20 release of a batch to its relay",
        ACTORS + "machine_sender.h",
        "P::store_release(to_.signal(batch), Signal::make(c_.epoch, 0), kSystem);",
        "P::store_relaxed(to_.signal(batch), Signal::make(c_.epoch, 0));",
    ),
    Mutant(
        "20 acquire of a batch",
        ACTORS + "relay.h",
        "P::load_acquire(signal, kSystem)",
        "P::load_relaxed(signal)",
    ),
    Mutant("20 acquire of a batch by a worker", ACTORS + "relay.h", "    P::acquire(signal, kSystem);"),
    Mutant(
        "21 meeting of a relay's lanes before a packet's signal",
        ACTORS + "relay.h",
        "P::sync();  // all lanes' writes before the signal",
    ),
    Mutant(
        "21 release of a packet that is passed on",
        ACTORS + "relay.h",
        "P::store_release(c.packet_signal(q, p, b), Signal::make(c.epoch, entries), kSystem)",
        "P::store_relaxed(c.packet_signal(q, p, b), Signal::make(c.epoch, entries))",
    ),
    Mutant(
        "22 release of sums to a relay",
        PROTOCOL + "pending.h",
        "P::store_release(to.sum_signal(m.place[c.rank], g), Signal::make(c.epoch, 0), kSystem);",
        "P::store_relaxed(to.sum_signal(m.place[c.rank], g), Signal::make(c.epoch, 0));",
    ),
    Mutant(
        "22 acquire of a machine's sums",
        ACTORS + "returner.h",
        "P::acquire(from.sum_signal(i, g), kSystem);",
        "{}",
    ),
    Mutant(
        "Joined rows: chain of a token's two",
        ACTORS + "joiner.h",
        "P::post_add(words + token[i], part)",
        "P::fetch_add(words + token[i], part)",
    ),
]


def compile_and_run(mutant: Mutant | None, folder: pathlib.Path) -> dict:
    for name in ("include", "csrc", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.safetensors", "__pycache__"))
    if mutant:
        path = folder / mutant.file
        text = path.read_text()
        if text.count(mutant.old) != 1:
            return {"outcome": f"stale: its text stands {text.count(mutant.old)} times in {mutant.file}"}
        path.write_text(text.replace(mutant.old, mutant.new))
    compiler = os.environ.get("CXX", "g++")
    flags = ["-std=c++20", "-O1", "-g1", "-fsanitize=thread", "-I", folder / "include", "-I", folder / "csrc"]
    hosts = [folder / "csrc/host" / name for name in ("bell.cpp", "machines.cpp", "mapping.cpp", "placement.cpp")]
    built = subprocess.run(
        [compiler, *flags, folder / "tests/mutation/calls.cpp", *hosts, "-o", folder / "calls", "-pthread"],
        capture_output=True,
        text=True,
    )
    if built.returncode != 0:
        return {"outcome": "does not compile", "output": built.stderr[-2000:]}
    begun = time.monotonic()
    try:
        ran = subprocess.run(
            ["setarch", "-R", folder / "calls"],
            env={**os.environ, "TSAN_OPTIONS": "halt_on_error=1:report_signal_unsafe=0"},
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )
        output, code = ran.stderr + ran.stdout, ran.returncode
    except subprocess.TimeoutExpired:
        output, code = "did not end", 1
    outcome = "passed" if code == 0 else "caught by ThreadSanitizer" if "ThreadSanitizer" in output else "caught"
    return {"outcome": outcome, "seconds": round(time.monotonic() - begun, 1), "output": output[:1500]}


def judge(mutant: Mutant | None) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        found = compile_and_run(mutant, pathlib.Path(folder))
    name = mutant.edge if mutant else "the sources as they are"
    good = found["outcome"].startswith("caught") if mutant else found["outcome"] == "passed"
    print(f"{'ok ' if good else 'BAD'} {found.get('seconds', 0):6.1f} s  {name}: {found['outcome']}", flush=True)
    if good:
        found.pop("output", None)
    return {"edge": name, "good": good, **found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--only", nargs="*", help="edges that begin with one of these")
    parser.add_argument("--out", type=pathlib.Path)
    commit_option(parser)
    given = parser.parse_args()
    chosen = [m for m in MUTANTS if not given.only or m.edge.startswith(tuple(given.only))]
    with ThreadPoolExecutor(given.jobs) as pool:
        results = list(pool.map(judge, [None, *chosen]))
    bad = [each["edge"] for each in results if not each["good"]]
    print(f"{len(results) - 1} mutants, {len(bad)} of {len(results)} not as they should be")
    if given.out:
        write(given.out, {"device": f"{cpu_model()} x0", "commit": given.commit, "mutants": results})
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
