"""Loads a layer, or a rank's part of it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import numpy as np

from ..slices import cut_scales
from ..spec import Encoding, halves_of
from ..system.foreign import checkpoint_error, shown
from ..weights.scales import SCALE_OF
from ..weights.shares import Cut, checked_ids
from .architectures import architecture_of, rule_of
from .checks import check_config, check_scales, check_whole_blocks, checked_encoding, checked_sizes
from .files import StoredTensors, header_of, local_path, model_config
from .layer import SHARED, MoELayer
from .plan import find_block, odd_width, plan_block
from .planned import Planned, read_planned


def load_layer(
    path: str | Path,
    layer: int | None = None,
    *,
    top_k: int | None = None,
    renormalize: bool | None = None,
    activation: str | None = None,
    slices: int = 1,
    held: Sequence[int] | None = None,
) -> MoELayer:
    """Read one MoE layer, or a rank's part of it.

    Args:
        path: a ``.safetensors`` file, or a checkpoint folder holding ``model.safetensors``, or
            ``model.safetensors.index.json`` and its shards. The ``config.json`` beside the tensors, if there
            is one, says how the layer routes and activates: its ``model_type`` is one of
            `flashmoe.checkpoint.architectures.ARCHITECTURES`, or missing.
        layer: the decoder layer's index; None takes the first that is an MoE layer.
        top_k, renormalize: override the config's ``num_experts_per_tok`` and ``norm_topk_prob``. Without a
            ``config.json``, `top_k` is required and `renormalize` is True if not given.
        activation: one of `flashmoe.spec.ACTIVATIONS`, overrides the config's ``hidden_act``. Without a
            ``config.json``, gated experts are taken to be ``swiglu``.
        slices: into how many slices experts are cut (see `flashmoe.slices`).
        held: ids of the experts (with `slices`: of their slices) whose tensors are read, ascending; default: all. The
            weights of other experts are not read. `flashmoe.placement.local_experts` returns the ids of a rank.

    Raises:
        InvalidArgument: `slices` is no divisor of I, or cuts blocks of quantised matrices; or `held` are no such ids.
        CheckpointError: a file is missing, truncated or not what its name says; the layer is absent or lacks
            a tensor; the block holds a tensor that `MoELayer` has no place for, or packed integers; shapes or
            dtypes disagree with each other or with the config; or the model or its routing rule is unknown.
    """
    path = local_path(path)
    tensors = StoredTensors.find(path)
    config = model_config(path if os.path.isdir(path) else path.parent)
    row = architecture_of(config)
    block = find_block(tensors.names, layer)
    plan, gated, left_out = plan_block(tensors, block, row)
    encoding = checked_encoding(block, plan)
    transposed = bool(row.options.get("transposed")) and not (encoding and encoding.packed)
    sizes = checked_sizes(block, plan, gated, transposed)
    if left_out := left_out or odd_width(plan, sizes["inner"]):
        plan = {name: planned for name, planned in plan.items() if name not in SHARED}
    check_scales(block, plan, encoding, 2 if gated and not row.options.get("interleaved") else 1)
    check_config(block, row, config, **sizes)
    overrides = {"top_k": top_k, "renormalize": renormalize, "activation": activation}
    rule = rule_of(row, config, gated=gated, experts=sizes["experts"], **overrides)
    fields = {name: rule.pop(name, True) for name in overrides}  # rows with `own_router` give no `renormalize`
    if not transposed:
        rule.pop("transposed", None)
    ids = checked_ids(held, sizes["experts"], slices)
    if slices != 1 or held is not None:
        how = Cut(slices, fields["activation"], bool(row.options.get("interleaved")), transposed)
        if encoding:
            check_whole_blocks(encoding, slices, sizes["inner"])
        whole, plan = plan, {name: planned.share(name, how, ids) for name, planned in plan.items()}
        fields |= {"slices": slices, "held": None if held is None else ids}
    arrays = read_planned(plan)
    if arrays["router"].dtype == np.float32 and encoding is None and arrays["down_proj"].dtype != np.float32:
        rule.pop("round_logits", None)  # results of a float32 linear layer are not rounded
    if "choice_bias" in arrays:
        arrays["choice_bias"] = arrays["choice_bias"].astype(np.float32)
    for name in set(SCALE_OF.values()) & set(arrays):
        arrays[name] = np.repeat(arrays[name].astype(encoding.scale), plan[name].repeats, axis=-2)
    if slices != 1 and encoding:
        arrays |= scales_of_slices(arrays, whole, encoding, how, ids)
    for name in ("shared_gate_up", "shared_down"):
        if name in arrays and transposed:
            arrays[name] = np.ascontiguousarray(arrays[name].T)
    return MoELayer(name=block, **arrays, **fields, options=rule, own_router=row.own_router, left_out=left_out)


def load_hidden_states(path: str | Path) -> np.ndarray:
    """Read the tensor ``hidden_states``, [T, H] in one of `DTYPES`, from a ``.safetensors`` file.

    Raises:
        CheckpointError: the file is missing or malformed, or has no such tensor with two axes and one of these dtypes.
    """
    stored = StoredTensors.find(local_path(path)).stored("hidden_states")
    if len(stored.shape) != 2 or 0 in stored.shape:
        raise checkpoint_error("hidden_states", "a non-empty array [T, H]", f"shape {shown(list(stored.shape))}")
    return read_planned({"hidden_states": Planned.of(stored)})["hidden_states"]


def shipped_layer() -> tuple[MoELayer, np.ndarray]:
    """The small trained layer that this package ships, and hidden states [2048, H] that are real inputs of it.

    The states were recorded as the layer's input, while its model read a passage that it was not trained on. So they
    choose experts as unevenly as real tokens do. The README.md of the model's folder says where both come from.
    """
    with resources.as_file(resources.files("flashmoe") / "assets") as assets:
        # The states' file is not in the model's folder, where loaders take every safetensors file as part of the model.
        states_file = assets / "tiny-qwen3-moe-hidden-states.safetensors"
        hidden_states = load_hidden_states(states_file)
        layer = int(header_of(states_file).metadata["layer"])
        return load_layer(assets / "tiny-qwen3-moe", layer), hidden_states


def scales_of_slices(
    arrays: dict[str, np.ndarray], whole: dict[str, Planned], encoding: Encoding, how: Cut, ids: Sequence[int]
) -> dict[str, np.ndarray]:
    """The scales of these slices, cut from the scales of their experts."""
    first, down = (whole[name].numbers for name in ("gate_up_proj", "down_proj"))
    experts = sorted({id // how.slices for id in ids})
    at = [experts.index(id // how.slices) * how.slices + id % how.slices for id in ids]
    halves = halves_of(how.activation, how.interleaved)
    both = arrays["gate_up_scale"], arrays["down_scale"]
    made = cut_scales(encoding.dtype, how.slices, *both, first[1:], down[1:], halves)
    return {name: each[at] for name, each in made.items()}
