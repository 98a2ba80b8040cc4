"""A model whose experts are spread over ranks: each has its own batch, and its share of every layer's experts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, overload

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...calls.tensors import dtype_name
from ...checkpoint import tensor_files
from ...contexts.context import Context
from ...contexts.limits import checked_slices
from ...errors import CheckpointError, InvalidArgument
from ...placement import checked, holders, local_experts
from ...pytorch.moving import place_in, together
from ...spec import ENCODINGS, STORED_AS
from ...weights.shares import Cut, Share
from .experts import experts_modules, of_group
from .llama4 import patch_blocks
from .recognise import ExpertsOptions, recognise

if TYPE_CHECKING:

    class NamedModel(transformers.PreTrainedModel):
        """For type checkers: a model of the class that a configuration names, which nearly always has `generate`."""

        generate: Callable[..., Any]


M = TypeVar("M", bound=transformers.PreTrainedModel)

_ONE_EXPERT = re.compile(r"(?:^|\.)experts\.(\d+)\.")
"""Matches names in checkpoints with a tensor for each expert; group 1 is the expert's id."""
_ALL_EXPERTS = re.compile(r"(?:^|\.)experts\.([a-z_]+)$")
"""Matches names of tensors of all experts, which are the tensors' first axis; group 1 is the tensor's own name."""
_AXES = {"gate_proj": 0, "up_proj": 0, "w1": 0, "w3": 0, "down_proj": 1, "w2": 1}
"""For each matrix of one expert, by name: the axis that has its intermediate columns."""


def parallelize(
    model: torch.nn.Module,
    group: Any = None,
    *,
    max_tokens: int,
    top_k: int | None = None,
    return_mode: str | None = None,
    **options: Any,
) -> Context:
    """Leaves `model`, which every rank has whole, with this rank's share of the experts. Collective over `group`.

    Afterwards every forward pass of the model is a call of all ranks. Each rank has a batch of its own, which may have
    another size or be empty. Ranks must make the same number of calls: see `synced_gpus` of Transformers' ``generate``.
    From then on `flashmoe.moe` computes the experts, whatever experts_implementation is chosen. ``state_dict`` is
    refused, because it would be the state of a share. The memory of the other experts is free once nobody else holds
    it.

    Parameters
    ----------
    model:
        With experts modules that `flashmoe.integrations.transformers.recognise` takes, all of the same sizes and type.
    group:
        A ``torch.distributed`` process group; default: all ranks. It serves only to agree on a name.
    max_tokens:
        Most tokens T of a rank in a forward pass: batch times sequence.
    top_k:
        K; default: ``num_experts_per_tok`` of the model's configuration.
    return_mode:
        As in `flashmoe.Context`. With ``"direct"``, the default unless experts are cut into slices, the bits are those
        of one process that has the whole model.
    options:
        Further arguments of `Context`, such as `timeout`, `placement` or `slices`, which cuts every expert.

    Returns
    -------
    The context of the group, which lives as long as the model. `Context.close` ends it earlier.

    Raises
    ------
    InvalidArgument
        The model has no known experts modules, or has some that are refused or that differ.
    GroupError, HeapError, PeerTimeout, FlashMoEError
        As `Context`.

    Examples
    --------
    In a group of one rank, the share is all 16 experts.

    >>> import importlib.resources, torch, torch.distributed as dist, transformers
    >>> from flashmoe.integrations.transformers import parallelize
    >>> path = importlib.resources.files("flashmoe") / "assets" / "tiny-qwen3-moe"
    >>> model = transformers.AutoModelForCausalLM.from_pretrained(path)
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> with parallelize(model, max_tokens=64) as ctx:
    ...     len(ctx.local_experts()), model(torch.tensor([[1, 2, 3]])).logits.shape
    (16, torch.Size([1, 3, 1024]))
    >>> dist.destroy_process_group()
    """
    modules = checked_modules(model)
    sizes, top_k = recognise(modules[0]).sizes(modules[0]), _top_k_of(model.config, top_k)
    context = _join(modules[0], sizes, group, max_tokens, top_k, return_mode, options)
    mine = context.local_experts()
    for module in modules:
        _shrink(module, mine, options.get("slices", 1))
        of_group(module, context)
    patch_blocks(model)
    return context


