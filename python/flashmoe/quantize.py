"""Quantises weights to FP8 or MXFP4: a tensor, a layer, or the experts of a whole checkpoint.

The results are as checkpoints have them. FP8 (DeepSeek-V3 and Qwen3 in FP8): elements in float8_e4m3fn, and a scale in
float32 for each block of 128 rows and columns, which is the block's largest magnitude / 448. MXFP4 (gpt-oss): elements
in e2m1, and a scale in e8m0 for each 32 elements of a row, by the rule of the OCP Microscaling Formats. Elements are
rounded to nearest, ties to even.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

from .checkpoint import MoELayer, local_path, read_config, tensor_headers
from .checkpoint.architectures import architecture_of
from .errors import InvalidArgument
from .spec import ENCODINGS, FP8, MXFP4, SCALE_BLOCK, bounded, dtype_named, halves_of, one_of, scale_blocks
from .system.foreign import REFUSALS, checkpoint_error, clipped, reason
from .weights.scales import SCALE_OF, check_slices, parts_of, scale_shape
from .weights.tensor_file import DTYPES, QUANTISED, READ, Stored, TensorFile

__all__ = [
    "dequantize",
    "dequantize_mxfp4",
    "quantize_checkpoint",
    "quantize_layer",
    "quantize_mxfp4",
    "quantize_rows",
    "quantize_weights",
]

LARGEST = np.float32(448.0)
"""The largest number of e4m3."""
_LEAST_SCALE = np.float32(2.0**-126)
"""The smallest scale, that of a block of zeros: the smallest normal number of float32."""
_SCALES = ("block", "row", "tensor")
_LARGEST_EXPONENT = 2
"""The exponent of e2m1's largest numbers; the largest is 1.5 2^2."""
_SCALE_BIAS = 127
"""The bias of e8m0."""
_PIECE = 1 << 26  # bytes that are copied at a time

_EXPERTS = re.compile(
    r".*\.(?:experts\.(?:[0-9]+\.)?|shared_experts?\.)(?:gate_proj|up_proj|down_proj|w1|w2|w3|gate_up_proj)(?:\.weight)?"
)
"""Names of experts' matrices, one by one or merged, and of shared experts' matrices."""


