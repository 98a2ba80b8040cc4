"""Read one mixture-of-experts layer from a Hugging Face checkpoint.

Needs numpy and ml_dtypes; neither torch nor transformers. Only the tensors of the layer that is asked for are read,
once all that the files say of them is known to fit together: until then nothing of the size that a file claims is
allocated. How the layer computes, `flashmoe.architectures` says, by the ``model_type`` of ``config.json``. Names are
understood as they are found, in a block ``….mlp``, ``….block_sparse_moe`` or ``….feed_forward``:

* router: ``gate.weight`` or ``router.weight``
* experts, merged: ``experts.gate_up_proj``, ``experts.down_proj``
* experts, one by one: ``experts.N.{gate_proj,up_proj,down_proj}.weight``, or Mixtral's ``experts.N.{w1,w3,w2}.weight``

* a shared expert: ``shared_expert.{gate_proj,up_proj,down_proj}.weight`` and perhaps ``shared_expert_gate.weight``, or
  ``shared_experts.``

* of matrices in FP8 their scales: ``….weight_scale_inv`` or ``….weight_scale``, merged ``….gate_up_proj_scale_inv``
* experts in MXFP4, merged, as gpt-oss has them: ``experts.gate_up_proj_blocks``, ``….gate_up_proj_scales``

Experts without a gate have ``up_proj`` and ``down_proj`` alone. A shared expert that `flashmoe.moe` does not take is
left out, and named.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import numpy as np

from .architectures import Architecture, architecture_of, rule_of
from .errors import CheckpointError, InvalidArgument
from .foreign import REFUSALS, checkpoint_error, is_count, parsed, read, reason, shown
from .memory import format_bytes, machine_bytes
from .scales import SCALE_OF, check_slices, common_kind
from .shares import Box, Cut, checked_ids
from .slices import cut_scales
from .spec import ENCODINGS, FP8, MXFP4, STORED_AS, Encoding, halves_of
from .tensor_file import BYTES, DTYPES, MOST_HEADER_BYTES, READ, WEIGHTS, Stored, TensorFile, read_header
from .tensors import dtype_name

Weights = TypeVar("Weights")

MOST_INDEX_BYTES = MOST_HEADER_BYTES
"""An index names the tensors that headers describe."""
MOST_CONFIG_BYTES = 2**24
"""Ten times what the largest have: those with a name for each of thousands of classes."""

_BLOCK = re.compile(
    r"(?!mtp\.)"  # predicts further tokens, by layers that are numbered by themselves
    r"(?P<block>(?:.+\.)?layers\.(?P<layer>[0-9]+)\.(?:mlp|block_sparse_moe|feed_forward))"
    r"\.(?:(?:gate|router)\.weight$|experts\.)"
)
_SHARED = re.compile(r"(?P<name>shared_experts?(?:_gate)?)\.")
_QUANTISED = {"weight_packed": "packed integers", "qweight": "packed integers"}
"""How weights of fewer bits are stored that are not read, by the end of the name of a tensor that they have."""
OF_EXPERTS = ("gate_up_proj", "down_proj", "gate_up_bias", "down_bias", "gate_up_scale", "down_scale")
"""The tensors of experts, by the names of `flashmoe.moe`."""
SHARED = ("shared_gate_up", "shared_down", "shared_gate", "shared_gate_up_scale", "shared_down_scale")
"""The tensors of a shared expert, by the names of `flashmoe.moe`."""
_SCALE_ENDS = ("_scale_inv", "_scale")
"""What follows the name of a matrix in that of its scales."""
_BLOCKS, _BLOCK_SCALES = ENCODINGS[MXFP4].suffixes
_MERGED = ("experts.down_proj", f"experts.down_proj{_BLOCKS}")
_MOST_LAYER_DIGITS = 9
_EXPERT = re.compile(r"experts\.[0-9]+\.(?P<projection>\w+)\.weight")
_GATED = ["gate_proj", "up_proj", "down_proj"]
_UNGATED = ["up_proj", "down_proj"]
_MIXTRAL = ["w1", "w3", "w2"]  # gate, up and down


@dataclass(frozen=True, eq=False)
class MoELayerOf(Generic[Weights]):
    """The weights and the routing rule of one MoE layer. All but `choice_bias` share one dtype (see `DTYPES`); or the
    experts' matrices are quantised and have scales: in FP8, or in MXFP4, whose tensors have the shapes that
    `flashmoe.moe` takes.

    E is the number of experts, H the hidden size, I the intermediate size of one expert. `tensors` and `rule` are what
    `flashmoe.moe` takes.
    """

    name: str
    """The layer's name in the checkpoint, such as ``model.layers.1.mlp``."""
    router: np.ndarray
    """[E, H]"""
    gate_up_proj: Weights
    """[E, 2I, H], an expert's gate rows before its up rows; [E, I, H] where `activation` has no gate. The `options`
    ``interleaved`` and ``transposed`` say where it is otherwise."""
    down_proj: Weights
    """[E, H, I], or transposed."""
    top_k: int
    """Experts per token."""
    renormalize: bool
    """Whether a token's top-k probabilities are scaled to sum to one."""
    activation: str
    """As `flashmoe.moe` takes it, such as ``swiglu``."""
    router_bias: np.ndarray | None = None
    """[E]"""
    choice_bias: np.ndarray | None = None
    """[E] float32"""
    gate_up_bias: Weights | None = None
    """[E, 2I] or [E, I]"""
    down_bias: Weights | None = None
    """[E, H]"""
    shared_gate_up: np.ndarray | None = None
    """[2Is, H]; transposed as the experts' are."""
    shared_down: np.ndarray | None = None
    """[H, Is], or transposed."""
    shared_gate: np.ndarray | None = None
    """[1, H]"""
    gate_up_scale: Weights | None = None
    """Of quantised matrices, and so are the others: as `flashmoe.moe` takes it."""
    down_scale: Weights | None = None
    shared_gate_up_scale: np.ndarray | None = None
    shared_down_scale: np.ndarray | None = None
    options: dict[str, Any] = field(default_factory=dict)
    """Those of `flashmoe.arguments.LayerOptions` that are not as by default."""
    own_router: str = ""
    """The name of a rule that `flashmoe.moe` does not compute: it takes the layer's experts with given routing."""
    left_out: tuple[str, ...] = ()
    """Names of what else the model's block has: a shared expert whose width is no multiple of I, and whose results the
    model adds to the layer's."""
    slices: int = 1
    """Into how many slices the experts are cut (see `flashmoe.slices`): their tensors then are those of slices, and I
    is a slice's."""
    held: tuple[int, ...] | None = None
    """Ids of the experts, or of their slices, whose tensors these are; None: all."""

    @property
    def experts(self) -> int:
        """E."""
        return self.router.shape[0]

    @property
    def hidden(self) -> int:
        """H."""
        return self.router.shape[1]

    @property
    def intermediate(self) -> int:
        """I."""
        return self._numbers("down_proj")[1 if self.options.get("transposed") else 2]

    @property
    def shared_intermediate(self) -> int:
        """Is, the intermediate size of the shared expert; 0: there is none."""
        if self.shared_down is None:
            return 0
        return self._numbers("shared_down")[0 if self.options.get("transposed") else 1]

    @property
    def dtype(self) -> np.dtype:
        """The dtype of every tensor but the quantised ones and their scales, as NumPy's."""
        return self.router.dtype

    @property
    def weight_dtype(self) -> str:
        """The dtype of the experts' matrices, as `flashmoe.Context` takes it."""
        return self.dtype.name if self.gate_up_scale is None else STORED_AS[dtype_name(self.gate_up_proj)]

    @property
    def weight_scales(self) -> str:
        """What shares a scale, one of `flashmoe.spec.WEIGHT_SCALES`."""
        if self.gate_up_scale is None:
            return "none"
        scales = {"gate_up_proj": self.gate_up_scale, "down_proj": self.down_scale}
        shapes = {name: (self._numbers(name), scale.shape) for name, scale in scales.items()}
        halves = halves_of(self.activation, bool(self.options.get("interleaved")))
        return common_kind(ENCODINGS[self.weight_dtype], shapes, halves)

    def _numbers(self, name: str) -> tuple[int, ...]:
        """The shape of the matrices of that name, as numbers."""
        shape = getattr(self, name).shape
        return shape if self.gate_up_scale is None else ENCODINGS[self.weight_dtype].numbers(shape)

    def with_experts(self, experts: Sequence[int]) -> Self:
        """The layer with the weights of these experts alone, in this order; its router remains [E, H]."""
        held = tuple(experts if self.held is None else (self.held[each] for each in experts))
        return replace(self, held=held, **{name: each[experts] for name, each in self._of_experts().items()})

    def tensors(self) -> dict[str, Any]:
        """The layer's tensors, by the names of `flashmoe.moe`; without the router where it is the model's own."""
        others = {} if self.own_router else {"router": self.router, "router_bias": self.router_bias}
        others["choice_bias"] = self.choice_bias
        others |= self.shared()
        return self._of_experts() | {name: each for name, each in others.items() if each is not None}

    def shared(self) -> dict[str, np.ndarray | None]:
        """The tensors of the shared expert, by the names of `flashmoe.moe`."""
        return {name: getattr(self, name) for name in SHARED}

    def rule(self) -> dict[str, Any]:
        """The other arguments of `flashmoe.moe` that the layer decides on."""
        routing = {} if self.own_router else {"top_k": self.top_k, "renormalize": self.renormalize}
        sliced = {} if self.slices == 1 else {"slices": self.slices}
        return {"activation": self.activation, **routing, **self.options, **sliced}

    def _of_experts(self) -> dict[str, Weights]:
        """The tensors whose first axis are the experts, by the names of `flashmoe.moe`."""
        named = {name: getattr(self, name) for name in OF_EXPERTS}
        return {name: each for name, each in named.items() if each is not None}


