"""Calls of one GPU for the tests: inputs on the device, how they are made, and the check of results."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import flashmoe
import pytest
import torch
from bounds import Expected, RouterRule, Weights, choice_values, choose, expected_result, logits_of, router_slack
from flashmoe.nn import MoE
from flashmoe.report import CallReport
from flashmoe.spec import GATED
from hypothesis import HealthCheck, seed, settings
from seeds import SEED
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

DTYPES = ("float32", "bfloat16", "float16")
ACTIVATIONS = ("relu", "gelu", "silu", "swiglu")
SHAPE_OPTIONS = ("interleaved", "limit", "alpha", "up_offset", "weights_on_input")
EXPERT_OPTIONS = ("activation", "transposed", *SHAPE_OPTIONS)
MATRICES = ("gate_up_proj", "down_proj", "shared_gate_up", "shared_down")
"""The matrices that a transposed layer stores with rows and columns exchanged."""
ROUTER_OPTIONS = ("renormalize", "score", "routed_scale", "round_logits", "groups", "top_groups")
ARITHMETIC = {**{dtype: {"dtype": dtype} for dtype in DTYPES}, "exact": {"dtype": "float32", "exact": True}}
"""Arguments of `random_problem` for each way to multiply: by type, and float32 without TF32."""
PATIENCE = 10.0
"""Seconds without progress after which a kernel gives up."""


def at_random(examples: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator for tests of Hypothesis: new examples in each run, unless FLASHMOE_SEED repeats those of another."""
    how = settings(
        max_examples=examples,
        deadline=None,
        database=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )
    return lambda test: seed(SEED)(how(test))


@dataclass(eq=False)
class Problem:
    """One call: tensors on the device, and options."""

    x: Tensor
    gate_up_proj: Tensor
    down_proj: Tensor
    top_k: int
    router: Tensor | None = None
    router_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    choice_bias: Tensor | None = None
    shared_gate_up: Tensor | None = None
    shared_down: Tensor | None = None
    shared_gate: Tensor | None = None
    topk_ids: Tensor | None = None
    topk_weights: Tensor | None = None
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of `flashmoe.moe`."""

    @property
    def dtype(self) -> str:
        return str(self.x.dtype).removeprefix("torch.")

    @property
    def experts(self) -> int:
        return len(self.down_proj)

    @property
    def transposed(self) -> bool:
        return self.options.get("transposed", False)

    @property
    def sizes(self) -> dict[str, int]:
        """The layer's sizes, by the names of a context's arguments."""
        columns, rows = self.down_proj.shape[1:]
        hidden, intermediate = (rows, columns) if self.transposed else (columns, rows)
        return {"hidden": hidden, "intermediate": intermediate, "experts": self.experts, "top_k": self.top_k}

    def weights(self) -> Weights:
        tensors = {name: getattr(self, name) for name in MATRICES}
        if self.transposed:
            tensors = {name: None if each is None else each.mT for name, each in tensors.items()}
        return Weights(
            tensors["gate_up_proj"],
            tensors["down_proj"],
            self.gate_up_bias,
            self.down_bias,
            self.options.get("activation", "swiglu"),
            {name: self.options[name] for name in SHAPE_OPTIONS if name in self.options},
            tensors["shared_gate_up"],
            tensors["shared_down"],
            self.shared_gate,
        )

    @property
    def shared(self) -> dict[str, Tensor | None]:
        """The shared expert's tensors."""
        return {name: getattr(self, name) for name in ("shared_gate_up", "shared_down", "shared_gate")}

    @property
    def shared_intermediate(self) -> int:
        """Is, the shared expert's width; 0: there is no shared expert."""
        return 0 if self.shared_down is None else self.shared_down.shape[0 if self.transposed else 1]

    def rule(self) -> RouterRule:
        options = {name: self.options[name] for name in ROUTER_OPTIONS if name in self.options}
        return RouterRule(**options, choice_bias=self.choice_bias)

    def arguments(self) -> dict[str, Any]:
        """The arguments of `flashmoe.moe`."""
        names = ("x", "gate_up_proj", "down_proj", "gate_up_bias", "down_bias")
        arguments = {**{name: getattr(self, name) for name in names}, **self.shared, **self.options}
        if self.topk_ids is None:
            routed = {"router": self.router, "router_bias": self.router_bias, "choice_bias": self.choice_bias}
            return arguments | routed | {"top_k": self.top_k}
        return arguments | {"topk_ids": self.topk_ids, "topk_weights": self.topk_weights}