@overload
def load_parallel(
    path: str | Path,
    group: Any = None,
    *,
    max_tokens: int,
    top_k: int | None = None,
    return_mode: str | None = None,
    device: torch.device | str = "cpu",
    model_class: None = None,
    context_options: dict[str, Any] | None = None,
    **options: Any,
) -> NamedModel: ...
@overload
def load_parallel(
    path: str | Path,
    group: Any = None,
    *,
    max_tokens: int,
    top_k: int | None = None,
    return_mode: str | None = None,
    device: torch.device | str = "cpu",
    model_class: type[M],
    context_options: dict[str, Any] | None = None,
    **options: Any,
) -> M: ...
def load_parallel(
    path: str | Path,
    group: Any = None,
    *,
    max_tokens: int,
    top_k: int | None = None,
    return_mode: str | None = None,
    device: torch.device | str = "cpu",
    model_class: type[transformers.PreTrainedModel] | None = None,
    context_options: dict[str, Any] | None = None,
    **options: Any,
) -> transformers.PreTrainedModel:
    """The model of a checkpoint with this rank's share of the experts, as after `parallelize`. Collective over `group`.

    Nothing is read of other ranks' experts, or of their slices: not their bytes and, if each tensor is one expert's,
    not the files that have only such tensors.

    Parameters
    ----------
    path:
        A checkpoint's folder: ``config.json`` and ``model.safetensors``, or its index and shards. Nothing is
        downloaded.
    group, max_tokens, top_k, return_mode:
        As in `parallelize`.
    device:
        Where the model is to be: ``"cpu"``, or this rank's GPU.
    model_class:
        Default: the class of Transformers that the configuration names.
    context_options:
        Further arguments of `Context`, such as `placement` or `slices`.
    options:
        Of the class's ``from_pretrained``, such as `dtype`.

    Raises
    ------
    CheckpointError
        The folder holds no checkpoint, or lacks tensors.
    InvalidArgument, GroupError, HeapError, PeerTimeout, FlashMoEError
        As `parallelize`.

    Examples
    --------
    >>> import importlib.resources, torch, torch.distributed as dist
    >>> from flashmoe.integrations.transformers import load_parallel
    >>> path = importlib.resources.files("flashmoe") / "assets" / "tiny-qwen3-moe"
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> model = load_parallel(path, max_tokens=64)
    >>> model(torch.tensor([[1, 2, 3]])).logits.shape
    torch.Size([1, 3, 1024])
    >>> dist.destroy_process_group()
    """
    rank, ranks = place_in(group)
    config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
    method = (getattr(config, "quantization_config", None) or {}).get("quant_method")
    if method in (names := {encoding.name.lower(): encoding.name for encoding in ENCODINGS.values()}):
        raise InvalidArgument(
            f"path: expected a checkpoint whose experts are not in {names[method]}, got one in {path}"
        )
    kind = model_class or class_of(config)
    _top_k_of(config, top_k)  # checked before anything is read
    with torch.device("meta"):
        whole = checked_modules(kind(config))[0]
    experts, sizes, of_context = whole.num_experts, recognise(whole).sizes(whole), context_options or {}
    slices = checked_slices(of_context.get("slices", 1), experts, 1, ranks, False)
    if experts * slices < ranks:
        raise InvalidArgument(f"group: expected at most E={experts} ranks, so that each has an expert, got {ranks}")
    _check_divisor(slices, sizes[1])
    placement = checked(of_context.get("placement"), experts * slices, ranks)
    if idle := set(range(ranks)) - {each for entry in placement for each in holders(entry)}:
        raise InvalidArgument(f"placement: expected each rank to have an expert, got none on {min(idle)}")
    part = _Part(experts, slices, tuple(local_experts(placement, rank)), _shapes_of(whole), recognise(whole))
    if options.get("dtype", config.dtype) is None:
        raise InvalidArgument(f"dtype: expected a torch.dtype, since {path}/config.json names none, got None")
    model = _together(group, lambda: _load(kind, Path(path), config, part, options).to(device))
    modules = experts_modules(model)
    context = _join(modules[0], sizes, group, max_tokens, _top_k_of(config, top_k), return_mode, of_context)
    for module in modules:
        of_group(module, context)
    patch_blocks(model)
    return model


