"""Checkpoints of every architecture that is known, as Transformers writes them. The layer that is read from a
checkpoint is compared with the block of the model that was saved."""

from __future__ import annotations

import json

import flashmoe
import numpy as np
import pytest
from flashmoe.checkpoint import load_layer
from flashmoe.checkpoint.architectures import ARCHITECTURES as ROWS
from flashmoe.cli import main
from flashmoe.errors import CheckpointError
from flashmoe.quantize import quantize_checkpoint, quantize_layer

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from flashmoe import nn  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from small_models import small_model  # noqa: E402
from test_transformers import ARCHITECTURES, OTHERS, model_of  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

NAMES = (*ARCHITECTURES, *OTHERS)
FOLDERS = (
    "deepseek_v32",
    "dots1",
    "flex_olmo",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "kimi_linear",
    "mellum",
    "mimo_v2_flash",
    "minimax",
    "mistral4",
    "qwen3_5_moe",
    "qwen3_vl_moe",
    "solar_open",
)
"""Further models, by their folders in Transformers."""
ODD = "Qwen3Next"
"""The model in which the width of the shared expert is no multiple of an expert's."""
SHARED = ("Qwen2Moe", "DeepseekV3", "Glm4Moe", "Qwen3Next", "Llama4")
LAYER = 1
"""The number of a layer that has experts in every model here."""


def random_model(name, **changes):
    """A model in which the biases of routers are not zero."""
    model = model_of(name, **changes)
    for key, tensor in (*model.named_parameters(), *model.named_buffers()):
        if key.endswith(("e_score_correction_bias", "router.bias")):
            torch.nn.init.uniform_(tensor, -0.3, 0.3)
    model.set_experts_implementation("eager")
    return model


def block_of(model):
    """The Mixture-of-Experts block of the model's layer `LAYER`."""
    layer = getattr(model, "model", model).layers[LAYER]
    return layer.feed_forward if hasattr(layer, "feed_forward") else layer.mlp


@torch.no_grad()
def routed_by(block, x):
    """The block's result [T, H] for x [T, H], and what its router returns."""
    router = block.router if hasattr(block, "router") else block.gate
    y = block(x[None])
    return (y[0] if isinstance(y, tuple) else y).reshape(x.shape).numpy(), router(x)


def tokens_for(model, count=50):
    return torch.randn(count, model.config.hidden_size, generator=torch.Generator().manual_seed(2))


def sizes_of(layer):
    names = ("hidden", "intermediate", "experts", "top_k", "shared_intermediate")
    return {name: getattr(layer, name) for name in names}


def called(layer, x, **given):
    with flashmoe.Context(max_tokens=len(x), dtype="float32", processors=2, **sizes_of(layer)) as context:
        return flashmoe.moe(context, x.numpy(), **layer.tensors(), **layer.rule(), **given)


def compare(model, folder):
    """Compares the layer's result with the block's, and returns the layer. If `flashmoe.moe` does not compute the
    model's router (`own_router`), the call is given the routing of that router."""
    layer, x = load_layer(folder, LAYER), tokens_for(model)
    block = block_of(model)
    for name in {name.removesuffix("_gate") for name in layer.left_out}:
        torch.nn.init.zeros_(getattr(block, name).down_proj.weight)
    expected, routing = routed_by(block, x)
    given = {}
    if layer.own_router:
        _, weights, ids = routing
        given = {"topk_ids": ids.numpy(), "topk_weights": weights.detach().float().numpy()}
    y = called(layer, x, **given)
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    return layer


