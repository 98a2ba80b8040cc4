"""The options of a layer and of a call: the one place that says each option's name, type, default, check and text.

Everything else that names options is made from these tables: `Options`, which calls carry; the fields of `LayerSpec`;
the signatures and the help of `flashmoe.moe` and `flashmoe.nn.MoE`; the schema of PyTorch's operator; the arguments of
the references and their tolerances; and docs/options.md. An option that changes what the engines compute is named once
more, in C++ (include/flashmoe/spec/layer.h). docs/extending.md says how to add an option.
"""

# No `from __future__ import annotations`: the tables below read their annotations as objects.
import types
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, TypedDict, get_args

from ..errors import InvalidArgument
from .values import (
    ACTIVATIONS,
    GATED,
    MAX_EXPERTS,
    MAX_GROUPS,
    MAX_TOKENS,
    SCORES,
    Activation,
    ReturnChoice,
    Score,
    bounded,
    finite,
    one_of,
    positive,
    truth,
)

ROUTER = "router"
"""`Option.of` for an option of the router: with given routing it is refused."""
CLAMPED = "clamped_swiglu"
"""`Option.of` for an option of this activation alone."""
GATE = "gate"
"""`Option.of` for an option of activations with a gate."""

Placement = Sequence[int | Sequence[int]]
"""Who holds expert 0, 1, ..: a rank, or the ranks that have a copy. See `flashmoe.placement`."""

Check = Callable[[str, Any], Any]
"""(name, value) -> the value, converted to the option's type. Raises `InvalidArgument`."""


class Option(NamedTuple):
    """What is known of an option besides its name and its type."""

    default: Any
    check: Check | None
    """Checks a value. None: which values are allowed depends on the context or on the tensors; `arguments` checks."""
    text: str
    of: str = ""
    """`ROUTER`, `CLAMPED` or `GATE`: a layer that lacks this must have the option's default. Empty: every layer may
    have the option."""
    in_layer: bool = True
    """Whether `LayerSpec` has a field of this name, with this default."""


def _among(known: tuple[str, ...]) -> Check:
    return lambda name, value: one_of(name, value, known)


def _within(most: int) -> Check:
    return lambda name, value: bounded(name, value, 1, most)


def _or_none(check: Check) -> Check:
    return lambda name, value: None if value is None else check(name, value)