def random_problem(
    seed: int,
    tokens: int,
    *,
    hidden: int,
    intermediate: int,
    experts: int,
    top_k: int,
    dtype: str = "bfloat16",
    ids: str | None = None,
    skew: float = 0.0,
    scale: float = 1.0,
    biases: bool = False,
    choice_bias: bool = False,
    shared: int = 0,
    shared_gate: bool = False,
    device: str = "cuda",
    **options: Any,
) -> Problem:
    """Normally distributed inputs, with results about as large as `scale`. `ids`: None for a router, or the type of the
    given ids. `shared`: how many times as wide as an expert the shared expert is (0: there is none).

    `skew` spreads the experts' mean logits: with 0, all experts are equally likely; with 50, nearly all tokens choose
    the same experts. With a router and a capacity, tokens are left out if the engine cannot decide which experts are
    their top-k (`is_certain`), because their choice would decide which other tokens are dropped.
    """
    generator = torch.Generator(device=device).manual_seed(seed)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    def normal(*shape: int, size: float) -> Tensor:
        made = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        for part in made if len(shape) == 3 else [made]:  # one expert at a time: float32 copies of all are large
            part.copy_(numbers(*part.shape).mul_(size))
        return made

    rows = intermediate * (2 if options.get("activation", "swiglu") in GATED else 1)
    order = torch.randperm(experts, generator=generator, device=device)
    preference = skew * torch.linspace(0.0, 1.0, experts, device=device)[order]
    problem = Problem(
        x=normal(tokens, hidden, size=scale),
        gate_up_proj=normal(experts, rows, hidden, size=hidden**-0.5),
        down_proj=normal(experts, hidden, intermediate, size=intermediate**-0.5),
        top_k=top_k,
        gate_up_bias=normal(experts, rows, size=scale) if biases else None,
        down_bias=normal(experts, hidden, size=scale) if biases else None,
        options=options,
    )
    if shared:
        problem.shared_gate_up = normal(shared * rows, hidden, size=hidden**-0.5)
        problem.shared_down = normal(hidden, shared * intermediate, size=(shared * intermediate) ** -0.5)
    if shared_gate:
        problem.shared_gate = normal(1, hidden, size=1.0 / (scale * hidden**0.5))
    if problem.transposed:  # drawn untransposed, so that a layer has the same weights with the option as without it
        for name in MATRICES:
            if (each := getattr(problem, name)) is not None:
                setattr(problem, name, each.mT.contiguous())
    if ids is not None:
        uniform = torch.rand(tokens, experts, generator=generator, device=device).clamp_(1e-7, 1 - 1e-7)
        gumbel = -torch.log(-torch.log(uniform))
        problem.topk_ids = choose((preference + gumbel).double(), top_k).to(getattr(torch, ids))
        problem.topk_weights = torch.rand(tokens, top_k, generator=generator, device=device) * 3.0 - 1.0
        return problem
    problem.router = normal(experts, hidden, size=2.0 / (scale * hidden**0.5))
    if biases:
        problem.router_bias = (preference + 0.5 * numbers(experts)).to(problem.x.dtype)
    elif skew:
        problem.x[:, 0] = problem.x[:, 0].abs() + scale
        problem.router[:, 0] += (preference / scale).to(problem.x.dtype)
    if choice_bias:
        problem.choice_bias = 0.3 * torch.rand(experts, generator=generator, device=device)
    if options.get("capacity_factor") is not None:
        problem.x = problem.x[is_certain(problem)].contiguous()
    return problem


def is_certain(problem: Problem) -> Tensor:
    """bool [T]: whether each of the token's k largest `choice_values` exceeds the next one by so much that the engine
    cannot confuse the two. The order among the k matters too: a dropped choice is reported as -1, without its expert,
    so only its position in the row tells which choice it was."""
    rule = problem.rule()
    values = choice_values(logits_of(problem.x, problem.router, problem.router_bias), rule)
    slack = router_slack(problem.x, problem.router, problem.router_bias, rule)
    falling = values.sort(dim=1, descending=True).values
    least = falling.new_full((len(falling), 1), -math.inf)
    falling = torch.cat([falling, least], dim=1)[:, : problem.top_k + 1]
    return (falling[:, :-1] - falling[:, 1:] > 2.0 * slack.unsqueeze(1)).all(dim=1)


def context_of(problem: Problem, **changes: Any) -> flashmoe.Context:
    """The smallest context in which the problem's call can be made. `changes`: other arguments of the context."""
    sizes = problem.sizes | {
        "max_tokens": max(1, len(problem.x)),
        "dtype": problem.dtype,
        "timeout": PATIENCE,
        "engine": "cuda",
        "shared_intermediate": problem.shared_intermediate,
    }
    torch.cuda.empty_cache()  # so that the device has memory for the context, which cannot use PyTorch's cache
    return flashmoe.Context(**sizes | changes)


@contextmanager
def poisoned_outputs() -> Iterator[None]:
    """Fills the outputs of calls with NaN beforehand, so that tests notice elements that the kernel does not write."""
    with pytest.MonkeyPatch.context() as patch:
        empty_like = torch.empty_like
        patch.setattr(torch, "empty_like", lambda *args, **kwargs: empty_like(*args, **kwargs).fill_(math.nan))
        yield


def call(context: flashmoe.Context, problem: Problem, **how: Any) -> tuple[Tensor, CallReport]:
    """Makes the call, on an output that begins as NaN, and waits for it."""
    with poisoned_outputs():
        y = flashmoe.moe(context, **problem.arguments(), **how)
    context.synchronize()
    return y, context.last_call