class MoELayer(MoELayerOf[np.ndarray]):
    """A layer in host memory."""


def load_layer(
    path: str | Path,
    layer: int | None = None,
    *,
    top_k: int | None = None,
    renormalize: bool | None = None,
    activation: str | None = None,
    slices: int = 1,
    held: Sequence[int] | None = None,
) -> MoELayer:
    """Read one MoE layer, or a rank's part of it.

    Args:
        path: a ``.safetensors`` file, or a checkpoint folder holding ``model.safetensors``, or
            ``model.safetensors.index.json`` and its shards. The ``config.json`` beside the tensors, if there
            is one, says how the layer routes and activates: its ``model_type`` is one of
            `flashmoe.architectures.ARCHITECTURES`, or missing.
        layer: the decoder layer's index; None takes the first that is an MoE layer.
        top_k, renormalize: override the config's ``num_experts_per_tok`` and ``norm_topk_prob``. Without a
            ``config.json``, `top_k` is required and `renormalize` is True if not given.
        activation: overrides the config's ``hidden_act``: ``swiglu`` or ``geglu`` for gated experts, else ``silu``,
            ``gelu``, ``relu`` or ``relu2``. Without a ``config.json``, gated experts are taken to be ``swiglu``.
        slices: into how many slices experts are cut (see `flashmoe.slices`).
        held: ids of the experts, or with `slices` of their slices, whose tensors are read, ascending; default: all. Of
            the others no byte is. `flashmoe.placement.local_experts` has those of a rank.

    Raises:
        InvalidArgument: `slices` is no divisor of I, or cuts blocks of quantised matrices; or `held` are no such ids.
        CheckpointError: a file is missing, truncated or not what its name says; the layer is absent or lacks
            a tensor; the block holds a tensor that `MoELayer` has no place for, or packed integers; shapes or
            dtypes disagree with each other or with the config; or the model or its routing rule is unknown.
    """
    path = Path(path)
    tensors = _Tensors.find(path)
    config = _read_config(path if os.path.isdir(path) else path.parent)
    row = architecture_of(config)
    block = _find_block(tensors.names, layer)
    plan, gated, left_out = _plan_block(tensors, block, row)
    encoding = _checked_encoding(block, plan)
    transposed = bool(row.options.get("transposed")) and not (encoding and encoding.packed)
    sizes = _checked_sizes(block, plan, gated, transposed)
    if left_out := left_out or _odd_width(plan, sizes["inner"]):
        plan = {name: planned for name, planned in plan.items() if name not in SHARED}
    _check_scales(block, plan, encoding, 2 if gated and not row.options.get("interleaved") else 1)
    _check_config(block, row, config, **sizes)
    overrides = {"top_k": top_k, "renormalize": renormalize, "activation": activation}
    rule = rule_of(row, config, gated=gated, experts=sizes["experts"], **overrides)
    fields = {name: rule.pop(name, True) for name in overrides}  # a router of the model's own has no renormalize
    if not transposed:
        rule.pop("transposed", None)
    ids = checked_ids(held, sizes["experts"], slices)
    if slices != 1 or held is not None:
        how = Cut(slices, fields["activation"], bool(row.options.get("interleaved")), transposed)
        if encoding:
            _check_slices(encoding, slices, sizes["inner"])
        whole, plan = plan, {name: planned.share(name, how, ids) for name, planned in plan.items()}
        fields |= {"slices": slices, "held": None if held is None else ids}
    arrays = _read_planned(plan)
    if "choice_bias" in arrays:
        arrays["choice_bias"] = arrays["choice_bias"].astype(np.float32)
    for name in set(SCALE_OF.values()) & set(arrays):
        arrays[name] = np.repeat(arrays[name].astype(encoding.scale), plan[name].repeats, axis=-2)
    if slices != 1 and encoding:
        arrays |= _scales_of_slices(arrays, whole, encoding, how, ids)
    for name in ("shared_gate_up", "shared_down"):
        if name in arrays and transposed:
            arrays[name] = np.ascontiguousarray(arrays[name].T)
    return MoELayer(name=block, **arrays, **fields, options=rule, own_router=row.own_router, left_out=left_out)


