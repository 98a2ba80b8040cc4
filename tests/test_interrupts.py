"""Signals that come at any moment: what a context holds is freed, and a call that waits is interrupted."""

import pytest
from test_faults import run_python

_MADE_UNDER_FIRE = """
import gc, os, random, signal, sys, time
import flashmoe
from flashmoe.contexts.context import contexts

def interrupt(*_):
    raise KeyboardInterrupt

signal.signal(signal.SIGALRM, interrupt)
sys.unraisablehook = lambda _: None  # an interrupt within a finalizer goes no further

def made_and_closed():
    flashmoe.Context(max_tokens=8, hidden=16, intermediate=12, experts=6, top_k=2, processors=3).close()

def held():
    gc.collect()
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), len(list(contexts.values()))

made_and_closed()
start = time.perf_counter()
for _ in range(20):
    made_and_closed()
each = (time.perf_counter() - start) / 20
before, interrupted = held(), 0
end = time.perf_counter() + 8
random.seed(1)
for _ in range(2000):
    try:
        signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, 1.2 * each))
        made_and_closed()
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        interrupted += 1
    if time.perf_counter() > end:
        break
print(interrupted, before == held(), before, held())
"""


def test_an_interrupt_while_a_context_is_made_leaves_nothing():
    """An interrupt while a context is made or closed leaves as many threads, files and contexts as before."""
    interrupted, same, *counts = run_python(_MADE_UNDER_FIRE).split(maxsplit=2)
    if int(interrupted) < 20:
        pytest.skip(f"{interrupted} interrupts in 8 s are too few to tell")
    assert same == "True", f"threads, files and contexts: {counts[0]} after {interrupted} interrupts"


_LONG = """
import os, signal, sys, threading, time
import numpy as np, flashmoe
sizes = {"hidden": 512, "intermediate": 1024, "experts": 8, "top_k": 8}
context = flashmoe.Context(max_tokens=4096, processors=1, dtype="float32", **sizes)
numbers = lambda *shape: np.random.default_rng(1).standard_normal(shape, np.float32)
arguments = {"router": numbers(8, 512), "top_k": 8}
arguments |= {"gate_up_proj": numbers(8, 2048, 512), "down_proj": numbers(8, 512, 1024)}
short, long = numbers(4, 512), numbers(4096, 512)  # more than a second
wanted = flashmoe.moe(context, long, **arguments)
seconds = context.last_call.wall_ns * 1e-9

def after(share, number=signal.SIGALRM):
    threading.Timer(share * seconds, os.kill, (os.getpid(), number)).start()
"""

_WITHIN = (
    _LONG
    + """
def handler(*_):
    try:
        flashmoe.moe(context, short, **arguments)
    except flashmoe.FlashMoEError as error:
        print(error)

signal.signal(signal.SIGALRM, handler)
after(0.3)
print("same bits", (flashmoe.moe(context, long, **arguments) == wanted).all())
print("good", flashmoe.moe(context, short, **arguments).shape)
"""
)


def test_a_handler_that_calls_within_a_call_is_refused():
    """The handler would wait for the call that it interrupts, and that call for the handler."""
    refused, same, good = run_python(_WITHIN).splitlines()
    assert refused.startswith("context: expected one call of a thread at a time, got a second within the first")
    assert (same, good) == ("same bits True", "good (4, 512)")


_BEHIND = (
    _LONG
    + """
def call():
    results.append(flashmoe.moe(context, long, **arguments))

results = []
signal.signal(signal.SIGINT, signal.default_int_handler)
thread = threading.Thread(target=call)
thread.start()
time.sleep(0.1 * seconds)
after(0.2, signal.SIGINT)
try:
    flashmoe.moe(context, short, **arguments)
except KeyboardInterrupt:
    print("heard while it lasted", not results)
thread.join()
print("same bits", (results[0] == wanted).all())
print("good", flashmoe.moe(context, short, **arguments).shape)
"""
)


def test_an_interrupt_is_heard_behind_the_call_of_another_thread():
    """The interrupt ends the call that waits, and leaves the other thread's call, for which it waits, alone."""
    heard, same, good = run_python(_BEHIND).splitlines()
    assert (heard, same, good) == ("heard while it lasted True", "same bits True", "good (4, 512)")