@dataclass(eq=False)
class Observed:
    """The tensors `load` and `router_logits` of a call, each with a guard row before and after it. Reading one of them
    back checks that its guard rows are unchanged."""

    _load: Tensor
    _logits: Tensor
    has_router: bool

    @classmethod
    def of(cls, problem: Problem) -> Observed:
        device, experts = problem.x.device, problem.experts
        load = torch.full((3, experts), -7, dtype=torch.int64, device=device)
        load[1] = 2**40 + torch.arange(experts, device=device)  # not 0, because a call adds its counts to what is there
        logits = torch.full((len(problem.x) + 2, experts), -math.inf, device=device)
        logits[1:-1] = math.nan
        return cls(load, logits, problem.topk_ids is None)

    def arguments(self) -> dict[str, Tensor]:
        """The arguments of `flashmoe.moe` that hand over these tensors."""
        return {"load": self._load[1]} | ({"router_logits": self._logits[1:-1]} if self.has_router else {})

    @property
    def load(self) -> Tensor:
        """[E]: what calls have added to `load`."""
        assert (self._load[0::2] == -7).all(), "load: memory beside it was written to"
        return self._load[1] - 2**40 - torch.arange(len(self._load[1]), device=self._load.device)

    @property
    def logits(self) -> Tensor:
        """[T, E]: the router's logits that the last call has written."""
        assert self._logits[:: len(self._logits) - 1].isneginf().all(), "router_logits: memory beside it was written to"
        return self._logits[1:-1]


def module_of(context: flashmoe.Context, problem: Problem, **further: Any) -> MoE:
    """A module with the problem's options and parameters. The problem has all experts' parameters, and the module keeps
    those of this rank's experts."""
    sizes = problem.sizes
    biases = {"router_bias": problem.router_bias is not None, "expert_bias": problem.down_bias is not None}
    options = {**biases, **problem.options, "dtype": problem.x.dtype, **further}
    module = MoE(context, *sizes.values(), **options).to(problem.x.device)
    state = {
        "gate.weight": problem.router,
        "gate.bias": problem.router_bias,
        "experts.gate_up_proj": problem.gate_up_proj,
        "experts.gate_up_proj_bias": problem.gate_up_bias,
        "experts.down_proj": problem.down_proj,
        "experts.down_proj_bias": problem.down_bias,
    }
    module.load_state_dict({name: tensor for name, tensor in state.items() if tensor is not None})
    return module


def compiled(function: Callable, backend: str) -> Callable:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend=backend)


def capture(context: flashmoe.Context, problem: Problem) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """A CUDA graph of one call, and the output that its replays write."""
    call(context, problem)  # because a kernel cannot be loaded, nor a layer prepared, during a capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = flashmoe.moe(context, **problem.arguments())
    return graph, y


def gpu_operations(run: Callable[[], object]) -> list[str]:
    """The names of the kernels, copies and fills that this process's GPUs do during `run`. (In the profiler's first run
    in a process, there may also be operations of the profiler.)"""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    names = [event.name for event in seen.events() if event.device_type == DeviceType.CUDA]
    return [name for name in names if "sync" not in name.lower()]


def check(problem: Problem, y: Tensor, report: CallReport) -> Expected:
    """Asserts that y is within the bound of the float64 reference, and that routing and drops are the reference's."""
    x = problem.x
    assert (y.shape, y.dtype, y.device) == (x.shape, x.dtype, x.device) and y.is_contiguous()
    assert report.tokens == len(x)
    reported = torch.from_numpy(report.topk_ids).to(x.device).long()
    expected = expected_result(
        x,
        problem.weights(),
        top_k=problem.top_k,
        router=problem.router,
        router_bias=problem.router_bias,
        rule=problem.rule(),
        topk_ids=problem.topk_ids,
        topk_weights=problem.topk_weights,
        capacity_factor=problem.options.get("capacity_factor"),
        reported=reported,
        exact=problem.options.get("exact", False),
    )
    assert expected.routing_is_valid, "experts that are no top-k of the float64 logits"
    assert torch.equal(reported, expected.topk_ids)
    assert report.dropped == int((expected.topk_ids < 0).sum())
    if problem.topk_ids is None:
        weights = torch.from_numpy(report.topk_weights).to(x.device).double()
        off = (weights - expected.weights).abs() > expected.weight_slack
        assert not (off & (expected.topk_ids >= 0)).any(), "weights"
    assert y.isfinite().all(), f"{int((~y.isfinite()).any(dim=1).sum())} rows of y are not finite"
    error = float((y.double() - expected.y).norm())
    assert error <= expected.bound, (
        f"error {error:.3e}, bound {expected.bound:.3e} (rms {expected.rms:.3e}), norm of terms {expected.scale:.3e}"
    )
    return expected


def run_and_check(problem: Problem, **limits: Any) -> Tensor:
    """Makes the call in a context of its own, checks it and returns y. `limits`: further arguments of the context."""
    with context_of(problem, **limits) as context:
        y, report = call(context, problem)
        check(problem, y, report)
    return y
