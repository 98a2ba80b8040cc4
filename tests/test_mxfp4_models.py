"""MXFP4 as gpt-oss has it: checkpoints written and read, parts of them, modules, and models of Transformers."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

import flashmoe
import ml_dtypes
import numpy as np
import pytest
from flashmoe.checkpoint import OF_EXPERTS, load_layer
from flashmoe.errors import CheckpointError
from flashmoe.launch import run_ranks
from flashmoe.placement import hybrid, local_experts
from flashmoe.quantize import dequantize_mxfp4, quantize_checkpoint, quantize_layer
from flashmoe.slices import cut
from flashmoe.spec import MXFP4
from flashmoe.weights.tensor_file import read_header
from safetensors.numpy import load_file, save_file

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from flashmoe.integrations.transformers import check, load_mxfp4, load_parallel, parallelize  # noqa: E402
from flashmoe.nn import MoE  # noqa: E402  (needs torch)
from test_transformers import greedy, logits_of, model_of  # noqa: E402
from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer  # noqa: E402

EXPERTS, HIDDEN, INNER = 4, 64, 96
SIZES = {"hidden": HIDDEN, "intermediate": INNER, "experts": EXPERTS, "top_k": 2, "processors": 2}
BLOCK = "model.layers.1.mlp"


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    """A small gpt-oss in bfloat16, and in MXFP4."""
    plain, quantised = (tmp_path_factory.mktemp("gpt-oss") / name for name in ("plain", "mxfp4"))
    model_of("GptOss", torch.bfloat16, hidden_size=HIDDEN, intermediate_size=INNER).save_pretrained(plain)
    quantize_checkpoint(plain, quantised, MXFP4)
    return plain, quantised


# ---- Checkpoints ---------------------------------------------------------------------------------------------


def test_a_checkpoint_is_as_published_ones_are(folders: tuple[Path, Path]):
    before, after = (read_header(folder / "model.safetensors").tensors for folder in folders)
    matrices = {name for name in before if name.endswith(("experts.gate_up_proj", "experts.down_proj"))}
    assert len(matrices) == 4
    made = {name + suffix for name in matrices for suffix in ("_blocks", "_scales")}
    assert set(after) == set(before) - matrices | made
    shapes = {
        "gate_up_proj_blocks": (EXPERTS, 2 * INNER, HIDDEN // 32, 16),
        "gate_up_proj_scales": (EXPERTS, 2 * INNER, HIDDEN // 32),
        "down_proj_blocks": (EXPERTS, HIDDEN, INNER // 32, 16),
        "down_proj_scales": (EXPERTS, HIDDEN, INNER // 32),
    }
    for name, shape in shapes.items():
        stored = after[f"{BLOCK}.experts.{name}"]
        assert (stored.dtype, stored.shape) == ("U8", shape)
    said = json.loads((folders[1] / "config.json").read_text())["quantization_config"]
    assert said["quant_method"] == "mxfp4"
    assert "model.layers.0.mlp.router" in said["modules_to_not_convert"]
    assert not any("experts" in name for name in said["modules_to_not_convert"])


def test_transformers_reads_the_same_numbers_from_it(folders: tuple[Path, Path]):
    """Transformers' own dequantisation gives the same numbers; they are within 15 % of those that were quantised."""
    dequantised = transformers.AutoModelForCausalLM.from_pretrained(
        folders[1], quantization_config=transformers.Mxfp4Config(dequantize=True), dtype=torch.bfloat16
    )
    plain = transformers.AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.bfloat16)
    for number in (0, 1):
        layer = load_layer(folders[1], number)
        theirs, before = (model.model.layers[number].mlp.experts for model in (dequantised, plain))
        for name in ("gate_up_proj", "down_proj"):
            scale = getattr(layer, f"{name.removesuffix('_proj')}_scale")
            ours = dequantize_mxfp4(getattr(layer, name), scale).swapaxes(1, 2)
            np.testing.assert_array_equal(getattr(theirs, name).detach().float().numpy(), ours)
            exact = getattr(before, name).detach().float().numpy()
            assert 0.0 < np.linalg.norm(ours - exact) < 0.15 * np.linalg.norm(exact)


