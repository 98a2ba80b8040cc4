"""Models of Transformers whose experts FlashMoE computes, against Transformers' own eager experts."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import re
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

import flashmoe
import pytest
import torch

transformers = pytest.importorskip("transformers")

import torch.distributed as dist  # noqa: E402
from flashmoe.checkpoint.architectures import UNGATED  # noqa: E402
from flashmoe.contexts import growing  # noqa: E402
from flashmoe.contexts.context import contexts  # noqa: E402
from flashmoe.integrations.transformers import experts_forward, recognise  # noqa: E402
from flashmoe.integrations.transformers.experts import NAME, experts_modules  # noqa: E402
from flashmoe.integrations.transformers.recognise import _OWN_GATES  # noqa: E402
from flashmoe.reference import activate, moe_reference  # noqa: E402
from flashmoe.tolerance import call_error, relative_error  # noqa: E402
from safetensors import safe_open  # noqa: E402
from torch.distributed.tensor import DTensor, init_device_mesh  # noqa: E402
from transformers.integrations.moe import batched_mm_experts_forward, use_experts_implementation  # noqa: E402

SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,  # so large that experts matter: with 0.02, the residual stream hides their results
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
MOE = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
GROUPED = {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "topk_group": 2, "n_group": 4}

ARCHITECTURES = {
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen2Moe": {**MOE, "num_experts": 6, "shared_expert_intermediate_size": 48},
    "Qwen3Moe": {**MOE, "num_experts": 6, "head_dim": 16},
    "Olmoe": {"num_experts": 6, "num_experts_per_tok": 3},
    "Phimoe": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "DeepseekV3": {
        **MOE,
        **GROUPED,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    },
    "Glm4Moe": {**MOE, **GROUPED, "topk_group": 1, "n_group": 1, "head_dim": 16},
    "GptOss": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": ["full_attention"] * 2},
    "Qwen3Next": {
        **MOE,
        "num_experts": 6,
        "shared_expert_intermediate_size": 16,
        "head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
}
"""Architectures on Transformers' experts interface, and what their configurations have in addition to `SMALL`."""

OTHERS = {
    "Llama4": {"head_dim": 16, "intermediate_size_mlp": 8, "num_local_experts": 4, "moe_layers": [1]},
}
"""Architectures that are not on this interface, and what their configurations have in addition to `SMALL`."""

PROMPT = [[5, 17, 3, 44, 9], [60, 2, 2, 31, 8]]
VOCABULARY = SMALL["vocab_size"]


def config_of(name, **changes):
    kind = getattr(transformers, "Llama4TextConfig" if name == "Llama4" else f"{name}Config")
    return kind(**{**SMALL, **(ARCHITECTURES | OTHERS)[name], **changes})


def model_of(name, dtype=torch.float32, **changes):
    torch.manual_seed(7)
    model = getattr(transformers, f"{name}ForCausalLM")(config_of(name, **changes)).to(dtype).eval()
    for parameter, tensor in model.named_parameters():
        if "experts" in parameter and parameter.endswith("_bias"):  # Transformers initialises these with zeros
            torch.nn.init.normal_(tensor, std=0.3)
    return model


def with_experts(model, implementation):
    model.set_experts_implementation(implementation)
    return model


@torch.no_grad()
def logits_of(model, ids):
    return model(torch.tensor(ids)).logits


def greedy(model, ids, steps):
    return model.generate(torch.tensor(ids), do_sample=False, max_new_tokens=steps, min_new_tokens=steps)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def model(request):
    """A model of each architecture in turn. Tests may choose the implementation of its experts, but must change nothing
    else."""
    return model_of(request.param)


# Whole models


def test_logits_are_those_of_eager_experts(model):
    tokens = torch.randint(VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(1)).tolist()
    expected = logits_of(with_experts(model, "eager"), tokens)
    got = logits_of(with_experts(model, NAME), tokens)
    assert (got - expected).abs().max() <= 1e-5
    # If the experts were left out, the logits would differ, so the comparison above does test the experts.
    without = copy.deepcopy(model)
    for experts in experts_modules(without):
        torch.nn.init.zeros_(experts.down_proj)
    assert (logits_of(without, tokens) - expected).abs().max() > 0.1


