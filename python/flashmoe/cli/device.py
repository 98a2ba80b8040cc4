"""``flashmoe run --engine cuda``: a layer in a GPU's memory, and the call there."""

from __future__ import annotations

import ctypes
import importlib.util
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import jit, models
from ..checkpoint import MoELayer, MoELayerOf
from ..errors import FlashMoEError, HeapError, InvalidArgument
from ..memory import format_bytes
from ..report import CallReport

if TYPE_CHECKING:
    import torch

    from .workload import Workload


class DeviceLayer(MoELayerOf["torch.Tensor"]):
    """A layer in a GPU's memory."""


def missing() -> str | None:
    """What the CUDA engine lacks here, as far as that is quickly told; None: nothing."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "the NVIDIA driver's libcuda.so.1"
    if importlib.util.find_spec("torch") is None:
        return "PyTorch"
    import torch

    if not torch.cuda.is_available():
        return "a GPU that PyTorch can use"
    if torch.cuda.get_device_capability() != (9, 0):
        return "a GPU of compute capability 9.0 (H100, H200)"
    try:
        jit.find_nvcc()
    except FlashMoEError:
        return "nvcc, which compiles the kernel"
    return None


def random_layer(
    shape: models.ModelShape, tokens: int, *, seed: int, skew: float, dtype: str
) -> tuple[DeviceLayer, np.ndarray]:
    """`models.random_layer` with the experts' weights made on the GPU: others than those, of the same distribution."""
    import torch

    check_fits(shape.weights * getattr(torch, dtype).itemsize)
    rng = np.random.default_rng(seed)
    router, states = models.router_and_tokens(shape, tokens, skew, models.DTYPES[dtype], rng)
    generator = torch.Generator(device="cuda").manual_seed(seed)
    rows = shape.intermediate * (2 if shape.activation == "swiglu" else 1)
    layer = DeviceLayer(
        name=shape.name,
        router=to_device(router),
        gate_up_proj=normal_weights((shape.experts, rows, shape.hidden), dtype, generator),
        down_proj=normal_weights((shape.experts, shape.hidden, shape.intermediate), dtype, generator),
        top_k=shape.top_k,
        renormalize=shape.renormalize,
        activation=shape.activation,
    )
    return layer, states


def normal_weights(sizes: tuple[int, ...], dtype: str, generator: torch.Generator) -> torch.Tensor:
    """Normal numbers of variance 1 / (last dimension), on PyTorch's current GPU."""
    import torch

    made = torch.empty(sizes, dtype=getattr(torch, dtype), device="cuda")
    for part in made:  # one at a time: float32 copies of all would treble the memory
        part.copy_(torch.randn(sizes[1:], generator=generator, device="cuda").mul_(sizes[-1] ** -0.5))
    return made


def check_fits(weights: int) -> None:
    """Refuses, with `HeapError`, weights of that many bytes that would leave the GPU no room for the context."""
    import torch

    most = 0.9 * torch.cuda.mem_get_info()[0]
    if weights > most:
        raise HeapError(
            f"weights: expected at most {format_bytes(most)}, 90 % of what is free on the GPU, got "
            f"{format_bytes(weights)}; with --model, use --scale"
        )


def to_device(array: np.ndarray) -> torch.Tensor:
    """A copy on the GPU."""
    import torch

    array = np.ascontiguousarray(array)
    if array.dtype == models.DTYPES["bfloat16"]:
        return torch.from_numpy(array.view(np.int16).copy()).cuda().view(torch.bfloat16)
    return torch.from_numpy(array.copy()).cuda()


def to_host(tensor: torch.Tensor) -> np.ndarray:
    """A copy in host memory."""
    import torch

    host = tensor.contiguous().cpu()
    if host.dtype == torch.bfloat16:
        return host.view(torch.int16).numpy().view(models.DTYPES["bfloat16"])
    return host.numpy()


def call(workload: Workload) -> tuple[np.ndarray, CallReport]:
    """One warm-up call and one traced call, of a rank alone: result [T, H] and report."""
    from .. import Context, moe

    layer = workload.layer
    if layer.hidden % 8 or layer.intermediate % 8:
        raise InvalidArgument(
            f"--engine cuda: expected H and I multiples of 8, got H {layer.hidden} and I {layer.intermediate}"
        )
    gate_up_proj, down_proj, router = layer.gate_up_proj, layer.down_proj, layer.router
    if isinstance(layer, MoELayer):
        check_fits(gate_up_proj.nbytes + down_proj.nbytes + router.nbytes)
        gate_up_proj, down_proj, router = map(to_device, (gate_up_proj, down_proj, router))
    routing: dict[str, Any] = {
        "router": router,
        "top_k": layer.top_k,
        "renormalize": layer.renormalize,
        "activation": layer.activation,
    }
    x = to_device(workload.tokens[0])
    with Context(engine="cuda", placement=workload.placement, **workload.limits) as context:
        for trace in (False, True, True):  # the first traced call loads its kernel
            y = moe(context, x, gate_up_proj, down_proj, trace=trace, **routing)
        context.synchronize()
        return to_host(y), context.last_call


def some_experts(layer: DeviceLayer, experts: np.ndarray) -> MoELayer:
    """The layer with these experts alone, in host memory; the router whole."""
    return MoELayer(
        name=layer.name,
        router=to_host(layer.router),
        gate_up_proj=np.stack([to_host(layer.gate_up_proj[expert]) for expert in experts.tolist()]),
        down_proj=np.stack([to_host(layer.down_proj[expert]) for expert in experts.tolist()]),
        top_k=layer.top_k,
        renormalize=layer.renormalize,
        activation=layer.activation,
    )


def require(engine: str) -> None:
    """Refuses an engine that this machine has not."""
    if engine == "cuda" and (lacking := missing()):
        raise FlashMoEError(f"--engine cuda: expected {lacking}, found none; see flashmoe info")