def test_a_layer_of_it_is_the_layer_quantised(folders: tuple[Path, Path]):
    plain, theirs = (load_layer(folder, 1) for folder in folders)
    ours = quantize_layer(plain, dtype=MXFP4)
    assert (theirs.weight_dtype, theirs.weight_scales, theirs.dtype.name) == (MXFP4, "block", "bfloat16")
    assert (theirs.hidden, theirs.intermediate) == (HIDDEN, INNER)
    assert ours.tensors().keys() == theirs.tensors().keys()
    for name, array in ours.tensors().items():
        np.testing.assert_array_equal(array, theirs.tensors()[name])
    assert plain.rule() == theirs.rule() | {"transposed": True}
    assert ours.rule() == theirs.rule()


@pytest.mark.parametrize(("slices", "held"), [(1, [1, 3]), (3, [0, 4, 5]), (3, None), (1, [2])])
def test_a_part_is_what_is_cut_of_all(folders: tuple[Path, Path], slices: int, held: list[int] | None):
    whole, part = load_layer(folders[1], 1), load_layer(folders[1], 1, slices=slices, held=held)
    mine = list(range(EXPERTS * slices)) if held is None else held
    given = {name: getattr(whole, name) for name in OF_EXPERTS}
    for name, each in cut(slices, **given, activation=whole.activation, interleaved=True).items():
        ours = getattr(part, name)
        assert (ours.shape, ours.dtype) == (each[mine].shape, each.dtype)
        np.testing.assert_array_equal(ours, each[mine], err_msg=name)
    assert (part.weight_dtype, part.intermediate, part.slices) == (MXFP4, INNER // slices, slices)
    # The dequantised numbers, too, are those of the whole layer, cut by hand.
    width = INNER // slices
    for place, (expert, n) in enumerate(divmod(id, slices) for id in mine):
        for name, rows, columns in (
            ("gate_up", slice(2 * n * width, 2 * (n + 1) * width), slice(None)),
            ("down", slice(None), slice(n * width, (n + 1) * width)),
        ):
            of_part, of_all = (
                dequantize_mxfp4(getattr(layer, f"{name}_proj"), getattr(layer, f"{name}_scale"))
                for layer in (part, whole)
            )
            np.testing.assert_array_equal(of_part[place], of_all[expert][rows, columns])


def test_a_slice_that_cuts_a_block_is_refused(folders: tuple[Path, Path], monkeypatch):
    """It is refused before a tensor is read."""
    message = r"^slices: expected slices of a multiple of 32 columns with weights of mxfp4, .* got 2 slices of I=48"
    with pytest.raises(flashmoe.InvalidArgument, match=message), monkeypatch.context() as patched:
        patched.setattr(os, "preadv", lambda *_: pytest.fail("a tensor is read"))
        load_layer(folders[1], 1, slices=2, held=[1])
    with pytest.raises(flashmoe.InvalidArgument, match=r"^slices: expected a divisor of I=96, got 5$"):
        load_layer(folders[1], 1, slices=5)


def changed(folder: Path, source: Path, change: dict[str, np.ndarray | None], **config: Any) -> Path:
    """Writes the checkpoint to `folder` with other tensors in one block; a tensor that is None is left out."""
    tensors = load_file(source / "model.safetensors") | {f"{BLOCK}.{name}": array for name, array in change.items()}
    save_file({name: each for name, each in tensors.items() if each is not None}, folder / "model.safetensors")
    said = json.loads((source / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(said))
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"experts.gate_up_proj_scales": None}, "expected a tensor .*experts.gate_up_proj_scales"),
        ({"experts.gate_up_proj_blocks": None}, "expected a tensor .*experts.gate_up_proj_blocks"),
        (
            {"experts.gate_up_proj_scales": np.ones((EXPERTS, 2 * INNER, 4), np.uint8)},
            r"gate_up_scale: expected \[4, 192, 2\] \(a scale for each 1 x 32\), got \[4, 192, 4\]",
        ),
        (
            {"experts.down_proj_blocks": np.ones((EXPERTS, HIDDEN, INNER // 2), np.uint8)},
            r"down_proj_blocks: expected shape \[E, rows, columns / 32, 16\], got \[4, 64, 48\]",
        ),
        (
            {"experts.gate_up_proj_blocks": np.ones((EXPERTS, INNER, HIDDEN // 32, 16), np.uint8)},
            r"gate_up_proj: expected shape \[4, 192, 64\], got \[4, 96, 64\]",
        ),
        (
            {"experts.down_proj_scales": np.ones((EXPERTS, HIDDEN, INNER // 32), np.float32)},
            "down_proj_scales dtype: expected one of U8, got F32",
        ),
        (
            {"experts.down_proj_blocks": np.ones((EXPERTS, HIDDEN, INNER // 32, 16), np.int8)},
            "down_proj_blocks dtype: expected one of U8, got I8",
        ),
        ({"experts.down_proj": np.ones((EXPERTS, INNER, HIDDEN), np.float32)}, "got also experts.down_proj$"),
        ({"router.weight": np.ones((EXPERTS, HIDDEN), np.uint8)}, "router.weight dtype: expected one of F32, F16, BF"),
    ],
)
def test_what_does_not_fit_is_told(folders: tuple[Path, Path], tmp_path: Path, change: dict[str, Any], message: str):
    with pytest.raises(CheckpointError, match=message):
        load_layer(changed(tmp_path, folders[1], change), 1)


def test_what_cannot_be_quantised_is_refused(folders: tuple[Path, Path], tmp_path: Path):
    with pytest.raises(
        CheckpointError, match=r"^path: expected a checkpoint that is not quantised in .*, got one that"
    ):
        quantize_checkpoint(folders[1], tmp_path / "again", MXFP4)
    with pytest.raises(
        CheckpointError, match=r"^path: expected a model whose checkpoints have experts in float8_e4m3f"
    ):
        quantize_checkpoint(folders[0], tmp_path / "fp8")
    shipped = Path(flashmoe.__file__).parent / "assets" / "tiny-qwen3-moe"
    with pytest.raises(
        CheckpointError, match=r"^path: expected a model whose checkpoints have experts in mxfp4, got Qw"
    ):
        quantize_checkpoint(shipped, tmp_path / "qwen", MXFP4)
    with pytest.raises(flashmoe.InvalidArgument, match=r"^dtype: expected one of float8_e4m3fn, mxfp4, got 'fp4'"):
        quantize_checkpoint(folders[0], tmp_path / "other", "fp4")


def test_the_commands(folders: tuple[Path, Path], tmp_path: Path, capsys):
    from flashmoe.cli import main

    options = {"checkpoint": folders[1], "layer": 1, "ranks": 2, "tokens": 64, "engine": "cpu", "out": tmp_path}
    assert main(["run", *(f"--{name}={value}" for name, value in options.items())]) == 0
    assert "experts mxfp4" in " ".join(capsys.readouterr().out.split())
    sizes = ["--hidden=2880", "--intermediate=2880", "--experts=32", "--top-k=4", "--ranks=1", "--tokens=64"]
    assert main(["memory", *sizes, "--weight-dtype=mxfp4"]) == 0
    assert "bfloat16, weights mxfp4" in " ".join(capsys.readouterr().out.split())


# ---- Modules -------------------------------------------------------------------------------------------------


def as_tensor(x: np.ndarray) -> Any:
    return torch.from_numpy(x.view(np.uint16)).view(torch.bfloat16)


def test_a_module_has_the_checkpoint_s_parameters(folders: tuple[Path, Path]):
    layer = load_layer(folders[1], 1)
    x = np.random.default_rng(1).standard_normal((40, HIDDEN)).astype(ml_dtypes.bfloat16)
    with flashmoe.Context(max_tokens=40, weight_dtype=MXFP4, **SIZES) as context:
        expected = flashmoe.moe(context, x, **layer.tensors(), **layer.rule())
        module = MoE.from_layer(context, layer)
        y = module(as_tensor(x))
        np.testing.assert_array_equal(y.view(torch.uint16).numpy(), expected.view(np.uint16))
        stored = {name.removeprefix(f"{BLOCK}.") for name in load_file(folders[1] / "model.safetensors")}
        assert {name for name in stored if name.startswith("experts.")} < module.state_dict().keys()
        assert len(list(module.experts.parameters())) == 6
        rule = layer.rule()
        made = {"top_k": rule.pop("top_k"), "expert_bias": True, "router_bias": True} | rule
        fresh = MoE(context, HIDDEN, INNER, EXPERTS, **made)
        assert torch.isfinite(fresh(as_tensor(x))).all()
        assert fresh(as_tensor(x)).float().std() > 0.0
        fresh.load_state_dict(module.state_dict())
        assert torch.equal(fresh(as_tensor(x)), y)
        assert fresh.to(torch.bfloat16).experts.down_proj_blocks.dtype == torch.uint8
        compiled = torch.compile(fresh, fullgraph=True, backend="eager")
        assert torch.equal(compiled(as_tensor(x)), y)
        with torch.enable_grad():
            tracked = module(as_tensor(x).clone().requires_grad_())
            assert torch.equal(tracked.detach(), y)
            with pytest.raises(NotImplementedError, match="no backward pass of quantised weights"):
                tracked.sum().backward()
        assert "down_proj=[4, 64, 3, 16]" in repr(module)
        with pytest.raises(flashmoe.InvalidArgument, match=r"^weight_scales: expected one of block, got 'row'"):
            MoE(context, HIDDEN, INNER, EXPERTS, 2, weight_scales="row")


def test_a_module_with_a_shared_expert():
    with flashmoe.Context(max_tokens=9, weight_dtype=MXFP4, shared_intermediate=2 * INNER, **SIZES) as context:
        module = MoE(context, HIDDEN, INNER, EXPERTS, 2, shared_intermediate=2 * INNER, shared_gate=True)
        assert list(module.shared_expert.down_proj_blocks.shape) == [HIDDEN, 2 * INNER // 32, 16]
        y = module(torch.randn(9, HIDDEN, dtype=torch.bfloat16))
        assert torch.isfinite(y).all()


def _of_a_rank(rank: int, ranks: int, name: str, path: str) -> float:
    """The relative difference between results of a rank's part of a layer, in slices, and of whole experts alone."""
    whole, placement = load_layer(path, 1), hybrid(EXPERTS, ranks, 3)
    part = load_layer(path, 1, slices=3, held=local_experts(placement, rank))
    sizes = {"max_tokens": 16, "hidden": HIDDEN, "experts": EXPERTS, "top_k": 2, "weight_dtype": MXFP4, "processors": 1}
    group = {"rank": rank, "ranks": ranks, "name": name, "slices": 3, "placement": placement}
    with (
        torch.no_grad(),
        flashmoe.Context(intermediate=INNER, **sizes) as alone,
        flashmoe.Context(intermediate=INNER // 3, **group, **sizes) as context,
    ):
        ours, theirs = MoE.from_layer(context, part), MoE.from_layer(context, whole, slices=3)
        for parameter, each in theirs.state_dict().items():
            assert torch.equal(ours.state_dict()[parameter], each)
        x = torch.randn(16, HIDDEN, dtype=torch.bfloat16)
        expected, y = MoE.from_layer(alone, whole)(x).float(), ours(x).float()
        theirs.load_state_dict(MoE.from_layer(alone, whole).state_dict())  # whole experts, cut as they are loaded
        assert torch.equal(theirs(x).float(), y)
        return float((y - expected).norm() / expected.norm())


def test_modules_of_slices(folders: tuple[Path, Path]):
    for error in run_ranks(3, _of_a_rank, [(str(folders[1]),)] * 3):
        assert error < 2.0**-6  # rows and sums are rounded to bfloat16


# ---- Transformers --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(folders: tuple[Path, Path]) -> tuple[Any, Any]:
    """The model with experts in MXFP4, as this package loads it; and dequantised, with Transformers' eager experts."""
    dequantised = transformers.AutoModelForCausalLM.from_pretrained(
        folders[1], quantization_config=transformers.Mxfp4Config(dequantize=True), experts_implementation="eager"
    ).float()  # old releases leave experts in bfloat16 whatever is asked for
    return load_mxfp4(folders[1], dtype=torch.float32), dequantised


def test_experts_stay_in_mxfp4(folders: tuple[Path, Path], models: tuple[Any, Any]):
    layer, experts = load_layer(folders[1], 1), models[0].model.layers[1].mlp.experts
    names = {name for name, _ in experts.named_parameters()}
    assert names == {
        *("gate_up_proj_blocks", "gate_up_proj_scales", "down_proj_blocks", "down_proj_scales"),
        *("gate_up_proj_bias", "down_proj_bias"),
    }
    np.testing.assert_array_equal(experts.gate_up_proj_blocks.numpy(), layer.gate_up_proj)
    np.testing.assert_array_equal(experts.down_proj_scales.numpy(), layer.down_scale)


def test_logits_are_those_of_the_dequantised_model(models: tuple[Any, Any]):
    ours, theirs = models
    tokens = torch.randint(61, (2, 40), generator=torch.Generator().manual_seed(1)).tolist()
    expected = logits_of(theirs, tokens)
    # Sums of 64 float32 products in another order differ by at most 64 * 2^-24 of their terms, in each of a few layers.
    bound = 1e-5 * expected.abs().max()
    assert (logits_of(ours, tokens) - expected).abs().max() <= bound
    ours.set_experts_implementation("eager")  # has no effect: only this package can compute them
    assert (logits_of(ours, tokens) - expected).abs().max() <= bound
    assert torch.equal(greedy(ours, [[5, 17, 3]], 24), greedy(theirs, [[5, 17, 3]], 24))


def test_what_is_saved_is_the_checkpoint_again(folders: tuple[Path, Path], models: tuple[Any, Any], tmp_path: Path):
    model = load_mxfp4(folders[1], dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    before, after = (load_file(folder / "model.safetensors") for folder in (folders[1], tmp_path))
    assert before.keys() == after.keys()
    for name, array in before.items():
        np.testing.assert_array_equal(after[name], array, err_msg=name)
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"]["quant_method"] == "mxfp4"
    tokens = [[5, 17, 3, 44, 9]]
    assert torch.equal(logits_of(load_mxfp4(tmp_path, dtype=torch.bfloat16), tokens), logits_of(model, tokens))


def test_a_checkpoint_that_lacks_tensors_of_experts_is_refused(folders: tuple[Path, Path], tmp_path: Path):
    for name in ("experts.down_proj_scales", "experts.gate_up_proj_bias"):
        with pytest.raises(CheckpointError, match=rf"^path: expected all tensors of experts in .*{BLOCK}.{name}"):
            load_mxfp4(changed(tmp_path, folders[1], {name: None}))


@pytest.fixture
def of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers believes that there is a GPU, and that it has the Hub's kernels."""
    from transformers.integrations import hub_kernels
    from transformers.quantizers import quantizer_mxfp4

    monkeypatch.setattr(quantizer_mxfp4, "get_current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(quantizer_mxfp4.Mxfp4HfQuantizer, "validate_environment", lambda *_, **__: None)
    monkeypatch.setattr(hub_kernels, "get_kernel", lambda *_, **__: None)


@pytest.mark.usefixtures("of_the_hub")
def test_blocks_that_transformers_replaces_are_refused_by_name(folders: tuple[Path, Path], tmp_path: Path):
    """Transformers' own blocks for MXFP4 would ignore, without an error, which implementation is asked for."""
    refused = r"^Mxfp4GptOssExperts: expected experts on .*flashmoe.integrations.transformers.load_mxfp4 leaves these"
    shutil.copy(folders[1] / "config.json", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")  # refused before weights are read
    with pytest.raises(flashmoe.InvalidArgument, match=refused):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="flashmoe")

    quantiser = Mxfp4HfQuantizer(transformers.Mxfp4Config(), pre_quantized=True)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folders[0]))
    quantiser.preprocess_model(model)
    assert type(model.model.layers[0].mlp.experts).__name__ == "Mxfp4GptOssExperts"
    for takes_the_name in (check, lambda model: model.set_experts_implementation("flashmoe")):
        with pytest.raises(flashmoe.InvalidArgument, match=refused):
            takes_the_name(model)


def test_what_is_not_in_mxfp4_is_refused(folders: tuple[Path, Path], models: tuple[Any, Any], tmp_path: Path):
    with pytest.raises(
        flashmoe.InvalidArgument, match=r"^path: expected a checkpoint with quant_method 'mxfp4', got Non"
    ):
        load_mxfp4(folders[0])
    with pytest.raises(
        flashmoe.InvalidArgument, match=r"^GptOssExperts: expected experts that are not quantised, got m"
    ):
        parallelize(models[0], max_tokens=64)
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    try:
        with pytest.raises(
            flashmoe.InvalidArgument, match=r"^path: expected a checkpoint whose experts are not in MXFP4"
        ):
            load_parallel(folders[1], max_tokens=64)
    finally:
        torch.distributed.destroy_process_group()