def quantize_rows(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x [..., n] as the engines quantise rows: float8_e4m3fn [..., n], and a scale in float32 for each 128 elements of
    a row, [..., ceil(n / 128)].

    A scale is the largest magnitude / 448, at least 2^-126. An element is ``e4m3(x * (1 / scale))``, all in float32.
    What docs/fp8.md says about NaN and infinities holds here too.

    Examples
    --------
    >>> import numpy as np
    >>> from flashmoe.quantize import quantize_rows
    >>> elements, scale = quantize_rows(np.array([[1.0, -2.0, 896.0]]))
    >>> elements.astype(np.float32).tolist(), scale.tolist()
    ([[0.5, -1.0, 448.0]], [[2.0]])
    """
    x = _numbers("x", x, 1)
    *lead, width = x.shape
    padded = np.zeros((*lead, scale_blocks(width) * SCALE_BLOCK), np.float32)
    padded[..., :width] = x
    blocks = padded.reshape(*lead, scale_blocks(width), SCALE_BLOCK)
    with np.errstate(invalid="ignore"):  # an infinity times 0
        scale = np.maximum(np.fmax.reduce(np.abs(blocks), axis=-1, initial=np.float32(0.0)) / LARGEST, _LEAST_SCALE)
        elements = _as_e4m3(blocks * (np.float32(1.0) / scale)[..., None])
    return np.ascontiguousarray(elements.reshape(padded.shape)[..., :width]), scale


def quantize_weights(matrices: np.ndarray, scales: str = "block", halves: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Matrices [..., rows, columns] in float8_e4m3fn, and their scales as `flashmoe.moe` takes them: one for each
    ``block``, ``row`` or ``tensor``. `halves`: 2 where gate rows come before up rows.

    Raises `InvalidArgument` for anything but such matrices with at least one row and one column, and for numbers that
    are not finite.

    Examples
    --------
    >>> import numpy as np
    >>> from flashmoe.quantize import quantize_weights
    >>> elements, scale = quantize_weights(np.ones((256, 128)))
    >>> elements.dtype.name, elements.shape, scale.shape
    ('float8_e4m3fn', (256, 128), (2, 1))
    """
    one_of("scales", scales, _SCALES)
    matrices = _numbers("matrices", matrices, 2)
    *lead, rows, columns = matrices.shape
    if rows % bounded("halves", halves, 1, rows):
        raise InvalidArgument(f"halves: expected a divisor of {rows} rows, got {halves}")
    if scales == "row":
        largest = np.abs(matrices).max(axis=-1, keepdims=True, initial=0.0)
    elif scales == "tensor":
        largest = np.abs(matrices).max(axis=(-2, -1), keepdims=True, initial=0.0)
    else:
        largest = _largest_of_blocks(matrices.reshape(*lead, halves, rows // halves, columns))
        largest = largest.reshape(*lead, halves * largest.shape[-2], largest.shape[-1])
    _check_finite(largest)
    scale = np.maximum(largest / LARGEST, _LEAST_SCALE)
    return _as_e4m3(matrices / _spread(scale, rows, columns, halves)), scale


def dequantize(elements: np.ndarray, scale: np.ndarray, halves: int = 1) -> np.ndarray:
    """float64 [..., rows, columns]: the exact numbers that quantised matrices stand for. Scales as `quantize_weights`
    gives them.

    Examples
    --------
    >>> import numpy as np
    >>> from flashmoe.quantize import dequantize, quantize_weights
    >>> elements, scale = quantize_weights(np.array([[1.0, -448.0, 3.3]]))
    >>> dequantize(elements, scale).tolist()
    [[1.0, -448.0, 3.25]]
    """
    numbers, scale = _numbers("elements", elements, 2, np.float64), np.asarray(scale, np.float64)
    *lead, rows, columns = numbers.shape
    parts = bounded("halves", halves, 1, rows)
    shapes = [scale_shape(ENCODINGS[FP8], kind, numbers.shape, parts) for kind in _SCALES]
    if scale.shape not in shapes or rows % parts:
        expected = " or ".join(str(list(shape)) for shape in shapes)
        raise InvalidArgument(
            f"scale: expected {expected} of elements {[*lead, rows, columns]}, got {list(scale.shape)}"
        )
    return numbers * _spread(scale, rows, columns, parts)


def quantize_mxfp4(matrices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Matrices [..., n] in MXFP4; n is a multiple of 32. Returns e2m1 [..., n / 32, 16] uint8, two to a byte with the
    first in the low bits, and for each 32 elements of a row a scale 2^(e - 127), given as e [..., n / 32] uint8.

    This follows the OCP Microscaling Formats. e - 127 is the exponent of the block's largest magnitude minus 2, because
    2 is the exponent of e2m1's largest numbers; it is at least -127, also for zeros. An element is the number / scale,
    rounded to nearest, ties to even; beyond 6 it is 6. So numbers of 7 to 8 times the scale are off by up to a quarter
    of their value, and other numbers by at most half a step of e2m1.

    Raises `InvalidArgument` for another n, and for numbers that are not finite.

    Examples
    --------
    The largest of these numbers, 31, has the exponent 4. So the scale is 2^2, and e is 129.

    >>> import numpy as np
    >>> from flashmoe.quantize import quantize_mxfp4
    >>> blocks, scales = quantize_mxfp4(np.arange(32))
    >>> blocks.shape, scales.tolist()
    ((1, 16), [129])
    """
    encoding = ENCODINGS[MXFP4]
    columns = encoding.block[1]
    matrices = _numbers("matrices", matrices, 1)
    if matrices.shape[-1] % columns:
        raise InvalidArgument(f"matrices: expected a multiple of {columns} columns, got {list(matrices.shape)}")
    blocks = matrices.reshape(*matrices.shape[:-1], -1, columns)
    largest = np.abs(blocks).max(axis=-1, initial=0.0)
    _check_finite(largest)
    _, exponent = np.frexp(largest)  # frexp's fractions are in [0.5, 1), so its exponent is larger by 1
    scale = np.where(largest > 0.0, np.maximum(exponent - 1 - _LARGEST_EXPONENT, -_SCALE_BIAS), -_SCALE_BIAS)
    codes = np.ldexp(blocks, -scale[..., None]).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4, (scale + _SCALE_BIAS).astype(np.uint8)


def dequantize_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """float32 [..., n]: the numbers that e2m1 [..., n / 32, 16] uint8 stands for with scales [..., n / 32]. They are
    exact, but infinite beyond float32, and NaN where a scale is 0xff.

    Examples
    --------
    >>> import numpy as np
    >>> from flashmoe.quantize import dequantize_mxfp4, quantize_mxfp4
    >>> blocks, scales = quantize_mxfp4(np.arange(32))
    >>> dequantize_mxfp4(blocks, scales)[:10].tolist()
    [0.0, 0.0, 2.0, 4.0, 4.0, 4.0, 6.0, 8.0, 8.0, 8.0]
    """
    blocks, scales = np.asarray(blocks), np.asarray(scales)
    if blocks.dtype != np.uint8 or blocks.ndim < 2 or blocks.shape[-1] != 16:
        raise InvalidArgument(f"blocks: expected [..., n / 32, 16] uint8, got {list(blocks.shape)} {blocks.dtype}")
    if scales.dtype != np.uint8 or scales.shape != blocks.shape[:-1]:
        expected = f"{list(blocks.shape[:-1])} uint8, one for each of the blocks"
        raise InvalidArgument(f"scales: expected {expected}, got {list(scales.shape)} {scales.dtype}")
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], -1)
    numbers = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    with np.errstate(over="ignore"):
        numbers = np.ldexp(numbers, scales[..., None].astype(np.int32) - _SCALE_BIAS)
    return np.where(scales[..., None] == 255, np.float32(np.nan), numbers).reshape(*scales.shape[:-1], -1)


def quantize_layer(layer: MoELayer, scales: str = "block", dtype: Any = FP8) -> MoELayer:
    """The layer with its experts' matrices, and the shared expert's, in FP8 or in ``"mxfp4"``. In a layer in slices, a
    row or a matrix that shares a scale is a slice's, not the whole expert's. In MXFP4, the matrices of a transposed
    layer, such as gpt-oss's, are transposed back, because blocks lie along the dimension that a product sums over.

    Raises `InvalidArgument` for a layer that is already quantised, and for slices that cut blocks. In FP8 it also
    raises this for transposed matrices; in MXFP4 for scales other than those of blocks, and for an H or I that is not a
    multiple of 32.

    Examples
    --------
    >>> import importlib.resources
    >>> from flashmoe.checkpoint import load_layer
    >>> from flashmoe.quantize import quantize_layer
    >>> path = importlib.resources.files("flashmoe") / "assets" / "tiny-qwen3-moe"
    >>> layer = quantize_layer(load_layer(path, 0))
    >>> layer.weight_dtype, layer.gate_up_proj.shape, layer.gate_up_scale.shape
    ('float8_e4m3fn', (16, 256, 256), (16, 2, 2))
    """
    encoding = ENCODINGS[dtype := dtype_named("dtype", dtype, tuple(ENCODINGS))]
    one_of("scales", scales, encoding.kinds)
    if layer.gate_up_scale is not None:
        raise InvalidArgument(
            f"layer: expected weights that are not quantised, got {ENCODINGS[layer.weight_dtype].name}"
        )
    transposed = bool(layer.options.get("transposed"))
    if transposed and dtype == FP8:
        raise InvalidArgument("layer: expected matrices that are not transposed, got transposed ones")
    check_slices(dtype, "slices", layer.slices, layer.intermediate)
    made: dict[str, Any] = {}
    halves = halves_of(layer.activation, bool(layer.options.get("interleaved")))
    for name, scale in SCALE_OF.items():
        matrices = getattr(layer, name)
        if matrices is None:
            continue
        with _named(f"layer: {name}"):
            if dtype == MXFP4:
                made[name], made[scale] = _in_mxfp4(matrices.swapaxes(-2, -1) if transposed else matrices)
            else:
                made[name], made[scale] = quantize_weights(matrices, scales, parts_of(name, halves))
    return replace(layer, **made, options={key: each for key, each in layer.options.items() if key != "transposed"})


def quantize_checkpoint(source: str | Path, target: str | Path, dtype: Any = FP8) -> None:
    """Writes the checkpoint `source` to the folder `target`, which it makes, with the matrices of its experts in FP8,
    or those of gpt-oss in ``"mxfp4"``.

    Each shard of `source` becomes a shard of the same name, tensor by tensor, so this takes about the memory of the
    largest tensor. In FP8 a matrix of one expert, ``experts.N.gate_proj.weight``, gets a ``….weight_scale_inv``; merged
    matrices, ``experts.gate_up_proj``, get a ``…_scale_inv``. In MXFP4 ``experts.gate_up_proj`` [E, H, 2I] becomes
    ``…_blocks`` [E, 2I, H / 32, 16] and ``…_scales`` [E, 2I, H / 32]. All other tensors stay as they are. The
    ``quantization_config`` that ``config.json`` gets names the matrices that stay. Other files of the folder, such as a
    tokenizer's, are copied.

    Raises `CheckpointError` for a file of `source` that cannot be read, for a checkpoint without experts in one of
    ``F32, F16, BF16``, for one that is already quantised, and for a model whose checkpoints have no experts in `dtype`.
    Raises `InvalidArgument` if `target` exists and is not empty, if weights are not finite, or, in MXFP4, if they do
    not consist of blocks of 32.

    Examples
    --------
    >>> import importlib.resources, tempfile
    >>> from flashmoe.checkpoint import load_layer
    >>> from flashmoe.quantize import quantize_checkpoint
    >>> path = importlib.resources.files("flashmoe") / "assets" / "tiny-qwen3-moe"
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     quantize_checkpoint(path, folder)
    ...     load_layer(folder, 0).weight_dtype
    'float8_e4m3fn'
    """
    source, target = local_path(source), local_path(target, "target")
    form = _FORMS[dtype := dtype_named("dtype", dtype, tuple(_FORMS))]
    config = read_config(source)
    headers = tensor_headers(source)
    tensors = [stored for header in headers.values() for stored in header.tensors.values()]
    chosen = {stored.name: form(stored) for stored in tensors if _is_quantised_here(stored)}
    if "quantization_config" in config or any(stored.dtype in QUANTISED for stored in tensors):
        raise checkpoint_error("path", f"a checkpoint that is not quantised in {source}", "one that is")
    architecture = architecture_of(config.get("text_config", config))
    if dtype not in architecture.quantised:
        raise checkpoint_error("path", f"a model whose checkpoints have experts in {dtype}", architecture.name)
    if not chosen:
        raise checkpoint_error("path", f"matrices of experts in {', '.join(DTYPES)} in {source}", "none")
    target.mkdir(parents=True, exist_ok=True)
    if any(target.iterdir()):
        raise InvalidArgument(f"target: expected an empty folder, got {target} with files")
    for path, header in headers.items():
        _write_file(target / path.name, header, chosen)
    _copy_others(source, target, {path.name for path in headers})
    matrices = {stored.name for stored in tensors if len(stored.shape) == 2 and stored.name.endswith(".weight")}
    config["quantization_config"] = {
        **form.config,
        "modules_to_not_convert": sorted(name.removesuffix(".weight") for name in matrices - chosen.keys()),
    }
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if len(headers) > 1 or (source / "model.safetensors.index.json").exists():
        _write_index(target, headers, chosen)


def _in_mxfp4(matrices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Matrices [..., rows, columns] in MXFP4, made one by one, so that only one matrix at a time has a float32 copy."""
    made = [quantize_mxfp4(matrix) for matrix in matrices.reshape(-1, *matrices.shape[-2:])]
    blocks, scales = (np.stack(each) for each in zip(*made, strict=True))
    lead = matrices.shape[:-2]
    return blocks.reshape(*lead, *blocks.shape[1:]), scales.reshape(*lead, *scales.shape[1:])


def _numbers(name: str, given: Any, axes: int, dtype: Any = np.float32) -> np.ndarray:
    """`given` as an array of that type that has elements along its last `axes` axes. Raises `InvalidArgument`."""
    symbols = ("n",) if axes == 1 else ("rows", "columns")
    try:
        array = np.asarray(given)
        if array.dtype.kind == "c":
            raise TypeError(f"they are of {array.dtype}")
        numbers = array.astype(dtype, copy=False)
    except Exception as error:  # another type may raise anything
        raise InvalidArgument(f"{name}: expected an array of numbers, got {type(given).__name__}: {error}") from None
    if array.ndim < axes or 0 in array.shape[-axes:]:
        expected = f"[..., {', '.join(symbols)}], at least 1 of each"
        raise InvalidArgument(f"{name}: expected {expected}, got {list(array.shape)} {array.dtype}")
    return numbers


def _check_finite(largest: np.ndarray) -> None:
    if not np.isfinite(largest).all():
        raise InvalidArgument("matrices: expected finite numbers, got others among them")


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
    """The scale of each element, [..., rows or 1, columns or 1], from the scales of blocks, rows or tensors."""
    if scale.shape[-2:] in ((1, 1), (rows, 1)):
        return scale
    each = rows // halves
    apart = scale.reshape(*scale.shape[:-2], halves, scale.shape[-2] // halves, scale.shape[-1])
    apart = np.repeat(np.repeat(apart, SCALE_BLOCK, axis=-2)[..., :each, :], SCALE_BLOCK, axis=-1)[..., :columns]
    return apart.reshape(*scale.shape[:-2], rows, columns)


def _is_quantised_here(stored: Stored) -> bool:
    return bool(_EXPERTS.fullmatch(stored.name)) and len(stored.shape) in (2, 3) and stored.dtype in DTYPES


@dataclass(frozen=True)
class _InFP8:
    """Matrices of a checkpoint, one or merged, in FP8: the elements and scales that are stored for them."""

    of: Stored

    config: ClassVar[dict[str, Any]] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [SCALE_BLOCK, SCALE_BLOCK],
    }

    @property
    def tensors(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """For each tensor that is stored: its name, its type as a file names it, and its shape."""
        scales = scale_shape(ENCODINGS[FP8], "block", self.of.shape, self._halves)
        return [(self.of.name, "F8_E4M3", self.of.shape), (f"{self.of.name}_scale_inv", "F32", scales)]

    def made(self, matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Elements and scales of one matrix."""
        return quantize_weights(matrix, halves=self._halves)

    @property
    def _halves(self) -> int:
        return 2 if self.of.name.endswith("gate_up_proj") else 1


@dataclass(frozen=True)
class _InMXFP4:
    """As `_InFP8`, for gpt-oss in MXFP4. The source stores these matrices transposed."""

    of: Stored

    config: ClassVar[dict[str, Any]] = {"quant_method": "mxfp4"}

    @property
    def tensors(self) -> list[tuple[str, str, tuple[int, ...]]]:
        *lead, columns, rows = self.of.shape
        shape, encoding = (*lead, rows, columns), ENCODINGS[MXFP4]
        scales = scale_shape(encoding, "block", shape, 1)
        elements, of_blocks = (self.of.name + suffix for suffix in encoding.suffixes)
        return [(elements, "U8", encoding.elements(shape)), (of_blocks, "U8", scales)]

    def made(self, matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return quantize_mxfp4(matrix.T)


_Form = _InFP8 | _InMXFP4
_FORMS: dict[str, type[_Form]] = {FP8: _InFP8, MXFP4: _InMXFP4}


def _write_file(path: Path, file: TensorFile, chosen: dict[str, _Form]) -> None:
    """Writes the file's tensors. Each tensor of `chosen` becomes two: its elements, then its scales."""
    header: dict[str, Any] = {"__metadata__": file.metadata} if file.metadata else {}
    end = 0

    def add(name: str, dtype: str, shape: tuple[int, ...], size: int) -> None:
        nonlocal end
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size

    for name, stored in file.tensors.items():
        if name in chosen:
            for made, dtype, shape in chosen[name].tensors:
                add(made, dtype, shape, READ[dtype].itemsize * math.prod(shape))
        else:
            add(name, stored.dtype, stored.shape, stored.bytes)
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with open(path, "wb") as to:
        to.write(len(encoded).to_bytes(8, "little") + encoded)
        for name, stored in file.tensors.items():
            for part in _quantised(chosen[name]) if name in chosen else _pieces(stored):
                to.write(part.reshape(-1).view(np.uint8).data)


def _quantised(form: _Form) -> tuple[np.ndarray, ...]:
    """Elements and scales of a tensor. Matrices are quantised one by one, so that only one at a time has a float32
    copy."""
    array = np.empty(form.of.shape, DTYPES[form.of.dtype])
    _read(form.of, array)
    with _named(f"{clipped(form.of.name)} in {clipped(form.of.path)}"):
        made = [form.made(matrix) for matrix in array.reshape(-1, *form.of.shape[-2:])]
    return tuple(np.stack(each) for each in zip(*made, strict=True))


@contextmanager
def _named(matrices: str) -> Iterator[None]:
    """Puts the name of the matrices into errors about `matrices`."""
    try:
        yield
    except InvalidArgument as error:
        raise InvalidArgument(str(error).replace("matrices:", f"{matrices}:", 1)) from None


def _read(stored: Stored, array: np.ndarray) -> None:
    try:
        stored.read_into(array)
    except REFUSALS as error:
        raise checkpoint_error("path", f"a complete safetensors file at {stored.path}", reason(error)) from error


def _pieces(stored: Stored) -> Iterator[np.ndarray]:
    """The tensor's bytes as they are, in pieces."""
    for first in range(0, stored.bytes, _PIECE):
        piece = np.empty(min(_PIECE, stored.bytes - first), np.uint8)
        _read(stored._replace(offset=stored.offset + first, bytes=len(piece)), piece)
        yield piece


def _write_index(target: Path, headers: dict[Path, Any], chosen: dict[str, _Form]) -> None:
    where = {}
    for path, header in headers.items():
        for name in header.tensors:
            for made in [each for each, *_ in chosen[name].tensors] if name in chosen else [name]:
                where[made] = path.name
    total = sum((target / path.name).stat().st_size for path in headers)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _copy_others(source: Path, target: Path, tensors: set[str]) -> None:
    """Copies the files beside a checkpoint's tensors, except those that are written here."""
    made = {"config.json", "model.safetensors.index.json"}
    for path in sorted(source.iterdir()):
        if path.is_file() and path.name not in tensors | made and path.suffix != ".safetensors":
            shutil.copyfile(path, target / path.name)
