"""`with_flashmoe`: a specification of Megatron-Core with this package's layer in place of Megatron's."""

from __future__ import annotations

import copy
import functools
from dataclasses import fields, is_dataclass
from typing import Any

from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec

from ...errors import InvalidArgument
from .layer import FlashMoELayer


def with_flashmoe(spec: Any, *, max_tokens: int | None = None, pg_collection: Any = None) -> Any:
    """A copy of `spec` in which every `MoELayer` is a `FlashMoELayer`.

    Parameters
    ----------
    spec:
        The specification of an MoE layer, a transformer layer or a block, as Megatron's functions make it.
    max_tokens:
        The most tokens S B that a rank brings to a call: needed where experts are on several ranks.
    pg_collection:
        Megatron's process groups, if they are not those of its `parallel_state`: release 0.16 passes them only to its
        own class.

    Raises
    ------
    InvalidArgument
        There is no `MoELayer` in `spec`.
    """
    options = {"max_tokens": max_tokens}
    if pg_collection is not None:
        options["pg_collection"] = pg_collection
    replaced, found = _replaced(spec, options)
    if not found:
        raise InvalidArgument(f"spec: expected one with a MoELayer in it, got {type(spec).__name__} without")
    return replaced


def _replaced(spec: Any, options: dict[str, Any]) -> tuple[Any, int]:
    """The copy, and the number of layers that were replaced in it."""
    if isinstance(spec, functools.partial) and spec.func is MoELayer:
        return functools.partial(FlashMoELayer, *spec.args, **spec.keywords, **options), 1
    if isinstance(spec, ModuleSpec) and spec.module is MoELayer:
        copied = copy.copy(spec)
        copied.module, copied.params = FlashMoELayer, {**spec.params, **options}
        return copied, 1
    if isinstance(spec, list):
        parts = [_replaced(each, options) for each in spec]
        return [part for part, _ in parts], sum(found for _, found in parts)
    if not is_dataclass(spec) or isinstance(spec, type):
        return spec, 0
    copied, count = copy.copy(spec), 0
    for field in fields(spec):
        part, found = _replaced(getattr(spec, field.name), options)
        setattr(copied, field.name, part)
        count += found
    return copied, count
