"""A model whose experts are spread over ranks: each has its own batch, and its share of every layer's experts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...checkpoint import tensor_files
from ...context import Context
from ...errors import CheckpointError, GroupError, InvalidArgument
from ...placement import checked, holders, local_experts
from .experts import experts_modules, of_group
from .llama4 import patch_blocks
from .recognise import recognise

_ONE_EXPERT = re.compile(r"(?:^|\.)experts\.(\d+)\.")
"""In the names of checkpoints with a tensor for each expert; group 1 is the expert's id."""
_ALL_EXPERTS = re.compile(r"(?:^|\.)experts\.[a-z_]+$")
"""The names of tensors of all experts, their first axis."""


def parallelize(
    model: torch.nn.Module,
    group: Any = None,
    *,
    max_tokens: int,
    top_k: int | None = None,
    return_mode: str = "direct",
    **options: Any,
) -> Context:
    """Leaves `model`, which every rank has whole, with this rank's share of the experts; collective over `group`.

    Afterwards every forward pass of the model is a call of all ranks, each with a batch of its own, which may be of
    another size or empty. Ranks must make equally many: see `synced_gpus` of Transformers' ``generate``. Experts are
    `flashmoe.moe`'s from then on, whatever experts_implementation is chosen, and ``state_dict`` is refused: it would be
    of a share. Memory that the other experts took is free once nobody else holds it.

    Parameters
    ----------
    model:
        With experts modules that `flashmoe.integrations.transformers.recognise` takes, alike in sizes and type.
    group:
        A ``torch.distributed`` process group; default: all ranks. It serves only to agree on a name.
    max_tokens:
        Most tokens T of a rank in a forward pass: batch times sequence.
    top_k:
        K; default: ``num_experts_per_tok`` of the model's configuration.
    return_mode:
        As in `flashmoe.Context`. With ``"direct"`` the bits are those of one process that has the whole model.
    options:
        Further arguments of `Context`, such as `timeout`.

    Returns
    -------
    The context of the group, which lives as long as the model. `Context.close` ends it earlier.

    Raises
    ------
    InvalidArgument
        The model has no experts modules that are known, or some that are refused, or that differ.
    GroupError, HeapError, PeerTimeout, FlashMoEError
        As `Context`.
    """
    modules = checked_modules(model)
    context = _join(modules, group, max_tokens, _top_k_of(model.config, top_k), return_mode, options)
    mine = context.local_experts()
    for module in modules:
        _shrink(module, mine)
        of_group(module, context)
    patch_blocks(model)
    return context


def load_parallel(
    path: str | Path,
    group: Any = None,
    *,
    max_tokens: int,
    top_k: int | None = None,
    return_mode: str = "direct",
    device: torch.device | str = "cpu",
    model_class: type[transformers.PreTrainedModel] | None = None,
    context_options: dict[str, Any] | None = None,
    **options: Any,
) -> transformers.PreTrainedModel:
    """The model of a checkpoint with this rank's share of the experts, as after `parallelize`; collective over `group`.

    Of other ranks' experts nothing is read: neither their bytes nor, where a tensor is of one expert, the files that
    have only such.

    Parameters
    ----------
    path:
        A checkpoint's folder: ``config.json`` and ``model.safetensors``, or its index and shards. None is downloaded.
    group, max_tokens, top_k, return_mode:
        As in `parallelize`.
    device:
        Where the model is to be: ``"cpu"``, or this rank's GPU.
    model_class:
        Default: the class of Transformers that the configuration names.
    context_options:
        Further arguments of `Context`.
    options:
        Of the class's ``from_pretrained``, such as `dtype`.

    Raises
    ------
    CheckpointError
        The folder holds no checkpoint, or lacks tensors.
    InvalidArgument, GroupError, HeapError, PeerTimeout, FlashMoEError
        As `parallelize`.
    """
    rank, ranks = _place_in(group)
    config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
    kind = model_class or _class_of(config)
    _top_k_of(config, top_k)  # before anything is read
    with torch.device("meta"):
        experts = checked_modules(kind(config))[0].num_experts
    if experts < ranks:
        raise InvalidArgument(f"group: expected at most E={experts} ranks, so that each has an expert, got {ranks}")
    placement = checked((context_options or {}).get("placement"), experts, ranks)
    if idle := set(range(ranks)) - {each for entry in placement for each in holders(entry)}:
        raise InvalidArgument(f"placement: expected each rank to have an expert, got none on {min(idle)}")
    mine = tuple(local_experts(placement, rank))
    if options.get("dtype", config.dtype) is None:
        raise InvalidArgument(f"dtype: expected a torch.dtype, since {path}/config.json names none, got None")
    model = _together(group, lambda: _load(kind, Path(path), config, experts, mine, options).to(device))
    modules = experts_modules(model)
    context = _join(modules, group, max_tokens, _top_k_of(config, top_k), return_mode, context_options or {})
    for module in modules:
        of_group(module, context)
    patch_blocks(model)
    return model