def _load(
    kind: type[transformers.PreTrainedModel],
    path: Path,
    config: Any,
    part: _Part,
    options: dict[str, Any],
) -> transformers.PreTrainedModel:
    """A model of `kind` with only this part of its experts, from the checkpoint's files."""
    with ExitStack() as files:
        model, info = _with_share(kind, part.mine, part.slices).from_pretrained(
            None,
            config=config,
            state_dict=dict(_share_of(path, part, files)),
            output_loading_info=True,
            **options,
        )
    if missing := sorted(info["missing_keys"]):
        raise CheckpointError(f"path: expected all tensors of {kind.__name__} in {path}, got none for {missing[:4]}")
    model.__class__ = kind
    if (path / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(path, local_files_only=True)
    return model


def _together(group: Any, load: Callable[[], Any]) -> Any:
    """What `load` returns, once all ranks have loaded. (Some ranks may need much longer than others.)"""
    loaded = []
    together(group, lambda: loaded.append(load()), "load its share of the model")
    return loaded[0]


def checked_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The experts modules of a whole model, after checking that all are recognised and alike. Raises
    `InvalidArgument`."""
    modules = experts_modules(model)
    if not modules:
        raise InvalidArgument(
            f"{type(model).__name__}: expected experts modules, on Transformers' interface or of Llama 4, got none"
        )
    for module in modules:
        if (options := recognise(module)).gate_up_scale is not None:
            dtype = STORED_AS[dtype_name(getattr(module, options.down))]
            raise InvalidArgument(f"{type(module).__name__}: expected experts that are not quantised, got {dtype}")
    alike = {(module.num_experts, *module.down_proj.shape[1:], module.down_proj.dtype) for module in modules}
    if len(alike) > 1:
        kinds = "; ".join(f"E={experts}, {kind}, H and I {sizes}" for experts, *sizes, kind in sorted(alike, key=str))
        raise InvalidArgument(f"{type(model).__name__}: expected experts modules of one shape and type, got {kinds}")
    return modules


def _top_k_of(config: Any, top_k: int | None) -> int:
    if top_k is None:
        top_k = getattr(config.get_text_config(), "num_experts_per_tok", None)
    if top_k is None:
        raise InvalidArgument(f"top_k: expected K, since {type(config).__name__} has no num_experts_per_tok, got None")
    return top_k


def class_of(config: Any) -> type[transformers.PreTrainedModel]:
    names = config.architectures or ["no architectures"]
    kind = getattr(transformers, names[0], None)
    if kind is None:
        raise InvalidArgument(
            f"model_class: expected one, since config.json names none of Transformers, got {names[0]}"
        )
    return kind


def _join(
    module: torch.nn.Module,
    sizes: tuple[int, int],
    group: Any,
    max_tokens: int,
    top_k: int,
    return_mode: str | None,
    options: dict[str, Any],
) -> Context:
    """A context for modules like `module`. `sizes`: H and I of whole experts."""
    weights, slices = module.down_proj, options.get("slices", 1)
    ranks = place_in(group)[1]
    _check_divisor(checked_slices(slices, module.num_experts, 1, ranks, False), sizes[1])
    return Context.from_torch(
        group,
        max_tokens=max_tokens,
        hidden=sizes[0],
        intermediate=sizes[1] // slices,
        experts=module.num_experts,
        top_k=top_k,
        dtype=str(weights.dtype).removeprefix("torch."),
        device=weights.device.index if weights.device.type == "cuda" else None,
        return_mode=return_mode or ("direct" if slices == 1 else "reduced"),
        **options,
    )


def _check_divisor(slices: int, intermediate: int) -> None:
    if intermediate % slices:
        raise InvalidArgument(f"slices: expected a divisor of I={intermediate}, got {slices}")


def _names_of(options: ExpertsOptions) -> dict[str, str]:
    """The names of an experts module's tensors, each with its name in `flashmoe.moe`."""
    names = {"gate_up_proj": options.gate_up, "down_proj": options.down}
    names |= {"gate_up_bias": options.gate_up_bias, "down_bias": options.down_bias}
    return {theirs: ours for ours, theirs in names.items() if theirs is not None}


def _cut_of(options: ExpertsOptions, slices: int) -> Cut:
    return Cut(slices, options.how.activation, options.how.interleaved, options.how.transposed)


def _shapes_of(module: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of an experts module, by the module's own name for it."""
    return {name: tuple(getattr(module, name).shape) for name in _names_of(recognise(module))}


def _shrink(module: torch.nn.Module, mine: Sequence[int], slices: int) -> None:
    """Leaves an experts module only the parts of its tensors that belong to these experts, or slices."""
    options = recognise(module)
    for name, ours in _names_of(options).items():
        whole = getattr(module, name)
        share = _cut_of(options, slices).share(ours, tuple(whole.shape), mine)
        part = whole.detach().new_zeros(share.shape)  # a copy, because a view would keep the memory of all experts
        for place, box in share.parts:
            part[place] = whole.detach()[box]
        setattr(module, name, torch.nn.Parameter(part, requires_grad=whole.requires_grad))


@cache
def _with_share(kind: type, mine: tuple[int, ...], slices: int) -> type:
    """A class like `kind` whose new models have only a share of their experts. Transformers' loader fills the
    parameters that a model has. The class has the name and module of `kind`, because the loader recognises a model by
    them."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        kind.__init__(self, *args, **kwargs)
        for module in experts_modules(self):
            _shrink(module, mine, slices)

    return type(kind.__name__, (kind,), {"__init__": __init__, "__module__": kind.__module__})


class _Part(NamedTuple):
    """This rank's experts, out of every layer's experts."""

    experts: int
    """E."""
    slices: int
    mine: tuple[int, ...]
    """Ids of this rank's experts, or slices."""
    shapes: dict[str, tuple[int, ...]]
    """The shapes of the tensors of all experts."""
    options: ExpertsOptions


class _Boxes:
    """A share of a tensor in a file, in a form that the loader takes: ``[...]`` reads the share."""

    def __init__(self, tensor: Any, share: Share) -> None:
        self._tensor = tensor
        self._share = share

    def __getitem__(self, everything: Any) -> Tensor:
        parts = ((place, self._tensor[box]) for place, box in self._share.parts)
        place, first = next(parts, ((), None))
        if first is None:
            return self._tensor[:1].new_zeros(self._share.shape)
        if first.shape == self._share.shape:
            return first
        made = first.new_zeros(self._share.shape)
        made[place] = first
        for place, part in parts:
            made[place] = part
        return made


def _share_of(path: Path, part: _Part, files: ExitStack) -> Iterator[tuple[str, Any]]:
    """Names of the checkpoint's tensors, without those of other ranks' experts. With each name comes an object that
    reads the tensor when its values are asked for: a safetensors slice, or `_Boxes` of one. `files` will close the
    files that are opened here."""
    opened: dict[Path, Any] = {}
    names, how = _names_of(part.options), _cut_of(part.options, part.slices)
    for name, file in tensor_files(path).items():
        one = _ONE_EXPERT.search(name)
        ids = [each for each in part.mine if one and each // part.slices == int(one[1])]
        if one and not ids:
            continue
        try:
            if file not in opened:
                opened[file] = files.enter_context(safe_open(file, framework="pt"))
            tensor = opened[file].get_slice(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"path: expected {name} in a complete safetensors file at {file}, got {error}"
            ) from error
        shape, of_all = tuple(tensor.get_shape()), _ALL_EXPERTS.search(name)
        if one and part.slices > 1:
            yield from _slices_of_one(name, one, tensor, ids, part.slices)
        elif of_all and shape[:1] == (part.experts,):
            yield name, _Boxes(tensor, _share_of_all(name, names.get(of_all[1]), shape, part, how))
        else:
            yield name, tensor


def _share_of_all(name: str, ours: str | None, shape: tuple[int, ...], part: _Part, how: Cut) -> Share:
    """The share of a tensor of all experts, which `flashmoe.moe` calls `ours`. Raises `CheckpointError` if the tensor
    is to be cut but is not one that the model has."""
    if part.slices == 1:
        rest = [slice(0, size) for size in shape[1:]]
        # Consecutive experts are read at once. (In a run of consecutive ids, each id is equally far from its position.)
        runs = [list(run) for _, run in groupby(enumerate(part.mine), lambda at: at[1] - at[0])]
        bounds = [((run[0][0], run[-1][0] + 1), (run[0][1], run[-1][1] + 1)) for run in runs]
        boxes = [((slice(*to), *rest), (slice(*of), *rest)) for to, of in bounds]
        return Share((len(part.mine), *shape[1:]), boxes)
    expected = part.shapes.get(_ALL_EXPERTS.search(name)[1])
    if ours is None or shape != expected:
        raise CheckpointError(f"path: expected {name} to be cut as {expected}, got shape {shape}")
    return how.share(ours, shape, part.mine)


def _slices_of_one(
    name: str, one: re.Match[str], tensor: Any, ids: list[int], slices: int
) -> Iterator[tuple[str, _Boxes]]:
    """The slices `ids` of one expert's own matrix, under the names that this number of experts would have: the loader
    puts the matrices together in the order of their numbers. Raises `CheckpointError` for an unknown matrix."""
    shape, axis = tuple(tensor.get_shape()), _AXES.get(name[one.end() :].split(".")[0])
    if axis is None or len(shape) != 2 or shape[axis] % slices:
        known = ", ".join(_AXES)
        raise CheckpointError(f"path: expected {name} to be a matrix of an expert, one of {known}, got shape {shape}")
    width = shape[axis] // slices
    made = (width, shape[1]) if axis == 0 else (shape[0], width)
    for id in ids:
        box = [slice(0, size) for size in shape]
        box[axis] = slice(id % slices * width, (id % slices + 1) * width)
        whole = tuple(slice(0, size) for size in made)
        yield f"{name[: one.start(1)]}{id}{name[one.end(1) :]}", _Boxes(tensor, Share(made, [(whole, tuple(box))]))
