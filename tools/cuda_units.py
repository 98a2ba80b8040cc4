"""What tools/compile_cuda.py compiles: which instances of the layer's kernels there are, and what each is built on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import nvshmem_headers
from flashmoe import jit
from flashmoe.jit import Variant
from flashmoe.spec import ACTIVATIONS

ROOT = Path(__file__).resolve().parent.parent
SOURCES = (*(ROOT / "csrc" / "cuda" / "entry").glob("*.cu"), *(ROOT / "benchmarks").glob("*.cu"))

# Of the layer's kernels, by their names in SASS: TMA loads of the weights and cp.async that gathers the tokens' rows,
# wgmma and mma.sync.
LOADS = ("UTMALDG", "LDGSTS")
WGMMA, WGMMA_FP8, MMA = "HGMMA", "QGMMA", "HMMA"

CLAMPED = "clamped_swiglu"  # of most registers


@dataclass(frozen=True)
class Unit:
    """A kernel's build, or a source without options."""

    of: Variant | Path
    nvshmem: str = ""
    """The release whose headers it is compiled with; empty: with none."""

    @property
    def variant(self) -> Variant | None:
        """None: it is not one of the layer's kernels."""
        return self.of if isinstance(self.of, Variant) else None

    @property
    def source(self) -> Path:
        return jit.entry_of(ROOT, self.of) if isinstance(self.of, Variant) else self.of

    @property
    def required(self) -> tuple[str, ...]:
        """The instructions that it is built on."""
        variant = self.variant
        if variant is None:
            return ()
        if variant.exact or (variant.few and variant.dtype == "float32"):  # whose few rows are multiplied exactly
            return LOADS
        if variant.few:
            return (MMA, *LOADS)
        if variant.quantised:
            return (WGMMA, WGMMA_FP8, *LOADS)  # the router's products are of y's type
        by_fragments = variant.backward and variant.dtype == "float32"
        return (MMA if by_fragments else WGMMA, *LOADS)

    @property
    def title(self) -> str:
        defines = [flag for flag in self.variant.flags if flag.startswith("-D")] if self.variant else []
        headers = [f"(NVSHMEM {self.nvshmem})"] if self.nvshmem else []
        return " ".join([str(self.source.relative_to(ROOT)), *defines, *headers])


def plain_variants(every: bool) -> list[Variant]:
    """Those of plain layers. Unless `every` one is asked for, bfloat16 has the activations of most instructions and of
    most registers, with a gate and without one, and is traced; the other types have what differs most from that."""
    found = []
    plain = (("bfloat16", ("swiglu", "gelu", CLAMPED)), ("float16", (CLAMPED,)), ("float32", ("gelu", CLAMPED)))
    for dtype, least, *exact in (*plain, ("float32", (CLAMPED,), True)):
        for activation in ACTIVATIONS if every else least:
            untraced = Variant(dtype, activation, exact=bool(exact))
            found.append(untraced)
            if every or (dtype, activation) == ("bfloat16", "swiglu"):
                found.append(replace(untraced, trace=True))
    return found


def of_16_bits(which: str, traced: str, every: bool) -> list[Variant]:
    """Of kernels that 16-bit types have; `every` one: with the plain gate, of the other type, and traced too."""
    kinds = [("bfloat16", "gelu"), ("bfloat16", CLAMPED)]
    if every:
        kinds += [("bfloat16", "swiglu"), ("float16", "swiglu")]
    found = [Variant(*kind, **{which: True}) for kind in kinds]
    return [*found, Variant(activation=traced, trace=True, **{which: True})] if every else found


def transposed_variants(every: bool) -> list[Variant]:
    """Of transposed weights, which 16-bit types have: without a gate, and with the one of most registers."""
    return of_16_bits("transposed", CLAMPED, every)


def quantised_variants(every: bool) -> list[Variant]:
    """Of experts in FP8: without a gate, and with the one of most registers."""
    return of_16_bits("quantised", "swiglu", every)