class LayerOptions(TypedDict, total=False):
    """The options that say what a layer computes; see docs/models.md."""

    activation: Annotated[
        Activation,
        Option(
            "swiglu",
            _among(ACTIVATIONS),
            "One of `flashmoe.spec.ACTIVATIONS`, such as ``'gelu'`` (by erf); those of `flashmoe.spec.GATED` have a "
            "gate.",
        ),
    ]
    renormalize: Annotated[
        bool,
        Option(
            True,
            truth,
            "With a router: whether a token's K weights are divided by their sum (with ``score='sigmoid'``, by their "
            "sum plus 1e-20).",
        ),
    ]
    score: Annotated[
        Score,
        Option(
            "softmax",
            _among(SCORES),
            "With a router: ``'softmax'`` of the logits of all E experts, or ``'sigmoid'`` of each logit.",
            of=ROUTER,
            in_layer=False,  # LayerSpec.routing has the score, or "given"
        ),
    ]
    round_logits: Annotated[
        bool,
        Option(
            False,
            truth,
            "With a router: whether its logits are first rounded to x's type, as a linear layer rounds its results.",
            of=ROUTER,
        ),
    ]
    routed_scale: Annotated[
        float,
        Option(1.0, finite, "With a router: a factor of a token's K weights, applied last.", of=ROUTER),
    ]
    groups: Annotated[
        int,
        Option(
            1,
            _within(MAX_GROUPS),
            "With a router: the number of groups that experts form; E / groups neighbouring experts are a group.",
            of=ROUTER,
        ),
    ]
    top_groups: Annotated[
        int | None,
        Option(
            None,
            _or_none(_within(MAX_GROUPS)),
            "The number of groups from which experts are chosen: those whose two best scores (with `choice_bias`: plus "
            "their biases) have the largest sum (DeepSeek-V3, section 2.1.2). None: all groups.",
            of=ROUTER,
            in_layer=False,
        ),
    ]
    limit: Annotated[
        float | None,
        Option(
            None,
            _or_none(positive),
            "For ``clamped_swiglu``, which is ``g sigmoid(alpha g) (u + up_offset)`` with ``g = min(gate, limit)`` and "
            "u = up, clamped to plus and minus `limit`. None: no limit.",
            of=CLAMPED,
            in_layer=False,
        ),
    ]
    alpha: Annotated[float, Option(1.0, positive, "For ``clamped_swiglu``: see `limit`.", of=CLAMPED)]
    up_offset: Annotated[float, Option(0.0, finite, "For ``clamped_swiglu``: see `limit`.", of=CLAMPED)]
    interleaved: Annotated[
        bool,
        Option(
            False,
            truth,
            "With an activation that has a gate: the rows of gate_up_proj and of shared_gate_up (if `transposed`: "
            "their columns) and the elements of gate_up_bias are in the order gate, up, gate, up, ...",
            of=GATE,
        ),
    ]
    transposed: Annotated[
        bool,
        Option(
            False,
            truth,
            "gate_up_proj is [El, H, 2I or I] and down_proj [El, I, H]; of a shared expert, shared_gate_up is [H, 2Is "
            "or Is] and shared_down [Is, H].",
        ),
    ]
    weights_on_input: Annotated[
        bool,
        Option(False, truth, "A token's weights scale its row before the experts, instead of the experts' results."),
    ]
    slices: Annotated[
        int,
        Option(
            1,
            _within(MAX_EXPERTS),
            "The number of slices into which each expert is cut; a lone rank must pass 1. The slices of an expert may "
            "be on different ranks (see `flashmoe.slices`). In the shapes of tensors, I is the width of a slice and El "
            "counts slices; but `flashmoe.nn.MoE` is made with the I of a whole expert. A placement has an entry for "
            "each slice: first those of expert 0, then those of expert 1, ... With more than one slice, results come "
            "home as with ``'reduced'``, and the return mode ``'direct'`` is refused. In `down_bias` all rows must be "
            "0 except those of first slices, since each slice adds its own row.",
        ),
    ]


class CallOptions(TypedDict, total=False):
    """The options that say how a call is made."""

    exact: Annotated[
        bool,
        Option(
            False,
            truth,
            "CUDA engine, float32: whether products are in float32, ten times as slow as the default, TF32 (10 bits of "
            "mantissa).",
        ),
    ]
    placement: Annotated[
        Placement | None,
        Option(
            None,
            None,
            "Who holds which expert, as for a `Context`. None: the context's placement, if it has as many experts as "
            "the layer; otherwise each rank holds a run of consecutive experts.",
            in_layer=False,
        ),
    ]
    capacity_factor: Annotated[
        float | None,
        Option(
            None,
            None,
            "None: dropless. Otherwise each rank keeps, for an expert, the first ``ceil(capacity_factor * (T * K) / "
            "E)`` of its (token, k) pairs in token order (GShard, section 2.2). If the context has a factor, a call "
            "must have one, of at most that.",
            in_layer=False,
        ),
    ]
    return_mode: Annotated[
        ReturnChoice | None,
        Option(None, None, "See `Context`. None: the context's.", in_layer=False),
    ]
    redispatch: Annotated[
        bool | None,
        Option(
            None,
            _or_none(truth),
            "Several ranks: if True, a forward pass that keeps what its gradients need does not keep the rows of other "
            "ranks' tokens, and the backward pass sends x once more (docs/training.md). Results have the same bits. "
            "All ranks must pass the same value. None: the context's. Only a context that was made with `redispatch` "
            "has room for this.",
            in_layer=False,
        ),
    ]
    strict: Annotated[
        bool,
        Option(
            False,
            truth,
            "With a router: whether the call raises `BadRow` if no experts can be chosen for one of this rank's "
            "tokens: a logit, or a number of `choice_bias`, is NaN or +inf, or all of the token's logits are -inf. The "
            "error names the token, and is raised when the call is over. Without `strict`, the token's y is NaN, and "
            "``ctx.last_call.bad_rows`` counts the token. Ranks may differ.",
            in_layer=False,
        ),
    ]