def test_greedy_tokens_are_those_of_eager_experts(model):
    expected = greedy(with_experts(model, "eager"), PROMPT, 64)
    assert expected.shape == (2, len(PROMPT[0]) + 64)
    assert torch.equal(greedy(with_experts(model, NAME), PROMPT, 64), expected)


def test_bfloat16_experts_are_within_the_bound_of_the_reference(model):
    """Each experts module is called with the hidden states and the router's choices that it gets in the eager model."""
    model = with_experts(copy.deepcopy(model).to(torch.bfloat16), "eager")
    calls = []
    for experts in experts_modules(model):
        experts.register_forward_pre_hook(lambda module, inputs: calls.append((module, inputs)))
    tokens = torch.randint(VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(2)).tolist()
    logits_of(model, tokens)
    assert len(calls) == len(experts_modules(model)) > 0
    for module, (hidden_states, index, weights) in calls:
        with torch.no_grad():
            y = experts_forward(module, hidden_states, index, weights)
        assert (y.dtype, y.shape) == (torch.bfloat16, hidden_states.shape)
        arrays = [as_bfloat16(each) for each in (hidden_states, module.gate_up_proj, module.down_proj)]
        routing = index.numpy(), weights.float().numpy()
        how = recognise(module).how.of_layer()
        for name in ("gate_up", "down"):
            bias = getattr(module, f"{name}_proj_bias", None)
            how[f"{name}_bias"] = None if bias is None else as_bfloat16(bias)
        expected = moe_reference(*arrays, topk_ids=routing[0], topk_weights=routing[1], **how)
        error = call_error(*arrays, *routing, return_mode="direct", placement=[0] * module.num_experts, **how)
        bound = error.bound / expected.scale
        assert 0.0 < relative_error(y.float().numpy(), expected.y, expected.scale) <= bound < 0.05


def as_bfloat16(tensor):
    import ml_dtypes

    return tensor.detach().float().numpy().astype(ml_dtypes.bfloat16)


def stored(folder):
    """Names, types and bytes of a checkpoint's tensors."""
    found = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_tensor(name)
                found[name] = tensor.dtype, tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return found


def test_saved_models_are_those_of_eager_experts(model, tmp_path):
    with_experts(model, "eager").save_pretrained(tmp_path / "eager")
    expected = logits_of(with_experts(model, NAME), PROMPT)
    model.save_pretrained(tmp_path / "flashmoe")
    assert stored(tmp_path / "flashmoe") == stored(tmp_path / "eager")
    configs = [(tmp_path / folder / "config.json").read_text() for folder in ("eager", "flashmoe")]
    assert configs[0] == configs[1]
    again = type(model).from_pretrained(tmp_path / "flashmoe", experts_implementation=NAME).eval()
    assert torch.equal(logits_of(again, PROMPT), expected)
    again.save_pretrained(tmp_path / "again")
    assert stored(tmp_path / "again") == stored(tmp_path / "eager")


# Experts modules


def experts_class(**flags):
    """A class of experts like those of Transformers, with the parameters that the flags require."""

    class SomeExperts(torch.nn.Module):
        def __init__(self, config):
            super().__init__()
            self.num_experts, self.act_fn = 5, config.act_fn
            gated, biased = flags.get("has_gate", True), flags.get("has_bias", False)
            hidden, intermediate = 16, 12
            rows, name = (2 * intermediate, "gate_up_proj") if gated else (intermediate, "up_proj")
            shapes = {name: (rows, hidden), "down_proj": (hidden, intermediate)}
            if flags.get("is_transposed"):
                shapes = {key: shape[::-1] for key, shape in shapes.items()}
            if biased:
                shapes |= {f"{name}_bias": (rows,), "down_proj_bias": (hidden,)}
            for key, shape in shapes.items():
                self.register_parameter(key, torch.nn.Parameter(0.5 * torch.randn(self.num_experts, *shape)))

        forward = batched_mm_experts_forward

    return use_experts_implementation(**flags)(SomeExperts)


def some_experts(act_fn=None, **flags):
    torch.manual_seed(3)
    act_fn = torch.nn.SiLU() if act_fn is None else act_fn
    return experts_class(**flags)(SimpleNamespace(act_fn=act_fn, _experts_implementation=NAME))