def few_variants(every: bool) -> list[Variant]:
    """Of a few tokens: of a rank alone what plain layers and experts in FP8 have of any number, and of experts in MXFP4
    as of those in FP8; of groups with the gate of most registers. `every` one: of each type, weights and activation."""
    encodings: tuple[dict[str, bool], ...] = ({}, {"quantised": True}, {"mxfp4": True})
    if not every:
        alone = [*plain_variants(False), *quantised_variants(False)]
        found = [replace(each, few=True) for each in alone]
        found += [replace(each, quantised=False, mxfp4=True, few=True) for each in quantised_variants(False)]
        return found + [Variant(activation=CLAMPED, **of, few=True, group=True) for of in encodings[:2]]
    kinds = [
        ({"dtype": dtype} | of, (False, True)[: 1 + ("mxfp4" not in of)])
        for dtype in jit.BESIDE_QUANTISED
        for of in encodings
    ]
    kinds += [({"dtype": "float32", "exact": exact}, (False,)) for exact in (False, True)]
    return [
        Variant(**of, activation=activation, trace=trace, few=True, group=group)
        for of, groups in kinds
        for activation in ACTIVATIONS
        for trace in (False, True)
        for group in groups
    ]


def training_variants(every: bool) -> list[Variant]:
    """Of forward passes that keep what gradients need, and of backward passes: without a gate, with the one of most
    registers, and of both layouts of weights; among several ranks, with the one of most registers, of layers that have
    the usual kernels, and of such as have others for all reasons there are, in float32 as well. `every` one: of each
    type, layout and activation, for each set of these reasons, alone and among several ranks."""
    passes: tuple[dict[str, bool], ...] = ({"keeps": True}, {"backward": True})
    if every:
        types = [{"dtype": dtype, "transposed": each} for dtype in jit.TRANSPOSED for each in (False, True)]
        types += [{"dtype": "float32", "exact": each} for each in (False, True)]
        return [
            Variant(**of, activation=activation, on_input=on_input, sliced=sliced, **which, group=group)
            for of in types
            for activation in ACTIVATIONS
            for on_input in (False, True)
            for sliced in (False, True)
            for which in passes
            for group in (False, True)
        ]
    kinds = ({"activation": "gelu"}, {"activation": CLAMPED}, {"activation": CLAMPED, "transposed": True})
    found = [Variant(**kind, **which) for which in passes for kind in kinds]
    found += [Variant(activation=CLAMPED, group=True, **which) for which in passes]
    others = {"on_input": True, "sliced": True, "backward": True, "group": True}
    return found + [Variant(dtype, CLAMPED, **others) for dtype in ("bfloat16", "float32")]


def machines_variants(every: bool) -> list[Variant]:
    """Of groups on several machines: with the gate of most registers; `every` one: of each type, and of FP8."""
    found = [Variant(activation=CLAMPED, machines=True)]
    if every:
        found += [Variant(machines=True), Variant(quantised=True, machines=True)]
        found += [Variant(dtype, CLAMPED, machines=True) for dtype in ("float16", "float32")]
    return found


def rdma_units(every: bool) -> list[Unit]:
    """Those that put to other ranks: one of each set of registers with the newest NVSHMEM, which inlines the most; one
    with the oldest, whose calls are all in it, since each takes half a minute of a core."""
    oldest, newest = nvshmem_headers.RELEASES
    kinds = [("bfloat16", "swiglu"), ("float32", "gelu")]
    if every:
        kinds += [("bfloat16", "gelu"), ("float16", "swiglu"), ("float32", "swiglu")]
    found = [*(Variant(*kind, rdma=True) for kind in kinds), Variant(activation=CLAMPED, rdma=True, transposed=True)]
    return [Unit(Variant(rdma=True), oldest), *(Unit(each, newest) for each in found)]


KINDS = (
    plain_variants,
    transposed_variants,
    quantised_variants,
    few_variants,
    training_variants,
    machines_variants,
)
"""Of kernels that nothing else is needed for."""


def units(every: bool = False) -> list[Unit]:
    """What is to be compiled: of each kind of kernel what tells whether it fits, or `every` instance that there is; and
    each source that has no instances."""
    found = [Unit(each) for of_kind in KINDS for each in of_kind(every)] + rdma_units(every)
    entries = {unit.source for unit in found}
    return found + [Unit(source) for source in sorted(SOURCES) if source not in entries]
