"""`flashmoe.checkpoint`: every layout it reads, every malformed input it refuses, and the shipped layer."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from importlib import resources

import ml_dtypes
import numpy as np
import pytest
from flashmoe.checkpoint import OF_EXPERTS, load_hidden_states, load_layer, shipped_layer
from flashmoe.errors import CheckpointError, InvalidArgument
from flashmoe.slices import cut
from safetensors import safe_open
from safetensors.numpy import save_file

EXPERTS, HIDDEN, INTERMEDIATE = 4, 8, 6
BLOCK = "model.layers.1.mlp"
CONFIG = {
    "model_type": "qwen3_moe",
    "hidden_size": HIDDEN,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "hidden_act": "silu",
}


def random_array(*shape: int, dtype=ml_dtypes.bfloat16) -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape).astype(dtype)


def fused(block: str = BLOCK, dtype=ml_dtypes.bfloat16, gated: bool = True) -> dict[str, np.ndarray]:
    """One layer's tensors in the fused layout."""
    first, rows = ("gate_up_proj", 2 * INTERMEDIATE) if gated else ("up_proj", INTERMEDIATE)
    return {
        f"{block}.gate.weight": random_array(EXPERTS, HIDDEN, dtype=dtype),
        f"{block}.experts.{first}": random_array(EXPERTS, rows, HIDDEN, dtype=dtype),
        f"{block}.experts.down_proj": random_array(EXPERTS, HIDDEN, INTERMEDIATE, dtype=dtype),
    }


def per_expert(names=("gate_proj", "up_proj", "down_proj"), block: str = BLOCK) -> dict[str, np.ndarray]:
    """The tensors of `fused()`, one matrix per expert and projection, under the given names."""
    source = fused(BLOCK)
    gate_up, down = source[f"{BLOCK}.experts.gate_up_proj"], source[f"{BLOCK}.experts.down_proj"]
    tensors = {f"{block}.gate.weight": source[f"{BLOCK}.gate.weight"]}
    for i in range(EXPERTS):
        matrices = (gate_up[i, :INTERMEDIATE], gate_up[i, INTERMEDIATE:], down[i])
        for name, matrix in zip(names, matrices, strict=True):
            tensors[f"{block}.experts.{i}.{name}.weight"] = np.ascontiguousarray(matrix)
    return tensors