def some_routing(experts, tokens=9, top_k=3, hidden=16):
    """Hidden states, ids of distinct experts, weights."""
    generator = torch.Generator().manual_seed(4)
    scores, index = torch.rand(tokens, experts.num_experts, generator=generator).topk(top_k, dim=-1)
    return torch.randn(tokens, hidden, generator=generator), index, scores


def activation(name):
    return transformers.activations.ACT2FN[name]


COMPUTED = {
    "gated": {},
    "gated by a function": {"act_fn": torch.nn.functional.silu},
    "gated, with biases": {"has_bias": True},
    "swish": {"act_fn": activation("swish")},
    "gated by gelu": {"act_fn": activation("gelu")},
    **{
        f"gated by {name}": {"act_fn": activation(name)}
        for name in ("gelu_pytorch_tanh", "gelu_python_tanh", "gelu_new", "gelu_fast", "gelu_accurate")
    },
    "gated by torch's gelu by tanh": {"act_fn": torch.nn.GELU(approximate="tanh")},
    "transposed": {"is_transposed": True},
    "transposed, with biases": {"is_transposed": True, "has_bias": True},
    "no gate, relu squared": {"has_gate": False, "act_fn": activation("relu2")},
    "no gate, silu": {"has_gate": False, "act_fn": activation("silu")},
    "no gate, relu": {"has_gate": False, "act_fn": activation("relu")},
    "no gate, gelu": {"has_gate": False, "act_fn": activation("gelu")},
    "no gate, gelu in Python": {"has_gate": False, "act_fn": activation("gelu_python")},
    "no gate, torch's gelu": {"has_gate": False, "act_fn": torch.nn.GELU()},
    "no gate, gelu by tanh": {"has_gate": False, "act_fn": activation("gelu_pytorch_tanh")},
    "no gate, with biases": {"has_gate": False, "act_fn": activation("relu"), "has_bias": True},
}


@torch.no_grad()
@pytest.mark.parametrize("case", COMPUTED)
def test_experts_of_other_kinds(case):
    experts = some_experts(**COMPUTED[case])
    inputs = some_routing(experts)
    torch.testing.assert_close(experts(*inputs), batched_mm_experts_forward(experts, *inputs), atol=1e-5, rtol=1e-5)


