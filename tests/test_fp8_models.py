"""FP8 in models: checkpoints that are written and read, modules, and the perplexity of the shipped model in FP8."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import flashmoe
import ml_dtypes
import numpy as np
import pytest
from flashmoe.checkpoint import load_layer, shipped_layer
from flashmoe.errors import CheckpointError
from flashmoe.launch import run_ranks
from flashmoe.quantize import dequantize, quantize_checkpoint, quantize_layer, quantize_weights
from flashmoe.reference import moe_reference
from flashmoe.spec import FP8
from flashmoe.weights.tensor_file import read_header
from safetensors.numpy import load_file, save_file

torch = pytest.importorskip("torch")

from flashmoe.nn import MoE  # noqa: E402  (needs torch)

FOLDER = Path(flashmoe.__file__).parent / "assets" / "tiny-qwen3-moe"
SHIPPED = {"hidden": 256, "intermediate": 128, "experts": 16, "top_k": 4, "processors": 2}


@pytest.fixture(scope="module")
def quantised(tmp_path_factory) -> Path:
    """The shipped checkpoint in FP8."""
    folder = tmp_path_factory.mktemp("fp8") / "tiny"
    quantize_checkpoint(FOLDER, folder)
    return folder


# ---- Checkpoints ---------------------------------------------------------------------------------------------


def test_a_checkpoint_is_quantised_as_published_ones_are(quantised: Path):
    before, after = (read_header(folder / "model.safetensors").tensors for folder in (FOLDER, quantised))
    experts = {name for name in before if ".experts." in name}
    assert set(after) == set(before) | {f"{name}_scale_inv" for name in experts}
    for name in before:
        assert after[name].dtype == ("F8_E4M3" if name in experts else before[name].dtype)
    gate = after["model.layers.0.mlp.experts.3.gate_proj.weight_scale_inv"]
    assert (gate.dtype, gate.shape) == ("F32", (1, 2))  # scales of a matrix [128, 256]
    config = json.loads((quantised / "config.json").read_text())
    said = config.pop("quantization_config")
    assert config == json.loads((FOLDER / "config.json").read_text())
    assert (said["quant_method"], said["weight_block_size"], said["activation_scheme"]) == (
        "fp8",
        [128, 128],
        "dynamic",
    )
    assert "model.layers.0.mlp.gate" in said["modules_to_not_convert"]
    assert "model.layers.1.self_attn.q_proj" in said["modules_to_not_convert"]
    assert not any("experts" in name for name in said["modules_to_not_convert"])
    assert (quantised / "tokenizer.json").read_bytes() == (FOLDER / "tokenizer.json").read_bytes()


def test_what_is_not_quantised_stays_as_it_is(quantised: Path):
    safetensors = pytest.importorskip("safetensors")
    with (
        safetensors.safe_open(FOLDER / "model.safetensors", "pt") as before,
        safetensors.safe_open(quantised / "model.safetensors", "pt") as after,
    ):
        for name in before.keys():  # noqa: SIM118  (`before` is no mapping)
            if ".experts." not in name:
                assert torch.equal(before.get_tensor(name), after.get_tensor(name))
        for projection in ("gate_proj", "up_proj", "down_proj"):
            name = f"model.layers.1.mlp.experts.5.{projection}.weight"
            weights = after.get_tensor(name).float()
            scale = after.get_tensor(f"{name}_scale_inv").repeat_interleave(128, 0).repeat_interleave(128, 1)
            error = (weights * scale[: len(weights), : weights.shape[1]] - before.get_tensor(name).float()).abs()
            assert (error <= before.get_tensor(name).float().abs() / 16.0 + 2.0**-10 * scale.max()).all()


def test_a_layer_of_it_is_the_layer_quantised(quantised: Path):
    ours, theirs = quantize_layer(load_layer(FOLDER, 1)), load_layer(quantised, 1)
    assert (theirs.weight_dtype, theirs.weight_scales, theirs.dtype.name) == (FP8, "block", "bfloat16")
    for name, array in ours.tensors().items():
        np.testing.assert_array_equal(array, theirs.tensors()[name])
    assert theirs.gate_up_scale.shape == (16, 2, 2)


def write(folder: Path, tensors: dict[str, np.ndarray], config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


BLOCK = "model.layers.1.mlp"
CONFIG = {"model_type": "qwen3_moe", "hidden_act": "silu", "num_experts_per_tok": 2, "norm_topk_prob": True}


def one_by_one(scale: str = "weight_scale_inv", scales: str = "block", of: Any = np.float32) -> dict[str, np.ndarray]:
    """A checkpoint's tensors, one for each expert and projection (I = 200, H = 136), and their scales, of type `of`."""
    random = np.random.default_rng(1)
    tensors = {f"{BLOCK}.gate.weight": random.standard_normal((4, 136)).astype(ml_dtypes.bfloat16)}
    for expert in range(4):
        for projection, shape in (("gate_proj", (200, 136)), ("up_proj", (200, 136)), ("down_proj", (136, 200))):
            weights = random.standard_normal(shape) * (1 + expert)
            elements, scale_of = quantize_weights(weights, scales)
            name = f"{BLOCK}.experts.{expert}.{projection}"
            tensors[f"{name}.weight"] = elements
            tensors[f"{name}.{scale}"] = scale_of.astype(of).reshape((1,) if scales == "tensor" else scale_of.shape)
    return tensors


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ({}, "block"),
        ({"of": ml_dtypes.bfloat16}, "block"),
        ({"scale": "weight_scale", "scales": "row"}, "row"),
        ({"scale": "weight_scale", "scales": "tensor"}, "row"),  # gate and up have a scale each
    ],
    ids=["blocks", "scales in bfloat16", "rows", "matrices"],
)
def test_experts_one_by_one(tmp_path, how: dict[str, Any], kind: str):
    tensors = one_by_one(**how)
    layer = load_layer(write(tmp_path, tensors, CONFIG))
    assert (layer.weight_scales, layer.gate_up_scale.dtype) == (kind, np.float32)
    merged = dequantize(layer.gate_up_proj, layer.gate_up_scale, 2)
    for expert in range(4):
        for k, projection in enumerate(("gate_proj", "up_proj")):
            name = f"{BLOCK}.experts.{expert}.{projection}"
            scale = tensors[f"{name}.{how.get('scale', 'weight_scale_inv')}"].astype(np.float64)
            scale = scale.reshape(1, 1) if scale.size == 1 else scale
            expected = dequantize(tensors[f"{name}.weight"], scale)
            np.testing.assert_array_equal(merged[expert, 200 * k : 200 * (k + 1)], expected)
    x = np.random.default_rng(2).standard_normal((33, 136)).astype(ml_dtypes.bfloat16)
    with flashmoe.Context(max_tokens=33, hidden=136, intermediate=200, experts=4, top_k=2, weight_dtype=FP8) as context:
        y = flashmoe.moe(context, x, **layer.tensors(), **layer.rule())
        chosen = {"topk_ids": context.last_call.topk_ids, "topk_weights": context.last_call.topk_weights}
    scales = {"gate_up_scale": layer.gate_up_scale, "down_scale": layer.down_scale}
    expected = moe_reference(x, layer.gate_up_proj, layer.down_proj, **chosen, **scales)
    assert np.linalg.norm(y.astype(np.float64) - expected.y) < 0.01 * expected.scale


