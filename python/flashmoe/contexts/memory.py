"""How much memory a context takes, before it is made.

The terms of heap and workspace are the rows of the C++ field tables from which the engine itself allocates, so plan and
allocation cannot differ. All figures are per rank unless said otherwise. Not counted: what does not grow with the
limits (a GPU's kernels and tables of a few KB), and the buffer of a traced call.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .. import _ffi
from ..errors import HeapError, InvalidArgument
from ..jit import TRAINED
from ..placement import Placement
from ..spec import ACTIVATIONS, DTYPES, ELEMENT_BYTES, bounded, dtype_named, one_of, truth
from .limits import ContextSpec, checked_context

HOPPER_PROCESSORS = 132
"""Multiprocessors of an H100 or H200 (SXM)."""

SHARED_MEMORY = "/dev/shm"
"""The file system in which the CPU engine's symmetric heaps are, for all ranks of a machine."""

CONTROL_PAGE = 3 * 4096
"""Bytes in front of each heap in `SHARED_MEMORY`, by which the ranks meet (csrc/host/segment.h)."""

PUBLISHED = (
    (4096, 16, 128.57),
    (4096, 32, 128.55),
    (4096, 64, 256.91),
    (4096, 128, 513.98),
    (8192, 16, 256.95),
    (8192, 32, 256.91),
    (8192, 64, 256.91),
    (8192, 128, 514.17),
    (16384, 16, 513.90),
    (16384, 32, 513.81),
    (16384, 64, 513.81),
    (16384, 128, 514.54),
)
"""FlashDMoE, table 6.2: (tokens of a rank, experts, the memory of a rank in MiB). A token's row is 4 KiB. An expert has
room for tokens / experts tokens of each rank: K = 1 and a capacity factor of 1."""


@dataclass(frozen=True)
class Term:
    """One array of a rank's memory."""

    name: str
    region: str
    """``heap``: mapped by the other ranks; ``workspace``: private; ``kept``: taken from a call until its backward pass
    is over; ``pass``: taken during a backward pass; ``call``: taken during a call that keeps."""
    shape: tuple[int, ...]
    elem_bytes: int
    bytes: int
    """With alignment, so sometimes a little more than the product of `shape` and `elem_bytes`."""
    writer: str
    """Which ranks write it."""
    why: str
    """The coordinates of its elements in brackets, and its purpose."""

    @property
    def formula(self) -> str:
        """The product that gives `bytes`, such as ``3 x 512 x 4,096 B``."""
        factors = [f"{size:,}" for size in (*self.shape, self.elem_bytes) if size != 1]
        return " x ".join(factors or ["1"]) + " B"


@dataclass(frozen=True)
class MemoryPlan:
    """Everything a group of `ranks` contexts allocates."""

    ranks: int
    max_tokens: int
    """Tokens per rank for which the contexts are made."""
    terms: tuple[Term, ...]
    ranks_here: int
    """The most ranks that one machine has."""

    @property
    def heap_bytes(self) -> int:
        """Bytes of one rank's symmetric heap."""
        return self._bytes_of("heap")

    @property
    def workspace_bytes(self) -> int:
        """Bytes of one rank's private workspace."""
        return self._bytes_of("workspace")

    @property
    def kept_bytes(self) -> int:
        """Bytes that one call keeps on a rank for its gradients, if every rank computes the same number of rows."""
        return self._bytes_of("kept")

    @property
    def pass_bytes(self) -> int:
        """Bytes that one backward pass takes in addition; on a GPU, only those for its kernel are counted."""
        return self._bytes_of("pass")

    @property
    def call_bytes(self) -> int:
        """Bytes that one call that keeps takes in addition, until it ends; only several ranks on GPUs need them."""
        return self._bytes_of("call")

    @property
    def total_bytes(self) -> int:
        """Heap and workspace."""
        return self.heap_bytes + self.workspace_bytes

    def _bytes_of(self, region: str) -> int:
        return sum(term.bytes for term in self.terms if term.region == region)


@dataclass(frozen=True)
class TrainingCost:
    """What a rank pays for gradients in one of several ways, if ranks have even loads. The ways differ in what a call
    keeps, and what the backward pass sends or computes again."""

    way: str
    """The way's name. ``checkpoint`` is ``torch.utils.checkpoint``, around a block of the model."""
    kept_bytes: int
    """Bytes that a layer's call keeps until its backward pass."""
    heap_bytes: int
    """Bytes of the heap in addition to what calls without gradients need."""
    pass_bytes: int
    """Bytes that a backward pass takes until it ends; on a GPU, only those for its kernel are counted."""
    sent: int
    """How often in a training step rows (x, or gradients of y) are sent to the ranks of the experts."""
    returned: int
    """How often in a training step rows come back from the ranks of the experts."""
    products: int
    """How many products of matrices a training step has for each expert: of its rows with one of its two matrices, or
    for the gradient of one of them."""


