"""Weights in FP8, from others: of a tensor, a layer, or the experts of a whole checkpoint.

As checkpoints have them (DeepSeek-V3 and Qwen3 in FP8): elements in float8_e4m3fn, and a scale in float32 for each
block of 128 rows and columns, which is the block's largest magnitude / 448. Rounded to nearest, ties to even.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from .architectures import architecture_of
from .checkpoint import MoELayer, read_config, tensor_headers
from .errors import InvalidArgument
from .foreign import REFUSALS, checkpoint_error, reason
from .scales import SCALE_OF, block_rows, check_slices, parts_of
from .spec import SCALE_BLOCK, halves_of, one_of, scale_blocks
from .tensor_file import DTYPES, QUANTISED, Stored, TensorFile

__all__ = ["dequantize", "quantize_checkpoint", "quantize_layer", "quantize_rows", "quantize_weights"]

LARGEST = np.float32(448.0)
"""Of e4m3."""
_LEAST_SCALE = np.float32(2.0**-126)
"""That of zeros: the smallest normal number."""
_SCALES = ("block", "row", "tensor")
_PIECE = 1 << 26  # bytes that are copied at a time

_EXPERTS = re.compile(
    r".*\.(?:experts\.(?:[0-9]+\.)?|shared_experts?\.)(?:gate_proj|up_proj|down_proj|w1|w2|w3|gate_up_proj)(?:\.weight)?"
)
"""Matrices of experts, one by one or merged, and of shared ones."""


def quantize_rows(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x [..., n] as the engines quantise rows: float8_e4m3fn [..., n], and a scale in float32 for each 128 elements of
    a row, [..., ceil(n / 128)].

    A scale is the largest magnitude / 448, at least 2^-126; an element is ``e4m3(x * (1 / scale))``, all in float32.
    What docs/fp8.md says of NaN and infinities holds here too.
    """
    x = np.asarray(x, np.float32)
    *lead, width = x.shape
    padded = np.zeros((*lead, scale_blocks(width) * SCALE_BLOCK), np.float32)
    padded[..., :width] = x
    blocks = padded.reshape(*lead, scale_blocks(width), SCALE_BLOCK)
    with np.errstate(invalid="ignore"):  # an infinity times 0
        scale = np.maximum(np.fmax.reduce(np.abs(blocks), axis=-1, initial=np.float32(0.0)) / LARGEST, _LEAST_SCALE)
        elements = _as_e4m3(blocks * (np.float32(1.0) / scale)[..., None])
    return np.ascontiguousarray(elements.reshape(padded.shape)[..., :width]), scale


