"""Tensors of other libraries, passed by DLPack: what the capsule says counts, and attributes of the object do not."""

from __future__ import annotations

import ctypes
import gc
import re
from collections.abc import Iterator
from typing import Any

import flashmoe
import numpy as np
import pytest
from capsules import CPU, CUDA, CUDA_HOST, TYPES, capsule, exported
from flashmoe import InvalidArgument
from flashmoe.calls.capsule import MOST_DIMENSIONS, NAME, DLTensor
from problems import random_problem

SIZES = {"hidden": 16, "intermediate": 12, "experts": 6, "top_k": 2, "dtype": "float32"}
NAMES = ("gate_up_proj", "down_proj", "router", "topk_ids", "topk_weights")


class Exporter:
    """Exports an array's memory in a capsule. The fields in `said` replace what is true of the array."""

    def __init__(self, array: np.ndarray, **said: Any) -> None:
        self._array, self._said = array, said

    def __dlpack__(self, **_: Any) -> Any:
        array, said = self._array, self._said
        shape = said.get("shape", array.shape)
        strides = said.get("strides", [stride // array.itemsize for stride in array.strides])
        tensor = DLTensor(data=said.get("data", array.ctypes.data), ndim=said.get("ndim", len(shape or ())))
        tensor.device[:] = said.get("device", CPU)
        tensor.code, tensor.bits, tensor.lanes = said.get("type", TYPES[array.dtype.name])
        if shape is not None:
            tensor.shape = (ctypes.c_int64 * len(shape))(*shape)
        if strides is not None:
            tensor.strides = (ctypes.c_int64 * len(strides))(*strides)
        tensor.byte_offset = said.get("byte_offset", 0)
        return capsule(tensor, array, said.get("name", NAME), said.get("deleter", True))

    def __dlpack_device__(self) -> tuple[int, int]:
        return CPU


class Attributed(Exporter):
    """An exporter with the attributes (shape, dtype and others) of another array."""

    def __init__(self, array: np.ndarray, like: np.ndarray, **said: Any) -> None:
        super().__init__(array, **said)
        self.shape, self.dtype, self.device = like.shape, like.dtype, "cpu"
        self.strides, self.size, self.ndim = like.strides, like.size, like.ndim

    def is_contiguous(self) -> bool:
        return True


@pytest.fixture(scope="module")
def ctx() -> Iterator[flashmoe.Context]:
    with flashmoe.Context(max_tokens=20, timeout=20, **SIZES) as ctx:
        yield ctx


@pytest.fixture
def call(ctx):
    """A function that makes a good call in which one argument is replaced. After the test, everything that was exported
    must have been given back."""

    def made(name: str, tensor: Any) -> np.ndarray:
        return flashmoe.moe(ctx, **arguments(name) | {name: tensor})

    yield made
    gc.collect()
    assert not exported


def arguments(name: str) -> dict[str, Any]:
    """The arguments of a good call that has the argument `name`."""
    problem = random_problem(1, [8], fused=not name.startswith("topk_"), **SIZES)
    return problem.arguments(0)


def other(dtype: np.dtype) -> str:
    return "float64" if dtype == np.float32 else "float32"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("strides", ["said", "none"])
@pytest.mark.parametrize("attributes", ["none", "true", "false"])
def test_an_exported_tensor_is_what_its_capsule_says(ctx, call, name, strides, attributes):
    array = arguments(name)[name]
    wanted = flashmoe.moe(ctx, **arguments(name))
    said = {} if strides == "said" else {"strides": None}
    like = array if attributes == "true" else np.zeros((3, 1, 4, 1), np.float64)
    tensor = Exporter(array, **said) if attributes == "none" else Attributed(array, like, **said)
    assert np.array_equal(call(name, tensor), wanted)


@pytest.mark.parametrize("name", NAMES)
def test_a_byte_offset_counts(ctx, call, name):
    array = arguments(name)[name]
    wider = np.concatenate([np.full_like(array[:1], 77), array])
    tensor = Exporter(wider, shape=array.shape, byte_offset=array[:1].nbytes)
    assert np.array_equal(call(name, tensor), flashmoe.moe(ctx, **arguments(name)))


@pytest.mark.parametrize("name", NAMES)
def test_pinned_memory_is_host_memory(ctx, call, name):
    array = arguments(name)[name]
    assert np.array_equal(call(name, Exporter(array, device=CUDA_HOST)), flashmoe.moe(ctx, **arguments(name)))


@pytest.mark.parametrize("name", NAMES)
def test_strides_that_only_the_capsule_says(call, name):
    array = arguments(name)[name]
    spread = np.repeat(array, 2, axis=-1)[..., ::2]
    with pytest.raises(InvalidArgument, match=f"^{name}: expected a contiguous tensor"):
        call(name, Attributed(spread, array))


@pytest.mark.parametrize("name", NAMES)
def test_a_shape_that_only_the_capsule_says(call, name):
    array = arguments(name)[name]
    smaller = array[:, 1:].copy() if name == "router" else array[1:].copy()  # router's first size sets E
    with pytest.raises(InvalidArgument, match=rf"^{name}: expected .*, got {re.escape(str(list(smaller.shape)))}"):
        call(name, Attributed(smaller, array))


@pytest.mark.parametrize("name", NAMES)
def test_a_type_that_only_the_capsule_says(call, name):
    array = arguments(name)[name]
    wrong = other(array.dtype)
    with pytest.raises(InvalidArgument, match=f"^{name}: expected .*, got .*{wrong}"):
        call(name, Attributed(array.astype(wrong), array))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("lanes", [0, 2, 2**16 - 1])
def test_elements_of_several_lanes_or_none(call, name, lanes):
    array = arguments(name)[name]
    code, bits, _ = TYPES[array.dtype.name]
    with pytest.raises(
        InvalidArgument, match=f"^{name}: expected a tensor .*: expected elements of one lane, got {lanes}"
    ):
        call(name, Attributed(array, array, type=(code, bits, lanes)))


@pytest.mark.parametrize("name", NAMES)
def test_memory_of_a_gpu_that_only_the_capsule_says(call, name):
    array = arguments(name)[name]
    with pytest.raises(InvalidArgument, match=f"^{name}: expected a tensor in host memory .*, got device cuda"):
        call(name, Attributed(array, array, device=CUDA))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "said",
    [{"device": (77, 0)}, {"data": None}, {"shape": (-8, 2)}],
    ids=["a device that is none", "no memory", "a negative size"],
)
def test_a_capsule_of_what_is_no_tensor(call, name, said):
    array = arguments(name)[name]
    with pytest.raises(InvalidArgument, match=f"^{name}: expected a tensor "):
        call(name, Attributed(array, array, **said | ({"strides": None} if "shape" in said else {})))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"data": None, "byte_offset": 64}, "a null pointer with offset 64"),
        ({"byte_offset": 2**64 - 4096}, "bytes from"),
        ({"byte_offset": 1}, "a multiple of"),
        ({"shape": None, "ndim": 2}, "2 sizes, got a null pointer"),
        ({"shape": None, "ndim": 2, "strides": None}, "2 sizes, got a null pointer"),
        ({"shape": None, "ndim": 2**31 - 1, "strides": None}, f"at most {MOST_DIMENSIONS} dimensions, got 2147483647"),
        ({"shape": None, "ndim": -1, "strides": None}, f"at most {MOST_DIMENSIONS} dimensions, got -1"),
        ({"shape": [1] * 65}, f"at most {MOST_DIMENSIONS} dimensions, got 65"),
    ],
    ids=["offset", "wraps", "unaligned", "null", "no strides", "many", "negative", "65"],
)
def test_a_capsule_that_cannot_be_followed(call, name, said, why):
    """It is refused, because following it would crash the process."""
    array = arguments(name)[name]
    with pytest.raises(InvalidArgument, match=f"^{name}: expected a tensor that can be .*: expected .*{why}"):
        call(name, Exporter(array, **said))


