"""Rows that cross once to each machine, and sums that come back (`reduced`).

The groups are on several hosts, or on one host whose ranks are told that they are on several. The tests compute what
crosses, and the order of sums, from the routing alone.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import flashmoe
import ml_dtypes
import numpy as np
import pytest
from flashmoe.contexts.memory import plan_memory
from hosts import answer, network
from processes import Processes, processes
from spread_ranks import (
    LONG,
    OPEN,
    H,
    I,
    K,
    Layer,
    MakeNetwork,
    all_of,
    check_leaving,
    compute,
    crossed,
    enter,
    formed,
    gradients,
    last_call,
    nightly,
    token_blocks,
    tokens_of,
)

__all__ = ["network", "processes"]  # fixtures

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # forks of a process with threads warn

EXPERTS = 8
COUNTS = [37, 0, 150, 9, 64, 1, 20, 33]
"""How many tokens each rank has: uneven numbers, and one rank has none."""
SPREADS = [[0, 1, 1], [0, 0, 1, 1, 2, 2, 0, 1]]
MORE_SPREADS = [[0, 1], [0, 0, 1, 2, 2], [0, 1, 1, 0], [0, 1, 1, 1, 1, 1, 0], [0, 0, 1, 0, 1, 2]]


# ---- The definition ------------------------------------------------------------------------------------------


class Spread:
    """Which ranks are on which machine, and which of them is a machine's relay."""

    def __init__(self, machine: Sequence[int]) -> None:
        self.of = list(machine)
        self.ranks = {m: [p for p, other in enumerate(machine) if other == m] for m in machine}

    def place(self, p: int) -> int:
        return self.ranks[self.of[p]].index(p)

    def relay(self, p: int, machine: int) -> int:
        """The rank that is the relay of a machine for source p."""
        there = self.ranks[machine]
        return there[self.place(p) % len(there)]