@pytest.fixture
def write(tmp_path):
    """Write tensors, and a config.json unless it is None, as a checkpoint folder; return the folder."""

    def write_folder(tensors, config=CONFIG):
        save_file(tensors, tmp_path / "model.safetensors")
        if config is not None:
            (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return write_folder


def without(config: dict, *keys: str, **changes) -> dict:
    return {key: value for key, value in config.items() if key not in keys} | changes


def assert_same_weights(layer, expected):
    for field in ("router", "gate_up_proj", "down_proj"):
        array, reference = getattr(layer, field), getattr(expected, field)
        assert array.dtype == reference.dtype
        np.testing.assert_array_equal(array, reference)


def refused(*parts: str):
    """Expect a CheckpointError whose message has the parts, in order."""
    return pytest.raises(CheckpointError, match="(?s)" + ".*".join(map(re.escape, parts)))


# --- What is read ---------------------------------------------------------------------------------------


def test_fused_layout(write):
    tensors = fused()
    layer = load_layer(write(tensors))
    assert (layer.name, layer.top_k, layer.renormalize, layer.activation) == (BLOCK, 2, True, "swiglu")
    assert (layer.experts, layer.hidden, layer.intermediate) == (EXPERTS, HIDDEN, INTERMEDIATE)
    assert layer.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(layer.router, tensors[f"{BLOCK}.gate.weight"])
    np.testing.assert_array_equal(layer.gate_up_proj, tensors[f"{BLOCK}.experts.gate_up_proj"])
    np.testing.assert_array_equal(layer.down_proj, tensors[f"{BLOCK}.experts.down_proj"])


def test_per_expert_layout_gives_the_same_arrays(write):
    expected = load_layer(write(fused()))
    assert_same_weights(load_layer(write(per_expert())), expected)


def test_mixtral_names_give_the_same_arrays(write):
    expected = load_layer(write(fused()))
    block = "model.layers.1.block_sparse_moe"
    config = without(CONFIG, "norm_topk_prob", model_type="mixtral")
    layer = load_layer(write(per_expert(("w1", "w3", "w2"), block), config))
    assert layer.name == block
    assert layer.renormalize is True
    assert_same_weights(layer, expected)


def test_more_than_ten_experts_keep_their_numeric_order(write):
    experts = 12
    tensors = {f"{BLOCK}.gate.weight": random_array(experts, HIDDEN, dtype=np.float32)}
    for i in range(experts):
        for name, shape in (("gate_proj", (2, HIDDEN)), ("up_proj", (2, HIDDEN)), ("down_proj", (HIDDEN, 2))):
            tensors[f"{BLOCK}.experts.{i}.{name}.weight"] = np.full(shape, i, np.float32)
    layer = load_layer(write(tensors))
    np.testing.assert_array_equal(layer.down_proj[:, 0, 0], np.arange(experts))
    np.testing.assert_array_equal(layer.gate_up_proj[:, -1, 0], np.arange(experts))


@pytest.mark.parametrize("hidden_act", ["silu", "gelu", "relu", "relu2", "gelu_pytorch_tanh"])
def test_ungated_experts(write, hidden_act):
    layer = load_layer(write(fused(gated=False), without(CONFIG, hidden_act=hidden_act)))
    assert layer.gate_up_proj.shape == (EXPERTS, INTERMEDIATE, HIDDEN)
    assert layer.activation == {"gelu_pytorch_tanh": "gelu_tanh"}.get(hidden_act, hidden_act)
    assert layer.intermediate == INTERMEDIATE


def test_ungated_per_expert_layout(write):
    tensors = {name: array for name, array in per_expert().items() if "gate_proj" not in name}
    layer = load_layer(write(tensors, without(CONFIG, hidden_act="relu")))
    assert layer.gate_up_proj.shape == (EXPERTS, INTERMEDIATE, HIDDEN)


def test_shards_are_followed(tmp_path):
    tensors = per_expert()
    shards = {name: f"model-0000{i % 2 + 1}-of-00002.safetensors" for i, name in enumerate(tensors)}
    for shard in set(shards.values()):
        save_file({name: tensors[name] for name in tensors if shards[name] == shard}, tmp_path / shard)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    layer = load_layer(tmp_path, top_k=1)
    np.testing.assert_array_equal(layer.gate_up_proj, fused()[f"{BLOCK}.experts.gate_up_proj"])


def test_a_file_uses_the_config_beside_it(write):
    assert load_layer(write(fused()) / "model.safetensors").top_k == 2


def test_without_a_config_the_arguments_decide(write):
    folder = write(fused(), config=None)
    assert load_layer(folder, top_k=3).renormalize is True
    layer = load_layer(folder, top_k=3, renormalize=False)
    assert (layer.top_k, layer.renormalize, layer.activation) == (3, False, "swiglu")


def test_arguments_override_the_config(write):
    layer = load_layer(write(fused()), top_k=1, renormalize=False)
    assert (layer.top_k, layer.renormalize) == (1, False)


def test_a_config_without_norm_topk_prob_does_not_renormalize(write):
    assert load_layer(write(fused(), without(CONFIG, "norm_topk_prob"))).renormalize is False


def test_a_nested_text_config_is_used(write):
    assert load_layer(write(fused(), {"text_config": CONFIG})).top_k == 2


def test_the_first_moe_layer_is_the_lowest_numbered(write):
    dense = {"model.layers.0.mlp.gate_proj.weight": random_array(4, HIDDEN)}
    folder = write(fused("model.layers.10.mlp") | fused("model.layers.2.mlp") | dense)
    assert load_layer(folder).name == "model.layers.2.mlp"
    assert load_layer(folder, 10).name == "model.layers.10.mlp"


# --- What is refused: files -----------------------------------------------------------------------------


def test_missing_file(tmp_path):
    with refused("path", "expected", "absent.safetensors", "got", "no such file"):
        load_layer(tmp_path / "absent.safetensors")


def test_folder_without_tensors(tmp_path):
    with refused("path", "expected model.safetensors or model.safetensors.index.json", "got"):
        load_layer(tmp_path)


@pytest.mark.parametrize("content", [b"", b"not a tensor file at all", b"\xff" * 64, b"PK\x03\x04" + bytes(500)])
def test_not_safetensors(tmp_path, content):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with refused("path", "expected a complete safetensors file", "got"):
        load_layer(path)


@pytest.mark.parametrize("keep", [4, 40, 500, -1])
def test_truncated_file(write, keep):
    path = write(fused()) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with refused("path", "expected a complete safetensors file", str(path), "got"):
        load_layer(path)


@pytest.mark.parametrize("content", ["{", "[]", "\udcff"])
def test_malformed_config(write, content):
    folder = write(fused())
    (folder / "config.json").write_bytes(content.encode(errors="surrogateescape"))
    with refused("path", "JSON", "config.json", "got"):
        load_layer(folder)


def write_index(folder, index):
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("index", [{}, {"weight_map": []}, {"weight_map": {"a": 1}}])
def test_malformed_index(tmp_path, index):
    with refused("weight_map", "expected an object", "got"):
        load_layer(write_index(tmp_path, index))


def test_index_that_leaves_its_folder(tmp_path):
    with refused("weight_map", "expected plain file names", "../other.safetensors"):
        load_layer(write_index(tmp_path, {"weight_map": {f"{BLOCK}.gate.weight": "../other.safetensors"}}))


def test_missing_shard(tmp_path):
    shards = dict.fromkeys(fused(), "model-00001-of-00001.safetensors")
    with refused("path", "model-00001-of-00001.safetensors", "got no such file"):
        load_layer(write_index(tmp_path, {"weight_map": shards}), top_k=1)


def test_shard_without_its_tensor(write):
    folder = write({"other": random_array(2, 2)})
    with refused("path", f"expected a tensor {BLOCK}.gate.weight", "model.safetensors", "got no tensor of that name"):
        load_layer(write_index(folder, {"weight_map": dict.fromkeys(fused(), "model.safetensors")}), top_k=1)


# --- What is refused: the layer -------------------------------------------------------------------------


def test_absent_layer_lists_those_present(write):
    folder = write(fused("model.layers.3.mlp") | fused("model.layers.1.mlp"))
    with refused("layer", "expected one of the MoE layers [1, 3]", "got 2"):
        load_layer(folder, 2)


def test_no_moe_layer(write):
    with refused("path", "expected a checkpoint with an MoE layer", "got"):
        load_layer(write({"model.layers.0.mlp.gate_proj.weight": random_array(4, 4)}))


def test_two_blocks_with_one_layer_index(write):
    with refused("path", "expected one MoE block in layer 1", "model.layers.1.mlp", "visual.layers.1.mlp"):
        load_layer(write(fused() | fused("visual.layers.1.mlp")))


def test_layers_that_predict_further_tokens_are_none_of_the_model(write):
    assert load_layer(write(fused("mtp.layers.0.mlp") | fused())).name == BLOCK


@pytest.mark.parametrize("missing", ["gate.weight", "experts.gate_up_proj"])
def test_missing_tensor(write, missing):
    tensors = fused()
    del tensors[f"{BLOCK}.{missing}"]
    with refused("path", "expected a tensor", missing.partition(".")[0], "got no tensor of that name"):
        load_layer(write(tensors))


@pytest.mark.parametrize("projection", ["gate_proj", "up_proj", "down_proj"])
@pytest.mark.parametrize("expert", [0, EXPERTS - 1])
def test_missing_expert(write, expert, projection):
    tensors = per_expert()
    del tensors[f"{BLOCK}.experts.{expert}.{projection}.weight"]
    with refused("path", f"expected a tensor {BLOCK}.experts.{expert}.{projection}.weight", "got"):
        load_layer(write(tensors))


@pytest.mark.parametrize("extra", ["experts.4.up_proj.weight", "router_norm.weight", "gate.e_score_correction_bias"])
def test_tensors_the_layer_cannot_express(write, extra):
    with refused(BLOCK, "expected a router and routed experts alone, as Qwen3-MoE has them", "got also", extra):
        load_layer(write(per_expert() | {f"{BLOCK}.{extra}": random_array(INTERMEDIATE, HIDDEN)}))


# --- What is refused: shapes and dtypes -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape", "blamed"),
    [
        ("gate.weight", (EXPERTS * HIDDEN,), "gate.weight"),
        ("gate.weight", (0, HIDDEN), "gate.weight"),
        ("gate.weight", (EXPERTS + 1, HIDDEN), "down_proj"),
        ("gate.weight", (EXPERTS, HIDDEN + 1), "down_proj"),
        ("experts.gate_up_proj", (EXPERTS, INTERMEDIATE, HIDDEN), "gate_up_proj"),
        ("experts.gate_up_proj", (EXPERTS, HIDDEN, 2 * INTERMEDIATE), "gate_up_proj"),
        ("experts.gate_up_proj", (EXPERTS - 1, 2 * INTERMEDIATE, HIDDEN), "gate_up_proj"),
        ("experts.down_proj", (EXPERTS, INTERMEDIATE, HIDDEN), "down_proj"),
        ("experts.down_proj", (EXPERTS, HIDDEN, 0), "down_proj"),
        ("experts.down_proj", (EXPERTS, HIDDEN, INTERMEDIATE - 1), "gate_up_proj"),
        ("experts.down_proj", (HIDDEN, INTERMEDIATE), "down_proj"),
    ],
)
def test_fused_shapes_that_disagree(write, name, shape, blamed):
    with refused(BLOCK, blamed, "expected", "got"):
        load_layer(write(fused() | {f"{BLOCK}.{name}": random_array(*shape)}))


