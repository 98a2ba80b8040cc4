"""``flashmoe run --engine cuda``: whether this machine can run it, and weights and tokens in the memory of its GPUs."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import jit, models, nvshmem
from ..checkpoint import MoELayer, MoELayerOf
from ..contexts.memory import format_bytes
from ..errors import FlashMoEError, HeapError
from ..spec import ELEMENT_BYTES, GATED, SCALE_BLOCK
from ..system import driver
from .console import count

if TYPE_CHECKING:
    import torch


def missing(ranks: int) -> str | None:
    """What the CUDA engine lacks here for so many ranks, as far as quick checks can tell; None: nothing."""
    if not loads(driver.LIBRARY):
        return "the NVIDIA driver's libcuda.so.1, found none"
    if importlib.util.find_spec("torch") is None:
        return "PyTorch, found none"
    import torch

    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found < ranks:
        return f"a GPU that PyTorch can use for each of {count(ranks, 'rank')}, found {found}"
    for device in range(ranks):
        if (capability := torch.cuda.get_device_capability(device)) != (9, 0):
            return f"GPUs of compute capability 9.0 (H100, H200), found {'.'.join(map(str, capability))}"
    for device, peer in permutations(range(ranks), 2):
        if not torch.cuda.can_device_access_peer(device, peer):
            return f"GPUs that reach each other's memory, found that {device} does not reach that of {peer}"
    if ranks > 1 and not loads(nvshmem.library()):
        return "NVSHMEM's host library, which several GPUs need, found none"
    try:
        jit.shipped_kernels() or jit.find_nvcc()
    except FlashMoEError:
        return "nvcc, which compiles the kernel, found none"
    return None


def require(ranks: int) -> None:
    """Refuses a machine that lacks something for so many ranks on GPUs."""
    if lacking := missing(ranks):
        raise FlashMoEError(f"--engine cuda: expected {lacking}; see flashmoe info")


def loads(library: str) -> bool:
    """Whether the loader finds a shared library and all that it depends on."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


@dataclass(frozen=True)
class SeededWeights:
    """A random matrix for each of some experts, made on the GPU that uses it, so that up to 34 GB of matrices need not
    be in host memory.

    An expert's matrix depends on its number, the seed and the kind of device, and on nothing else: not on the rank that
    holds the expert, nor on the rank's other experts. Elements are normally distributed with variance 1 / columns.
    """

    seed: tuple[int, ...]
    experts: tuple[int, ...]
    """The numbers of the experts, in the order of their matrices."""
    rows: int
    columns: int
    dtype: str

    @property
    def shape(self) -> tuple[int, int, int]:
        """[experts, rows, columns], as of an array."""
        return len(self.experts), self.rows, self.columns

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices together."""
        return prod(self.shape) * ELEMENT_BYTES[self.dtype]

    def __getitem__(self, positions: Sequence[int]) -> SeededWeights:
        """Some of the matrices, as indexing an array with a list gives them."""
        return replace(self, experts=tuple(self.experts[position] for position in positions))

    def made(self, device: str) -> torch.Tensor:
        """The matrices [experts, rows, columns] on a PyTorch device."""
        import torch

        matrices = torch.empty(self.shape, dtype=getattr(torch, self.dtype), device=device)
        generator = torch.Generator(device)
        for expert, matrix in zip(self.experts, matrices, strict=True):  # float32 copies of all would need much memory
            mixed = np.random.SeedSequence((*self.seed, expert)).generate_state(1, np.uint64)
            generator.manual_seed(int(mixed[0]))
            normal = torch.randn(matrix.shape, generator=generator, device=device)
            matrix.copy_(normal.mul_(self.columns**-0.5))
        return matrices


class SeededLayer(MoELayerOf[SeededWeights]):
    """A layer whose experts' weights are made on the GPUs that use them."""


def random_layer(
    shape: models.ModelShape, tokens: int, *, seed: int, skew: float, dtype: str
) -> tuple[SeededLayer, np.ndarray]:
    """Like `models.random_layer`, but with `SeededWeights`: the weights are other numbers of the same distribution."""
    rng = np.random.default_rng(seed)
    router, states = models.router_and_tokens(shape, tokens, skew, models.DTYPES[dtype], rng)
    experts = tuple(range(shape.experts))
    rows = shape.intermediate * (2 if shape.activation in GATED else 1)
    layer = SeededLayer(
        name=shape.name,
        router=router,
        gate_up_proj=SeededWeights((seed, 0), experts, rows, shape.hidden, dtype),
        down_proj=SeededWeights((seed, 1), experts, shape.hidden, shape.intermediate, dtype),
        top_k=shape.top_k,
        renormalize=shape.renormalize,
        activation=shape.activation,
    )
    return layer, states