def _load(
    kind: type[transformers.PreTrainedModel],
    path: Path,
    config: Any,
    experts: int,
    mine: tuple[int, ...],
    options: dict[str, Any],
) -> transformers.PreTrainedModel:
    """A model of `kind` with the experts `mine` alone, from the checkpoint's files."""
    with ExitStack() as files:
        model, info = _with_share(kind, mine).from_pretrained(
            None,
            config=config,
            state_dict=dict(_share_of(path, experts, mine, files)),
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
    """What `load` returns, once all ranks have loaded: they take their time, and one that fails must not be waited for
    as one that is late. Raises its error, or `GroupError` where it is another rank's."""
    result = error = None
    try:
        result = load()
    except Exception as raised:
        error = raised
    errors: list[str | None] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(errors, None if error is None else f"{type(error).__name__}: {error}", group)
    if error is not None:
        raise error
    for rank, other in enumerate(errors):
        if other is not None:
            raise GroupError(f"rank {rank}: expected it to load its share of the model, got {other}")
    return result


def checked_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The experts modules of a whole model, once they are all recognised and alike. Raises `InvalidArgument`."""
    modules = experts_modules(model)
    if not modules:
        raise InvalidArgument(
            f"{type(model).__name__}: expected experts modules, on Transformers' interface or of Llama 4, got none"
        )
    alike = {(module.num_experts, *module.down_proj.shape[1:], module.down_proj.dtype) for module in modules}
    if len(alike) > 1:
        kinds = "; ".join(f"E={experts}, {kind}, H and I {sizes}" for experts, *sizes, kind in sorted(alike, key=str))
        raise InvalidArgument(f"{type(model).__name__}: expected experts modules of one shape and type, got {kinds}")
    for module in modules:
        recognise(module)
    return modules


def _top_k_of(config: Any, top_k: int | None) -> int:
    if top_k is None:
        top_k = getattr(config.get_text_config(), "num_experts_per_tok", None)
    if top_k is None:
        raise InvalidArgument(f"top_k: expected K, since {type(config).__name__} has no num_experts_per_tok, got None")
    return top_k


def _class_of(config: Any) -> type[transformers.PreTrainedModel]:
    names = config.architectures or ["no architectures"]
    kind = getattr(transformers, names[0], None)
    if kind is None:
        raise InvalidArgument(
            f"model_class: expected one, since config.json names none of Transformers, got {names[0]}"
        )
    return kind


def _place_in(group: Any) -> tuple[int, int]:
    """This process's rank in `group`, and how many there are."""
    if not torch.distributed.is_initialized():
        raise InvalidArgument("group: expected torch.distributed to be initialised, got no process group")
    return torch.distributed.get_rank(group), torch.distributed.get_world_size(group)


def _join(
    modules: list[torch.nn.Module], group: Any, max_tokens: int, top_k: int, return_mode: str, options: dict[str, Any]
) -> Context:
    """A context for these modules, whose tensors may be of all experts or of this rank's."""
    if options.get("slices", 1) != 1:
        raise InvalidArgument(f"slices: expected 1, since these models' experts are not cut, got {options['slices']}")
    weights = modules[0].down_proj
    hidden, intermediate = recognise(modules[0]).sizes(modules[0])
    return Context.from_torch(
        group,
        max_tokens=max_tokens,
        hidden=hidden,
        intermediate=intermediate,
        experts=modules[0].num_experts,
        top_k=top_k,
        dtype=str(weights.dtype).removeprefix("torch."),
        device=weights.device.index if weights.device.type == "cuda" else None,
        return_mode=return_mode,
        **options,
    )


def _shrink(module: torch.nn.Module, mine: list[int]) -> None:
    """Leaves an experts module the rows of its tensors that are of these experts."""
    named = recognise(module)
    for name in (named.gate_up, named.down, named.gate_up_bias, named.down_bias):
        if name is not None:
            whole = getattr(module, name)
            # By numbers, which copies: a view would keep the memory of all.
            setattr(module, name, torch.nn.Parameter(whole.detach()[mine], requires_grad=whole.requires_grad))


@cache
def _with_share(kind: type, mine: tuple[int, ...]) -> type:
    """`kind`, whose new models have a share of their experts only. Transformers' loader fills what a model has; from
    name and module it finds out what the model is, so that both stay."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        kind.__init__(self, *args, **kwargs)
        for module in experts_modules(self):
            _shrink(module, list(mine))

    return type(kind.__name__, (kind,), {"__init__": __init__, "__module__": kind.__module__})


class _Rows:
    """Some rows of a tensor in a file, as the loader takes it: ``[...]`` reads them."""

    def __init__(self, tensor: Any, rows: tuple[int, ...]) -> None:
        self._tensor = tensor
        # Those that follow one another are read at once. (Of one run all numbers are equally far from their positions.)
        runs = [list(run) for _, run in groupby(enumerate(rows), lambda at: at[1] - at[0])]
        self._runs = [slice(run[0][1], run[-1][1] + 1) for run in runs]

    def __getitem__(self, everything: Any) -> Tensor:
        parts = [self._tensor[run] for run in self._runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _share_of(path: Path, experts: int, mine: tuple[int, ...], files: ExitStack) -> Iterator[tuple[str, Any]]:
    """Names of the checkpoint's tensors that are no other rank's, and what reads each when it is asked for its values:
    a safetensors slice, or `_Rows` of one that is of all experts. `files` closes what is opened."""
    opened: dict[Path, Any] = {}
    for name, file in tensor_files(path).items():
        one = _ONE_EXPERT.search(name)
        if one and int(one[1]) not in mine:
            continue
        try:
            if file not in opened:
                opened[file] = files.enter_context(safe_open(file, framework="pt"))
            tensor = opened[file].get_slice(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"path: expected {name} in a complete safetensors file at {file}, got {error}"
            ) from error
        of_all = _ALL_EXPERTS.search(name) and tensor.get_shape()[:1] == [experts]
        yield name, _Rows(tensor, mine) if of_all else tensor