@pytest.mark.parametrize(
    ("projection", "shape"),
    [
        ("gate_proj", (INTERMEDIATE + 1, HIDDEN)),
        ("down_proj", (HIDDEN, INTERMEDIATE + 1)),
        ("up_proj", (INTERMEDIATE * HIDDEN,)),
    ],
)
def test_one_expert_of_another_shape(write, projection, shape):
    with refused(f"{BLOCK}.experts", "expected", "one shape", "got", str(list(shape))):
        load_layer(write(per_expert() | {f"{BLOCK}.experts.2.{projection}.weight": random_array(*shape)}))


def test_gate_and_up_of_different_shapes(write):
    wide = {f"{BLOCK}.experts.{i}.up_proj.weight": random_array(INTERMEDIATE + 2, HIDDEN) for i in range(EXPERTS)}
    with refused(f"{BLOCK}.experts", "expected gate and up projections", "got"):
        load_layer(write(per_expert() | wide))


@pytest.mark.parametrize(("dtype", "name"), [(np.int8, "I8"), (np.int32, "I32"), (np.float64, "F64")])
def test_wrong_dtype(write, dtype, name):
    with refused("gate.weight dtype", "expected one of F32, F16, BF16", f"got {name}"):
        load_layer(write(fused(dtype=dtype)))


