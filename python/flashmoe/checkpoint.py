"""Read one mixture-of-experts layer from a Hugging Face checkpoint.

Needs numpy, safetensors and ml_dtypes; neither torch nor transformers. Only the tensors of the layer that is
asked for are read. Three layouts are understood, found by the tensors' names:

* fused: ``….mlp.gate.weight``, ``….mlp.experts.gate_up_proj``, ``….mlp.experts.down_proj``
* per expert: ``….mlp.gate.weight``, ``….mlp.experts.N.{gate_proj,up_proj,down_proj}.weight``
* Mixtral: ``….block_sparse_moe.gate.weight``, ``….block_sparse_moe.experts.N.{w1,w3,w2}.weight``

Experts without a gate have ``up_proj`` and ``down_proj`` alone, in either of the first two layouts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from .errors import CheckpointError

Weights = TypeVar("Weights")

DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
"""The dtypes that are read, by their names in a safetensors file."""

_BLOCK = re.compile(
    r"(?P<block>(?:.+\.)?layers\.(?P<layer>\d+)\.(?:mlp|block_sparse_moe))\.(?:gate\.weight$|experts\.)"
)
_EXPERT = re.compile(r"experts\.\d+\.(?P<projection>\w+)\.weight")
_GATED = ["gate_proj", "up_proj", "down_proj"]
_UNGATED = ["up_proj", "down_proj"]
_MIXTRAL = ["w1", "w3", "w2"]  # gate, up and down
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "relu": "relu"}  # by Transformers' names


@dataclass(frozen=True, eq=False)
class MoELayerOf(Generic[Weights]):
    """The weights and the routing rule of one MoE layer. All share one dtype (see `DTYPES`).

    E is the number of experts, H the hidden size, I the intermediate size of one expert.
    """

    name: str
    """The layer's name in the checkpoint, such as ``model.layers.1.mlp``."""
    router: np.ndarray
    """[E, H]"""
    gate_up_proj: Weights
    """[E, 2I, H], an expert's gate rows before its up rows; [E, I, H] where `activation` has no gate."""
    down_proj: Weights
    """[E, H, I]"""
    top_k: int
    """Experts per token."""
    renormalize: bool
    """Whether a token's top-k probabilities are scaled to sum to one."""
    activation: str
    """``swiglu`` (gated), ``silu``, ``gelu`` or ``relu``."""

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
        return self.down_proj.shape[2]

    @property
    def dtype(self) -> np.dtype:
        """The dtype of every tensor, as NumPy's."""
        return self.router.dtype

    def with_experts(self, experts: Sequence[int]) -> Self:
        """The layer with the weights of these experts alone, in this order; its router remains [E, H]."""
        return replace(self, gate_up_proj=self.gate_up_proj[experts], down_proj=self.down_proj[experts])


class MoELayer(MoELayerOf[np.ndarray]):
    """A layer in host memory."""


def load_layer(
    path: str | Path,
    layer: int | None = None,
    *,
    top_k: int | None = None,
    renormalize: bool | None = None,
    activation: str | None = None,
) -> MoELayer:
    """Read one MoE layer.

    Args:
        path: a ``.safetensors`` file, or a checkpoint folder holding ``model.safetensors``, or
            ``model.safetensors.index.json`` and its shards. The ``config.json`` beside the tensors, if there
            is one, says how the layer routes and activates.
        layer: the decoder layer's index; None takes the first that is an MoE layer.
        top_k, renormalize: override the config's ``num_experts_per_tok`` and ``norm_topk_prob``. Without a
            ``config.json``, `top_k` is required and `renormalize` is True if not given.
        activation: overrides the config's ``hidden_act``: ``swiglu`` for gated experts, else ``silu``,
            ``gelu`` or ``relu``. Without a ``config.json``, gated experts are taken to be ``swiglu``.

    Raises:
        CheckpointError: a file is missing, truncated or not what its name says; the layer is absent or lacks
            a tensor; the block holds a tensor that `MoELayer` cannot express, such as a shared expert; shapes
            or dtypes disagree with each other or with the config; or the routing rule is unknown.
    """
    path = Path(path)
    tensors = _Tensors.find(path)
    config = _read_config(path if path.is_dir() else path.parent)
    block = _find_block(tensors.names, layer)
    router, gate_up_proj, down_proj, gated = _read_block(tensors, block)
    _check_one_dtype(block, router, gate_up_proj, down_proj)
    _check_shapes(block, router, gate_up_proj, down_proj, gated)
    _check_hidden_size(block, router, config)
    return MoELayer(
        name=block,
        router=router,
        gate_up_proj=gate_up_proj,
        down_proj=down_proj,
        top_k=_resolve_top_k(top_k, config, router.shape[0]),
        renormalize=_resolve_renormalize(renormalize, config),
        activation=_resolve_activation(activation, config, gated),
    )


