"""From which tensors of a checkpoint's block each array of a layer is made."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ..spec import ENCODINGS, FP8, MXFP4
from ..system.foreign import checkpoint_error, shown
from ..weights.tensor_file import BYTES, DTYPES, WEIGHTS, Stored
from .architectures import Architecture
from .checks import one_dtype
from .files import SCALE_ENDS, StoredTensors
from .planned import Planned

_BLOCK = re.compile(
    r"(?!mtp\.)"  # layers that predict further tokens are numbered separately
    r"(?P<block>(?:.+\.)?layers\.(?P<layer>[0-9]+)\.(?:mlp|block_sparse_moe|feed_forward))"
    r"\.(?:(?:gate|router)\.weight$|experts\.)"
)
_SHARED = re.compile(r"(?P<name>shared_experts?(?:_gate)?)\.")
_QUANTISED = {"weight_packed": "packed integers", "qweight": "packed integers"}
"""Formats of quantised weights that are not read, by the end of the tensors' names by which they are recognised."""
_BLOCKS, _BLOCK_SCALES = ENCODINGS[MXFP4].suffixes
_MERGED = ("experts.down_proj", f"experts.down_proj{_BLOCKS}")
_MOST_LAYER_DIGITS = 9
_EXPERT = re.compile(r"experts\.[0-9]+\.(?P<projection>\w+)\.weight")
_GATED = ["gate_proj", "up_proj", "down_proj"]
_UNGATED = ["up_proj", "down_proj"]
_MIXTRAL = ["w1", "w3", "w2"]  # gate, up and down


def find_block(names: Sequence[str], layer: int | None) -> str:
    """The name of the MoE block of decoder layer `layer`, or of the first layer that has one."""
    blocks: dict[int, str] = {}
    for match in filter(None, map(_BLOCK.match, names)):
        if len(match["layer"]) > _MOST_LAYER_DIGITS:
            raise checkpoint_error("path", f"layer numbers of at most {_MOST_LAYER_DIGITS} digits", match["block"])
        found = blocks.setdefault(int(match["layer"]), match["block"])
        if found != match["block"]:
            raise checkpoint_error("path", f"one MoE block in layer {match['layer']}", f"{found} and {match['block']}")
    if not blocks:
        raise checkpoint_error("path", "a checkpoint with an MoE layer", "no router or expert tensor")
    if layer is None:
        return blocks[min(blocks)]
    if layer not in blocks:
        dense = any(f"layers.{layer}." in name for name in names)
        raise checkpoint_error("layer", f"one of the MoE layers {sorted(blocks)}", f"{layer}{', a dense one' * dense}")
    return blocks[layer]


def plan_block(
    tensors: StoredTensors, block: str, row: Architecture
) -> tuple[dict[str, Planned], bool, tuple[str, ...]]:
    """The tensors of `block`, by the fields of `MoELayer`; whether its experts are gated; and the modules of a shared
    expert that are left out."""
    parts = {name.removeprefix(f"{block}.") for name in tensors.names if name.startswith(f"{block}.")}
    _check_not_quantised(block, parts)
    shared = {part: match["name"] for part in parts if (match := _SHARED.match(part))}
    parts -= shared.keys()
    router_name = "router.weight" if "router.weight" in parts else "gate.weight"
    router = tensors.stored(f"{block}.{router_name}")
    if len(router.shape) != 2 or 0 in router.shape:
        raise checkpoint_error(router.name, "a non-empty array [E, H]", f"shape {shown(list(router.shape))}")
    plan = {"router": Planned.of(router)}

    if not parts.isdisjoint(_MERGED):
        gated = parts.isdisjoint(("experts.up_proj", f"experts.up_proj{_BLOCKS}"))
        of_experts = _plan_merged(tensors, block, parts, "gate_up_proj" if gated else "up_proj")
        used = {part.name.removeprefix(f"{block}.") for each in of_experts.values() for _, part, _ in each.parts}
        plan |= of_experts
    else:
        order = _projections(parts)
        gated = order is not _UNGATED
        # The router's shape says how many experts there are. If that number is wrong and huge, the generator makes only
        # few names, because the first missing tensor raises.
        names = ([f"experts.{i}.{projection}.weight" for projection in order] for i in range(router.shape[0]))
        experts = [[tensors.matrix(f"{block}.{name}") for name in expert] for expert in names]
        used = {stored.name.removeprefix(f"{block}.") for expert in experts for stored in expert}
        plan |= _plan_experts(block, experts)
        if plan["down_proj"].dtype.name == FP8:
            scales = [[tensors.stored(tensors.scale_of(each.name)) for each in expert] for expert in experts]
            plan |= _plan_scales(block, experts[0], scales)
            used |= {each.name.removeprefix(f"{block}.") for expert in scales for each in expert}
    plan |= {argument: Planned.of(tensors.stored(f"{block}.{name}")) for argument, name in row.tensors.items()}

    unknown = sorted(parts - used - {router_name} - set(row.tensors.values()))
    if unknown:
        # Leaving out a router's bias, for example, would silently make another layer than the model's.
        raise checkpoint_error(
            block, f"a router and routed experts alone, as {row.name} has them", f"also {', '.join(unknown[:4])}"
        )
    if gated and not row.options.get("interleaved") and (of_shared := _plan_shared(tensors, block, shared)):
        return plan | of_shared, gated, ()
    return plan, gated, tuple(sorted(set(shared.values())))


