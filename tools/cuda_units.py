"""What tools/compile_cuda.py compiles: instances of the layer's kernels, and the instructions that each must have."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import nvshmem_headers
from flashmoe import jit
from flashmoe.jit import Variant
from flashmoe.spec import ACTIVATIONS

ROOT = Path(__file__).resolve().parent.parent
SOURCES = (*(ROOT / "csrc" / "cuda" / "entry").glob("*.cu"), *(ROOT / "benchmarks").glob("*.cu"))

# Names in SASS of instructions of the layer's kernels: TMA loads of the weights, and cp.async, which gathers the
# tokens' rows; then wgmma, wgmma for FP8, and mma.sync.
LOADS = ("UTMALDG", "LDGSTS")
WGMMA, WGMMA_FP8, MMA = "HGMMA", "QGMMA", "HMMA"

CLAMPED = "clamped_swiglu"  # the activation that takes the most registers


@dataclass(frozen=True)
class Unit:
    """One thing to compile: a build of one of the layer's kernels, or a source without options."""

    of: Variant | Path
    nvshmem: str = ""
    """The release of NVSHMEM whose headers it is compiled with; empty: it needs none."""

    @property
    def variant(self) -> Variant | None:
        """The build of one of the layer's kernels; None: the unit is another source."""
        return self.of if isinstance(self.of, Variant) else None

    @property
    def source(self) -> Path:
        return jit.entry_of(ROOT, self.of) if isinstance(self.of, Variant) else self.of

    @property
    def required(self) -> tuple[str, ...]:
        """The instructions without which the kernel would be slow."""
        variant = self.variant
        if variant is None:
            return ()
        if variant.exact or (variant.few and variant.dtype == "float32"):  # both multiply without the tensor cores
            return LOADS
        if variant.few:
            many_rows = not (variant.group or variant.quantised or variant.mxfp4)  # units of more than 16 rows
            return (*((WGMMA,) if many_rows else ()), MMA, *LOADS)
        if variant.quantised:
            return (WGMMA, WGMMA_FP8, *LOADS)  # the router's products are not in FP8, but in y's type
        by_fragments = variant.backward and variant.dtype == "float32"
        return (MMA if by_fragments else WGMMA, *LOADS)

    @property
    def title(self) -> str:
        defines = [flag for flag in self.variant.flags if flag.startswith("-D")] if self.variant else []
        headers = [f"(NVSHMEM {self.nvshmem})"] if self.nvshmem else []
        return " ".join([str(self.source.relative_to(ROOT)), *defines, *headers])


def plain_variants(every: bool) -> list[Variant]:
    """The kernels of plain layers. With `every`: each type and activation, also traced. Otherwise bfloat16 with three
    activations, with a gate and without one, among them the one that takes the most registers; one of them also traced;
    and the other types with what differs most from these."""
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
    """Kernels with the option `which`, which only 16-bit types have: in bfloat16, without a gate and with the
    activation that takes the most registers. With `every`, also with the plain gate, in float16, and one that is
    traced, with the activation `traced`."""
    kinds = [("bfloat16", "gelu"), ("bfloat16", CLAMPED)]
    if every:
        kinds += [("bfloat16", "swiglu"), ("float16", "swiglu")]
    found = [Variant(*kind, **{which: True}) for kind in kinds]
    return [*found, Variant(activation=traced, trace=True, **{which: True})] if every else found


def transposed_variants(every: bool) -> list[Variant]:
    """Kernels for transposed weights."""
    return of_16_bits("transposed", CLAMPED, every)


def quantised_variants(every: bool) -> list[Variant]:
    """Kernels for experts in FP8."""
    return of_16_bits("quantised", "swiglu", every)


def few_variants(every: bool) -> list[Variant]:
    """Kernels for a few tokens. For a rank alone: the same options as the kernels for any number of tokens have, of
    plain layers and of experts in FP8, and those of FP8 once more for MXFP4. For groups: with the activation that takes
    the most registers. With `every`: each type, type of weights and activation."""
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
    """Kernels of forward passes that keep what gradients need, and of backward passes. For a rank alone: without a
    gate, and with the activation that takes the most registers, for both layouts of weights. For several ranks: with
    that activation; of backward passes also with all options that a layer can add (`on_input`, `sliced`), and these in
    float32 too. With `every`: each type, layout and activation, with each set of these options, alone and for several
    ranks."""
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
    """Kernels for groups on several machines: with the activation that takes the most registers. With `every`, also
    with the plain gate, in the other types and in FP8."""
    found = [Variant(activation=CLAMPED, machines=True)]
    if every:
        found += [Variant(machines=True), Variant(quantised=True, machines=True)]
        found += [Variant(dtype, CLAMPED, machines=True) for dtype in ("float16", "float32")]
    return found


def rdma_units(every: bool) -> list[Unit]:
    """Kernels with NVSHMEM's puts. With the newest release of NVSHMEM, which inlines the most code: at least one kernel
    for each way in which kernels divide the registers among their warps. With the oldest release only one kernel: it
    has all calls of NVSHMEM, and each further compilation would take a core half a minute."""
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
"""The kinds of kernels that need no headers of NVSHMEM."""


def units(every: bool = False) -> list[Unit]:
    """All that is to be compiled: of each kind of kernel the instances that are most likely to have faults, or with
    `every` all instances; and each source without instances."""
    found = [Unit(each) for of_kind in KINDS for each in of_kind(every)] + rdma_units(every)
    entries = {unit.source for unit in found}
    return found + [Unit(source) for source in sorted(SOURCES) if source not in entries]