@dataclass(frozen=True)
class Comparison:
    """A row of `PUBLISHED`, and what the CUDA engine takes for the same sizes."""

    max_tokens: int
    experts: int
    published_bytes: float
    bounded: MemoryPlan
    """With a capacity factor of 1."""
    dropless: MemoryPlan


def plan_memory(
    *,
    engine: str = "cpu",
    ranks: int,
    max_tokens: int,
    hidden: int,
    intermediate: int,
    experts: int,
    top_k: int,
    dtype: Any = "bfloat16",
    return_mode: str = "auto",
    processors: int | None = None,
    capacity_factor: float | None = None,
    transport: str = "auto",
    shared_intermediate: int = 0,
    placement: Placement | None = None,
    slices: int = 1,
    weight_dtype: Any = None,
    training: bool = False,
    activation: str = "swiglu",
    redispatch: bool = False,
    machines: Sequence[int] = (),
) -> MemoryPlan:
    """The memory of a context with these arguments (see `flashmoe.Context`).

    With `transport` ``"auto"``, ranks are taken to have each other's memory mapped. `training` adds what a call keeps
    for its gradients, with a router and this `activation`, and what its two passes take in addition; with `redispatch`
    a call keeps no rows of other ranks' tokens. `machines`: for each rank, any number that stands for its machine;
    empty: all ranks are on one machine. (Ranks of the CUDA engine are always on one machine, except in tests.)

    `processors`: threads of the CPU engine, default this machine's cores shared among the ranks; multiprocessors of the
    GPU, default `HOPPER_PROCESSORS`.

    Raises `InvalidArgument` for what no context can have.
    """
    if engine == "cuda" and processors is None:
        processors = HOPPER_PROCESSORS
    made_for = checked_context(
        engine=engine,
        ranks=ranks,
        max_tokens=max_tokens,
        hidden=hidden,
        intermediate=intermediate,
        experts=experts,
        top_k=top_k,
        dtype=dtype,
        placement=placement,
        return_mode=return_mode,
        processors=processors,
        capacity_factor=capacity_factor,
        transport=transport,
        shared_intermediate=shared_intermediate,
        slices=slices,
        weight_dtype=weight_dtype,
        redispatch=redispatch,
    )
    where = checked_machines(machines, made_for.ranks, transport)
    terms = [Term(**field) for field in _ffi.layout_fields(engine, made_for.limits(), where)]
    if truth("training", training):
        if engine == "cuda" and len(set(where)) > 1:
            raise InvalidArgument("training: expected ranks of one machine with the CUDA engine, got several")
        of_engine = _training_terms_on_gpu if engine == "cuda" else _training_terms
        terms += of_engine(made_for, one_of("activation", activation, ACTIVATIONS))
    return MemoryPlan(ranks, max_tokens, tuple(terms), max((where.count(each) for each in where), default=ranks))


def checked_machines(machines: Sequence[int], ranks: int, transport: str) -> tuple[int, ...]:
    """`machines`, checked to have one entry for each rank, or none. Raises `InvalidArgument`."""
    if len(machines) not in (0, ranks):
        raise InvalidArgument(f"machines: expected one for each of {ranks} ranks, got {len(machines)}")
    if transport == "rdma" and len(set(machines)) > 1:
        raise InvalidArgument(f"machines: expected one with transport 'rdma', got {len(set(machines))}")
    return tuple(bounded("machines", machine, 0, 2**31 - 1) for machine in machines)


def training_costs(**context: Any) -> list[TrainingCost]:
    """What each way to compute gradients costs a rank of a context with these arguments of `plan_memory`. The ways are
    to keep everything, to send x again (several ranks), and to compute everything again. Raises what `plan_memory`
    raises."""

    def plan(redispatch: bool) -> MemoryPlan:
        return plan_memory(**context | {"training": True, "redispatch": redispatch})

    rows = plan(False)
    layer_input = (
        context["max_tokens"]
        * context["hidden"]
        * ELEMENT_BYTES[dtype_named("dtype", context.get("dtype", "bfloat16"), DTYPES)]
    )
    gradients = {term.name: term.bytes for term in rows.terms if term.region == "heap" and term.name in _FOR_GRADIENTS}
    besides = sum(gradients.values())
    costs = [TrainingCost("keep rows", rows.kept_bytes, besides, rows.pass_bytes, 2, 2, 6)]
    if rows.ranks > 1:
        again = plan(True)
        besides_again = besides + again.heap_bytes - rows.heap_bytes
        costs.append(TrainingCost("redispatch", again.kept_bytes, besides_again, again.pass_bytes, 3, 2, 6))
    in_turn = rows.kept_bytes + rows.pass_bytes  # the block that is computed again keeps its own rows meanwhile
    costs.append(TrainingCost("checkpoint", layer_input, besides, in_turn, 3, 3, 8))
    return costs


