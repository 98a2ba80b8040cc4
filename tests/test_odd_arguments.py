"""Whatever an argument is, the answer is a result or one of this package's errors, and the context stays good.

FLASHMOE_EXAMPLES (500 if it is not set) sets the number of examples of each random test: half of it. They are new in
each run; a failure prints how to repeat it.
"""

from __future__ import annotations

import decimal
import fractions
import inspect
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import flashmoe
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from problems import random_problem

torch = pytest.importorskip("torch")
from flashmoe.nn import MoE  # noqa: E402  (needs torch)

EXAMPLES = int(os.environ.get("FLASHMOE_EXAMPLES", "500"))
SIZES = {"hidden": 16, "intermediate": 12, "experts": 6, "top_k": 2}
LIMITS = {**SIZES, "max_tokens": 8, "dtype": "float32", "processors": 2, "timeout": 20.0}

pytestmark = pytest.mark.filterwarnings("ignore")  # PyTorch and NumPy warn about odd values


class Raising:
    """Raises an error at any use, except if it is asked for its type or its hash."""

    shape = property(lambda self: self._raise())
    dtype = property(lambda self: self._raise())

    def _raise(self, *_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("asked")

    __index__ = __int__ = __float__ = __bool__ = __len__ = __iter__ = __getitem__ = __eq__ = __dlpack__ = _raise
    __hash__ = object.__hash__


class Lying:
    """Looks like a tensor, but is none."""

    shape, dtype, device = (8, 16), np.dtype(np.float32), "cpu"

    def __dlpack__(self, **_: Any) -> Any:
        return object()

    def data_ptr(self) -> int:
        return 4096

    def is_contiguous(self) -> bool:
        return True


ODD: tuple[Callable[[], Any], ...] = (
    lambda: None, lambda: True, lambda: False, lambda: 10**400, lambda: 1j, lambda: "float32", lambda: "direct",
    lambda: "\0", lambda: "\ud800", lambda: "cuda", lambda: "cpu", lambda: b"cpu", list, tuple, dict,
    lambda: {"raster": 1}, lambda: {"raster": "x"}, lambda: {1: 2, "x": 3}, lambda: {1, 2}, object, lambda: object,
    lambda: print, lambda: range(6), lambda: iter([0] * 6), lambda: [0] * 6, lambda: [0, 1, 2], lambda: [[0] * 6],
    lambda: Ellipsis, lambda: NotImplemented, lambda: decimal.Decimal("NaN"), lambda: fractions.Fraction(1, 3),
    lambda: itertools.repeat(0, 6), lambda: itertools.repeat(0), Raising, Lying,
    lambda: np.float32(1.5), lambda: np.int64(2), lambda: np.bool_(True), lambda: np.dtype("float32"),
    lambda: np.float32, lambda: np.array(2), lambda: np.array([2]), lambda: np.zeros(0), lambda: np.zeros(6, int),
    lambda: np.zeros((8, 16), np.float32), lambda: np.zeros((8, 16)), lambda: np.zeros((8, 2), np.int32),
    lambda: np.zeros((6, 16), np.float32), lambda: np.zeros((8, 16), object), lambda: np.zeros((8, 16), "M8[s]"),
    lambda: np.zeros((8, 16), "U1"), lambda: np.zeros(8, [("a", "f4")]), lambda: np.ma.zeros((8, 16), np.float32),
    lambda: np.zeros((8, 16), ml_dtypes.float8_e4m3fn), lambda: np.zeros((8, 16), ">f4"),
    lambda: np.zeros((0, 16), np.float32), lambda: np.broadcast_to(np.float32(0), (8, 16)),
    lambda: torch.float32, lambda: torch.tensor(2), lambda: torch.zeros(2), lambda: torch.zeros(8, 16),
    lambda: torch.zeros(8, 16, device="meta"), lambda: torch.tensor(1.0, device="meta"),
    lambda: torch.zeros(8, 16).to_sparse(), lambda: torch.zeros(8, 16).to_sparse_csr(),
    lambda: torch.nested.nested_tensor([torch.zeros(2, 16)]), lambda: torch.zeros(8, 16, dtype=torch.complex64),
    lambda: torch.nested.nested_tensor([torch.zeros(2, 16)], layout=torch.jagged),
    lambda: torch.quantize_per_tensor(torch.zeros(8, 16), 0.1, 0, torch.quint8),
    lambda: torch.zeros(16).expand(8, 16), lambda: torch.zeros(8, 16).to_mkldnn(),
    lambda: torch.nn.Parameter(torch.zeros(8, 16)),
)  # fmt: skip
"""Values of wrong types, and some that are right for some arguments. They are made anew for each example."""

# Large sizes that are valid are left out, because contexts are made with these numbers.
numbers = st.integers(max_value=64) | st.integers(min_value=2**21) | st.floats()
odd = (
    st.integers(0, len(ODD) - 1).map(lambda i: ODD[i]())
    | numbers
    | st.text(max_size=8)
    | st.binary(max_size=8)
    | st.lists(numbers, max_size=8)
    | st.dictionaries(st.text(max_size=4), numbers, max_size=2)
)
examples = settings(
    max_examples=max(1, EXAMPLES // 2),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


def keywords(function: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


@pytest.fixture(scope="module")
def ctx() -> Iterator[flashmoe.Context]:
    with flashmoe.Context(**LIMITS) as ctx:
        yield ctx


def good_call(ctx: flashmoe.Context, fused: bool, library: str) -> dict[str, Any]:
    arguments = random_problem(1, [8], fused=fused, **SIZES).arguments(0)
    if library != "numpy":
        for name, value in arguments.items():
            if isinstance(value, np.ndarray):
                arguments[name] = torch.from_numpy(value)
    if library == "torch with gradients":
        arguments["down_proj"].requires_grad_()
    return {"ctx": ctx, **arguments}


@examples
@given(
    st.sampled_from(keywords(flashmoe.moe)),
    odd,
    st.booleans(),
    st.sampled_from(["numpy", "torch", "torch with gradients"]),
)
def test_odd_arguments_of_a_call(ctx, name, value, fused, library):
    arguments = good_call(ctx, fused, library)
    try:
        y = flashmoe.moe(**arguments | {name: value})
        assert tuple(y.shape[1:]) == (16,)
    except flashmoe.FlashMoEError as error:
        assert "expected" in str(error)
    assert flashmoe.moe(**arguments).shape == (8, 16)


@pytest.mark.parametrize("library", ["numpy", "torch", "torch with gradients"])
@pytest.mark.parametrize("fused", [False, True])
def test_x_without_dimensions(ctx, fused, library):
    arguments = good_call(ctx, fused, library)
    one = arguments["x"][:1, :1].reshape(())
    with pytest.raises(flashmoe.InvalidArgument, match=r"^x: expected \[T, H\], got \[\]$"):
        flashmoe.moe(**arguments | {"x": one})
    assert flashmoe.moe(**arguments).shape == (8, 16)


@examples
@given(st.sampled_from(keywords(flashmoe.Context.__init__)), odd)
def test_odd_arguments_of_a_context(name, value):
    try:
        flashmoe.Context(**LIMITS | {name: value}).close()
    except flashmoe.FlashMoEError as error:
        assert "expected" in str(error)


@examples
@given(st.sampled_from(keywords(MoE.__init__)), odd)
def test_odd_arguments_of_a_module(ctx, name, value):
    try:
        module = MoE(**{"ctx": ctx, **SIZES, name: value})
    except flashmoe.FlashMoEError as error:
        assert "expected" in str(error)
        return
    x = torch.zeros(3, module.gate.weight.shape[1], dtype=module.gate.weight.dtype)
    assert module(x).shape == x.shape


@examples
@given(odd)
def test_odd_input_of_a_module(ctx, value):
    module = MoE(ctx, **SIZES)
    try:
        assert module(value).shape[-1] == 16
    except flashmoe.FlashMoEError as error:
        assert "expected" in str(error)


def test_unknown_arguments(ctx):
    """They raise TypeError, as they do in any function."""
    for call, arguments in (
        (flashmoe.moe, good_call(ctx, True, "numpy")),
        (flashmoe.Context, LIMITS),
        (MoE, {"ctx": ctx, **SIZES}),
    ):
        with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
            call(**arguments, colour=1)
