"""``torch.ops.flashmoe.moe``: `flashmoe.moe` as a PyTorch operator, for `flashmoe.nn` and ``torch.compile``.

Importing this module registers the operator. Its arguments are those of `flashmoe.moe`, by name, with these
differences. An operator takes tensors and plain values, so the context is the integer that `context_id` gives, and the
placement is what `flashmoe.placement.flat` makes of it (ranks, where no expert has copies). There is no ``trace``.
Instead of ``load`` and ``router_logits`` there is a second operator, ``moe_observed``, which returns what would be
written to them. (PyTorch supports neither effects nor gradients for operators that write to an argument.) Where
gradients are recorded, a third operator, ``moe_kept``, also returns what they need (docs/training.md). If recording
gradients is the only reason why PyTorch must see a call, a `torch.autograd.Function` takes the place of ``moe_kept``.

The operators neither change an input nor return a view of one. Still they are declared to have an effect, because the
ranks must make the same calls in the same order. So a compiler may neither drop a call whose result this rank does not
use, nor merge two equal calls, nor swap two independent ones.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from ..calls import alone
from ..calls import tensors as operands
from ..calls.arguments import as_plain_values
from ..calls.refusals import tell
from ..calls.through_torch import goes_through_torch, is_recomputed
from ..contexts.context import Context, context_id, contexts, run, run_and_keep, run_backward
from ..contexts.growing import GrowingContext, Result
from ..engines import cuda_training
from ..engines.base import Gradients
from ..errors import FlashMoEError, InvalidArgument
from ..placement import from_flat
from ..spec.options import OPTIONS, TYPES, Options
from ..spec.tensors import PARAMETERS, READ, REQUIRED, WRITTEN, Tensors
from .autocast import as_autocast

__all__ = [
    "by_operator",
    "call",
    "check_tensors",
    "context_id",
    "moe",
    "moe_backward",
    "moe_kept",
    "moe_observed",
    "saving_contexts",
]


def _in_context(number: int, tokens: int, call: Callable[[Context], Result]) -> Result:
    """What `call` returns for the context with that `number`. A growing context first gets room for T = `tokens`."""
    ctx = contexts.get(number)
    if ctx is None:
        raise FlashMoEError(
            f"context: expected the context_id of a live Context, got {number}: it was closed, or never existed"
        )
    return ctx.use(tokens, call) if isinstance(ctx, GrowingContext) else call(ctx)


def _keyword(name: str, default: Any, kind: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=kind)


def _signature() -> inspect.Signature:
    """The operator's arguments: context, tensors and options, in the order of their tables. No parameter is
    keyword-only, because autograd refuses keyword-only tensors."""
    kinds = TYPES | {"placement": Sequence[int] | None}  # as `flashmoe.placement.flat` makes it
    required = [_keyword(name, inspect.Parameter.empty, Tensor) for name in REQUIRED]
    tensors = [_keyword(name, None, Tensor | None) for name in READ if name not in REQUIRED]
    options = [_keyword(name, option.default, kinds[name]) for name, option in OPTIONS.items()]
    context = _keyword("context", inspect.Parameter.empty, int)
    return inspect.Signature([context, *required, *tensors, *options], return_annotation=Tensor)


def _moe(*args: Any, **kwargs: Any) -> Tensor:
    return _run(_bound(_SIGNATURE, args, kwargs))


def _bound(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments by name."""
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def _run(
    given: Mapping[str, Any], load: Tensor | None = None, router_logits: Tensor | None = None, keeps: bool = False
) -> Any:
    """Makes a call with `_moe`'s arguments. Returns its result, or with `keeps` also what it keeps."""
    tensors = _tensors_of(given)._replace(load=load, router_logits=router_logits)
    number, tokens = given["context"], _tokens_of(tensors.x)
    try:
        options = _options_of(given)
        if keeps:
            return _in_context(number, tokens, lambda ctx: run_and_keep(ctx, tensors, options))
        return _in_context(number, tokens, lambda ctx: run(ctx, tensors, options, False))
    except Exception as error:
        tell(contexts.get(number), error)
        raise