def test_merged_experts_and_a_shared_one(tmp_path):
    random = np.random.default_rng(3)
    tensors = {f"{BLOCK}.gate.weight": random.standard_normal((4, 256)).astype(np.float32)}
    for name, shape, halves in (
        ("experts.gate_up_proj", (4, 256, 256), 2),
        ("experts.down_proj", (4, 256, 128), 1),
        ("shared_expert.gate_proj.weight", (256, 256), 1),
        ("shared_expert.up_proj.weight", (256, 256), 1),
        ("shared_expert.down_proj.weight", (256, 256), 1),
    ):
        elements, scale = quantize_weights(random.standard_normal(shape), halves=halves)
        tensors |= {f"{BLOCK}.{name}": elements, f"{BLOCK}.{name}_scale_inv": scale}
    layer = load_layer(write(tmp_path, tensors, CONFIG | {"model_type": "qwen2_moe"}))
    assert layer.shared_gate_up_scale.shape == (4, 2)
    assert layer.shared_down_scale.shape == (2, 2)
    x = random.standard_normal((17, 256)).astype(np.float32)
    sizes = {"hidden": 256, "intermediate": 128, "experts": 4, "top_k": 2, "dtype": "float32"}
    with flashmoe.Context(max_tokens=17, shared_intermediate=256, weight_dtype=FP8, **sizes) as context:
        y = flashmoe.moe(context, x, **layer.tensors(), **layer.rule())
        module = MoE.from_layer(context, layer)
        np.testing.assert_array_equal(module(torch.from_numpy(x)).detach().numpy(), y)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"experts.2.up_proj.weight_scale_inv": None}, "expected a tensor .*experts.2.up_proj.weight_scale_inv"),
        ({"experts.2.up_proj.weight_scale_inv": np.ones((3, 2), np.float32)}, "scales: expected matrices, vectors or"),
        (
            {"experts.1.down_proj.weight_scale_inv": np.ones((2, 2), np.float16)},
            "scales dtype: expected one dtype, got m",
        ),
        (
            {"experts.0.down_proj.weight_scale_inv": np.ones((2, 2), np.int8)},
            "dtype: expected one of F32, F16, BF16, go",
        ),
        ({"experts.0.down_proj.weight": np.ones((136, 200), np.float32)}, "dtype: expected one dtype, got mixed"),
        (
            {"gate.weight": np.ones((4, 136), ml_dtypes.float8_e4m3fn)},
            "gate.weight dtype: expected one of F32, F16, BF16",
        ),
        ({"experts.0.down_proj.input_scale": np.ones(1, np.float32)}, "got also experts.0.down_proj.input_scale"),
    ],
)
def test_what_does_not_fit_is_told(tmp_path, change: dict[str, Any], message: str):
    tensors = one_by_one() | {f"{BLOCK}.{name}": array for name, array in change.items()}
    folder = write(tmp_path, {name: array for name, array in tensors.items() if array is not None}, CONFIG)
    with pytest.raises(CheckpointError, match=message):
        load_layer(folder)