def tensor_files(path: str | Path) -> dict[str, Path]:
    """The names of a checkpoint's tensors, and the file that has each; `path` as in `load_layer`. Files that an index
    names are not opened. Raises `CheckpointError` as `load_layer`."""
    return _Tensors.find(Path(path)).files


def tensor_headers(path: str | Path) -> dict[Path, TensorFile]:
    """A checkpoint's files and what each holds; `path` and errors as in `load_layer`."""
    return {file: _header_of(file) for file in dict.fromkeys(tensor_files(path).values())}


def read_config(folder: Path) -> dict[str, Any]:
    """All of config.json. Raises `CheckpointError`."""
    return _read_json(folder / "config.json", MOST_CONFIG_BYTES)


def load_hidden_states(path: str | Path) -> np.ndarray:
    """Read the tensor ``hidden_states``, [T, H] in one of `DTYPES`, from a ``.safetensors`` file.

    Raises:
        CheckpointError: the file is missing or malformed, or holds no such tensor of that rank and dtype.
    """
    stored = _Tensors.find(Path(path)).stored("hidden_states")
    if len(stored.shape) != 2 or 0 in stored.shape:
        raise checkpoint_error("hidden_states", "a non-empty array [T, H]", f"shape {shown(list(stored.shape))}")
    return _read_planned({"hidden_states": _Planned.of(stored)})["hidden_states"]