def quantize_weights(matrices: np.ndarray, scales: str = "block", halves: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Matrices [..., rows, columns] as float8_e4m3fn, and their scales as `flashmoe.moe` takes them, for each
    ``block``, ``row`` or ``tensor``. `halves`: 2 where gate rows come before up rows.

    Raises `InvalidArgument` for numbers that are not finite.
    """
    one_of("scales", scales, _SCALES)
    matrices = np.asarray(matrices, np.float32)
    *lead, rows, columns = matrices.shape
    if rows % halves:
        raise InvalidArgument(f"halves: expected a divisor of {rows} rows, got {halves}")
    if scales == "row":
        largest = np.abs(matrices).max(axis=-1, keepdims=True, initial=0.0)
    elif scales == "tensor":
        largest = np.abs(matrices).max(axis=(-2, -1), keepdims=True, initial=0.0)
    else:
        largest = _largest_of_blocks(matrices.reshape(*lead, halves, rows // halves, columns))
        largest = largest.reshape(*lead, -1, largest.shape[-1])
    if not np.isfinite(largest).all():
        raise InvalidArgument("matrices: expected finite numbers, got others among them")
    scale = np.maximum(largest / LARGEST, _LEAST_SCALE)
    return _as_e4m3(matrices / _spread(scale, rows, columns, halves)), scale


def dequantize(elements: np.ndarray, scale: np.ndarray, halves: int = 1) -> np.ndarray:
    """float64 [..., rows, columns]: what quantised matrices stand for, exactly. Scales as `quantize_weights` gives
    them."""
    *_, rows, columns = elements.shape
    return elements.astype(np.float64) * _spread(np.asarray(scale, np.float64), rows, columns, halves)


def quantize_layer(layer: MoELayer, scales: str = "block") -> MoELayer:
    """The layer with its experts' matrices, and the shared expert's, in FP8. Of a layer in slices a row and a matrix
    that share a scale are a slice's, not those of the whole expert. Raises `InvalidArgument` for a layer that is in FP8
    already, for transposed matrices, and for slices that are no multiple of 128 wide."""
    if layer.gate_up_scale is not None:
        raise InvalidArgument("layer: expected weights that are not quantised, got FP8")
    if layer.options.get("transposed"):
        raise InvalidArgument("layer: expected matrices that are not transposed, got transposed ones")
    check_slices("slices", layer.slices, layer.intermediate)
    made: dict[str, Any] = {}
    halves = halves_of(layer.activation, bool(layer.options.get("interleaved")))
    for name, scale in SCALE_OF.items():
        matrices = getattr(layer, name)
        if matrices is None:
            continue
        made[name], made[scale] = quantize_weights(matrices, scales, parts_of(name, halves))
    return replace(layer, **made)


def quantize_checkpoint(source: str | Path, target: str | Path) -> None:
    """Writes the checkpoint `source` to the folder `target`, which is made, with the matrices of its experts in FP8.

    A shard of `source` becomes one of the same name, tensor by tensor, so that this takes the memory of the largest
    tensor or so. Experts one by one, ``experts.N.gate_proj.weight``, get a ``….weight_scale_inv`` each; merged ones,
    ``experts.gate_up_proj``, a ``…_scale_inv``. All else stays as it is, and is named in the ``quantization_config``
    that ``config.json`` gets. Other files of the folder, such as a tokenizer's, are copied.

    Raises `CheckpointError` for a file of `source` that cannot be read, a checkpoint without experts in one of
    ``F32, F16, BF16``, or one that is quantised; `InvalidArgument` if `target` exists and is not empty, or weights are
    not finite.
    """
    source, target = Path(source), Path(target)
    config = read_config(source)
    headers = tensor_headers(source)
    tensors = [stored for header in headers.values() for stored in header.tensors.values()]
    chosen = {stored.name for stored in tensors if _is_quantised_here(stored)}
    if "quantization_config" in config or any(stored.dtype in QUANTISED for stored in tensors):
        raise checkpoint_error("path", f"a checkpoint that is not quantised in {source}", "one that is")
    architecture = architecture_of(config.get("text_config", config))
    if architecture.options.get("transposed"):
        raise checkpoint_error("path", "a model whose experts are not stored transposed", architecture.name)
    if not chosen:
        raise checkpoint_error("path", f"matrices of experts in {', '.join(DTYPES)} in {source}", "none")
    target.mkdir(parents=True, exist_ok=True)
    if any(target.iterdir()):
        raise InvalidArgument(f"target: expected an empty folder, got {target} with files")
    for path, header in headers.items():
        _write_file(target / path.name, header, chosen)
    _copy_others(source, target, {path.name for path in headers})
    kept = {stored.name for stored in tensors if len(stored.shape) == 2} - chosen
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [SCALE_BLOCK, SCALE_BLOCK],
        "modules_to_not_convert": sorted(name.removesuffix(".weight") for name in kept),
    }
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if len(headers) > 1 or (source / "model.safetensors.index.json").exists():
        _write_index(target, headers, chosen)


def _as_e4m3(values: np.ndarray) -> np.ndarray:
    return np.clip(values, -LARGEST, LARGEST).astype(ml_dtypes.float8_e4m3fn)


def _largest_of_blocks(matrices: np.ndarray) -> np.ndarray:
    """The largest magnitude of each block of 128 x 128."""
    rows, columns = matrices.shape[-2:]
    by_row = [
        np.abs(matrices[..., i : i + SCALE_BLOCK]).max(axis=-1, initial=0.0) for i in range(0, columns, SCALE_BLOCK)
    ]
    by_row = np.stack(by_row, axis=-1)
    return np.stack([by_row[..., i : i + SCALE_BLOCK, :].max(axis=-2) for i in range(0, rows, SCALE_BLOCK)], axis=-2)


def _spread(scale: np.ndarray, rows: int, columns: int, halves: int) -> np.ndarray:
    """A scale [..., rows or 1, columns or 1] for each element, from those of blocks, rows or tensors."""
    if scale.shape[-2:] in ((1, 1), (rows, 1)):
        return scale
    each = rows // halves
    apart = scale.reshape(*scale.shape[:-2], halves, -1, scale.shape[-1])
    apart = np.repeat(np.repeat(apart, SCALE_BLOCK, axis=-2)[..., :each, :], SCALE_BLOCK, axis=-1)[..., :columns]
    return apart.reshape(*scale.shape[:-2], rows, columns)


def _is_quantised_here(stored: Stored) -> bool:
    return bool(_EXPERTS.fullmatch(stored.name)) and len(stored.shape) in (2, 3) and stored.dtype in DTYPES


def _scale_name(name: str) -> str:
    return f"{name}_scale_inv"


def _halves(stored: Stored) -> int:
    return 2 if stored.name.endswith("gate_up_proj") else 1


def _scale_shape(stored: Stored) -> tuple[int, ...]:
    *lead, rows, columns = stored.shape
    return (*lead, block_rows(rows, _halves(stored)), scale_blocks(columns))


def _write_file(path: Path, file: TensorFile, chosen: set[str]) -> None:
    """The file's tensors, each of `chosen` as two: its elements, and behind them its scales."""
    header: dict[str, Any] = {"__metadata__": file.metadata} if file.metadata else {}
    end = 0

    def add(name: str, dtype: str, shape: tuple[int, ...], size: int) -> None:
        nonlocal end
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size

    for name, stored in file.tensors.items():
        if name in chosen:
            add(name, "F8_E4M3", stored.shape, math.prod(stored.shape))
            add(_scale_name(name), "F32", _scale_shape(stored), 4 * math.prod(_scale_shape(stored)))
        else:
            add(name, stored.dtype, stored.shape, stored.bytes)
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with open(path, "wb") as to:
        to.write(len(encoded).to_bytes(8, "little") + encoded)
        for name, stored in file.tensors.items():
            for part in _quantised(stored) if name in chosen else _pieces(stored):
                to.write(part.reshape(-1).view(np.uint8).data)


def _quantised(stored: Stored) -> tuple[np.ndarray, np.ndarray]:
    """Matrix by matrix, so that float32 copies are of one alone."""
    array = np.empty(stored.shape, DTYPES[stored.dtype])
    _read(stored, array)
    matrices = array.reshape(-1, *stored.shape[-2:])
    made = [quantize_weights(matrix, halves=_halves(stored)) for matrix in matrices]
    elements, scales = (np.stack(each) for each in zip(*made, strict=True))
    return elements.reshape(stored.shape), scales.reshape(_scale_shape(stored))


def _read(stored: Stored, array: np.ndarray) -> None:
    try:
        stored.read_into(array)
    except REFUSALS as error:
        raise checkpoint_error("path", f"a complete safetensors file at {stored.path}", reason(error)) from error


def _pieces(stored: Stored) -> Iterator[np.ndarray]:
    """Its bytes as they are, some at a time."""
    for first in range(0, stored.bytes, _PIECE):
        piece = np.empty(min(_PIECE, stored.bytes - first), np.uint8)
        _read(stored._replace(offset=stored.offset + first, bytes=len(piece)), piece)
        yield piece


def _write_index(target: Path, headers: dict[Path, Any], chosen: set[str]) -> None:
    where = {}
    for path, header in headers.items():
        for name in header.tensors:
            where[name] = path.name
            if name in chosen:
                where[_scale_name(name)] = path.name
    total = sum((target / path.name).stat().st_size for path in headers)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _copy_others(source: Path, target: Path, tensors: set[str]) -> None:
    """The files beside a checkpoint's tensors, and none that is written here."""
    made = {"config.json", "model.safetensors.index.json"}
    for path in sorted(source.iterdir()):
        if path.is_file() and path.name not in tensors | made and path.suffix != ".safetensors":
            shutil.copyfile(path, target / path.name)