@pytest.mark.parametrize("made", [None, 7, "dltensor", object()], ids=type)
def test_what_is_no_capsule(call, made):
    class Other:
        def __dlpack__(self, **_: Any) -> Any:
            return made

    with pytest.raises(InvalidArgument, match=r"^router: expected a tensor .*: expected a capsule named dltensor"):
        call("router", Other())


@pytest.mark.parametrize("capsule_name", [b"dltensor_versioned", b"used_dltensor", b""])
def test_a_capsule_of_another_kind(ctx, capsule_name):
    array = arguments("router")["router"]
    with pytest.raises(InvalidArgument, match=r"^router: expected a tensor .*: expected a capsule named dltensor"):
        flashmoe.moe(ctx, **arguments("router") | {"router": Exporter(array, name=capsule_name)})
    exported.clear()  # a capsule of that name has no destructor


def test_a_capsule_that_need_not_be_given_back(ctx):
    array = arguments("router")["router"]
    tensor = Exporter(array, deleter=False)
    assert np.array_equal(
        flashmoe.moe(ctx, **arguments("router") | {"router": tensor}), flashmoe.moe(ctx, **arguments("router"))
    )
    exported.clear()


@pytest.mark.parametrize("error", [BufferError("busy"), TypeError("no"), RuntimeError("gone"), KeyError("x")])
def test_an_exporter_that_raises(call, error):
    class Raising:
        shape, dtype = (6, 16, 12), np.dtype(np.float32)

        def __dlpack__(self, **_: Any) -> Any:
            raise error

    with pytest.raises(InvalidArgument, match=r"^down_proj: expected a tensor that can be exported by DLPack, got"):
        call("down_proj", Raising())


def test_bytes_in_the_other_order(call):
    array = arguments("down_proj")["down_proj"]
    with pytest.raises(InvalidArgument, match=r"^down_proj: expected"):
        call("down_proj", array.astype(array.dtype.newbyteorder()))


class Liar(np.ndarray):
    """An array that says it has one row."""

    shape = property(lambda self: (1, *np.ndarray.shape.__get__(self)[1:]))


def test_a_result_as_large_as_the_memory_of_x(ctx):
    """A result of the shape that x claims would be too small: rows would be written beyond its end."""
    given = arguments("x")
    with pytest.raises(InvalidArgument, match=r"^x: expected \[8, 16\], as its memory is, got \[1, 16\]"):
        flashmoe.moe(ctx, **given | {"x": given["x"].view(Liar)})


def test_arrays_of_derived_types_are_arrays(ctx, call):
    given = arguments("down_proj")
    assert np.array_equal(call("down_proj", given["down_proj"].view(Liar)), flashmoe.moe(ctx, **given))


@pytest.mark.parametrize("name", ["router", "gate_up_proj"])
@pytest.mark.parametrize("exporter", [True, False])
def test_more_experts_than_there_can_be(ctx, name, exporter):
    """The number of experts is refused before anything is allocated for each expert."""
    given = arguments("router" if name == "router" else "topk_ids") | {"placement": None}
    array = np.empty((2**24, *given[name].shape[1:-1], 0), np.float32)
    tensor = Exporter(array, strides=None) if exporter else array
    with pytest.raises(InvalidArgument, match=r"^experts: expected at most 8192, got 16777216"):
        flashmoe.moe(ctx, **given | {name: tensor})