def merged(model, folder):
    """Writes the model's checkpoint with the names that its tensors have in memory."""
    model.config.save_pretrained(folder)
    tensors = {name: each.contiguous() for name, each in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors")


def test_each_has_a_row():
    models = [*map(model_of, NAMES), *map(small_model, FOLDERS)]
    assert {model.config.model_type for model in models} == set(ROWS)


@pytest.mark.parametrize("names", ["as saved", "merged"])
@pytest.mark.parametrize("folder", FOLDERS)
def test_a_layer_of_a_further_model(tmp_path, folder, names):
    model = small_model(folder)
    model.set_experts_implementation("eager")
    if names == "merged":
        merged(model, tmp_path)
    else:
        model.save_pretrained(tmp_path)
    layer, block = compare(model, tmp_path), block_of(model)
    has_shared = hasattr(block, "shared_expert") or hasattr(block, "shared_experts")
    assert (bool(layer.shared_intermediate), layer.left_out, layer.own_router) == (has_shared, (), "")


@pytest.mark.parametrize("names", ["as saved", "merged"])
@pytest.mark.parametrize("name", NAMES)
def test_a_layer_computes_what_the_model_s_block_does(tmp_path, name, names):
    model = random_model(name)
    if names == "merged":
        merged(model, tmp_path)
    else:
        model.save_pretrained(tmp_path)
    layer = compare(model, tmp_path)
    assert (layer.own_router == "sparsemixer") == (name == "Phimoe")
    assert bool(layer.left_out) == (name == ODD)
    assert bool(layer.shared_intermediate) == (name in SHARED and name != ODD)


@pytest.mark.parametrize("name", NAMES)
def test_the_module_computes_the_layer(tmp_path, name):
    model = random_model(name)
    model.save_pretrained(tmp_path)
    layer, x = load_layer(tmp_path, LAYER), tokens_for(model)
    with flashmoe.Context(max_tokens=len(x), dtype="float32", processors=2, **sizes_of(layer)) as context:
        if layer.own_router:
            with pytest.raises(flashmoe.InvalidArgument, match=r"^layer: expected a router that .*, got sparsemixer"):
                nn.MoE.from_layer(context, layer)
            return
        with torch.no_grad():
            y = nn.MoE.from_layer(context, layer)(x)
    np.testing.assert_array_equal(y.numpy(), called(layer, x))


# What configurations change

COMPUTED = [
    ("Mixtral", {"hidden_act": "gelu"}),
    ("Mixtral", {"hidden_act": "gelu_pytorch_tanh"}),
    ("Mixtral", {"num_experts_per_tok": 3}),
    ("Mixtral", {"router_jitter_noise": 0.5}),  # read in training only
    ("Qwen2Moe", {"norm_topk_prob": True}),
    ("Qwen2Moe", {"shared_expert_intermediate_size": 40}),
    ("Qwen3Moe", {"norm_topk_prob": True}),
    ("Qwen3Moe", {"moe_intermediate_size": 40}),
    ("Qwen3Moe", {"hidden_act": "swish"}),
    ("Olmoe", {"norm_topk_prob": True}),
    ("Phimoe", {"router_jitter_noise": 0.3}),  # read by the sparsemixer, which the caller computes
    ("DeepseekV3", {"norm_topk_prob": False}),
    ("DeepseekV3", {"routed_scaling_factor": 0.7}),
    ("DeepseekV3", {"n_group": 2, "topk_group": 1}),
    ("Glm4Moe", {"norm_topk_prob": False}),
    ("Glm4Moe", {"routed_scaling_factor": 1.7}),
    ("Glm4Moe", {"n_group": 4, "topk_group": 2}),
    ("GptOss", {"swiglu_limit": 0.5}),
    ("GptOss", {"swiglu_alpha": 0.4}),
    ("GptOss", {"hidden_act": "gelu"}),  # no code of the model reads it
    ("Llama4", {"num_experts_per_tok": 2}),
    ("Llama4", {"hidden_act": "gelu"}),
    ("Qwen3Next", {"norm_topk_prob": False}),
    ("Qwen3Next", {"num_experts_per_tok": 5}),
]


@pytest.mark.parametrize(("name", "changes"), COMPUTED)
def test_what_a_configuration_changes_is_computed(tmp_path, name, changes):
    model = random_model(name, **changes)
    model.save_pretrained(tmp_path)
    compare(model, tmp_path)


def said_otherwise(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


REFUSED = [
    ("Mixtral", {"hidden_act": "quick_gelu"}, "activation: expected silu or swish .* got hidden_act 'quick_gelu'"),
    (
        "Llama4",
        {"hidden_act": "relu"},
        "activation: expected silu or swish .* for gated experts, got hidden_act 'relu'",
    ),
    ("Mixtral", {"model_type": "jamba"}, "model_type: expected one of mixtral, .* in config.json, got 'jamba'"),
    ("Mixtral", {"intermediate_size": 25}, "intermediate size: expected 25, the intermediate_size of config.json, got"),
    ("Olmoe", {"norm_topk_prob": None}, "renormalize: expected true or false in config.json's norm_topk_prob, got N"),
    ("DeepseekV3", {"scoring_func": "softmax"}, "scoring_func: expected 'sigmoid' in config.json, .* got 'softmax'"),
    ("DeepseekV3", {"topk_method": "greedy"}, "topk_method: expected 'noaux_tc' in config.json, .* got 'greedy'"),
    ("DeepseekV3", {"n_group": 0}, "groups: expected an integer of at least 1 in config.json's n_group, got 0"),
    ("Glm4Moe", {"routed_scaling_factor": "1"}, "routed_scale: expected a finite number in config.json's routed_scal"),
    ("GptOss", {"swiglu_limit": -7.0}, "limit: expected a finite number > 0 in config.json's swiglu_limit, got -7.0"),
    ("GptOss", {"swiglu_alpha": 1e300}, "alpha: expected a finite number > 0 in config.json's swiglu_alpha, got 1e"),
    ("Qwen3Next", {"num_experts_per_tok": 7}, "top_k: expected an integer from 1 to the 6 experts, got 7"),
]


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED)
def test_what_is_not_computed_is_refused_by_name(tmp_path, name, changes, message):
    model_of(name).save_pretrained(tmp_path)
    said_otherwise(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message):
        load_layer(tmp_path, LAYER)


@pytest.mark.parametrize("name", ["DeepseekV3", "Glm4Moe", "Llama4"])
def test_dense_layers_are_said_to_be(tmp_path, name):
    model_of(name).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"^layer: expected one of the MoE layers \[1\], got 0, a dense one$"):
        load_layer(tmp_path, 0)
    with pytest.raises(CheckpointError, match=r"^layer: expected one of the MoE layers \[1\], got 9$"):
        load_layer(tmp_path, 9)