@pytest.mark.parametrize("name", ["F8_E4M3", "BOOL"])
def test_dtype_that_numpy_may_not_have(tmp_path, name):
    header = {f"{BLOCK}.gate.weight": {"dtype": name, "shape": [2, 4], "data_offsets": [0, 8]}}
    encoded = json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + bytes(8))
    with refused("gate.weight dtype", "expected one of F32, F16, BF16", f"got {name}"):
        load_layer(path, top_k=1)


def test_scalar_router(write):
    with refused("gate.weight", "expected a non-empty array [E, H]", "got shape []"):
        load_layer(write(fused() | {f"{BLOCK}.gate.weight": np.array(1, ml_dtypes.bfloat16)}))


def test_mixed_dtypes(write):
    router = {f"{BLOCK}.gate.weight": random_array(EXPERTS, HIDDEN, dtype=np.float16)}
    with refused("dtype", "expected one dtype", "got mixed bfloat16, float16"):
        load_layer(write(fused() | router))


def test_mixed_dtypes_between_experts(write):
    odd = {f"{BLOCK}.experts.2.up_proj.weight": random_array(INTERMEDIATE, HIDDEN, dtype=np.float16)}
    with refused("dtype", "expected one dtype", "got mixed bfloat16, float16"):
        load_layer(write(per_expert() | odd))


def test_hidden_size_other_than_the_config(write):
    with refused("hidden size", "expected 16", "config.json", f"got {HIDDEN}"):
        load_layer(write(fused(), without(CONFIG, hidden_size=16)))


# --- What is refused: the routing rule ------------------------------------------------------------------


def test_missing_top_k(write):
    with refused("top_k", "expected num_experts_per_tok", "got neither"):
        load_layer(write(fused(), config=None))


@pytest.mark.parametrize("top_k", [0, -1, EXPERTS + 1, 1.5, "2", True])
def test_top_k_out_of_range(write, top_k):
    folder = write(fused(), without(CONFIG, num_experts_per_tok=top_k))
    with refused("top_k", f"expected an integer from 1 to the {EXPERTS} experts", f"got {top_k!r}"):
        load_layer(folder)
    with refused("top_k", "got"):
        load_layer(folder, top_k=top_k)


def test_renormalize_that_is_no_boolean(write):
    with refused("renormalize", "expected true or false", "got 'yes'"):
        load_layer(write(fused(), without(CONFIG, norm_topk_prob="yes")))