REFUSED = {
    "a gate of halves of what are no halves": (
        {"is_concatenated": False},
        r"is_concatenated: expected True, got False",
    ),
    "gated by quick gelu": ({"act_fn": activation("quick_gelu")}, r"act_fn: .*, got QuickGELUActivation"),
    "gated by relu": ({"act_fn": activation("relu")}, r"act_fn: .*, got ReLU"),
    "gated by a lambda": ({"act_fn": lambda z: z}, r"act_fn: .*, got <lambda>"),
    "no gate, clipped gelu": (
        {"has_gate": False, "act_fn": activation("gelu_10")},
        r"act_fn: expected one of .*gelu, .*, ReLU, .*, got ClippedGELUActivation",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_experts_that_are_refused(case):
    flags, message = REFUSED[case]
    experts = some_experts(**flags)
    with pytest.raises(flashmoe.InvalidArgument, match=rf"^SomeExperts\.{message}.*; FlashMoE does not compute these"):
        experts(*some_routing(experts))


@pytest.mark.parametrize("name", ["has_post_expert_norm", "_is_expert_parallel"])
def test_attributes_of_newer_releases_are_looked_at(name):
    experts = some_experts()
    setattr(experts, name, True)
    with pytest.raises(flashmoe.InvalidArgument, match=rf"^SomeExperts\.{name}: expected False.*, got True;"):
        experts(*some_routing(experts))
    delattr(experts, name)  # older releases do not have the attribute
    experts(*some_routing(experts))


def test_an_activation_that_a_configuration_names():
    for name in ("Mixtral", "Qwen3Moe"):
        for computed in ("gelu", "gelu_pytorch_tanh"):
            model = model_of(name, hidden_act=computed)
            expected = logits_of(with_experts(model, "eager"), PROMPT)
            assert (logits_of(with_experts(model, NAME), PROMPT) - expected).abs().max() <= 1e-5
        model, refused = model_of(name, hidden_act="quick_gelu"), "QuickGELUActivation"
        with pytest.raises(flashmoe.InvalidArgument, match=rf"^{name}Experts\.act_fn: expected .*, got {refused};"):
            with_experts(model, NAME)


def test_gemma_4():
    """Gemma 4 has experts beside a dense MLP, gated by GELU with tanh. GELU without tanh would give other logits."""
    own = {"num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 24, "head_dim": 16, "global_head_dim": 16}
    own |= {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "num_global_key_value_heads": 2}
    torch.manual_seed(7)
    config = transformers.Gemma4TextConfig(**SMALL | own, enable_moe_block=True)
    assert config.hidden_activation == "gelu_pytorch_tanh"
    model = transformers.Gemma4ForCausalLM(config).eval()
    assert len(experts_modules(model)) == SMALL["num_hidden_layers"]
    expected = logits_of(with_experts(model, "eager"), PROMPT)
    got = logits_of(with_experts(model, NAME), PROMPT)
    assert (got - expected).abs().max() <= 1e-5
    assert torch.equal(greedy(model, PROMPT, 64), greedy(with_experts(model, "eager"), PROMPT, 64))
    for experts in experts_modules(model):
        experts.act_fn = activation("gelu")
    assert (logits_of(model, PROMPT) - expected).abs().max() > 1e-4


def test_names_of_activations_are_of_the_same_functions():
    """For each name of an activation that `flashmoe.checkpoint.architectures` knows from configurations, the reference
    computes the function that Transformers computes by that name."""
    z = torch.linspace(-8.0, 8.0, 1001, dtype=torch.float64)
    for name, plain in UNGATED.items():
        expected = activation(name)(z)
        torch.testing.assert_close(torch.from_numpy(activate(z.numpy(), plain)), expected, rtol=1e-9, atol=1e-9)
        assert recognise(some_experts(act_fn=activation(name), has_gate=False)).how.activation == plain


def own_gates():
    """The classes of experts of Transformers that are on the interface and have a gate of their own, each as the names
    of its module and of the class."""
    folder = Path(transformers.__file__).parent / "models"
    found = []
    for path in sorted(folder.glob("*/modeling_*.py")):
        text = path.read_text()
        if "def _apply_gate" not in text or "@use_experts_implementation" not in text:
            continue
        for part in re.split(r"^(?=@use_experts_implementation)", text, flags=re.MULTILINE)[1:]:
            part = re.split(r"^(?=class )", part, flags=re.MULTILINE)[1]
            if "def _apply_gate" in part:
                found.append((f"transformers.models.{path.parent.name}.{path.stem}", re.match(r"class (\w+)", part)[1]))
    return found


def with_gate_of(module, name):
    """An object of that class of experts, with the tensors and attributes of `some_experts`, and with limits so low
    that its gate clamps."""
    kind = getattr(__import__(module, fromlist=[name]), name)
    experts = kind.__new__(kind)
    torch.nn.Module.__init__(experts)
    own = {"limit": 0.5, "alpha": 1.5, "swiglu_limit": 0.5, "swiglu_alpha": 1.5}
    vars(experts).update(vars(some_experts(is_concatenated=name != "GptOssExperts")) | own)
    return experts


@torch.no_grad()
def test_gates_of_their_own_are_computed_or_refused_whatever_the_configuration_says(monkeypatch):
    found = own_gates()
    assert ("transformers.models.gpt_oss.modeling_gpt_oss", "GptOssExperts") in found
    refused = r"\._apply_gate: expected the default of Transformers"
    for module, name in found:
        experts = with_gate_of(module, name)
        if (module, f"{name}._apply_gate") not in _OWN_GATES:
            with pytest.raises(flashmoe.InvalidArgument, match=f"^{name}{refused}"):
                recognise(experts)
            continue
        inputs = some_routing(experts)
        expected = batched_mm_experts_forward(experts, *inputs)
        torch.testing.assert_close(experts_forward(experts, *inputs), expected, atol=1e-5, rtol=1e-5)
        for limit in ("limit", "swiglu_limit"):
            setattr(experts, limit, 0.7)
        expected, before = batched_mm_experts_forward(experts, *inputs), expected
        assert (expected - before).abs().max() > 0.01 or name == "BeamExperts"
        torch.testing.assert_close(experts_forward(experts, *inputs), expected, atol=1e-5, rtol=1e-5)
        monkeypatch.setattr(type(experts), "_apply_gate", lambda self, gate_up: gate_up)
        with pytest.raises(flashmoe.InvalidArgument, match=f"^{name}{refused}"):
            recognise(experts)
    experts = some_experts()
    experts._apply_gate = lambda gate_up: gate_up
    with pytest.raises(flashmoe.InvalidArgument, match=r"^SomeExperts\._apply_gate: "):
        recognise(experts)


@torch.no_grad()
def test_the_gate_of_deepseek_v4_clamps_before_silu_alone():
    experts = with_gate_of("transformers.models.deepseek_v4.modeling_deepseek_v4", "DeepseekV4Experts")
    experts.act_fn = activation("gelu")
    with pytest.raises(flashmoe.InvalidArgument, match=r"^DeepseekV4Experts\.act_fn: expected SiLU with a limit, got"):
        recognise(experts)


def test_the_gate_of_gpt_oss_is_that_of_its_class():
    model = model_of("GptOss", swiglu_alpha=1.5, swiglu_limit=0.5)  # the limit is so low that it changes the logits
    expected = logits_of(with_experts(model, "eager"), PROMPT)
    assert (logits_of(with_experts(model, NAME), PROMPT) - expected).abs().max() <= 1e-5
    for experts in experts_modules(model):
        experts.limit = 7.0
    assert (logits_of(model, PROMPT) - expected).abs().max() > 1e-3
    experts.is_concatenated = True
    with pytest.raises(flashmoe.InvalidArgument, match=r"^GptOssExperts\.is_concatenated: expected False, got True;"):
        logits_of(model, PROMPT)


# Tensors


def no_tensors(experts, x, index, weights):
    return x[:0], index[:0], weights[:0]


@torch.no_grad()
def test_ids_of_no_expert():
    """A choice with the id -1, by which servers pad, adds nothing to the result, whatever its weight is."""
    experts = some_experts()
    x, index, weights = some_routing(experts)
    index, weights = index.clone(), weights.clone()
    index[::3, 1], weights[::3, 1] = -1, torch.nan
    index[4], weights[4] = -1, torch.inf
    got = experts(x, index, weights)
    expected = batched_mm_experts_forward(experts, x, index.clamp(min=0), weights.where(index >= 0, 0.0))
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(got[4], torch.zeros_like(got[4]))


INPUTS = {
    "int32 ids": lambda experts, x, index, weights: (x, index.int(), weights),
    "weights in bfloat16": lambda experts, x, index, weights: (x, index, weights.bfloat16()),
    "weights in float64": lambda experts, x, index, weights: (x, index, weights.bfloat16().double()),
    "strided": lambda experts, *inputs: tuple(each.t().contiguous().t() for each in inputs),
    "no tokens": no_tensors,
}


@torch.no_grad()
@pytest.mark.parametrize("case", INPUTS)
def test_inputs_as_routers_give_them(case):
    experts = some_experts()
    inputs = INPUTS[case](experts, *some_routing(experts))
    expected = batched_mm_experts_forward(experts, inputs[0], inputs[1].long(), inputs[2].float())
    got = experts(*inputs)
    assert got.shape == inputs[0].shape
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_tensors_that_are_refused():
    experts = some_experts()
    x, index, weights = some_routing(experts)
    with pytest.raises(
        flashmoe.InvalidArgument, match=r"^gate_up_proj: expected bfloat16, the type of x, got .*float32"
    ):
        experts(x.bfloat16(), index, weights)
    with pytest.raises(
        flashmoe.InvalidArgument, match=r"^topk_ids: expected ids in \[0, E=5\), or -1 for none, got 5 for"
    ):
        experts(x, index + 1, weights)
    experts.num_experts = 4
    with pytest.raises(flashmoe.InvalidArgument, match=r"^SomeExperts: expected gate_up_proj of 4 experts, got 5$"):
        experts(x, index, weights)
    experts.num_experts = 5
    packed = torch.nn.Parameter(torch.zeros(7, 1, dtype=torch.uint8), requires_grad=False)
    experts.down_proj = packed
    with pytest.raises(
        flashmoe.InvalidArgument, match=r"^SomeExperts: expected down_proj \[E, .*, got \[7, 1\] .*uint8"
    ):
        experts(x, index, weights)


def test_distributed_tensors_are_refused():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        experts = some_experts()
        mesh = init_device_mesh("cpu", (1,))
        experts.down_proj = torch.nn.Parameter(DTensor.from_local(experts.down_proj.detach(), mesh))
        with pytest.raises(
            flashmoe.InvalidArgument, match=r"^SomeExperts: expected down_proj as a tensor of this rank"
        ):
            experts(*some_routing(experts))
    finally:
        dist.destroy_process_group()


def test_weights_that_change_in_place_are_seen():
    experts = some_experts()
    inputs = some_routing(experts)
    with torch.no_grad():
        before = experts(*inputs)
        experts.down_proj.mul_(2.0)
        assert torch.equal(experts(*inputs), 2.0 * before)


def gradients_of(model, ids):
    """The gradients of the model's parameters, by name, for a loss that depends on all logits."""
    model.zero_grad(set_to_none=True)
    logits = model(torch.tensor(ids)).logits
    (logits * torch.cos(torch.arange(logits.numel()).reshape(logits.shape))).sum().backward()
    return {name: each.grad for name, each in model.named_parameters()}


def assert_same_gradients(found, expected):
    """The gradients differ by no more than the rounding of float32 in a model whose sums have another order."""
    assert found.keys() == expected.keys()
    for name, each in expected.items():
        torch.testing.assert_close(found[name], each, atol=1e-5 * float(each.abs().max()) + 1e-7, rtol=1e-3)


def test_gradients_are_those_of_eager_experts(model):
    expected = gradients_of(with_experts(model, "eager").train(), PROMPT)
    assert_same_gradients(gradients_of(with_experts(model, NAME), PROMPT), expected)
    model.zero_grad(set_to_none=True)
    model.eval()


def test_a_model_on_meta_has_an_output_on_meta():
    with torch.device("meta"):
        model = model_of("Mixtral")
    y = with_experts(model, NAME)(torch.tensor(PROMPT, device="meta")).logits
    assert (y.device.type, y.shape) == ("meta", (2, 5, VOCABULARY))
    experts = experts_modules(model)[0]
    with pytest.raises(flashmoe.InvalidArgument, match=r"^gate_up_proj: expected a tensor on cpu, got one on meta$"):
        experts(torch.zeros(3, 32), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1))


# Contexts


def room():
    """The largest T of each context that exists, by the context's number."""
    gc.collect()
    return {
        number: each.limits["max_tokens"] for number, each in contexts.items() if isinstance(each, flashmoe.Context)
    }


def test_a_context_is_shared_grows_and_goes():
    before = room()

    def made():
        return [tokens for number, tokens in room().items() if number not in before]

    models = [with_experts(model_of("Mixtral", hidden_size=48), NAME) for _ in range(2)]
    assert made() == []  # the context is made by the first call
    expected = logits_of(models[0], PROMPT)
    models += [copy.deepcopy(models[0]), pickle.loads(pickle.dumps(models[0]))]
    for model in models:
        assert torch.equal(logits_of(model, PROMPT), expected)
    assert made() == [64]
    logits_of(models[1], [PROMPT[0] * 30])
    assert made() == [256]
    assert torch.equal(logits_of(models[0], PROMPT), expected)
    del model, models[:3]
    assert made() == [256]  # the last model still has the context
    del models
    assert made() == []


def test_more_tokens_than_an_engine_takes():
    experts = some_experts()
    x, index, weights = (each.expand(2**20, -1) for each in some_routing(experts, tokens=1))
    with pytest.raises(
        flashmoe.InvalidArgument, match=r"^max_tokens: expected an integer in \[1, 1048575\], got 1048576"
    ):
        experts(x, index, weights)


def test_what_a_graph_has_captured_is_kept(monkeypatch):
    """A context that a CUDA graph has captured is kept. The contexts are stand-ins here, because contexts of the CUDA
    engine need a GPU."""
    made = weakref.WeakSet()

    class SomeContext:
        def __init__(self, max_tokens, **shape):
            self.limits = {"max_tokens": max_tokens}
            made.add(self)

    def call(tokens, captured=False):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captured)
        growing_context.with_room_for(tokens)

    monkeypatch.setattr(growing, "Context", SomeContext)
    growing_context = growing.GrowingContext(growing.Shape(0, "bfloat16", 16, 8, 4, 2))
    call(8)
    call(64, captured=True)
    call(65)
    call(300)
    assert sorted(each.limits["max_tokens"] for each in made) == [64, 512]
    with pytest.raises(flashmoe.FlashMoEError, match=r"^context: expected a call of at least T=513 tokens before one"):
        call(513, captured=True)


def test_threads_share_a_context():
    models = [with_experts(model_of("Qwen3Moe", hidden_size=40), NAME) for _ in range(2)]
    batches = [[PROMPT[0] * (1 + step % 25)] for step in range(50)]
    expected = [logits_of(with_experts(model_of("Qwen3Moe", hidden_size=40), NAME), batch) for batch in batches]
    results = {}

    def run(thread, model, steps):
        results[thread] = all(torch.equal(logits_of(model, batches[step]), expected[step]) for step in steps)

    gc.collect()  # frees the context of the expected results, so that the threads begin with the smallest one
    orders = [range(50), range(49, -1, -1), range(50)]
    threads = [threading.Thread(target=run, args=(i, models[i % 2], order)) for i, order in enumerate(orders)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {0: True, 1: True, 2: True}


# Compilers


@torch.no_grad()
@pytest.mark.parametrize("first", ["compiled", "eager"])
def test_compiled_without_a_break(first):
    """A model compiles into one graph, also if the very first call is compiled, and if a compiled call needs a larger
    context."""
    torch._dynamo.reset()
    model = with_experts(model_of("Qwen3Moe", num_hidden_layers=1, hidden_size=56), NAME)
    twin = copy.deepcopy(model)
    if first == "eager":
        logits_of(model, PROMPT)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for batch in (PROMPT, [PROMPT[0] * 30], [PROMPT[1] * 9]):
        assert torch.equal(compiled(torch.tensor(batch)).logits, logits_of(twin, batch))


@torch.no_grad()
def test_compiled_code_is_of_one_module():
    """Two layers have the same Python code but different activations, so what is compiled for one must not be used for
    the other."""
    torch._dynamo.reset()
    first, second = some_experts(), some_experts(act_fn=activation("relu"))
    inputs = some_routing(first)
    compiled = [torch.compile(each, fullgraph=True, backend="eager") for each in (first, second)]
    assert torch.equal(compiled[0](*inputs), first(*inputs))
    with pytest.raises(Exception, match="act_fn"):
        compiled[1](*inputs)


# The release of Transformers


def run_program(program):
    return subprocess.run([sys.executable, "-c", program], timeout=120, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("made", "got"),
    [
        ("None", "none (import of transformers halted; None in sys.modules)"),
        ("SimpleNamespace(__version__='5.16.3')", "5.16.3"),
    ],
)
def test_an_older_release_is_refused(made, got):
    program = f"import sys; from types import SimpleNamespace; sys.modules['transformers'] = {made}\n"
    ended = run_program(program + "import flashmoe.integrations, flashmoe.integrations.transformers")
    assert ended.returncode == 1
    expected = f"ImportError: flashmoe.integrations.transformers: expected Transformers 5.17 to 5.24, got {got}"
    assert ended.stderr.strip().splitlines()[-1] == expected


def test_a_newer_release_is_warned_of_and_used():
    program = """import transformers; transformers.__version__ = '5.25.0.dev0'
import flashmoe.integrations.transformers
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
print('flashmoe' in ALL_EXPERTS_FUNCTIONS)"""
    ended = run_program(program)
    assert (ended.returncode, ended.stdout.strip()) == (0, "True")
    expected = "expected Transformers 5.17 to 5.24, got 5.25.0.dev0, which has not been tried"
    assert [line.partition(": ")[2] for line in ended.stderr.splitlines() if "not been tried" in line] == [
        f"UserWarning: flashmoe.integrations.transformers: {expected}"
    ]