def _plan_merged(tensors: StoredTensors, block: str, parts: set[str], first: str) -> dict[str, Planned]:
    """The matrices of all experts, each kind merged in one tensor, and their scales. `first`: the name of the first
    matrix."""
    names = [f"{block}.experts.{name}" for name in (first, "down_proj")]
    packed = f"experts.down_proj{_BLOCKS}" in parts
    if packed:
        matrices = [_packed(tensors.stored(name + _BLOCKS, BYTES)) for name in names]
    else:
        matrices = [Planned.of(tensors.matrix(name)) for name in names]
    plan = dict(zip(("gate_up_proj", "down_proj"), matrices, strict=True))
    if packed:
        scales = [tensors.stored(name + _BLOCK_SCALES, BYTES) for name in names]
    elif plan["down_proj"].dtype.name == FP8:
        scales = [tensors.stored(tensors.scale_of(name)) for name in names]
    else:
        return plan
    plan["gate_up_scale"], plan["down_scale"] = (Planned.of(each, axes=3) for each in scales)
    return plan


def _packed(stored: Stored) -> Planned:
    """Elements [E, rows, columns / 32, 16] of all experts in MXFP4."""
    if len(stored.shape) != 4 or stored.shape[-1] != ENCODINGS[MXFP4].packed:
        raise checkpoint_error(stored.name, "shape [E, rows, columns / 32, 16]", shown(list(stored.shape)))
    return Planned.of(stored)


def _plan_shared(tensors: StoredTensors, block: str, shared: dict[str, str]) -> dict[str, Planned]:
    """The tensors of a shared expert whose FFN has a gate. `shared`: names of tensors in the block, each with its
    module. Empty if they are not exactly the tensors of such an expert."""
    module = min(shared.values(), default="")
    names = [f"{module}.{projection}.weight" for projection in _GATED]
    gate = f"{module}_gate.weight"
    scales = {name for name in shared if name.endswith(SCALE_ENDS)}
    if not shared or shared.keys() - {gate} - scales != set(names):
        return {}
    first, second, down = (tensors.matrix(f"{block}.{name}") for name in names)
    rows, hidden = (*first.shape, 0, 0)[:2]
    if len(first.shape) != 2 or second.shape != first.shape or down.shape != (hidden, rows) or 0 in first.shape:
        got = ", ".join(shown(list(each.shape)) for each in (first, second, down))
        raise checkpoint_error(f"{block}.{module}", "gate and up [Is, H] and down [H, Is]", f"shapes {got}")
    halves = [((slice(0, rows),), first, None), ((slice(rows, 2 * rows),), second, None)]
    plan = {
        "shared_gate_up": Planned(WEIGHTS[first.dtype], (2 * rows, hidden), halves),
        "shared_down": Planned.of(down),
    }
    one_dtype(f"{block}.{module}", (WEIGHTS[each.dtype] for each in (first, second)))
    if plan["shared_down"].dtype.name == FP8:
        of_three = [tensors.stored(tensors.scale_of(each.name)) for each in (first, second, down)]
        both, of_down = _plan_scales(f"{block}.{module}", [first, second, down], [of_three]).values()
        # These scales were planned as those of one expert. A shared expert's have no axis of experts.
        plan["shared_gate_up_scale"], plan["shared_down_scale"] = both.of_first(), of_down.of_first()
    elif scales:
        raise checkpoint_error(f"{block}.{module}", "scales of matrices in F8_E4M3 alone", f"also {min(scales)}")
    if gate in shared:
        plan["shared_gate"] = Planned.of(tensors.stored(f"{block}.{gate}"))
    return plan