@pytest.mark.parametrize("name", NAMES)
def test_checkpoints_in_fp8(tmp_path, name):
    """A layer of a quantised checkpoint is the same as a layer that is quantised after it was read. A model with
    transposed experts is refused."""
    source, target = tmp_path / "source", tmp_path / "target"
    model_of(name).save_pretrained(source)
    layer = load_layer(source, LAYER)
    if layer.options.get("transposed"):
        refused = r"^path: expected a model whose checkpoints have experts in float8_e4m3fn, got"
        with pytest.raises(CheckpointError, match=refused):
            quantize_checkpoint(source, target)
        return
    quantize_checkpoint(source, target)
    expected, read = quantize_layer(layer), load_layer(target, LAYER)
    assert read.tensors().keys() == expected.tensors().keys()
    for tensor, array in expected.tensors().items():
        np.testing.assert_array_equal(read.tensors()[tensor], array)
    assert (read.rule(), read.left_out) == (layer.rule(), layer.left_out)


@pytest.mark.parametrize(
    ("name", "tensor", "expected"),
    [
        ("GptOss", "experts.gate_up_proj_blocks", "a router and routed experts alone, as gpt-oss has them, got also"),
        ("GptOss", "experts.down_proj_scales", "a router and routed experts alone, as gpt-oss has them, got also"),
        (
            "Mixtral",
            "experts.0.w1.qweight",
            "weights in F32, F16, BF16, or dequantised to them, got packed integers:",
        ),
    ],
)
def test_weights_that_are_quantised_otherwise_are_refused(tmp_path, name, tensor, expected):
    model_of(name).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    block = load_layer(file.parent, LAYER).name
    tensors = load_file(file)
    save_file(tensors | {f"{block}.{tensor}": torch.zeros(4, dtype=torch.uint8)}, file)
    with pytest.raises(CheckpointError, match=rf"^{block}: expected {expected} {tensor}$"):
        load_layer(tmp_path, LAYER)


def test_a_tensor_that_the_architecture_has_is_missed(tmp_path):
    model_of("DeepseekV3").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {name: each for name, each in load_file(file).items() if "e_score_correction_bias" not in name}
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"a tensor model.layers.1.mlp.gate.e_score_correction_bias in"):
        load_layer(tmp_path, LAYER)


# The command


@pytest.mark.parametrize("name", NAMES)
def test_the_command_runs_a_layer_of_a_checkpoint(tmp_path, capsys, name):
    """It runs in bfloat16, in which most models' routers round their logits."""
    random_model(name).save_pretrained(tmp_path / "model")
    command = ["run", "--engine", "cpu", "--ranks", "2", "--tokens", "60", "--checkpoint", str(tmp_path / "model")]
    command += ["--layer", str(LAYER), "--dtype", "bfloat16", "--out", str(tmp_path)]
    status, said = main(command), capsys.readouterr()
    printed = " ".join(said.out.split())
    if name == "Phimoe":
        assert status != 0 and "expected a router that flashmoe.moe computes, got sparsemixer" in " ".join(
            said.err.split()
        )
        return
    assert (status, "PASS" in printed) == (0, True), printed
    assert ("without the model's shared_expert" in printed) == (name == ODD)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"shared_expert.up_proj.weight": [47, 32]},
            r"gate and up \[Is, H\] and down \[H, Is\], got shapes \[48, 32\]",
        ),
        (
            {"shared_expert.down_proj.weight": [32, 24]},
            r"expected gate and up \[Is, H\] and down \[H, Is\], got shapes",
        ),
        ({"shared_expert_gate.weight": [2, 32]}, r"shared_gate: expected shape \[1, 32\], got \[2, 32\]"),
        ({"shared_expert.down_proj.weight": torch.float16}, "dtype: expected one dtype, got mixed float16, float32"),
        (
            {"shared_expert.down_proj.weight_scale_inv": [1, 1]},
            "scales of matrices in F8_E4M3 alone, got also shared_expert.down_proj.weight_scale_inv",
        ),
    ],
)
def test_a_shared_expert_that_does_not_fit_is_told(tmp_path, changes, told):
    model_of("Qwen2Moe").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name, change in changes.items():
        key = f"model.layers.{LAYER}.mlp.{name}"
        tensors[key] = torch.zeros(change) if isinstance(change, list) else tensors[key].to(change)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=told):
        load_layer(tmp_path, LAYER)


def test_further_tensors_of_a_shared_expert_leave_it_out(tmp_path):
    model_of("Qwen2Moe").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[f"model.layers.{LAYER}.mlp.shared_expert.norm.weight"] = torch.ones(32)
    save_file(tensors, tmp_path / "model.safetensors")
    layer = load_layer(tmp_path, LAYER)
    assert layer.left_out == ("shared_expert", "shared_expert_gate") and layer.shared_intermediate == 0
