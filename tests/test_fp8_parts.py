"""Parts of layers in FP8: some of the experts, or slices of experts, with their scales."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import flashmoe
import ml_dtypes
import numpy as np
import pytest
from flashmoe.checkpoint import OF_EXPERTS, MoELayer, load_layer
from flashmoe.errors import CheckpointError, InvalidArgument
from flashmoe.launch import run_ranks
from flashmoe.placement import hybrid, local_experts
from flashmoe.quantize import dequantize, quantize_layer, quantize_weights
from flashmoe.slices import cut
from flashmoe.spec import FP8
from safetensors.numpy import save_file

BLOCK = "model.layers.1.mlp"
CONFIG = {"model_type": "qwen3_moe", "hidden_act": "silu", "num_experts_per_tok": 2, "norm_topk_prob": True}
EXPERTS, INNER, HIDDEN = 4, 512, 264
"""H = 264 has three blocks of columns, an odd number: 128, 128 and 8."""
ODD = 200
"""An I for which neither I rows (gate or up alone) nor 2 I rows (both) are whole blocks of 128."""
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def matrices(inner: int = INNER) -> dict[str, np.ndarray]:
    """The matrices of all experts, by projection. Experts differ in magnitude, and so do neighbouring blocks of 128."""
    random = np.random.default_rng(1)
    made = {}
    for name, (rows, columns) in zip(PROJECTIONS, [(inner, HIDDEN), (inner, HIDDEN), (HIDDEN, inner)], strict=True):
        sizes = 2.0 ** (np.arange(rows)[:, None] // 128 - np.arange(columns) // 128)
        made[name] = random.standard_normal((EXPERTS, rows, columns)) * sizes * (1 + np.arange(EXPERTS)[:, None, None])
    return made


def one_by_one(scales: str, inner: int = INNER) -> dict[str, np.ndarray]:
    """A checkpoint's tensors, one for each expert and projection. `scales`: one of `SCALES`."""
    tensors = {}
    for projection, of_all in matrices(inner).items():
        for expert, matrix in enumerate(of_all):
            name = f"{BLOCK}.experts.{expert}.{projection}.weight"
            tensors[name], scale = quantize_weights(matrix, scales.split()[0])
            shape = {"row flat": (-1,), "tensor flat": (), "tensor": (1,)}.get(scales, scale.shape)
            tensors[f"{name}_scale_inv"] = scale.reshape(shape)
    return tensors


def merged(scales: str, inner: int = INNER) -> dict[str, np.ndarray]:
    gate, up, down = matrices(inner).values()
    tensors = {}
    for name, array, halves in (("gate_up_proj", np.concatenate([gate, up], 1), 2), ("down_proj", down, 1)):
        tensors[f"{BLOCK}.experts.{name}"], scale = quantize_weights(array, scales.split()[0], halves)
        shape = {"row flat": (EXPERTS, -1), "tensor flat": (EXPERTS,)}.get(scales, scale.shape)
        tensors[f"{BLOCK}.experts.{name}_scale_inv"] = scale.reshape(shape)
    return tensors


LAYOUTS = {"one by one": one_by_one, "merged": merged}
SCALES = ("block", "row", "row flat", "tensor", "tensor flat")
"""``flat``: the scales are stored without those axes of theirs that have one element."""
PARTS = [(1, [1, 3]), (1, [2]), (2, [0, 3, 4]), (2, None), (4, [5]), (4, [0, 1, 2, 11, 15])]