def tensor_files(path: str | Path) -> dict[str, Path]:
    """The names of a checkpoint's tensors, and the file that has each; `path` as in `load_layer`. Files that an index
    names are not opened. Raises `CheckpointError` as `load_layer`."""
    return _Tensors.find(Path(path)).files


def load_hidden_states(path: str | Path) -> np.ndarray:
    """Read the tensor ``hidden_states``, [T, H] in one of `DTYPES`, from a ``.safetensors`` file.

    Raises:
        CheckpointError: the file is missing or malformed, or holds no such tensor of that rank and dtype.
    """
    hidden_states = _Tensors.find(Path(path)).read("hidden_states")
    if hidden_states.ndim != 2 or 0 in hidden_states.shape:
        raise _error("hidden_states", "a non-empty array [T, H]", f"shape {list(hidden_states.shape)}")
    return hidden_states


def shipped_layer() -> tuple[MoELayer, np.ndarray]:
    """The small trained layer this package ships, and hidden states [2048, H] that really reached it.

    The states are the layer's input while its model reads a passage it was not trained on, so that they route
    as unevenly as real tokens do. The README.md of the model's folder says where both come from.
    """
    with resources.as_file(resources.files(__package__) / "assets") as assets:
        # Not in the model's folder: loaders take every safetensors file there for a part of the model.
        states_file = assets / "tiny-qwen3-moe-hidden-states.safetensors"
        hidden_states = load_hidden_states(states_file)
        with _open(states_file) as file:
            layer = int(file.metadata()["layer"])
        return load_layer(assets / "tiny-qwen3-moe", layer), hidden_states


def _error(argument: str, expected: str, got: object) -> CheckpointError:
    return CheckpointError(f"{argument}: expected {expected}, got {got}")


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    """Open a safetensors file; every way in which that or a read from it can fail is a CheckpointError."""
    if not path.is_file():
        raise _error("path", f"a safetensors file at {path}", "a folder" if path.is_dir() else "no such file")
    try:
        with safe_open(path, framework="np") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise _error("path", f"a complete safetensors file at {path}", error) from error


class _Tensors:
    """The tensors of one checkpoint, by name, each read from its file when asked for."""

    def __init__(self, origin: Path, files: dict[str, Path]):
        self._origin = origin
        self._files = files

    @classmethod
    def find(cls, path: Path) -> _Tensors:
        """List what a safetensors file or a checkpoint folder holds, without reading any tensor."""
        if not path.is_dir():
            return cls._of_file(path)
        index = path / "model.safetensors.index.json"
        if index.is_file():
            return cls._of_index(index)
        if (path / "model.safetensors").is_file():
            return cls._of_file(path / "model.safetensors")
        raise _error("path", f"model.safetensors or {index.name} in {path}", "a folder with neither")

    @classmethod
    def _of_file(cls, path: Path) -> _Tensors:
        with _open(path) as file:
            return cls(path, dict.fromkeys(file.keys(), path))

    @classmethod
    def _of_index(cls, index: Path) -> _Tensors:
        shards = _read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
            raise _error("weight_map", f"an object of tensor names to file names in {index}", repr(shards))
        for shard in shards.values():
            if Path(shard).name != shard:  # an index must not reach out of its folder
                raise _error("weight_map", f"plain file names in {index}", repr(shard))
        return cls(index, {name: index.parent / shard for name, shard in shards.items()})

    @property
    def names(self) -> list[str]:
        return list(self._files)

    @property
    def files(self) -> dict[str, Path]:
        return dict(self._files)

    def read(self, name: str) -> np.ndarray:
        """Read one tensor, in one of `DTYPES`."""
        if name not in self._files:
            raise _error("path", f"a tensor {name} in {self._origin}", "no tensor of that name")
        with _open(self._files[name]) as file:
            # Looked at before the values: numpy cannot hold every dtype that a file can.
            dtype = file.get_slice(name).get_dtype()
            if dtype not in DTYPES:
                raise _error(f"{name} dtype", f"one of {', '.join(DTYPES)}", dtype)
            return file.get_tensor(name)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _error("path", f"readable JSON at {path}", error) from error
    if not isinstance(content, dict):
        raise _error("path", f"a JSON object at {path}", type(content).__name__)
    return content


