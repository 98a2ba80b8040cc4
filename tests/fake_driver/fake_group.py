"""Several ranks: each is a process with a GPU of its own, the fake one of fake_gpu.py, and nvshmem.cpp stands in for
NVIDIA's NVSHMEM."""

from __future__ import annotations

import contextlib
import ctypes
import os
import tempfile
from pathlib import Path
from typing import NamedTuple

import flashmoe
import torch
from fake_gpu import SIZES, E, H, I, K, OnGpu, arguments, compiler_of, driver, launched, on_gpu
from flashmoe import jit
from flashmoe import nvshmem as nvshmem_files
from flashmoe.engines import cuda
from flashmoe.launch import RankPool


@contextlib.contextmanager
def fake_world():
    """Yields a name, with which the names of the shared memory of a fake NVSHMEM's ranks begin. Removes that memory."""
    with tempfile.NamedTemporaryFile(prefix="world") as unique:
        world = Path(unique.name).name
        try:
            yield world
        finally:
            for segment in Path("/dev/shm").glob(f"{world}-*"):  # left by ranks that were killed
                segment.unlink()


def on_ranks(function, each, environment=()):
    """What `function(rank, ranks, name, environment, *arguments)` returns on each rank of a group. `each` has a tuple
    of arguments for each rank. The environment that `function` gets also names the world that NVSHMEM's ranks share."""
    with fake_world() as world, RankPool(len(each)) as pool:
        environment = {"FAKE_NVSHMEM_WORLD": world, **dict(environment)}
        return pool.call(function, [(environment, *arguments) for arguments in each], timeout=90)


def pretend(device, cubin, environment):
    """Replaces the GPU, NVSHMEM and compiled kernels in a rank's process. The list `device` holds the GPU's number.
    Returns the list of compiled variants."""
    os.environ.update(environment)
    compiled = []
    nvshmem_files.library = lambda: "libnvshmem_host.so.3"
    cuda.current_stream = lambda device: 77
    jit.kernel = compiler_of(compiled, cubin)
    OnGpu.device = property(lambda self: torch.device("cuda", *device))
    return compiled


