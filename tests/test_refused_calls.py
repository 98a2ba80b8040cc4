"""If some ranks refuse a call, it ends on all ranks: no rank takes another call for it, and the next call is right."""

from __future__ import annotations

import functools
import hashlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import flashmoe
import numpy as np
import pytest
from flashmoe.engines import cpu
from flashmoe.launch import RankPool
from hosts import network
from processes import processes
from spread_ranks import LONG, OPEN, Layer, all_of, check_leaving, formed, gradients
from spread_ranks import tokens_of as tokens_between

__all__ = ["network", "processes"]  # fixtures

RANDOM_CALLS = int(os.environ.get("FLASHMOE_REFUSED_CALLS", "300"))
"""How many random calls `test_random_calls` makes, in all its groups together."""
H, I, E, K, T = 16, 12, 4, 2, 20
SIZES = {"hidden": H, "intermediate": I, "experts": E, "top_k": K, "max_tokens": 32, "dtype": "float32"}
TIMEOUT = 20.0

Arguments = dict[str, Any]
Outcome = tuple[str, Any]
"""``ok`` and a digest of the results, or the name of the error and its message."""


# ---- What is refused -----------------------------------------------------------------------------------------


def _wrong(**changes: Callable[[Arguments], Any]) -> Callable[[Arguments], Arguments]:
    return lambda given: given | {name: change(given) for name, change in changes.items()}


REFUSED: dict[str, Callable[[Arguments], Arguments]] = {
    "shape": _wrong(gate_up_proj=lambda a: a["gate_up_proj"][:, :, :-1]),
    "too few experts": _wrong(down_proj=lambda a: a["down_proj"][:0]),
    "dtype": _wrong(x=lambda a: a["x"].astype(np.float16)),
    "no array": _wrong(x=lambda a: a["x"].tolist()),
    "option": _wrong(activation=lambda a: "nothing"),
    "unknown option": _wrong(colour=lambda a: "blue"),
    "trace": _wrong(trace=lambda a: np.ones(2)),
    "placement": _wrong(placement=lambda a: [99] * E),
    "placement of another length": _wrong(placement=lambda a: [0]),
    "ids and router": _wrong(topk_ids=lambda a: np.zeros((len(a["x"]), K), np.int32)),
    "type of ids": _wrong(
        router=lambda a: None,
        top_k=lambda a: None,
        topk_ids=lambda a: np.zeros((len(a["x"]), K), np.float32),
        topk_weights=lambda a: np.zeros((len(a["x"]), K), np.float32),
    ),
    "limit": _wrong(x=lambda a: np.zeros((33, H), np.float32)),
    "capacity": _wrong(capacity_factor=lambda a: -1.0),
    "promise": _wrong(most_tokens=lambda a: len(a["x"]) - 1),
}

SPECIAL: dict[str, Callable[[Arguments], Arguments]] = {
    "": lambda given: given,
    "NaN rows": _wrong(x=lambda a: _with_nan(a["x"])),
    "-inf": _wrong(router_bias=lambda a: np.array([0, -np.inf, 0, 0.5], np.float32)),
    "given": lambda given: _given_routing(given, -1),
}
"""Unusual calls that succeed: rows of x with NaN, an expert whose probability is 0, ids that name no expert (-1)."""
BAD: dict[str, Callable[[Arguments], Arguments]] = {
    "an id beyond": lambda given: _given_routing(given, E),
    "an id below": lambda given: _given_routing(given, -2),
    "an id twice": lambda given: _given_routing(given, None),
    "strict": lambda given: SPECIAL["NaN rows"](given) | {"strict": True},
}
"""Calls that a rank does not refuse, but that end with an error on this rank, because they have a bad row."""


def _with_nan(x: np.ndarray) -> np.ndarray:
    x = x.copy()
    x[::5, 3] = np.nan
    return x