def shipped_layer() -> tuple[MoELayer, np.ndarray]:
    """The small trained layer this package ships, and hidden states [2048, H] that really reached it.

    The states are the layer's input while its model reads a passage it was not trained on, so that they route
    as unevenly as real tokens do. The README.md of the model's folder says where both come from.
    """
    with resources.as_file(resources.files(__package__) / "assets") as assets:
        # Not in the model's folder: loaders take every safetensors file there for a part of the model.
        states_file = assets / "tiny-qwen3-moe-hidden-states.safetensors"
        hidden_states = load_hidden_states(states_file)
        layer = int(_header_of(states_file).metadata["layer"])
        return load_layer(assets / "tiny-qwen3-moe", layer), hidden_states


@contextmanager
def _expecting(what: str) -> Iterator[None]:
    """Every way in which reading a file can fail is a CheckpointError."""
    try:
        yield
    except REFUSALS as error:
        raise checkpoint_error("path", what, reason(error)) from error


def _header_of(path: Path) -> TensorFile:
    with _expecting(f"a complete safetensors file at {path}"):
        return read_header(path)


# ---- what there is ---------------------------------------------------------------------------------------------------


class _Tensors:
    """The tensors of one checkpoint, by name. The header of a file is read when a tensor in it is asked for."""

    def __init__(self, origin: Path, files: dict[str, Path]):
        self._origin = origin
        self._files = files
        self._headers: dict[Path, TensorFile] = {}

    @classmethod
    def find(cls, path: Path) -> _Tensors:
        """List what a safetensors file or a checkpoint folder holds, without reading any tensor."""
        if not os.path.isdir(path):
            return cls._of_file(path)
        index, file = path / "model.safetensors.index.json", path / "model.safetensors"
        # lexists: a link to nothing is a file that cannot be read, not one that is not there.
        if os.path.lexists(index):
            return cls._of_index(index)
        if os.path.lexists(file):
            return cls._of_file(file)
        raise checkpoint_error("path", f"{file.name} or {index.name} in {path}", "a folder with neither")

    @classmethod
    def _of_file(cls, path: Path) -> _Tensors:
        header = _header_of(path)
        made = cls(path, dict.fromkeys(header.tensors, path))
        made._headers[path] = header
        return made

    @classmethod
    def _of_index(cls, index: Path) -> _Tensors:
        shards = _read_json(index, MOST_INDEX_BYTES).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
            raise checkpoint_error("weight_map", f"an object of tensor names to file names in {index}", shown(shards))
        for shard in shards.values():
            if shard in ("", ".", "..") or "/" in shard or "\0" in shard:  # an index must not reach out of its folder
                raise checkpoint_error("weight_map", f"plain file names in {index}", shown(shard))
        return cls(index, {name: index.parent / shard for name, shard in shards.items()})

    @property
    def names(self) -> list[str]:
        return list(self._files)

    @property
    def files(self) -> dict[str, Path]:
        return dict(self._files)

    def scale_of(self, name: str) -> str:
        """The name of the scales of the matrix `name`, which is in FP8."""
        return next((name + end for end in _SCALE_ENDS if name + end in self._files), name + _SCALE_ENDS[0])

    def stored(self, name: str, dtypes: Iterable[str] = tuple(DTYPES)) -> Stored:
        """What a file says of a tensor in one of `dtypes`."""
        path = self._files.get(name)
        if path is None:
            raise checkpoint_error("path", f"a tensor {name} in {self._origin}", "no tensor of that name")
        if path not in self._headers:
            self._headers[path] = _header_of(path)
        stored = self._headers[path].tensors.get(name)
        if stored is None:
            raise checkpoint_error("path", f"a tensor {name} in {path}", "no tensor of that name")
        if stored.dtype not in dtypes:
            raise checkpoint_error(f"{name} dtype", f"one of {', '.join(dtypes)}", stored.dtype)
        return stored

    def matrix(self, name: str) -> Stored:
        """The same of experts' matrices, which may be in FP8."""
        return self.stored(name, WEIGHTS)


