"""The layer in PyTorch: the operator, the module, and contexts over a process group."""

import contextlib
import copy
import gc
import io
import subprocess
import sys
import warnings
from dataclasses import replace

import flashmoe
import numpy as np
import pytest
import torch
import torch.distributed as dist
from flashmoe.checkpoint import shipped_layer
from flashmoe.nn import MoE
from flashmoe.pytorch import operator
from flashmoe.pytorch.operator import context_id
from gloo import Gloo
from problems import DTYPES, PATIENCE, Outcome, check, random_problem
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile

SIZES = {"hidden": 40, "intermediate": 24, "experts": 8, "top_k": 3}
QWEN3_MOE_BLOCK = {  # Qwen3MoeSparseMoeBlock.state_dict() in Transformers 5
    "gate.weight": ("experts", "hidden"),
    "experts.gate_up_proj": ("experts", "gate_and_up", "hidden"),
    "experts.down_proj": ("experts", "hidden", "intermediate"),
}


def tensor(array):
    """The array as a tensor over the same memory."""
    if array is None or array.dtype.name != "bfloat16":
        return None if array is None else torch.from_numpy(array)
    return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)


def bits(array):
    """A tensor's or an array's values as bytes."""
    if isinstance(array, torch.Tensor):
        array = array.detach().view(torch.uint8).numpy()
    return array.tobytes()


def as_tensors(arguments):
    return {name: tensor(value) if isinstance(value, np.ndarray) else value for name, value in arguments.items()}


def block_arrays(problem):
    """The problem's weights of all experts, as Transformers names them."""
    arrays = problem.router, problem.gate_up_proj, problem.down_proj
    return dict(zip(QWEN3_MOE_BLOCK, arrays, strict=True))


def block_state(problem):
    return {name: tensor(array) for name, array in block_arrays(problem).items()}


@pytest.fixture
def problem():
    return random_problem(1, [17], **SIZES)


@pytest.fixture
def ctx():
    with flashmoe.Context(max_tokens=64, dtype="float32", timeout=PATIENCE, **SIZES) as ctx:
        yield ctx


@pytest.fixture
def layer(ctx, problem):
    layer = MoE(ctx, **SIZES)
    layer.load_state_dict(block_state(problem))
    return layer


@pytest.fixture
def counted(monkeypatch):
    """A list that grows by one with each call of the operator."""
    calls = []

    def counting(call):
        def count(*args, **kwargs):
            calls.append(None)
            return call(*args, **kwargs)

        return count

    for name in ("run", "run_and_keep"):
        monkeypatch.setattr(operator, name, counting(getattr(operator, name)))
    return calls


# The operator

OPERATOR_CALLS = {
    "router": {},
    "router and biases": {"biases": (True, True, True)},
    "given routing": {"fused": False},
    "given routing and biases": {"fused": False, "biases": (False, True, True), "activation": "relu"},
    "bfloat16": {"dtype": "bfloat16"},
    "float16 with a capacity": {"dtype": "float16", "fused": False, "capacity_factor": 1.0},
    "not renormalized": {"renormalize": False, "return_mode": "direct", "placement": [0] * 8},
    "no tokens": {"tokens": [0]},
}


@pytest.mark.parametrize("case", OPERATOR_CALLS)
def test_operator_passes_opcheck(ctx, case):
    problem = random_problem(2, **{"tokens": [17], **SIZES, **OPERATOR_CALLS[case]})
    arguments = as_tensors(problem.arguments(0))
    torch.library.opcheck(torch.ops.flashmoe.moe.default, (context_id(ctx),), arguments)


def test_operator_passes_opcheck_with_gradients(ctx, problem):
    arguments = as_tensors(problem.arguments(0))
    for name in ("x", "gate_up_proj", "down_proj", "router"):
        arguments[name].requires_grad_()
    # test_aot_dispatch_dynamic is left out, because it runs the backward pass, which the operator alone does not have.
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.flashmoe.moe.default, (context_id(ctx),), arguments, test_utils=tests)


