"""`flashmoe.nn.MoE` and ``torch.compile`` on a GPU: bit for bit what `flashmoe.moe` gives."""

from __future__ import annotations

from dataclasses import replace

import flashmoe
import numpy as np
import pytest
import torch
from flashmoe.checkpoint import shipped_layer
from flashmoe.nn import MoE
from layers import ARITHMETIC, Problem, call, check, compiled, context_of, module_of, random_problem

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

SIZES = {"hidden": 256, "intermediate": 192, "experts": 16, "top_k": 4}
BACKENDS = ("aot_eager", "inductor")


@pytest.mark.parametrize("backend", [None, *BACKENDS], ids=lambda backend: backend or "eager")
@pytest.mark.parametrize("arithmetic", ARITHMETIC)
def test_module(arithmetic, backend):
    """Tokens may have any shape. The test keeps every result, because a new one in freed memory could find an equal old
    result there, even if nothing was written."""
    options = {**ARITHMETIC[arithmetic], "activation": "gelu", "renormalize": False}
    problem = random_problem(71, 120, biases=True, **options, **SIZES)
    x = problem.x.view(4, 30, SIZES["hidden"])
    results = []
    with context_of(problem) as context, torch.no_grad():
        module = module_of(context, problem)
        run = module if backend is None else compiled(module, backend)
        for tokens in (x, x[:2], x.transpose(0, 1), x[:1, :5], x):
            rows = replace(problem, x=tokens.reshape(-1, SIZES["hidden"]).contiguous())
            expected, report = call(context, rows)
            check(rows, expected, report)
            results += [expected, run(tokens)]
            assert results[-1].is_contiguous()
            assert torch.equal(results[-1], expected.view(tokens.shape))
            assert np.array_equal(context.last_call.topk_ids, report.topk_ids)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("ids", [None, "int64"], ids=["router", "given"])
def test_compiled_function(ids, backend):
    problem = random_problem(72, 100, ids=ids, **SIZES)
    arguments = problem.arguments()
    x = arguments.pop("x")
    with context_of(problem) as context, torch.no_grad():
        y, report = call(context, problem)
        check(problem, y, report)
        assert torch.equal(compiled(lambda x: flashmoe.moe(context, 2 * x, **arguments), backend)(x / 2), y)


def on_gpu(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.float32)).to("cuda", getattr(torch, array.dtype.name))


def test_module_of_a_checkpoints_layer():
    layer, states = shipped_layer()
    problem = Problem(
        x=on_gpu(states[:100]),
        gate_up_proj=on_gpu(layer.gate_up_proj),
        down_proj=on_gpu(layer.down_proj),
        top_k=layer.top_k,
        router=on_gpu(layer.router),
        options={name: value for name, value in layer.rule().items() if name != "top_k"},
    )
    with context_of(problem) as context, torch.no_grad():
        module = MoE.from_layer(context, layer)
        assert {each.device for each in module.parameters()} == {torch.device("cuda", context.device)}
        y, report = call(context, problem)
        check(problem, y, report)
        assert torch.equal(module(problem.x), y)