def _read_config(folder: Path) -> dict[str, Any] | None:
    """The language model's part of config.json, or None where there is no such file."""
    path = folder / "config.json"
    if not path.exists():
        return None
    config = _read_json(path)
    text_config = config.get("text_config")
    return text_config if isinstance(text_config, dict) else config


def _find_block(names: Iterable[str], layer: int | None) -> str:
    """The name of the MoE block of decoder layer `layer`, or of the first layer that has one."""
    blocks: dict[int, str] = {}
    for match in filter(None, map(_BLOCK.match, names)):
        found = blocks.setdefault(int(match["layer"]), match["block"])
        if found != match["block"]:
            raise _error("path", f"one MoE block in layer {match['layer']}", f"{found} and {match['block']}")
    if not blocks:
        raise _error("path", "a checkpoint with an MoE layer", "no router or expert tensor")
    if layer is None:
        return blocks[min(blocks)]
    if layer not in blocks:
        raise _error("layer", f"one of the MoE layers {sorted(blocks)}", layer)
    return blocks[layer]


def _read_block(tensors: _Tensors, block: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, bool]:
    """Read router, gate_up_proj and down_proj of `block`, and whether its experts are gated."""
    parts = {name.removeprefix(f"{block}.") for name in tensors.names if name.startswith(f"{block}.")}
    router = tensors.read(f"{block}.gate.weight")
    if router.ndim != 2 or 0 in router.shape:
        raise _error(f"{block}.gate.weight", "a non-empty array [E, H]", f"shape {list(router.shape)}")

    if "experts.down_proj" in parts:
        gated = "experts.up_proj" not in parts
        first = "experts.gate_up_proj" if gated else "experts.up_proj"
        used = {first, "experts.down_proj"}
        gate_up_proj, down_proj = tensors.read(f"{block}.{first}"), tensors.read(f"{block}.experts.down_proj")
    else:
        gated, names = _per_expert_names(parts, router.shape[0])
        used = {name for expert in names for name in expert}
        experts = [[tensors.read(f"{block}.{name}") for name in expert] for expert in names]
        gate_up_proj, down_proj = _stack_experts(block, experts)

    unknown = sorted(parts - used - {"gate.weight"})
    if unknown:
        # Dropping a shared expert or a router bias would silently give another layer than the model's.
        raise _error(block, "a router and routed experts alone", f"also {', '.join(unknown[:4])}")
    return router, gate_up_proj, down_proj, gated


def _per_expert_names(parts: set[str], experts: int) -> tuple[bool, list[list[str]]]:
    """Whether the experts are gated, and each one's tensor names, down projection last.

    The names are those that `experts` experts must have; that each exists is found out when it is read.
    """
    projections = {match["projection"] for match in filter(None, map(_EXPERT.fullmatch, parts))}
    if projections.isdisjoint(_MIXTRAL):
        order = _GATED if "gate_proj" in projections else _UNGATED
    else:
        order = _MIXTRAL
    names = [[f"experts.{i}.{projection}.weight" for projection in order] for i in range(experts)]
    return order is not _UNGATED, names