_FOR_GRADIENTS = ("weight_gradients", "x_rows")
"""Terms of the heap that only backward passes use."""


def _training_terms(made_for: ContextSpec, activation: str) -> list[Term]:
    """CPU engine: what a call of the largest layer keeps, and what its backward pass takes, if ranks have even loads,
    so that each rank computes as many rows as its tokens have choices."""
    if made_for.layer.encoding is not None:
        raise InvalidArgument(
            f"training: expected weights in {made_for.layer.y_type}, got {made_for.layer.weight_type}"
        )
    layer = replace(made_for.layer, activation=activation, return_mode="direct")
    again = made_for.redispatch and made_for.ranks != 1
    each = _ffi.library().training_bytes(layer.to_map(), again)
    elsewhere = min(layer.choices, made_for.ranks - 1)
    kept, gradients = "pre-activations of rows, each with its home, token and weight", "gradients of pre-activations"
    rows = [
        ("kept_rows", "kept", layer.choices, f"[token][choice] {kept}"),
        ("kept_shared_rows", "kept", layer.shared_experts, f"[token] {kept}, of the shared expert"),
        ("kept_tokens", "kept", elsewhere, "[token][rank] at most: x of other ranks' tokens, once a rank"),
        ("kept_routing", "kept", 1, "[token] choices, their weights, and the router's logits"),
        ("pass_rows", "pass", layer.choices, f"[token][choice] {gradients} and of weights"),
        ("pass_shared_rows", "pass", layer.shared_experts, f"[token] {gradients} of the shared expert"),
        ("pass_tokens", "pass", elsewhere, f"[token][rank] at most: dY {'and x ' * again}of other ranks' tokens"),
        ("pass_logits", "pass", 1, "[token] gradients of the router's logits"),
    ]
    return [
        _training_term(name, region, (made_for.max_tokens, count), size, why)
        for (name, region, count, why), size in zip(rows, each, strict=True)
        if count and size
    ]