def _given_routing(given: Arguments, special: int | None) -> Arguments:
    """Gives each token two experts by the token's number. Every third token's second id is `special`, or its first id
    again if `special` is None."""
    tokens = np.arange(len(given["x"]))
    ids = np.stack([tokens % E, (tokens + 1 + tokens // E % (E - 1)) % E], axis=1).astype(np.int64)
    ids[::3, 1] = ids[::3, 0] if special is None else special
    drawn = np.random.default_rng(len(ids)).random(ids.shape).astype(np.float32)
    return given | {"router": None, "top_k": None, "topk_ids": ids, "topk_weights": drawn}


# ---- What ranks do -------------------------------------------------------------------------------------------


def random_array(seed: int, *shape: int) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32)


def weights(layer: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return (
        random_array(3 * layer, E, 2 * I, H),
        random_array(3 * layer + 1, E, H, I),
        random_array(3 * layer + 2, E, H),
    )


def tokens_of(rank: int, layer: int) -> np.ndarray:
    return random_array(1000 + 100 * layer + rank, (7 * rank + 3 * layer) % T, H)


def digest(*arrays: np.ndarray) -> str:
    return hashlib.sha256(b"".join(np.ascontiguousarray(each).tobytes() for each in arrays)).hexdigest()


def outcome_of(call: Callable[[], Any]) -> Outcome:
    try:
        return "ok", call()
    except Exception as error:
        return type(error).__name__, str(error)


def forward(ctx: flashmoe.Context, rank: int, layer: int, wrong: str | None, special: str = "") -> str:
    gate_up, down, router = weights(layer)
    own = ctx.local_experts()
    given = {
        "x": tokens_of(rank, layer),
        "gate_up_proj": gate_up[own],
        "down_proj": down[own],
        "router": router,
        "top_k": K,
    }
    given = SPECIAL[special](given)
    return digest(flashmoe.moe(ctx, **((REFUSED | BAD)[wrong](given) if wrong else given)))


def train(ctx: flashmoe.Context, rank: int, layer: int, refused: str | None, special: str = "") -> str:
    """A forward pass that keeps, and its backward pass. `refused` says which of them the rank refuses: the forward pass
    for the shape of x, or the backward pass because a parameter has no ``main_grad``."""
    import torch
    from flashmoe.nn import MoE

    gate_up, down, router = weights(layer)
    moe = MoE(ctx, hidden=H, intermediate=I, experts=E, top_k=K, dtype=torch.float32)
    own = ctx.local_experts()
    given = {"gate.weight": router, "experts.gate_up_proj": gate_up[own], "experts.down_proj": down[own]}
    moe.load_state_dict({name: torch.from_numpy(each) for name, each in given.items()})
    moe.main_grad = True
    for each in moe.parameters():
        each.main_grad = torch.zeros_like(each)
    x = torch.from_numpy(SPECIAL[special]({"x": tokens_of(rank, layer)})["x"]).requires_grad_()
    y = moe(x[:, :-1] if refused == "forward" else x)
    if refused == "backward":
        del moe.experts.down_proj.main_grad
    y.backward(torch.ones_like(y))
    return digest(y.detach().numpy(), x.grad.numpy(), *(each.main_grad.numpy() for each in moe.parameters()))


def calls_of_rank(
    rank: int,
    ranks: int,
    name: str,
    plan: Sequence[tuple[str, int, dict[int, str]]],
    sleepy: Sequence[int] = (),
    machines: tuple[int, ...] = (),
    **options: Any,
) -> list[Outcome]:
    """The outcomes of the calls of `plan`. Each call there is a kind, a layer and reasons. The kind is "forward" or
    "train", followed by a colon and a key of `SPECIAL` if the call is unusual. The reasons, by rank, say why the call
    is refused or bad on these ranks. Ranks in `sleepy` come 0.05 s late to each call."""
    cpu.machines = machines
    with flashmoe.Context(
        rank=rank,
        ranks=ranks,
        name=name,
        timeout=TIMEOUT,
        processors=1,
        **{**SIZES, "return_mode": "direct", **options},
    ) as ctx:
        found = []
        for kind, layer, refused in plan:
            if rank in sleepy:
                time.sleep(0.05)
            which, _, special = kind.partition(":")
            make = functools.partial(forward if which == "forward" else train, ctx, rank, layer)
            found.append(outcome_of(functools.partial(make, refused.get(rank), special)))
        return found


def _go(rank: int, ranks: int, name: str, plan: Any, options: dict[str, Any]) -> list[Outcome]:
    return calls_of_rank(rank, ranks, name, plan, **options)


# ---- Tests ---------------------------------------------------------------------------------------------------

_pools: dict[int, RankPool] = {}


@pytest.fixture(scope="module", autouse=True)
def _closed_pools():
    yield
    while _pools:
        _pools.popitem()[1].close()


def group(ranks: int, plan: Sequence[Any], **options: Any) -> list[list[Outcome]]:
    """The outcomes of the calls of `plan`, by rank."""
    if ranks not in _pools:
        _pools[ranks] = RankPool(ranks)
    return _pools[ranks].call(_go, [(plan, options)] * ranks)


def check(found: list[list[Outcome]], right: list[list[Outcome]], plan: Sequence[Any], first: int = 1) -> None:
    """Each call of each rank is right, or ends with the rank's own error, or with an error that names a rank that has
    refused the call, and why. `right`: the outcomes of the same calls in a group where no rank refuses any."""
    call = first - 1
    for i, (kind, _, wrong) in enumerate(plan):
        passes = ["forward"] if kind.startswith("forward") else ["forward", "backward"]
        refused = {p: why for p, why in wrong.items() if why not in BAD}
        at_backward = "backward" in refused.values()
        call += 1 if refused and not at_backward else len(passes)
        for rank, outcomes in enumerate(found):
            name, said = outcomes[i]
            if rank in refused:
                assert name in ("InvalidArgument", "LimitExceeded", "UnknownOption"), (i, rank, name, said)
            elif refused:
                assert name == "GroupError", (i, rank, name, said)
                expected = [f"rank {p} refused call {call}: {found[p][i][1]}" for p in refused]
                assert said in expected, (i, rank, said, expected)
            elif rank in wrong:
                assert name == "BadRow", (i, rank, name, said)
                assert f"of rank {rank}" in said
            else:
                assert (name, said) == right[rank][i], (i, rank)


def without_refusals(plan: Sequence[Any]) -> list[Any]:
    return [(kind, layer, {}) for kind, layer, _ in plan]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("reason", REFUSED)
def test_one_rank_refuses_a_call(ranks, reason):
    plan = [("forward", 0, {}), ("forward", 1, {1: reason}), ("forward", 2, {}), ("forward", 3, {})]
    check(group(ranks, plan), group(ranks, without_refusals(plan)), plan)


def test_the_very_first_call_is_refused():
    plan = [("forward", 0, {0: "shape"}), ("forward", 1, {})]
    check(group(2, plan), group(2, without_refusals(plan)), plan)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_one_rank_refuses_a_pass_of_a_training_step(ranks, where):
    plan = [("train", 0, {}), ("train", 1, {ranks - 1: where}), ("train", 2, {}), ("forward", 3, {})]
    check(group(ranks, plan), group(ranks, without_refusals(plan)), plan)


ALIKE = {
    "two alike": {1: "shape", 2: "shape"},
    "all but one": {0: "dtype", 2: "dtype", 3: "dtype"},
    "all alike": dict.fromkeys(range(4), "option"),
    "each for another reason": {0: "shape", 1: "dtype", 2: "placement", 3: "limit"},
    "two for different reasons": {0: "shape", 2: "option"},
}


@pytest.mark.parametrize("options", [{}, {"machines": (0, 0, 1, 1)}, {"machines": (0, 1, 1, 2)}], ids=str)
@pytest.mark.parametrize("return_mode", ["direct", "reduced"])
@pytest.mark.parametrize("which", ALIKE)
def test_several_ranks_refuse_a_call(which, return_mode, options):
    plan = [("forward", 0, {}), ("forward", 1, ALIKE[which]), ("forward", 2, {}), ("forward", 3, {})]
    options = options | {"return_mode": return_mode}
    check(group(4, plan, **options), group(4, without_refusals(plan), **options), plan)


def test_several_ranks_refuse_a_backward_pass():
    plan = [("train", 0, {1: "backward", 2: "backward"}), ("train", 1, dict.fromkeys(range(4), "backward"))]
    plan += [("train", 2, {})]
    check(group(4, plan), group(4, without_refusals(plan)), plan)


@pytest.mark.parametrize("sleepy", [(0,), (1,), (0, 2)], ids=str)
def test_calls_in_a_row_are_refused_by_ranks_that_are_ahead_or_behind(sleepy):
    plan = [
        ("forward", 0, {}),
        ("forward", 1, {1: "shape"}),
        ("forward", 2, {1: "dtype"}),
        ("forward", 3, {1: "trace"}),
    ]
    plan += [("forward", 4, {0: "shape", 1: "option"}), ("forward", 5, {2: "shape"}), ("forward", 6, {})]
    check(group(3, plan, sleepy=sleepy), group(3, without_refusals(plan)), plan)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("bad", BAD)
def test_a_bad_row_is_no_refusal(ranks, bad):
    """A rank with a bad row has made the call, so the other ranks' results are right, even if the next call is refused
    by that rank."""
    plan = [
        ("forward", 1, {}),
        ("forward", 2, {1: bad}),
        ("forward", 3, {1: "shape"}),
        ("forward", 2, {0: "dtype", 1: bad}),
        ("forward", 4, dict.fromkeys(range(ranks), bad)),
        ("forward", 5, {}),
    ]
    check(group(ranks, plan), group(ranks, without_refusals(plan)), plan)


def random_plan(seed: int, ranks: int, count: int) -> list[Any]:
    """A tenth of the calls is refused on some ranks. Up to a tenth each has rows with NaN, an expert that is never
    chosen, ids that name no expert, and bad rows on some ranks."""
    rng = np.random.default_rng(seed)
    plan = []
    for _ in range(count):
        kind = "train" if rng.random() < 0.2 else "forward"
        special = str(rng.choice(["", *list(SPECIAL)[1:]], p=[0.7, 0.1, 0.1, 0.1]))
        if special and (kind == "forward" or special == "NaN rows"):
            kind += ":" + special
        layer, wrong = int(rng.integers(6)), {}
        who = [int(p) for p in rng.permutation(ranks)[: int(rng.integers(1, ranks + 1))]]
        if rng.random() < 0.1:
            reasons = list(REFUSED) if kind.startswith("forward") else [str(rng.choice(["forward", "backward"]))]
            if special == "given":
                reasons = [each for each in reasons if "ids" not in each]
            wrong = {p: str(rng.choice(reasons)) for p in who}
        elif rng.random() < 0.1 and kind == "forward":
            wrong = {p: str(rng.choice(list(BAD))) for p in who if len(tokens_of(p, layer)) != 0}
        plan.append((kind, layer, wrong))
    return plan


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("return_mode", ["direct", "reduced"])
def test_random_calls(ranks, return_mode):
    plan = random_plan(ranks, ranks, max(1, RANDOM_CALLS // 4))
    options = {"return_mode": return_mode}
    kinds = [f"forward:{each}" for each in SPECIAL] + ["forward", "train", "train:NaN rows"]
    layers = [(kind, layer, {}) for kind in kinds for layer in range(6)]
    once = group(ranks, layers, **options)
    assert all(name == "ok" for outcomes in once for name, _ in outcomes)
    right = [[outcomes[layers.index((kind, layer, {}))] for kind, layer, _ in plan] for outcomes in once]
    check(group(ranks, plan, **options), right, plan)


def _refuses_and_leaves(rank: int, ranks: int, name: str) -> list[Outcome]:
    with flashmoe.Context(rank=rank, ranks=ranks, name=name, timeout=2.0, processors=1, **SIZES) as ctx:
        found = [outcome_of(lambda: forward(ctx, rank, 0, "shape" if rank == 1 else None))]
        if rank != 1:
            found.append(outcome_of(lambda: forward(ctx, rank, 1, None)))
        return found


def test_a_rank_refuses_a_call_and_makes_no_more():
    _pools.setdefault(2, RankPool(2))
    found = _pools[2].call(_refuses_and_leaves, [()] * 2)
    (name, said), (later, _) = found[0]
    assert (name, said) == ("GroupError", f"rank 1 refused call 1: {found[1][0][1]}")
    assert later == "PeerTimeout"


def _refuses_twice(rank: int, ranks: int, name: str, over: Path) -> list[Outcome]:
    with flashmoe.Context(rank=rank, ranks=ranks, name=name, timeout=2.0, processors=1, **SIZES) as ctx:
        if rank == 0:
            end = time.monotonic() + TIMEOUT
            while not over.exists() and time.monotonic() < end:
                time.sleep(0.01)
            return []
        found = [outcome_of(lambda: forward(ctx, rank, 0, "shape")) for _ in range(3)]
        over.touch()
        return found


def test_a_wait_for_ranks_that_do_not_come_to_a_refused_call_is_bounded(tmp_path: Path):
    _pools.setdefault(2, RankPool(2))
    (first, _), (second, said), (third, _) = _pools[2].call(_refuses_twice, [(tmp_path / "over",)] * 2)[1]
    assert first == "InvalidArgument"
    assert second == "PeerTimeout"
    assert "rank 0 holds up call 1: it has not begun call 1 (it is at 0); rank 1 waited 2 s for rank 0 to leave" in said
    assert third == "InvalidArgument"


def test_a_rank_alone_tells_nobody():
    with flashmoe.Context(**SIZES) as ctx:
        right = forward(ctx, 1, 0, None)
        for reason in REFUSED:
            assert outcome_of(lambda reason=reason: forward(ctx, 1, 0, reason))[0] != "ok"
        assert forward(ctx, 1, 0, None) == right


def _traces_what_is_refused(rank: int, ranks: int, name: str) -> list[Outcome]:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    with flashmoe.Context(rank=rank, ranks=ranks, name=name, timeout=TIMEOUT, processors=1, **SIZES) as ctx:
        if rank == 0:
            with FakeTensorMode():
                bad = torch.empty(3, H), torch.empty(2, 2 * I, H).to_sparse(), torch.empty(2, H, I)
                assert outcome_of(lambda: flashmoe.moe(ctx, *bad, router=torch.empty(E, H), top_k=K))[0] != "ok"
            meta = torch.empty(3, H, device="meta"), None, None
            assert outcome_of(lambda: flashmoe.moe(ctx, *meta, top_k=K))[0] == "InvalidArgument"
        return [outcome_of(lambda: forward(ctx, rank, 0, None))]


def test_nothing_is_told_of_calls_that_are_only_traced():
    plan = [("forward", 0, {})]
    right = group(2, plan)
    assert _pools[2].call(_traces_what_is_refused, [()] * 2) == right


# ---- On several machines ---------------------------------------------------------------------------------------


def _outcome_between_machines(x: np.ndarray, seed: int, refused: bool, trains: bool) -> Outcome:
    layer = Layer.random(seed)

    def forward() -> Any:
        ctx = OPEN["it"]
        own = ctx.local_experts()[: 0 if refused else None]
        return digest(flashmoe.moe(ctx, x, layer.gate_up[own], layer.down[own], router=layer.router, top_k=3))

    return outcome_of(forward if refused or not trains else lambda: digest(*gradients(x, np.ones_like(x), seed)))


def _all_outcomes(calls: Sequence[tuple[np.ndarray, int, bool, bool]]) -> list[Outcome]:
    return [_outcome_between_machines(*each) for each in calls]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Python warns if a process with threads forks
@pytest.mark.parametrize("mode", ["direct", "reduced"])
@pytest.mark.parametrize("spread", [(0, 1), (0, 0, 1), (0, 1, 1, 0)], ids=str)
def test_calls_are_refused_between_machines(network, spread, mode):
    count, rng = 60 if LONG else 20, np.random.default_rng(len(spread))
    refused = [
        {int(p) for p in range(len(spread)) if rng.random() < 0.5} if rng.random() < 0.4 else set()
        for _ in range(count)
    ]
    x = [tokens_between([int(n) for n in rng.integers(0, 60, len(spread))], i) for i in range(count)]

    def plan(rank: int, refuses: bool) -> list[Any]:
        return [(x[i][rank], i, refuses and rank in refused[i], i % 3 == 0) for i in range(count)]

    ranks = formed(network(max(spread) + 1), spread, mode)
    right, found = (
        all_of(ranks, _all_outcomes, [(plan(p, refuses),) for p in range(len(ranks))]) for refuses in (False, True)
    )
    for i in range(count):
        for p in range(len(ranks)):
            name, said = found[p][i]
            if not refused[i]:
                assert (name, said) == right[p][i]
            elif p in refused[i]:
                assert name == "InvalidArgument"
            else:
                assert name == "GroupError"
                who, _, why = said.partition(" refused call ")
                q = int(who.removeprefix("rank "))
                assert q in refused[i]
                assert why.partition(": ")[2] == found[q][i][1]
    check_leaving(ranks)
