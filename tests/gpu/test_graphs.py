"""Calls in CUDA graphs, in several streams, and beside kernels that hold the multiprocessors."""

from __future__ import annotations

import time
from dataclasses import replace

import flashmoe
import pytest
import torch
from layers import call, capture, check, context_of, random_problem

pytestmark = pytest.mark.gpu

USUAL = {"hidden": 512, "intermediate": 256, "experts": 32, "top_k": 4}


def finish(context: flashmoe.Context, seconds: float = 60.0) -> None:
    """Waits for the device, for at most `seconds`."""
    end = torch.cuda.Event()
    end.record()
    deadline = time.monotonic() + seconds
    while not end.query():
        assert time.monotonic() < deadline, "the kernel does not end"
        time.sleep(0.001)
    context.synchronize()


@pytest.mark.parametrize("ids", [None, "int64"], ids=["router", "given"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_replays_see_changed_inputs(dtype, ids):
    problem = random_problem(31, 200, dtype=dtype, ids=ids, biases=True, **USUAL)
    with context_of(problem) as context:
        graph, y = capture(context, problem)
        for turn in range(1, 1001):
            if turn in (1, 2, 500, 1000):
                other = random_problem(31 + turn, 200, dtype=dtype, ids=ids, biases=True, skew=3.0, **USUAL)
                for name in ("x", "topk_ids", "topk_weights", "down_proj", "gate_up_bias"):
                    if getattr(problem, name) is not None:
                        getattr(problem, name).copy_(getattr(other, name))
                y.fill_(float("nan"))
            graph.replay()
            if turn not in (1, 2, 500, 1000):
                continue
            finish(context)
            replayed = y.clone()
            eager, report = call(context, problem)
            check(problem, eager, report)
            assert torch.equal(replayed, eager), f"replay {turn}"


def test_two_graphs_of_one_context_in_turn():
    problems = [random_problem(41 + turn, 30 + 400 * turn, **USUAL) for turn in range(2)]
    with context_of(problems[1]) as context:
        graphs = [capture(context, problem) for problem in problems]
        expected = [call(context, problem)[0] for problem in problems]
        for turn in range(100):
            graph, y = graphs[turn % 2]
            y.fill_(float("nan"))
            graph.replay()
            assert torch.equal(y, expected[turn % 2])
        finish(context)


def test_several_layers_in_one_graph():
    """Each layer has the result of the layer before as its tokens."""
    layers = [random_problem(51 + turn, 100, **USUAL) for turn in range(3)]
    x = layers[0].x

    def model(context: flashmoe.Context) -> torch.Tensor:
        y = x
        for layer in layers:
            y = flashmoe.moe(context, **replace(layer, x=y).arguments())
        return y

    with context_of(layers[0]) as context:
        model(context)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = model(context)
        for turn in range(20):
            x.copy_(torch.randn_like(x))
            graph.replay()
            replayed = y.clone()
            assert torch.equal(replayed, model(context)), f"replay {turn + 1}"
        finish(context)


def test_what_a_capture_cannot_do_is_refused():
    problem = random_problem(61, 20, **USUAL)
    with context_of(problem) as context:
        call(context, problem)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = flashmoe.moe(context, **problem.arguments())
            with pytest.raises(flashmoe.FlashMoEError, match="capture"):
                context.synchronize()
        graph.replay()
        finish(context)
        assert torch.equal(y, call(context, problem)[0])


def test_second_and_thousandth_call():
    problem = random_problem(62, 77, **USUAL)
    with context_of(problem) as context:
        first, report = call(context, problem)
        check(problem, first, report)
        for turn in range(2, 1001):
            y = flashmoe.moe(context, **problem.arguments())
            if turn in (2, 1000):
                check(problem, y, context.last_call)
                assert torch.equal(y, first)


# ---- Not alone on the device --------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [3, 900])
@pytest.mark.parametrize("processors", [None, 66, 40], ids=["all blocks", "half", "a third"])
def test_two_contexts_in_two_streams(processors, tokens):
    problems = [random_problem(71 + turn, tokens, skew=3.0, **USUAL) for turn in range(2)]
    contexts = [context_of(problem, processors=processors) for problem in problems]
    expected = [call(context, problem)[0] for context, problem in zip(contexts, problems, strict=True)]
    streams = [torch.cuda.Stream() for _ in problems]
    outputs: list[list[torch.Tensor]] = [[], []]
    torch.cuda.synchronize()
    for _ in range(50):
        for turn, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                outputs[turn].append(flashmoe.moe(contexts[turn], **problems[turn].arguments()))
    for stream in streams:
        torch.cuda.current_stream().wait_stream(stream)
    for turn, context in enumerate(contexts):
        finish(context)
        assert all(torch.equal(y, expected[turn]) for y in outputs[turn])
        context.close()


def hold(blocker: str, streams: list[torch.cuda.Stream]) -> list[torch.Tensor]:
    """Starts kernels that hold multiprocessors for about 50 ms. Returns the tensors that must outlive the kernels."""
    kept = []
    for stream in streams if blocker == "many sleeping blocks" else streams[:1]:
        with torch.cuda.stream(stream):
            if blocker == "matrix products":  # hold nearly all shared memory of every multiprocessor
                a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
                product = torch.empty_like(a)
                for _ in range(30):
                    torch.mm(a, a, out=product)
                kept += [a, product]
            else:
                torch.cuda._sleep(100_000_000)
    return kept


@pytest.mark.parametrize("tokens", [3, 600])
@pytest.mark.parametrize("blocker", ["one sleeping block", "many sleeping blocks", "matrix products"])
def test_blockers_do_not_dead_lock_it(blocker, tokens):
    """Blockers run before, between and after calls. The kernel's thread blocks wait for one another, so all must be
    resident at once."""
    problem = random_problem(81, tokens, **USUAL)
    mine, *others = [torch.cuda.Stream() for _ in range(30)]  # PyTorch's pool has 32 streams
    with context_of(problem) as context:
        expected, _ = call(context, problem)
        outputs, kept = [], []
        for _ in range(5):
            kept += hold(blocker, others)
            with torch.cuda.stream(mine):
                outputs += [flashmoe.moe(context, **problem.arguments()) for _ in range(4)]
        torch.cuda.current_stream().wait_stream(mine)
        finish(context)
        assert all(torch.equal(y, expected) for y in outputs)
        torch.cuda.synchronize()


@pytest.mark.parametrize("tokens", [3, 300])
def test_calls_from_a_stream_that_waits_for_another(tokens):
    """Kernels of another stream write x. Only an event makes the call wait for them."""
    problem = random_problem(91, tokens, **USUAL)
    values = problem.x.clone()
    stream = torch.cuda.Stream()
    with context_of(problem) as context:
        expected, _ = call(context, problem)
        problem.x.zero_()
        torch.cuda._sleep(50_000_000)
        problem.x.copy_(values)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            y = flashmoe.moe(context, **problem.arguments())
        torch.cuda.current_stream().wait_stream(stream)
        finish(context)
        assert torch.equal(y, expected)