def test_scales_of_blocks_of_another_size_are_told(tmp_path):
    tensors = one_by_one()
    for name in tensors:
        if name.endswith("scale_inv"):
            tensors[name] = np.ones((4, 4), np.float32)
    with pytest.raises(CheckpointError, match=r"gate_up_scale: expected \[4, 4, 2\] \(a scale for each 128 x 128\)"):
        load_layer(write(tmp_path, tensors, CONFIG))


def test_what_cannot_be_quantised_is_refused(tmp_path, quantised: Path):
    with pytest.raises(
        CheckpointError, match=r"^path: expected a checkpoint that is not quantised in .*, got one that"
    ):
        quantize_checkpoint(quantised, tmp_path / "again")
    with pytest.raises(flashmoe.InvalidArgument, match=r"^target: expected an empty folder, got .* with files"):
        quantize_checkpoint(FOLDER, quantised)
    tensors = load_file(FOLDER / "model.safetensors")
    config = json.loads((FOLDER / "config.json").read_text())
    dense = {name: array for name, array in tensors.items() if ".experts." not in name}
    with pytest.raises(CheckpointError, match=r"^path: expected matrices of experts in F32, F16, BF16 in .*, got none"):
        quantize_checkpoint(write(tmp_path / "dense", dense, config), tmp_path / "out")
    tensors["model.layers.0.mlp.experts.0.up_proj.weight"][0, 0] = np.inf
    with pytest.raises(
        flashmoe.InvalidArgument,
        match=r"up_proj.weight in .*model.safetensors: expected finite numbers, got others among them",
    ):
        quantize_checkpoint(write(tmp_path / "inf", tensors, config), tmp_path / "out")
    message = r"^path: expected a model whose checkpoints have experts in float8_e4m3fn, got Llama 4"
    with pytest.raises(CheckpointError, match=message):
        quantize_checkpoint(write(tmp_path / "llama", tensors, {"model_type": "llama4_text"}), tmp_path / "out2")


