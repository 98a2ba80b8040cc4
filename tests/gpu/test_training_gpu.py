"""Gradients on a GPU, of a rank alone: they differ from the float64 reference by no more than derived bounds.

FLASHMOE_EXAMPLES sets the number of random layers. With the FLASHMOE_SEED of another run, a run repeats its layers.
Memory that a call gets from PyTorch is filled with NaN first, so that a value which nobody writes is noticed.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import Any

import flashmoe
import flashmoe.nn
import numpy as np
import pytest
import torch
from flashmoe.jit import TRAINED, TRANSPOSED
from flashmoe.spec import ACTIVATIONS, GATED
from hypothesis import given
from hypothesis import strategies as st
from layer_options import CLAMPED
from layers import PATIENCE, at_random, module_of, random_problem
from layers import context_of as context_of_gpu
from leaves import OTHER_KERNELS, gradients_of, leaves_of, operations_of_backward
from problems import Problem, quantised
from quantised_on_gpu import on_gpu
from training import as_array, as_tensor, check, trainable

pytestmark = pytest.mark.gpu

EXAMPLES = int(os.environ.get("FLASHMOE_EXAMPLES", "30"))
USUAL = {"hidden": 256, "intermediate": 192, "experts": 16, "top_k": 4, "dtype": "bfloat16", "scale": 1.0}
GIVEN = {"fused": False}
BIASES = {"biases": (True,) * 3}
GPT_OSS = CLAMPED | {"interleaved": True, "transposed": True} | BIASES
ON_INPUT = {"weights_on_input": True}
LLAMA4 = ON_INPUT | {"transposed": True, "score": "sigmoid", "renormalize": False, "top_k": 1, "shared": 1}
GATED_SHARED = {"shared": 2, "shared_gate": True}
DEEPSEEK = {"score": "sigmoid", "choice_bias": True, "groups": 4, "top_groups": 2, "routed_scale": 2.5}


def context_of(problem: Problem, **more: Any) -> flashmoe.Context:
    return flashmoe.Context(engine="cuda", **problem.limits() | {"timeout": PATIENCE, "return_mode": "direct"} | more)


def run_and_check(seed: int, tokens: int, **sizes: Any) -> None:
    problem, grads = trainable(seed, [tokens], **USUAL | sizes)
    with context_of(problem) as context:
        check(problem, grads, [gradients_of(context, problem, grads[0])], engine="cuda")


LAYERS: dict[str, dict[str, Any]] = {
    "given": GIVEN,
    "given, biases": GIVEN | BIASES,
    "router": {},
    "router, biases": BIASES,
    "not normalised": {"renormalize": False},
    "sigmoid, not normalised": {"score": "sigmoid", "renormalize": False},
    "DeepSeek-V3": DEEPSEEK,
    "relu": GIVEN | {"activation": "relu"},
    "relu2": GIVEN | {"activation": "relu2"},
    "gelu": BIASES | {"activation": "gelu"},
    "silu": GIVEN | {"activation": "silu"},
    "geglu": {"activation": "geglu"},
    "gelu_tanh": GIVEN | {"activation": "gelu_tanh"},
    "geglu_tanh": BIASES | {"activation": "geglu_tanh"},
    "clamped": CLAMPED | BIASES,
    "interleaved": {"interleaved": True},
    "transposed": GIVEN | {"transposed": True},
    "transposed, no gate": GIVEN | {"transposed": True, "activation": "relu"},
    "gpt-oss": GPT_OSS,
    "a capacity": {"capacity_factor": 0.5, "skew": 3.0},
    "a capacity, given": GIVEN | {"capacity_factor": 0.5, "skew": 3.0},
    "weights on the input": GIVEN | ON_INPUT,
    "weights on the input, biases": GIVEN | BIASES | ON_INPUT,
    "weights on the input, gpt-oss's shape": GIVEN | GPT_OSS | ON_INPUT,
    "weights on the input, no gate": BIASES | ON_INPUT | {"activation": "gelu"},
    "Llama 4": LLAMA4,
    "a shared expert": {"shared": 1},
    "a shared expert, given": GIVEN | {"shared": 1},
    "a shared expert of three slices, no gate": {"shared": 3, "activation": "relu"},
    "a gated shared expert": GATED_SHARED,
    "a gated shared expert, given": GIVEN | GATED_SHARED,
    "a gated shared expert, interleaved": GATED_SHARED | {"interleaved": True},
    "a gated shared expert, transposed": GATED_SHARED | {"transposed": True},
    "a gated shared expert, clamped": CLAMPED | GATED_SHARED | {"interleaved": True, "transposed": True},
    "a gated shared expert, a capacity": GATED_SHARED | {"capacity_factor": 0.5, "skew": 3.0},
    "DeepSeek-V3 with its shared expert": DEEPSEEK | {"shared": 1},
}
EDGES: dict[str, tuple[int, dict[str, Any]]] = {
    "no tokens": (0, {}),
    "one token": (1, {}),
    "nine tokens": (9, GIVEN),
    "one expert a token": (301, {"top_k": 1}),
    "two experts a token": (1000, {"top_k": 2, "experts": 4}),
    "every expert for every token": (150, {"top_k": 16}),
    "all tokens to one expert": (700, {"top_k": 1, "skew": 50.0}),
    "experts without tokens": (3, {"experts": 100} | BIASES),
    "the smallest sizes": (70, {"hidden": 8, "intermediate": 8} | BIASES),
    "the smallest H": (70, {"hidden": 8, "intermediate": 1000}),
    "the smallest I": (70, {"hidden": 1000, "intermediate": 8}),
    "sizes just above a tile's": (257, {"hidden": 264, "intermediate": 264}),
    "transposed, sizes just above a tile's": (257, {"hidden": 264, "intermediate": 264, "transposed": True}),
    "several tiles": (1500, {"experts": 4, "top_k": 2, "hidden": 384, "intermediate": 320}),
    "weights on the input, several tiles": (1500, ON_INPUT | BIASES | {"experts": 4, "top_k": 2, "hidden": 384}),
    "weights on the input, experts without tokens": (3, ON_INPUT | BIASES | {"experts": 100}),
    "shared, no tokens": (0, GATED_SHARED),
    "shared, one token": (1, GATED_SHARED),
    "shared, several tiles": (1500, GATED_SHARED | {"experts": 4, "top_k": 2, "hidden": 384, "intermediate": 320}),
    "shared, sizes just above a tile's": (257, {"hidden": 264, "intermediate": 264, "shared": 3, "shared_gate": True}),
    "shared, the smallest I": (600, {"hidden": 1000, "intermediate": 8, "shared": 5, "shared_gate": True}),
    "shared, experts without tokens": (3, {"experts": 100} | GATED_SHARED),
}


TF32, EXACT = {"dtype": "float32"}, {"dtype": "float32", "exact": True}
OF_FLOAT32 = pytest.mark.parametrize("arithmetic", [TF32, EXACT], ids=["tf32", "exact"])


def as_it_lies(layers: dict[str, Any]) -> dict[str, Any]:
    """The layers without transposed weights, because there are no gradients of transposed weights in float32."""
    return {name: each for name, each in layers.items() if "transposed" not in str(each)}


LAYERS_OF_FLOAT32 = as_it_lies(LAYERS) | {"Llama 4": LLAMA4 | {"transposed": False}}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_layers(options, dtype):
    run_and_check(3, 333, dtype=dtype, **options)


@OF_FLOAT32
@pytest.mark.parametrize("options", LAYERS_OF_FLOAT32.values(), ids=LAYERS_OF_FLOAT32)
def test_layers_of_float32(options, arithmetic):
    run_and_check(3, 333, **options | arithmetic)


@pytest.mark.parametrize(("tokens", "options"), EDGES.values(), ids=EDGES)
def test_edges(tokens, options):
    run_and_check(4, tokens, **options)


@OF_FLOAT32
@pytest.mark.parametrize(("tokens", "options"), as_it_lies(EDGES).values(), ids=as_it_lies(EDGES))
def test_edges_of_float32(tokens, options, arithmetic):
    run_and_check(4, tokens, **options | arithmetic)


@st.composite
def routers(draw: st.DrawFn, experts: int, top_k: int) -> dict[str, Any]:
    """The options of a router."""
    options: dict[str, Any] = {
        "score": draw(st.sampled_from(["softmax", "sigmoid"])),
        "renormalize": draw(st.booleans()),
        "routed_scale": draw(st.sampled_from([1.0, 2.5])),
        "choice_bias": draw(st.booleans()),
    }
    if experts % 4 == 0 and top_k <= experts // 2 and draw(st.booleans()):
        options |= {"groups": 4, "top_groups": 2}
    return options


@st.composite
def layers(draw: st.DrawFn) -> tuple[int, int, dict[str, Any]]:
    """A seed, T, and the options of `trainable`: any options for which a GPU computes gradients, but some of them only
    with certain types and activations, because each combination has a kernel of its own."""
    dtype, activation = draw(st.sampled_from(TRAINED)), draw(st.sampled_from(ACTIVATIONS))
    compiled = dtype == "bfloat16" or (dtype in TRANSPOSED and activation == "clamped_swiglu")
    transposed = compiled and draw(st.booleans())
    options: dict[str, Any] = {"dtype": dtype, "activation": activation, "transposed": transposed}
    if dtype == "float32":
        options["exact"] = draw(st.booleans())
    if activation == "clamped_swiglu":
        options |= CLAMPED
    if activation in GATED:
        options["interleaved"] = draw(st.booleans())
    experts = draw(st.integers(1, 24))
    sizes = {name: 8 * draw(st.integers(1, 50)) for name in ("hidden", "intermediate")}
    options |= sizes | {"experts": experts, "top_k": draw(st.integers(1, min(experts, 6)))}
    options |= {"fused": draw(st.booleans()), "skew": draw(st.sampled_from([0.0, 3.0, 50.0]))}
    if options["fused"]:
        options |= draw(routers(experts, options["top_k"]))
    options["biases"] = tuple(draw(st.booleans()) for _ in range(3))
    if draw(st.booleans()):
        options["capacity_factor"] = draw(st.sampled_from([0.3, 1.0]))
    plain = dtype == "bfloat16" and activation in OTHER_KERNELS
    options["weights_on_input"] = plain and draw(st.booleans())
    if plain and draw(st.booleans()):
        options |= {"shared": draw(st.integers(1, 3)), "biases": (options["biases"][0], False, False)}
        options["shared_gate"] = draw(st.booleans()) and not options["weights_on_input"]
    return draw(st.integers(0, 2**31 - 1)), draw(st.integers(0, 700)), options


@at_random(EXAMPLES)
@given(layers())
def test_random_layers(layer):
    seed, tokens, options = layer
    run_and_check(seed, tokens, **options)


# Repeated calls have the same bits


@pytest.mark.parametrize("arithmetic", [{}, TF32, EXACT], ids=["bfloat16", "tf32", "exact"])
def test_bits_are_those_of_every_run(arithmetic):
    """Fifty calls with mostly full tiles have the same bits, although a cluster gets other tasks in each call."""
    problem, grads = trainable(6, [1500], **USUAL | BIASES | {"hidden": 512, "experts": 8} | arithmetic)
    with context_of(problem) as context:
        first = gradients_of(context, problem, grads[0])
        for _ in range(49):
            for name, each in gradients_of(context, problem, grads[0]).items():
                assert each.tobytes() == first[name].tobytes(), name


@pytest.mark.parametrize("arithmetic", [{}, TF32, EXACT], ids=["bfloat16", "tf32", "exact"])
@pytest.mark.parametrize("tokens", [300, 1500])
def test_the_forward_pass_has_the_bits_that_it_has_without(tokens, arithmetic):
    problem, grads = trainable(7, [tokens], **USUAL | BIASES | arithmetic)
    with context_of(problem) as context:
        found = gradients_of(context, problem, grads[0])["y"]
        with torch.no_grad():
            y = flashmoe.moe(context, **leaves_of(problem)[0])
        assert as_array(y.cpu()).tobytes() == found.tobytes()


@pytest.mark.parametrize("options", [GIVEN | BIASES | ON_INPUT, GATED_SHARED], ids=["on input", "shared"])
def test_bits_of_other_layers_are_those_of_every_run(options):
    problem, grads = trainable(6, [1500], **USUAL | options | {"hidden": 512, "experts": 8})
    with context_of(problem) as context:
        first = gradients_of(context, problem, grads[0])
        for _ in range(19):
            for name, each in gradients_of(context, problem, grads[0]).items():
                assert each.tobytes() == first[name].tobytes(), name


def test_a_weight_of_zero_on_the_input_has_a_gradient():
    """A choice with weight 0 adds nothing to the gradients of x and gate_up_proj, but to those of weight and biases."""
    problem, grads = trainable(20, [200], **USUAL | GIVEN | BIASES | ON_INPUT)
    problem.topk_weights[0][::3] = 0.0
    with context_of(problem) as context:
        found = gradients_of(context, problem, grads[0])
        check(problem, grads, [found], engine="cuda")
    assert np.abs(found["topk_weights"][::3]).min() > 0.0 and not found["x"][::3].any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_slopes_far_out(activation: str, dtype: str):
    """The slopes at pre-activations of 2**100 and -2**100 are 1 and 0, although their squares exceed float32."""
    sizes = USUAL | GIVEN | {"dtype": dtype, "activation": activation, "top_k": 1, "biases": (False, True, False)}
    problem, grads = trainable(21, [3], **sizes)
    for each in (*problem.x, problem.gate_up_proj, problem.down_proj, problem.gate_up_bias):
        each[:] = 0.0
    problem.x[0][:, 0] = problem.topk_weights[0][:] = grads[0][:] = 1.0
    problem.gate_up_proj[:, :2, 0] = [2.0**100, -(2.0**100)]
    problem.down_proj[:, [0, 1], [0, 1]] = [2.0**-100, 1.0]
    with context_of(problem) as context:
        found = gradients_of(context, problem, grads[0])
    assert found["y"].astype(np.float32)[:, :2].tolist() == [[1.0, 0.0]] * 3
    slopes = found["gate_up_bias"].astype(np.float32).sum(axis=0)
    assert slopes[:2].tolist() == [3.0 * 2.0**-100, 0.0]


# Calls


def test_rows_of_x_may_lie_apart():
    problem, grads = trainable(8, [101], **USUAL | GIVEN)
    with context_of(problem) as context:
        expected = gradients_of(context, problem, grads[0])
        wide = torch.full((101, 512), math.nan, dtype=torch.bfloat16, device="cuda")
        wide[:, 64:320] = as_tensor(problem.x[0]).cuda()
        found = gradients_of(context, problem, grads[0], x=wide[:, 64:320])
    assert all(np.array_equal(found[name], each) for name, each in expected.items())


def test_passes_of_any_number_of_tokens_in_any_order():
    """Each pass has the gradients of the same call made by itself, whatever else the context has done in between."""
    whole, grads = trainable(9, [900], **USUAL | BIASES)
    parts = [slice(0, 900), slice(0, 3), slice(100, 757)]
    problems = [replace(whole, x=[whole.x[0][part]]) for part in parts]
    given = [grads[0][part] for part in parts]
    with context_of(whole) as context:
        expected = [gradients_of(context, *each) for each in zip(problems, given, strict=True)]
        calls = []
        for problem in problems:
            tensors, leaves = leaves_of(problem)
            for each in leaves.values():
                each.requires_grad_()
            calls.append((flashmoe.moe(context, **tensors), leaves))
        for n in (1, 2, 0):
            y, leaves = calls[n]
            found = torch.autograd.grad(y, list(leaves.values()), as_tensor(given[n]).cuda(), retain_graph=True)
            again = torch.autograd.grad(y, list(leaves.values()), as_tensor(given[n]).cuda())
            for name, one, two in zip(leaves, found, again, strict=True):
                assert torch.equal(one, two), name
                assert as_array(one.cpu()).tobytes() == expected[n][name].tobytes(), name


def test_some_gradients_alone():
    problem, grads = trainable(10, [200], **USUAL | BIASES)
    with context_of(problem) as context:
        expected = gradients_of(context, problem, grads[0])
        for names in (["x"], ["down_proj"], ["gate_up_proj", "down_bias"], ["router"]):
            tensors, leaves = leaves_of(problem)
            for name in names:
                leaves[name].requires_grad_()
            y = flashmoe.moe(context, **tensors)
            found = torch.autograd.grad(y, [leaves[name] for name in names], as_tensor(grads[0]).cuda())
            for name, each in zip(names, found, strict=True):
                assert as_array(each.cpu()).tobytes() == expected[name].tobytes(), name


def test_nothing_is_kept_without_gradients():
    problem, _ = trainable(11, [500], **USUAL)
    with context_of(problem) as context:
        tensors, leaves = leaves_of(problem)
        leaves["x"].requires_grad_()
        made = []
        for recorded in (False, True):
            before = torch.cuda.memory_allocated()
            with torch.set_grad_enabled(recorded):
                y = flashmoe.moe(context, **tensors)
            made.append(torch.cuda.memory_allocated() - before - y.numel() * 2)
            del y
    kept = 500 * (4 * (2 * 192 * 2 + 8) + 4 * 16)
    assert made[0] < 4096 and kept <= made[1] < kept + 8192


def test_a_step_in_a_graph():
    """Forward and backward pass are captured together; a replay reads the values that the tensors have then."""
    problem, grads = trainable(12, [300], **USUAL | GIVEN)
    other, more = trainable(13, [300], **USUAL | GIVEN)
    with context_of(problem) as context:
        tensors, leaves = leaves_of(problem)
        dy = as_tensor(grads[0]).cuda()
        for each in leaves.values():
            each.requires_grad_()

        def step() -> tuple[torch.Tensor, ...]:
            return torch.autograd.grad(flashmoe.moe(context, **tensors), list(leaves.values()), dy)

        aside = torch.cuda.Stream()
        with torch.cuda.stream(aside):
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = step()
        with torch.no_grad():
            for name, each in leaves_of(other)[0].items():
                if torch.is_tensor(each):
                    tensors[name].copy_(each)
            dy.copy_(as_tensor(more[0]))
        for each in found:
            each.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        expected = gradients_of(context, other, more[0])
        for name, each in zip(leaves, found, strict=True):
            assert as_array(each.cpu()).tobytes() == expected[name].tobytes(), name


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("fused", [True, False])
def test_a_backward_pass_is_one_operation_of_the_gpu(fused, dtype):
    """The operation is the kernel: PyTorch fills, converts, copies and multiplies nothing, also with a router."""
    problem, grads = trainable(19, [300], **USUAL | {"fused": fused, "dtype": dtype})
    with context_of(problem) as context:
        names = operations_of_backward(context, problem, grads[0])
    assert len(names) == 1 and "flashmoe_moe" in names[0], names


def test_logits_have_gradients():
    """A gradient of `router_logits`, as an auxiliary loss gives it, adds to the router's gradient from y."""
    problem, grads = trainable(14, [90], **USUAL)
    logits_grad = np.random.default_rng(1).standard_normal((90, 16)).astype(np.float32)
    with context_of(problem) as context:
        tensors, leaves = leaves_of(problem)
        for each in leaves.values():
            each.requires_grad_()
        logits = torch.zeros(90, 16, device="cuda")
        y = flashmoe.moe(context, **tensors, router_logits=logits)
        pair = [y, logits], [as_tensor(grads[0]).cuda(), torch.from_numpy(logits_grad).cuda()]
        both = torch.autograd.grad(pair[0], list(leaves.values()), pair[1], retain_graph=True)
        of_y = torch.autograd.grad(y, list(leaves.values()), pair[1][0])
    names = list(leaves)
    found = (both[names.index("router")] - of_y[names.index("router")]).double().cpu().numpy()
    expected = logits_grad.T.astype(np.float64) @ problem.x[0].astype(np.float64)
    assert np.linalg.norm(found - expected) < 0.02 * np.linalg.norm(expected)  # `both` and `of_y` are in bfloat16