def _stack_experts(block: str, experts: list[list[np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Stack per-expert matrices, gate and up [I, H], down [H, I], into gate_up_proj and down_proj."""
    _check_one_dtype(f"{block}.experts", *(matrix for expert in experts for matrix in expert))
    *first, down = zip(*experts, strict=True)  # one tuple per projection, over the experts
    for what, matrices in (("gate and up", sum(first, ())), ("down", down)):
        shapes = sorted({matrix.shape for matrix in matrices})
        if len(shapes) > 1 or len(shapes[0]) != 2:
            got = f"shapes {', '.join(str(list(shape)) for shape in shapes)}"
            raise _error(f"{block}.experts", f"{what} projections that are matrices of one shape", got)
    gate_up_proj = np.stack([np.concatenate(expert[:-1]) for expert in experts])
    return gate_up_proj, np.stack(down)


def _check_one_dtype(name: str, *arrays: np.ndarray) -> None:
    """Raise unless the arrays share one dtype."""
    found = sorted({str(array.dtype) for array in arrays})
    if len(found) != 1:
        raise _error(f"{name} dtype", "one dtype", f"mixed {', '.join(found)}")


def _check_shapes(block: str, router: np.ndarray, gate_up_proj: np.ndarray, down_proj: np.ndarray, gated: bool) -> None:
    """Raise unless router [E, H], gate_up_proj [E, 2I or I, H] and down_proj [E, H, I] fit together."""
    experts, hidden = router.shape
    if down_proj.ndim != 3 or down_proj.shape[:2] != (experts, hidden) or down_proj.shape[2] == 0:
        raise _error(f"{block} down_proj", f"shape [{experts}, {hidden}, I]", list(down_proj.shape))
    rows = down_proj.shape[2] * (2 if gated else 1)
    if gate_up_proj.shape != (experts, rows, hidden):
        raise _error(f"{block} gate_up_proj", f"shape {[experts, rows, hidden]}", list(gate_up_proj.shape))


def _check_hidden_size(block: str, router: np.ndarray, config: dict[str, Any] | None) -> None:
    expected = (config or {}).get("hidden_size", router.shape[1])
    if router.shape[1] != expected:
        raise _error(f"{block} hidden size", f"{expected}, the hidden_size of config.json", router.shape[1])


def _resolve_top_k(top_k: int | None, config: dict[str, Any] | None, experts: int) -> int:
    if top_k is None:
        top_k = (config or {}).get("num_experts_per_tok")
    if top_k is None:
        raise _error("top_k", "num_experts_per_tok in a config.json, or the argument", "neither")
    if not isinstance(top_k, int) or isinstance(top_k, bool) or not 1 <= top_k <= experts:
        raise _error("top_k", f"an integer from 1 to the {experts} experts", repr(top_k))
    return top_k


def _resolve_renormalize(renormalize: bool | None, config: dict[str, Any] | None) -> bool:
    """The argument, else the config; a config without the key means what Transformers takes it to mean."""
    if renormalize is None and config is not None:
        always = config.get("model_type") == "mixtral"  # Mixtral has no such option
        renormalize = config.get("norm_topk_prob", always)
    if renormalize is None:
        return True
    if not isinstance(renormalize, bool):
        raise _error("renormalize", "true or false", repr(renormalize))
    return renormalize


def _resolve_activation(activation: str | None, config: dict[str, Any] | None, gated: bool) -> str:
    """The argument, else the config's hidden_act, else SwiGLU for gated experts."""
    if activation is None:
        hidden_act = (config or {}).get("hidden_act", "silu" if gated else None)
        activation = _ACTIVATIONS.get(hidden_act) if isinstance(hidden_act, str) else None
        got = f"hidden_act {hidden_act!r}"
        if gated and activation == "silu":
            activation = "swiglu"
    else:
        got = repr(activation)
    expected = ("swiglu",) if gated else ("silu", "gelu", "relu")
    if activation not in expected:
        experts = "gated" if gated else "ungated"
        raise _error("activation", f"{' or '.join(expected)} for {experts} experts", got)
    return activation