def odd_width(plan: dict[str, Planned], inner: int) -> tuple[str, ...]:
    """The name of the shared expert's module, if its width is no multiple of I; else empty."""
    if "shared_down" not in plan or plan["shared_down"].shape[1] % inner == 0:
        return ()
    return (plan["shared_down"].parts[0][1].name.split(".")[-3],)


def _check_not_quantised(block: str, parts: Iterable[str]) -> None:
    for part in sorted(parts):
        for end, kind in _QUANTISED.items():
            if part.endswith(end):
                raise checkpoint_error(
                    block, f"weights in {', '.join(DTYPES)}, or dequantised to them", f"{kind}: {part}"
                )


def _projections(parts: set[str]) -> list[str]:
    """The names of an expert's matrices, the down projection last."""
    found = {match["projection"] for match in filter(None, map(_EXPERT.fullmatch, parts))}
    if not found.isdisjoint(_MIXTRAL):
        return _MIXTRAL
    return _GATED if "gate_proj" in found else _UNGATED


def _plan_experts(block: str, experts: list[list[Stored]]) -> dict[str, Planned]:
    """gate_up_proj and down_proj, made of each expert's matrices: gate and up [I, H], down [H, I]."""
    dtype = one_dtype(f"{block}.experts", (WEIGHTS[matrix.dtype] for expert in experts for matrix in expert))
    *first, down = zip(*experts, strict=True)  # one tuple per projection, over the experts
    for what, matrices in (("gate and up", sum(first, ())), ("down", down)):
        shapes = sorted({matrix.shape for matrix in matrices})
        if len(shapes) > 1 or len(shapes[0]) != 2:
            got = f"shapes {', '.join(shown(list(shape)) for shape in shapes[:4])}"
            raise checkpoint_error(f"{block}.experts", f"{what} projections that are matrices of one shape", got)
    inner, hidden = first[0][0].shape
    rows = [slice(k * inner, (k + 1) * inner) for k in range(len(first))]
    gate_up = [((i, rows[k]), expert[k], None) for i, expert in enumerate(experts) for k in range(len(first))]
    return {
        "gate_up_proj": Planned(dtype, (len(experts), len(first) * inner, hidden), gate_up),
        "down_proj": Planned(
            dtype, (len(experts), *down[0].shape), [((i,), each, None) for i, each in enumerate(down)]
        ),
    }


def _plan_scales(block: str, matrices: list[Stored], experts: list[list[Stored]]) -> dict[str, Planned]:
    """gate_up_scale and down_scale, made of the scales of each expert's matrices. `matrices`: the matrices of one
    expert. Scales of blocks or rows are put where these lie in the merged matrix. A scale of a whole matrix is repeated
    for each of the matrix's rows, because gate and up have different scales in the merged matrix."""
    *first, down = zip(*experts, strict=True)

    def joined(projections: list[tuple[Stored, ...]], matrix: Stored) -> Planned:
        one = projections[0][0]
        dtype = one_dtype(f"{block} scales", (WEIGHTS[each.dtype] for of_all in projections for each in of_all))
        shapes = {each.shape for of_all in projections for each in of_all}
        if len(shapes) > 1 or len(one.shape) > 2 or 0 in one.shape:
            got = f"shapes {', '.join(shown(list(shape)) for shape in sorted(shapes)[:4])}"
            raise checkpoint_error(f"{block} scales", "matrices, vectors or numbers of one shape", got)
        rows, columns = (*one.shape, 1, 1)[:2]
        places = [
            ((i, slice(k * rows, (k + 1) * rows)), each, None)
            for k, of_all in enumerate(projections)
            for i, each in enumerate(of_all)
        ]
        repeats = matrix.shape[0] if len(one.shape) < 2 and rows == 1 else 1
        return Planned(dtype, (len(experts), len(projections) * rows, columns), places, repeats)

    return {"gate_up_scale": joined(first, matrices[0]), "down_scale": joined([down], matrices[-1])}
