"""If a call breaks the context of a rank alone, the next call of the same shape gets a new context."""

from __future__ import annotations

import contextlib
import os
import signal
import threading

import flashmoe
import pytest
from test_faults import run_python

torch = pytest.importorskip("torch")
from flashmoe.contexts.growing import GrowingContext, Shape, growing_context  # noqa: E402
from flashmoe.pytorch import operator  # noqa: E402
from flashmoe.spec import Options  # noqa: E402
from flashmoe.spec.tensors import Tensors  # noqa: E402

T, H, I, E, K = 20, 256, 128, 4, 2
LONG = 100_000
"""Tokens of a call that takes several times 50 ms. Every 50 ms the engine looks whether it is interrupted."""


@pytest.fixture
def context() -> GrowingContext:
    return growing_context(Shape(None, "float32", H, I, E, K))


def layer(trains: bool = False, tokens: int = T) -> Tensors:
    torch.manual_seed(0)
    tensors = torch.randn(tokens, H), torch.randn(E, 2 * I, H), torch.randn(E, H, I)
    routing = torch.arange(tokens * K).reshape(tokens, K) % E, torch.rand(tokens, K)
    x, up, down = (each.requires_grad_(trains) for each in tensors)
    return Tensors(x, up, down, topk_ids=routing[0], topk_weights=routing[1])


def call(context: GrowingContext, tensors: Tensors) -> torch.Tensor:
    return operator.call(context.number, tensors, Options())


class Interrupted(Exception):
    pass


def fail(context: GrowingContext) -> flashmoe.Context:
    """Breaks the context by a call during which a signal handler raises. Returns the broken context."""
    within = [False]

    def interrupt(*_: object) -> None:
        if within[0]:
            raise Interrupted

    tensors, before = layer(tokens=LONG), signal.signal(signal.SIGUSR1, interrupt)
    try:
        for _ in range(20):  # the signal may come before the call waits, or after it
            of_call = context.with_room_for(LONG)
            timer = threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGUSR1))
            timer.start()
            with contextlib.suppress(Interrupted):
                within[0] = True
                call(context, tensors)
            within[0] = False
            timer.join()
            with contextlib.suppress(flashmoe.GroupError):
                flashmoe.moe(of_call, **{name: each for name, each in layer()._asdict().items() if each is not None})
                continue
            return of_call
    finally:
        signal.signal(signal.SIGUSR1, before)
    raise AssertionError("no call was interrupted")


def test_the_next_call_has_another_context(context):
    right = call(context, layer())
    for _ in range(2):
        failed = fail(context)
        assert torch.equal(call(context, layer()), right)
        assert context.with_room_for(T) is not failed
    kept = context.with_room_for(T)
    assert torch.equal(call(context, layer()), right) and context.with_room_for(T) is kept


def test_gradients_of_a_call_before_the_failure(context):
    """What a call has kept belongs to that call, so its backward pass can run in the new context."""
    gradients = []
    for fails in (False, True):
        tensors = layer(trains=True)
        y = call(context, tensors)
        if fails:
            fail(context)
        y.sum().backward()
        gradients.append([each.grad for each in tensors[:3]])
    assert all(torch.equal(*each) for each in zip(*gradients, strict=True))


def test_training_goes_on(context):
    right = call(context, layer(trains=True))
    fail(context)
    assert torch.equal(call(context, layer(trains=True)), right)


def test_a_timeout_is_told(context):
    """PeerTimeout is raised, and the call is not made again: perhaps no caller has heard of this timeout before."""
    asked = []

    def late(ctx: flashmoe.Context) -> None:
        asked.append(ctx)
        raise flashmoe.PeerTimeout("late")

    with pytest.raises(flashmoe.PeerTimeout, match="late"):
        context.use(T, late)
    assert len(asked) == 1


_INTERRUPTED = """
import os, signal, threading, time
import torch
from flashmoe.pytorch import operator
from flashmoe.spec.tensors import Tensors
from flashmoe.spec import Options
from flashmoe.contexts.growing import Shape, growing_context

signal.signal(signal.SIGINT, signal.default_int_handler)
context = growing_context(Shape(None, "float32", 512, 1024, 8, 8))
torch.manual_seed(0)
shapes = {"gate_up_proj": (8, 2048, 512), "down_proj": (8, 512, 1024), "router": (8, 512)}
weights = {name: torch.randn(shape) for name, shape in shapes.items()}
short, long = torch.randn(4, 512), torch.randn(2048, 512)

def call(x):
    return operator.call(context.number, Tensors(x=x, **weights), Options(top_k=8))

call(long)
right = call(short)
start = time.monotonic()
call(long)
seconds = time.monotonic() - start
behind = []

def wait_behind():
    time.sleep(0.2 * seconds)
    try:
        behind.append(torch.equal(call(short), right))
    except Exception as error:
        behind.append(str(error))

thread = threading.Thread(target=wait_behind)
thread.start()
threading.Timer(0.4 * seconds, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    call(long)
    print("not interrupted")
except KeyboardInterrupt:
    print("interrupted")
thread.join()
print("behind", behind)
print("next", torch.equal(call(short), right))
"""


def test_an_interrupt_within_a_call():
    """It ends only the call that it interrupts: not another thread's call that waits for it, and not the next call."""
    interrupted, behind, following = run_python(_INTERRUPTED).splitlines()
    assert (interrupted, behind, following) == ("interrupted", "behind [True]", "next True")