def tensors_of(
    rank: int, layer: MoELayer | SeededLayer, x: np.ndarray, settings: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A rank's tokens and its layer's tensors, by their names in `flashmoe.moe`, and the context's settings. For the
    CUDA engine, the tensors are on the rank's GPU, and the returned settings name this GPU; else they are arrays.

    Raises `HeapError` as `put_on` does.
    """
    arrays = {"x": x, **layer.tensors()}
    if settings["engine"] != "cuda":
        return arrays, settings
    settings = {"device": rank, **settings}
    on_gpu = put_on(settings["device"], list(arrays.values()))
    return dict(zip(arrays, on_gpu, strict=True)), settings


def put_on(device: int, arrays: Sequence[np.ndarray | SeededWeights]) -> list[torch.Tensor]:
    """Tensors on that device: copies of arrays, or matrices made there. The device becomes PyTorch's current one.

    Raises `HeapError` if they would leave no room for the context.
    """
    import torch

    torch.cuda.set_device(device)
    size, most = sum(array.nbytes for array in arrays), 0.9 * torch.cuda.mem_get_info()[0]
    if size > most:
        raise HeapError(
            f"weights and tokens: expected at most {format_bytes(most)}, 90 % of what is free on the GPU, got "
            f"{format_bytes(size)}; with --model, use --scale"
        )
    return [to_device(array) for array in arrays]


def to_device(array: np.ndarray | SeededWeights) -> torch.Tensor:
    """A tensor on PyTorch's current GPU: a copy of an array, or matrices made there."""
    if isinstance(array, SeededWeights):
        return array.made("cuda")
    return as_tensor(array).cuda()


def as_tensor(array: np.ndarray) -> torch.Tensor:
    """A copy of an array as a tensor in host memory."""
    import torch

    array = np.ascontiguousarray(array)
    if array.dtype == models.DTYPES["bfloat16"]:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def in_fp8(matrices: torch.Tensor, halves: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Matrices [E, rows, columns] in e4m3, and a scale for each block of 128 rows and columns, quantised as
    `flashmoe.quantize.quantize_weights` quantises arrays; `halves`: 2 if gate rows come before up rows, else 1."""
    import torch
    from torch.nn.functional import pad

    elements, scales = torch.empty_like(matrices, dtype=torch.float8_e4m3fn), []
    for matrix, to in zip(matrices, elements, strict=True):  # float32 copies of all would need much memory
        wide = matrix.float().unflatten(0, (halves, -1))
        rows, columns = wide.shape[1:]
        blocks = pad(wide.abs(), (0, -columns % SCALE_BLOCK, 0, -rows % SCALE_BLOCK))
        largest = blocks.unflatten(2, (-1, SCALE_BLOCK)).unflatten(1, (-1, SCALE_BLOCK)).amax((2, 4))
        scale = (largest / 448).clamp(min=2.0**-126)
        spread = scale.repeat_interleave(SCALE_BLOCK, 1).repeat_interleave(SCALE_BLOCK, 2)[:, :rows, :columns]
        to.copy_((wide / spread).flatten(0, 1).to(to.dtype))
        scales.append(scale.flatten(0, 1))
    return elements, torch.stack(scales)


def to_host(array: np.ndarray | torch.Tensor | SeededWeights) -> np.ndarray:
    """An array in host memory: the array itself, or a copy of a tensor. `SeededWeights` are made on PyTorch's current
    GPU and copied, because the CPU would make other numbers."""
    if isinstance(array, np.ndarray):
        return array
    import torch

    tensor = to_device(array) if isinstance(array, SeededWeights) else array
    host = tensor.contiguous().cpu()
    if host.dtype == torch.bfloat16:
        return host.view(torch.int16).numpy().view(models.DTYPES["bfloat16"])
    return host.numpy()


def layer_on_host(layer: MoELayer | SeededLayer) -> MoELayer:
    """The layer with its weights in host memory."""
    return MoELayer(**{**vars(layer), **{name: to_host(each) for name, each in layer.tensors().items()}})