@pytest.mark.parametrize(("gated", "hidden_act"), [(True, "relu"), (True, ["silu"]), (False, "tanh"), (False, None)])
def test_activation_the_layer_cannot_express(write, gated, hidden_act):
    with refused("activation", "expected", "got", repr(hidden_act)):
        load_layer(write(fused(gated=gated), without(CONFIG, hidden_act=hidden_act)))


def test_ungated_experts_need_an_activation(write):
    folder = write(fused(gated=False), config=None)
    with refused(
        "activation", "expected silu or swish or gelu or gelu_python or relu or relu2 or", "for ungated", "got"
    ):
        load_layer(folder, top_k=1)
    assert load_layer(folder, top_k=1, activation="relu").activation == "relu"


# --- Hidden states, and the shipped layer ---------------------------------------------------------------


def test_hidden_states(tmp_path):
    path = tmp_path / "states.safetensors"
    states = random_array(5, HIDDEN)
    save_file({"hidden_states": states}, path)
    np.testing.assert_array_equal(load_hidden_states(path), states)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"other": random_array(2, 2)}, "expected a tensor hidden_states"),
        ({"hidden_states": random_array(2, 3, 4)}, "expected a non-empty array [T, H]"),
        ({"hidden_states": random_array(0, 4)}, "expected a non-empty array [T, H]"),
        ({"hidden_states": np.zeros((2, 2), np.int32)}, "expected one of F32, F16, BF16"),
    ],
)
def test_malformed_hidden_states(tmp_path, tensors, message):
    path = tmp_path / "states.safetensors"
    save_file(tensors, path)
    with refused(message, "got"):
        load_hidden_states(path)


def test_missing_hidden_states(tmp_path):
    with refused("path", "got no such file"):
        load_hidden_states(tmp_path / "absent.safetensors")


def test_shipped_layer_is_complete():
    layer, hidden_states = shipped_layer()
    assert layer.name == "model.layers.1.mlp"
    assert layer.router.shape == (16, 256)
    assert layer.gate_up_proj.shape == (16, 2 * 128, 256)
    assert layer.down_proj.shape == (16, 256, 128)
    assert hidden_states.shape == (2048, 256)
    assert layer.dtype == hidden_states.dtype == ml_dtypes.bfloat16
    assert (layer.top_k, layer.renormalize, layer.activation) == (4, True, "swiglu")
    for array in (layer.router, layer.gate_up_proj, layer.down_proj, hidden_states):
        assert np.isfinite(array.astype(np.float32)).all()
        assert array.astype(np.float32).std() > 0


def router_probabilities(layer, hidden_states) -> np.ndarray:
    """Softmax over the experts, float64 [T, E]."""
    logits = hidden_states.astype(np.float64) @ layer.router.astype(np.float64).T
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def test_shipped_hidden_states_route_unevenly():
    layer, hidden_states = shipped_layer()
    order = np.argsort(-router_probabilities(layer, hidden_states), axis=1)
    load = np.bincount(order[:, : layer.top_k].ravel(), minlength=layer.experts)
    assert load.sum() == len(hidden_states) * layer.top_k
    assert load.max() > 2 * load.mean()
    assert load.min() > 0


def test_shipped_router_was_trained():
    """A router with its initial weights, of scale 0.02, would give its first choice a far lower probability."""
    layer, hidden_states = shipped_layer()
    first_choice = router_probabilities(layer, hidden_states).max(axis=1)
    assert np.median(first_choice) > 4 / layer.experts


def test_shipped_token_ids_belong_to_the_hidden_states():
    states = resources.files("flashmoe") / "assets" / "tiny-qwen3-moe-hidden-states.safetensors"
    with safe_open(states, framework="np") as file:
        token_ids = file.get_tensor("token_ids")
    assert (token_ids.shape, token_ids.dtype) == ((2048,), np.int32)
    assert token_ids.min() >= 0
    assert token_ids.max() < 1024


def test_the_shipped_folder_is_a_plain_checkpoint():
    """It has only one safetensors file, because some loaders take every such file for a part of the model."""
    folder = resources.files("flashmoe") / "assets" / "tiny-qwen3-moe"
    assert [file.name for file in folder.iterdir() if file.name.endswith(".safetensors")] == ["model.safetensors"]


def test_shipped_files_stay_small():
    folder = resources.files("flashmoe") / "assets" / "tiny-qwen3-moe"
    names = ("config.json", "model.safetensors", "tokenizer.json")
    assert sum((folder / name).stat().st_size for name in names) <= 8_000_000