def test_shards_stay_shards(tmp_path):
    """Each shard keeps its tensors and gets their scales. The index says which shard has which tensor."""
    tensors = load_file(FOLDER / "model.safetensors")
    names = sorted(tensors)
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    parts = {f"model-0000{n + 1}-of-00003.safetensors": names[n::3] for n in range(3)}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, source / file)
    index = {"metadata": {}, "weight_map": {name: file for file, part in parts.items() for name in part}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    (source / "config.json").write_text((FOLDER / "config.json").read_text())
    quantize_checkpoint(source, target)
    whole, in_shards = quantize_layer(load_layer(FOLDER, 0)), load_layer(target, 0)
    for name, array in whole.tensors().items():
        np.testing.assert_array_equal(array, in_shards.tensors()[name])
    for file in parts:
        mine = json.loads((target / "model.safetensors.index.json").read_text())["weight_map"]
        assert {name for name, where in mine.items() if where == file} == set(read_header(target / file).tensors)


def test_the_command_runs_a_layer_of_it(quantised: Path, tmp_path, capsys):
    from flashmoe.cli import main

    options = {"checkpoint": quantised, "layer": 1, "ranks": 2, "tokens": 64, "engine": "cpu", "out": tmp_path}
    assert main(["run", *(f"--{name}={value}" for name, value in options.items())]) == 0
    said = capsys.readouterr().out
    assert "experts float8_e4m3fn" in " ".join(said.split())


# ---- Modules -------------------------------------------------------------------------------------------------


def test_a_module_of_a_layer_in_fp8():
    layer, states = shipped_layer()
    layer, x = quantize_layer(layer), states[:40]
    with flashmoe.Context(max_tokens=40, weight_dtype=FP8, **SHIPPED) as context:
        expected = flashmoe.moe(context, x, **layer.tensors(), **layer.rule())
        module = MoE.from_layer(context, layer)
        assert module.experts.gate_up_proj.dtype == torch.float8_e4m3fn
        ours = torch.from_numpy(x.view(np.uint16)).view(torch.bfloat16)
        np.testing.assert_array_equal(module(ours).detach().view(torch.uint16).numpy(), expected.view(np.uint16))
        fresh = MoE(context, 256, 128, 16, 4, round_logits=True)  # as in layer.rule()
        fresh.load_state_dict(module.state_dict())
        assert torch.equal(fresh(ours), module(ours))
        compiled = torch.compile(fresh, fullgraph=True, backend="eager")
        assert torch.equal(compiled(ours), module(ours))
        with torch.enable_grad():
            assert torch.equal(module(ours.clone().requires_grad_()).detach(), module(ours))


@pytest.mark.parametrize("scales", ["block", "row", "tensor"])
def test_a_module_with_random_weights(scales: str):
    with flashmoe.Context(max_tokens=9, weight_dtype=FP8, shared_intermediate=256, **SHIPPED) as context:
        module = MoE(context, 256, 128, 16, 4, weight_scales=scales, shared_intermediate=256, shared_gate=True)
        y = module(torch.randn(9, 256, dtype=torch.bfloat16))
        assert torch.isfinite(y).all()
        assert y.float().std() > 0.0
    with pytest.raises(
        flashmoe.InvalidArgument, match=r"^weight_scales: expected one of tensor, row, block, got 'none'"
    ):
        MoE(context, 256, 128, 16, 4, weight_scales="none")


def test_a_module_takes_the_state_of_transformers_blocks():
    """In these states, matrices and scales of all experts are merged, and those of the shared expert are separate."""
    layer = quantize_layer(shipped_layer()[0])
    shapes = {"gate_proj": (128, 256), "up_proj": (128, 256), "down_proj": (256, 128)}
    random = np.random.default_rng(4)
    shared = {name: quantize_weights(random.standard_normal(shape)) for name, shape in shapes.items()}

    def tensor(array: np.ndarray) -> torch.Tensor:
        words = {"bfloat16": np.uint16, FP8: np.uint8}.get(array.dtype.name)
        as_words = torch.from_numpy(array if words is None else array.view(words).copy())
        return as_words if words is None else as_words.view(getattr(torch, array.dtype.name))

    state = {"gate.weight": tensor(layer.router)}
    for name in ("gate_up", "down"):
        state[f"experts.{name}_proj"] = tensor(getattr(layer, f"{name}_proj"))
        state[f"experts.{name}_proj_scale_inv"] = tensor(getattr(layer, f"{name}_scale"))
    for name, (elements, scale) in shared.items():
        state[f"shared_expert.{name}.weight"] = tensor(elements)
        state[f"shared_expert.{name}.weight_scale_inv"] = tensor(scale)
    with flashmoe.Context(max_tokens=9, weight_dtype=FP8, shared_intermediate=128, **SHIPPED) as context:
        module = MoE(context, 256, 128, 16, 4, shared_intermediate=128)
        module.load_state_dict(state)
        assert torch.equal(
            module.shared_expert.gate_up_proj_scale_inv[1], state["shared_expert.up_proj.weight_scale_inv"][0]
        )
        assert torch.isfinite(module(torch.randn(9, 256, dtype=torch.bfloat16))).all()


def _module_in_slices(rank: int, ranks: int, name: str, _: Any) -> tuple[float, list[int]]:
    """The relative difference between results of a module with slices and of one with whole experts; the shape of the
    scales of the module with slices."""
    torch.manual_seed(0)
    sizes = {"max_tokens": 16, "hidden": 256, "experts": 4, "top_k": 2, "weight_dtype": FP8, "processors": 1}
    group = {"rank": rank, "ranks": ranks, "name": name, "slices": 2}
    with (
        torch.no_grad(),
        flashmoe.Context(intermediate=256, **sizes) as alone,
        flashmoe.Context(intermediate=128, **group, **sizes) as context,
    ):
        whole, sliced = MoE(alone, 256, 256, 4, 2), MoE(context, 256, 256, 4, 2, slices=2)
        sliced.load_state_dict(whole.state_dict())
        x = torch.randn(16, 256, dtype=torch.bfloat16)
        ours, theirs = sliced(x).float(), whole(x).float()
        return float((ours - theirs).norm() / theirs.norm()), list(sliced.experts.down_proj_scale_inv.shape)


def test_a_module_cuts_experts_and_scales_as_they_are_loaded():
    for error, shape in run_ranks(2, _module_in_slices, [(None,), (None,)]):
        assert error < 2.0**-7  # rows and sums are rounded to bfloat16
        assert shape == [4, 2, 1]  # each rank has 4 of the 8 slices


# ---- The shipped model ---------------------------------------------------------------------------------------

MOST_WORSE = 0.02


def test_the_shipped_model_foretells_as_well_in_fp8(quantised: Path):
    """With experts in FP8 and the rest in bfloat16, the perplexity is within 2 % of the perplexity all in bfloat16."""
    pytest.importorskip("transformers")
    from shipped import loaded, losses_of, perplexity, windows

    torch.set_num_threads(1)
    model = loaded(dtype=torch.bfloat16, experts_implementation="eager")
    expected = perplexity(losses_of(model, windows()))
    with flashmoe.Context(max_tokens=512, weight_dtype=FP8, **SHIPPED) as context:
        for number, layer in enumerate(model.model.layers):
            layer.mlp = MoE.from_layer(context, load_layer(quantised, number))
        losses = losses_of(model, windows())
        assert context.last_call.tokens > 0
        assert losses_of(model, windows()) == losses  # the same bits
    assert perplexity(losses) == pytest.approx(expected, rel=MOST_WORSE)
    assert perplexity(losses) != expected


# ---- Transformers' experts in FP8 ----------------------------------------------------------------------------


@pytest.fixture
def of_transformers():
    """The shipped model with Transformers' own experts in FP8. The fixture makes them as Transformers does on a GPU,
    because without a GPU Transformers would load an FP8 checkpoint in bfloat16."""
    pytest.importorskip("transformers")
    from flashmoe.integrations.transformers.experts import NAME, register
    from shipped import loaded
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import FP8Experts, replace_with_fp8_linear

    register()
    model = loaded(dtype=torch.bfloat16, experts_implementation="eager")
    linear = [name for name, module in model.named_modules() if type(module) is torch.nn.Linear]
    model.set_experts_implementation(NAME)
    replace_with_fp8_linear(model, linear, FineGrainedFP8Config(), pre_quantized=True)
    for number, layer in enumerate(model.model.layers):
        weights, experts = quantize_layer(load_layer(FOLDER, number)), layer.mlp.experts
        assert isinstance(experts, FP8Experts)
        with flashmoe.Context(max_tokens=1, weight_dtype=FP8, **SHIPPED) as context:
            state = MoE.from_layer(context, weights).experts.state_dict()
        experts.load_state_dict(state, assign=True)
    return model


def test_transformers_experts_in_fp8(of_transformers, quantised: Path):
    """Called through Transformers' table of implementations, they compute the same bits as `flashmoe.moe`."""
    x = torch.randn(2, 20, 256, dtype=torch.bfloat16)
    for number, layer in enumerate(of_transformers.model.layers):
        with torch.no_grad(), flashmoe.Context(max_tokens=64, weight_dtype=FP8, **SHIPPED) as context:
            module = MoE.from_layer(context, load_layer(quantised, number))
            _, weights, index = layer.mlp.gate(x.reshape(-1, 256))
            theirs = layer.mlp.experts(x.reshape(-1, 256), index, weights)
            arguments = {"topk_ids": index, "topk_weights": weights.float(), "activation": "swiglu"}
            experts = module.experts
            scales = {"gate_up_scale": experts.gate_up_proj_scale_inv, "down_scale": experts.down_proj_scale_inv}
            ours = flashmoe.moe(
                context, x.reshape(-1, 256), experts.gate_up_proj, experts.down_proj, **arguments, **scales
            )
            assert torch.equal(theirs, ours)


def test_experts_in_fp8_are_not_spread(of_transformers, quantised: Path):
    from flashmoe.integrations.transformers import load_parallel, parallelize

    with pytest.raises(
        flashmoe.InvalidArgument, match=r"^FP8Experts: expected experts that are not quantised, got float8"
    ):
        parallelize(of_transformers, max_tokens=64)
    options = {"rank": 0, "world_size": 1, "store": torch.distributed.HashStore()}
    torch.distributed.init_process_group("gloo", **options)
    try:
        with pytest.raises(
            flashmoe.InvalidArgument, match=r"^path: expected a checkpoint whose experts are not in FP8"
        ):
            load_parallel(quantised, max_tokens=64)
    finally:
        torch.distributed.destroy_process_group()


def test_what_experts_in_fp8_may_be_besides_is_recognised(of_transformers):
    from flashmoe.integrations.transformers.recognise import recognise

    experts = of_transformers.model.layers[0].mlp.experts
    options = recognise(experts)
    assert (options.how.activation, options.gate_up_scale) == ("swiglu", "gate_up_proj_scale_inv")
    experts.limit = 7.0
    assert recognise(experts).how.limit == 7.0
    experts.swiglu_alpha = 1.702
    assert recognise(experts).how.alpha == 1.702
    for name, value in (("activation_scheme", "static"), ("gate_softcap", 5.0)):
        setattr(experts, name, value)
        with pytest.raises(flashmoe.InvalidArgument, match=rf"\.{name}: expected (dynamic|None), got {value}"):
            recognise(experts)
        setattr(experts, name, {"activation_scheme": "dynamic"}.get(name))


def test_the_model_of_transformers_in_fp8_foretells_as_well(of_transformers):
    from flashmoe.integrations.transformers import fuse
    from shipped import loaded, losses_of, perplexity, windows

    torch.set_num_threads(1)
    expected = perplexity(losses_of(loaded(dtype=torch.bfloat16, experts_implementation="eager"), windows()))
    assert perplexity(losses_of(of_transformers, windows())) == pytest.approx(expected, rel=MOST_WORSE)
    assert perplexity(losses_of(fuse(of_transformers), windows())) == pytest.approx(expected, rel=MOST_WORSE)