def _tokens_of(x: Tensor) -> int:
    """T; 0 for a tensor without dimensions, which the call's own checks then refuse, and tell the other ranks so."""
    return x.shape[0] if x.ndim else 0


def _options_of(given: Mapping[str, Any]) -> Options:
    options = Options(**{name: given[name] for name in Options._fields})
    return options if options.placement is None else options._replace(placement=from_flat(options.placement))


def _tensors_of(given: Mapping[str, Any]) -> Tensors:
    return Tensors(**{name: given.get(name) for name in Tensors._fields})


def _moe_observed(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """`_moe` with two more arguments: `load_size`, E or 0 for no load, and `with_logits`. Returns y, what each expert's
    load grows by [load_size], and the router's logits [T, E], or [0, 0] if they are not asked for."""
    return _observed(_bound(_OBSERVED, args, kwargs))


def _observed(given: Mapping[str, Any], keeps: bool = False) -> tuple[Any, Tensor, Tensor]:
    """What `_run` returns for the call, what its load grows by, and its logits."""
    load, logits = _observations(given)
    asked = {"load": load if given["load_size"] else None, "router_logits": logits if given["with_logits"] else None}
    return _run(given, **asked, keeps=keeps), load, logits


def _observations(given: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Zeros for a call's load, and memory for its logits."""
    x, router = given["x"], given.get("router")
    experts = 0 if router is None else router.shape[0]
    load = x.new_zeros(given["load_size"], dtype=torch.int64)
    return load, x.new_empty((_tokens_of(x), experts) if given["with_logits"] else (0, 0), dtype=torch.float32)


def by_operator(context: int, tensors: Tensors, options: Options, main_grad: bool = False) -> Tensor:
    """`flashmoe.moe` by an operator. After it, `load` and `router_logits` are written, if they are given. With
    `main_grad`, gradients of weights and biases are added to the parameters' attributes of that name."""
    check_tensors(tensors._asdict())
    options = as_plain_values(options)
    if tensors.load is not None and is_recomputed():
        tensors = tensors._replace(load=None)
    load, logits = tensors.written
    given = {name: each for name, each in tensors._asdict().items() if name not in WRITTEN} | options._asdict()
    trains = _trains(tensors)
    if load is None and logits is None and not trains:
        return moe(context, **given)
    _check_written(tensors)
    size, with_logits = 0 if load is None else load.shape[0], logits is not None
    if trains:
        _refuse_transforms()
    if trains and main_grad:
        _check_main_grads(tensors)
    if not trains:
        y, chosen, made = moe_observed(context, **given, load_size=size, with_logits=with_logits)
    elif goes_through_torch(tensors.x, tensors, trains=True) or _is_on_meta(tensors):
        y, chosen, made, *_ = moe_kept(context, **given, load_size=size, with_logits=with_logits, main_grad=main_grad)
    else:
        asked = {"load_size": size, "with_logits": with_logits, "main_grad": main_grad}
        y, chosen, made = _Kept.apply(context, options._asdict() | asked, *tensors.read)
    if load is not None:
        load.add_(chosen)
    if logits is not None:
        logits.copy_(made)
    return y


def _trains(tensors: Tensors) -> bool:
    """Whether the call keeps what its gradients need: whether gradients are recorded, and an engine can compute
    them."""
    recorded = torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in tensors)
    return recorded and tensors.x.device.type in ("cpu", "cuda") and tensors.gate_up_scale is None


_NO_TRANSFORMS = (
    "flashmoe.moe: FlashMoE has no gradients within transforms of torch.func (grad, vjp, jacrev, vmap) and no batched "
    "ones (is_grads_batched, jacobian(vectorize=True)); differentiate with torch.autograd, a gradient at a time, or "
    "call the layer under torch.no_grad()"
)


def _refuse_transforms() -> None:
    """Raises `NotImplementedError` within a transform of torch.func. Called where gradients are recorded or
    computed."""
    if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None:
        raise NotImplementedError(_NO_TRANSFORMS)


def _check_main_grads(tensors: Tensors) -> None:
    """Raises `InvalidArgument` for a weight or bias that gets a gradient but has no `main_grad` to add it to, and
    `NotImplementedError` under a compiler."""
    if torch.compiler.is_compiling():
        raise NotImplementedError("main_grad: FlashMoE adds to it in eager mode alone; call the layer uncompiled")
    for name in PARAMETERS:
        parameter = getattr(tensors, name)
        if parameter is not None and parameter.requires_grad:
            _main_grad_of(name, parameter)


def _main_grad_of(name: str, parameter: Tensor) -> Tensor:
    """Where the parameter's gradient is to be added. Raises `InvalidArgument` if it cannot be added there."""
    found = getattr(parameter, "main_grad", None)
    expected = f"{name}.main_grad: expected {list(parameter.shape)} float32 on {parameter.device}, contiguous"
    if not isinstance(found, Tensor):
        raise InvalidArgument(f"{expected}, got {'none' if found is None else type(found).__name__}")
    operands.refuse_hollow(f"{name}.main_grad", found)
    operands.refuse_unstored(f"{name}.main_grad", found)
    alike = found.shape == parameter.shape and found.device == parameter.device
    if not (alike and found.dtype == torch.float32 and found.is_contiguous()):
        raise InvalidArgument(
            f"{expected}, got {list(found.shape)} {operands.dtype_name(found)} on {found.device} with strides "
            f"{list(found.stride())}"
        )
    return found


def _check_written(tensors: Tensors) -> None:
    """Checks `load` and `router_logits`, which `flashmoe.calls.arguments.check` does not get."""
    x, router = tensors.x, tensors.router
    if tensors.router_logits is not None and router is None:
        raise InvalidArgument("router_logits: expected router with it, got None")
    for (name, (expected, dtype)), tensor in zip(WRITTEN.items(), tensors.written, strict=True):
        if tensor is None:
            continue
        if not torch.compiler.is_compiling():
            operands.refuse_unstored(name, tensor)
        fits = tensor.ndim == 1 if name == "load" else tensor.shape == (*x.shape[:1], *router.shape[:1])
        if not (
            fits and tensor.dtype == getattr(torch, dtype) and tensor.device == x.device and tensor.is_contiguous()
        ):
            raise InvalidArgument(
                f"{name}: expected {expected} on {x.device}, contiguous, got {list(tensor.shape)} "
                f"{operands.dtype_name(tensor)} on {tensor.device} with strides {list(tensor.stride())}"
            )


def _moe_kept(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `_moe_observed`, but also returns the tensor of what the gradients need, and the numbers of rows (see
    `flashmoe.engines.base.Engine.call_and_keep`). `main_grad` matters only for the backward pass, which gets it."""
    return _kept(_bound(_KEPT, args, kwargs))


def _kept(given: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What `_moe_kept` returns."""
    (y, kept, counted), load, logits = _observed(given, keeps=True)
    return y, load, logits, kept, counted


def _moe_backward(*args: Any, **kwargs: Any) -> list[Tensor]:
    """The gradients of a call of ``moe_kept`` with these options, for its tensors of the names `wanted`. They follow
    from the gradient of y (`grad`) and that of the logits (`logits_grad`, may be None). `inputs` are the call's
    tensors, and `given` their names."""
    a = _bound(_BACKWARD, args, kwargs)
    options = {name: a[name] for name in OPTIONS}
    return _gradients_of_named(_OfCall.of(a), options, a["wanted"])


class _OfCall(NamedTuple):
    """What a backward pass reads: the first arguments of ``moe_backward``."""

    context: int
    grad: Tensor
    logits_grad: Tensor | None
    kept: Tensor
    counted: Tensor
    inputs: Sequence[Tensor]
    given: Sequence[str]

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> _OfCall:
        return cls(*(arguments[name] for name in cls._fields))

    def named(self) -> dict[str, Tensor]:
        """The call's tensors by name."""
        return dict(zip(self.given, self.inputs, strict=True))

    def empty(self, names: Collection[str]) -> dict[str, Tensor]:
        """Tensors like the inputs of these names, for their gradients."""
        inputs = self.named()
        return {name: torch.empty_like(inputs[name]) for name in names}


def _gradients_of_named(of_call: _OfCall, options: Mapping[str, Any], wanted: Sequence[str]) -> list[Tensor]:
    """What `_moe_backward` returns."""
    results = of_call.empty({"x", *wanted})
    _write_gradients(of_call, options, results)
    return [results[name] for name in wanted]


def _write_gradients(
    of_call: _OfCall, options: Mapping[str, Any], results: Mapping[str, Tensor], accumulates: bool = False
) -> None:
    """Writes the gradients to `results`, by name. With `accumulates`, those of weights and biases are added to the
    contents of `results`."""
    read = of_call.named() | {"y": of_call.grad.contiguous()}
    if of_call.logits_grad is not None:
        read["router_logits"] = of_call.logits_grad.contiguous()
    what = of_call.kept, of_call.counted, _options_of(options), Gradients(read, results, accumulates)
    _in_context(of_call.context, of_call.grad.shape[0], lambda ctx: run_backward(ctx, *what))


class _Kept(torch.autograd.Function):
    """Does what `moe_kept` does, but not as an operator, because PyTorch's way to an operator takes the host a
    millisecond. In a group of GPUs the device would wait for this, since the host reads from it in each call how many
    rows there are (docs/measured.md)."""

    @staticmethod
    def forward(ctx: Any, number: int, options: dict[str, Any], *tensors: Tensor | None) -> tuple[Tensor, ...]:
        named = dict(zip(READ, tensors, strict=True))
        y, load, logits, kept, counted = _kept(options | named | {"context": number})
        _save(ctx, number, options, (kept, counted), named, (None, None, *READ))
        ctx.mark_non_differentiable(load)
        return y, load, logits

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return _gradients(ctx, *grads)


def _no_backward(grad: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
    raise NotImplementedError(
        "flashmoe.moe: FlashMoE has no backward pass of quantised weights; call the layer under "
        "torch.no_grad(), or detach its input and freeze its weights (torch.ops.flashmoe.moe itself has none anywhere: "
        "call flashmoe.moe)"
    )


def _and(signature: inspect.Signature, **more: Any) -> inspect.Signature:
    """`signature` with these parameters, which have defaults, after its own."""
    added = [_keyword(name, default, Any) for name, default in more.items()]
    return signature.replace(parameters=[*signature.parameters.values(), *added])


_SIGNATURE = _moe.__signature__ = _signature()
_SCHEMA = torch.library.infer_schema(_moe, mutates_args=()).removesuffix(") -> Tensor")

moe = torch.library.custom_op("flashmoe::moe", _moe, mutates_args=(), schema=f"{_SCHEMA}) -> Tensor")
_OBSERVED = _and(_SIGNATURE, load_size=0, with_logits=False)
_OBSERVED_SCHEMA = f"{_SCHEMA}, SymInt load_size=0, bool with_logits=False"
moe_observed = torch.library.custom_op(
    "flashmoe::moe_observed",
    _moe_observed,
    mutates_args=(),
    schema=f"{_OBSERVED_SCHEMA}) -> (Tensor, Tensor, Tensor)",
)
_KEPT = _and(_OBSERVED, main_grad=False)
moe_kept = torch.library.custom_op(
    "flashmoe::moe_kept",
    _moe_kept,
    mutates_args=(),
    schema=f"{_OBSERVED_SCHEMA}, bool main_grad=False) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
_BACKWARD = inspect.Signature(
    [_keyword(name, inspect.Parameter.empty, Any) for name in (*_OfCall._fields, "wanted")]
    + [_SIGNATURE.parameters[name] for name in OPTIONS]
)
_OPTION_SCHEMA = ", ".join(_SCHEMA.split(", ")[-len(OPTIONS) :])
moe_backward = torch.library.custom_op(
    "flashmoe::moe_backward",
    _moe_backward,
    mutates_args=(),
    schema="(SymInt context, Tensor grad, Tensor? logits_grad, Tensor kept, Tensor counted, Tensor[] inputs, "
    f"str[] given, str[] wanted, {_OPTION_SCHEMA}) -> Tensor[]",
)

# The backward pass of operators that have none is an operator, too, which raises an error when it is executed: PyTorch
# can trace it for its shapes. If `_refused` itself raised the error, torch.compile would fail while it prepares a
# forward pass that asks for gradients.
no_backward = torch.library.custom_op("flashmoe::no_backward", _no_backward, mutates_args=())


def call(number: int | None, tensors: Tensors, options: Options, main_grad: bool = False) -> Tensor:
    """A call of the operator, changed as autocast requires within autocast. `number` is that of its context; None: the
    context that is kept for calls of these shapes. If PyTorch need not see the call, it is made without the operator,
    because PyTorch's way to an operator takes the host as long as the call itself (docs/measured.md)."""
    try:
        tensors, options = as_autocast(tensors, options, main_grad)
        if number is None:
            number = alone.number_of(tensors, options)
        if goes_through_torch(tensors.x, tensors) or _is_on_meta(tensors):
            return by_operator(number, tensors, options, main_grad)
        return _in_context(number, _tokens_of(tensors.x), lambda ctx: run(ctx, tensors, options, False))
    except Exception as error:
        tell(contexts.get(number), error, tensors.x)
        raise


def _is_on_meta(tensors: Tensors) -> bool:
    """Whether a tensor is on the device ``meta``. For such tensors the operator makes a result without values."""
    return any(each.is_meta for each in tensors if each is not None)


def saving_contexts() -> tuple[Any, Any]:
    """For ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False, context_fn=saving_contexts)``: what calls of
    the layer keep is saved, and only the operations around these calls are computed again.

    Without `saving_contexts`, a backward pass makes each call once more, on all ranks alike. Under ``torch.compile`` it
    is needed, because PyTorch cannot compile code that computes an operator with effects again.
    """
    return create_selective_checkpoint_contexts([torch.ops.flashmoe.moe_kept.default])


def check_tensors(tensors: Mapping[str, Any]) -> None:
    """Raises `InvalidArgument` for a tensor, which it names, that is no tensor of PyTorch, or is sparse or nested.
    Raises `NotImplementedError` if a tensor carries a forward-mode derivative, as under ``torch.func.jvp``.

    To be called before the operator, because PyTorch itself would raise errors of other types for the wrong tensors,
    and would ignore a tensor's derivative and take the result for a constant.
    """
    for name, tensor in tensors.items():
        if tensor is None and name not in REQUIRED:
            continue
        if not isinstance(tensor, Tensor):
            raise InvalidArgument(f"{name}: expected a PyTorch tensor, as operators take, got {type(tensor).__name__}")
        operands.refuse_hollow(name, tensor)
    if forward_ad._current_level < 0:
        return
    if any(each is not None and forward_ad.unpack_dual(each).tangent is not None for each in tensors.values()):
        raise NotImplementedError(
            "flashmoe.moe: FlashMoE has no forward-mode derivatives; detach its inputs, or call the layer outside "
            "of torch.func.jvp and torch.autograd.forward_ad"
        )


@moe.register_fake
def _(*args: Any, **kwargs: Any) -> Tensor:
    """y, [T, H], contiguous, of x's dtype, or bfloat16 for x in FP8. The call checks the arguments, this function does
    not, with one exception: if a tensor is on the device ``meta``, all must be there. PyTorch then makes no call, and a
    y on another device would be memory that nobody has written to."""
    return _fake(_bound(_SIGNATURE, args, kwargs))


def _fake(given: Mapping[str, Any]) -> Tensor:
    tensors = _tensors_of(given)
    _refuse_meta_beside_others(tensors)
    return operands.empty_like(tensors.x)


@moe_observed.register_fake
def _(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    given = _bound(_OBSERVED, args, kwargs)
    return _fake(given), *_observations(given)


def _refuse_meta_beside_others(tensors: Tensors) -> None:
    devices = {name: tensor.device for name, tensor in tensors._asdict().items() if tensor is not None}
    real = [device for device in devices.values() if device.type != "meta"]
    if not real:
        return
    for name, device in devices.items():
        if device.type == "meta":
            raise InvalidArgument(f"{name}: expected a tensor on {real[0]}, got one on meta")


@moe_kept.register_fake
def _(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    given = _bound(_KEPT, args, kwargs)
    return _fake(given), *_observations(given), *_fake_kept(given)


def _fake_kept(given: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    tensors, options = _tensors_of(given), _options_of(given)
    if tensors.x.device.type != "cuda":
        return torch.empty(2, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
    if cuda_training.missing(tensors, False):
        size, counts = 0, 0
    elif getattr(contexts.get(given["context"]), "ranks", 1) != 1:  # the size depends on how many rows arrive
        size, counts = torch.library.get_ctx().new_dynamic_size(), len(cuda_training.ALONE)
    else:
        size, counts = tensors.x.shape[0] * cuda_training.kept_token_bytes(tensors, options), 0
    return tensors.x.new_empty(size, dtype=torch.uint8), torch.empty(counts, dtype=torch.int64)


@moe_backward.register_fake
def _(*args: Any, **kwargs: Any) -> list[Tensor]:
    given = _bound(_BACKWARD, args, kwargs)
    return list(_OfCall.of(given).empty(given["wanted"]).values())


@no_backward.register_fake
def _(grad: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty_like(each) for each in inputs]


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.positions = [position for position, each in enumerate(inputs) if isinstance(each, Tensor)]
    ctx.save_for_backward(*(inputs[position] for position in ctx.positions))


def _refused(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    """Gradients of an operator that has none: one per argument of the call, None for arguments that need none."""
    needed = ctx.needs_input_grad
    saved = zip(ctx.positions, ctx.saved_tensors, strict=True)
    inputs = {position: tensor for position, tensor in saved if needed[position]}
    gradients = dict(zip(inputs, no_backward(grad, list(inputs.values())), strict=True))
    return tuple(gradients.get(position) for position in range(len(needed)))


_DIFFERENTIABLE = frozenset(("x", "topk_weights", *PARAMETERS))
_ARGUMENTS = tuple(_KEPT.parameters)


def _save_kept(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    given = dict(zip(_ARGUMENTS, inputs, strict=True))
    _save(ctx, given["context"], given, output[3:], {name: given[name] for name in READ}, _ARGUMENTS)


def _save(
    ctx: Any,
    context: int,
    options: Mapping[str, Any],
    kept: Sequence[Tensor],
    tensors: Mapping[str, Tensor | None],
    arguments: Sequence[str | None],
) -> None:
    """Saves what `_gradients` needs: the call's `tensors` by name, and the names of its `arguments` in their order.
    With `main_grad`, `ctx` also holds the parameters themselves, because saved tensors may come back as other objects
    (checkpointing detaches them) that lack the attribute `main_grad`."""
    given = {name: each for name, each in tensors.items() if each is not None}
    ctx.set_materialize_grads(False)
    ctx.context, ctx.options = context, {name: options[name] for name in OPTIONS}
    ctx.arguments, ctx.given = arguments, tuple(given)
    ctx.parameters = {name: given[name] for name in PARAMETERS if name in given} if options["main_grad"] else {}
    ctx.save_for_backward(*kept, *given.values())


def _gradients(ctx: Any, grad: Tensor | None, load: None, logits: Tensor | None, *_: None) -> tuple[Any, ...]:
    """One gradient per argument of the call. None for arguments that need none, or whose gradient is added to a
    `main_grad`."""
    saved = ctx.saved_tensors  # checkpointing makes calls here; they tell their own errors
    try:
        return _gradients_of(ctx, saved, grad, logits)
    except Exception as error:
        tell(contexts.get(ctx.context), error, grad if logits is None else logits)
        raise


def _gradients_of(ctx: Any, saved: Sequence[Tensor], grad: Tensor | None, logits: Tensor | None) -> tuple[Any, ...]:
    if any(each is not None and torch._C._functorch.is_legacy_batchedtensor(each) for each in (grad, logits)):
        raise NotImplementedError(_NO_TRANSFORMS)
    _refuse_transforms()
    needed, (kept, counted, *inputs) = ctx.needs_input_grad, saved
    of_call = _OfCall(ctx.context, grad, logits, kept, counted, inputs, ctx.given)
    if grad is None:  # only the logits have a gradient
        of_call = of_call._replace(grad=torch.zeros_like(of_call.named()["x"]))
    arguments = ctx.arguments[: len(needed)]  # a compiler may have left out the last ones, which have their defaults
    wanted = [name for name, need in zip(arguments, needed, strict=True) if need and name in _DIFFERENTIABLE]
    if ctx.parameters:
        results = _accumulate(of_call, ctx.options, wanted, ctx.parameters)
    elif goes_through_torch(of_call.grad, inputs):
        results = moe_backward(*of_call, wanted, **ctx.options)
    else:  # without PyTorch's way to an operator, which takes the host longer than all of this
        results = _gradients_of_named(of_call, ctx.options, wanted)
    gradients = dict(zip(wanted, results, strict=True))
    return tuple(map(gradients.get, arguments))


def _accumulate(
    of_call: _OfCall, options: Mapping[str, Any], wanted: Sequence[str], parameters: Mapping[str, Tensor]
) -> list[Any]:
    """As `_gradients_of_named`, but adds the gradients of `parameters` to their `main_grad`, and returns None for
    them."""
    if torch.is_grad_enabled():  # create_graph: second derivatives would be wrong without an error
        raise _no_second_derivatives()
    sums = {name: _main_grad_of(name, parameters[name]) for name in wanted if name in parameters}
    others = of_call.empty({"x", *wanted} - sums.keys())
    _write_gradients(of_call, options, others | sums, accumulates=True)
    for each in sums.values():
        torch.autograd.graph.increment_version(each)  # PyTorch has not seen the write
    return [others.get(name) for name in wanted]


def _no_second_derivatives() -> NotImplementedError:
    return NotImplementedError(
        "flashmoe.moe: FlashMoE has no second derivatives, as gradient penalties and Hessians need; compute gradients "
        "without create_graph=True, or detach what the layer contributes to them"
    )


def _refuse_second(ctx: Any, *grads: Any) -> Any:
    raise _no_second_derivatives()


for _operator in (moe, moe_observed):
    _operator.register_autograd(_refused, setup_context=_save_inputs)
moe_kept.register_autograd(_gradients, setup_context=_save_kept)
moe_backward.register_autograd(_refuse_second)
for _operator in (moe, moe_observed, moe_kept, moe_backward):
    if hasattr(_operator, "register_effect"):  # not in older PyTorch
        _operator.register_effect(torch.library.EffectType.ORDERED)