# --- A rank's part of a layer ---------------------------------------------------------------------------


@dataclass
class Reads:
    """How many bytes `os.preadv` has read in all."""

    bytes: int = 0


@pytest.fixture
def reads(monkeypatch) -> Reads:
    counted, preadv = Reads(), os.preadv

    def count(descriptor, buffers, offset):
        got = preadv(descriptor, buffers, offset)
        counted.bytes += got
        return got

    monkeypatch.setattr(os, "preadv", count)
    return counted


def of_gpt_oss() -> dict[str, np.ndarray]:
    """One layer's tensors as gpt-oss has them: transposed and interleaved, with biases."""
    return {
        f"{BLOCK}.router.weight": random_array(EXPERTS, HIDDEN),
        f"{BLOCK}.router.bias": random_array(EXPERTS),
        f"{BLOCK}.experts.gate_up_proj": random_array(EXPERTS, HIDDEN, 2 * INTERMEDIATE),
        f"{BLOCK}.experts.gate_up_proj_bias": random_array(EXPERTS, 2 * INTERMEDIATE),
        f"{BLOCK}.experts.down_proj": random_array(EXPERTS, INTERMEDIATE, HIDDEN),
        f"{BLOCK}.experts.down_proj_bias": random_array(EXPERTS, HIDDEN),
    }


GPT_OSS = {"model_type": "gpt_oss", "num_experts_per_tok": 2, "hidden_act": "silu", "swiglu_limit": 7.0}
LAYOUTS = {
    "merged": (fused, CONFIG),
    "no gate": (lambda: fused(gated=False), without(CONFIG, hidden_act="relu")),
    "one by one": (per_expert, CONFIG),
    "gpt-oss": (of_gpt_oss, GPT_OSS),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("slices", "held"), [(1, [1, 3]), (1, [2]), (2, [0, 3, 4]), (3, [5]), (3, [0, 1, 2, 11]), (6, None), (2, None)]
)
def test_of_a_rank_s_part_no_other_byte_is_read(write, reads, layout: str, slices: int, held: list[int] | None):
    tensors, config = LAYOUTS[layout]
    folder = write(tensors(), config)
    whole = load_layer(folder)
    assert (whole.slices, whole.held, reads.bytes) == (1, None, 0)
    part = load_layer(folder, slices=slices, held=held)
    given = {name: getattr(whole, name) for name in OF_EXPERTS}
    form = {name: whole.options.get(name, False) for name in ("interleaved", "transposed")}
    expected = cut(slices, *given.values(), activation=whole.activation, **form)
    mine = list(range(EXPERTS * slices)) if held is None else held
    for name, each in expected.items():
        np.testing.assert_array_equal(getattr(part, name), each[mine], err_msg=name)
        assert getattr(part, name).dtype == each.dtype and getattr(part, name).flags.c_contiguous
    np.testing.assert_array_equal(part.router, whole.router)
    assert (part.experts, part.intermediate, part.slices) == (EXPERTS, INTERMEDIATE // slices, slices)
    assert part.held == (None if held is None else tuple(held))
    assert part.rule() == whole.rule() | ({"slices": slices} if slices > 1 else {})
    # Every byte of the part is read once, except the down_bias of an expert's later slices, which is 0 and is not read.
    later = 0 if whole.down_bias is None else sum(each % slices != 0 for each in mine) * HIDDEN
    assert reads.bytes == 2 * (sum(each[mine].size for each in expected.values()) - later)


@pytest.mark.parametrize(
    ("slices", "held", "message"),
    [
        (4, None, "slices: expected a divisor of I=6, got 4"),
        (0, None, r"slices: expected an integer in \[1, 8192\], got 0"),
        (2, [8], r"held: expected an integer in \[0, 7\], got 8"),
        (1, [1, 0], r"held: expected ids that ascend, one or more, got \(1, 0\)"),
        (1, [], r"held: expected ids that ascend, one or more, got \(\)"),
    ],
)
def test_refused_parts(write, slices: int, held: list[int] | None, message: str):
    with pytest.raises(InvalidArgument, match=message):
        load_layer(write(fused()), slices=slices, held=held)


def test_a_file_that_is_cut_off_while_a_part_is_read(write, monkeypatch):
    folder = write(fused())
    monkeypatch.setattr(os, "preadv", lambda descriptor, buffers, offset: 0)
    with refused("a file that ends within", f"{BLOCK}.experts"):
        load_layer(folder, held=[1])