@pytest.mark.parametrize("device", ["fake", "meta"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_operator_on_tensors_without_values(ctx, counted, dtype, device):
    problem = random_problem(3, [17], dtype=dtype, **SIZES)
    arguments = as_tensors(problem.arguments(0))
    mode = FakeTensorMode() if device == "fake" else torch.device("meta")
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            arguments[name] = mode.from_tensor(value) if device == "fake" else value.to("meta")
    with mode:
        y = torch.ops.flashmoe.moe(context_id(ctx), **arguments)
    assert (y.shape, y.dtype, y.device) == (arguments["x"].shape, arguments["x"].dtype, arguments["x"].device)
    assert y.is_contiguous()
    assert not counted


@pytest.mark.parametrize("fused", [True, False], ids=["router", "given routing"])
def test_a_tensor_on_meta_beside_others_is_refused(ctx, fused):
    """A tensor on meta has no values to compute with, and memory that nothing has written to must not be returned."""
    arguments = as_tensors(random_problem(3, [17], fused=fused, biases=(fused, True, True), **SIZES).arguments(0))
    for name in [name for name, each in arguments.items() if isinstance(each, torch.Tensor)]:
        with pytest.raises(flashmoe.InvalidArgument, match=f"^{name}: expected a tensor on cpu, got one on meta$"):
            torch.ops.flashmoe.moe(context_id(ctx), **arguments | {name: arguments[name].to("meta")})


@pytest.mark.parametrize("name", ["gate.weight", "experts.down_proj"])
def test_a_module_partly_on_meta_is_refused(ctx, layer, problem, name):
    module, _, parameter = name.rpartition(".")
    owner = layer.get_submodule(module)
    setattr(owner, parameter, torch.nn.Parameter(getattr(owner, parameter).to("meta")))
    argument = "router" if parameter == "weight" else parameter
    with pytest.raises(flashmoe.InvalidArgument, match=f"^{argument}: expected a tensor on cpu, got one on meta$"):
        layer(tensor(problem.x[0]))


def test_a_module_on_meta_has_an_output_on_meta(layer, counted, problem):
    """A module on meta has an output on meta because modules of PyTorch have one too."""
    x = tensor(problem.x[0])
    with pytest.raises(flashmoe.InvalidArgument, match=r"^x: expected a tensor on cpu, got one on meta$"):
        layer(x.to("meta"))
    y = layer.to("meta")(x.to("meta").reshape(1, *x.shape))
    assert (y.device.type, y.shape, y.dtype) == ("meta", (1, *x.shape), x.dtype)
    with pytest.raises(flashmoe.InvalidArgument, match=r"^gate_up_proj: expected a tensor on cpu, got one on meta$"):
        layer(x)
    assert not counted


def test_context_numbers(problem):
    arguments = as_tensors(problem.arguments(0))
    limits = problem.limits()
    first, second = flashmoe.Context(**limits), flashmoe.Context(**limits)
    numbers = [context_id(first), context_id(second)]
    assert numbers == [context_id(first), context_id(second)] and numbers[0] != numbers[1]
    first.close()
    with pytest.raises(flashmoe.FlashMoEError, match="context: expected an open one, got one that is closed"):
        torch.ops.flashmoe.moe(numbers[0], **arguments)
    del first, second
    gc.collect()
    for number in (*numbers, 0, -1):
        with pytest.raises(flashmoe.FlashMoEError, match=f"context: expected .* live Context, got {number}"):
            torch.ops.flashmoe.moe(number, **arguments)
    with pytest.raises(flashmoe.InvalidArgument, match=r"ctx: expected a flashmoe\.Context, got int"):
        context_id(7)


# Tensors


@pytest.mark.parametrize("fused", [True, False], ids=["router", "given routing"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_and_arrays_give_the_same_bits(ctx, dtype, fused):
    problem = random_problem(4, [33], dtype=dtype, fused=fused, biases=(fused, True, True), **SIZES)
    arguments = problem.arguments(0)
    expected = flashmoe.moe(ctx, **arguments)
    y = flashmoe.moe(ctx, **as_tensors(arguments))
    assert isinstance(y, torch.Tensor) and str(y.dtype) == f"torch.{dtype}" and y.is_contiguous()
    assert bits(y) == bits(expected)
    if not fused:
        wide = {**as_tensors(arguments), "topk_ids": tensor(arguments["topk_ids"].astype(np.int64))}
        assert bits(flashmoe.moe(ctx, **wide)) == bits(expected)


@pytest.mark.parametrize("fused", [True, False], ids=["router", "given routing"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_read_only_arrays_are_read_and_not_written(ctx, dtype, fused):
    problem = random_problem(5, [33], dtype=dtype, fused=fused, biases=(fused, True, True), **SIZES)
    arguments = problem.arguments(0)
    expected = flashmoe.moe(ctx, **arguments)
    arrays = [value for value in arguments.values() if isinstance(value, np.ndarray)]
    before = [bits(array) for array in arrays]
    for array in arrays:
        array.flags.writeable = False
    y = flashmoe.moe(ctx, **arguments)
    assert bits(y) == bits(expected)
    assert y.flags.writeable
    assert [bits(array) for array in arrays] == before
    assert not any(array.flags.writeable for array in arrays)


@contextlib.contextmanager
def flushing():
    """Within the `with` block, this thread takes subnormals for zero."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this machine's processor cannot flush subnormals to zero")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("dtype", DTYPES)
def test_subnormals_are_numbers_whatever_the_caller_makes_of_them(ctx, dtype):
    """The bits are the same whether or not the thread that makes the context, or the thread that makes the call,
    flushes subnormals to zero."""
    problem = random_problem(6, [33], dtype=dtype, fused=False, activation="relu", **SIZES)
    x = (problem.x[0].astype(np.float64) * {"float16": 2**-16}.get(dtype, 2.0**-128)).astype(problem.x[0].dtype)
    arguments = problem.arguments(0) | {"x": x}
    results = [flashmoe.moe(ctx, **arguments)]
    with flushing(), flashmoe.Context(**problem.limits()) as flushed:
        results += [flashmoe.moe(each, **arguments) for each in (ctx, flushed)]
    assert np.count_nonzero(results[0].astype(np.float64)) > results[0].size / 2
    assert len({bits(each) for each in results}) == 1


def test_the_caller_goes_on_flushing_subnormals(ctx, problem):
    with flushing():
        flashmoe.moe(ctx, **problem.arguments(0))
        assert (torch.full((1,), 1e-38) * torch.full((1,), 0.1)).item() == 0.0
    assert (torch.full((1,), 1e-38) * torch.full((1,), 0.1)).item() != 0.0


@pytest.mark.parametrize("name", ["x", "gate_up_proj", "down_proj", "router", "topk_ids", "topk_weights"])
def test_strided_tensors_are_refused(ctx, name):
    problem = random_problem(6, [33], fused=not name.startswith("topk"), **SIZES)
    arguments = as_tensors(problem.arguments(0))
    arguments[name] = arguments[name].transpose(-1, -2).contiguous().transpose(-1, -2)
    message = rf"{name}: expected a contiguous tensor, got a strided one; call \.contiguous\(\) on it"
    with pytest.raises(flashmoe.InvalidArgument, match=message):
        flashmoe.moe(ctx, **arguments)
    with pytest.raises(flashmoe.InvalidArgument, match=message):
        torch.ops.flashmoe.moe(context_id(ctx), **arguments)
    arguments[name] = arguments[name].contiguous()
    flashmoe.moe(ctx, **arguments)  # the context is still usable


HOLLOW = {
    "sparse": (lambda t: t.to_sparse(), "expected a dense tensor, got one of layout torch.sparse_coo"),
    "compressed": (lambda t: t.reshape(-1, t.shape[-1]).to_sparse_csr(), "expected a dense tensor, got one of layout"),
    "nested": (lambda t: torch.nested.nested_tensor(list(t)), "expected a dense tensor, got a nested one"),
    "jagged": (lambda t: torch.nested.nested_tensor([t, t], layout=torch.jagged), "expected a dense tensor, got one"),
}


@pytest.mark.filterwarnings("ignore:.*beta state", "ignore:.*prototype")
@pytest.mark.parametrize("kind", HOLLOW)
@pytest.mark.parametrize("name", ["x", "gate_up_proj", "down_proj", "router"])
def test_tensors_without_a_place_in_memory_are_refused(ctx, layer, problem, name, kind):
    make, message = HOLLOW[kind]
    arguments = as_tensors(problem.arguments(0))
    hollow = make(arguments[name])
    for recorded in (True, False):
        arguments["x"].requires_grad_(recorded)
        with pytest.raises(flashmoe.InvalidArgument, match=f"^{name}: {message}"):
            flashmoe.moe(ctx, **arguments | {name: hollow})
    with pytest.raises(flashmoe.InvalidArgument, match=f"^x: {message}"):
        layer(hollow)


def test_what_is_no_tensor_is_refused_by_the_module(layer, problem):
    with pytest.raises(flashmoe.InvalidArgument, match=r"^x: expected a PyTorch tensor, .*, got ndarray"):
        layer(problem.x[0])


@pytest.mark.parametrize("option", ["renormalize", "router_bias", "expert_bias", "exact", "capacity_factor", "dtype"])
def test_a_module_takes_no_array_for_an_option(ctx, option):
    with pytest.raises(flashmoe.InvalidArgument, match=f"^{option}: expected .*, got array"):
        MoE(ctx, **SIZES, **{option: np.ones(2)})


# The module


def test_parameters_are_those_of_the_block_in_transformers(ctx):
    sizes = {**SIZES, "gate_and_up": 2 * SIZES["intermediate"]}
    expected = {name: tuple(sizes[size] for size in shape) for name, shape in QWEN3_MOE_BLOCK.items()}
    assert {name: tuple(each.shape) for name, each in MoE(ctx, **SIZES).state_dict().items()} == expected


def test_biases_and_experts_without_a_gate(ctx):
    options = {"activation": "gelu", "router_bias": True, "expert_bias": True}
    problem = random_problem(7, [17], biases=(True, True, True), activation="gelu", **SIZES)
    layer = MoE(ctx, **SIZES, **options)
    biases = {
        "gate.bias": problem.router_bias,
        "experts.gate_up_proj_bias": problem.gate_up_bias,
        "experts.down_proj_bias": problem.down_bias,
    }
    layer.load_state_dict(block_state(problem) | {name: tensor(array) for name, array in biases.items()})
    assert bits(layer(tensor(problem.x[0]))) == bits(flashmoe.moe(ctx, **problem.arguments(0)))


def test_module_passes_its_options_on(ctx, problem):
    options = {"renormalize": False, "capacity_factor": 0.5, "return_mode": "reduced", "placement": [0] * 8}
    layer = MoE(ctx, **SIZES, **options)
    layer.load_state_dict(block_state(problem))
    y = layer(tensor(problem.x[0]))
    assert ctx.last_call.dropped > 0 and ctx.last_call.return_mode == "reduced"
    assert bits(y) == bits(flashmoe.moe(ctx, **{**problem.arguments(0), **options}))


def test_shipped_layer_as_a_module():
    layer, hidden_states = shipped_layer()
    x = hidden_states[:300]
    limits = {name: getattr(layer, name) for name in SIZES}
    with flashmoe.Context(max_tokens=300, dtype=layer.dtype.name, **limits) as ctx:
        module = MoE.from_layer(ctx, layer)
        y = flashmoe.moe(ctx, x, **layer.tensors(), **layer.rule())
        assert bits(module(tensor(x))) == bits(y)
        before = bits(layer.router), bits(layer.gate_up_proj), bits(layer.down_proj)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.zero_()  # the parameter is a copy of the layer's weights
        assert (bits(layer.router), bits(layer.gate_up_proj), bits(layer.down_proj)) == before
        assert not module(tensor(x)).any()


def test_any_leading_dimensions(layer, problem):
    x = tensor(problem.x[0])[:12]
    y = layer(x)
    for shape in [(3, 4, 40), (2, 3, 2, 40), (12, 1, 40)]:
        assert bits(layer(x.reshape(shape))) == bits(y)
        assert layer(x.reshape(shape)).shape == shape
    strided = x.reshape(3, 4, 40).transpose(0, 1)
    assert torch.equal(layer(strided), y.reshape(3, 4, 40).transpose(0, 1))
    assert layer(x[:0]).shape == (0, 40)
    assert layer(x.reshape(3, 4, 40)[:, :0]).shape == (3, 0, 40)
    assert torch.equal(layer(x[5]), layer(x[5:6])[0])
    with torch.inference_mode():
        assert bits(layer(x.clone())) == bits(y)
    for wrong in (x.reshape(24, 20), x.reshape(6, 80), torch.tensor(0.0)):
        with pytest.raises(flashmoe.InvalidArgument, match=r"x: expected \[\.\.\., H=40\], got"):
            layer(wrong)


def test_copies_share_the_context(layer, problem):
    x = tensor(problem.x[0])
    twin = copy.deepcopy(layer)
    assert twin.ctx is layer.ctx
    assert bits(twin(x)) == bits(layer(x))
    with torch.no_grad():
        twin.experts.down_proj.zero_()
    assert not twin(x).any() and layer(x).any()


def test_a_context_stays_in_its_process(ctx, layer):
    assert copy.deepcopy(ctx) is ctx
    for each in (ctx, layer):
        with pytest.raises(flashmoe.FlashMoEError, match=r"context: .* pickle .* save the module's state_dict\(\)"):
            torch.save(each, io.BytesIO())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"hidden": 40.0}, flashmoe.InvalidArgument, r"hidden: expected an integer in .*, got 40\.0"),
        ({"placement": 4}, flashmoe.InvalidArgument, "placement: expected rank numbers, .*, got 4"),
        ({"placement": [0.7] * 8}, flashmoe.InvalidArgument, r"placement: expected rank numbers, .*, got \[0\.7"),
        ({"hidden": 41}, flashmoe.HeapError, "hidden: expected at most 40, the context's limit, got 41"),
        ({"hidden": 0}, flashmoe.InvalidArgument, "hidden: expected an integer in .*, got 0"),
        ({"top_k": 9}, flashmoe.InvalidArgument, "top_k: expected an integer in .1, 8., got 9"),
        ({"activation": "tanh"}, flashmoe.InvalidArgument, "activation: expected one of .*, got 'tanh'"),
        ({"placement": [0] * 7}, flashmoe.InvalidArgument, "placement: expected one rank or more for each of E=8"),
        ({"capacity_factor": 0}, flashmoe.InvalidArgument, "capacity_factor: expected a number > 0"),
        ({"return_mode": "fast"}, flashmoe.InvalidArgument, "return_mode: expected one of .*, got 'fast'"),
        ({"dtype": torch.float64}, flashmoe.InvalidArgument, "dtype: expected one of .*, got 'float64'"),
        ({"dtype": "float64"}, flashmoe.InvalidArgument, "dtype: expected one of .*, got 'float64'"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_wrong_options_are_refused_at_once(ctx, options, error, message):
    with pytest.raises(error, match=message):
        MoE(ctx, **{**SIZES, **options})


# Gradients and compilation


def compiled(layer, backend):
    torch._dynamo.reset()
    return torch.compile(layer, fullgraph=True, backend=backend)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("wanted", ["x", "parameters", "both"])
def test_gradients_of_compiled_layers(layer, problem, wanted, backend):
    """Gradients of a compiled layer have the same bits as without compilation. tests/test_training.py compares these
    with the reference."""
    x = tensor(problem.x[0])
    with torch.no_grad():
        expected = layer(x)
    assert not expected.requires_grad
    layer.requires_grad_(wanted != "x")
    x.requires_grad_(wanted != "parameters")
    leaves = [each for each in (x, *layer.parameters()) if each.requires_grad]
    found = []
    for forward in (layer, compiled(layer, backend)):
        y = forward(x)
        assert y.requires_grad and bits(y) == bits(expected)
        found.append(torch.autograd.grad((y * y).sum(), leaves))
    assert [bits(each) for each in found[0]] == [bits(each) for each in found[1]]
    assert all(each.any() for each in found[0])


def _dual(call, x):
    with forward_ad.dual_level():
        return call(forward_ad.make_dual(x, torch.ones_like(x)))


FORWARD_MODE = {
    "dual numbers": _dual,
    "jvp": lambda call, x: torch.func.jvp(call, (x,), (torch.ones_like(x),)),
    "jacfwd": lambda call, x: torch.func.jacfwd(call)(x),
}


@pytest.mark.parametrize("derive", FORWARD_MODE.values(), ids=FORWARD_MODE)
@pytest.mark.parametrize("of", ["x", "down_proj"])
def test_there_are_no_forward_mode_derivatives(ctx, layer, problem, of, derive):
    """Forward-mode derivatives are refused, because PyTorch would take the result for a constant, and return
    derivatives of 0 or none."""
    arguments = as_tensors(problem.arguments(0))
    calls = {
        "moe": lambda each: flashmoe.moe(ctx, **arguments | {of: each}),
        "module": layer
        if of == "x"
        else lambda each: torch.func.functional_call(layer, {"experts.down_proj": each}, (arguments["x"],)),
    }
    for call in calls.values():
        with pytest.raises(NotImplementedError, match=r"flashmoe\.moe: FlashMoE has no forward-mode derivatives"):
            derive(call, arguments[of])


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_calls_without_tangents_may_be_among_forward_mode_derivatives(layer, problem, backend):
    x = tensor(problem.x[0])
    with torch.no_grad():
        expected = layer(x)
        with forward_ad.dual_level():
            assert bits(layer(x)) == bits(expected)
            assert bits(compiled(layer, backend)(x)) == bits(expected)


def _traced(call, x):
    return torch.jit.trace(call, (x,), check_trace=False)


def _made_fx(call, x):
    return make_fx(call)(x)


def _exported(call, x):
    module = torch.nn.Module()
    module.forward = call
    return torch.export.export(module, (x,)).module()


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*deprecated")
@pytest.mark.parametrize("record", [_traced, _made_fx, _exported])
def test_what_records_the_function_records_the_operator(ctx, problem, record):
    """What PyTorch has recorded of the function, called with another x, returns what the function returns for that
    x."""
    arguments = as_tensors(problem.arguments(0))
    x = arguments.pop("x")

    def call(x):
        return flashmoe.moe(ctx, x, **arguments)

    recorded, other = record(call, x), x.flip(0) * 2
    assert bits(recorded(other)) == bits(call(other)) != bits(call(x))


def test_the_function_under_a_transform(ctx, problem):
    arguments = as_tensors(problem.arguments(0))
    x = arguments.pop("x")
    both = torch.stack([x, x.flip(0)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the operator has no batching rule, so vmap warns and calls it for each x
        y = torch.vmap(lambda x: flashmoe.moe(ctx, x, **arguments))(both)
    for one, x in zip(y, both, strict=True):
        assert bits(one.contiguous()) == bits(flashmoe.moe(ctx, x, **arguments))


def test_the_function_on_tensors_without_values(ctx, counted, problem):
    arguments = as_tensors(problem.arguments(0))
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(each) if torch.is_tensor(each) else each for name, each in arguments.items()}
    y = flashmoe.moe(ctx, **fake)
    assert y.shape == arguments["x"].shape and type(y) is type(fake["x"])
    assert counted == []


class SeenFunctions(TorchFunctionMode):
    """A mode that notes the names of the PyTorch functions that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("which", ["function", "module"])
def test_a_mode_sees_the_operator(ctx, layer, problem, which):
    """In a mode that sees PyTorch's functions, the call is an operator of PyTorch. A mode that only sets the device on
    which tensors are made is no reason for that, because PyTorch's way to an operator takes longer."""
    arguments = as_tensors(problem.arguments(0))
    call = {"function": lambda: flashmoe.moe(ctx, **arguments), "module": lambda: layer(arguments["x"])}[which]
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU]) as profiled:
        expected = bits(call())
        with torch.device("cpu"):
            assert bits(call()) == expected
    assert not any("flashmoe::" in event.name for event in profiled.events())  # only an operator has such a name
    with torch.no_grad(), SeenFunctions() as mode:
        assert bits(call()) == expected
    assert sum("flashmoe" in name for name in mode.names) == 1


def test_a_compiler_in_another_thread_is_none_of_its_business(ctx, problem, monkeypatch):
    """`torch.compiler.is_compiling` is true in all threads of a process while one of them compiles. A call in another
    thread still has the same bits."""
    arguments = as_tensors(problem.arguments(0))
    expected = bits(flashmoe.moe(ctx, **arguments))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert bits(flashmoe.moe(ctx, **arguments)) == expected


def test_arrays_beside_parameters(ctx, problem):
    """If x is an array, the call does not go through PyTorch, even if weights are parameters of PyTorch."""
    arguments = problem.arguments(0)
    parameters = {name: torch.nn.Parameter(tensor(arguments[name])) for name in ("gate_up_proj", "down_proj", "router")}
    assert bits(flashmoe.moe(ctx, **arguments | parameters)) == bits(flashmoe.moe(ctx, **arguments))


@pytest.mark.parametrize(
    ("option", "value"), [("top_k", 2.0), ("top_k", True), ("activation", None), ("return_mode", 1)]
)
def test_wrong_options_are_refused_where_gradients_are_recorded(ctx, problem, option, value):
    arguments = as_tensors(problem.arguments(0))
    arguments["x"].requires_grad_()
    with pytest.raises(flashmoe.InvalidArgument, match=f"{option}: expected"):
        flashmoe.moe(ctx, **arguments | {option: value})


@pytest.mark.parametrize("wanted", ["x", "router", "down_proj"])
def test_the_function_gives_gradients(ctx, problem, wanted):
    arguments = as_tensors(problem.arguments(0))
    expected = flashmoe.moe(ctx, **arguments)
    arguments[wanted].requires_grad_()
    with torch.no_grad():
        assert not flashmoe.moe(ctx, **arguments).requires_grad
    y = flashmoe.moe(ctx, **arguments)
    assert y.requires_grad and bits(y) == bits(expected)
    y.sum().backward()
    assert {name for name, each in arguments.items() if getattr(each, "grad", None) is not None} == {wanted}
    assert arguments[wanted].grad.any()


def test_the_operator_alone_has_no_gradients(ctx, problem):
    """What gradients need would have to be a result of the operator, but y is its only result."""
    arguments = as_tensors(problem.arguments(0))
    arguments["x"].requires_grad_()
    y = torch.ops.flashmoe.moe(context_id(ctx), **arguments)
    with pytest.raises(
        NotImplementedError, match=r"flashmoe\.moe: FlashMoE has no backward pass .* call flashmoe\.moe"
    ):
        y.sum().backward()


def test_the_function_compiles(ctx, counted, problem):
    arguments = as_tensors(problem.arguments(0))
    x = arguments.pop("x")
    expected = flashmoe.moe(ctx, x, **arguments) + 1
    assert not counted
    with torch.no_grad():
        assert torch.equal(compiled(lambda x: flashmoe.moe(ctx, x, **arguments) + 1, "aot_eager")(x), expected)
    assert len(counted) == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_gives_the_bits_of_eager(ctx, counted, backend, dtype):
    problem = random_problem(8, [32], dtype=dtype, biases=(True, True, True), **SIZES)
    layer = MoE(ctx, **SIZES, router_bias=True, expert_bias=True, dtype=getattr(torch, dtype))
    layer.load_state_dict(block_state(problem), strict=False)
    x = tensor(problem.x[0]).reshape(4, 8, 40)
    with torch.no_grad():
        fast = compiled(layer, backend)
        for tokens in (x, x[:, :5], x[:1], x.transpose(0, 1), x):  # PyTorch compiles the second one for any size
            expected = layer(tokens)
            calls = len(counted)
            assert bits(fast(tokens)) == bits(expected)
            assert len(counted) == calls + 1


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiler_keeps_every_call(layer, counted, problem, backend):
    def forward(x):
        layer(x)  # the result is unused here, but other ranks' tokens may need this rank's experts
        return layer(x) + layer(x)

    x = tensor(problem.x[0])
    expected = 2 * layer(x)
    for mode in (torch.no_grad, torch.enable_grad):
        counted.clear()
        with mode():
            assert torch.equal(compiled(forward, backend)(x), expected)
        assert len(counted) == 3


# Ranks


def _load_and_run(rank, ranks, name, limits, options, states, x):
    """For each state dict: the result of a new module that loads it, and the shapes in the module's own state dict; or
    the text of the error if the module does not load it."""
    results = []
    with flashmoe.Context(rank=rank, ranks=ranks, name=name, **limits) as ctx:
        for state in states:
            layer = MoE(ctx, **SIZES, **options)
            state = {key: tensor(array) for key, array in state.items()}
            untouched = dict(state)
            try:
                layer.load_state_dict(state)
            except flashmoe.InvalidArgument as error:
                results.append(str(error))
                continue
            assert all(state[key] is untouched[key] for key in untouched)
            own = layer.state_dict()
            again = MoE(ctx, **SIZES, **options)
            again.load_state_dict(own)
            with torch.no_grad():
                y, repeated = layer(tensor(x)), again(tensor(x))
            assert bits(y) == bits(repeated)
            results.append((y.numpy(), {key: tuple(each.shape) for key, each in own.items()}))
    return results


PLACED = {
    "contiguous": None,
    "given": [1, 0, 0, 1, 1, 0, 1, 1],
    "copies": [[1, 0], 0, [0, 1], 1, 1, 0, [0, 1], 1],
}


@pytest.mark.parametrize("placement", PLACED.values(), ids=PLACED)
@pytest.mark.parametrize("ranks", [2, 3])
def test_state_dict_of_all_experts_is_sliced(pool, ranks, placement):
    tokens = [13, 0, 21][:ranks]
    problem = random_problem(9, tokens, placement=placement, return_mode="direct", **SIZES)
    state = block_arrays(problem)
    short = {**state, "experts.down_proj": problem.down_proj[:7]}
    arguments = (problem.limits(), {"placement": placement, "return_mode": "direct"}, [short, state])
    results = pool.call(_load_and_run, [(*arguments, problem.x[rank]) for rank in range(ranks)], ranks=ranks)
    whole = replace(problem, x=[np.concatenate(problem.x)], placement=None)
    with flashmoe.Context(**whole.limits()) as ctx:
        expected = flashmoe.moe(ctx, **whole.arguments(0))
    assert bits(np.concatenate([each[1][0] for each in results])) == bits(expected)
    for rank, (error, (_, shapes)) in enumerate(results):
        local = len(problem.held_by(rank))
        message = rf"experts.down_proj: expected El={local} or E=8 experts, got [7, 40, 24]"
        assert error == message
        assert shapes["gate.weight"] == (8, 40)
        assert shapes["experts.gate_up_proj"] == (local, 48, 40)
        assert shapes["experts.down_proj"] == (local, 40, 24)


def _run_compiled(rank, ranks, name, limits, state, batches):
    """Whether a compiled stack of two layers gives the bits of the eager one, per batch of tokens."""
    with flashmoe.Context(rank=rank, ranks=ranks, name=name, **limits) as ctx, torch.no_grad():
        stack = torch.nn.Sequential(MoE(ctx, **SIZES), torch.nn.Tanh(), MoE(ctx, **SIZES))
        for layer in (stack[0], stack[2]):
            layer.load_state_dict({key: tensor(array) for key, array in state.items()})
        fast = compiled(stack, "aot_eager")
        return [bits(stack(tensor(x))) == bits(fast(tensor(x))) for x in batches]


def test_compiled_on_two_ranks(pool):
    problem = random_problem(11, [21, 34], **SIZES)
    state = block_arrays(problem)
    batches = [[x, x[:7], x] for x in problem.x]
    arguments = [(problem.limits(), state, batches[rank]) for rank in range(2)]
    assert pool.call(_run_compiled, arguments, ranks=2, timeout=6 * PATIENCE) == [[True] * 3] * 2


def _from_torch(rank, members, of_ranks, limits):
    """Calls the layer in a context of the process group of the ranks `members`. Returns None on the other ranks."""
    group = None if members is None else dist.new_group(members)
    if members is not None and rank not in members:
        return None
    with flashmoe.Context.from_torch(group, **limits) as ctx:
        y = flashmoe.moe(ctx, **as_tensors(of_ranks[ctx.rank]))
        return ctx.rank, ctx.ranks, ctx.name, y.numpy(), ctx.last_call


@pytest.mark.parametrize(
    ("ranks", "members"),
    [(2, None), (4, None), (4, [1, 3]), (4, [3, 0, 2])],
    ids=["2 ranks", "4 ranks", "1 and 3 of 4", "0, 2 and 3 of 4"],
)
def test_context_from_a_process_group(pool, tmp_path, ranks, members):
    # torch orders the ranks of a group by their rank in the world
    group = list(range(ranks)) if members is None else sorted(members)
    problem = random_problem(10, [9, 14, 0, 5][: len(group)], **SIZES)
    of_ranks = [problem.arguments(index) for index in range(len(group))]
    results = Gloo(pool, tmp_path)(ranks, _from_torch, members, of_ranks, problem.limits())
    assert [rank for rank, result in enumerate(results) if result is not None] == group
    results = [result for result in results if result is not None]
    assert [result[:2] for result in results] == [(index, len(group)) for index in range(len(group))]
    assert len({result[2] for result in results}) == 1
    check(problem, [Outcome(y, report) for *_, y, report in results])


def test_context_without_a_process_group():
    with pytest.raises(flashmoe.InvalidArgument, match=r"expected torch\.distributed to be initialised"):
        flashmoe.Context.from_torch(max_tokens=1, **SIZES)


def run_program(program):
    return subprocess.run([sys.executable, "-c", program], timeout=120, check=True, capture_output=True)


def test_package_does_not_import_torch():
    run_program("import sys, flashmoe, flashmoe.launch, flashmoe.cli; assert 'torch' not in sys.modules")


def test_package_works_without_torch():
    run_program("""
import sys
sys.modules["torch"] = None  # importing it raises ImportError
import flashmoe
from flashmoe.checkpoint import shipped_layer

layer, x = shipped_layer()
sizes = {name: getattr(layer, name) for name in ("hidden", "intermediate", "experts", "top_k")}
with flashmoe.Context(max_tokens=9, **sizes) as ctx:
    y = flashmoe.moe(
        ctx, x[:9], layer.gate_up_proj, layer.down_proj, router=layer.router, top_k=layer.top_k
    )
assert y.shape == (9, layer.hidden) and y.any()
""")