def owners(ranks: int) -> np.ndarray:
    """The rank of each of the 8 experts: contiguous shares, larger ones on the first ranks."""
    return np.repeat(np.arange(ranks), [EXPERTS // ranks + (q < EXPERTS % ranks) for q in range(ranks)])


def tokens_on(ids: np.ndarray, owner: np.ndarray, ranks: Sequence[int]) -> int:
    """How many tokens have an expert on at least one of these ranks."""
    return int(np.isin(owner[ids], ranks).any(axis=1).sum())


def two_levels(rows: np.ndarray, owner: np.ndarray, home: int, spread: Spread) -> np.ndarray:
    """The sum of a token's rows, float32 [K, H], in the group's order. `owner`: the rank of each row. A rank sums its
    rows by ascending k, a relay sums the ranks of its machine in order, and home sums what it gets, by sending rank."""
    total = np.zeros(H, np.float32)
    for q in range(len(spread.of)):
        if spread.of[q] == spread.of[home]:
            parts, sums = [q], False
        else:
            parts, sums = spread.ranks[spread.of[q]], True
            if spread.relay(home, spread.of[q]) != q:
                continue
        if not np.isin(owner, parts).any():
            continue
        machine = np.zeros(H, np.float32)
        for part in parts:
            own = np.zeros(H, np.float32)
            for row in rows[owner == part]:
                own += row
            if sums:
                machine += own
            else:
                machine = own
        total += machine
    return total


# ---- Ranks of one machine that are told to be of several -----------------------------------------------------


def told_to_be(processes: Processes, spread: Sequence[int], mode: str, **options: Any) -> list[Any]:
    ranks = [processes.start(answer) for _ in spread]
    enter_with = functools.partial(enter, **options)
    each = [(p, len(spread), None, mode, 30.0, processes.name, spread) for p in range(len(spread))]
    joined = all_of(ranks, enter_with, each)
    assert all(isinstance(one, float) for one in joined), joined
    return ranks


def rows_of(x: np.ndarray, seed: int, ids: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """What each choice adds to its token, float32 [T, K, H]: a rank alone makes a call for each k, with one choice."""
    layer = Layer.random(seed)
    return np.stack(
        [
            flashmoe.moe(
                OPEN["it"], x, layer.gate_up, layer.down, topk_ids=i[:, None].copy(), topk_weights=w[:, None].copy()
            )
            for i, w in zip(ids.T, weights.T, strict=True)
        ],
        axis=1,
    )


@pytest.fixture(scope="module")
def alone() -> Any:
    enter(0, 1, None)
    yield
    OPEN.pop("it").close()


@pytest.mark.parametrize("mode", ["direct", "reduced"])
@pytest.mark.parametrize("spread", SPREADS + (MORE_SPREADS if LONG else []), ids=str)
def test_bits_and_rows_on_one_machine(processes: Processes, alone: None, spread: list[int], mode: str):
    """`direct` has the bits of one rank, and `reduced` those of sums by rank and then by machine. A row is written once
    to every other machine that needs it, and there once to each further rank that needs it."""
    ranks, where, owner = told_to_be(processes, spread, mode), Spread(spread), owners(len(spread))
    xs = tokens_of(COUNTS[: len(spread)], 11)
    ys = all_of(ranks, compute, [(x, 11, 5) for x in xs])
    reports = all_of(ranks, last_call, [()] * len(ranks))
    ids = [report.topk_ids for report in reports]
    for p, (x, y, report) in enumerate(zip(xs, ys, reports, strict=True)):
        if len(x) != 0:
            rows = rows_of(x, 11, report.topk_ids, report.topk_weights)
            for t in range(len(x)):
                if mode == "reduced":
                    expected = two_levels(rows[t], owner[report.topk_ids[t]], p, where)
                else:
                    expected = np.add.reduce(rows[t], axis=0, dtype=np.float32)
                assert np.array_equal(y[t], expected), (p, t)
        others = [q for q in where.ranks[where.of[p]] if q != p]
        sent = sum(tokens_on(ids[p], owner, [q]) for q in others)
        sent += sum(tokens_on(ids[p], owner, there) for m, there in where.ranks.items() if m != where.of[p])
        back = 0
        for source in range(len(spread)):
            if where.of[source] == where.of[p]:
                mine = tokens_on(ids[source], owner, [p]) if mode == "reduced" else int((owner[ids[source]] == p).sum())
                back += mine if source != p else 0
                continue
            is_relay = where.relay(source, where.of[p]) == p
            if is_relay:
                sent += sum(tokens_on(ids[source], owner, [q]) for q in others)
            if mode == "direct":
                back += int((owner[ids[source]] == p).sum())
            elif is_relay:
                back += tokens_on(ids[source], owner, where.ranks[where.of[p]])
        assert (report.rows_sent, report.return_rows_sent) == (sent, back), p
    check_leaving(ranks, on_hosts=False)


def heap_bytes() -> int:
    return OPEN["it"].heap_bytes


@pytest.mark.parametrize("mode", ["direct", "reduced"])
def test_the_plan_has_what_relays_need(processes: Processes, mode: str):
    spread = [0, 1, 1, 1]
    ranks = told_to_be(processes, spread, mode)
    sizes = {"max_tokens": 200, "hidden": H, "intermediate": I, "experts": EXPERTS, "top_k": K, "dtype": "float32"}
    plan = plan_memory(ranks=len(spread), machines=spread, return_mode=mode, processors=1, **sizes)
    assert all_of(ranks, heap_bytes, [()] * len(ranks)) == [plan.heap_bytes] * len(ranks)
    check_leaving(ranks, on_hosts=False)


# ---- On several hosts ----------------------------------------------------------------------------------------


def bits_of(x: np.ndarray, seed: int, calls: int) -> np.ndarray:
    """The bits of y in calls in bfloat16, whose rows are rounded before they travel; all calls have the same bits."""
    ctx, layer = OPEN["it"], Layer.random(seed)
    own = ctx.local_experts()
    x, gate_up, down, router = (
        each.astype(ml_dtypes.bfloat16) for each in (x, layer.gate_up[own], layer.down[own], layer.router)
    )
    ys = [flashmoe.moe(ctx, x, gate_up, down, router=router, top_k=K) for _ in range(calls)]
    assert all(np.array_equal(y.view(np.uint16), ys[0].view(np.uint16)) for y in ys)
    return ys[0].view(np.uint16)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("spread", [[0, 1, 1, 0], [0, 0, 1, 1, 2, 2, 0, 1]], ids=str)
def test_sums_have_the_bits_of_one_machine(network: MakeNetwork, processes: Processes, spread: list[int]):
    """The bits are the same if the network carries rows and if ranks store rows to mapped memory."""
    net = network(max(spread) + 1)
    results = []
    for ranks in (formed(net, spread, "reduced"), told_to_be(processes, spread, "reduced")):
        xs = tokens_of(COUNTS[: len(spread)], 12)
        each = [(x, 12, 20) for x in xs]
        results.append((all_of(ranks, compute, each), all_of(ranks, bits_of, [(x, 12, 3) for x in xs])))
        check_leaving(ranks, on_hosts=False)
    for ours, theirs in zip(*(itertools.chain(*each) for each in results), strict=True):
        assert np.array_equal(ours, theirs)


@nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("redispatch", [False, True])
@pytest.mark.parametrize("mode", ["direct", "reduced"])
def test_gradients_have_the_bits_of_one_machine(
    network: MakeNetwork, processes: Processes, mode: str, redispatch: bool
):
    """Gradients of x, the router and weights, also if the backward pass dispatches x again."""
    spread = [0, 1, 1, 0]
    xs, dys = tokens_of([30, 41, 0, 7], 3), tokens_of([30, 41, 0, 7], 4)
    net, results = network(2), []
    for ranks in (
        formed(net, spread, mode, redispatch=redispatch),
        told_to_be(processes, [0] * 4, mode, redispatch=redispatch),
    ):
        each = [(x, dy, 3) for x, dy in zip(xs, dys, strict=True)]
        results.append(all_of(ranks, gradients, each, 200.0))  # importing PyTorch may take a minute
        check_leaving(ranks, on_hosts=False)
    for ours, theirs in zip(*(itertools.chain(*each) for each in results), strict=True):
        assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("mode", ["direct", "reduced"])
def test_what_crosses(network: MakeNetwork, mode: str):
    """Bytes and messages of a call are as docs/several_machines.md defines them. Nothing goes through the network to
    ranks of the same machine."""
    spread, counts, seed = [0, 0, 1, 1, 2], [20, 7, 33, 0, 12], 6
    net, where, owner = network(3), Spread(spread), owners(len(spread))
    ranks = formed(net, spread, mode)
    xs = tokens_of(counts, seed)
    before = all_of(ranks, crossed, [()] * len(ranks))
    all_of(ranks, compute, [(x, seed) for x in xs])
    after = all_of(ranks, crossed, [()] * len(ranks))
    blocks = all_of(ranks, token_blocks, [()] * len(ranks))
    ids = [report.topk_ids for report in all_of(ranks, last_call, [()] * len(ranks))]
    for p in range(len(ranks)):
        messages = sent = 0
        for q in range(len(ranks)):
            if spread[q] == spread[p]:
                continue
            there, here = where.ranks[spread[q]], where.ranks[spread[p]]
            messages, sent = messages + 1, sent + 64  # the call's configuration
            if where.relay(p, spread[q]) == q and blocks[p] != 0:
                messages += 1  # for the one batch that all token blocks form
                sent += tokens_on(ids[p], owner, there) * H * 4 + int(np.isin(owner[ids[p]], there).sum()) * 12
                sent += len(xs[p]) * 2 * len(there)  # 2 bytes for each token and rank
                sent += blocks[p] * sum(int((owner == rank).sum()) + 1 for rank in there) * 2  # offsets
            if mode == "direct":  # a row for each choice goes home
                messages += 1
                sent += int((owner[ids[q]] == p).sum()) * H * 4
            elif where.relay(q, spread[p]) == p and len(xs[q]) != 0:
                messages += 1
                sent += tokens_on(ids[q], owner, here) * H * 4
        got = after[p].messages - before[p].messages, after[p].bytes - before[p].bytes
        assert got == (messages, sent), p
    check_leaving(ranks)


# ---- Sizes of messages ---------------------------------------------------------------------------------------

PAPER = {"max_tokens": 4096, "hidden": 2048, "intermediate": 8, "experts": 64, "top_k": 2, "dtype": "bfloat16"}
"""The paper's layer E64, except for I, because nothing that crosses depends on I."""


def compute_paper(rank: int, tokens: int) -> None:
    rng = np.random.default_rng(rank)
    ctx = OPEN["it"]
    experts, width, hidden, k = (PAPER[name] for name in ("experts", "intermediate", "hidden", "top_k"))
    own = len(ctx.local_experts())
    ids = np.stack([rng.permutation(experts)[:k] for _ in range(tokens)]).astype(np.int32)
    zeros = [
        np.zeros(shape, ml_dtypes.bfloat16)
        for shape in ((tokens, hidden), (own, 2 * width, hidden), (own, hidden, width))
    ]
    flashmoe.moe(ctx, *zeros, topk_ids=ids, topk_weights=np.ones(ids.shape, np.float32))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", ["direct", "reduced"])
def test_messages_are_large(network: MakeNetwork, mode: str):
    """With the layer `PAPER` and 4,096 tokens a rank on three hosts, at least 90 % of the bytes are in messages of
    64 KiB or more."""
    net = network(3)
    ranks = formed(net, [0, 1, 2], mode, **PAPER)
    all_of(ranks, compute_paper, [(p, PAPER["max_tokens"]) for p in range(3)])
    for each in all_of(ranks, crossed, [()] * 3):
        assert sum(each.bytes_of_size[16:]) >= 0.9 * each.bytes > 0
        print(mode, each.messages, each.bytes, {2**n: size for n, size in enumerate(each.bytes_of_size) if size})
    check_leaving(ranks)
