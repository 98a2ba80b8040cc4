"""How a process ends, or is forked, while a thread of it is in a call."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from processes import LIMITS, Processes, processes

__all__ = ["processes"]  # a fixture

_CALLER = """
import functools, itertools, os, signal, sys, threading, time
import numpy as np, flashmoe
numbers = lambda *shape: np.random.default_rng(1).standard_normal(shape, np.float32)
@functools.cache
def arguments(intermediate):
    weights = {"gate_up_proj": numbers(2, 2 * intermediate, 256), "down_proj": numbers(2, 256, intermediate)}
    return {"x": numbers(16, 256), "router": numbers(2, 256), "top_k": 1, **weights}
limits = {"max_tokens": 16, "processors": 1, "dtype": "float32"}
limits |= {"hidden": 256, "intermediate": 256, "experts": 2, "top_k": 1}
context = flashmoe.Context(**limits)
over = False
def call(sizes):
    for intermediate in sizes:
        if not over:
            flashmoe.moe(context, **arguments(intermediate))
sizes = itertools.cycle([64]) if sys.argv[1] == "one" else range(1, 256)
thread = threading.Thread(target=call, args=(sizes,), daemon=True)
thread.start()
"""

_ENDS = """
time.sleep(float(sys.argv[2]))
"""

_FORKS = """
time.sleep(0.3)
for turn in range(8):
    time.sleep(0.01)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        over = True
        try:
            flashmoe.moe(context, **arguments(64))
        except flashmoe.FlashMoEError as error:
            print(error, flush=True)
        with flashmoe.Context(**limits) as own:
            flashmoe.moe(own, **arguments(64))
        sys.exit(7)  # with all that Python does at the end
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
over = True
thread.join()
flashmoe.moe(context, **arguments(64))
"""


def run(code: str, *args: object) -> str:
    """What a process prints that runs `code`. The process must end with status 0 and print no error."""
    command = [sys.executable, "-c", code, *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize("seconds", [0.05, 0.1, 0.2])
def test_a_process_ends_while_a_daemon_thread_calls(seconds: float):
    run(_CALLER + _ENDS, "one", seconds)


_ENDS_WHILE_JOINING = """
import os, sys, threading, time
import flashmoe
name, path, limits = sys.argv[1], sys.argv[2], eval(sys.argv[3])
joined = {"name": name, "rank": 0, "ranks": 2, "timeout": 60.0}
threading.Thread(target=lambda: flashmoe.Context(**joined, **limits), daemon=True).start()
while not os.path.exists(path):
    time.sleep(0.001)
"""


def test_a_process_ends_while_a_daemon_thread_joins(processes: Processes):
    """The process leaves no name in shared memory."""
    run(_ENDS_WHILE_JOINING, processes.name, processes.path(0), LIMITS)
    assert not Path(processes.path(0)).exists()


def test_a_process_is_forked_while_another_thread_calls():
    """The child may not use the parent's context, and an error says so; it may use a context that it makes itself.
    (Each call of the parent's thread has a new size, for which the engine probes the BLAS under a lock. So some forks
    come while the lock is held.)"""
    told = run(_CALLER + _FORKS, "many").splitlines()
    assert told[1::2] == ["7"] * 8
    for line in told[0::2]:
        assert line.startswith("context: expected to be used in process "), line