def _read_json(path: Path, most: int) -> dict[str, Any]:
    with _expecting(f"readable JSON at {path}"):
        content = parsed(read(path, most))
    if not isinstance(content, dict):
        raise checkpoint_error("path", f"a JSON object at {path}", type(content).__name__)
    return content


def _read_config(folder: Path) -> dict[str, Any] | None:
    """The language model's part of config.json, or None where there is no such file."""
    path = folder / "config.json"
    if not os.path.lexists(path):
        return None
    config = _read_json(path, MOST_CONFIG_BYTES)
    text_config = config.get("text_config")
    return text_config if isinstance(text_config, dict) else config


def _find_block(names: Sequence[str], layer: int | None) -> str:
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


# ---- what is to be read, and whether it fits -------------------------------------------------------------------------


@dataclass(frozen=True)
class _Planned:
    """An array that is to be read."""

    dtype: np.dtype
    shape: tuple[int, ...]
    parts: list[tuple[tuple[int | slice, ...], Stored, Box | None]]
    """The tensors that make it, each with its place in the array, and which part of it is read; None: all."""
    repeats: int = 1
    """How often each row is repeated, once it is read."""

    @classmethod
    def of(cls, stored: Stored, axes: int = 0) -> _Planned:
        """A tensor as it is; with axes of one element behind its own, if they are fewer."""
        shape = stored.shape + (1,) * (axes - len(stored.shape))
        return cls(READ[stored.dtype], shape, [((), stored, None)])

    @property
    def bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)

    @property
    def numbers(self) -> tuple[int, ...]:
        """The shape of the matrices that it has the elements of."""
        dtype = STORED_AS.get(self.dtype.name)
        return self.shape if dtype is None else ENCODINGS[dtype].numbers(self.shape)

    def share(self, name: str, how: Cut, ids: Sequence[int]) -> _Planned:
        """Of the field `name` of a layer, that of these experts or slices; itself, if it is not of experts."""
        if name not in OF_EXPERTS:
            return self
        if name in SCALE_OF.values():  # few bytes: of slices' experts all are read, and cut in memory
            return self.of_experts(sorted({id // how.slices for id in ids}))
        share = how.share(name, self.shape, ids)
        by_expert: dict[int | None, list[tuple[tuple[int | slice, ...], Stored]]] = {}
        for place, stored, _ in self.parts:
            by_expert.setdefault(place[0] if place else None, []).append((place, stored))
        parts = []
        for to, box in share.parts:
            for place, stored in by_expert.get(None) or by_expert[box[0].start]:
                if place:  # a tensor of one expert, whose rows are some of the array's
                    first = place[1].start if len(place) > 1 else 0
                    if not first <= box[1].start < first + stored.shape[0]:
                        continue
                    mine = (slice(box[1].start - first, box[1].stop - first), *box[2:])
                    parts.append(((to[0].start, *to[1:]), stored, mine))
                else:
                    parts.append((to, stored, box))
        return replace(self, shape=share.shape, parts=parts)

    def of_experts(self, ids: Sequence[int]) -> _Planned:
        """What is of these experts, whole."""
        parts: list[tuple[tuple[int | slice, ...], Stored, Box | None]] = []
        for place, stored, _ in self.parts:
            if place:
                parts += [((at, *place[1:]), stored, None) for at, id in enumerate(ids) if id == place[0]]
                continue
            rest = [slice(0, size) for size in stored.shape[1:]]
            parts += [((slice(at, at + 1),), stored, (slice(id, id + 1), *rest)) for at, id in enumerate(ids)]
        return replace(self, shape=(len(ids), *self.shape[1:]), parts=parts)

    def of_first(self) -> _Planned:
        """Its first entry alone, which the parts are of."""
        return replace(self, shape=self.shape[1:], parts=[(place[1:], *rest) for place, *rest in self.parts])

    @property
    def repeated(self) -> tuple[int, ...]:
        """The shape once rows are repeated."""
        return (*self.shape[:-2], self.shape[-2] * self.repeats, self.shape[-1])


def _plan_block(tensors: _Tensors, block: str, row: Architecture) -> tuple[dict[str, _Planned], bool, tuple[str, ...]]:
    """The tensors of `block`, by the fields of `MoELayer`; whether its experts are gated; what is left out."""
    parts = {name.removeprefix(f"{block}.") for name in tensors.names if name.startswith(f"{block}.")}
    _check_not_quantised(block, parts)
    shared = {part: match["name"] for part in parts if (match := _SHARED.match(part))}
    parts -= shared.keys()
    router_name = "router.weight" if "router.weight" in parts else "gate.weight"
    router = tensors.stored(f"{block}.{router_name}")
    if len(router.shape) != 2 or 0 in router.shape:
        raise checkpoint_error(router.name, "a non-empty array [E, H]", f"shape {shown(list(router.shape))}")
    plan = {"router": _Planned.of(router)}

    if not parts.isdisjoint(_MERGED):
        gated = parts.isdisjoint(("experts.up_proj", f"experts.up_proj{_BLOCKS}"))
        of_experts = _plan_merged(tensors, block, parts, "gate_up_proj" if gated else "up_proj")
        used = {part.name.removeprefix(f"{block}.") for each in of_experts.values() for _, part, _ in each.parts}
        plan |= of_experts
    else:
        order = _projections(parts)
        gated = order is not _UNGATED
        # As many as the router says; the first that is missing ends it, however many that are.
        names = ([f"experts.{i}.{projection}.weight" for projection in order] for i in range(router.shape[0]))
        experts = [[tensors.matrix(f"{block}.{name}") for name in expert] for expert in names]
        used = {stored.name.removeprefix(f"{block}.") for expert in experts for stored in expert}
        plan |= _plan_experts(block, experts)
        if plan["down_proj"].dtype.name == FP8:
            scales = [[tensors.stored(tensors.scale_of(each.name)) for each in expert] for expert in experts]
            plan |= _plan_scales(block, experts[0], scales)
            used |= {each.name.removeprefix(f"{block}.") for expert in scales for each in expert}
    plan |= {argument: _Planned.of(tensors.stored(f"{block}.{name}")) for argument, name in row.tensors.items()}

    unknown = sorted(parts - used - {router_name} - set(row.tensors.values()))
    if unknown:
        # Dropping a router's bias would silently give another layer than the model's.
        raise checkpoint_error(
            block, f"a router and routed experts alone, as {row.name} has them", f"also {', '.join(unknown[:4])}"
        )
    if gated and not row.options.get("interleaved") and (of_shared := _plan_shared(tensors, block, shared)):
        return plan | of_shared, gated, ()
    return plan, gated, tuple(sorted(set(shared.values())))


def _plan_merged(tensors: _Tensors, block: str, parts: set[str], first: str) -> dict[str, _Planned]:
    """The matrices of all experts in one tensor each, of which the first has that name; and their scales."""
    names = [f"{block}.experts.{name}" for name in (first, "down_proj")]
    packed = f"experts.down_proj{_BLOCKS}" in parts
    if packed:
        matrices = [_packed(tensors.stored(name + _BLOCKS, BYTES)) for name in names]
    else:
        matrices = [_Planned.of(tensors.matrix(name)) for name in names]
    plan = dict(zip(("gate_up_proj", "down_proj"), matrices, strict=True))
    if packed:
        scales = [tensors.stored(name + _BLOCK_SCALES, BYTES) for name in names]
    elif plan["down_proj"].dtype.name == FP8:
        scales = [tensors.stored(tensors.scale_of(name)) for name in names]
    else:
        return plan
    plan["gate_up_scale"], plan["down_scale"] = (_Planned.of(each, axes=3) for each in scales)
    return plan


def _packed(stored: Stored) -> _Planned:
    """Elements [E, rows, columns / 32, 16] of all experts in MXFP4."""
    if len(stored.shape) != 4 or stored.shape[-1] != ENCODINGS[MXFP4].packed:
        raise checkpoint_error(stored.name, "shape [E, rows, columns / 32, 16]", shown(list(stored.shape)))
    return _Planned.of(stored)


def _plan_shared(tensors: _Tensors, block: str, shared: dict[str, str]) -> dict[str, _Planned]:
    """The tensors of a shared expert with a gate in its FFN, `shared`: their names in the block, each with its module;
    nothing where these are no such tensors."""
    module = min(shared.values(), default="")
    names = [f"{module}.{projection}.weight" for projection in _GATED]
    gate = f"{module}_gate.weight"
    scales = {name for name in shared if name.endswith(_SCALE_ENDS)}
    if not shared or shared.keys() - {gate} - scales != set(names):
        return {}
    first, second, down = (tensors.matrix(f"{block}.{name}") for name in names)
    rows, hidden = (*first.shape, 0, 0)[:2]
    if len(first.shape) != 2 or second.shape != first.shape or down.shape != (hidden, rows) or 0 in first.shape:
        got = ", ".join(shown(list(each.shape)) for each in (first, second, down))
        raise checkpoint_error(f"{block}.{module}", "gate and up [Is, H] and down [H, Is]", f"shapes {got}")
    halves = [((slice(0, rows),), first, None), ((slice(rows, 2 * rows),), second, None)]
    plan = {
        "shared_gate_up": _Planned(WEIGHTS[first.dtype], (2 * rows, hidden), halves),
        "shared_down": _Planned.of(down),
    }
    _one_dtype(f"{block}.{module}", (WEIGHTS[each.dtype] for each in (first, second)))
    if plan["shared_down"].dtype.name == FP8:
        of_three = [tensors.stored(tensors.scale_of(each.name)) for each in (first, second, down)]
        both, of_down = _plan_scales(f"{block}.{module}", [first, second, down], [of_three]).values()
        # Of one expert: without the axis of experts.
        plan["shared_gate_up_scale"], plan["shared_down_scale"] = both.of_first(), of_down.of_first()
    elif scales:
        raise checkpoint_error(f"{block}.{module}", "scales of matrices in F8_E4M3 alone", f"also {min(scales)}")
    if gate in shared:
        plan["shared_gate"] = _Planned.of(tensors.stored(f"{block}.{gate}"))
    return plan


def _odd_width(plan: dict[str, _Planned], inner: int) -> tuple[str, ...]:
    """The module of a shared expert whose width is no multiple of I."""
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
    """The names of an expert's matrices, down projection last."""
    found = {match["projection"] for match in filter(None, map(_EXPERT.fullmatch, parts))}
    if not found.isdisjoint(_MIXTRAL):
        return _MIXTRAL
    return _GATED if "gate_proj" in found else _UNGATED


def _plan_experts(block: str, experts: list[list[Stored]]) -> dict[str, _Planned]:
    """gate_up_proj and down_proj of each expert's matrices, gate and up [I, H], down [H, I]."""
    dtype = _one_dtype(f"{block}.experts", (WEIGHTS[matrix.dtype] for expert in experts for matrix in expert))
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
        "gate_up_proj": _Planned(dtype, (len(experts), len(first) * inner, hidden), gate_up),
        "down_proj": _Planned(
            dtype, (len(experts), *down[0].shape), [((i,), each, None) for i, each in enumerate(down)]
        ),
    }


def _plan_scales(block: str, matrices: list[Stored], experts: list[list[Stored]]) -> dict[str, _Planned]:
    """gate_up_scale and down_scale of the scales of each expert's matrices, which are like one's `matrices`: of blocks
    or rows, as these lie in the merged matrices. One for a whole matrix becomes one for each of its rows, since of the
    merged matrix gate and up have their own."""
    *first, down = zip(*experts, strict=True)

    def joined(projections: list[tuple[Stored, ...]], matrix: Stored) -> _Planned:
        one = projections[0][0]
        dtype = _one_dtype(f"{block} scales", (WEIGHTS[each.dtype] for of_all in projections for each in of_all))
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
        return _Planned(dtype, (len(experts), len(projections) * rows, columns), places, repeats)

    return {"gate_up_scale": joined(first, matrices[0]), "down_scale": joined([down], matrices[-1])}


def _scales_of_slices(
    arrays: dict[str, np.ndarray], whole: dict[str, _Planned], encoding: Encoding, how: Cut, ids: Sequence[int]
) -> dict[str, np.ndarray]:
    """The scales of these slices, of those of their experts."""
    first, down = (whole[name].numbers for name in ("gate_up_proj", "down_proj"))
    experts = sorted({id // how.slices for id in ids})
    at = [experts.index(id // how.slices) * how.slices + id % how.slices for id in ids]
    halves = halves_of(how.activation, how.interleaved)
    both = arrays["gate_up_scale"], arrays["down_scale"]
    made = cut_scales(encoding.dtype, how.slices, *both, first[1:], down[1:], halves)
    return {name: each[at] for name, each in made.items()}


def _checked_encoding(block: str, plan: dict[str, _Planned]) -> Encoding | None:
    """That of the experts' matrices, if they are quantised. Raise unless all are of one dtype; or the matrices are
    quantised in one, and of one is what is left."""
    matrices = {name: plan[name].dtype for name in SCALE_OF if name in plan}
    quantised = not STORED_AS.keys().isdisjoint(dtype.name for dtype in matrices.values())
    apart = {"choice_bias", *SCALE_OF.values(), *(matrices if quantised else ())}
    stored = _one_dtype(f"{block} matrices", matrices.values()) if quantised else None
    _one_dtype(block, (planned.dtype for name, planned in plan.items() if name not in apart))
    return None if stored is None else ENCODINGS[STORED_AS[stored.name]]


def _check_scales(block: str, plan: dict[str, _Planned], encoding: Encoding | None, halves: int) -> None:
    """Raise unless quantised matrices have scales as `flashmoe.moe` takes them."""
    shapes = {name: (plan[name].numbers, plan[scale].repeated) for name, scale in SCALE_OF.items() if scale in plan}
    try:
        if encoding:
            common_kind(encoding, shapes, halves)
    except InvalidArgument as error:
        raise CheckpointError(f"{block} {error}") from None


def _check_slices(encoding: Encoding, slices: int, inner: int) -> None:
    """Raises `InvalidArgument` unless so many slices of experts with I columns have whole blocks."""
    width, left = divmod(inner, slices)
    if left:
        raise InvalidArgument(f"slices: expected a divisor of I={inner}, got {slices}")
    check_slices(encoding.dtype, "slices", slices, width)


def _one_dtype(name: str, dtypes: Iterable[np.dtype]) -> np.dtype:
    """The dtype that all are."""
    found = sorted(set(dtypes), key=str)
    if len(found) != 1:
        raise checkpoint_error(f"{name} dtype", "one dtype", f"mixed {', '.join(map(str, found))}")
    return found[0]


def _checked_sizes(block: str, plan: dict[str, _Planned], gated: bool, transposed: bool) -> dict[str, int]:
    """E, H and I, once the tensors are known to fit together."""
    experts, hidden = plan["router"].shape
    down = plan["down_proj"].numbers
    order = slice(None, None, -1 if transposed else 1)
    if len(down) != 3 or down[0] != experts or down[1:][order][0] != hidden or 0 in down:
        raise checkpoint_error(
            f"{block} down_proj", f"shape [{experts}, {', '.join([str(hidden), 'I'][order])}]", shown(list(down))
        )
    inner = down[1:][order][1]
    rows = inner * (2 if gated else 1)
    expected = {
        "gate_up_proj": [experts, *[rows, hidden][order]],
        "router_bias": [experts],
        "choice_bias": [experts],
        "gate_up_bias": [experts, rows],
        "down_bias": [experts, hidden],
        "shared_gate": [1, hidden],
    }
    if "shared_down" in plan:
        expected["shared_down"] = [hidden, plan["shared_down"].shape[1]]
    for name, shape in expected.items():
        got = list(plan[name].numbers if name in SCALE_OF else plan[name].shape) if name in plan else shape
        if got != shape:
            raise checkpoint_error(f"{block} {name}", f"shape {shape}", shown(got))
    return {"experts": experts, "hidden": hidden, "inner": inner}


def _check_config(
    block: str, row: Architecture, config: dict[str, Any] | None, *, experts: int, hidden: int, inner: int
) -> None:
    """Raise unless the sizes are those of the config, as far as it says them."""
    config = config or {}
    named = {"hidden_size": hidden, row.width: inner}
    named |= dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), experts)
    for key, size in named.items():
        said = config.get(key)
        if said is None:
            continue
        what = key.replace("_", " ")
        if not is_count(said):
            raise checkpoint_error(f"{block} {what}", f"an integer in config.json's {key}", shown(said))
        if said != size:
            raise checkpoint_error(f"{block} {what}", f"{said}, the {key} of config.json", size)


# ---- reading it ------------------------------------------------------------------------------------------------------


def _read_planned(plan: dict[str, _Planned]) -> dict[str, np.ndarray]:
    """Read the arrays, once there is memory for all of them."""
    largest = max(plan.values(), key=lambda planned: planned.bytes)
    needed, has = sum(planned.bytes for planned in plan.values()), machine_bytes()
    if needed > has:
        raise _no_memory(largest, f"the {format_bytes(has)} that this machine has, of {format_bytes(needed)} in all")
    arrays = {name: _allocated(planned) for name, planned in plan.items()}
    for name, planned in plan.items():
        for place, stored, box in planned.parts:
            with _expecting(f"a complete safetensors file at {stored.path}"):
                if box is None:
                    stored.read_into(arrays[name][place])
                else:
                    stored.read_box_into(arrays[name][place], box)
    return arrays


def _allocated(planned: _Planned) -> np.ndarray:
    try:
        return np.zeros(planned.shape, planned.dtype)  # of a bias a share may have less than its shape
    except (MemoryError, ValueError) as error:  # ValueError: more than there are addresses for
        raise _no_memory(planned, "none") from error


def _no_memory(planned: _Planned, got: str) -> CheckpointError:
    _, first, _ = planned.parts[0]
    many = f" and {len(planned.parts) - 1} more" if len(planned.parts) > 1 else ""
    size = f"{format_bytes(planned.bytes)} ({planned.bytes} bytes)"
    return checkpoint_error(f"{first.name}{many}", f"memory for {size} of {first.path}", got)
