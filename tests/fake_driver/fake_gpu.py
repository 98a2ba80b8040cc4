"""A GPU that does not exist: driver.cpp stands in for NVIDIA's driver. This module makes the tensors of calls, in host
memory that claims to be on the GPU, and reads what the last launch was told. It is a plugin of pytest with the fixtures
of all cases."""

from __future__ import annotations

import ctypes
import json
import multiprocessing
from dataclasses import replace

import flashmoe
import pytest
import torch
from flashmoe import jit, launch
from flashmoe.engines import cuda

E, K, H, I = 16, 4, 256, 64
SIZES = {"max_tokens": 4096, "hidden": H, "intermediate": I, "experts": E, "top_k": K}

# A process has only one state of NVSHMEM, so each group has processes of its own. A server that has already imported
# the slow modules forks them, which saves each rank about a second and a half.
FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["torch", "pytest", "tvm_ffi", "flashmoe.cli"])

driver = ctypes.CDLL("libcuda.so.1")
driver.fake_last_launch.restype = ctypes.c_char_p
driver.fake_last_move.restype = driver.fake_log.restype = ctypes.c_char_p
driver.fake_allocations.restype = driver.fake_allocated_bytes.restype = ctypes.c_size_t
driver.fake_memory.argtypes = [ctypes.c_size_t]
driver.fake_fault.argtypes = [ctypes.c_uint, ctypes.c_uint, ctypes.c_uint64, ctypes.c_uint64]
driver.fake_refusal.argtypes = [ctypes.c_uint64, ctypes.c_uint64]


class OnGpu(torch.Tensor):
    """A tensor that claims to be on the GPU."""

    device = property(lambda self: torch.device("cuda", 0))


def on_gpu(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype).as_subclass(OnGpu)


_FUSED, _FEW = ("flashmoe_moe", "flashmoe_clock"), ("flashmoe_few", "flashmoe_clock")
KERNELS = {
    **dict.fromkeys(("moe", "moe_by_puts", "moe_keeping", "moe_backward"), _FUSED),
    "moe_keeping_group": (*_FUSED, "flashmoe_count", "flashmoe_move"),
    **dict.fromkeys(("decode", "decode_group", "decode_fp8", "decode_fp8_group", "decode_mxfp4"), _FEW),
}
"""The kernels in the cubin of each source of csrc/cuda/entry/."""


def compiler_of(compiled, cubin):
    """A stand-in for `jit.kernel`: it adds the variant that it is asked for to `compiled`, and returns a fake cubin."""
    return lambda variant: compiled.append(variant) or cubin.with_name(f"{variant.entry}.cubin")


def of_both(*args, **options):
    """The two variants that a layer of a rank alone has compiled together: for any number of tokens, and for a few."""
    general = jit.Variant(*args, **options)
    return {general, replace(general, few=True)}


@pytest.fixture
def cubin(tmp_path):
    """The path of moe.cubin, in a folder that has a fake cubin for each source."""
    for entry, kernels in KERNELS.items():
        names = "".join(f" {name}" for name in kernels)
        (tmp_path / f"{entry}.cubin").write_bytes(names.encode() + b"\0")
    return tmp_path / "moe.cubin"


@pytest.fixture(autouse=True)
def device(monkeypatch, tmp_path, cubin):
    """Replaces what the host side asks of PyTorch and nvcc; yields the list of compiled variants; resets the driver."""
    compiled = []
    monkeypatch.setattr(cuda, "current_stream", lambda device: 77)
    monkeypatch.setattr(jit, "kernel", compiler_of(compiled, cubin))
    monkeypatch.setattr(launch, "_SPAWN", FORKED)
    monkeypatch.setenv("FLASHMOE_PROFILES", str(tmp_path / "profiles.json"))
    yield compiled
    driver.fake_capture(0)
    driver.fake_memory(1 << 40)
    driver.fake_compute_capability(9)


@pytest.fixture
def ctx():
    with flashmoe.Context(engine="cuda", **SIZES) as context:
        yield context


def arguments(tokens: int = 100, dtype: torch.dtype = torch.bfloat16, **changes) -> dict:
    made = {
        "x": on_gpu(tokens, H, dtype=dtype),
        "gate_up_proj": on_gpu(E, 2 * I, H, dtype=dtype),
        "down_proj": on_gpu(E, H, I, dtype=dtype),
        "router": on_gpu(E, H, dtype=dtype),
        "top_k": K,
    }
    return {**made, **changes}


def given(tokens: int = 100, ids: torch.dtype = torch.int32, **changes) -> dict:
    routing = {"topk_ids": on_gpu(tokens, K, dtype=ids), "topk_weights": on_gpu(tokens, K, dtype=torch.float32)}
    return {**arguments(tokens), "router": None, "top_k": None, **routing, **changes}


def sparse(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16).to_sparse()


def freed(tensor: torch.Tensor, left: int = 0) -> torch.Tensor:
    """The tensor, after all but `left` bytes of its storage were freed."""
    tensor.untyped_storage().resize_(left)
    return tensor


def launched() -> dict:
    return json.loads(driver.fake_last_launch())


def prepared(ctx: flashmoe.Context) -> dict:
    """The layers that the context knows, by their keys."""
    return ctx._engine.layers