def test_a_module():
    """A module's parameters have the gradients of the same tensors in a call of `flashmoe.moe`."""
    problem = random_problem(15, 200, hidden=256, intermediate=192, experts=16, top_k=4)
    dy = torch.randn_like(problem.x)
    with context_of_gpu(problem) as context:
        module = module_of(context, problem)
        module(problem.x).backward(dy)
        arguments = problem.arguments()
        leaves = {name: arguments[name].requires_grad_() for name in ("gate_up_proj", "down_proj", "router")}
        found = torch.autograd.grad(flashmoe.moe(context, **arguments), list(leaves.values()), dy)
        expected = dict(zip(leaves, found, strict=True))
    named = {name.rpartition(".")[2]: each.grad for name, each in module.named_parameters()}
    assert torch.equal(named["gate_up_proj"], expected["gate_up_proj"])
    assert torch.equal(named["down_proj"], expected["down_proj"])
    assert any(
        torch.equal(each, expected["router"]) for each in named.values() if each.shape == expected["router"].shape
    )


@pytest.mark.parametrize(("shared", "dtype"), [(0, "bfloat16"), (2, "bfloat16"), (0, "float32"), (2, "float32")])
@pytest.mark.parametrize("behind", [0, 1])
def test_gradients_are_added_to_buffers(behind, shared, dtype):
    """Two passes add up in float32; half the sum, rounded, is `grad`. A buffer may be unaligned (`behind` = 1)."""
    more = {"shared": shared, "shared_gate": True} if shared else {}
    problem = random_problem(18, 200, hidden=256, intermediate=192, experts=16, top_k=4, dtype=dtype, **more)
    dy = torch.randn_like(problem.x)
    with context_of_gpu(problem) as context:
        module = module_of(context, problem)
        module(problem.x).backward(dy)
        module.main_grad = True
        for each in module.parameters():
            each.main_grad = torch.zeros(behind + each.numel(), device="cuda")[behind:].view(each.shape)
        for _ in range(2):
            module(problem.x).backward(dy)
        context.synchronize()
    for name, each in module.named_parameters():
        assert torch.equal((each.main_grad / 2).to(each.dtype), each.grad), name


def test_what_has_no_gradients_is_named():
    """The backward pass raises an error that names the quantised weights; the forward pass raises none."""
    problem, grads = trainable(16, [40], **USUAL)
    problem = quantised(problem)
    arguments = {name: on_gpu(each) for name, each in problem.arguments(0).items()}
    arguments["x"].requires_grad_()
    with context_of(problem) as context:
        y = flashmoe.moe(context, **arguments)
        with pytest.raises(NotImplementedError, match="no backward pass of quantised weights"):
            y.backward(as_tensor(grads[0]).cuda())