def write(folder: Path, tensors: dict[str, np.ndarray]) -> Path:
    router = np.random.default_rng(2).standard_normal((EXPERTS, HIDDEN)).astype(ml_dtypes.bfloat16)
    save_file(tensors | {f"{BLOCK}.gate.weight": router}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def values(layer: MoELayer) -> list[np.ndarray]:
    """The layer's matrices gate, up and down, dequantised exactly."""
    gate_up = dequantize(layer.gate_up_proj, layer.gate_up_scale, 2)
    return [*np.split(gate_up, 2, axis=1), dequantize(layer.down_proj, layer.down_scale)]


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_of_it(tmp_path, layout: str, scales: str):
    """A layer that is loaded whole has the matrices' numbers, rounded to e4m3, whatever the shape of the scales."""
    layer = load_layer(write(tmp_path, LAYOUTS[layout](scales)))
    assert layer.weight_dtype == FP8
    # If gate and up have a scale each, the merged matrix gets a scale for each row.
    assert layer.weight_scales == ("row" if (layout, scales[:6]) == ("one by one", "tensor") else scales.split()[0])
    for ours, matrix in zip(values(layer), matrices().values(), strict=True):
        step = {"b": (-2, -1), "r": -1, "t": (-2, -1)}[scales[0]]  # axes: no scale exceeds the largest along them / 448
        assert (abs(ours - matrix) <= abs(matrix) / 16 + abs(matrix).max(step, keepdims=True) / 448 * 2.0**-10).all()


@pytest.mark.parametrize(("slices", "held"), PARTS)
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_part_is_what_is_cut_of_all(tmp_path, layout: str, scales: str, slices: int, held: list[int] | None):
    inner = ODD if slices == 1 else INNER
    folder = write(tmp_path, LAYOUTS[layout](scales, inner))
    whole, part = load_layer(folder), load_layer(folder, slices=slices, held=held)
    mine = list(range(EXPERTS * slices)) if held is None else held
    given = {name: getattr(whole, name) for name in OF_EXPERTS}
    for name, each in cut(slices, *given.values()).items():
        ours = getattr(part, name)
        assert (ours.shape, ours.dtype) == (each[mine].shape, each.dtype)
        np.testing.assert_array_equal(ours, each[mine], err_msg=name)
    assert (part.weight_scales, part.intermediate, part.slices) == (whole.weight_scales, inner // slices, slices)
    # The dequantised numbers, too, are those of the whole layer, cut by hand.
    width = inner // slices
    for place, (expert, n) in enumerate(divmod(id, slices) for id in mine):
        columns = slice(n * width, (n + 1) * width)
        gate, up, down = (each[place] for each in values(part))
        whole_gate, whole_up, whole_down = (each[expert] for each in values(whole))
        np.testing.assert_array_equal(gate, whole_gate[columns])
        np.testing.assert_array_equal(up, whole_up[columns])
        np.testing.assert_array_equal(down, whole_down[:, columns])


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_slice_that_cuts_a_block_is_refused(tmp_path, monkeypatch, layout: str, scales: str):
    """It is refused with any kind of scales, because intermediate rows are quantised by blocks; no tensor is read."""
    folder = write(tmp_path, LAYOUTS[layout](scales, 256 + 128))
    message = "slices: expected slices of a multiple of 128 columns .*, got 2 slices of I=192"
    with pytest.raises(InvalidArgument, match=message), monkeypatch.context() as patched:
        patched.setattr(os, "preadv", lambda *_: pytest.fail("a tensor is read"))
        load_layer(folder, slices=2, held=[1])
    with pytest.raises(InvalidArgument, match=message):
        cut(2, *(getattr(load_layer(folder), name) for name in OF_EXPERTS))


def test_scales_of_two_kinds_are_refused(tmp_path):
    tensors = merged("block")
    name = f"{BLOCK}.experts.down_proj_scale_inv"
    with pytest.raises(CheckpointError, match="down_scale: expected a scale for each block, as gate_up_scale has"):
        load_layer(write(tmp_path, tensors | {name: merged("row")[name]}), slices=2)
    layer = load_layer(write(tmp_path, tensors))
    layer = replace(layer, down_scale=load_layer(write(tmp_path, merged("row"))).down_scale)
    with pytest.raises(InvalidArgument, match="down_scale: expected a scale for each block, as gate_up_scale has, got"):
        cut(2, *(getattr(layer, name) for name in OF_EXPERTS))


# ---- Modules -------------------------------------------------------------------------------------------------


def _modules_of_parts(rank: int, ranks: int, name: str, path: str) -> tuple[bool, float]:
    """Whether a module made of a rank's part has the state of one that was made of the whole layer and cut; and the
    relative difference between its results and those of whole experts on one rank."""
    import torch
    from flashmoe.nn import MoE

    sizes = {"max_tokens": 16, "hidden": HIDDEN, "experts": EXPERTS, "top_k": 2, "weight_dtype": FP8, "processors": 1}
    group = {"rank": rank, "ranks": ranks, "name": name, "slices": 2}
    whole, placement = load_layer(path), hybrid(EXPERTS, ranks, 2)
    part = load_layer(path, slices=2, held=local_experts(placement, rank))
    with (
        torch.no_grad(),
        flashmoe.Context(intermediate=INNER, **sizes) as alone,
        flashmoe.Context(intermediate=INNER // 2, placement=placement, **group, **sizes) as context,
    ):
        ours, theirs = MoE.from_layer(context, part), MoE.from_layer(context, whole, slices=2)
        state = theirs.state_dict()
        same = [torch.equal(each.view(torch.uint8), state[name].view(torch.uint8)) for name, each in
                ours.state_dict().items()]  # fmt: skip
        assert len(same) == len(state) == 5
        x = torch.randn(16, HIDDEN, dtype=torch.bfloat16)
        expected, y = MoE.from_layer(alone, whole)(x).float(), ours(x).float()
        return all(same), float((y - expected).norm() / expected.norm())


@pytest.mark.parametrize("scales", ["block", "tensor flat"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_module_of_a_rank_s_part(tmp_path, layout: str, scales: str):
    pytest.importorskip("torch")
    folder = write(tmp_path, LAYOUTS[layout](scales))
    for same, error in run_ranks(2, _modules_of_parts, [(str(folder),)] * 2):
        assert same
        assert error < 2.0**-7  # rows and sums are rounded to bfloat16


# ---- Quantised afterwards ------------------------------------------------------------------------------------


def plain(folder: Path, inner: int = INNER) -> Path:
    """Writes a checkpoint of `matrices` in bfloat16."""
    return write(folder, {f"{BLOCK}.experts.{expert}.{projection}.weight": matrix.astype(ml_dtypes.bfloat16)
                          for projection, of_all in matrices(inner).items()
                          for expert, matrix in enumerate(of_all)})  # fmt: skip


@pytest.mark.parametrize(("slices", "held"), PARTS)
@pytest.mark.parametrize("scales", ["block", "row", "tensor"])
def test_a_part_is_quantised(tmp_path, scales: str, slices: int, held: list[int] | None):
    """With scales of blocks, the part is what quantising the whole layer and then cutting it gives. With scales of rows
    or matrices, each slice has scales of its own."""
    folder = plain(tmp_path, ODD if slices == 1 else INNER)
    whole, part = load_layer(folder), load_layer(folder, slices=slices, held=held)
    ours = quantize_layer(part, scales)
    assert (ours.slices, ours.held, ours.weight_scales) == (part.slices, part.held, scales)
    mine = list(range(EXPERTS * slices)) if held is None else held
    first = whole.gate_up_proj, whole.down_proj
    if scales != "block":
        first = cut(slices, *first).values()
    (up, up_scale), (down, down_scale) = (
        quantize_weights(*each) for each in zip(first, [scales] * 2, (2, 1), strict=True)
    )
    expected = {"gate_up_proj": up, "down_proj": down, "gate_up_scale": up_scale, "down_scale": down_scale}
    if scales == "block":
        expected = cut(slices, up, down, gate_up_scale=up_scale, down_scale=down_scale)
    for name, each in expected.items():
        np.testing.assert_array_equal(getattr(ours, name), each[mine], err_msg=name)


def test_a_part_whose_slices_cut_blocks_is_not_quantised(tmp_path):
    """It is refused, because no call would take it."""
    part = load_layer(plain(tmp_path, 384), slices=2)
    with pytest.raises(InvalidArgument, match=r"slices: expected slices of a multiple of 128 columns .*, got 2 slices"):
        quantize_layer(part)


def _quantised_part(rank: int, ranks: int, name: str, path: str) -> Any:
    placement = hybrid(EXPERTS, ranks, 2)
    part = quantize_layer(load_layer(path, slices=2, held=local_experts(placement, rank)))
    x = np.random.default_rng(3).standard_normal((16, HIDDEN)).astype(ml_dtypes.bfloat16)
    sizes = {"max_tokens": 16, "hidden": HIDDEN, "experts": EXPERTS, "top_k": 2, "weight_dtype": FP8, "processors": 1}
    group = {"rank": rank, "ranks": ranks, "name": name, "slices": 2, "placement": placement}
    with flashmoe.Context(intermediate=INNER // 2, **group, **sizes) as context:
        y = flashmoe.moe(context, x, **part.tensors(), **part.rule()).astype(np.float64)
    with flashmoe.Context(intermediate=INNER, **sizes) as alone:
        whole = quantize_layer(load_layer(path))
        expected = flashmoe.moe(alone, x, **whole.tensors(), **whole.rule()).astype(np.float64)
    return float(np.linalg.norm(y - expected) / np.linalg.norm(expected))


def test_a_quantised_part_is_computed(tmp_path):
    for error in run_ranks(2, _quantised_part, [(str(plain(tmp_path)),)] * 2):
        assert error < 2.0**-7  # rows and sums are rounded to bfloat16


# ---- Biases ----------------------------------------------------------------------------------------------------------


def _call_with_biases(rank: int, ranks: int, name: str, spoiled: bool) -> float:
    """The relative difference between results of sliced and of whole experts with biases. `spoiled`: every slice of an
    expert has `down_bias`, instead of the first slice alone."""
    random = np.random.default_rng(4)
    gate_up, down = (
        random.standard_normal(shape) for shape in ((EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, HIDDEN, INNER))
    )
    (gate_up, gate_up_scale), (down, down_scale) = quantize_weights(gate_up, halves=2), quantize_weights(down)
    biases = [random.standard_normal((EXPERTS, width)).astype(ml_dtypes.bfloat16) for width in (2 * INNER, HIDDEN)]
    parts = cut(2, gate_up, down, *biases, gate_up_scale, down_scale)
    if spoiled:
        parts["down_bias"] = np.repeat(biases[1], 2, 0)
    placement = [0, 0, 0, 0, 1, 1, 1, 1]  # either rank has first slices and second slices
    mine = local_experts(placement, rank)
    x, router = (random.standard_normal((n, HIDDEN)).astype(ml_dtypes.bfloat16) for n in (16, EXPERTS))
    sizes = {"max_tokens": 16, "hidden": HIDDEN, "experts": EXPERTS, "top_k": 2, "weight_dtype": FP8, "processors": 1}
    group = {"rank": rank, "ranks": ranks, "name": name, "slices": 2, "placement": placement}
    with flashmoe.Context(intermediate=INNER // 2, **group, **sizes) as context:
        held = {name: each[mine] for name, each in parts.items()}
        y = flashmoe.moe(context, x, **held, router=router, top_k=2, slices=2)
    with flashmoe.Context(intermediate=INNER, **sizes) as alone:
        whole = {"gate_up_bias": biases[0], "down_bias": biases[1], "gate_up_scale": gate_up_scale}
        expected = flashmoe.moe(alone, x, gate_up, down, **whole, down_scale=down_scale, router=router, top_k=2)
    return float(np.linalg.norm(y.astype(np.float64) - expected) / np.linalg.norm(expected.astype(np.float64)))


def test_biases_of_slices():
    """Biases have y's type, whatever type the matrices have. Only the first slice of an expert may have `down_bias`."""
    for error in run_ranks(2, _call_with_biases, [(False,)] * 2):
        assert error < 2.0**-7  # rows and sums are rounded to bfloat16
    with pytest.raises(
        flashmoe.FlashMoEError, match=r"down_bias: expected 0 in all slices but the first, got .* of slice 1 of"
    ):
        run_ranks(2, _call_with_biases, [(True,)] * 2)