class ModuleOptions(LayerOptions, CallOptions, total=False):
    """The options of `flashmoe.nn.MoE`, which takes K by position."""


class OperatorOptions(ModuleOptions, total=False):
    """The options of `flashmoe.moe`."""

    top_k: Annotated[int | None, Option(None, None, "With a router: K, experts of a token.", in_layer=False)]
    most_tokens: Annotated[
        int | None,
        Option(
            None,
            _or_none(_within(MAX_TOKENS)),
            "Several ranks: a promise that no rank has more tokens than this in the call. All ranks must promise the "
            "same number, and a rank that has more tokens refuses the call. If the number is small, the CUDA engine "
            "uses its kernel for few tokens, whatever the context's `max_tokens` is (docs/gpus.md). None: no promise.",
            in_layer=False,
        ),
    ]


def _tables(of: type) -> dict[str, Option]:
    return {name: next(iter(each.__metadata__)) for name, each in of.__annotations__.items()}


OPTIONS: Mapping[str, Option] = _tables(OperatorOptions)
"""All options by name."""

_NAMES: Mapping[Any, Any] = {Activation: str, Score: str, ReturnChoice | None: str | None}

TYPES: Mapping[str, Any] = {
    name: _NAMES.get(get_args(each)[0], get_args(each)[0]) for name, each in OperatorOptions.__annotations__.items()
}
"""The type of each option. If an option's values are names, the type is `str`, and its text or check lists them."""


def type_name(kind: Any) -> str:
    """What help and pages call a type of `TYPES`."""
    if kind == Placement:
        return "placement"
    if isinstance(kind, types.UnionType):
        return " or ".join(type_name(each) for each in kind.__args__)
    return {"NoneType": "None"}.get(getattr(kind, "__name__", ""), getattr(kind, "__name__", "placement"))


OF_ROUTER = tuple(name for name, option in OPTIONS.items() if option.of == ROUTER)
"""The names of the options of a router; see `ROUTER`."""


class Options(namedtuple("_Options", OPTIONS, defaults=[option.default for option in OPTIONS.values()])):
    """A value for each of `OPTIONS`. A value that is not given is the option's default."""

    __slots__ = ()

    def of_given_routing(self) -> "Options":
        """These options for a call with given routing: the options of a router get their defaults."""
        return self._replace(**{name: OPTIONS[name].default for name in OF_ROUTER})

    def of_layer(self) -> LayerOptions:
        """The options of `LayerOptions`, as keyword arguments."""
        return {name: getattr(self, name) for name in LayerOptions.__annotations__}

    def in_layer(self) -> dict[str, Any]:
        """The options that are fields of `LayerSpec`; see `Option.in_layer`."""
        return {name: getattr(self, name) for name, option in OPTIONS.items() if option.in_layer}


def checked_values(options: Options) -> Options:
    """`options` after all checks that need neither context nor tensors; the checked values have their options' types.
    Raises `InvalidArgument`."""
    checked = Options(
        *(
            value if option.check is None else option.check(name, value)
            for (name, option), value in zip(OPTIONS.items(), options, strict=True)
        )
    )
    for name, option in OPTIONS.items():
        if option.of == CLAMPED and checked.activation != CLAMPED and getattr(checked, name) != option.default:
            raise InvalidArgument(
                f"{name}: expected none with activation {checked.activation!r} ({CLAMPED!r} has one), got "
                f"{getattr(options, name)!r}"
            )
        if option.of == GATE and checked.activation not in GATED and getattr(checked, name):
            raise InvalidArgument(f"{name}: expected False with {checked.activation!r}, which has no gate, got True")
    return checked


def refuse_of_router(options: Options) -> None:
    """Raises `InvalidArgument` if an option of a router is not its default. Called if the routing is given."""
    for name in OF_ROUTER:
        if getattr(options, name) != OPTIONS[name].default:
            raise InvalidArgument(f"{name}: expected router with it, got topk_ids and topk_weights")