def rows_of_halves(tokens, rank):
    """For two ranks with half of the experts each, rank p with `tokens[p]` tokens, which the fake driver routes: how
    many rows the experts of `rank` have, and how many rows `rank` receives from the other rank."""
    experts = [{(t + k) % E for k in range(K)} for t in range(max(tokens))]
    own = set(range(rank * E // 2, (rank + 1) * E // 2))
    rows = sum(len(experts[t] & own) for count in tokens for t in range(count))
    return rows, sum(bool(experts[t] & own) for t in range(tokens[1 - rank]))


def kept_by_halves(room):
    """Where, in the memory that such a rank keeps with this room, four fields begin, in bytes: received rows of x, the
    numbers of these rows, the numbers of experts' first rows, and ids."""
    rows, received, pitch = room
    at_x = 2 * 2 * I * rows
    at_numbers = at_x + 2 * H * received
    at_first = -(-(at_numbers + 4 * 2 * pitch) // 16) * 16
    return at_x, at_numbers, at_first, -(-(at_first + 4 * (E // 2 + 1)) // 16) * 16


class Joined(NamedTuple):
    """The memory of a rank that has joined a group."""

    heap_bytes: int
    workspace_bytes: int
    symmetric_blocks: int
    """NVSHMEM's allocations in the rank's process."""
    symmetric_bytes: int
    device_bytes: int


def join(rank, ranks, name, environment, groups, devices=(0, 1, 2, 3)):
    """Joins one group after the other, each with its settings. Returns for each a `Joined`, or the text of an error."""
    os.environ.update(environment)
    nvshmem_files.library = lambda: os.environ.get("FAKE_NVSHMEM_PATH", "libnvshmem_host.so.3")
    told = []
    for i, changes in enumerate(groups):
        settings = {"timeout": 20.0, **SIZES, **changes}
        size, number = settings.pop("ranks", ranks), rank
        if settings.pop("swapped", False):
            number = ranks - 1 - rank
        driver.fake_memory(1000 if settings.pop("without_memory", None) == rank else 1 << 40)
        if size == 1:
            number = 0
        try:
            with flashmoe.Context(
                engine="cuda", device=devices[rank], rank=number, ranks=size, name=f"{name}-{i}", **settings
            ) as made:
                nvshmem = ctypes.CDLL("libnvshmem_host.so.3")
                nvshmem.fake_nvshmem_allocated_bytes.restype = ctypes.c_size_t
                asked = nvshmem.fake_nvshmem_allocations(), nvshmem.fake_nvshmem_allocated_bytes()
                told.append(Joined(made.heap_bytes, made.workspace_bytes, *asked, driver.fake_allocated_bytes()))
        except flashmoe.FlashMoEError as error:
            told.append(f"{type(error).__name__}: {error}")
    return told


def joined(ranks, *groups, devices=(0, 1, 2, 3), environment=()):
    """For each rank, what `join` returns on it."""
    return on_ranks(join, [(groups, devices)] * ranks, environment)


class Put(NamedTuple):
    """What `put` returns: a context's properties after a call, the compiled variants, and what the launch was told."""

    transport: str
    return_mode: str
    heap_bytes: int
    workspace_bytes: int
    registered_bytes: int
    modules: int
    """Modules that NVSHMEM knows of after the call."""
    left: tuple[int, int]
    """Bytes registered and modules known, once the context is closed."""
    variants: list
    launch: dict


def weights_of(experts, hidden, inner, weight_dtype=None):
    dtype = torch.bfloat16 if weight_dtype is None else getattr(torch, weight_dtype)
    made = {"gate_up_proj": on_gpu(experts, 2 * inner, hidden, dtype=dtype)}
    made["down_proj"] = on_gpu(experts, hidden, inner, dtype=dtype)
    if weight_dtype is None:
        return made
    scales = {"gate_up_scale": (2 * -(-inner // 128), -(-hidden // 128))}
    scales["down_scale"] = (-(-hidden // 128), -(-inner // 128))
    return made | {name: on_gpu(experts, *shape, dtype=torch.float32) for name, shape in scales.items()}


def put(rank, ranks, name, environment, changes, cubin):
    """Makes a call in a new group. Returns a `Put`, or the text of an error."""
    compiled = pretend([rank], cubin, environment)
    nvshmem = ctypes.CDLL("libnvshmem_host.so.3")
    nvshmem.fake_nvshmem_registered_bytes.restype = ctypes.c_size_t

    def counted():
        return nvshmem.fake_nvshmem_registered_bytes(), nvshmem.fake_nvshmem_modules()

    try:
        settings = {"timeout": 20.0, **SIZES, **changes}
        cuda.machines = settings.pop("machines", ())
        hidden, inner = settings["hidden"], settings["intermediate"]
        tokens, how = settings.pop("tokens", 100), settings.pop("how", {})
        with flashmoe.Context(engine="cuda", device=rank, rank=rank, ranks=ranks, name=name, **settings) as made:
            held = len(made.local_experts())
            local = weights_of(held, hidden, inner, settings.get("weight_dtype"))
            flashmoe.moe(made, **arguments(tokens, x=on_gpu(tokens, hidden), router=on_gpu(E, hidden), **local), **how)
            seen = made.transport, made.return_mode, made.heap_bytes, made.workspace_bytes, *counted()
        return Put(*seen, counted(), compiled, launched())
    except flashmoe.FlashMoEError as error:
        return f"{type(error).__name__}: {error}"


def put_by(ranks, *changes, cubin, environment=()):
    """For each rank, what `put` returns. `changes` are the settings of all ranks, or settings for each rank."""
    each = changes if len(changes) == ranks else changes * ranks
    return on_ranks(put, [(mine, cubin) for mine in each], environment)