def _training_terms_on_gpu(made_for: ContextSpec, activation: str) -> list[Term]:
    """CUDA engine: what a call of the largest layer keeps, and what the kernels of both passes take from PyTorch's
    allocator, if ranks have even loads."""
    spec = made_for.layer
    rdma = made_for.transport == "rdma"
    if rdma or spec.x_type not in TRAINED or spec.encoding:
        what = f"{spec.x_type}, weights in {spec.weight_type}"
        what += ", transport 'rdma'" if rdma else ""
        raise InvalidArgument(
            f"training: expected {', '.join(TRAINED[:-1])} or {TRAINED[-1]} and memory that is mapped on the CUDA "
            f"engine, which has no other gradients, got {what}"
        )
    layer = replace(spec, activation=activation, return_mode="direct")
    tokens, choices, size = made_for.max_tokens, layer.choices + layer.shared, ELEMENT_BYTES[layer.x_type]
    bytes_of = _ffi.library().cuda_training_bytes(layer.to_map(), made_for.limits())
    elsewhere, columns = min(layer.choices, made_for.ranks - 1), layer.intermediate
    columns_z = bytes_of["kept_rows"] // (tokens * choices * size)
    tile_rows = bytes_of["tile_rows"] // ((columns + columns_z) * size)
    again = "dY and x" if made_for.redispatch else "dY"
    rows: list[tuple[str, str, tuple[int, ...], int, str]] = [
        ("kept_rows", "kept", (tokens, choices, columns_z), size, "[token][choice][column] pre-activations"),
        ("kept_routing", "kept", (tokens,), bytes_of["kept_routing"] // tokens, "[token] choices and their weights"),
        ("kept_logits", "kept", (tokens, bytes_of["kept_logits"] // tokens // 4), 4, "[token][expert] router's logits"),
        ("z_gradients", "pass", (tile_rows, columns_z), size, "[row of a tile][column] dZ"),
        ("weighted", "pass", (tile_rows, columns), size, "[row of a tile][column] activations x weight"),
        ("weight_parts", "pass", (bytes_of["weight_parts"] // (tokens * choices * 4), tokens, choices), 4,
         "[part][token][choice] of weights' gradients"),
    ]  # fmt: skip
    if made_for.ranks != 1:
        rows += [
            (name, region, (bytes_of[name],), 1, why)
            for name, region, why in (
                ("kept_tokens", "kept", f"[token][{elsewhere} ranks] at most: x of other ranks' tokens, once a rank"),
                ("kept_numbers", "kept", "[rank][token] which of them it is; [expert] its first row"),
                ("pass_tokens", "pass", f"[token][{elsewhere} ranks] at most: {again} of other ranks' tokens"),
                ("gather", "pass", "[row of a tile] where its token's row is"),
                ("call_rows", "call", "[row of a tile][column] pre-activations, of as many tiles as there may be"),
                ("call_tokens", "call", "[peer][token] x of other ranks' tokens"),
                ("call_numbers", "call", "[rank][token] which of them it is, and what is counted"),
            )
            if bytes_of[name]
        ]
    return [_training_term(*row) for row in rows]


def _training_term(name: str, region: str, shape: tuple[int, ...], elem_bytes: int, why: str) -> Term:
    return Term(name, region, shape, elem_bytes, math.prod(shape) * elem_bytes, "this rank", why)


def compare_published(ranks: int) -> list[Comparison]:
    """The rows of `PUBLISHED` for contexts of the CUDA engine, with direct return and an intermediate size of 2048."""

    def plan(max_tokens: int, experts: int, capacity_factor: float | None) -> MemoryPlan:
        return plan_memory(
            engine="cuda",
            ranks=ranks,
            max_tokens=max_tokens,
            hidden=2048,
            intermediate=2048,
            experts=experts,
            top_k=1,
            return_mode="direct",
            capacity_factor=capacity_factor,
        )

    return [
        Comparison(tokens, experts, mib * 2**20, plan(tokens, experts, 1.0), plan(tokens, experts, None))
        for tokens, experts, mib in PUBLISHED
    ]


def check_fits(plan: MemoryPlan, budget: int | None = None) -> None:
    """Raises `HeapError` for a plan that does not fit.

    Without a `budget`: if there are several ranks, the heaps of all ranks of a machine must fit into the free space of
    `SHARED_MEMORY`, where the CPU engine has them. With a `budget`: one rank's heap and workspace must fit into
    `budget` bytes.
    """
    if budget is not None:
        if plan.total_bytes > budget:
            raise HeapError(
                f"memory: expected at most the budget of {format_bytes(budget)} per rank, got "
                f"{format_bytes(plan.heap_bytes)} heap + {format_bytes(plan.workspace_bytes)} workspace; "
                "lower tokens per rank"
            )
        return
    if plan.ranks == 1:
        return  # a rank that is alone has no heap in SHARED_MEMORY, but private memory
    free = shutil.disk_usage(SHARED_MEMORY).free
    needed = plan.ranks_here * (plan.heap_bytes + CONTROL_PAGE)
    if needed > free:
        raise HeapError(
            f"memory: expected at most the {format_bytes(free)} free in {SHARED_MEMORY}, got {plan.ranks_here} "
            f"heaps of {format_bytes(plan.heap_bytes)}; lower tokens per rank, or enlarge {SHARED_MEMORY}"
        )


def check_machine(plan: MemoryPlan) -> None:
    """Raises `HeapError` for a plan of the CPU engine that takes more memory than this machine has, swap included.

    A context may need less than its plan, because the system provides memory only when it is first used, and only the
    worst routing uses all of it.
    """
    has = machine_bytes()
    if plan.ranks_here * plan.total_bytes > has:
        raise HeapError(
            f"memory: expected at most the {format_bytes(has)} that this machine has, swap included, got "
            f"{plan.ranks_here} x {format_bytes(plan.total_bytes)} of heap and workspace; lower tokens per rank"
        )


def machine_bytes() -> int:
    """Memory and swap of this machine, used or not."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    sizes = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    return (sizes["MemTotal"] + sizes["SwapTotal"]) * 1024


def format_bytes(count: float) -> str:
    """A count of bytes with two or three digits and a binary unit, such as ``16.0 MiB``."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while count >= 1024 and len(units) > 1:
        count /= 1024
        units.pop(0)
    digits = 0 if units[0] == "B" or count >= 100 else 1
    return f"{count:,.{digits}f} {units[0]}"


def parse_bytes(text: str) -> int:
    """The bytes in a text such as ``512MiB``, ``2G`` or ``1000000``; units are powers of 1024."""
    stripped = text.strip().upper().removesuffix("B").removesuffix("I")
    power = "KMGT".find(stripped[-1:]) + 1 if stripped[-1:] else 0
    number = stripped[:-1] if power else stripped
    try:
        count = float(number) * 1024**power
    except ValueError:
        count = -1.0
    if not 0 < count < float("inf"):
        raise InvalidArgument(f"budget: expected a size such as 512MiB or 2G, got {text!r}")
    return int(count)
